"""Hard negatives that the namespace gives: functions near another one are like it, and are not it."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from embeddings.common.randomness import numpy_generator
from embeddings.data.docstrings.extract import DocumentedFunction
from embeddings.data.examples import Negative

_TRIES = 8

Key = Callable[[DocumentedFunction], str]


def namespace_negatives(functions: Sequence[DocumentedFunction], seed: int) -> list[tuple[Negative, ...]]:
    """For each function one negative of each granularity, hardest first.

    Level 1 is another function of the same class (or of the module's top level), level 2 of the same module, level 3
    of the same package, level 4 of another package: the four granularities of multi-granularity hard negatives
    without a language model. A level that has no other function, or none found in a few draws, is left out.

    Determinism: a pure function of the functions, their order and the seed.

    Args:
        functions: The training functions.
        seed: Seed of the draws.
    """
    keys: tuple[Key, ...] = (_scope, lambda f: f.module, lambda f: f.package, lambda f: "")
    groups = [_groups(functions, key) for key in keys]
    draw_NLT = numpy_generator(seed, "namespace").random((len(functions), len(keys), _TRIES))
    return [_of_one(functions, row, keys, groups, draw_NLT[row]) for row in range(len(functions))]


def _of_one(
    functions: Sequence[DocumentedFunction],
    row: int,
    keys: Sequence[Key],
    groups: Sequence[dict[str, list[int]]],
    draw_LT: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]",
) -> tuple[Negative, ...]:
    own = functions[row]
    found = []
    for level, (key, members) in enumerate(zip(keys, groups, strict=True)):
        group = members[key(own)]
        for draw in draw_LT[level]:
            other = functions[group[int(draw * len(group))]]
            nearer = level > 0 and keys[level - 1](other) == keys[level - 1](own)
            if other.id != own.id and not nearer:
                found.append(Negative(other.document, level + 1))
                break
    return tuple(found)


def _scope(function: DocumentedFunction) -> str:
    return function.id.rpartition(".")[0]


def _groups(functions: Sequence[DocumentedFunction], key: Key) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for row, function in enumerate(functions):
        groups[key(function)].append(row)
    return groups
