"""`mine` through the command line: records out, and one line and code 2 for what cannot be."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.models import Embedder
from tests.data.rows import write_jsonl
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import WORDS, run_config, write_config, write_pairs
from tests.inference.models import encode_nothing_more
from tests.mining.test_rerank import save_model


@pytest.fixture
def mine(model, tmp_path, monkeypatch):
    """Run `mine` on some pairs with more options; returns the exit code."""
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path / "cache"))
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
    assert json.loads(Path("mined.manifest.json").read_text())["num_negatives"] == 36
    assert mine(*options) == 0
    assert "wrote 36 negatives" in capsys.readouterr().out


@pytest.mark.parametrize("levels", [[], ["--levels", "quantiles"]], ids=["plain", "levels"])
def test_an_output_called_jsonl_holds_the_same_rows_as_json_lines(levels, mine):
    options = ["--num-negatives", "4", "--margin", "null", *levels]
    for output in ("mined.parquet", "mined.jsonl"):
        assert mine(*options, output=output) == 0
    rows = [json.loads(line) for line in Path("mined.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = pq.read_table("mined.parquet").to_pylist()
    assert len(rows) == 12
    assert rows == [{name: value for name, value in row.items() if value is not None} for row in expected]


def test_a_reranker_scores_what_was_mined(mine, tmp_path, capsys):
    reranker = save_model(tmp_path / "reranker", num_labels=1)
    assert mine("--num-negatives", "2", "--margin", "null", "--reranker", reranker) == 0
    rows = pq.read_table("mined.parquet").to_pylist()
    assert [len(row["scores"]) for row in rows] == [3] * 12
    assert len(json.loads(Path("mined.manifest.json").read_text())["reranker"]["model_sha256"]) == 64
    assert mine("--reranker", str(tmp_path / "nowhere"), output="other.parquet") == 2
    assert "nowhere: cannot be loaded as a cross-encoder" in capsys.readouterr().err.splitlines()[-1]
    assert not list(Path().glob("other*"))


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
    options[4:4] = ["--min-score", "5"]
    assert mine(*options, output="five.parquet") == 0
    assert len(pq.read_table("five.parquet")) == 8

    source = {"name": "sts", "path": "mined.parquet", "symmetric": True, "query_prompt": "similar: "}
    config = run_config(tmp_path / "fit", sources=[{**source, "in_batch_negatives": False}])
    config["model"]["init_args"]["loss"]["init_args"]["in_batch_negatives"] = "off"
    config["trainer"]["max_steps"] = 2
    cli = run_trainer(["fit", "--config", write_config(tmp_path / "fit", config)])
    metrics = cli.trainer.callback_metrics
    assert cli.trainer.global_step == 2
    assert metrics["train/no_negative_fraction"] == 0
    assert metrics["train/loss"] > 1e-3


def test_levels_by_quantiles_are_one_of_each_and_reported(mine, capsys):
    options = ["--levels", "quantiles", "--margin", "null"]
    assert mine(*options) == 0
    printed = capsys.readouterr().out
    rows = pq.read_table("mined.parquet").to_pylist()
    assert [[item["level"] for item in row["negatives"]] for row in rows] == [[1, 2, 3, 4]] * 12
    assert re.search(
        r"level 4: 12 negatives, scores -?\d\.\d{3} to -?\d\.\d{3}, mean -?\d\.\d{3}; 0 records have none", printed
    )


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


def test_a_teacher_without_prompts_takes_those_given(mine, model, tmp_path, capsys):
    """E5's prefixes, which its directory does not name."""
    given = ["--query-prompt", "query: ", "--document-prompt", "passage: "]
    assert mine("--num-negatives", "3", "--margin", "null", *given, "--vectors", "vectors") == 0
    manifest = json.loads(Path("mined.manifest.json").read_text())
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


def test_array_tasks_share_the_work_and_the_last_one_reports(mine, capsys, monkeypatch):
    options = ["--num-negatives", "3", "--margin", "null", "--shard-size", "5"]
    assert mine(*options, "--task-index", "1", "--num-tasks", "2") == 0
    assert "others are missing" in capsys.readouterr().out
    for name, value in {"ID": "4", "MIN": "4", "COUNT": "2"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert mine(*options) == 0
    assert "wrote 36 negatives" in capsys.readouterr().out


def test_a_task_on_another_number_of_threads_ends_with_the_same_bytes(mine, capsys, monkeypatch):
    options = ["--num-negatives", "3", "--margin", "null", "--shard-size", "5"]
    assert mine(*options, "--output", "whole.parquet") == 0
    for index, threads in (("1", torch.get_num_threads()), ("0", 7)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert mine(*options, "--task-index", index, "--num-tasks", "2") == 0
    for name in ("{}.parquet", "{}.manifest.json"):
        assert Path(name.format("mined")).read_bytes() == Path(name.format("whole")).read_bytes()


JUDGED = ["--judgments", "judged/qrels/train.tsv"]
BAD = [
    (JUDGED, "judgments have no effect without --levels grades"),
    ([*JUDGED, "--levels", "grades", "--corpus", "pairs.jsonl"], "corpus is judged/corpus.jsonl with judgments"),
    (["--gpu-memory-gib", "8"], "gpu_memory_gib is for the exact search on a GPU"),
    (["--gpu", "--gpu-memory-gib=-1"], "gpu_memory_gib must be a finite number > 0"),
    (["--document-vectors", "[d, d]"], "document_vectors must be as many folders as there are models (1)"),
    (["--output", "mined.csv"], "output must end in .parquet or .jsonl, got 'mined.csv'"),
]


@pytest.mark.parametrize(("options", "says"), BAD, ids=[" ".join(options) for options, _ in BAD])
def test_what_cannot_be_is_one_line_and_code_2_and_nothing_is_written(options, says, mine, tmp_path, capsys):
    write_judged(tmp_path / "work", [("q0", "d0", 1), ("q1", "d1", 1)])
    assert_refused(capsys, tmp_path / "work", says, mine, *options)


def test_what_encode_made_is_not_encoded_again(mine, model, monkeypatch):
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    extra = [{"title": "the", "text": f"stranger {row}"} for row in range(3)]
    write_jsonl(Path("corpus.jsonl"), [*extra, *({"text": row["positive"]} for row in rows[::-1])])
    options = ["--num-negatives", "3", "--margin", "null", "--corpus", "corpus.jsonl"]
    assert mine(*options, "--output", "plain.parquet") == 0
    encode = ["encode", "--model", model, "--shard-size", "5"]
    assert main([*encode, "--input", "corpus.jsonl", "--output", "d"]) == 0
    queries = ["--input", "pairs.jsonl", "--columns", "{text: query}", "--role", "query", "--output", "q"]
    assert main([*encode, *queries]) == 0
    encode_nothing_more(monkeypatch)
    assert mine(*options, "--query-vectors", "q", "--document-vectors", "[d]") == 0
    plain, made = (pq.read_table(name).to_pylist() for name in ("plain.parquet", "mined.parquet"))
    assert [row["negatives"] for row in made] == [row["negatives"] for row in plain]
