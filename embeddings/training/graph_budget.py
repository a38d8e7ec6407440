"""Which graphs of a step are kept, within a share of its tokens and a limit of memory."""

import math
from collections.abc import Sequence
from itertools import accumulate

from embeddings.common import OptionError
from embeddings.training.mini_batch_plan import MiniBatch


class GraphBudget:
    """How many mini-batches of each stage keep their graphs; what memory they need is learnt from the first ones.

    Stages are asked for in the order they run, and a later stage has what the earlier ones left. Without either limit
    nothing is kept.

    Args:
        kept_fraction: Share of a step's padded tokens, 0 to 1, whose graphs may be kept; None leaves it to `kept_gib`.
        kept_gib: Memory that kept graphs may hold together, in GiB; None leaves it to `kept_fraction`.

    Raises:
        OptionError: If a limit is impossible.
    """

    def __init__(self, kept_fraction: float | None = None, kept_gib: float | None = None) -> None:
        if kept_fraction is not None and not 0 <= kept_fraction <= 1:
            raise OptionError("kept_fraction", kept_fraction, "must be within 0 and 1", "0.5 keeps half the graphs")
        if kept_gib is not None and not kept_gib >= 0:
            raise OptionError("kept_gib", kept_gib, "must be >= 0", "0 keeps no more than one graph")
        self.kept_fraction, self.kept_gib = kept_fraction, kept_gib
        self._bytes_per_token: dict[int, float] = {}

    @property
    def measures(self) -> bool:
        """Whether memory is limited, so that the first graph of each stage has to be measured."""
        return self.kept_gib is not None

    def learn(self, stage: int, num_bytes: int, num_tokens: int) -> None:
        """Remember what the graph of one mini-batch of a stage holds."""
        self._bytes_per_token[stage] = num_bytes / num_tokens

    def num_kept(self, stages: Sequence[Sequence[MiniBatch]], kept: Sequence[int] = ()) -> int:
        """How many mini-batches from the start of the next stage keep their graphs, by what is known of their memory.

        Args:
            stages: The mini-batches of every stage of the step, each in the order they run.
            kept: How many of each earlier stage keep theirs: the stage asked for is the one after these.
        """
        fraction = self.kept_fraction
        if fraction is None:
            fraction = 0.0 if self.kept_gib is None else 1.0
        tokens_left = fraction * sum(mini_batch.num_tokens for stage in stages for mini_batch in stage)
        bytes_left = math.inf if self.kept_gib is None else self.kept_gib * 2**30
        for stage, count in enumerate(kept):
            num_tokens = sum(mini_batch.num_tokens for mini_batch in stages[stage][:count])
            tokens_left -= num_tokens
            bytes_left -= num_tokens * self._need(stage)
        limit = min(tokens_left, bytes_left / self._need(len(kept)))
        return sum(tokens <= limit for tokens in accumulate(mini_batch.num_tokens for mini_batch in stages[len(kept)]))

    def _need(self, stage: int) -> float:
        """Bytes a token of a stage's graphs."""
        return max(1.0, self._bytes_per_token.get(stage, 0.0))
