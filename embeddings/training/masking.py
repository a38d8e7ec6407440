"""Which tokens a masked language model does not see."""

from dataclasses import dataclass

import torch
from torch import Tensor

from embeddings.common.errors import OptionError


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden.

    Of the tokens that may be hidden each is chosen with the same probability; a chosen one becomes the mask token, a
    random token, or stays as it is, and is to be predicted in every case.

    Args:
        probability: Probability of a token to be chosen, above 0 and below 1. BERT: 0.15; LLM2Vec: 0.8 for Mistral.
        mask_fraction: Share of the chosen tokens that become the mask token. BERT: 0.8; LLM2Vec: 1.
        random_fraction: Share that become another token. BERT: 0.1; LLM2Vec: 0.
        mask_token: A token of the vocabulary that stands for a hidden one; None for the tokenizer's own mask token,
            which decoders lack. LLM2Vec uses "_".

    Raises:
        OptionError: If a probability or share is impossible.
    Source: Devlin et al. 2019, arXiv:1810.04805, §3.1; BehnamGhader et al. 2024, arXiv:2404.05961, the released
        `run_mntp.py` and its configs.
    """

    probability: float = 0.15
    mask_fraction: float = 0.8
    random_fraction: float = 0.1
    mask_token: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            rule, fix = "must be above 0 and below 1", "BERT uses 0.15"
            raise OptionError("model.masking.probability", self.probability, rule, fix)
        for name in ("mask_fraction", "random_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"model.masking.{name}", getattr(self, name), "must be 0 to 1", "BERT: 0.8 and 0.1")
        if self.mask_fraction + self.random_fraction > 1 + 1e-9:
            rule = f"must be at most 1 together with mask_fraction {self.mask_fraction}"
            raise OptionError("model.masking.random_fraction", self.random_fraction, rule, "BERT: 0.8 and 0.1")


def mask_tokens(
    input_ids_NL: Tensor,
    may_mask_NL: Tensor,
    key_N: Tensor,
    masking: Masking,
    mask_id: int,
    ordinary_ids_V: Tensor,
) -> tuple[Tensor, Tensor]:
    """Token ids with some of them hidden, and which.

    Args:
        input_ids_NL: Token ids, (N, L) int64 on the processor.
        may_mask_NL: True where a token may be chosen, (N, L) bool.
        key_N: Key of each row's random choices, (N,) int64.
        masking: How tokens are hidden.
        mask_id: Id of the mask token.
        ordinary_ids_V: Ids from which random tokens are drawn, (V,) int64.

    Returns:
        The ids that the model reads, (N, L) int64, and True at the chosen tokens, (N, L) bool.

    Determinism: a row's choices are a function of its key and length alone, whatever rows are beside it.
    """
    masked_NL, chosen_NL = input_ids_NL.clone(), torch.zeros_like(may_mask_NL)
    for row, key in enumerate(key_N.tolist()):
        generator = torch.Generator().manual_seed(key)
        length = input_ids_NL.shape[1]
        chosen_L = (torch.rand(length, generator=generator) < masking.probability) & may_mask_NL[row]
        kind_L = torch.rand(length, generator=generator)
        random_L = ordinary_ids_V[torch.randint(len(ordinary_ids_V), (length,), generator=generator)]
        becomes_mask_L = chosen_L & (kind_L < masking.mask_fraction)
        becomes_random_L = chosen_L & ~becomes_mask_L & (kind_L < masking.mask_fraction + masking.random_fraction)
        masked_NL[row][becomes_mask_L] = mask_id
        masked_NL[row][becomes_random_L] = random_L[becomes_random_L]
        chosen_NL[row] = chosen_L
    return masked_NL, chosen_NL
