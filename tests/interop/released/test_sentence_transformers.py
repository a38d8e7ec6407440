import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from embeddings.common import InputError
from embeddings.interop.released.importer import loader_of
from embeddings.interop.released.sentence_transformers import load
from embeddings.models import Embedder
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer
from tests.interop.released.published import TEXTS, assert_same, describe, encoded
from tests.models.contextual_models import tiny_contextual


def directory(folder, **settings):
    """What sentence-transformers itself reads: a BERT with a pooler that no embedding needs."""
    save_backbone(str(folder), tiny_bert(), wordpiece_tokenizer())
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | {"pooler.dense.bias": torch.zeros(32)}, weights, metadata={"format": "pt"})
    describe(folder, 32, **settings)
    return folder


def test_the_imported_model_gives_the_vectors_of_sentence_transformers(tmp_path):
    folder = directory(tmp_path / "published", prompts={"query": "question: "})
    made = load(folder)
    assert made.report.left == ["pooler.dense.bias"]
    assert "embeddings.word_embeddings.weight" in made.report.used
    made.model.save_pretrained(tmp_path / "ours")
    expected = SentenceTransformer(str(folder), device="cpu").encode_query(TEXTS)
    assert_same(encoded(tmp_path / "ours", role="query"), torch.from_numpy(expected))


def test_a_dense_layer_goes_along(tmp_path):
    folder = directory(tmp_path / "published", normalize=False)
    dense = folder / "2_Dense"
    dense.mkdir()
    shape = {"in_features": 32, "out_features": 8, "bias": True}
    (dense / "config.json").write_text(json.dumps(shape | {"activation_function": "torch.nn.modules.linear.Identity"}))
    save_file({"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}, dense / "model.safetensors")
    entries = json.loads((folder / "modules.json").read_text())
    entries.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(entries))
    load(folder).model.save_pretrained(tmp_path / "ours")
    expected = torch.from_numpy(SentenceTransformer(str(folder), device="cpu").encode(TEXTS))
    assert_same(encoded(tmp_path / "ours"), expected)


def test_what_the_folder_does_not_say_is_the_mean_of_unit_length(tmp_path):
    folder = directory(tmp_path / "published")
    (folder / "modules.json").unlink()
    embedder = load(folder).model
    assert isinstance(embedder, Embedder)
    assert (embedder.normalize, embedder.text.pool_prompt, embedder.text.document_max_length) == (True, True, 128)


def test_a_contextual_model_of_this_library_needs_no_import(tmp_path):
    tiny_contextual().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="is a model directory of this library already; use it as it is"):
        loader_of(tmp_path)(tmp_path)
