"""How many of the first t draws belong to each source, without walking through them."""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class Apportionment:
    """Splits any number of draws over sources, so that the split of t + 1 draws adds one draw to the split of t.

    The sources are the leaves of a Huffman tree of their weights. A node with share q of its parent's weight gets
    floor(t·q + 1/2) of the parent's t draws and its sibling the rest. Both never shrink as t grows, all are exact
    where t is a multiple of the total of whole-number weights, and the cost is one step a source, whatever t.

    Guarantees: counts add up to t; none shrinks as t grows; a count is less than 2 away from t·p at every t (a node
    inherits q of its parent's error and adds at most 1/2; in a Huffman tree q <= 2/3 for every node but the leaves).

    Args:
        weights: One positive number a source; only their ratios matter, and those are kept exactly.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        assert weights
        assert all(weight > 0 for weight in weights)
        ratios = [Fraction(weight) for weight in weights]
        scale = lcm(*(ratio.denominator for ratio in ratios))
        self.num_sources = len(weights)
        heap = [(int(ratio * scale), source) for source, ratio in enumerate(ratios)]
        heapq.heapify(heap)
        splits: list[tuple[int, int, int, int, int]] = []
        while len(heap) > 1:
            (left_weight, left), (right_weight, right) = heapq.heappop(heap), heapq.heappop(heap)
            parent, total = self.num_sources + len(splits), left_weight + right_weight
            splits.append((parent, left, right, left_weight, total))
            heapq.heappush(heap, (total, parent))
        self._splits_from_root = splits[::-1]

    def counts(self, num_draws: int) -> list[int]:
        """Draws of each source among the first `num_draws` >= 0 of all, in the order of the weights."""
        count = [0] * (2 * self.num_sources - 1)
        count[-1] = num_draws
        for parent, left, right, left_weight, total in self._splits_from_root:
            count[left] = (2 * count[parent] * left_weight + total) // (2 * total)
            count[right] = count[parent] - count[left]
        return count[: self.num_sources]
