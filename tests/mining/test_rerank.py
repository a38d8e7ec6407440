"""A cross-encoder's scores equal those of its library, with any number of tasks and after kills."""

import json
import math
import signal
import sys
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import BertConfig, BertForSequenceClassification, BertModel

from embeddings.common import InputError, MissingExtraError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.data import PlanEntry, SourceConfig, open_source
from embeddings.mining.mine import Reranker
from embeddings.mining.negatives import LevelRules, NegativeRules
from tests.helpers.forks import in_a_child
from tests.helpers.interrupts import interrupted_at
from tests.helpers.refusals import refused
from tests.helpers.tiny import wordpiece_tokenizer
from tests.mining import test_mine
from tests.mining.teachers import know_teachers
from tests.mining.test_mine import outputs

WORDS = ["pad", "one", "two", "sum", "fox", "dog", "quick", "brown", "lazy", "jumps", "numbers", "return"]
ROWS = [
    {
        "query": f"{WORDS[row % 12]} {WORDS[row * 5 % 7]}",
        "positive": [f"{WORDS[row % 12]} is {row}", *(["or else"] if row == 4 else [])],
        "scores": [5.0, *([6.0] if row == 4 else [])],
    }
    for row in range(22)
]


@pytest.fixture(autouse=True)
def _teachers(monkeypatch):
    know_teachers(monkeypatch)


def save_model(folder, kind=BertForSequenceClassification, seed=0, **options):
    """A small BERT with random weights; large weights give the pairs different scores."""
    tokenizer = wordpiece_tokenizer()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = kind(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **options))
    for name, parameter in model.named_parameters():
        if "LayerNorm" not in name:
            torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "reranker", num_labels=1)


run = partial(test_mine.run, rules=NegativeRules(4, None), rows=ROWS)


@pytest.mark.parametrize("levels", [None, LevelRules("quantiles")], ids=["plain", "levels"])
@pytest.mark.parametrize("output", ["mined.parquet", "mined.jsonl"])
def test_the_scores_equal_those_of_the_library_and_are_read_for_training(levels, output, cross_encoder, tmp_path):
    run(tmp_path, output, reranker=Reranker(cross_encoder, "cpu"), levels=levels)
    run(tmp_path, "bare.parquet", levels=levels)
    assert "reranker" not in json.loads((tmp_path / "bare.parquet.manifest.json").read_text())
    if output.endswith("parquet"):
        rows = pq.read_table(tmp_path / output).to_pylist()
        assert pq.read_table(tmp_path / output).drop_columns("scores").equals(pq.read_table(tmp_path / "bare.parquet"))
    else:
        rows = [json.loads(line) for line in (tmp_path / output).read_text().splitlines()]
    direct, found, expected = CrossEncoder(cross_encoder, device="cpu"), [], []
    for row in rows:
        texts = [*row["positive"], *(text if levels is None else text["text"] for text in row["negatives"])]
        assert len(texts) == len(row["scores"]) > 4
        found += row["scores"]
        expected += direct.predict([(row["query"], text) for text in texts]).tolist()
    # Padding differs between batches, so scores are not equal to the bit.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert np.std(expected) > 0.02
    source = open_source(SourceConfig("mined", str(tmp_path / output)), tmp_path / "cache")
    assert source.cached.table.has_scores
    examples = [source[PlanEntry(row, 0)] for row in range(len(rows))]
    np.testing.assert_array_equal([score for one in examples for score in one.scores], np.float32(found))


def test_kills_tasks_and_a_second_model_end_with_the_same_bytes(cross_encoder, tmp_path):
    reranker = Reranker(cross_encoder, "cpu")
    report = run(tmp_path, "whole.parquet", reranker=reranker)
    whole = outputs(tmp_path, "whole.parquet")
    assert json.loads(whole[1])["reranker"] == reranker.fields
    parts = [run(tmp_path, "parts.parquet", reranker=reranker, task=ArrayTask(index, 3)) for index in (2, 0, 1)]
    assert [part is None for part in parts] == [True, True, False]
    assert outputs(tmp_path, "parts.parquet") == whole
    score, made = reranker.scores, []
    reranker.scores = interrupted_at(score, 3, killed=True)
    assert in_a_child(lambda: run(tmp_path, "killed.parquet", reranker=reranker)) == -signal.SIGKILL
    scored = tmp_path / "killed.parquet.work" / f"scores-{reranker.fields['model_sha256'][:12]}"
    assert sorted(path.name for path in scored.glob("scores-*")) == ["scores-00000.npy", "scores-00001.npy"]
    reranker.scores = lambda pairs: made.append(len(pairs)) or score(pairs)
    assert run(tmp_path, "killed.parquet", reranker=reranker)._replace(output=report.output) == report
    assert len(made) == 3
    assert outputs(tmp_path, "killed.parquet") == whole
    # Mined shards are reused with another reranker, scores are not.
    other = Reranker(save_model(tmp_path / "other", seed=1, num_labels=1), "cpu")
    for wrong, says in ((other, "field 'reranker.model_sha256'"), (None, "field 'reranker': the output was written")):
        refused(InputError, says, run, tmp_path, "killed.parquet", reranker=wrong)
    (tmp_path / "killed.parquet").unlink()
    assert run(tmp_path, "killed.parquet", reranker=other) is not None
    assert outputs(tmp_path, "killed.parquet")[0] != whole[0]
    assert pq.read_table(tmp_path / "killed.parquet", columns=["negatives"]).equals(
        pq.read_table(tmp_path / "whole.parquet", columns=["negatives"])
    )


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (BertModel, {}, "reranker must be a cross-encoder, and the weights of BertModel have no head for scores"),
        (BertForSequenceClassification, {"num_labels": 3}, "reranker must return one score per pair, not 3"),
    ],
)
def test_a_model_that_scores_no_pairs_is_refused(kind, options, says, tmp_path):
    with pytest.raises(OptionError, match=says):
        Reranker(save_model(tmp_path / "model", kind, **options), "cpu")


def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(tmp_path, monkeypatch):
    says = r"nowhere: cannot be loaded as a cross-encoder \("
    refused(InputError, says, Reranker, str(tmp_path / "nowhere"), "cpu")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    refused(MissingExtraError, r"sentence_transformers is not installed; run: .*rerank", Reranker, str(tmp_path), "cpu")


def test_a_score_that_is_not_finite_is_named(cross_encoder):
    reranker = Reranker(cross_encoder, "cpu")
    reranker.model.predict = lambda pairs, **_: np.array([1.0, math.nan])
    refused(InputError, "the score of 'fox' with 'two' is not", reranker.scores, [("fox", "one"), ("fox", "two")])
