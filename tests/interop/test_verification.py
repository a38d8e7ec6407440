"""`verify`: a model that is served rightly is recognised, and each change of it is named."""

import copy
import json
import re
import shutil
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from embeddings.cli.main import main
from embeddings.common import TextSettings
from embeddings.inference.encoder import Encoder
from embeddings.interop.golden import AT_LIMIT, BEYOND_LIMIT, add_golden, read_golden
from embeddings.interop.onnx import write_int8_onnx, write_onnx
from embeddings.models import ClsPooling, Embedder, LastTokenPooling, LatentAttentionPooling, MeanPooling
from embeddings.models.bidirectional import make_bidirectional
from tests.helpers.embedding_server import Answer, embedding_server
from tests.helpers.tiny import bpe_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer

PROMPTS = {"query": "search_query: ", "document": "search_document: "}


def grown(model):
    """The model with larger weights: the attention of a small random model is uniform, so it hides differences."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(4 if weight.dim() == 2 and "embed" not in name else 1)
    return model


@dataclass(frozen=True)
class Served:
    """A plain server of a model, with transformers' modules only; each option is a way to serve it wrongly."""

    embedder: Any
    pooling: str = "mean"
    pool_prompt: bool = False
    prompts: Any = None
    change_ids: Any = None  # changes the ids of a text that is not truncated
    limit: int = 96
    cuts_start: bool = False
    cuts_end_token: bool = False
    has_norm: bool = True
    has_head: bool = True
    normalize: bool = True
    backbone: Any = None
    dtype: Any = torch.float32
    change_text: Any = None
    ignores_mask: bool = False
    side: str = ""  # where shorter texts of a request are padded
    width: int | None = None
    most_tokens: int | None = None  # longer texts are refused

    @torch.no_grad()
    def __call__(self, texts, role):
        embedder, rows = self.embedder, []
        backbone = copy.deepcopy(self.backbone or embedder.backbone).eval().to(self.dtype)
        all_ids = [self.ids(text, (self.prompts or embedder.text.prompts).get(role, "")) for text in texts]
        if self.most_tokens and max(len(ids) for ids, _ in all_ids) > self.most_tokens:
            return Answer(status=413, body=json.dumps({"error": "Input is too long", "error_type": "x"}).encode())
        longest = max(len(ids) for ids, _ in all_ids)
        for ids, first in all_ids:
            padding = longest - len(ids) if self.ignores_mask or self.side else 0
            pads, ones = [embedder.pad_token_id] * padding, [1] * len(ids)
            gaps = [int(self.ignores_mask)] * padding
            padded, mask = (pads + ids, gaps + ones) if self.side == "left" else (ids + pads, ones + gaps)
            inputs = {"input_ids": torch.tensor([padded]), "attention_mask": torch.tensor([mask])}
            state_LH = backbone(**inputs).last_hidden_state[0][padding if self.side == "left" else 0 :]
            weights = {"mean": torch.ones(len(state_LH)), "weighted_mean": torch.arange(1.0, len(state_LH) + 1)}
            for kind, place in (("cls", 0), ("last_token", -1)):
                weights[kind] = torch.zeros(len(state_LH))
                weights[kind][place] = 1
            weight_L = weights[self.pooling].to(self.dtype)
            weight_L[: 0 if self.pool_prompt or self.pooling == "cls" else first] = 0
            rows.append(weight_L @ state_LH / weight_L.sum())
        vector_NH = torch.stack(rows)
        parts = [embedder.norm] * self.has_norm + [embedder.head] * self.has_head
        for part in filter(None, parts):
            vector_NH = copy.deepcopy(part).to(self.dtype)(vector_NH)
        vector_NH = vector_NH[:, : self.width].float()
        return (F.normalize(vector_NH, dim=-1) if self.normalize else 3 * vector_NH).numpy()

    def ids(self, text, prompt):
        """The ids of a text, and the index of the first one that is not the prompt's."""
        embedder, text = self.embedder, self.change_text(text) if self.change_text else text
        encoded = embedder.tokenizer(prompt + text, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        first = next((place for place, (_, end) in enumerate(offsets) if end > len(prompt)), len(ids) - 1)
        first = first if prompt else 0
        end = [ids.pop()] if not embedder.text.append_eos else [embedder.tokenizer.eos_token_id]
        if self.cuts_start:
            kept = [ids[0], *ids[1:][-(self.limit - 2) :]]
            return [*kept, *end], 0 if len(ids) + 1 > self.limit else first
        ids = [*ids, *end][: self.limit] if self.cuts_end_token else ids[: self.limit - 1] + end
        ids = self.change_ids(ids) if self.change_ids else ids
        first += bool(self.change_ids) and ids[:1] == ids[1:2]
        return ids, min(first, len(ids) - 1)


def saved(folder, embedder):
    embedder.save_pretrained(folder)
    add_golden(folder)
    return SimpleNamespace(folder=folder, embedder=embedder.eval())


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Mean pooling without the prompt, a layer norm and a head."""
    torch.manual_seed(1)
    text = TextSettings(96, 96, prompts=PROMPTS, pool_prompt=False)
    parts = {"norm": nn.LayerNorm(32), "head": nn.Linear(32, 24), "text": text}
    nn.init.normal_(parts["norm"].weight)
    backbone = grown(tiny_bert(num_positions=256))
    return saved(
        tmp_path_factory.mktemp("encoder") / "model",
        Embedder(backbone, wordpiece_tokenizer(), MeanPooling(32), **parts),
    )


def decoder_of(folder, causal, tokenizer=bpe_tokenizer):
    backbone = grown(tiny_mistral())
    backbone.config.sliding_window = None
    if not causal:
        make_bidirectional(backbone)
    text = TextSettings(96, 96, prompts={"query": PROMPTS["query"]}, append_eos=True, pool_prompt=True)
    return saved(folder, Embedder(backbone, tokenizer(), LastTokenPooling(32), text=text))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Last-token pooling after an appended end-of-sequence token, without a causal mask."""
    return decoder_of(tmp_path_factory.mktemp("decoder") / "model", causal=False)


@pytest.fixture(scope="module")
def causal_decoder(tmp_path_factory):
    return decoder_of(tmp_path_factory.mktemp("causal") / "model", causal=True)


def verify(capsys, folder, *words):
    """The exit code and the line of the command."""
    capsys.readouterr()
    code = main(["verify", "--model", str(folder), *words])
    captured = capsys.readouterr()
    lines = [line for line in (captured.out if code < 2 else captured.err).splitlines() if not line.startswith("Warn")]
    assert len(lines) == 1, captured
    return code, lines[0]


def asked(capsys, model, behaviour, api, *words):
    with embedding_server(behaviour, dict(model.embedder.text.prompts)) as server:
        address = server.address + ("/embed" if api == "tei" else "/v1")
        code, line = verify(capsys, model.folder, "--url", address, *words)
    assert line.startswith(f"{server.address}/{'embed' if api == 'tei' else 'v1/embeddings'}: ")
    return code, line.partition(": ")[2]


LAST = {"pooling": "last_token", "pool_prompt": True, "has_norm": False, "has_head": False}


def test_the_golden_texts_are_sixteen_and_their_vectors_those_of_the_encoder(encoder):
    golden, content = read_golden(encoder.folder), json.loads((encoder.folder / "golden.json").read_text())
    assert len(golden.texts) == len(content["texts"]) == 16
    assert (encoder.folder / "golden.json").stat().st_size < 10_000
    ours = Encoder(encoder.embedder, precision="float32")
    for role in ("query", "document"):
        expected = ours.encode(list(golden.texts.values()), role=role)
        np.testing.assert_allclose(golden.vectors[role], expected, rtol=0, atol=2e-4)
        plain = Served(encoder.embedder)(list(golden.texts.values()), role)
        np.testing.assert_allclose(plain, expected, rtol=0, atol=1e-5)
    lengths = {
        kind: len(wordpiece_tokenizer()(PROMPTS["document"] + text)["input_ids"]) for kind, text in golden.texts.items()
    }
    assert lengths[AT_LIMIT] == 96
    assert lengths[BEYOND_LIMIT] > 140
    # Truncation may be tested on these two only.
    assert sorted(lengths.values())[-3] < 64


@pytest.mark.parametrize("api", ["openai", "tei"])
def test_a_server_that_computes_the_model_is_recognised(api, encoder, decoder, causal_decoder, capsys):
    for model, options in ((encoder, {}), (decoder, LAST), (causal_decoder, LAST)):
        code, line = asked(capsys, model, Served(model.embedder, **options), api)
        found = re.fullmatch(r"the same model, least cosine ([\d.]+) over 16 texts as queries and documents", line)
        assert code == 0, line
        assert float(found[1]) >= 0.9999
    # As vLLM and llama.cpp do with texts that are too long.
    code, line = asked(capsys, encoder, Served(encoder.embedder, most_tokens=96, limit=256), api)
    assert (code, line.partition(";")[2]) == (0, " the server refuses the text beyond the length limit")
    assert "over 15 texts" in line


def rounded(model, levels):
    """The model with each matrix rounded to so many levels."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for weight in changed.parameters():
            step = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / levels
            weight.copy_((weight / step).round() * step)
    return changed


def ascii_only(text):
    return re.sub(r"[^\x00-\x7f]+", "zz", text)


def with_tokens(*wanted):
    return {
        "change_ids": lambda ids: [
            token for place in wanted for token in (ids[1:-1] if place is None else [ids[place]])
        ]
    }


MUTATIONS = {
    "CLS": ({"pooling": "cls"}, "pooling: cls instead of mean"),
    "last token": ({"pooling": "last_token"}, "pooling: last_token instead of mean"),
    "weighted mean": ({"pooling": "weighted_mean"}, "pooling: weighted_mean instead of mean"),
    "pooled prompt": ({"pool_prompt": True}, "pooling: the prompt's tokens are pooled, which the model leaves out"),
    "no EOS": (with_tokens(0, None), "missing EOS: texts do not end with '[SEP]'"),
    "two EOS": (with_tokens(0, None, -1, -1), "doubled EOS: texts end with '[SEP]' twice"),
    "two starts": (with_tokens(0, 0, None, -1), "doubled start token: texts start with it twice"),
    "no prompts": (
        {"prompts": {"other": "x"}},
        "queries: missing prompt: texts do not start with 'search_query: '; documents: missing prompt: ",
    ),
    "two prompts": (
        {"prompts": {name: 2 * prompt for name, prompt in PROMPTS.items()}, "pool_prompt": False},
        "queries: doubled prompt: texts start with 'search_query: ' twice; documents: doubled prompt: ",
    ),
    "query prompt for documents": (
        {"prompts": {"query": PROMPTS["query"], "document": PROMPTS["query"]}},
        "prompt: texts start with the query prompt 'search_query: ', for documents only",
    ),
    "foreign prompt": (
        {"prompts": {**PROMPTS, "query": "query: "}},
        "prompt: texts start with 'query: ', which is not a prompt of the model, for queries only",
    ),
    "shorter": ({"limit": 64}, "truncation: texts are cut to 64 tokens instead of 96"),
    "other limit": ({"limit": 77}, "truncation: only the texts at or beyond the limit of 96 tokens differ"),
    "not cut": ({"limit": 250}, "truncation: texts are not cut to 96 tokens"),
    "cut without EOS": ({"cuts_end_token": True}, "truncation: long texts lose their end token"),
    "lengths": ({"normalize": False}, "normalisation: the vectors have lengths "),
    "padding": ({"ignores_mask": True}, "padding: texts are right alone and wrong in a batch"),
    "left padding": ({"side": "left"}, "padding side: texts are padded on the left, which shifts their positions"),
    "half": ({"dtype": torch.bfloat16}, "half precision: bfloat16 has such errors"),
    "cut vectors": ({"width": 8}, "another width: the first 8 of the model's 24 dimensions"),
    "no head": ({"has_head": False}, "the linear head after the pooling is left out"),
    "no norm": ({"has_norm": False}, "the layer norm after the pooling is left out"),
    "ASCII": (
        {"change_text": ascii_only},
        "another tokenizer, since some texts are right: wrong are emoji, right to left",
    ),
}


@pytest.mark.parametrize("case", MUTATIONS)
def test_each_change_of_an_encoder_is_named(case, encoder, capsys):
    options, expected = MUTATIONS[case]
    # In this small model bfloat16 has small errors. Each case is served by one API, about half of them by each.
    least = "0.99999" if case == "half" else "0.9999"
    code, line = asked(
        capsys, encoder, Served(encoder.embedder, **options), ("openai", "tei")[len(case) % 2], "--min-cosine", least
    )
    assert code == 1
    assert line.startswith(f"different: {expected}"), line
    assert re.search(r"; least cosine -?[\d.]+ over 16 texts as queries and documents$", line)


def test_another_precision_and_another_model_are_named(encoder, capsys):
    coarse = rounded(encoder.embedder.backbone, 20)
    code, line = asked(capsys, encoder, Served(encoder.embedder, backbone=coarse), "tei")
    assert (code, line.split("; ")[0]) == (1, "different: low precision: int8 or another quantisation")
    code, line = asked(capsys, encoder, Served(encoder.embedder, backbone=coarse, pooling="cls"), "openai")
    assert (code, line.split("; ")[0]) == (1, "different: pooling: cls instead of mean (and lower precision)")
    other = grown(tiny_bert(seed=5, num_positions=256))
    code, line = asked(capsys, encoder, Served(encoder.embedder, backbone=other), "tei")
    assert (code, line.split("; ")[0]) == (1, "different: another model: no single setting explains the vectors")
    code, line = asked(
        capsys, encoder, lambda texts, _: np.random.default_rng(0).normal(size=(len(texts), 48)), "openai"
    )
    assert (code, line.split("; ")[0]) == (1, "different: another model: vectors of 48 numbers instead of 24")


DECODER_MUTATIONS = {
    "mean": ({"pooling": "mean"}, "pooling: mean instead of last_token"),
    "last position": ({"side": "right"}, "padding side: the last position is pooled, which is padding on the right"),
    "lower case": ({"change_text": str.lower}, "another tokenizer or other cleaning: texts are lower-cased"),
    "newlines": (
        {"change_text": lambda text: text.replace("\n", " ")},
        "another tokenizer or other cleaning: newlines are replaced by spaces",
    ),
    "stripped": ({"change_text": str.strip}, "another tokenizer or other cleaning: outer spaces are removed"),
    "left": ({"cuts_start": True}, "truncation: "),
}


@pytest.mark.parametrize("case", DECODER_MUTATIONS)
def test_each_change_of_a_decoder_is_named(case, decoder, capsys):
    options, expected = DECODER_MUTATIONS[case]
    served = Served(decoder.embedder, **{**LAST, **options})
    code, line = asked(capsys, decoder, served, ("openai", "tei")[len(case) % 2])
    assert (code, line.startswith(f"different: {expected}")) == (1, True), line


@pytest.mark.parametrize(
    ("options", "causes"),
    [
        ({"pooling": "cls", "prompts": {"other": "x"}}, ("pooling: cls instead of mean", "missing prompt: ")),
        ({"has_norm": False, **with_tokens(0, None, -1, -1)}, ("the layer norm after the pooling", "doubled EOS: ")),
    ],
)
def test_two_changes_at_once_are_named(options, causes, encoder, capsys):
    code, line = asked(capsys, encoder, Served(encoder.embedder, **options), "openai")
    assert code == 1
    assert all(cause in line for cause in ("; and ", *causes)), line


def test_a_causal_mask_that_is_added_or_lost_is_named(decoder, causal_decoder, capsys):
    for model, other, says in (
        (decoder, causal_decoder, "tokens do not see later ones"),
        (causal_decoder, decoder, "tokens see later ones"),
    ):
        served = Served(model.embedder, backbone=other.embedder.backbone, **LAST)
        code, line = asked(capsys, model, served, "openai")
        assert (code, line.split("; ")[0]) == (1, f"different: causal mask: {says}, unlike in the model")


def test_unit_length_is_a_difference_only_where_scores_depend_on_lengths(tmp_path, capsys):
    for similarity, code in (("cosine", 0), ("dot", 1)):
        text = TextSettings(96, 96, prompts=PROMPTS)
        options = {"text": text, "normalize": False, "similarity": similarity}
        backbone = grown(tiny_bert(num_positions=256))
        embedder = Embedder(backbone, wordpiece_tokenizer(), MeanPooling(32), **options)
        model = saved(tmp_path / similarity, embedder)
        found, line = asked(capsys, model, Served(embedder), "openai")
        assert found == code
        assert ("the same model, scaled to unit length, " in line) == (code == 0)
        assert line.startswith("different: normalisation: the vectors have unit length") == (code == 1)


@pytest.mark.usefixtures("remote_code")
def test_a_library_is_asked_without_a_server(encoder, causal_decoder, tmp_path, capsys):
    for model in (encoder, causal_decoder):
        code, line = verify(capsys, model.folder)
        assert (code, line.startswith(f"{model.folder} in ours: the same model, least cosine ")) == (0, True)
        code, line = verify(capsys, model.folder, "--library", "sentence-transformers")
        assert (code, " in sentence-transformers: the same model, " in line) == (0, True), line
    code, line = verify(capsys, encoder.folder, "--precision", "bfloat16", "--min-cosine", "0.999999")
    assert (code, "in ours: different: half precision: " in line) == (1, True), line
    assert verify(capsys, encoder.folder, "--precision", "bfloat16")[0] == 0
    assert "is not there; write it with export --format onnx" in verify(capsys, encoder.folder, "--library", "onnx")[1]
    pooling = LatentAttentionPooling(32, num_latents=4, num_heads=2, head_dim=8)
    latent = Embedder(tiny_bert(), wordpiece_tokenizer(), pooling, text=TextSettings(96, 96))
    model = saved(tmp_path / "latent", latent)
    code, line = verify(capsys, model.folder, "--library", "sentence-transformers")
    assert (code, line.endswith("add --trust-code if you trust the directory")) == (2, True)
    assert verify(capsys, model.folder, "--library", "sentence-transformers", "--trust-code")[0] == 0


def changed(folder, encoder, **parts):
    """Another version of the model, with the golden vectors of the first."""
    names = ("backbone", "tokenizer", "pooling", "norm", "head", "text", "normalize")
    Embedder(**{**{name: getattr(encoder.embedder, name) for name in names}, **parts}).save_pretrained(folder)
    encoder.embedder.eval()
    shutil.copyfile(encoder.folder / "golden.json", folder / "golden.json")
    return folder


def test_a_setting_of_the_directory_that_has_changed_is_named(encoder, tmp_path, capsys):
    text = encoder.embedder.text
    other = copy.deepcopy(encoder.embedder.head)
    nn.init.normal_(other.weight)
    for number, (parts, says) in enumerate(
        [
            ({"pooling": ClsPooling(32)}, "pooling was 'mean' in golden.json and is 'cls'"),
            ({"text": replace(text, prompts={**PROMPTS, "query": "q: "})}, "prompts was {"),
            ({"text": replace(text, document_max_length=48)}, "document_max_length was 96 in golden.json"),
            ({"head": other}, "another model: weights after the backbone, or the libraries, are not"),
            (
                {"backbone": tiny_bert(seed=3, num_positions=256)},
                "another model: the directory's weights are not those",
            ),
            ({"normalize": False}, "normalisation: the vectors have lengths"),
        ]
    ):
        code, line = verify(capsys, changed(tmp_path / str(number), encoder, **parts))
        assert (code, f": different: {says}" in line) == (1, True), line
    code, line = verify(capsys, tmp_path / "4", "--url", "http://127.0.0.1:9")
    assert (code, "golden.json: was written for other weights than" in line) == (2, True)


def test_golden_vectors_are_written_on_request(encoder, tmp_path, capsys):
    folder = tmp_path / "model"
    encoder.embedder.save_pretrained(folder)
    code, line = verify(capsys, folder)
    assert (code, "has no golden.json to compare with; write it with verify --write" in line) == (2, True)
    # Others are compared with our encoder.
    assert verify(capsys, folder, "--library", "sentence-transformers")[0] == 0
    assert main(["verify", "--model", str(folder), "--write"]) == 0
    assert "16 texts as queries and documents, 24 numbers each\n" in capsys.readouterr().out
    assert (folder / "golden.json").read_bytes() == (encoder.folder / "golden.json").read_bytes()
    assert "golden.json" in json.loads((folder / "manifest.json").read_text())["files"]
    for content in ("{}", "[]", '{"texts": {"a": 1}}'):
        (folder / "golden.json").write_text(content)
        (folder / "manifest.json").unlink(missing_ok=True)
        assert verify(capsys, folder)[0] == 2
        code, line = verify(capsys, folder, "--write")
        assert (code, "was not written by this library" in line) == (2, True)
    assert (folder / "golden.json").read_text() == content


def test_a_model_that_is_too_large_or_fails_is_left_without_golden_vectors(encoder, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "model"
    encoder.embedder.save_pretrained(folder)
    with monkeypatch.context() as patch:
        patch.setattr("embeddings.interop.golden._MAX_PRODUCTS", 1e6)
        # A model of billions of weights must not be loaded beside the one in training.
        patch.setattr(Encoder, "from_pretrained", partial(int, "not a number"))
        add_golden(folder)
    assert not (folder / "golden.json").exists()
    assert "is not written (" not in caplog.text
    monkeypatch.setattr("embeddings.interop.golden.compute_golden", partial(int, "not a number"))
    add_golden(folder)
    assert not (folder / "golden.json").exists()
    assert (
        "golden.json is not written (TypeError: " in caplog.text
        or "golden.json is not written (ValueError: " in caplog.text
    )


@pytest.mark.slow
def test_the_graphs_of_a_directory_are_asked(tmp_path, capsys):
    text = TextSettings(96, 96, prompts=PROMPTS, pool_prompt=True)
    backbone = grown(tiny_bert(num_positions=256))
    model = saved(tmp_path / "model", Embedder(backbone, wordpiece_tokenizer(), MeanPooling(32), text=text))
    write_onnx(model.folder)
    write_int8_onnx(model.folder)
    code, line = verify(capsys, model.folder, "--library", "onnx")
    assert (code, " in onnx: the same model, least cosine " in line) == (0, True), line
    code, line = verify(capsys, model.folder, "--library", "onnx-int8", "--min-cosine", "0.99999")
    assert (code, " in onnx-int8: different: low precision: int8 or another quantisation; " in line) == (1, True), line
