"""P13: sorted by length, at least 0.95 of computed tokens are not padding, and encoding is at least 1.4 times faster.

The peer encodes the texts in the given order, in mini-batches of the same token budget. For texts of one length both
plans are equal, and sorting must not cost more than 2 %.
"""

import torch
from torch import Tensor

from benchmarks.harness import Ratio, compare, options, record
from benchmarks.workloads import minilm_folder, question_answer_texts
from embeddings.common import TokenBatch
from embeddings.common.types import plan_mini_batches
from embeddings.data.tokenize import TextTokenizer
from embeddings.models.embedder import Embedder

MINI_BATCH_TOKENS = 1024
NUM_COUNTED, NUM_TIMED = 2000, 128


def arrival_plan(lengths_N: Tensor, mini_batch_tokens: int) -> list[Tensor]:
    """Mini-batches of texts in the order given, each as large as the budget allows once padded."""
    plan: list[list[int]] = []
    longest = 0
    for row, length in enumerate(lengths_N.tolist()):
        if plan and max(longest, length) * (len(plan[-1]) + 1) <= mini_batch_tokens:
            plan[-1].append(row)
            longest = max(longest, length)
        else:
            plan.append([row])
            longest = length
    return [torch.tensor(rows) for rows in plan]


def utilisation(lengths_N: Tensor, plan: list[Tensor]) -> float:
    """Text tokens over computed tokens, which include padding."""
    padded = sum(len(rows_n) * int(lengths_N[rows_n].max()) for rows_n in plan)
    return int(lengths_N.sum()) / padded


@torch.inference_mode()
def encode(embedder: Embedder, tokens: TokenBatch, plan: list[Tensor]) -> Tensor:
    """The vectors of all texts, in the order of the texts."""
    vectors = torch.cat([embedder(tokens.padded(rows_n, embedder.pad_token_id)) for rows_n in plan])
    vector_ND = torch.empty_like(vectors)
    vector_ND[torch.cat(plan)] = vectors
    return vector_ND


def described(lengths_N: Tensor) -> str:
    """A description of texts by their number and average length."""
    return f"{len(lengths_N)} texts of {float(lengths_N.double().mean()):.0f} tokens on average"


def main() -> None:
    """Count tokens of many texts, then time both plans on some of them and on texts of one length."""
    chosen = options(__doc__)
    budget = 64 if chosen.tiny else MINI_BATCH_TOKENS
    embedder = Embedder.from_pretrained(minilm_folder())
    if chosen.tiny:
        many = ["a word " * count for count in (1, 9, 2, 7, 3, 5)]
    else:
        many = [text for pair in question_answer_texts(NUM_COUNTED // 2) for text in pair]
    tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)
    mixed = tokenizer(many[:NUM_TIMED], "document")
    length = 12 if chosen.tiny else 96
    flat = TokenBatch.from_lists([[101, *[2000] * (length - 2), 102]] * len(mixed), [[True] * length] * len(mixed))

    def ratio_of(tokens: TokenBatch) -> Ratio:
        """The time of both plans over these texts."""
        peer_plan = arrival_plan(tokens.lengths_N, budget)

        # Planning is part of our time.
        def sorted_by_length() -> Tensor:
            return encode(embedder, tokens, plan_mini_batches(tokens.lengths_N, budget))

        def as_they_come() -> Tensor:
            return encode(embedder, tokens, peer_plan)

        torch.testing.assert_close(sorted_by_length(), as_they_come(), rtol=0, atol=1e-5)
        return compare(sorted_by_length, as_they_come, chosen)

    counted_N = tokenizer(many, "document").lengths_N
    name = f"{described(counted_N)}, mini-batches of {budget}"
    share = utilisation(counted_N, plan_mini_batches(counted_N, budget))
    record(chosen, f"P13 token utilisation, {name}", share, "fraction", ">=0.95")
    share = utilisation(counted_N, arrival_plan(counted_N, budget))
    record(chosen, f"P13 token utilisation in arrival order, {name}", share, "fraction", "none")
    for kind, tokens, target in (("mixed", mixed, "<=0.714"), ("equal", flat, "<=1.02")):
        claim = f"P13 time over arrival order, {kind} lengths, {described(tokens.lengths_N)}"
        record(chosen, claim, ratio_of(tokens), "ratio", target, "torch, transformers")


if __name__ == "__main__":
    main()
