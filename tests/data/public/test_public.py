"""Public data sets: every kind through the `datasets` library, and the table, which is complete."""

import json
import re
from collections import Counter
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from embeddings.cli.parser import read_recipes
from embeddings.common import InputError, OptionError
from embeddings.common.io import atomic_path, file_sha256
from embeddings.data import SourceConfig
from embeddings.data import public as module
from embeddings.data.public import KINDS, PublicTable, fetch_source
from embeddings.data.store import open_cached
from tests.data.public.mirror import answer, question, write_data_set, write_mirror
from tests.helpers.refusals import refused

TABLE = PublicTable.read()
ASKED, ANSWER = question(0), answer(0)
NEGATIVES = [answer(500 + n) for n in range(9)]
# One source of each kind and each way to name files, with its converted first row.
CHOSEN = {
    "pairs": ("nv_embed/squad", {"query": ASKED, "positive": [ANSWER]}),
    "negatives in columns": (
        "nv_embed/nli",
        {"query": ASKED, "positive": [ANSWER], "negatives": [answer(500 + n) for n in range(7)]},
    ),
    "passages and converted files": (
        "nv_embed/mrtydi",
        {
            "query": ASKED,
            "positive": [f"A title {ANSWER}"],
            "negatives": [f"Title {n} {answer(500 + n)}" for n in range(9)],
        },
    ),
    "several splits": ("mgh/miracl", {"query": ASKED, "positive": [ANSWER], "negatives": NEGATIVES}),
    "first line": ("moe_pretrain/mc4_sw", {"query": ASKED, "positive": [ANSWER]}),
    "labelled": ("nv_embed/banking77", {"text": f"{ASKED} 0", "label": "class 0"}),
    "title and abstract": ("nv_embed/biorxiv_p2p", {"text": f"{ASKED} 0 {ASKED} 1", "label": "class 0"}),
    "first of many labels": ("nv_embed/arxiv_s2s", {"text": f"{ASKED} 0", "label": "cs.0"}),
    "tags": ("nv_embed/stackexchange_p2p", {"text": f"{ASKED} {ANSWER}", "label": "tag0"}),
    "JSON lines": ("nv_embed/reddit_p2p", {"text": f"{ASKED} 0 {ASKED} 1", "label": "class 0"}),
    "scored": ("nv_embed/sts22", {"sentence1": ASKED, "sentence2": ANSWER, "score": 5.0}),
    "beir": ("nv_embed/scifact", {"query": ASKED, "positive": [f"T0 {ANSWER}"]}),
}


def place(name):
    return TABLE.place_of(CHOSEN[name][0] if name in CHOSEN else name, None)


def fetched(source, folder, num_rows=20, limit=None, **changes):
    mirror = write_mirror(folder / "hub", [source], num_rows, **changes)
    output = folder / "out" / f"{source.name}.parquet"
    manifest = fetch_source(source, output, mirror, limit)
    return output, manifest, pq.read_table(output).to_pylist()


@pytest.mark.parametrize("name", CHOSEN)
def test_each_kind_is_converted_to_rows_that_training_reads(name, tmp_path):
    source = place(name)
    output, manifest, rows = fetched(source, tmp_path)
    count = 20 * (13 if name == "several splits" else 1)
    assert len(rows) == manifest["rows"] == count
    assert manifest["left_out"] == 0
    assert manifest["output_sha256"] == file_sha256(output)
    assert manifest["licence"] == source.licence
    assert (
        json.loads(output.with_name(f"{output.name}.manifest.json").read_text())["source"]["repository"]
        == source.repository
    )
    assert rows[0] == {**dict.fromkeys(rows[0]), **CHOSEN[name][1]}
    assert question(1) in str(rows[1])
    conversion = "class_by_example" if "label" in CHOSEN[name][1] else "sts" if source.kind == "scored" else "pairs"
    if conversion == "class_by_example":
        assert all(row["text"] and row["label"] for row in rows)
    cached = open_cached(SourceConfig("fetched", str(output), conversion))
    assert len(cached.table) == count * (2 if conversion == "sts" else 1)


class Killed(BaseException):
    """Ends a process; no code catches it."""


def kill_after_one_part(monkeypatch):
    """Each process ends before its second part."""
    monkeypatch.setattr(module, "PART_ROWS", 4)
    written = []

    def write(path):
        if path.name.startswith("rows-"):
            if written:
                written.clear()
                raise Killed
            written.append(path)
        return atomic_path(path)

    monkeypatch.setattr(module, "atomic_path", write)


@pytest.mark.parametrize("name", ["several splits", "JSON lines", "beir", "passages and converted files"])
def test_a_killed_job_resumes_after_its_last_part_with_the_same_bytes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART_ROWS", 4)
    source = replace(place(name), every=2)
    if name == "several splits":
        source = replace(source, split=source.split[:3])
    whole, _, rows = fetched(source, tmp_path / "whole", num_rows=21)
    mirror, output = tmp_path / "whole" / "hub", tmp_path / "again.parquet"
    kill_after_one_part(monkeypatch)
    kills = 0
    for _ in range(40):
        try:
            fetch_source(source, output, mirror)
            break
        except Killed:
            kills += 1
    assert kills == -(-len(rows) // 4) - 1 > 1
    assert output.read_bytes() == whole.read_bytes()
    if name == "beir":
        names = [path.with_name(f"{path.stem}.corpus.parquet") for path in (output, whole)]
        assert names[0].read_bytes() == names[1].read_bytes()


def test_a_negative_that_is_the_query_or_a_positive_is_removed(tmp_path):
    def change(source, rows):
        rows[2]["negative_1"], rows[2]["negative_4"] = answer(2), question(2)
        return rows

    rows = fetched(place("negatives in columns"), tmp_path, change=change)[2]
    assert [len(row["negatives"]) for row in rows[1:4]] == [7, 5, 7]


def test_queries_corpus_and_qrels_are_joined_into_one_pair_per_qrel(tmp_path):
    def change(source, judged):
        return [
            *judged,
            {"query-id": "q0", "corpus-id": "d5", "score": 2.0},
            {"query-id": "q1", "corpus-id": "gone", "score": 1.0},
        ]

    output, manifest, rows = fetched(place("beir"), tmp_path, change=change)
    assert [row["query"] for row in rows] == [question(row) for row in (*range(20), 0)]
    assert rows[-1]["positive"] == [f"T5 {answer(5)}"]
    assert manifest["left_out"] == 1
    documents = pq.read_table(output.with_name("scifact.corpus.parquet")).to_pylist()
    assert [row["_id"] for row in documents] == [f"d{row}" for row in range(32)]
    assert set(documents[0]) == {"_id", "title", "text"}


def test_a_limit_takes_the_first_rows_with_their_documents_and_without_it_every_kth_row_is_used(tmp_path):
    output, manifest, rows = fetched(place("beir"), tmp_path, limit=5)
    assert [row["query"] for row in rows] == [question(row) for row in range(5)]
    assert pq.read_metadata(output.with_name("scifact.corpus.parquet")).num_rows == 5
    assert manifest["limit"] == 5
    polarity = place("nv_embed/amazon_polarity")
    output, _, rows = fetched(polarity, tmp_path / "b", limit=7)
    assert len(rows) == 7
    refused(InputError, "field 'limit' is 7, expected 8", fetch_source, polarity, output, tmp_path / "b" / "hub", 8)
    reviews = place("nv_embed/amazon_reviews")
    assert reviews.every == 5
    rows = fetched(reviews, tmp_path / "c")[2]
    assert [row["text"] for row in rows] == [f"{question(row)} 0" for row in (0, 5, 10, 15)]
    assert len(fetched(replace(place("beir"), every=3), tmp_path / "d")[2]) == 7


def test_rows_without_a_text_or_with_cells_of_another_type_are_left_out_and_counted(tmp_path, caplog):
    def change(source, rows):
        rows[3]["context"], rows[4]["question"], rows[5]["context"] = None, " \n", "a\x00b"
        return rows

    _, manifest, rows = fetched(place("pairs"), tmp_path, change=change)
    assert (manifest["rows"], manifest["left_out"]) == (18, 2)
    assert "row 4: positive" in manifest["left_out_first"]
    assert rows[3]["positive"] == ["a b"]
    assert "2 rows left out" in caplog.text
    scored = place("scored")

    def change(_, rows):
        return [{**row, scored.columns["score"]: "n/a" if number == 2 else "4.5"} for number, row in enumerate(rows)]

    _, manifest, rows = fetched(scored, tmp_path / "a", change=change)
    assert (manifest["rows"], manifest["left_out"]) == (19, 1)
    assert "could not convert string to float: 'n/a'" in manifest["left_out_first"]
    assert {row["score"] for row in rows} == {4.5}
    as_text = lambda _, rows: [{**row, "score": str(row["score"])} for row in rows]  # noqa: E731
    assert len(fetched(place("beir"), tmp_path / "b", change=as_text)[2]) == 20


def test_a_finished_file_is_kept_and_a_foreign_one_refused(tmp_path):
    source = place("pairs")
    output, manifest, _ = fetched(source, tmp_path)
    again = fetch_source(source, output, tmp_path / "nowhere")
    assert again["output_sha256"] == manifest["output_sha256"]
    output.write_bytes(b"other")
    says = "is not the file that its manifest describes"
    refused(InputError, says, fetch_source, source, output, tmp_path / "hub")


def test_a_missing_changed_or_empty_data_set_is_reported_in_one_line_and_leaves_no_file(tmp_path):
    source = place("pairs")
    changed, empty = [{"question": "a", "passage": "b"}] * 4, [{"question": "a", "context": ""}] * 4
    for subsets, says in (
        (None, "hub:rajpurkar/squad: is not in"),
        ({"default": {"train": changed}}, "has no column 'context' among question, passage; the data set has changed"),
        ({"default": {"train": empty}}, r"has no usable row \(row 1: positive"),
        ({"default": {"test": changed}}, "hub:rajpurkar/squad: cannot be read"),
    ):
        if subsets is not None:
            write_data_set(tmp_path / "hub" / str(source.repository), subsets)
        refused(InputError, says, fetch_source, source, tmp_path / "out.parquet", tmp_path / "hub")
        assert not list(tmp_path.glob("out*"))


# The columns of each data set as its card lists them, typed from the cards a second time.
CARDS = {
    "nomic-ai/nomic-embed-unsupervised-data": "query document dataset shard",
    "cfli/bge-full-data": "query pos neg category type prompt pos_scores neg_scores",
    "cfli/bge-e5data": "query pos neg category type prompt pos_scores neg_scores",
    "sentence-transformers/quora-duplicates": "anchor positive",
    "sentence-transformers/trivia-qa": "query answer",
    "intfloat/multilingual_cc_news": "title maintext url date_publish",
    "castorini/mr-tydi": "query_id query positive_passages negative_passages",
}


STAGES = {"nv-embed": 2, "mgh": 1, "moe": 2, "cde": 2}


def test_every_source_of_every_data_config_is_in_the_table_and_no_other():
    wanted = {key for stage in TABLE.stages for key in stage.wanted()}
    assert Counter(stage.recipe for stage in TABLE.stages) == STAGES
    assert len(wanted) == 42 + 14 + 39 + 22 + 4
    assert {source.key for source in TABLE.sources if source.collection is None} == wanted
    assert {source.key for source in TABLE.sources} == wanted
    recipes = read_recipes()
    assert all(re.fullmatch(r"\w+/\w+", key) for key in wanted)
    for stage in TABLE.stages:
        assert f"lightning_configs/data/{stage.config}.yaml" in recipes[stage.run]["configs"].split()


def test_few_sources_are_left_out_and_each_confirmed_one_has_its_evidence():
    places = [TABLE.place_of(source.key, None) for source in TABLE.sources]
    missing, unconfirmed = (
        {place.key.partition("/")[2] for place in places if place.why_left_out and (place.kind is None) == is_missing}
        for is_missing in (True, False)
    )
    assert missing == {"bioasq", "hover", "reddit_s2s", "stackexchange_s2s"}
    assert unconfirmed == {"arguana", "stackexchange", "miracl_id", "miracl_ja", "miracl_ko"}
    for source in TABLE.sources:
        assert source.evidence or not source.confirmed, source.key


def test_columns_are_those_of_the_cards():
    compared = 0
    for source in TABLE.sources:
        if source.repository in CARDS:
            names = [one for names in source.columns.values() for one in ([names] if isinstance(names, str) else names)]
            assert set(names) <= set(CARDS[source.repository].split()), source.key
            compared += 1
    assert compared > 70


def test_the_columns_fit_the_kind():
    needed = {
        "pairs": {"query", "positive"},
        "first_line": {"text"},
        "labelled": {"text", "label"},
        "first_label": {"text", "label"},
        "scored": {"sentence1", "sentence2", "score"},
        "beir": set(),
    }
    for source in TABLE.sources:
        if source.kind is None:
            assert source.note, source.key
            continue
        extra = {"negatives"} if source.kind == "pairs" else set()
        assert needed[source.kind] <= set(source.columns) <= needed[source.kind] | extra, source.key
        assert isinstance(source.columns.get("label", ""), str), source.key
    keys = [(source.key, source.collection) for source in TABLE.sources]
    assert len(set(keys)) == len(keys)


def test_a_kind_writes_what_the_data_config_reads():
    """A file of labelled texts for a conversion by class, records or scored pairs for the others."""
    read_as = {"pairs": {"pairs", "beir", "first_line", "scored"}}
    labelled = {"labelled", "first_label"}
    compared = 0
    for stage in TABLE.stages:
        for key, config in stage.wanted().items():
            place = TABLE.place_of(key, None)
            if place.kind:
                assert place.kind in read_as.get(config.conversion, labelled), key
                assert config.columns == {}, key
                compared += 1
    assert compared == 14 + 38 + 14 + 39 + 22 + 4
    assert set(KINDS) == {source.kind for source in TABLE.sources if source.kind}


def test_an_unknown_stage_is_refused_and_a_collection_replaces_the_sources_that_it_contains():
    assert [stage.stage for stage in TABLE.stages_of("moe", None)] == ["pretrain", "finetune"]
    refused(OptionError, "stage must be 1 or 2, got '3'", TABLE.stages_of, "nv-embed", "3")
    refused(OptionError, "has no effect on mgh, which has one stage", TABLE.stages_of, "mgh", "1")
    assert TABLE.place_of("nv_embed/fever", "bge-full-data").split == "fever"
    assert TABLE.place_of("nv_embed/fever", None).repository == "mteb/fever"
    assert TABLE.place_of("nv_embed/scifact", "bge-full-data").repository == "mteb/scifact"
    assert TABLE.collections(["nv_embed/fever", "mgh/fever"]) == ["bge-full-data"]
    assert TABLE.collections(["mgh/fever"]) == []
