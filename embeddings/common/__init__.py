"""Floor 0: what every other package may use."""

from embeddings.common.errors import InputError, MissingExtraError, NumericError, OptionError, UserError
from embeddings.common.protocols import ContrastiveStep
from embeddings.common.text import TextRole, TextSettings, instruction_prompt
from embeddings.common.types import ContrastiveBatch, LossOutput, PaddedTokens, Representations, TokenBatch

__all__ = [
    "ContrastiveBatch",
    "ContrastiveStep",
    "InputError",
    "LossOutput",
    "MissingExtraError",
    "NumericError",
    "OptionError",
    "PaddedTokens",
    "Representations",
    "TextRole",
    "TextSettings",
    "TokenBatch",
    "UserError",
    "instruction_prompt",
]
