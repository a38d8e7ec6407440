"""Which experts of a sparse model the tokens of some texts go to."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from embeddings.common import InputError
from embeddings.common.text import TextRole
from embeddings.inference.encoder import Encoder


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """How many tokens each expert of each sparse layer was given.

    Attributes:
        layers: Indices of the Y sparse layers, from 0.
        count_YX: Tokens given to each of X experts, (Y, X) int64; each row adds up to `num_tokens` times `top_k`.
        top_k: Experts a token, K.
    """

    layers: list[int]
    count_YX: Tensor
    top_k: int

    @property
    def num_tokens(self) -> int:
        """Tokens that were routed, of prompts and special ones too."""
        return int(self.count_YX[0].sum()) // self.top_k

    @property
    def share_YX(self) -> Tensor:
        """Each expert's share of its layer's (token, expert) assignments, (Y, X) float64."""
        return self.count_YX.double() / self.count_YX.sum(dim=1, keepdim=True).clamp(min=1)


def expert_loads(
    encoder: Encoder, texts: Sequence[str], prompt_name: str | None = None, role: TextRole = "document"
) -> ExpertLoads:
    """Encode some texts and count where their tokens go; padding goes nowhere.

    Args:
        encoder: A sparse model; it is left as found.
        texts: At least one, without their prompts. A text that occurs twice is computed, and counts, once.
        prompt_name: Which of the model's prompts goes before each text; None for the one of the role's name. Its tokens
            are routed like the text's.
        role: Whose length limit holds.

    Precision: the encoder's; a token near a tie between two experts may go elsewhere in another.
    Raises:
        InputError: If the model has no experts, or is contextual.
        OptionError: If the model has no such prompt.
    """
    from embeddings.models.lora import plain_backbone
    from embeddings.models.routing_sums import COUNTS, has_experts, moe_layers, read_routing

    backbone = encoder.embedder.backbone
    if encoder.num_context:
        raise InputError("the model", "is contextual, and reads more than each text's tokens", "give one that is not")
    if not has_experts(backbone):
        raise InputError("the model", "is dense: it has no experts to send tokens to", "give a sparse one")
    with read_routing(backbone) as sums:
        encoder.encode(texts, prompt_name, role=role)
        count_YX = sums()[COUNTS].cpu()
    return ExpertLoads(moe_layers(backbone), count_YX, int(plain_backbone(backbone).config.experts_per_token))
