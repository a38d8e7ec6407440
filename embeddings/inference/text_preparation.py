"""Texts to tokens, block by block, in this process or in another one."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.text import TextRole
from embeddings.common.types import TokenBatch
from embeddings.data.tokenize import TextTokenizer

TEXTS_PER_BLOCK = 8192


class TokenisedTexts(NamedTuple):
    """Texts and their tokens, made apart from the encoder, in another process for instance.

    Attributes:
        texts: The texts, each once.
        row_N: For each text given its place among them, (N,) int64; None where none was given twice.
        blocks: Their tokens, a token batch for each 8,192 of them.
    """

    texts: list[str]
    row_N: npt.NDArray[np.int64] | None
    blocks: list[TokenBatch]


@dataclass(frozen=True)
class TextPreparation:
    """What an encoder does to texts before its model: a function of texts that can be sent to another process.

    Args:
        tokenizer: The encoder's.
        role: Whose length limit holds.
        prompt: Text put before each.
    """

    tokenizer: TextTokenizer
    role: TextRole
    prompt: str

    def __call__(self, texts: Sequence[str]) -> TokenisedTexts:
        """The texts as `Encoder.encode` takes them, for the same vectors as without."""
        unique, row_N = unique_texts(texts)
        starts = range(0, len(unique), TEXTS_PER_BLOCK)
        return TokenisedTexts(unique, row_N, [self.block(unique, start) for start in starts])

    def block(self, texts: list[str], start: int) -> TokenBatch:
        """The tokens of a block of texts, the first of which is text `start`."""
        return self.tokenizer(texts[start : start + TEXTS_PER_BLOCK], self.role, self.prompt)

    def blocks_ahead(self, texts: list[str]) -> Iterator[TokenBatch]:
        """The tokens of each block; the next one is made while one is used."""
        starts = range(0, len(texts), TEXTS_PER_BLOCK)
        with ThreadPoolExecutor(max_workers=1) as pool:
            pending = pool.submit(self.block, texts, 0) if starts else None
            for start in starts:
                assert pending is not None
                tokens = pending.result()
                if start + TEXTS_PER_BLOCK < len(texts):
                    pending = pool.submit(self.block, texts, start + TEXTS_PER_BLOCK)
                yield tokens


def unique_texts(texts: Sequence[str]) -> tuple[list[str], npt.NDArray[np.int64] | None]:
    """Each text once, and for each given one its row among them; None where none occurs twice."""
    row_of_text = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    if len(row_of_text) == len(texts):
        return list(row_of_text), None
    return list(row_of_text), np.array([row_of_text[text] for text in texts], dtype=np.int64)
