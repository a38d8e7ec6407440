"""The cache of converted sources: keys, kills, damage, conversions, class index, file hashes, languages."""

import hashlib
import json
import os
import re
import subprocess
from contextlib import contextmanager

import pytest

from embeddings.common import InputError
from embeddings.common.io import cache_folder
from embeddings.data import SourceConfig, conversion, sources
from embeddings.data.conversion import Facts
from embeddings.data.readers import Block
from embeddings.data.sources import HashedFile
from embeddings.data.store import (
    StoredRow,
    open_cached,
    read_languages,
    read_records,
    record_place,
)
from tests.data.rows import labelled, pairs, write_jsonl, write_rows
from tests.helpers.manifests import rewrite_manifest
from tests.helpers.processes import Command
from tests.helpers.refusals import refused

CONVERT = """
import sys
from embeddings.data import SourceConfig, conversion
from embeddings.data.store import open_cached
usual = conversion.usual_pairs
def pausing(*rows):
    print("amid", flush=True)
    sys.stdin.readline()
    return usual(*rows)
conversion.usual_pairs = pausing
print(len(open_cached(SourceConfig("a", sys.argv[1]), sys.argv[2]).table), flush=True)
"""


@contextmanager
def amid_conversion(path, root):
    """Another process that is amid the conversion and waits for a line to continue."""
    arguments = ["-c", CONVERT, str(path), str(root)]
    with Command(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "amid\n"
        yield process


def folders(root):
    return sorted(name for name in os.listdir(root) if name != "hashes")


def test_a_source_is_converted_once_for_each_content(tmp_path):
    path, root = write_jsonl(tmp_path / "a.jsonl", pairs(5)), tmp_path / "cache"
    first = open_cached(SourceConfig("a", str(path)), root)
    made = first.folder.stat()
    again = open_cached(SourceConfig("other name", str(path), instruction="i", weight=3.0, max_rows=2), root)
    assert again.folder == first.folder
    assert first.folder.stat() == made
    write_jsonl(path, pairs(6))
    assert len(open_cached(SourceConfig("a", str(path)), root).table) == 6
    assert len(folders(root)) == 2


@pytest.mark.parametrize(
    ("first", "second", "conversions_done"),
    [
        ({"columns": {"query": "text"}}, {"columns": {"query": "label"}}, 2),
        ({"conversion": "sts", "min_score": 1.0}, {"conversion": "sts", "min_score": 2.0}, 2),
        ({"conversion": "sts", "min_score": 4.0}, {"conversion": "sts"}, 1),
        ({"conversion": "class_by_example"}, {"conversion": "class_by_label"}, 1),
        ({"conversion": "class_by_example"}, {"conversion": "sts"}, 2),
    ],
)
def test_the_key_depends_only_on_options_that_change_the_stored_rows(tmp_path, first, second, conversions_done):
    extra = {"positive": "p", "sentence1": "s", "sentence2": "t", "score": 5}
    path = write_jsonl(tmp_path / "a.jsonl", [{**row, **extra} for row in labelled(2, 2)])
    for options in (first, second):
        open_cached(SourceConfig("a", str(path), **options), tmp_path / "cache")
    assert len(folders(tmp_path / "cache")) == conversions_done


def test_the_key_is_that_of_the_rows_not_of_their_files_or_columns(tmp_path):
    def key(rows, name, columns=None, **options):
        path = str(write_rows(tmp_path / name, rows))
        return open_cached(SourceConfig("a", path, columns=columns or {}, **options), tmp_path / "cache").key

    rows, classes = pairs(50), labelled(2, 3)
    first = key(rows, "a.jsonl")
    assert key(rows, "a.jsonl.gz") == key(rows, "a.parquet") == first
    renamed = [{"q": row["query"], "p": row["positive"], "id": "1"} for row in rows]
    assert key(renamed, "b.jsonl", {"query": "q", "positive": "p"}) == first
    assert key(rows[::-1], "c.jsonl") != first
    of_classes = key(classes, "d.jsonl", conversion="class_by_example")
    others = [{**row, "label": f"new {row['label']}"} for row in classes]
    assert key(others, "e.jsonl", conversion="class_by_example") != of_classes


def test_a_bad_row_and_a_file_that_changes_while_it_is_read_leave_no_conversion_behind(tmp_path, monkeypatch):
    bad = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", [*pairs(5), {"query": "q"}])))
    for _ in range(2):
        refused(InputError, r"a\.jsonl:6: field 'positive'", open_cached, bad, tmp_path / "cache")
    path, real = write_jsonl(tmp_path / "b.jsonl", pairs(5)), conversion.usual_pairs
    monkeypatch.setattr(conversion, "usual_pairs", lambda *rows: (write_jsonl(path, pairs(6)), real(*rows))[1])
    says = "the file changed while it was read"
    refused(InputError, says, open_cached, SourceConfig("a", str(path)), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_kill_amid_the_conversion_leaves_nothing_half_made_and_two_processes_may_convert_at_once(tmp_path):
    path, root = write_jsonl(tmp_path / "a.jsonl", pairs(50)), tmp_path / "cache"
    with amid_conversion(path, root) as process:
        process.kill()
    assert all(name.startswith(".") for name in os.listdir(root))
    with amid_conversion(path, root) as process:
        here = open_cached(SourceConfig("a", str(path)), root)
        assert len(here.table) == 50
        made = here.folder.stat().st_ino
        assert process.communicate("\n")[0] == "50\n"
    assert here.folder.stat().st_ino == made
    assert folders(root) == [here.folder.name]


def test_a_manifest_that_does_not_fit_is_refused(tmp_path):
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", pairs(5))))
    manifest = open_cached(config, tmp_path / "cache").folder / "manifest.json"
    fields = json.loads(manifest.read_text())
    assert fields["num_rows"] == 5
    rewrite_manifest(manifest, schema_version=0)
    says = r"manifest\.json: field 'schema_version' is 0, expected"
    refused(InputError, says, open_cached, config, tmp_path / "cache")
    rewrite_manifest(manifest, schema_version=fields["schema_version"], num_rows=6)
    refused(InputError, "the converted data is damaged", open_cached, config, tmp_path / "cache")


def test_the_cache_folder_follows_the_argument_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path))
    assert cache_folder("here").name == "here"
    assert cache_folder() == tmp_path
    monkeypatch.delenv("EMBED_CACHE")
    assert str(cache_folder()) == ".cache/embeddings"


SUSPECTS = [
    {"query": "q", "positive": ["a", "b"], "negatives": ["c", " b"]},
    {"query": "q ", "positive": "a", "negatives": ["c", "q"]},
    {"query": "q", "positive": ["a", "q\n"]},
]
NAMED = (
    r"4 suspect rows: \S+a\.jsonl:4 \(a negative is also a positive\), "
    r"\S+a\.jsonl:5 \(a negative is the query itself\), \S+a\.jsonl:6 \(a positive is the query itself\) and 1 more"
)


def test_suspect_rows_are_left_out_or_kept_with_one_line_or_all_refused(tmp_path, caplog):
    path = str(write_jsonl(tmp_path / "a.jsonl", [*pairs(3), *SUSPECTS, {"query": "r", "positive": "r"}]))
    refuse = SourceConfig("mine", path, suspect_rows="refuse")
    all_refused = rf"^source 'mine': {NAMED}; correct them, or set suspect_rows: leave_out \(or keep\)$"
    refused(InputError, all_refused, open_cached, refuse, tmp_path / "cache")
    for options, fate, count in (
        ({"suspect_rows": "keep"}, r"kept \(else suspect_rows: leave_out\)", 7),
        ({}, r"left out \(else suspect_rows: keep or refuse\)", 3),
    ):
        for _ in range(2):
            caplog.clear()
            assert len(open_cached(SourceConfig("mine", path, **options), tmp_path / "cache").table) == count
            (line,) = caplog.messages
            assert re.fullmatch(f"source mine: {NAMED}; {fate}", line)
    refused(InputError, all_refused, open_cached, refuse, tmp_path / "cache")
    path = str(write_jsonl(tmp_path / "a.jsonl", [SUSPECTS[-1]]))
    says = r"no row can be used: 1 suspect row: \S+a\.jsonl:1 \(a positive"
    refused(InputError, says, open_cached, SourceConfig("mine", path), tmp_path / "cache")


def test_records_are_read_with_all_fields_and_places_in_the_rows_of_the_table(tmp_path):
    rows = [{**row, "score": number, "id": number, "label": "a"} for number, row in enumerate(pairs(5))]
    rows.insert(2, {"query": "q", "positive": "q"})
    files = [str(write_jsonl(tmp_path / f"{name}.jsonl", part)) for name, part in (("b", rows[:4]), ("a", rows[4:]))]
    for policy, lines in (("leave_out", ["b:1", "b:2", "b:4"]), ("keep", ["b:1", "b:2", "b:3", "b:4"])):
        config = SourceConfig("a", files, suspect_rows=policy)
        cached = open_cached(config, tmp_path / "cache")
        records = [record for _, record in read_records(config, cached)]
        assert [record.query for record in records] == cached.table.queries(range(len(cached.table)))
        assert [record.score for record in records if record.query != "q"] == [0.0, 1.0, 2.0, 3.0, 4.0]
        places = [record_place(config, cached, row).rpartition("/")[2] for row in range(len(records))]
        assert places == [line.replace(":", ".jsonl:") for line in (*lines, "a:1", "a:2")]
    # A scored pair is two records.
    rows = [{"sentence1": f"a {row}", "sentence2": f"b {row}", "score": row} for row in range(6)]
    config = SourceConfig("sts", str(write_jsonl(tmp_path / "sts.jsonl", rows)), conversion="sts", min_score=3.5)
    cached = open_cached(config, tmp_path / "cache")
    records = [record for _, record in read_records(config, cached)]
    texts = ["a 4 b 4", "b 4 a 4", "a 5 b 5", "b 5 a 5"]
    assert [" ".join((record.query, *record.positives)) for record in records] == texts
    assert [record.query for record in records] == cached.table.queries(range(len(cached.table)))


def test_records_of_a_file_that_is_no_longer_the_converted_one_are_refused(tmp_path):
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", pairs(5))))
    cached = open_cached(config, tmp_path / "cache")
    reading = read_records(config, cached)
    assert next(reading)[1].query == "query 0"
    write_jsonl(tmp_path / "a.jsonl", pairs(6))
    refused(InputError, r"a\.jsonl: the file changed while it was read", list, reading)
    says = "source 'a': its files have changed since the job started; start again"
    refused(InputError, says, next, read_records(config, cached))


def convert(kind, rows, **options):
    facts, config = Facts(), SourceConfig("mine", "a.jsonl", conversion=kind, **options)
    groups = conversion.convert(config, [Block("a.jsonl", range(1, len(rows) + 1), rows)], facts)
    return [StoredRow(*row) for columns in groups for row in zip(*columns, strict=True)], facts


def test_a_record_is_stored_with_levels_and_a_label_code():
    negatives = [{"text": "m", "level": 2}, {"text": "n", "level": 1}]
    first = {"query": "q", "positive": "p", "label": "x", "negatives": negatives}
    others = [{"query": "r", "positive": ["s", "t"]}, {"query": "u", "positive": "v", "label": 7}]
    rows, facts = convert("pairs", [first, *others])
    assert rows == [
        StoredRow("q", ("p",), ("n", "m"), (1, 2), 0),
        StoredRow("r", ("s", "t"), (), (), -1),
        StoredRow("u", ("v",), (), (), 1),
    ]
    assert list(facts.labels) == ["x", "7"]
    # A class with only one text is reported with its first row.
    texts = [("one", "x"), ("two", "y"), (" one ", "x"), ("three", "y"), ("only", "z")]
    rows, facts = convert("class_by_example", [{"text": text, "label": label} for text, label in texts])
    assert [row.label for row in rows] == [0, 1, 0, 1, 2]
    assert facts.lone_class == ["x", "a.jsonl:1"]


def test_a_pair_with_a_high_score_is_used_in_both_directions_and_others_are_left_out():
    rows = [{"sentence1": f"a{s}", "sentence2": f"b{s}", "score": s} for s in (3.99, 4, 5)]
    both_ways = [StoredRow(one, (other,)) for one, other in (("a4", "b4"), ("b4", "a4"), ("a5", "b5"), ("b5", "a5"))]
    assert convert("sts", rows)[0] == both_ways
    assert len(convert("sts", rows, min_score=3.5)[0]) == 6
    rows = [{"sentence1": "a", "sentence2": "b", "score": score} for score in (0.3, 0.9)]
    refused(InputError, r"source 'mine': no pair reaches the score 4 \(the highest is 0\.9\)", convert, "sts", rows)


def test_a_file_with_a_cached_hash_is_not_read_again_until_it_changes(tmp_path, monkeypatch):
    reads, real = [], sources.file_sha256
    monkeypatch.setattr(sources, "file_sha256", lambda path: (reads.append(path), real(path))[1])
    path, cache = tmp_path / "a", tmp_path / "hashes"
    path.write_bytes(b"one")
    first = HashedFile(path, cache)
    assert first.sha256 == hashlib.sha256(b"one").hexdigest()
    first.remember()
    assert HashedFile(path, cache).sha256 == first.sha256
    assert reads == [path]
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not first.is_current()
    assert HashedFile(path, cache).sha256 == hashlib.sha256(b"two").hexdigest()
    assert len(reads) == 2
    # A cache that cannot be written is not an error; a file that cannot be read is.
    HashedFile(path, path).remember()
    refused(InputError, "gone: cannot be read", HashedFile, tmp_path / "gone", cache)


def read(folder, rows, **options):
    config = SourceConfig("a", str(write_jsonl(folder / "a.jsonl", rows)), **options)
    return read_languages(config, open_cached(config, folder / "cache")).tolist()


def test_languages_are_numbered_by_first_appearance_and_given_with_every_record(tmp_path):
    def rows(*names):
        return [row | {"language": name} for row, name in zip(pairs(len(names)), names, strict=True)]

    assert read(tmp_path, rows("de", "fr", "de", "DE", "fr")) == [0, 1, 0, 2, 1]
    says = r"a\.jsonl:2: the record has no language; give every record one, or map it"
    refused(InputError, says, read, tmp_path, rows("de", None, "de"))
