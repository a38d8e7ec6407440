"""P8: anchor-token-aware pooling adds at most 2 % to the time of an encode at 128 tokens a text, and 5 % at 512.

An encoder with 12 layers, width 768 and random weights is compared with itself under mean pooling. Both have the same
weights. All of `Encoder.encode` is timed, from texts to vectors.
"""

from functools import partial

import numpy as np
import torch

from benchmarks.harness import compare, options, record
from benchmarks.workloads import BASE_WIDTH, random_encoder, random_texts
from embeddings.inference import Encoder
from embeddings.models import AnchorTokenPooling, MeanPooling

TOKENS_TIMED = 512


def main() -> None:
    """Check that both encoders have equal states before the pooling, then time them at both lengths."""
    chosen = options(__doc__)
    width, num_layers = (48, 2) if chosen.tiny else (BASE_WIDTH, 12)
    for length, target in ((128, "<=1.02"), (512, "<=1.05")):
        anchor = random_encoder(AnchorTokenPooling(width), length, num_layers)
        mean = random_encoder(MeanPooling(width), length, num_layers)
        # Both use the same tensors: copies have other addresses, which alone can cost a percent.
        mean.load_state_dict(anchor.state_dict(), assign=True)
        ids_NL = torch.arange(2 * length).view(2, length)
        with torch.inference_mode():
            states = [model.backbone(input_ids=ids_NL).last_hidden_state for model in (anchor, mean)]
        torch.testing.assert_close(*states, rtol=0, atol=0)
        texts = random_texts(max(1, TOKENS_TIMED // length), length)
        for precision in ("float32", "bfloat16"):
            ours, peer = (Encoder(model, device="cpu", precision=precision) for model in (anchor, mean))
            if precision == "bfloat16" and Encoder(anchor, device="cpu").dtype != torch.bfloat16:
                continue
            if np.array_equal(ours.encode(texts), peer.encode(texts)):
                raise RuntimeError("both poolings return the same vectors: nothing to compare")
            ratio = compare(partial(ours.encode, texts), partial(peer.encode, texts), chosen)
            claim = f"P8 encode with anchor-token-aware over mean pooling, {length} tokens, {precision}"
            record(chosen, claim, ratio, "ratio", target if precision == "float32" else "none", "torch, transformers")


if __name__ == "__main__":
    main()
