"""nomic-embed-text-v2-moe: our rotary encoder with experts, its experts laid end to end."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from embeddings.interop.released.checkpoint import Assumed, ReleasedConfig, ReleasedWeights, released_tokenizer
from embeddings.interop.released.fill import Imported, empty_model, filled_model
from embeddings.interop.released.key_map import KeyMap, Published
from embeddings.interop.released.nomic_bert import LEFT, PROMPTS, encoder_fields, encoder_names
from embeddings.interop.released.sentence_transformers import described_embedder
from embeddings.models.rotary_moe import RotaryMoeConfig

FAMILY = "Nomic's encoder with experts"
_MLP = "encoder.layers.{n}.mlp."


def load(folder: Path, assumed: Assumed | None = None) -> Imported:
    """The embedding model of a folder.

    Raises:
        InputError: If the folder does not hold a whole checkpoint of this family.
    """
    config = ReleasedConfig(folder / "config.json", assumed=assumed)
    tokenizer = released_tokenizer(folder)
    empty = empty_model(moe_config(config, tokenizer))
    state, report = KeyMap(FAMILY, _names(), LEFT).take(ReleasedWeights(folder), empty.state_dict())
    return Imported(FAMILY, described_embedder(folder, filled_model(empty, state), tokenizer, PROMPTS), report)


def moe_config(config: ReleasedConfig, tokenizer: PreTrainedTokenizerBase) -> RotaryMoeConfig:
    """Our config of a published one: experts in the second layer and every so many from there.

    Raises:
        InputError: If a field is none, or asks for arithmetic that is not known here.
    """
    config.require(
        qkv_proj_bias=True,
        mlp_fc1_bias=True,
        mlp_fc2_bias=True,
        activation_function="gelu",
        num_shared_experts=0,
        expert_choice_router=False,
        ffn_div=1,
        moe_normalize_expert_weights=False,
        rotary_scaling_factor=None,
    )
    every, num_layers = config.integer("moe_every_n_layers", 2), config.integer("n_layer")
    return RotaryMoeConfig(
        **encoder_fields(config, tokenizer),
        intermediate_size=config.integer("n_inner"),
        hidden_act="gelu",
        moe_layers=list(range(1, num_layers, every)),
        num_experts=config.integer("num_experts"),
        experts_per_token=config.integer("moe_top_k"),
    )


def _names() -> dict[str, str | Published]:
    """Our names, and where each lies."""
    return {
        **encoder_names(),
        "layers.{n}.mlp.router.weight": f"{_MLP}router.layer.weight",
        "layers.{n}.mlp.experts.bias2": f"{_MLP}experts.bias",
        "layers.{n}.mlp.experts.{matrix}": Published(f"{_MLP}experts.mlp.{{matrix}}", stacked=True),
        "layers.{n}.mlp.{layer}": f"{_MLP}{{layer}}",
    }
