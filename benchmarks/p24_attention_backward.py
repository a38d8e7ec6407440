"""P24: attention's forward and backward pass in bfloat16 on a CPU, with its backward pass in float32, beside torch's.

The shapes are those of mini-batches of 8,192 tokens: MiniLM's 12 heads of width 32, SmolLM2's 9 of 64, with a mask, up
to `MAX_SIZE`. Longer texts have torch's function.
"""

import torch
from torch import nn
from transformers import AttentionInterface

from benchmarks.harness import compare, options, record
from benchmarks.workloads import assert_equal_gradients
from embeddings.models.half_precision import MAX_SIZE, use_half_precision

TOKENS, LENGTHS = 8_192, (32, 64, 128, 256)
# The most that a gradient may differ by, over its norm. Usual are 0.003.
GRADIENT_ERROR = 2**-6
# Heads and their width.
SHAPES = {"MiniLM": (12, 32), "SmolLM2": (9, 64)}


class Layer(nn.Module):
    """An attention layer without weights, as transformers calls its functions."""

    is_causal = False


def main() -> None:
    """Time both passes of each shape."""
    chosen = options(__doc__)
    torch.manual_seed(0)
    tokens, lengths = (256, (32,)) if chosen.tiny else (TOKENS, LENGTHS)
    attention = AttentionInterface()["sdpa"]
    ours, theirs = Layer().train(), Layer().train()
    use_half_precision(ours)
    for name, (num_heads, width) in SHAPES.items():
        for length in (each for each in lengths if each * width <= MAX_SIZE):
            shape = (tokens // length, num_heads, length, width)
            query, key, value = (torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
            mask = torch.ones(shape[0], 1, length, length, dtype=torch.bool)
            mask[::2, ..., length * 3 // 4 :] = False

            def passes(layer: Layer) -> list[torch.Tensor]:
                output, _ = attention(layer, query, key, value, mask)  # noqa: B023
                return [output, *torch.autograd.grad(output.float().square().sum(), [query, key, value])]  # noqa: B023

            (output, *actual), (expected_output, *expected) = passes(ours), passes(theirs)
            torch.testing.assert_close(output, expected_output, rtol=0, atol=0)
            for of_ours, of_torch in zip(actual, expected, strict=True):
                assert_equal_gradients(of_ours.double(), of_torch.double(), GRADIENT_ERROR)
            ratio = compare(lambda: passes(ours), lambda: passes(theirs), chosen)
            title = f"P24 attention with its backward pass in float32 over torch's in bfloat16, {name}, {length} tokens"
            record(chosen, title, ratio, "ratio", "<=1", "torch")


if __name__ == "__main__":
    main()
