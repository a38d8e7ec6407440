"""`filter` on the command line."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from embeddings.cli.main import main
from embeddings.cli.mining import evaluation_texts
from embeddings.inference import Encoder
from tests.data.rows import pairs, write_jsonl
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import write_retrieval_folder
from tests.mining.filter_world import topic_vectors

EMOTIONS = [
    {"text": f"i feel so {word} about the {thing} of today", "label": label}
    for label, word in enumerate(("happy", "gloomy"))
    for thing in ("weather", "journey", "letter")
]


def folder_of(path: Path, name: str, rows: list) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    write_jsonl(path / f"{name}.jsonl", rows)
    return path


def test_the_texts_of_every_kind_of_evaluation_folder_are_read(tmp_path):
    retrieval = write_retrieval_folder(tmp_path / "all" / "retrieval")
    sts = [{"sentence1": f"one {row}", "sentence2": f"two {row}", "score": row} for row in range(2)]
    folder_of(tmp_path / "all" / "sts", "test", sts)
    labelled = [{"text": f"tested {row}", "label": row % 2} for row in range(4)]
    folder_of(tmp_path / "all" / "classes", "test", labelled)
    folder_of(tmp_path / "all" / "classes", "train", [{**row, "text": "trained"} for row in labelled])
    grouped = [{**row, "text": row["text"].replace("tested", "grouped")} for row in labelled]
    folder_of(tmp_path / "groups", "test", grouped)
    same = [{"sentence1": f"same {row}", "sentence2": "other", "label": row} for row in range(2)]
    folder_of(tmp_path / "all" / "same", "test", same)
    folder_of(tmp_path / "all" / "reranked", "test", [{"query": "asked", "positive": "found", "negatives": ["not it"]}])
    summaries = {"human_summaries": ["written"], "machine_summaries": ["computed", "drawn"], "relevance": [1, 2]}
    folder_of(tmp_path / "all" / "summaries", "test", [summaries])
    texts = evaluation_texts([tmp_path / "all", tmp_path / "groups"])
    both = {"one 0", "two 1", "tested 3", "grouped 0", "same 1", "written", "drawn"}
    assert both <= set(texts.queries) & set(texts.documents)
    assert "trained" not in {*texts.queries, *texts.documents}
    corpus = [json.loads(line)["text"] for line in (retrieval / "corpus.jsonl").read_text().splitlines()]
    assert any(corpus[0] in text for text in texts.documents)
    without = evaluation_texts([tmp_path / "all", tmp_path / "groups"], documents=False)
    assert without.queries == texts.queries
    assert not any(corpus[0] in text for text in without.documents)
    assert both <= set(without.documents)
    assert "asked" in texts.queries
    assert {"found", "not it"} <= set(texts.documents) - set(without.documents)


def test_a_source_is_filtered_and_the_counts_are_printed(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Encoder, "encode", topic_vectors)
    rows = [{"question": f"topic {row} q", "positive": f"topic {row} d {row * 71}"} for row in range(8)]
    rows += [rows[0], {"question": "tested 1", "positive": "x"}, {"question": "topic 3 again", "positive": "topic 6 y"}]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    folder_of(tmp_path / "eval", "test", [{"text": f"tested {row}", "label": row % 2} for row in range(4)])
    command = ["filter", "--model", model, "--input", "pairs.jsonl", "--output", "kept.parquet", "--top-k", "2"]
    command += ["--near-duplicates", "0.8", "--decontaminate", "eval", "--bm25-threshold=0.7"]
    command += ["--columns", "{query: question}"]
    for _ in range(2):
        assert main(command) == 0
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert lines[1:] == [
            "records 11",
            "copies 1 10",
            "near-copies 0 10",
            "equal to an evaluation text 1 9",
            "similar to an evaluation text 0 9",
            "inconsistent 1 8",
            "wrote 8 records to kept.parquet",
        ]
    kept = pq.read_table("kept.parquet").to_pylist()
    assert [row["query"] for row in kept] == [f"topic {row} q" for row in range(8)]
    command[command.index("kept.parquet")] = "kept.jsonl"
    assert main(command) == 0
    lines = (tmp_path / "kept.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{name: row[name] for name in ("query", "positive")} for row in kept]


def test_a_threshold_needs_evaluation_texts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "good.jsonl", pairs(3))
    line = ["filter", "--input", "good.jsonl", "--output", "kept.parquet", "--bm25-threshold", "0.5"]
    assert_refused(capsys, tmp_path, "bm25_threshold needs evaluation texts", main, line)


@pytest.mark.parametrize("conversion", ["class_by_example", "binary_by_label"])
def test_labelled_texts_lose_those_of_evaluation_sets(conversion, tmp_path, monkeypatch):
    """NV-Embed §4.2: Emotion by BM25, and the clustering sets by equality, against their own test texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path / "cache"))
    tested = {"text": "I feel so happy about the weather of today!", "label": "joy"}
    folder_of(tmp_path / "evaluation" / "emotion", "test", [tested, {"text": "never seen before", "label": "fear"}])
    folder_of(tmp_path / "evaluation" / "emotion", "train", [{**EMOTIONS[1], "label": "joy"}, EMOTIONS[3]])
    grouped = [{"text": EMOTIONS[5]["text"].upper(), "label": 1}, {"text": "another", "label": 2}]
    folder_of(tmp_path / "evaluation" / "clustering", "test", grouped)
    similar = {"text": "today i feel so very happy about all of the weather", "label": 0}
    same_text = {**EMOTIONS[1], "label": 1}
    write_jsonl(tmp_path / "train.jsonl", [*EMOTIONS, EMOTIONS[1], same_text, similar])
    line = ["filter", "--input", "train.jsonl", "--output", "kept.parquet", "--conversion", conversion]
    assert main([*line, "--decontaminate", "evaluation", "--bm25-threshold", "0.9"]) == 0
    removed = json.loads((tmp_path / "kept.manifest.json").read_text())["removed"]
    assert removed == {"copies": 1, "equal to an evaluation text": 2, "similar to an evaluation text": 1}
    kept = [{**row, "label": str(row["label"])} for row in (*EMOTIONS[1:5], same_text)]
    assert pq.read_table("kept.parquet").to_pylist() == kept
