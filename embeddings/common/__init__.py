"""Floor 0: what every other package may use. The names that need torch load it on first use."""

from typing import TYPE_CHECKING

from embeddings.common.errors import (
    InputError,
    MissingExtraError,
    NumericError,
    OptionError,
    PreemptedError,
    UserError,
    require_minimum,
)
from embeddings.common.process import lazy_names
from embeddings.common.text import TextRole, TextSettings, instruction_prompt

if TYPE_CHECKING:
    from embeddings.common.protocols import BatchNeeds, ContextualStep, ContrastiveStep, NeedsBatches
    from embeddings.common.types import ContrastiveBatch, LossOutput, PaddedTokens, Representations, TokenBatch

__all__ = [
    "BatchNeeds",
    "ContextualStep",
    "ContrastiveBatch",
    "ContrastiveStep",
    "InputError",
    "LossOutput",
    "MissingExtraError",
    "NeedsBatches",
    "NumericError",
    "OptionError",
    "PaddedTokens",
    "PreemptedError",
    "Representations",
    "TextRole",
    "TextSettings",
    "TokenBatch",
    "UserError",
    "instruction_prompt",
    "require_minimum",
]

__getattr__ = lazy_names(__name__)
