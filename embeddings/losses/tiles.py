"""The cross-entropy of a similarity matrix, in tiles of rows: the full matrix is never in memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from embeddings.common.text import Similarity
from embeddings.common.types import queues_work

# (tile of scores, its rows) → None: sets excluded scores to minus infinity, in place.
ExcludeInPlace = Callable[[Tensor, slice], None]
# Matrix products of fewer rows are slow.
_MIN_TILE_ROWS = 32
# Default scores per tile: 8 MB on a CPU, about its cache; 256 MB on a GPU, where each tile launches kernels.
_TILE_SIZE_OF_HOST, _TILE_SIZE_OF_DEVICE = 2**21, 2**26


def working_dtype(vector_ND: Tensor) -> torch.dtype:
    """The dtype of similarities and softmaxes: float64 for float64 vectors, else float32."""
    return torch.float64 if vector_ND.dtype == torch.float64 else torch.float32


def comparable(vector_ND: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """Vectors (N, D) whose inner products are the similarities: of unit norm for `cosine`, unchanged for `dot`.

    A zero vector stays zero: its cosine with anything is 0. Only the result and the norms are saved for the gradient.

    Precision: float32 (float64 for float64 input), with or without autocast.
    """
    vector_ND = vector_ND.to(working_dtype(vector_ND))
    if similarity == "dot":
        return vector_ND
    unit_ND: Tensor = _UnitNorm.apply(vector_ND)  # type: ignore[no-untyped-call]
    return unit_ND


def similarity_matrix(query_BD: Tensor, candidate_CD: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """The full matrix of similarities of queries and candidates, for small sets (evaluation, tests).

    Args:
        query_BD: (B, D) float.
        candidate_CD: (C, D) float.
        similarity: `cosine` or `dot`.

    Returns:
        score_BC: (B, C) float32 (float64 for float64 input).

    Precision: products in the dtype of the result, with or without autocast.
    """
    with torch.autocast(query_BD.device.type, enabled=False):
        return comparable(query_BD, similarity) @ comparable(candidate_CD, similarity).T


class _UnitNorm(torch.autograd.Function):
    """v / |v|; a zero vector stays zero and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, vector_ND: Tensor) -> Tensor:
        norm_N1 = torch.linalg.vector_norm(vector_ND, dim=-1, keepdim=True)
        inverse_N1 = torch.where(norm_N1 > 1e-12, 1 / norm_N1, 0)
        unit_ND = vector_ND * inverse_N1
        ctx.save_for_backward(unit_ND, inverse_N1)
        return unit_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> Tensor:
        """(g - (g . u) u) / |v|: the gradient along the vector is removed."""
        unit_ND, inverse_N1 = ctx.saved_tensors
        along_N1 = torch.linalg.vecdot(gradient_ND, unit_ND)[:, None]
        return torch.addcmul(gradient_ND, unit_ND, along_N1, value=-1).mul_(inverse_N1)


def scores_at_once(tile_size: int | None, device: torch.device | str) -> int:
    """Scores per tile: `tile_size` or, if it is None, 2^21 on a CPU and 2^26 on other devices."""
    if tile_size is not None:
        return tile_size
    return _TILE_SIZE_OF_DEVICE if queues_work(device) else _TILE_SIZE_OF_HOST


def tiled_cross_entropy(
    row_RD: Tensor,
    column_CD: Tensor,
    scale: Tensor,
    target_R: Tensor,
    exclude_: ExcludeInPlace | None = None,
    tile_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean cross-entropy of scaled inner products, computed in tiles of whole rows.

    loss = mean over R of  -log softmax(scale * row @ column^T)[target]. The loss is a scalar, so a tile's softmax
    determines its gradient up to a factor. Each tile adds its share of the gradient before it is freed, in three matrix
    products, as many as without tiles.

    Args:
        row_RD: (R, D) float32 or float64.
        column_CD: (C, D), same dtype.
        scale: Factor of all products, (), same dtype; may require a gradient.
        target_R: Column of each row's target, (R,) int64.
        exclude_: Sets scores of a tile to minus infinity in place, never a target's.
        tile_size: Scores in memory at once, at least 32 rows of them; None for the device's default.

    Returns:
        The loss (); and without gradients, the share of rows whose target scores above all others () and the mean
        unscaled score of the targets ().

    Precision: the dtype of the inputs; call it outside autocast.
    """
    scores = tiled_cross_entropies([row_RD], [column_CD], scale, target_R, exclude_, tile_size)
    return scores.loss_W[0], scores.accuracy_W[0], scores.positive_score_W[0]


class WidthScores(NamedTuple):
    """The results of `tiled_cross_entropies` for W widths; only the loss has a gradient.

    Attributes:
        loss_W: Mean cross-entropies, (W,).
        accuracy_W: Shares of rows whose target scores above all others, (W,).
        positive_score_W: Mean unscaled scores of the targets, (W,).
        alone_W: Shares of rows in which all scores but the target's are excluded, (W,).
    """

    loss_W: Tensor
    accuracy_W: Tensor
    positive_score_W: Tensor
    alone_W: Tensor


def tiled_cross_entropies(
    row_WRD: Sequence[Tensor],
    column_WCD: Sequence[Tensor],
    scale: Tensor,
    target_R: Tensor,
    exclude_: ExcludeInPlace | None = None,
    tile_size: int | None = None,
) -> WidthScores:
    """`tiled_cross_entropy` of the same texts at W widths, which share targets and exclusions.

    One tile of one width is in memory at a time. Exclusions are computed at the first width and stored for the others,
    at one byte per score.
    """
    vectors = [*row_WRD, *column_WCD]
    if not torch.is_grad_enabled():
        vectors, scale = [vector_ND.detach() for vector_ND in vectors], scale.detach()
    size = scores_at_once(tile_size, target_R.device)
    outputs = _TiledCrossEntropy.apply(scale, target_R, exclude_, size, *vectors)  # type: ignore[no-untyped-call]
    return WidthScores(*outputs)


class _Width:
    """The vectors of one width, and the sums over its tiles."""

    def __init__(self, row_RD: Tensor, column_CD: Tensor, needs_row: bool, needs_column: bool) -> None:
        self.row_RD, self.column_CD = row_RD, column_CD
        self.row_gradient_RD = torch.empty_like(row_RD) if needs_row else None
        self.column_gradient_CD = torch.zeros_like(column_CD) if needs_column else None
        self.loss, self.num_right, self.target_score, self.num_alone = (row_RD.new_zeros(()) for _ in range(4))

    def add_tile(self, rows: slice, scale: Tensor, target_r1: Tensor, exclude_: Callable[[Tensor], None]) -> None:
        """Add the losses and gradients of one tile of rows."""
        row_rD = self.row_RD[rows] * scale
        weight_rC = row_rD @ self.column_CD.T
        exclude_(weight_rC)
        target_score_r1 = weight_rC.gather(1, target_r1)
        rival_r1 = weight_rC.scatter_(1, target_r1, -torch.inf).amax(1, keepdim=True)
        highest_r1 = torch.maximum(rival_r1, target_score_r1)
        others_r1 = weight_rC.sub_(highest_r1).exp_().sum(1, keepdim=True)
        total_r1 = others_r1 + (target_score_r1 - highest_r1).exp()
        # The target's softmax minus one, as minus the sum of the others: exact even if the softmax is close to 1.
        weight_rC.scatter_(1, target_r1, -others_r1)
        is_right_r1 = target_score_r1 > rival_r1
        loss_r1 = torch.where(is_right_r1, others_r1.log1p(), total_r1.log() + highest_r1 - target_score_r1)
        self.loss += loss_r1.sum()
        self.num_right += is_right_r1.sum()
        self.target_score += target_score_r1.sum()
        self.num_alone += rival_r1.isneginf().sum()
        if self.row_gradient_RD is not None:
            self.row_gradient_RD[rows] = (weight_rC @ self.column_CD).div_(total_r1)
        if self.column_gradient_CD is not None:
            self.column_gradient_CD.addmm_(weight_rC.T, row_rD / total_r1)

    def scale_gradient(self, num_rows: int) -> Tensor:
        """The gradient of the scale, (); call it before `finish`."""
        assert self.row_gradient_RD is not None
        # d(loss)/d(scale) = sum over rows of row . d(loss)/d(scale * row).
        gradient: Tensor = torch.linalg.vecdot(self.row_RD, self.row_gradient_RD).sum() / num_rows
        return gradient

    def finish(self, scale: Tensor, num_rows: int) -> None:
        """Convert the gradient sums to the gradients of the mean loss."""
        if self.row_gradient_RD is not None:
            self.row_gradient_RD *= scale / num_rows
        if self.column_gradient_CD is not None:
            self.column_gradient_CD /= num_rows


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: Tensor, target_R: Tensor, exclude_: ExcludeInPlace | None, tile_size: int, *vectors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute losses and gradients of each tile while its scores are in memory."""
        num_rows, num_widths = max(1, len(target_R)), len(vectors) // 2
        needs_scale, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        widths = [
            _Width(vectors[w], vectors[num_widths + w], needs[w] or needs_scale, needs[num_widths + w])
            for w in range(num_widths)
        ]
        for rows in row_tiles(len(target_R), len(vectors[-1]), tile_size):
            exclude_in_tile_ = _tile_exclusion(exclude_, rows, store=num_widths > 1)
            for width in widths:
                width.add_tile(rows, scale, target_R[rows, None], exclude_in_tile_)
        scale_gradient_W = torch.stack([width.scale_gradient(num_rows) for width in widths]) if needs_scale else None
        for width in widths:
            width.finish(scale, num_rows)
        row_gradients = [width.row_gradient_RD if needs[w] else None for w, width in enumerate(widths)]
        ctx.save_for_backward(scale_gradient_W, *row_gradients, *(width.column_gradient_CD for width in widths))
        accuracy_W = torch.stack([width.num_right for width in widths]) / num_rows
        mean_score_W = torch.stack([width.target_score for width in widths]) / (scale * num_rows)
        alone_W = torch.stack([width.num_alone for width in widths]) / num_rows
        ctx.mark_non_differentiable(accuracy_W, mean_score_W, alone_W)
        return torch.stack([width.loss for width in widths]) / num_rows, accuracy_W, mean_score_W, alone_W

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor_W: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scale_gradient_W, *gradients = ctx.saved_tensors
        # The factor is usually 1, and on a CPU the gradients are then returned without a copy. On a GPU, reading the
        # factor would cost more than the copy.
        factors = list(factor_W.unbind()) if queues_work(factor_W.device) else factor_W.tolist()
        scaled = (
            gradient if gradient is None or (isinstance(factor, float) and factor == 1.0) else gradient * factor
            for gradient, factor in zip(gradients, factors * 2, strict=True)
        )
        return (None if scale_gradient_W is None else scale_gradient_W @ factor_W, None, None, None, *scaled)


def row_tiles(num_rows: int, num_columns: int, tile_size: int) -> Iterator[slice]:
    """Slices of whole rows, each of about `tile_size` scores and at least 32 rows."""
    height = max(_MIN_TILE_ROWS, tile_size // max(1, num_columns))
    return (slice(start, start + height) for start in range(0, num_rows, height))


def _tile_exclusion(exclude_: ExcludeInPlace | None, rows: slice, store: bool) -> Callable[[Tensor], None]:
    """A function that excludes scores of one tile; with `store` later widths reuse the first width's exclusions."""
    stored: list[Tensor] = []

    def apply_(score_rC: Tensor) -> None:
        if stored:
            score_rC.masked_fill_(stored[0], -torch.inf)
        elif exclude_ is not None:
            exclude_(score_rC, rows)
            stored.extend([score_rC.isneginf()] if store else [])

    return apply_
