import json

import pytest

from embeddings.common import InputError
from embeddings.interop.released import nomic_dense, nomic_moe, nv_embed, sentence_transformers
from embeddings.interop.released.detect import loader_of
from tests.interop.released.nomic import DENSE, MOE


@pytest.mark.parametrize(
    ("config", "is_directory", "family"),
    [
        ({"model_type": "nvembed"}, True, nv_embed),
        (DENSE, False, nomic_dense),
        (DENSE | {"moe_every_n_layers": 0, "num_experts": 0}, True, nomic_dense),
        (MOE, True, nomic_moe),
        ({"model_type": "nomic_bert", "hidden_size": 4}, True, sentence_transformers),
        ({"model_type": "bert"}, True, sentence_transformers),
    ],
)
def test_the_family_is_told_by_the_config(config, is_directory, family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_directory:
        (tmp_path / "modules.json").write_text("[]")
    assert loader_of(tmp_path) is family.load


def test_another_family_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match="model_type 'bert' is of no published family that is known here; import one"):
        loader_of(tmp_path)
