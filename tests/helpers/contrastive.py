"""Contrastive batches built from records, and minimal methods to train on them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from embeddings.common import ContrastiveBatch, LossOutput, Representations, TokenBatch
from embeddings.common.types import take_texts
from embeddings.losses import InfoNCE


@dataclass
class Record:
    """One query with its texts; each text is a list of token ids."""

    query: list[int]
    positive: list[int]
    negatives: list[list[int]] = field(default_factory=list)
    known: list[list[int]] = field(default_factory=list)
    source: int = 0
    label: int = -1
    negative_labels: list[int] = field(default_factory=list)
    in_batch: bool = True


def random_records(
    num_queries: int, num_negatives: int, seed: int = 0, longest: int = 14, vocabulary: int = 200
) -> list[Record]:
    """Records of random texts of one to `longest` tokens; a third of the sources allow no in-batch negatives.

    With more than two records, the second repeats the first one's positive and the third repeats its query.
    """
    generator = random.Random(seed)

    def text() -> list[int]:
        return [generator.randrange(5, vocabulary) for _ in range(generator.randint(1, longest))]

    records = []
    for index in range(num_queries):
        negatives = [text() for _ in range(num_negatives)]
        records.append(Record(text(), text(), negatives, source=index % 3, in_batch=index % 3 != 2))
    if num_queries > 2:
        records[1].positive = records[0].positive
        records[2].query = records[0].query
    return records


def text_hash(text: Sequence[int]) -> int:
    """A hash of a text's token ids."""
    return hash(tuple(text)) >> 2


def batch_of(records: Sequence[Record]) -> ContrastiveBatch:
    """A batch: the positives of all queries first, then the negatives."""
    num_queries, long = len(records), torch.int64
    candidates = [record.positive for record in records] + [text for record in records for text in record.negatives]
    owners = list(range(num_queries)) + [row for row, record in enumerate(records) for _ in record.negatives]
    labels = [record.label for record in records]
    for record in records:
        labels += record.negative_labels or [-1] * len(record.negatives)
    known = [[text_hash(text) for text in [record.positive, *record.known]] for record in records]
    width = max(len(hashes) for hashes in known)
    return ContrastiveBatch(
        query=_tokens([record.query for record in records]),
        candidate=_tokens(candidates),
        positive_index_B=torch.arange(num_queries),
        owner_C=torch.tensor(owners, dtype=long),
        query_hash_B=torch.tensor([text_hash(record.query) for record in records], dtype=long),
        candidate_hash_C=torch.tensor([text_hash(text) for text in candidates], dtype=long),
        known_positive_hash_BP=torch.tensor([row + [row[0]] * (width - len(row)) for row in known], dtype=long),
        source_B=torch.tensor([record.source for record in records], dtype=long),
        query_label_B=torch.tensor([record.label for record in records], dtype=long),
        candidate_label_C=torch.tensor(labels, dtype=long),
        in_batch_B=torch.tensor([record.in_batch for record in records]),
        row_B=torch.arange(num_queries),
    )


def random_batch(num_queries: int, num_negatives: int, seed: int = 0) -> ContrastiveBatch:
    """A batch of random records."""
    return batch_of(random_records(num_queries, num_negatives, seed))


def with_context(batch: ContrastiveBatch, num_context: int = 5) -> ContrastiveBatch:
    """The batch with its last candidates, in reverse order, as its context."""
    last = len(batch.candidate) - 1
    rows_M = torch.arange(last, max(-1, last - num_context), -1)
    return replace(batch, context=take_texts(batch.candidate, rows_M))


def mean_state(state_NLH: Tensor, pooling_mask_NL: Tensor) -> Representations:
    weight_NL1 = pooling_mask_NL.to(state_NLH.dtype)[..., None]
    return Representations((state_NLH * weight_NL1).sum(1) / weight_NL1.sum(1))


class TinyStep(nn.Module):
    """A Hugging Face backbone with mean pooling and InfoNCE."""

    def __init__(self, backbone: nn.Module, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.loss = loss or InfoNCE(temperature=0.05)

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """The mean state of each text's pooled tokens."""
        texts = tokens.padded()
        state_NLH = self.backbone(texts.input_ids_NL, attention_mask=texts.attention_mask_NL.long()).last_hidden_state
        return mean_state(state_NLH, texts.pooling_mask_NL)

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        output: LossOutput = self.loss(query.vector_ND, candidate.vector_ND, batch)
        return output


class TinyContextualStep(TinyStep):
    """Two stages: the vectors of the context documents, with dropout, are prepended to each text's token embeddings."""

    trains_context = True

    def __init__(
        self, first: nn.Module, backbone: nn.Module, loss: nn.Module | None = None, context_dropout: float = 0.0
    ) -> None:
        super().__init__(backbone, loss)
        self.first = first
        self.context_dropout = context_dropout

    def embed_context(self, tokens: TokenBatch) -> Tensor:
        """The mean state of each document's pooled tokens, by the first backbone."""
        return TinyStep(self.first).embed(tokens).vector_ND

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """The mean state of each text's tokens; the states of the context are not pooled."""
        texts, num_texts = tokens.padded(), len(tokens)
        word_NLH = self.backbone.get_input_embeddings()(texts.input_ids_NL)
        context_NMH = word_NLH[:, :0] if context is None else context.expand(num_texts, -1, -1).to(word_NLH.dtype)
        kept_NM1 = torch.rand(*context_NMH.shape[:2], 1) >= self.context_dropout
        state_NLH = self.backbone(
            inputs_embeds=torch.cat([context_NMH * kept_NM1, word_NLH], dim=1),
            attention_mask=torch.cat([kept_NM1.new_ones(kept_NM1.shape[:2]), texts.attention_mask_NL], dim=1).long(),
        ).last_hidden_state[:, context_NMH.shape[1] :]
        return mean_state(state_NLH, texts.pooling_mask_NL)


def gradient_vector(module: nn.Module) -> Tensor:
    """All gradients of a module's trainable parameters as one vector; a missing gradient is zero."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert trainable
    return torch.cat(
        [(p.grad if p.grad is not None else torch.zeros_like(p)).detach().flatten().double() for p in trainable]
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; the expected vector must not be zero."""
    norm = expected.double().norm()
    assert expected.numel() > 0
    assert norm > 0
    return float((actual.double() - expected.double()).norm() / norm)


def _tokens(texts: Sequence[Sequence[int]]) -> TokenBatch:
    return TokenBatch.from_lists(texts, [[True] * len(text) for text in texts])
