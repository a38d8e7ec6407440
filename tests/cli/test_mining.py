"""`mine`, `cluster` and `filter`: their output, and one line and code 2 for user errors."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.cli.mining import evaluation_texts
from embeddings.inference import Encoder
from embeddings.models import Embedder
from tests.data.rows import write_jsonl
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import WORDS, run_config, write_config, write_pairs, write_retrieval_folder
from tests.mining.filter_world import topic_vectors


@pytest.fixture
def mine(model, tmp_path, monkeypatch):
    """Run `mine` on some pairs with more options; returns the exit code."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_pairs(folder / "pairs.jsonl", 12, num_negatives=0)

    def run(*options, models=model, output="mined.parquet"):
        return main(["mine", "--model", models, "--input", "pairs.jsonl", "--output", output, *options])

    return run


def test_pairs_become_records_with_negatives_and_a_report(mine, capsys):
    options = ["--num-negatives", "3", "--margin", "null", "--shard-size=5", "--choice", "random"]
    assert mine(*options) == 0
    printed = capsys.readouterr().out
    assert "12 queries, 12 documents" in printed
    assert re.search(r"own positive +12", printed)
    assert "wrote 36 negatives to mined.parquet" in printed
    rows = pq.read_table("mined.parquet").to_pylist()
    assert [len(row["negatives"]) for row in rows] == [3] * 12
    assert json.loads(Path("mined.parquet.manifest.json").read_text())["num_negatives"] == 36


def test_scored_pairs_are_mined_both_ways_and_train_without_in_batch_negatives(mine, tmp_path):
    """NV-Embed's semantic similarity (section 4.2): from rows with a score to a step whose negatives are mined."""
    rows = [
        {"sentence1": f"{word} {row}", "sentence2": f"the {word} {row}", "score": 5 - row % 3}
        for row, word in enumerate(WORDS[:12])
    ]
    write_jsonl(Path("sts.jsonl"), rows)
    options = ["--input", "sts.jsonl", "--conversion", "sts", "--num-negatives", "2", "--margin", "null"]
    assert mine(*options) == 0
    mined = pq.read_table("mined.parquet").to_pylist()
    kept = [row for row in rows if row["score"] >= 4]
    pairs = [(row["sentence1"], row["sentence2"]) for row in kept]
    assert [(row["query"], *row["positive"]) for row in mined] == [pair for p in pairs for pair in (p, p[::-1])]
    assert {row["score"] for row in mined} == {None}
    for row in mined:
        assert len(row["negatives"]) == 2
        assert not {row["query"], *row["positive"]} & set(row["negatives"])

    source = {"name": "sts", "path": "mined.parquet", "symmetric": True, "query_prompt": "similar: "}
    config = run_config(tmp_path / "fit", sources=[{**source, "in_batch_negatives": False}])
    config["model"]["init_args"]["loss"]["init_args"]["in_batch_negatives"] = "off"
    config["trainer"]["max_steps"] = 2
    cli = run_trainer(["fit", "--config", write_config(tmp_path / "fit", config)])
    metrics = cli.trainer.callback_metrics
    assert cli.trainer.global_step == 2
    assert metrics["train/no_negative_fraction"] == 0
    assert metrics["train/loss"] > 1e-3


def test_levels_by_grades_follow_the_judgments_of_a_folder(mine, tmp_path, capsys):
    write_judged(tmp_path / "work", [("q0", "d0", 3), ("q0", "d1", 2), ("q0", "d2", 1), ("q0", "d3", 0)])
    assert mine("--levels", "grades", "--judgments", "judged/qrels/train.tsv", "--last-rank", "4") == 0
    assert "level 1: 1 negatives" in capsys.readouterr().out
    first, *others = pq.read_table("mined.parquet").to_pylist()
    texts = [json.loads(line)["positive"] for line in Path("pairs.jsonl").read_text().splitlines()]
    assert [(item["text"], item["level"]) for item in first["negatives"]][:3] == [
        (texts[level], level) for level in (1, 2, 3)
    ]
    assert all(not row["negatives"] for row in others)


def write_judged(folder, judged):
    """A retrieval folder of the pairs in `folder`, with these judgments."""
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    (folder / "judged" / "qrels").mkdir(parents=True)
    for name, prefix, field in (("corpus", "d", "positive"), ("queries", "q", "query")):
        texts = [{"_id": f"{prefix}{row}", "text": values[field]} for row, values in enumerate(rows)]
        write_jsonl(folder / "judged" / f"{name}.jsonl", texts)
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in judged)]
    (folder / "judged" / "qrels" / "train.tsv").write_text("\n".join(lines) + "\n")


def test_a_teacher_without_prompts_uses_those_of_the_options(mine, model, tmp_path, capsys):
    """E5's prefixes, which its directory does not name."""
    given = ["--query-prompt", "query: ", "--document-prompt", "passage: "]
    assert mine("--num-negatives", "3", "--margin", "null", *given, "--vectors", "vectors") == 0
    manifest = json.loads(Path("mined.parquet.manifest.json").read_text())
    wanted = ({"text": "query: "}, {"text": "passage: "})
    assert (manifest["query_prompt_name"], manifest["document_prompt_name"]) == wanted
    named = Embedder.from_pretrained(model)
    named.text = replace(named.text, prompts={"query": "query: ", "document": "passage: "})
    named.save_pretrained(tmp_path / "named")
    options = ["--num-negatives", "3", "--margin", "null", "--output", "named.parquet", "--vectors", "of_named"]
    assert mine(*options, models=str(tmp_path / "named")) == 0
    assert pq.read_table("named.parquet").equals(pq.read_table("mined.parquet"))
    for side in ("queries", "documents"):
        found, expected = (np.load(Path(folder, side, "vectors-00000.npy")) for folder in ("vectors", "of_named"))
        np.testing.assert_array_equal(found, expected)
    says, other = "field 'prompt_name' is {'text': 'query: '}, expected None", ["--output", "other.parquet"]
    assert_refused(capsys, tmp_path / "work", says, mine, *other, "--vectors", "vectors", *given[2:])


JUDGED = ["--judgments", "judged/qrels/train.tsv"]
BAD = [
    (JUDGED, "judgments has no effect without --levels grades"),
    ([*JUDGED, "--levels", "grades", "--corpus", "pairs.jsonl"], "corpus is always judged/corpus.jsonl with these"),
    (["--document-vectors", "[d, d]"], "document_vectors must have one folder for each model (1)"),
    (["--num-probes", "4"], "num_probes needs --index ivf, got 4"),
    (["--num-lists", "4", "--index", "exact"], "num_lists needs --index ivf"),
    (["--gpu-memory-gib", "4"], "gpu_memory_gib needs --gpu and --index exact, got 4"),
    (["--gpu-memory-gib", "4", "--gpu", "true", "--index", "ivf"], "gpu_memory_gib needs --gpu and --index exact"),
    (["--output", "mined.csv"], "output must end in .parquet or .jsonl, got 'mined.csv'"),
]


@pytest.mark.parametrize(("options", "says"), BAD, ids=[" ".join(options) for options, _ in BAD])
def test_a_user_error_is_reported_in_one_line_with_code_2_and_nothing_is_written(options, says, mine, tmp_path, capsys):
    write_judged(tmp_path / "work", [("q0", "d0", 1), ("q1", "d1", 1)])
    assert_refused(capsys, tmp_path / "work", says, mine, *options)


@pytest.fixture
def source(tmp_path):
    return write_pairs(tmp_path / "pairs.jsonl", 40)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_pairs_are_clustered_and_the_same_command_again_changes_nothing(source, model, tmp_path, capsys):
    output = tmp_path / "clusters"
    line = ["cluster", "--input", str(source), "--output", str(output), "--cluster_size", "8", "--num_iterations", "3"]
    line += ["--model", model, "--precision", "float32", "--svd_dim", "6"]
    assert main(line) == 0
    assert f"wrote 5 clusters of 40 rows to {output}" in capsys.readouterr().out
    assert np.load(output / "cluster_ids.npy").max() < 5
    assert (tmp_path / "clusters.vectors").exists()
    before = content(output)
    assert main(line) == 0
    assert content(output) == before


def test_options_that_exclude_each_other_are_refused(source, tmp_path, capsys):
    line = ["cluster", "--input", str(source), "--output", str(tmp_path / "clusters"), "--model", "model"]
    assert_refused(capsys, tmp_path, "replaces cluster_size", main, [*line, "--cluster_size=4", "--num_clusters=4"])
    line = ["filter", "--input", str(source), "--output", "kept.parquet", "--no-decontaminate-documents"]
    assert_refused(capsys, tmp_path, "decontaminate_documents needs evaluation texts", main, line)
    # As of an unset variable, which would be the working folder.
    for words in (["--output="], ["--vectors", ""], ["--document_vectors="]):
        says = f"{words[0].strip('=').replace('_', '-')}: must not be empty; name a file or folder"
        assert_refused(capsys, tmp_path, says, main, [*line[:-1], *words])


def test_damaged_vectors_leave_no_output_and_the_same_command_works_once_they_are_repaired(
    source, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path.parent / f"{tmp_path.name}-cache"))
    line = ["cluster", "--input", "pairs.jsonl", "--output", "clusters", "--model", model, "--vectors", "vectors"]
    line += ["--num_clusters", "4", "--num_iterations", "2"]
    assert main(line) == 0
    shutil.rmtree("clusters")
    path = tmp_path / "vectors" / "queries" / "vectors-00000.npy"
    whole, damaged = path.read_bytes(), np.load(path)
    damaged[1] = np.nan
    np.save(path, damaged)
    says = "error: vectors/queries/vectors-00000.npy: is damaged: its bytes are not those that were written"
    assert_refused(capsys, tmp_path, says, main, line)
    path.write_bytes(whole)
    assert main(line) == 0


EMOTIONS = [
    {"text": f"i feel so {word} about the {thing} of today", "label": label}
    for label, word in enumerate(("happy", "gloomy"))
    for thing in ("weather", "journey", "letter")
]


def folder_of(path: Path, name: str, rows: list) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    write_jsonl(path / f"{name}.jsonl", rows)
    return path


def test_texts_of_all_kinds_of_evaluation_folders_are_read(tmp_path):
    path = write_retrieval_folder(tmp_path / "all" / "retrieval") / "corpus.jsonl"
    path.write_text(path.read_text().replace('"title": ""', '"title": "a title"', 1))
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
    corpus = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    # A document with a title is compared with and without it.
    assert {corpus[0], f"a title {corpus[0]}", corpus[1]} <= set(texts.documents)
    without = evaluation_texts([tmp_path / "all", tmp_path / "groups"], documents=False)
    assert without.queries == texts.queries
    assert not any(corpus[0] in text for text in without.documents)
    assert both <= set(without.documents)
    assert "asked" in texts.queries
    assert {"found", "not it"} <= set(texts.documents) - set(without.documents)


def test_a_source_is_filtered_and_the_counts_are_printed(model, tmp_path, capsys, monkeypatch):
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


def test_labelled_texts_lose_those_of_evaluation_sets(tmp_path):
    """NV-Embed §4.2: Emotion by BM25, and the clustering sets by equality, against their own test texts."""
    tested = {"text": "I feel so happy about the weather of today!", "label": "joy"}
    folder_of(tmp_path / "evaluation" / "emotion", "test", [tested, {"text": "never seen before", "label": "fear"}])
    folder_of(tmp_path / "evaluation" / "emotion", "train", [{**EMOTIONS[1], "label": "joy"}, EMOTIONS[3]])
    grouped = [{"text": EMOTIONS[5]["text"].upper(), "label": 1}, {"text": "another", "label": 2}]
    folder_of(tmp_path / "evaluation" / "clustering", "test", grouped)
    similar = {"text": "today i feel so very happy about all of the weather", "label": 0}
    same_text = {**EMOTIONS[1], "label": 1}
    write_jsonl(tmp_path / "train.jsonl", [*EMOTIONS, EMOTIONS[1], same_text, similar])
    line = ["filter", "--input", "train.jsonl", "--output", "kept.parquet", "--conversion", "class_by_example"]
    assert main([*line, "--decontaminate", "evaluation", "--bm25-threshold", "0.9"]) == 0
    removed = json.loads((tmp_path / "kept.parquet.manifest.json").read_text())["removed"]
    assert removed == {"copies": 1, "equal to an evaluation text": 2, "similar to an evaluation text": 1}
    kept = [{**row, "label": str(row["label"])} for row in (*EMOTIONS[1:5], same_text)]
    assert pq.read_table("kept.parquet").to_pylist() == kept
