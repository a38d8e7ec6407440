from transformers import AutoConfig, AutoModel

import embeddings.models.backbone  # noqa: F401 - what is tested
from embeddings.models.moe.rotary_moe import RotaryMoeConfig, RotaryMoeModel


def test_our_own_architecture_is_known_by_its_name() -> None:
    config = AutoConfig.for_model("rotary_moe", num_hidden_layers=3)
    assert type(config) is RotaryMoeConfig
    assert config.num_hidden_layers == 3
    assert AutoModel._model_mapping[RotaryMoeConfig] is RotaryMoeModel
