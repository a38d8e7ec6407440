"""Makes our own architectures known to transformers' automatic classes, which every loader here goes through."""

from transformers import AutoConfig, AutoModel

from embeddings.models.rotary_moe import RotaryMoeConfig, RotaryMoeModel

# Not in the model's own file, whose copy in a model directory must not take this one's place.
AutoConfig.register(RotaryMoeConfig.model_type, RotaryMoeConfig)
AutoModel.register(RotaryMoeConfig, RotaryMoeModel)
