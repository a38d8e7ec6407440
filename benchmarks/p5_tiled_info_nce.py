"""P5: tiled cross-entropy, forward and backward, takes at most 1.15 of the dense path's time and 5 % of its memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.harness import compare, options, peak_growth_bytes, record
from embeddings.losses import tiled_cross_entropies

WIDTH, SCALE = 384, 50.0


def vectors(num_rows: int) -> list[Tensor]:
    """Unit rows and columns that require gradients."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(num_rows, WIDTH, generator=generator) for _ in range(2)]
    return [torch.nn.functional.normalize(value).requires_grad_() for value in drawn]


def dense(row_RD: Tensor, column_CD: Tensor) -> tuple[Tensor, ...]:
    """The peer: the full score matrix."""
    loss = torch.nn.functional.cross_entropy(row_RD @ column_CD.T * SCALE, torch.arange(len(row_RD)))
    return torch.autograd.grad(loss, [row_RD, column_CD])


def tiled(row_RD: Tensor, column_CD: Tensor) -> tuple[Tensor, ...]:
    """Ours."""
    loss = tiled_cross_entropies([row_RD], [column_CD], torch.tensor(SCALE), torch.arange(len(row_RD))).loss_W[0]
    return torch.autograd.grad(loss, [row_RD, column_CD])


def measured(num_rows: int, is_tiled: bool) -> Iterator[None]:
    """One pass in a child process, after a warm-up of the libraries."""
    row_RD, column_CD = vectors(num_rows)
    (tiled if is_tiled else dense)(row_RD[:64], column_CD[:64])
    yield
    (tiled if is_tiled else dense)(row_RD, column_CD)


def main() -> None:
    """Time both, then measure their peaks; the memory of the gradients is subtracted from both."""
    chosen = options(__doc__)
    num_rows = 128 if chosen.tiny else 8192
    row_RD, column_CD = vectors(num_rows)
    for found, expected in zip(tiled(row_RD, column_CD), dense(row_RD, column_CD), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    ratio = compare(lambda: tiled(row_RD, column_CD), lambda: dense(row_RD, column_CD), chosen)
    record(chosen, f"P5 tiled over dense cross-entropy, {num_rows} rows", ratio, "ratio", "<=1.15", "torch")
    gradient_bytes = 2 * num_rows * WIDTH * 4
    peaks = [peak_growth_bytes(chosen, measured, num_rows, is_tiled) for is_tiled in (True, False)]
    tiled_mib, dense_mib, gradient_mib = (size / 2**20 for size in (*peaks, gradient_bytes))
    print(f"peaks: tiled {tiled_mib:.0f} MiB, dense {dense_mib:.0f} MiB, gradients {gradient_mib:.0f} MiB")
    # In a tiny run the difference may be 0.
    share = (peaks[0] - gradient_bytes) / max(1, peaks[1] - gradient_bytes)
    record(
        chosen, f"P5 memory beside the gradients, tiled over dense, {num_rows} rows", share, "ratio", "<=0.05", "torch"
    )


if __name__ == "__main__":
    main()
