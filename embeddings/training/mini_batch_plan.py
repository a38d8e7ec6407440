"""The mini-batches of a contrastive step, in the order they run."""

from dataclasses import dataclass, replace

from torch import Tensor

from embeddings.common import ContrastiveBatch, TokenBatch
from embeddings.common.types import plan_mini_batches

QUERY, CANDIDATE, CONTEXT = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """Texts that go through an encoder together.

    Attributes:
        tower: `QUERY`, `CANDIDATE` or `CONTEXT`.
        rows_n: Their rows in the tower, (n,) int64 on the processor.
        longest: Tokens of the longest of them; a query or candidate counts its context as one token a document.
        is_filler: Whether it only keeps ranks in step: it is embedded, and its gradient is zero.
    """

    tower: int
    rows_n: Tensor
    longest: int
    is_filler: bool = False

    @property
    def num_tokens(self) -> int:
        """Their tokens, padding and context included."""
        return len(self.rows_n) * self.longest


def tower_tokens(batch: ContrastiveBatch, tower: int) -> TokenBatch:
    """The texts of a tower."""
    tokens = (batch.query, batch.candidate, batch.context)[tower]
    assert tokens is not None
    return tokens


def plan_stages(batch: ContrastiveBatch, mini_batch_tokens: int, mini_batch_texts: int | None) -> list[list[MiniBatch]]:
    """The mini-batches of every stage of a step: of the context, where the batch has one, then of both towers.

    Args:
        batch: The batch.
        mini_batch_tokens: Most padded tokens of a mini-batch, its texts' context included.
        mini_batch_texts: Most texts of a mini-batch; None for no such limit.
    """
    towers = plan_towers(batch, mini_batch_tokens, mini_batch_texts)
    if not has_context(batch):
        return [towers]
    return [_plan(batch, (CONTEXT,), mini_batch_tokens, mini_batch_texts), towers]


def plan_towers(batch: ContrastiveBatch, mini_batch_tokens: int, mini_batch_texts: int | None) -> list[MiniBatch]:
    """Queries and candidates, each cut by token budget, from the longest texts to the shortest.

    Args:
        batch: The batch.
        mini_batch_tokens: Most padded tokens of a mini-batch, its texts' context included.
        mini_batch_texts: Most texts of a mini-batch; None for no such limit.
    """
    return _plan(batch, (QUERY, CANDIDATE), mini_batch_tokens, mini_batch_texts)


def lengths_read(batch: ContrastiveBatch, tower: int) -> Tensor:
    """Tokens of each text of a tower as its encoder sees it, (N,) int64: context and soft prompts come before it."""
    lengths_N = tower_tokens(batch, tower).lengths_N
    num_context = 0 if batch.context is None else len(batch.context)
    return lengths_N if tower == CONTEXT else lengths_N + max(batch.num_extra_tokens, num_context)


def has_context(batch: ContrastiveBatch) -> bool:
    """Whether a step over the batch has a context stage."""
    return batch.context is not None and len(batch.context) > 0


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


def _plan(
    batch: ContrastiveBatch, towers: tuple[int, ...], mini_batch_tokens: int, mini_batch_texts: int | None
) -> list[MiniBatch]:
    plan = [
        _mini_batch(batch, tower, rows_n)
        for tower in towers
        for rows_n in plan_mini_batches(lengths_read(batch, tower), mini_batch_tokens, mini_batch_texts)
    ]
    return _longest_first(plan)


def _longest_first(plan: list[MiniBatch]) -> list[MiniBatch]:
    return sorted(plan, key=lambda mini_batch: -mini_batch.longest)


def _mini_batch(batch: ContrastiveBatch, tower: int, rows_n: Tensor) -> MiniBatch:
    return MiniBatch(tower, rows_n, int(lengths_read(batch, tower)[rows_n].max()))
