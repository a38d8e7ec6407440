"""P6: masking false negatives by text hash costs at most 1 % of a step of 16,384 pairs."""

import time

import torch

from benchmarks.harness import compare, options, record
from benchmarks.workloads import small_step, synthetic_batch
from embeddings.losses import InfoNCE, tiled_cross_entropies
from embeddings.training import GradCache

WIDTH, ENCODER_PAIRS = 384, 128


def main() -> None:
    """Time the loss with and without masks, and divide the difference by the time of a small encoder's step."""
    chosen = options(__doc__)
    num_pairs, encoder_pairs, num_layers = (128, 4, 1) if chosen.tiny else (16_384, ENCODER_PAIRS, 6)
    batch = synthetic_batch(num_pairs, 1)
    generator = torch.Generator().manual_seed(0)
    query_BD, candidate_CD = (torch.randn(num_pairs, WIDTH, generator=generator).requires_grad_() for _ in range(2))
    loss, targets, scale = InfoNCE(temperature=0.05, similarity="dot"), torch.arange(num_pairs), torch.tensor(20.0)

    def masked() -> object:
        return torch.autograd.grad(loss(query_BD, candidate_CD, batch).loss, [query_BD, candidate_CD])

    def unmasked() -> object:
        value = tiled_cross_entropies([query_BD], [candidate_CD], scale, targets).loss_W[0]
        return torch.autograd.grad(value, [query_BD, candidate_CD])

    torch.testing.assert_close(masked(), unmasked())
    ratio = compare(masked, unmasked, chosen)
    record(chosen, f"P6 loss with masks over loss without, {num_pairs} pairs", ratio, "ratio", "none", "torch")
    start = time.process_time()
    unmasked()
    loss_seconds = time.process_time() - start
    step, small = small_step(WIDTH, num_layers), synthetic_batch(encoder_pairs, 64)
    start = time.process_time()
    GradCache(2048).step(step, small)
    step_seconds = (time.process_time() - start) * num_pairs / encoder_pairs
    share = (ratio.median - 1) * loss_seconds / (step_seconds + loss_seconds)
    record(
        chosen, "P6 masks as a share of a step, six layers, 64 tokens, scaled from 128 pairs", share, "share", "<=0.01"
    )


if __name__ == "__main__":
    main()
