"""What a language model learns from packed rows: which tokens are hidden, and which state predicts which token."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embeddings.common.random import derive_seed
from embeddings.common.types import PackedRows, Prediction
from embeddings.training.masking import Masking, mask_tokens

Objective = Literal["mlm", "mntp", "causal"]


@dataclass(frozen=True)
class LanguageTask:
    """Makes of packed rows what the model reads and what it is to predict.

    - `mlm`: a hidden token is predicted from the state at its own place (Devlin et al. 2019).
    - `mntp`, masked next-token prediction: a hidden token is predicted from the state one place before it, as a
      decoder has learnt to (BehnamGhader et al. 2024, §2.2).
    - `causal`: nothing is hidden, and every token is predicted from the state one place before it.

    Special tokens and padding are never hidden, nor is a token that is the mask token itself. With `mntp` and `causal`
    the first token of a row is no target, as nothing stands before it, and with `separate_documents` neither is the
    first of a document. A causal model learns to predict separators too.

    Args:
        objective: Which of the three.
        masking: How tokens are hidden; None for `causal`.
        mask_id: Id of the mask token.
        ordinary_ids_V: Ids that may stand for a hidden token, (V,) int64.
        separate_documents: Whether the documents of a row do not see each other.
        seed: Seed of the choice of tokens.

    Determinism: a row's targets follow from (seed, the row's draw key); rank, worker and batch do not enter.
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
        """What the model reads of the rows, and its targets, in the order of the rows."""
        shift = 0 if self.objective == "mlm" else 1
        target_NL = _predictable(rows.document_NL, shift, self.separate_documents)
        input_ids_NL = rows.input_ids_NL
        if self.objective != "causal":
            assert self.masking is not None
            may_mask_NL = target_NL & ~rows.special_NL & (rows.input_ids_NL != self.mask_id)
            key_N = torch.tensor([derive_seed(self.seed, "mask", draw) for draw in rows.draw_N.tolist()])
            input_ids_NL, target_NL = mask_tokens(
                rows.input_ids_NL, may_mask_NL, key_N, self.masking, self.mask_id, self.ordinary_ids_V
            )
        target_P = target_NL.flatten().nonzero().flatten()
        label_P = rows.input_ids_NL.flatten()[target_P]
        has_padding = bool((rows.document_NL < 0).any())
        return Prediction(input_ids_NL, rows.document_NL, target_P - shift, label_P, has_padding, rows.row_N)


def _predictable(document_NL: Tensor, shift: int, separate_documents: bool) -> Tensor:
    """True where there is a token whose predicting state belongs to the same row (and document), (N, L) bool."""
    known_NL = document_NL >= 0
    if shift == 0:
        return known_NL
    known_NL[:, 0] = False
    if separate_documents:
        known_NL[:, 1:] &= document_NL[:, 1:] == document_NL[:, :-1]
    return known_NL
