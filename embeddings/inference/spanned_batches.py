"""Mini-batches of texts beside where each of their tokens lies."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from embeddings.common.mini_batches import plan_mini_batches
from embeddings.common.text import TextRole
from embeddings.data.tokenize import TextTokenizer, TokenSpan

if TYPE_CHECKING:
    from embeddings.models.embedder import Embedder


class SpannedText(NamedTuple):
    """A text of a mini-batch.

    Attributes:
        row: Which of all texts it is.
        text: Prompt and text as one string, which the spans count in.
        spans: Where each token lies in it, T of them: the first T places of its row of the mini-batch.
    """

    row: int
    text: str
    spans: list[TokenSpan]


class SpannedBatch(NamedTuple):
    """A padded mini-batch of n texts, on the model's device.

    Attributes:
        texts: The texts, n of them.
        ids_nL: Token ids, (n, L) int64.
        attention_nL: Whether a place holds a token, (n, L) bool.
        pooled_nL: Whether it enters the pooling, (n, L) bool.
    """

    texts: list[SpannedText]
    ids_nL: Tensor
    attention_nL: Tensor
    pooled_nL: Tensor


def spanned_batches(
    embedder: "Embedder", texts: Sequence[str], prompt_name: str | None, role: TextRole, mini_batch_tokens: int
) -> Iterator[SpannedBatch]:
    """Texts behind one of the model's prompts, padded mini-batch by mini-batch, each text once.

    Args:
        embedder: The model.
        texts: Texts without their prompts.
        prompt_name: Which of the model's prompts goes before each text; None for the one of the role's name.
        role: Whose length limit holds.
        mini_batch_tokens: Most padded tokens of a mini-batch.

    Raises:
        OptionError: If the model has no such prompt.
    """
    prompt = embedder.text.prompt(prompt_name, role)
    tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)
    tokens, spans = tokenizer(texts, role, prompt), tokenizer.spans(texts, role, prompt)
    assert [len(own) for own in spans] == tokens.lengths_N.tolist()
    for rows_n in plan_mini_batches(tokens.lengths_N, mini_batch_tokens):
        own = [SpannedText(row, prompt + texts[row], spans[row]) for row in rows_n.tolist()]
        padded = tokens.padded(rows_n, embedder.pad_token_id)
        yield SpannedBatch(own, *(part.to(embedder.device) for part in padded))
