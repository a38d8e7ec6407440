"""P9: anchor-token-aware pooling is at least 1.3 times faster than with attention matrices from the backbone.

The peer is transformers' eager attention with `output_attentions=True`: the same weights are summed from the last
matrix. Ours uses the backbone's own attention function. It needs at most 25 % of the peer's memory. Its memory grows
with the length of a text as the states do: twice the length needs at most twice the memory.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.harness import compare, options, peak_growth_bytes, record
from benchmarks.workloads import BASE_WIDTH, random_encoder
from embeddings.models import AnchorTokenPooling, Embedder

NUM_TEXTS = 2
LENGTHS = (512, 1024, 2048, 4096)
PEERS = "transformers, torch"


def token_ids(num_texts: int, length: int) -> Tensor:
    """Random ids, (N, L)."""
    return torch.randint(1000, 20000, (num_texts, length), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def from_capture(model: Embedder, ids_NL: Tensor) -> tuple[Tensor, Tensor]:
    """Ours: the vectors, (N, H), and the weights of the tokens, (N, L)."""
    pooling, is_token_NL = model.pooling, torch.ones_like(ids_NL, dtype=torch.bool)
    assert isinstance(pooling, AnchorTokenPooling)
    assert model.capture is not None
    with model.capture.open() as layers:
        state_NLH = model.backbone(input_ids=ids_NL).last_hidden_state
    weight_NL = pooling.weights(is_token_NL, None, layers())
    return (weight_NL[:, None] @ state_NLH)[:, 0], weight_NL


@torch.inference_mode()
def from_matrices(model: Embedder, ids_NL: Tensor) -> tuple[Tensor, Tensor]:
    """The peer: the same from the attention matrix of the last layer."""
    output = model.backbone(input_ids=ids_NL, output_attentions=True)
    weight_NL = (output.attentions[-1] * ids_NL.shape[1] + 1).log().sum(dim=(1, 2))
    weight_NL = weight_NL / weight_NL.sum(dim=1, keepdim=True)
    return (weight_NL[:, None] @ output.last_hidden_state)[:, 0], weight_NL


def model_of(is_ours: bool, length: int, width: int, num_layers: int) -> Embedder:
    """The encoder, with sdpa attention for ours and eager attention for the peer."""
    attn = "sdpa" if is_ours else "eager"
    return random_encoder(AnchorTokenPooling(width), length, num_layers, attn)


def measured(is_ours: bool, num_texts: int, length: int, width: int, num_layers: int) -> Iterator[None]:
    """One pass in a child process, after a short one that warms up the libraries."""
    model, run = model_of(is_ours, length, width, num_layers), from_capture if is_ours else from_matrices
    run(model, token_ids(1, 16))
    yield
    run(model, token_ids(num_texts, length))


def compare_memory(chosen: Namespace, num_texts: int, lengths: Sequence[int], size: tuple[int, int]) -> None:
    """Record the peaks of both at the shortest length, and those of ours as the length doubles."""
    peaks = [max(1, peak_growth_bytes(chosen, measured, way, num_texts, lengths[0], *size)) for way in (True, False)]
    print(f"peaks: ours {peaks[0] / 2**20:.0f} MiB, matrices {peaks[1] / 2**20:.0f} MiB")
    texts = f"{num_texts} texts of {lengths[0]} tokens"
    share = peaks[0] / peaks[1]
    record(chosen, f"P9 memory over the attention matrices' route, {texts}", share, "ratio", "<=0.25", PEERS)
    own_peaks = [max(1, peak_growth_bytes(chosen, measured, True, 1, longer, *size)) / 2**20 for longer in lengths]
    for longer, peak in zip(lengths, own_peaks, strict=True):
        record(chosen, f"P9 peak memory of one text of {longer} tokens", peak, "MiB", "none", PEERS)
    doubling = max(after / before for before, after in pairwise(own_peaks))
    claim = f"P9 most growth of memory as a text's length doubles, {lengths[0]} to {lengths[-1]} tokens"
    record(chosen, claim, doubling, "ratio", "<=2", PEERS)


def compare_times(chosen: Namespace, num_texts: int, length: int, size: tuple[int, int]) -> None:
    """Check that both return the same weights and vectors, then time them."""
    ours, peer = (model_of(is_ours, length, *size) for is_ours in (True, False))
    ids_NL = token_ids(num_texts, length)
    (vector_NH, weight_NL), (expected_NH, expected_NL) = from_capture(ours, ids_NL), from_matrices(peer, ids_NL)
    torch.testing.assert_close(weight_NL, expected_NL, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(vector_NH, expected_NH, rtol=1e-4, atol=1e-5)
    texts = f"{num_texts} text{'s' if num_texts > 1 else ''} of {length} tokens"
    ratio = compare(partial(from_capture, ours, ids_NL), partial(from_matrices, peer, ids_NL), chosen)
    record(chosen, f"P9 time over the attention matrices' route, {texts}", ratio, "ratio", "<=0.77", PEERS)


def main() -> None:
    """Measure the memory, which other work on the machine does not change, then the times."""
    chosen = options(__doc__)
    num_texts, lengths = (2, (32, 64, 128)) if chosen.tiny else (NUM_TEXTS, LENGTHS)
    size = (48, 2) if chosen.tiny else (BASE_WIDTH, 12)
    compare_memory(chosen, num_texts, lengths, size)
    compare_times(chosen, num_texts, lengths[0], size)
    for longer in lengths[1:-1]:
        compare_times(chosen, 1, longer, size)


if __name__ == "__main__":
    main()
