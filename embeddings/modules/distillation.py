"""Frozen teachers: of hidden states, as NV-Embed retrains a pruned student (Appendix A), or of embedding vectors."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from embeddings.common import ContrastiveBatch, LossOutput, OptionError, PaddedTokens, Representations, TokenBatch
from embeddings.common.distributed import sum_over_ranks
from embeddings.common.types import moved, plan_mini_batches
from embeddings.data.tokenize import TextTokenizer
from embeddings.models import Embedder, Pooling, load_embedder
from embeddings.models.backbone import spread_layers
from embeddings.models.bidirectional import layers
from embeddings.models.pooling import plain_backbone

# Names of the sums over mini-batches (see `Representations.statistics`).
_ERRORS, _TOKENS = "distillation_errors", "distillation_tokens"
_OUTPUT_ERRORS, _OUTPUT_TOKENS = "distillation_output_errors", "distillation_output_tokens"
# Key of the backbone's output, after its last layer and final norm.
_LAST = 0
# Padded tokens per mini-batch of a teacher of vectors.
MINI_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class LayerDistillation:
    """Distillation of a teacher's hidden states: loss = contrastive + alpha · KD.

    KD = sum over n = 1 … O-2 of MSE(S_s^n, S_t^n)  +  MSE(S_s^{O-1}, S_t^O)

    S^n are the states after layer n. O is the number of the teacher's layers, counting its pooling block as the last.
    The student's last states, after its own pooling block if it has one, imitate the output of the teacher's pooling
    block (its last states if its pooling has no block). Means are over the tokens of queries and candidates of all
    ranks, and over the width.

    Args:
        teacher: A model directory or Hub id with the student's tokenizer.
        alpha: Weight of KD, > 0. The paper does not state it.
        layers: Pairs (student layer, teacher layer), both from 1, that replace the inner sum. None spreads the
            student's layers evenly over the teacher's if depths differ, as `compress --layers` chooses them.
        teacher_width: The teacher's hidden size if it differs from the student's: a linear map from each student state
            to this width is trained with the student and discarded after training. None for no map.

    Source: Lee 2024 (NV-Embed), arXiv:2405.17428, Appendix A. Differs: the layer pairs and width maps are ours; the
        paper's students have the teacher's depth and width.
    """

    teacher: str
    alpha: float = 1.0
    layers: Sequence[tuple[int, int]] | None = None
    teacher_width: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise OptionError("distillation.alpha", self.alpha, "must be > 0 and finite", "1 weights both equally")


class WidthMaps(nn.Module):
    """One linear map to the teacher's width for each distilled state (T, H) of the student."""

    def __init__(self, number: int, width: int, teacher_width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, teacher_width) for _ in range(number))

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        return [linear(state) for linear, state in zip(self.maps, states, strict=True)]


class FrozenTeacher:
    """A model that is not a submodule of the trained module, so it is not trained, saved, sharded or copied with it."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder.eval().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class LayerTeacher(FrozenTeacher):
    def __init__(self, settings: LayerDistillation, student: Embedder, teacher: Embedder | None = None) -> None:
        super().__init__(Embedder.from_pretrained(settings.teacher) if teacher is None else teacher)
        self.alpha = settings.alpha
        self.pairs = layer_pairs(num_layers(student), num_layers(self.embedder), settings.layers)
        width, student_width = self.embedder.hidden_size, settings.teacher_width or student.hidden_size
        if width != student_width:
            rule = f"has states of width {width}, but the student's have width {student_width}"
            hint = f"set distillation.teacher_width: {width}"
            raise OptionError("distillation.teacher", settings.teacher, rule, hint)
        if self.embedder.tokenizer.get_vocab() != student.tokenizer.get_vocab():
            rule = "must have the student's tokenizer"
            hint = "use embeddings.losses.SimilarityDistillation instead"
            raise OptionError("distillation.teacher", settings.teacher, rule, hint)

    def embed(self, student: Embedder, tokens: TokenBatch, maps: WidthMaps | None) -> Representations:
        padded = tokens.padded(pad_token_id=student.pad_token_id)
        with captured_states(student) as states:
            vector_ND = student(padded)
        return Representations(vector_ND, self.errors(states, student.pooling, padded, maps))

    def with_distillation(
        self, output: LossOutput, query: dict[str, Tensor], candidate: dict[str, Tensor]
    ) -> LossOutput:
        """The loss of a full batch plus alpha · KD, from the sums of queries and candidates."""
        total = {name: sum_over_ranks(value + candidate[name]) for name, value in query.items()}
        inner = total[_ERRORS] / total[_TOKENS].clamp(min=1)
        distillation = inner + total[_OUTPUT_ERRORS] / total[_OUTPUT_TOKENS].clamp(min=1)
        terms = {**output.terms, "contrastive": output.loss.detach(), "distillation": distillation.detach()}
        return LossOutput(output.loss + self.alpha * distillation, terms)

    def errors(
        self, student: dict[int, Tensor], pooling: Pooling, tokens: PaddedTokens, maps: WidthMaps | None
    ) -> dict[str, Tensor]:
        """The squared errors of a student's states, as sums over tokens in float32, and the numbers of tokens."""
        attended_NL, pooled_NL = tokens.attention_mask_NL, tokens.pooling_mask_NL
        self.embedder.to(attended_NL.device)
        # Computed once for all layers: `nonzero` synchronises with the device.
        attended_T, pooled_T = (mask_NL.flatten().nonzero().squeeze(1) for mask_NL in (attended_NL, pooled_NL))
        with torch.no_grad(), captured_states(self.embedder) as teacher:
            self.embedder(tokens)
            output_TH = self.embedder.pooling.token_states(teacher[_LAST].flatten(0, 1)[pooled_T])
        states = [student[layer].flatten(0, 1)[attended_T] for layer, _ in self.pairs]
        states.append(pooling.token_states(student[_LAST].flatten(0, 1)[pooled_T]))
        *inner, last = states if maps is None else maps(states)
        errors = [
            squared_error(state_TH, teacher[layer].flatten(0, 1)[attended_T])
            for state_TH, (_, layer) in zip(inner, self.pairs, strict=True)
        ]
        output = squared_error(last, output_TH)
        total = torch.stack(errors).sum() if errors else output.new_zeros(())
        counts = {_TOKENS: attended_NL.sum(), _OUTPUT_TOKENS: pooled_NL.sum()}
        return {_ERRORS: total, _OUTPUT_ERRORS: output, **counts}


class VectorTeacher(FrozenTeacher):
    """A frozen teacher that computes the vectors of each batch for the loss (`Distillation.teacher`).

    It uses its own tokenizer, prompts and maximum lengths, so its vectors equal those in `surrogate_vectors` files.
    """

    def __init__(self, name: str, teacher: Embedder | None = None) -> None:
        super().__init__(load_embedder(name) if teacher is None else teacher)
        self.embedder.require_directions("model.loss.teacher", name, "a teacher")
        self.name = name
        self.tokens = TextTokenizer(self.embedder.tokenizer, self.embedder.text)

    def with_vectors(self, batch: ContrastiveBatch) -> ContrastiveBatch:
        """The batch with the teacher's vectors of its queries, (B, S), and candidates, (C, S)."""
        # Only an `EmbeddingDataModule` tokenises for the teacher.
        assert batch.teacher_query is not None
        assert batch.teacher_candidate is not None
        query_BS, candidate_CS = self._vectors(batch.teacher_query), self._vectors(batch.teacher_candidate)
        return replace(batch, surrogate_query_BS=query_BS, surrogate_candidate_CS=candidate_CS)

    @torch.no_grad()
    def _vectors(self, tokens: TokenBatch) -> Tensor:
        """The vectors of N texts in input order, (N, S), computed in mini-batches of similar lengths."""
        self.embedder.to(tokens.device)
        plan = plan_mini_batches(tokens.lengths_N, MINI_BATCH_TOKENS)
        sorted_NS = torch.cat([self.embedder(tokens.padded(rows_n, self.embedder.pad_token_id)) for rows_n in plan])
        return torch.empty_like(sorted_NS).index_copy_(0, moved(torch.cat(plan), tokens.device), sorted_NS)


def squared_error(state_TH: Tensor, target_TH: Tensor) -> Tensor:
    """The sum over tokens of the mean over the width of squared differences, () float32 or float64."""
    dtype = torch.promote_types(torch.promote_types(state_TH.dtype, target_TH.dtype), torch.float32)
    return (state_TH.to(dtype) - target_TH.to(dtype)).square().mean(dim=-1).sum()


def num_layers(embedder: Embedder) -> int:
    return len(list(layers(plain_backbone(embedder.backbone))))


def layer_pairs(depth: int, teacher_depth: int, chosen: Sequence[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Pairs (student layer, teacher layer) from 1; by default without the last layers, whose outputs are compared."""
    if chosen is None:
        return [(layer, followed + 1) for layer, followed in enumerate(spread_layers(depth, teacher_depth)[:-1], 1)]
    for layer, followed in chosen:
        if not (1 <= layer <= depth and 1 <= followed <= teacher_depth):
            rule = f"must be within the student's {depth} layers and the teacher's {teacher_depth}, both from 1"
            hint = "leave it out to spread them evenly"
            raise OptionError("distillation.layers", [layer, followed], rule, hint)
    return list(chosen)


@contextmanager
def captured_states(embedder: Embedder) -> Iterator[dict[int, Tensor]]:
    """Within this context a forward pass stores its states by layer number, from 1; 0 is the backbone's output."""
    states: dict[int, Tensor] = {}
    backbone = plain_backbone(embedder.backbone)

    def hook_for(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def store(_: nn.Module, __: Any, output: Any) -> None:
            states[layer] = output if isinstance(output, Tensor) else output[0]

        return store

    modules = {_LAST: backbone, **dict(enumerate(layers(backbone), start=1))}
    handles = [module.register_forward_hook(hook_for(number)) for number, module in modules.items()]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
