"""The mini-batches of a contrastive step, in the order they run."""

from dataclasses import dataclass, replace

from torch import Tensor

from embeddings.common import ContrastiveBatch
from embeddings.common.mini_batches import plan_mini_batches


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """Texts that go through the encoder together.

    Attributes:
        tower: 0 for queries, 1 for candidates.
        rows_n: Their rows in the tower, (n,) int64 on the processor.
        longest: Tokens of the longest of them.
        is_filler: Whether it only keeps ranks in step: it is embedded, and its gradient is zero.
    """

    tower: int
    rows_n: Tensor
    longest: int
    is_filler: bool = False

    @property
    def num_tokens(self) -> int:
        """Their tokens, padding included."""
        return len(self.rows_n) * self.longest


def plan_towers(batch: ContrastiveBatch, mini_batch_tokens: int, mini_batch_texts: int | None) -> list[MiniBatch]:
    """Queries and candidates, each cut by token budget, from the longest texts to the shortest.

    Args:
        batch: The batch.
        mini_batch_tokens: Most padded tokens of a mini-batch.
        mini_batch_texts: Most texts of a mini-batch; None for no such limit.
    """
    plan = [
        _mini_batch(batch, tower, rows_n)
        for tower, tokens in enumerate((batch.query, batch.candidate))
        for rows_n in plan_mini_batches(tokens.lengths_N, mini_batch_tokens, mini_batch_texts)
    ]
    return _longest_first(plan)


def extend_plan(plan: list[MiniBatch], count: int, batch: ContrastiveBatch) -> list[MiniBatch]:
    """The same texts in exactly `count` mini-batches, at least as many as there are.

    The largest are halved until there are enough; when each holds one text, fillers embed a short one again.
    """
    plan = list(plan)
    while len(plan) < count:
        largest = max(range(len(plan)), key=lambda index: (len(plan[index].rows_n) > 1) * plan[index].num_tokens)
        rows_n, tower = plan[largest].rows_n, plan[largest].tower
        if len(rows_n) == 1:
            plan += [replace(plan[-1], is_filler=True)] * (count - len(plan))
            break
        half = (len(rows_n) + 1) // 2
        plan[largest : largest + 1] = [_mini_batch(batch, tower, part_n) for part_n in (rows_n[:half], rows_n[half:])]
    return _longest_first(plan)


def _longest_first(plan: list[MiniBatch]) -> list[MiniBatch]:
    return sorted(plan, key=lambda mini_batch: -mini_batch.longest)


def _mini_batch(batch: ContrastiveBatch, tower: int, rows_n: Tensor) -> MiniBatch:
    lengths_N = (batch.query, batch.candidate)[tower].lengths_N
    return MiniBatch(tower, rows_n, int(lengths_N[rows_n].max()))
