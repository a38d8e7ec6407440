from pathlib import Path

import pytest
import torch
from torch import nn

from embeddings.common import InputError
from embeddings.models.model_files import (
    load_weights,
    read_json,
    save_weights,
    weight_files,
    weights_checksum,
    write_json,
)
from tests.helpers.tiny import tiny_bert


def test_json_comes_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"prompt": "naïve: "})
    assert read_json(tmp_path / "a.json") == {"prompt": "naïve: "}


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_json_that_cannot_be_used_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=r"a\.json: .*; take a whole copy of the model"):
        read_json(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"a\.json: .*; make it again"):
        read_json(tmp_path / "a.json", fix="make it again")


def test_weights_come_back_in_the_dtype_of_the_file(tmp_path: Path) -> None:
    saved, loaded = nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2)
    save_weights(saved, tmp_path / "w.safetensors", prefix="linear.")
    load_weights(loaded, tmp_path / "w.safetensors", prefix="linear.")
    assert torch.equal(loaded.weight, saved.weight)
    assert loaded.weight.requires_grad


def test_weights_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    save_weights(nn.Linear(3, 2), tmp_path / "w.safetensors")
    for file, layer in ((tmp_path / "w.safetensors", nn.Linear(3, 4)), (tmp_path / "no.safetensors", nn.Linear(3, 2))):
        with pytest.raises(InputError, match=r"safetensors: cannot be loaded: .*; take a whole copy of the model"):
            load_weights(layer, file)


def test_the_files_of_weights_are_the_one_there_is_or_the_shards_of_an_index(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}})
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for damaged in ({"a": "../1.safetensors"}, {"a": "1.bin"}, {"a": 1}, ["1.safetensors"], None):
        write_json(index, {"weight_map": damaged})
        with pytest.raises(InputError, match=r"name \.safetensors files beside it alone"):
            weight_files(tmp_path)


def test_a_checksum_of_weights_does_not_depend_on_their_files(tmp_path: Path) -> None:
    model = tiny_bert()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="60KB")
    assert len(weight_files(tmp_path / "several")) > 1
    checksum = weights_checksum(tmp_path / "one")
    assert weights_checksum(tmp_path / "several") == checksum
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 2] += 1e-6
    model.save_pretrained(tmp_path / "other")
    assert weights_checksum(tmp_path / "other") != checksum
    (tmp_path / "other" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read: "):
        weights_checksum(tmp_path / "other")
