"""The task of a language model on packed rows: which tokens are hidden, and which state predicts which token."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embeddings.common.errors import OptionError
from embeddings.common.random import derive_seed
from embeddings.common.types import PackedRows, Prediction

Objective = Literal["mlm", "mntp", "causal"]


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden: each with the same probability; one that is chosen is a target, whatever it becomes.

    Args:
        probability: Probability that a token is chosen, above 0 and below 1. BERT: 0.15; LLM2Vec: 0.8 for Mistral.
        mask_fraction: Share of the chosen tokens that become the mask token. BERT: 0.8; LLM2Vec: 1.
        random_fraction: Share that become another token; the rest stay. BERT: 0.1; LLM2Vec: 0.
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


@dataclass(frozen=True)
class LanguageTask:
    """Turns packed rows into the model's input and its targets.

    - `mlm`: a hidden token is predicted from the state at its own position (Devlin et al. 2019).
    - `mntp`, masked next-token prediction: a hidden token is predicted from the state one position before it, as a
      decoder has learnt to (BehnamGhader et al. 2024, §2.2).
    - `causal`: no token is hidden, and every token is predicted from the state one position before it.

    Special tokens, padding and tokens equal to the mask token are never hidden. With `mntp` and `causal` the first
    token of a row is not a target, since no state precedes it; with `separate_documents` the same holds for each
    document. A causal model learns to predict separators too.

    Args:
        masking: How tokens are hidden; None for `causal`.
        ordinary_ids_V: Ids that may stand for a hidden token, (V,) int64.
        separate_documents: Whether documents of a row do not attend to each other.

    Determinism: a row's targets follow from (seed, the row's draw key), not from rank, worker or batch.
    Source: BehnamGhader et al. 2024, arXiv:2404.05961, §2.2 and the released `run_mntp.py`. Differs: the release may
        hide the first token of a row, which it never predicts.
    """

    objective: Objective
    masking: Masking | None
    mask_id: int
    ordinary_ids_V: Tensor
    separate_documents: bool = False
    seed: int = 0

    def __call__(self, rows: PackedRows) -> Prediction:
        """The model's input and its targets, in the order of the rows."""
        shift = 0 if self.objective == "mlm" else 1
        input_ids_NL, document_NL = rows.input_ids_NL, rows.document_NL
        target_NL = document_NL >= 0
        if shift:
            # The state that predicts a token lies in the same row (and document).
            target_NL[:, 0] = False
            if self.separate_documents:
                target_NL[:, 1:] &= document_NL[:, 1:] == document_NL[:, :-1]
        if self.masking is not None:
            target_NL &= ~rows.special_NL & (input_ids_NL != self.mask_id)
            input_ids_NL, target_NL = self._hide(rows, target_NL, self.masking)
        target_P = target_NL.flatten().nonzero().flatten()
        label_P = rows.input_ids_NL.flatten()[target_P]
        has_padding = bool((document_NL < 0).any())
        return Prediction(input_ids_NL, document_NL, target_P - shift, label_P, has_padding, rows.row_N)

    def _hide(self, rows: PackedRows, may_hide_NL: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
        """Token ids with some of them hidden, (N, L), and which; a row's choices follow from its draw key alone."""
        hidden_NL, chosen_NL = rows.input_ids_NL.clone(), torch.zeros_like(may_hide_NL)
        length = hidden_NL.shape[1]
        for row, draw in enumerate(rows.draw_N.tolist()):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "mask", draw))
            chosen_L = (torch.rand(length, generator=generator) < masking.probability) & may_hide_NL[row]
            kind_L = torch.rand(length, generator=generator)
            random_L = self.ordinary_ids_V[torch.randint(len(self.ordinary_ids_V), (length,), generator=generator)]
            becomes_mask_L = chosen_L & (kind_L < masking.mask_fraction)
            becomes_random_L = chosen_L & ~becomes_mask_L & (kind_L < masking.mask_fraction + masking.random_fraction)
            hidden_NL[row][becomes_mask_L] = self.mask_id
            hidden_NL[row][becomes_random_L] = random_L[becomes_random_L]
            chosen_NL[row] = chosen_L
        return hidden_NL, chosen_NL
