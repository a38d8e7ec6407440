import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn import functional as F

from embeddings.common import OptionError
from embeddings.inference import Encoder
from embeddings.interop.released import import_released
from embeddings.interop.released.importer import USAGES, as_used, may_want_norm, usage_name
from embeddings.interop.released.nomic import load_dense as load
from embeddings.interop.released.nomic import load_moe
from embeddings.models import Embedder
from tests.interop.released import nomic
from tests.interop.released.published import TEXTS, assert_same, describe, write_checkpoint

V1_5 = "nomic-embed-text-v1.5"


@pytest.fixture
def wide(monkeypatch):
    """Nomic's layouts at their published width, of one layer for the dense one and two for the sparse."""
    monkeypatch.setattr(nomic, "HIDDEN", 768)
    return nomic


def folder_of(wide, folder, config=nomic.DENSE, layers=1, normalize=False):
    config = config | {"n_embd": 768, "n_layer": layers}
    _, state, tokenizer = wide.nomic_folder(folder, config, layers=layers)
    # The mean of a vector's numbers, which a layer norm takes off, is not near zero.
    state[f"encoder.layers.{layers - 1}.norm2.bias"] += 0.5
    write_checkpoint(folder, config, state)
    describe(folder, 768, normalize=normalize)
    return folder, state, tokenizer


def used_as_published(state, tokenizer, prompt, width):
    """Mean of the states, layer norm over the whole vector, cut, unit length, number by number."""
    rows = []
    for text in TEXTS:
        ids = torch.tensor(tokenizer(prompt + text)["input_ids"])
        inputs = state["embeddings.word_embeddings.weight"][ids] + state["embeddings.token_type_embeddings.weight"][0]
        mean = nomic.encoder_states(state, nomic.DENSE, inputs, layers=1).mean(0)
        spread = mean - mean.sum() / 768
        spread = spread / (spread.square().sum() / 768 + 1e-5).sqrt()
        rows.append(spread[:width] / spread[:width].square().sum().sqrt())
    return torch.stack(rows)


@pytest.mark.usefixtures("travelling_code")
def test_version_1_5_gives_the_vectors_of_its_card_at_every_width(wide, tmp_path):
    folder, state, tokenizer = folder_of(wide, tmp_path / V1_5)
    made = import_released(str(folder), tmp_path / "ours")
    assert made.used_as == V1_5
    plain = load(folder).model.eval()
    for width in (768, 256, 64):
        options = {"precision": "float32", "dimensions": width}
        encoder = Encoder.from_pretrained(str(tmp_path / "ours"), device="cpu", **options)
        library = SentenceTransformer(str(tmp_path / "ours"), device="cpu", trust_remote_code=True, truncate_dim=width)
        for role, encode in (("document", library.encode_document), ("query", library.encode_query)):
            expected = used_as_published(state, tokenizer, f"search_{role}: ", width)
            assert_same(torch.from_numpy(encoder.encode(TEXTS, role=role)), expected)
            assert_same(F.normalize(torch.from_numpy(encode(TEXTS)), dim=-1), expected)
            # Without the norm they are others, even at the whole width.
            lost = torch.from_numpy(Encoder(plain, **options).encode(TEXTS, role=role))
            assert (F.normalize(lost, dim=-1) - expected).abs().max() > 1e-2


def test_the_norm_and_the_widths_stay_with_the_directory(wide, tmp_path):
    folder, _, _ = folder_of(wide, tmp_path / V1_5)
    import_released(str(folder), tmp_path / "ours")
    model = Embedder.from_pretrained(tmp_path / "ours")
    assert model.trained_widths == (768, 512, 256, 128, 64)
    assert model.norm is not None
    assert list(model.norm.parameters()) == []
    assert model.normalize
    import_released(str(tmp_path / "ours"), tmp_path / "again")
    again = Embedder.from_pretrained(tmp_path / "again")
    assert again.trained_widths == model.trained_widths
    assert again.norm is not None


def test_version_2_keeps_its_widths_and_has_no_norm(wide, tmp_path):
    folder, _, _ = folder_of(wide, tmp_path / "nomic-embed-text-v2-moe", nomic.MOE, 2, normalize=True)
    made = import_released(str(folder), tmp_path / "ours")
    assert made.used_as == "nomic-embed-text-v2-moe"
    model = Embedder.from_pretrained(tmp_path / "ours")
    assert (model.trained_widths, model.norm) == ((768, 256), None)
    plain = load_moe(folder).model
    plain.save_pretrained(tmp_path / "plain")
    vectors = [
        Encoder.from_pretrained(str(tmp_path / name), precision="float32", device="cpu").encode(TEXTS)
        for name in ("ours", "plain")
    ]
    assert np.array_equal(*vectors)


@pytest.mark.parametrize(
    ("source", "known_as", "name"),
    [
        (f"nomic-ai/{V1_5}", None, V1_5),
        (f"some/where/{V1_5}/.", None, V1_5),
        (f"cache/models--nomic-ai--{V1_5}/snapshots/0123abc", None, V1_5),
        ("some/copy", V1_5, V1_5),
        ("some/copy", None, None),
        ("nomic-ai/nomic-embed-text-v1", None, None),
        (f"{V1_5}/finetuned", None, None),
        ("nomic-ai/nomic-embed-text-v2-moe", None, None),
    ],
)
def test_the_name_decides_which_model_it_is(source, known_as, name, wide, tmp_path):
    model = load(folder_of(wide, tmp_path / "published")[0]).model
    assert usage_name(model, source, known_as) == name


def test_a_name_that_does_not_fit_is_refused_where_it_was_given_and_passed_over_where_it_was_found(tmp_path):
    folder, _, _ = nomic.nomic_folder(tmp_path / V1_5, nomic.DENSE)
    model = load(folder).model
    assert model.embedding_dim != USAGES[V1_5].widths[0]
    assert usage_name(model, str(folder)) is None
    for known_as, rule in (
        (V1_5, "cannot apply to .* which has another backbone or width"),
        ("nomic-embed-text-v2-moe", "cannot apply to .* which has another backbone or width"),
        ("nomic-embed-text-v9", f"give one of {V1_5}, nomic-embed-text-v2-moe"),
    ):
        with pytest.raises(OptionError, match=rule):
            import_released(str(folder), tmp_path / "ours", known_as=known_as)
    assert not (tmp_path / "ours").exists()


def test_a_copy_under_another_name_is_asked_about(wide, tmp_path, caplog):
    folder, _, _ = folder_of(wide, tmp_path / "copy")
    import_released(str(folder), tmp_path / "ours")
    assert "if it is a copy, add --known-as nomic-embed-text-v1.5" in caplog.text
    assert json.loads((tmp_path / "ours" / "import.json").read_text())["used_as"] is None
    caplog.clear()
    made = import_released(str(folder), tmp_path / "ours", known_as=V1_5)
    assert caplog.text == ""
    assert not may_want_norm(made.model)
    assert json.loads((tmp_path / "ours" / "import.json").read_text())["used_as"] == V1_5


def test_a_model_of_unit_length_is_not_asked_about(tmp_path):
    folder, _, _ = nomic.nomic_folder(tmp_path / "published", nomic.DENSE)
    model = load(folder).model
    assert model.normalize
    assert not may_want_norm(model)
    moe, _, _ = nomic.nomic_folder(tmp_path / "moe", nomic.MOE)
    describe(moe, nomic.HIDDEN, normalize=False)
    assert not may_want_norm(load_moe(moe).model)


def test_the_parts_of_a_model_are_the_same_after(wide, tmp_path):
    model = load(folder_of(wide, tmp_path / "published")[0]).model
    used = as_used(model, USAGES[V1_5])
    assert (used.backbone, used.pooling, used.text) == (model.backbone, model.pooling, model.text)
