"""From the tensors of a published checkpoint to ours: which of theirs each of ours is, and what is left over."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from embeddings.common import InputError
from embeddings.interop.released.checkpoint import ReleasedWeights

_WHOLE_COPY = "take a whole copy of the checkpoint"


@dataclass(frozen=True)
class Published:
    """Where one of our tensors lies in a published checkpoint.

    Args:
        name: Its name there. Words in braces stand for what the same words matched in our name.
        part: Which of its equal parts along the first dimension ours is.
        parts: Into how many parts it is cut.
        stacked: Whether the first two dimensions of ours are laid end to end there.
    """

    name: str
    part: int = 0
    parts: int = 1
    stacked: bool = False

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The published shape of a tensor that is of this shape here."""
        if self.stacked:
            return (ours[0] * ours[1], *ours[2:])
        return (ours[0] * self.parts, *ours[1:])

    def take(self, tensor: Tensor, ours: tuple[int, ...]) -> Tensor:
        """Our tensor, of its own memory, of the published one."""
        if self.parts > 1:
            tensor = tensor.chunk(self.parts)[self.part].clone()
        return tensor.view(ours)


@dataclass(frozen=True)
class KeyReport:
    """What became of the tensors of a checkpoint; none that was needed was missing.

    Attributes:
        used: Each published tensor that was read, and ours that it went to.
        left: Published tensors that the model has no use for.
    """

    used: dict[str, list[str]]
    left: list[str]

    def __or__(self, other: "KeyReport") -> "KeyReport":
        """Of two checkpoints read one after the other."""
        return KeyReport(self.used | other.used, self.left + other.left)


class KeyMap:
    """The names of a family of checkpoints.

    Args:
        family: What the checkpoints are called in messages.
        places: Our names, and where each lies: its name there, or a `Published`. `{n}` matches a number and any other
            word in braces anything; the first name that matches counts.
        left: Names of published tensors that are left out on purpose, written alike.
    """

    def __init__(self, family: str, places: Mapping[str, str | Published], left: Sequence[str] = ()) -> None:
        self.family = family
        self._places = [
            (_pattern(ours), Published(place) if isinstance(place, str) else place) for ours, place in places.items()
        ]
        self._left = [_pattern(name) for name in left]

    def place_of(self, ours: str) -> Published:
        """Where one of our tensors lies."""
        for pattern, place in self._places:
            if found := pattern.fullmatch(ours):
                name = place.name.format(**found.groupdict())
                return Published(name, place.part, place.parts, place.stacked)
        raise AssertionError(f"the key map of {self.family} has no place for {ours}")

    def leaves(self, published: str) -> bool:
        """Whether a published tensor is left out on purpose."""
        return any(pattern.fullmatch(published) for pattern in self._left)

    def take(self, weights: ReleasedWeights, expected: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], KeyReport]:
        """The published tensors under our names.

        Args:
            weights: The checkpoint's.
            expected: A tensor of the right shape, on any device, for each of our names.

        Raises:
            InputError: If the checkpoint lacks a tensor, has one that is not known, or one is of another shape.
        """
        places = {ours: self.place_of(ours) for ours in expected}
        used: dict[str, list[str]] = {}
        for ours, place in places.items():
            used.setdefault(place.name, []).append(ours)
        left = self._check_names(weights, used)
        for ours, place in places.items():
            shape = place.shape(tuple(expected[ours].shape))
            if weights.shapes[place.name] != shape:
                what = f"{place.name} has shape {weights.shapes[place.name]}, by config.json it has {shape}"
                raise InputError(str(weights.folder), what, "take config.json and weights from one checkpoint")
        state = {
            ours: place.take(weights.tensor(place.name), tuple(expected[ours].shape)) for ours, place in places.items()
        }
        return state, KeyReport(used, left)

    def _check_names(self, weights: ReleasedWeights, used: Mapping[str, list[str]]) -> list[str]:
        """The tensors that are left out on purpose; all others must be known, and none missing."""
        missing = sorted(used.keys() - weights.shapes.keys())
        if missing:
            what = f"lacks {len(missing)} of the {len(used)} tensors of {self.family}, {missing[0]} first"
            raise InputError(str(weights.folder), what, _WHOLE_COPY)
        others = sorted(weights.shapes.keys() - used.keys())
        unknown = [name for name in others if not self.leaves(name)]
        if unknown:
            what = f"has {len(unknown)} tensors that {self.family} has no place for, {unknown[0]} first"
            raise InputError(str(weights.folder), what, "import a checkpoint of this family alone")
        return others


def _pattern(name: str) -> re.Pattern[str]:
    """What a name with words in braces matches."""
    parts = re.split(r"\{(\w+)\}", name)
    texts, words = parts[::2], parts[1::2]
    groups = [rf"(?P<{word}>{'[0-9]+' if word == 'n' else '.+'})" for word in words]
    return re.compile("".join(re.escape(text) + group for text, group in zip(texts, [*groups, ""], strict=True)))
