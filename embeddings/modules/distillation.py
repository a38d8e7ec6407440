"""Frozen teachers beside a student: of states, as NV-Embed retrains a pruned one (Appendix A), or of vectors."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from embeddings.common import ContrastiveBatch, OptionError, PaddedTokens, TokenBatch
from embeddings.common.distributed import sum_over_ranks
from embeddings.common.types import moved, plan_mini_batches
from embeddings.data.tokenize import TextTokenizer
from embeddings.models import Embedder, Pooling, load_embedder
from embeddings.models.backbone import spread_layers
from embeddings.models.bidirectional import layers
from embeddings.models.lora import plain_backbone

# Sums over mini-batches, see `Representations.statistics`.
_ERRORS, _TOKENS = "distillation_errors", "distillation_tokens"
_OUTPUT_ERRORS, _OUTPUT_TOKENS = "distillation_output_errors", "distillation_output_tokens"
# What the backbone returns, behind its last layer and final norm.
_LAST = 0
# Padded tokens that a teacher of vectors reads at once.
MINI_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class LayerDistillation:
    """How a student follows the states of a teacher: loss = contrastive + alpha · KD.

    KD = sum over n = 1 … O-2 of MSE(S_s^n, S_t^n)  +  MSE(S_s^{O-1}, S_t^O)

    with S^n the states behind layer n, and O the teacher's layers with its pooling block as the last one: the student's
    last states, behind its own block where it has one, imitate what the teacher's block makes of its own (of a pooling
    without a block: the states themselves). So a student without the latent block learns what the block did. Means are
    over the tokens of queries and candidates of all ranks, and over the width.

    Args:
        teacher: A model directory or Hub id with the student's tokenizer.
        alpha: Weight of KD, > 0. The paper states none.
        layers: Pairs (layer of the student, layer of the teacher), both from 1, in place of the inner sum; None spreads
            the student's layers evenly over the teacher's where depths differ, as `compress --layers` chooses them.
        teacher_width: The teacher's hidden size where it is not the student's: a linear map from each of the student's
            states to this width is learned with the student, and dropped after training. None for no map.

    Raises:
        OptionError: If alpha is not > 0 and finite, or a layer not >= 1.
    Source: Lee 2024 (NV-Embed), arXiv:2405.17428, Appendix A. Differs: the map of layers and of widths are ours, the
        paper's students have the teacher's form.
    """

    teacher: str
    alpha: float = 1.0
    layers: Sequence[tuple[int, int]] | None = None
    teacher_width: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise OptionError(
                "distillation.alpha", self.alpha, "must be > 0 and finite", "1 weighs it as the contrastive loss"
            )
        if self.layers is not None and min((min(pair) for pair in self.layers), default=0) < 1:
            rule = "must be pairs (student's layer, teacher's layer), both from 1"
            raise OptionError("distillation.layers", list(self.layers), rule, "leave it out to spread them evenly")
        if self.teacher_width is not None and self.teacher_width < 1:
            raise OptionError("distillation.teacher_width", self.teacher_width, "must be >= 1", "leave it out")


class WidthMaps(nn.Module):
    """One linear map for each of the student's states (T, H) that follow the teacher's."""

    def __init__(self, number: int, width: int, teacher_width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, teacher_width) for _ in range(number))

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        return [change(state) for change, state in zip(self.maps, states, strict=True)]


class FrozenTeacher:
    """A model beside a student, no part of the module that trains: neither trained, saved, sharded nor copied."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder.eval().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class LayerTeacher(FrozenTeacher):
    """A frozen teacher of states; it loads itself where none is given.

    An `OptionError` tells that teacher and student do not fit: another tokenizer, another width without a map, a layer
    that one of them does not have.
    """

    def __init__(self, settings: LayerDistillation, student: Embedder, teacher: Embedder | None = None) -> None:
        super().__init__(Embedder.from_pretrained(settings.teacher) if teacher is None else teacher)
        depth, teacher_depth = (len(list(layers(plain_backbone(model.backbone)))) for model in (student, self.embedder))
        self.pairs = layer_pairs(depth, teacher_depth, settings.layers)
        width, wanted = self.embedder.hidden_size, settings.teacher_width or student.hidden_size
        if width != wanted:
            rule = f"has states of width {width}, and the student's become {wanted} wide"
            raise OptionError(
                "distillation.teacher", settings.teacher, rule, f"set distillation.teacher_width: {width}"
            )
        if self.embedder.tokenizer.get_vocab() != student.tokenizer.get_vocab():
            rule = "has another tokenizer than the student, so that its tokens are others"
            hint = "distil similarities: embeddings.losses.SimilarityDistillation"
            raise OptionError("distillation.teacher", settings.teacher, rule, hint)

    def errors(
        self,
        student: dict[int, Tensor],
        pooling: Pooling,
        tokens: PaddedTokens,
        maps: Callable[[list[Tensor]], list[Tensor]],
    ) -> dict[str, Tensor]:
        """The squared errors of a student's states, as sums over tokens, and the numbers of tokens.

        `student` is what `captured_states` caught of the same tokens; `maps` takes states (T, H) to the teacher's
        width. Where the student's pooling has a block, that block's output follows the teacher's.

        Precision: the teacher as the student, under autocast or not; differences and sums in float32 at least.
        """
        attended_NL, pooled_NL = tokens.attention_mask_NL, tokens.pooling_mask_NL
        self.embedder.to(attended_NL.device)
        # The places once for all layers: a device is asked for each, and the host waits.
        attended_T, pooled_T = (mask_NL.flatten().nonzero().squeeze(1) for mask_NL in (attended_NL, pooled_NL))
        with torch.no_grad(), captured_states(self.embedder) as teacher:
            self.embedder(tokens)
            output_TH = self.embedder.pooling.token_states(teacher[_LAST].flatten(0, 1)[pooled_T])
        inner = [student[own].flatten(0, 1)[attended_T] for own, _ in self.pairs]
        *inner, last = maps([*inner, pooling.token_states(student[_LAST].flatten(0, 1)[pooled_T])])
        errors = [
            squared_error(own, teacher[other].flatten(0, 1)[attended_T])
            for own, (_, other) in zip(inner, self.pairs, strict=True)
        ]
        output = squared_error(last, output_TH)
        total = torch.stack(errors).sum() if errors else output.new_zeros(())
        counts = {_TOKENS: attended_NL.sum(), _OUTPUT_TOKENS: pooled_NL.sum()}
        return {_ERRORS: total, _OUTPUT_ERRORS: output, **counts}


class VectorTeacher(FrozenTeacher):
    """A frozen teacher that gives a loss the vectors of each batch (`Distillation.teacher`).

    It reads the texts by its own tokenizer, prompts and lengths, as `encode` does without options, so its vectors are
    those that `surrogate_vectors` would hold; `tokens` tokenises them in the data workers. A contextual model reads no
    context.

    Precision: its weights as stored, under autocast where the run is; vectors in float32 at least.
    """

    def __init__(self, name: str, teacher: Embedder | None = None) -> None:
        super().__init__(load_embedder(name) if teacher is None else teacher)
        self.name = name
        self.tokens = TextTokenizer(self.embedder.tokenizer, self.embedder.text)

    def taught(self, batch: ContrastiveBatch) -> ContrastiveBatch:
        """The batch with the teacher's vectors of its queries, (B, S), and candidates, (C, S)."""
        if batch.teacher_query is None or batch.teacher_candidate is None:
            rule = "needs batches that have their texts in its tokens too"
            raise OptionError("model.loss.teacher", self.name, rule, "train with an EmbeddingDataModule")
        query_BS, candidate_CS = self._vectors(batch.teacher_query), self._vectors(batch.teacher_candidate)
        return replace(batch, surrogate_query_BS=query_BS, surrogate_candidate_CS=candidate_CS)

    @torch.no_grad()
    def _vectors(self, tokens: TokenBatch) -> Tensor:
        """The vectors of N texts in their order, (N, S), in mini-batches of similar lengths."""
        self.embedder.to(tokens.device)
        plan = plan_mini_batches(tokens.lengths_N, MINI_BATCH_TOKENS)
        sorted_NS = torch.cat([self.embedder(tokens.padded(rows_n, self.embedder.pad_token_id)) for rows_n in plan])
        return torch.empty_like(sorted_NS).index_copy_(0, moved(torch.cat(plan), tokens.device), sorted_NS)


def squared_error(state_TH: Tensor, target_TH: Tensor) -> Tensor:
    """The sum over tokens of the mean over the width of squared differences, () float32 at least."""
    dtype = torch.promote_types(torch.promote_types(state_TH.dtype, target_TH.dtype), torch.float32)
    return (state_TH.to(dtype) - target_TH.to(dtype)).square().mean(dim=-1).sum()


def distillation_loss(query: dict[str, Tensor], candidate: dict[str, Tensor]) -> Tensor:
    """KD of a full batch from the sums of both towers, () float32.

    Distributed: one all-reduce of each of the four sums, and of two in the backward pass.
    """
    total = {name: sum_over_ranks(value + candidate[name]) for name, value in query.items()}
    inner = total[_ERRORS] / total[_TOKENS].clamp(min=1)
    return inner + total[_OUTPUT_ERRORS] / total[_OUTPUT_TOKENS].clamp(min=1)


def layer_pairs(depth: int, teacher_depth: int, asked: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Which layer of the student follows which of the teacher, both from 1; the last ones follow by their output."""
    if asked is None:
        followed = spread_layers(depth, teacher_depth)
        return [(own, other + 1) for own, other in enumerate(followed[:-1], start=1)]
    for own, other in asked:
        if own > depth or other > teacher_depth:
            rule = f"must lie within the student's {depth} layers and the teacher's {teacher_depth}"
            raise OptionError("distillation.layers", [own, other], rule, "leave it out to spread them evenly")
    return [(own, other) for own, other in asked]


def num_followed(student: Embedder, settings: LayerDistillation) -> int:
    """How many of the student's states follow the teacher's, the last one included."""
    depth = len(list(layers(plain_backbone(student.backbone))))
    return 1 + len(settings.layers if settings.layers is not None else range(1, depth))


@contextmanager
def captured_states(embedder: Embedder) -> Iterator[dict[int, Tensor]]:
    """A context that catches the states of a forward pass by their layer, from 1, and under 0 the backbone's output."""
    found: dict[int, Tensor] = {}
    backbone = plain_backbone(embedder.backbone)

    def catching(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            found[layer] = output if isinstance(output, Tensor) else output[0]

        return note

    parts = {_LAST: backbone, **dict(enumerate(layers(backbone), start=1))}
    handles = [part.register_forward_hook(catching(number)) for number, part in parts.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
