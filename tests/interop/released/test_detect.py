import json

import pytest

from embeddings.common import InputError, OptionError
from embeddings.interop.released import cde, llm2vec, nomic, nv_embed, sentence_transformers
from embeddings.interop.released.importer import loader_of
from tests.interop.released.nomic import DENSE, MOE


@pytest.mark.parametrize(
    ("config", "is_directory", "load"),
    [
        ({"model_type": "nvembed"}, True, nv_embed.load),
        (DENSE, False, nomic.load_dense),
        (DENSE | {"moe_every_n_layers": 0, "num_experts": 0}, True, nomic.load_dense),
        (MOE, True, nomic.load_moe),
        ({"model_type": "nomic_bert", "hidden_size": 4}, True, sentence_transformers.load),
        ({"transductive_corpus_size": 512, "embedder": "nomic-ai/nomic-bert-2048"}, True, cde.load),
        ({"model_type": "bert"}, True, sentence_transformers.load),
    ],
)
def test_the_family_is_told_by_the_config(config, is_directory, load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_directory:
        (tmp_path / "modules.json").write_text("[]")
    assert loader_of(tmp_path) is load


def test_another_family_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match="model_type 'bert' is of no published family that is known here; import one"):
        loader_of(tmp_path)


def test_an_adapter_is_one_whatever_lies_beside_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with pytest.raises(OptionError, match=r"base cannot apply: .* is no adapter"):
        loader_of(tmp_path, ["decoder"])
    (tmp_path / "adapter_config.json").write_text("{}")
    found = loader_of(tmp_path, ["decoder"])
    assert (found.func, found.keywords) == (llm2vec.load, {"base": ["decoder"]})
