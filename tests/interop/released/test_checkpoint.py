"""Reading of published folders: fields, missing numbers, tensors and tokenizer, and their errors."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from embeddings.common import InputError
from embeddings.interop.released.checkpoint import (
    Published,
    ReleasedConfig,
    ReleasedWeights,
    released_tokenizer,
    take_tensors,
)
from tests.helpers.tiny import sentencepiece_tokenizer


def config(folder, **fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return ReleasedConfig(folder / "config.json")


def test_a_missing_number_is_the_usual_one_and_is_recorded(tmp_path):
    found = config(tmp_path, size=3, inner={"size": 4}, window=None)
    assert (found.assume("size", 7), found.part("inner").assume("size", 7)) == (3, 4)
    assert (found.part("inner").assume("window", 128), found.assume("eps", 1e-5)) == (128, 1e-5)
    assert found.assumed == {"window": 128, "eps": 1e-5}


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda c: c.integer("size", 4), "has size 3, expected an integer >= 4"),
        (lambda c: c.number("flag"), "has flag True, expected a number"),
        (lambda c: c.part("inner").integer("rate"), "has inner.rate 0.5, expected an integer >= 1"),
        (lambda c: c.part("size"), "has size 3, expected an object"),
        (lambda c: c.part("inner").require(rate=1.0), "has inner.rate 0.5, but only 1.0 is supported"),
    ],
)
def test_a_field_of_another_type_is_a_one_line_error(ask, says, tmp_path):
    with pytest.raises(InputError, match=rf"config\.json: {says}"):
        ask(config(tmp_path, size=3, inner={"rate": 0.5}, flag=True))


def test_unreadable_weights_are_a_one_line_error(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match=r"contains no model\.safetensors \(pickles are not read.*; use"):
        ReleasedWeights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing at all")
    with pytest.raises(InputError, match=r"model\.safetensors: is damaged"):
        ReleasedWeights(tmp_path)


def test_the_tokenizer_is_loaded_from_its_file_despite_the_class_it_names(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nvembed"}')
    with pytest.raises(InputError, match="does not contain a tokenizer"):
        released_tokenizer(tmp_path)
    tokenizer = sentencepiece_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizer"}))
    text = "  Query:  two  spaces 7"
    found = released_tokenizer(tmp_path)
    assert found(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (found.padding_side, found.pad_token) == ("right", "</s>")


NAMES = {
    "layer.{n}.query.{kind}": Published("block.{n}.fused.{kind}", 0, 2),
    "layer.{n}.key.{kind}": Published("block.{n}.fused.{kind}", 1, 2),
    "experts": Published("piled", stacked=True),
    "head.{rest}": "out.{rest}",
}
EXPECTED = {
    "layer.3.query.weight": torch.empty(2, 5, device="meta"),
    "layer.3.key.weight": torch.empty(2, 5, device="meta"),
    "experts": torch.empty(3, 4, 5, device="meta"),
    "head.a.b": torch.empty(7, device="meta"),
}


def weights(folder, **changed):
    state = {"block.3.fused.weight": torch.randn(4, 5), "piled": torch.randn(12, 5), "out.a.b": torch.randn(7)}
    state = {name: tensor for name, tensor in (state | changed).items() if tensor is not None}
    save_file(state, folder / "model.safetensors")
    return ReleasedWeights(folder), state


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"piled": None}, "lacks 1 of the 3 tensors of toys, such as piled; use a complete copy"),
        ({"extra": torch.zeros(1)}, "has 1 tensors that toys does not have, such as extra"),
        ({"piled": torch.zeros(12, 6)}, "piled has shape (12, 6), but (12, 5) in config.json"),
        ({"block.3.fused.weight": torch.zeros(6, 5)}, "fused.weight has shape (6, 5), but (4, 5) in config.json"),
    ],
)
def test_mismatched_tensors_are_a_one_line_error(changed, says, tmp_path):
    found, _ = weights(tmp_path, **changed)
    with pytest.raises(InputError, match=re.escape(says)):
        take_tensors(found, EXPECTED, "toys", NAMES, ("block.{n}.table",))
