"""Only planted copies, contaminated records and inconsistent pairs are removed, and a kill changes no byte."""

import json
import shutil
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError, OptionError, jobs
from embeddings.common.jobs import ArrayTask
from embeddings.data import SourceConfig, open_source
from embeddings.data.records import parse_record
from embeddings.inference import Encoder
from embeddings.mining import duplicates, filter
from embeddings.mining.duplicates import Decontaminator, EvaluationTexts
from embeddings.mining.filter import RULES, FilterRules, filter_pairs
from tests.data.rows import pairs, write_jsonl
from tests.helpers.forks import in_a_child
from tests.helpers.interrupts import interrupted_at
from tests.helpers.refusals import refused
from tests.inference.models import tiny_embedder
from tests.mining.filter_world import planted_records, run_filter, topic_vectors, write_source
from tests.mining.pair_sources import content

# Where a run is killed: the function, and the number of its call.
PLACES = [
    *((duplicates, "_write_keys", 3), (duplicates, "_compare", 1), (duplicates, "_write_reasons", 2)),
    *((filter, "_write_ranks", 2), (filter, "write_records", 1), (jobs, "write_file_manifest", 1)),
]


@pytest.fixture(autouse=True)
def _topics(monkeypatch):
    monkeypatch.setattr(Encoder, "encode", topic_vectors)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The source, and the output of one uninterrupted process."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_source(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "encode", topic_vectors)
        run_filter(config, folder / "whole.parquet")
    return config, (folder / "whole.parquet").read_bytes()


def test_each_planted_record_is_removed_by_its_rule_and_no_other_record_is(tmp_path):
    output = tmp_path / "out" / "kept.parquet"
    report = run_filter(write_source(tmp_path), output)
    planted = planted_records()
    reasons = np.load(output.parent / "kept.parquet.work" / "reasons.npy")
    assert reasons.tolist() == [reason for _, reason in planted]
    assert report.removed == dict(zip(RULES[:5], (1, 1, 2, 1, 1), strict=True))
    kept = [parse_record(record, {}, "") for record, reason in planted if reason == 0]
    assert report.num_kept == len(kept) == 41
    found = [parse_record(row, {}, "") for row in pq.read_table(output).to_pylist()]
    assert found == kept
    assert {record.score for record in found} >= {1 / 7, 2 / 7}
    manifest = json.loads((output.parent / "kept.parquet.manifest.json").read_text())
    assert (manifest["num_records"], manifest["num_kept"]) == (len(planted), 41)
    assert manifest["removed"] == report.removed
    assert manifest["rules"]["top_k"] == 2
    assert manifest["versions"]["numpy"]
    source = open_source(SourceConfig("kept", str(output)), tmp_path / "again")
    assert len(source) == 41


@pytest.mark.parametrize(("module", "name", "call"), PLACES)
def test_a_process_killed_anywhere_is_resumed_with_the_same_bytes(module, name, call, whole, tmp_path):
    config, expected = whole
    output = tmp_path / "killed" / "whole.parquet"

    def killed():
        setattr(module, name, interrupted_at(getattr(module, name), call, killed=True))
        run_filter(config, output)

    assert in_a_child(killed) == -signal.SIGKILL
    assert not output.exists()
    made = {path: path.stat().st_mtime_ns for path in output.parent.rglob("*-0*.npy")}
    assert len(made) >= 2
    run_filter(config, output)
    assert output.read_bytes() == expected
    assert made == {path: path.stat().st_mtime_ns for path in made}


def test_the_tasks_of_an_array_give_the_bytes_of_one_process(whole, tmp_path):
    config, expected = whole
    output = tmp_path / "array" / "whole.parquet"
    reports = [run_filter(config, output, ArrayTask(index, 3)) for index in (2, 0, 1)]
    assert output.read_bytes() == expected
    assert reports[0] == reports[1] == reports[2]


def test_a_finished_file_is_left_as_it_is_and_other_rules_are_refused(tmp_path):
    config, output = write_source(tmp_path), tmp_path / "whole.parquet"
    run_filter(config, output)
    before = content(tmp_path)
    run_filter(config, output)
    assert content(tmp_path) == before
    refused(InputError, r"field 'rules\.", run_filter, config, output, rules=FilterRules(near_duplicates=0.9, top_k=2))
    output.write_bytes(output.read_bytes() + b"x")
    refused(InputError, "is not the file that its manifest describes", run_filter, config, output)


def test_prompts_are_used_for_consistency_and_are_part_of_the_manifest(tmp_path, monkeypatch):
    given = []

    def spy(self, texts, prompt_name=None, *args, **options):
        given.append((options.get("role"), prompt_name))
        return directions(self, texts)

    monkeypatch.setattr(Encoder, "encode", spy)
    rows = [{"query": "q 0", "positive": "d 20"}, {"query": "q 90", "positive": "d 91"}]
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", rows)))
    options = {"encoder": Encoder(tiny_embedder(prompts={"ask": "a ", "tell": "b "})), "vectors": tmp_path / "vectors"}
    prompts = {"query_prompt_name": "ask", "document_prompt_name": "tell"}
    filter_pairs(config, tmp_path / "kept.parquet", FilterRules(), **options, **prompts)
    assert given == [("query", "ask"), ("document", "tell")] * 2
    manifest = json.loads((tmp_path / "kept.parquet.manifest.json").read_text())
    assert (manifest["rules"]["query_prompt_name"], manifest["rules"]["document_prompt_name"]) == ("ask", "tell")
    with pytest.raises(InputError, match=r"field 'rules\."):
        filter_pairs(config, tmp_path / "kept.parquet", FilterRules(top_k=2), **options)
    with pytest.raises(InputError, match="prompt_name"):
        filter_pairs(config, tmp_path / "other.parquet", FilterRules(top_k=2), **options)
    filter_pairs(config, tmp_path / "other.parquet", FilterRules(top_k=2), encoder=options["encoder"])


def directions(self, texts, *args, **options):
    """Each text has a vector at the angle in its last word."""
    angle_N = np.radians([float(text.split()[-1]) if text else 0.0 for text in texts])
    vector_ND = np.zeros((len(texts), 32), np.float32)
    vector_ND[:, 0], vector_ND[:, 1] = np.cos(angle_N), np.sin(angle_N)
    return vector_ND


def test_records_removed_by_an_earlier_rule_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(Encoder, "encode", directions)
    rows = [{"query": "q 0", "positive": "d 20"}, {"query": "q 90", "positive": "d 91"}]
    rivals = [{"query": "test 50", "positive": "d 5"}, {"query": "test 60", "positive": "d 6"}]
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", [*rows, *rivals])))
    options = {"encoder": Encoder(tiny_embedder(), precision="float32")}
    report = filter_pairs(config, tmp_path / "with.parquet", FilterRules(top_k=2), **options)
    assert report.removed["inconsistent"] == 3
    options["decontaminator"] = Decontaminator(EvaluationTexts(["Test 50", "Test 60"], []))
    report = filter_pairs(config, tmp_path / "without.parquet", FilterRules(top_k=2), **options)
    assert report.removed == {"copies": 0, "equal to an evaluation text": 2, "inconsistent": 0}


def test_pairs_far_nearer_than_every_other_document_are_easy(tmp_path, monkeypatch):
    monkeypatch.setattr(Encoder, "encode", directions)
    # Cosines of the first two queries: 0.94 with their own, 0.77 with the other; the third is alone, the last is wrong.
    angles = [(0, 20), (60, 40), (180, 185), (100, 181)]
    rows = [{"query": f"q {query}", "positive": f"d {own}"} for query, own in angles]
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", rows)))
    encoder = Encoder(tiny_embedder(), precision="float32")
    for margin, num_easy in ((0.2, 1), (1.9, 0)):
        report = filter_pairs(config, tmp_path / "kept.parquet", FilterRules(max_margin=margin), encoder=encoder)
        assert report.removed == {"copies": 0, "inconsistent": 1, "easy": num_easy}
        kept = [row["query"] for row in pq.read_table(report.output).to_pylist()]
        assert kept == ["q 0", "q 60", "q 180"][: 3 - num_easy]
        for path in tmp_path.glob("kept*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    message = r"no record would remain \(1 inconsistent, 3 easy\)"
    with pytest.raises(InputError, match=message):
        filter_pairs(config, tmp_path / "kept.parquet", FilterRules(max_margin=0.1), encoder=encoder)


def mixed_source(folder):
    """Records of two languages, mixed; between a German query and its document lie two French documents."""
    angles = [("de", 0, 20), ("fr", 7, 8), ("fr", 12, 11)]
    rows = [
        {"query": f"{language} q {start + query}", "positive": f"{language} d {start + own}", "language": language}
        for start in (0, 90, 180, 270)
        for language, query, own in angles
    ]
    return SourceConfig("a", str(write_jsonl(folder / "a.jsonl", rows))), rows


def by_language(config, output):
    rules = FilterRules(top_k=2, segment_by="language")
    return filter_pairs(config, output, rules, encoder=Encoder(tiny_embedder(), precision="float32"))


def test_only_records_of_one_language_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(Encoder, "encode", directions)
    config, rows = mixed_source(tmp_path)
    encoder = Encoder(tiny_embedder(), precision="float32")
    report = filter_pairs(config, tmp_path / "whole.parquet", FilterRules(top_k=2), encoder=encoder)
    assert report.removed["inconsistent"] == 4
    report = by_language(config, tmp_path / "parted.parquet")
    assert report.removed == {"copies": 0, "inconsistent": 0}
    # The output has the languages for the next job.
    assert [row["language"] for row in pq.read_table(report.output).to_pylist()] == [row["language"] for row in rows]
    assert json.loads((tmp_path / "parted.parquet.manifest.json").read_text())["rules"]["segment_by"] == "language"


def test_the_only_record_of_a_language_is_not_easy(tmp_path, monkeypatch):
    monkeypatch.setattr(Encoder, "encode", directions)
    rows = [("en", "q 0", "d 5"), ("en", "q 7", "d 6"), ("is", "q 90", "d 91")]
    rows = [{"query": query, "positive": document, "language": language} for language, query, document in rows]
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", rows)))
    encoder = Encoder(tiny_embedder(), precision="float32")
    for segment_by, num_easy in (("source", 1), ("language", 0)):
        by = FilterRules(max_margin=0.1, segment_by=segment_by)
        report = filter_pairs(config, tmp_path / f"{segment_by}.parquet", by, encoder=encoder)
        assert report.removed == {"copies": 0, "inconsistent": 0, "easy": num_easy}


def test_a_record_without_a_language_is_named_and_nothing_is_written(tmp_path):
    config, rows = mixed_source(tmp_path)
    del rows[4]["language"]
    write_jsonl(tmp_path / "a.jsonl", rows)
    before = content(tmp_path).keys()
    refused(InputError, r"a\.jsonl:5: the record has no language", by_language, config, tmp_path / "kept.parquet")
    assert {path for path in content(tmp_path) if not path.startswith("cache")} == before


def test_skipped_suspect_rows_do_not_shift_the_rows(tmp_path):
    rows = [*pairs(2), {"query": "q", "positive": "q"}, *pairs(3, "x"), pairs(1)[0]]
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", rows)), suspect_rows="leave_out")
    report = filter_pairs(config, tmp_path / "kept.parquet", FilterRules())
    assert report.removed == {"copies": 1}
    kept = [row["query"] for row in pq.read_table(report.output).to_pylist()]
    assert kept == ["query 0", "query 1", "xquery 0", "xquery 1", "xquery 2"]


def test_an_empty_result_is_refused(tmp_path):
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", [*pairs(1), *pairs(1)])))
    rule = Decontaminator(EvaluationTexts(["query 0"], []))
    with pytest.raises(InputError, match=r"no record would remain \(1 copies, 1 equal to an evaluation text\); loosen"):
        filter_pairs(config, tmp_path / "kept.parquet", FilterRules(), decontaminator=rule)
    assert not (tmp_path / "kept.parquet").exists()
    assert not (tmp_path / "kept.parquet.manifest.json").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"near_duplicates": 0.2}, "near_duplicates must lie between 0.5 and 1, got 0.2"),
        ({"near_duplicates": 0.8, "remove_copies": False}, "remove_copies excludes near_duplicates"),
        ({"top_k": 0}, "top_k must be >= 1, got 0"),
        ({"max_margin": 0.0}, "max_margin must be > 0 and <= 2, got 0.0"),
        ({"max_margin": 0.3}, "model must be set for top_k, max_margin"),
        ({"segment_size": 1}, "segment_size must be >= 2, got 1"),
        ({"top_k": 2}, "model must be set for top_k"),
        ({"segment_by": "language"}, "model must be set for top_k, max_margin, segment_by"),
        ({"remove_copies": False}, "leaves no active rule"),
    ],
)
def test_invalid_rules_are_refused_before_anything_is_written(options, says, tmp_path):
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", pairs(3))))
    refused(OptionError, says, lambda: filter_pairs(config, tmp_path / "kept.parquet", FilterRules(**options)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_unsuitable_sources_and_options_are_refused(tmp_path):
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", pairs(3))))
    for option in ("vectors", "query_prompt_name", "document_prompt_name", "devices"):
        with pytest.raises(OptionError, match="model must be set for top_k"):
            filter_pairs(config, tmp_path / "kept.parquet", FilterRules(), **{option: "x"})
    with pytest.raises(OptionError, match="shard_size must be >= 1, got 0"):
        filter_pairs(config, tmp_path / "kept.parquet", FilterRules(), shard_size=0)
    scored = SourceConfig("a", config.path, conversion="sts")
    refused(OptionError, "has no records to filter", filter_pairs, scored, tmp_path / "kept.parquet", FilterRules())
    mixed = [*pairs(2), {**pairs(1)[0], "negatives": ["n"]}, {**pairs(1)[0], "negatives": [{"text": "n", "level": 1}]}]
    config = SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", mixed)))
    with pytest.raises(InputError, match="some negatives have a level and others have none"):
        filter_pairs(config, tmp_path / "kept.parquet", FilterRules())
    assert not (tmp_path / "kept.parquet.work").exists()


def test_scores_of_a_teacher_stay_with_their_records(tmp_path):
    rows = [{**row, "negatives": ["n"], "scores": [float(place), None]} for place, row in enumerate(pairs(4))]
    path = write_jsonl(tmp_path / "scored.jsonl", [*rows[:2], rows[0], *rows[2:]])
    for output in ("kept.parquet", "kept.jsonl"):
        report = filter_pairs(SourceConfig("input", str(path)), tmp_path / output, FilterRules())
        assert (report.num_kept, report.removed["copies"]) == (4, 1)
        source = open_source(SourceConfig("kept", str(tmp_path / output)), tmp_path / "cache")
        scores = [row.scores for row in source.cached.table.rows(range(4))]
        assert np.nan_to_num(scores, nan=-1).tolist() == [[float(place), -1] for place in range(4)]
    plain = write_jsonl(tmp_path / "plain.jsonl", pairs(4))
    filter_pairs(SourceConfig("input", str(plain)), tmp_path / "plain.parquet", FilterRules())
    assert "scores" not in pq.read_schema(tmp_path / "plain.parquet").names
