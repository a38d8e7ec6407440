"""All sources of a run as one data set."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from embeddings.common.errors import OptionError
from embeddings.data.dataset import SourceDataset
from embeddings.data.examples import Example, RowDraw
from embeddings.data.samplers.base import SourceIdentity
from embeddings.data.sources import check_names


class Mixture:
    """The rows of all sources one after another.

    Determinism: an example is a pure function of the sources and of (row, draw, level rule).
    Length: the sum of the sources' lengths.
    Guarantees: it can be pickled and forked, since its sources can. `surrogate_width` is that of the surrogate's
        vectors of those sources that have them, None where none has.

    Args:
        sources: The sources, at least one, with different names.

    Raises:
        OptionError: If there is no source, two share a name, or their surrogates' vectors differ in width.
    """

    def __init__(self, sources: Sequence[SourceDataset]) -> None:
        if not sources:
            raise OptionError("data.sources", [], "must not be empty", "name at least one source")
        check_names([source.config.name for source in sources])
        widths = {source.surrogate_width for source in sources} - {None}
        if len(widths) > 1:
            rule = f"must be of one width in all sources, found {sorted(filter(None, widths))}"
            raise OptionError("data.sources.surrogate_vectors", "vectors", rule, "encode them with one model")
        self.surrogate_width = widths.pop() if widths else None
        self.sources = tuple(sources)
        self._starts = [0, *accumulate(len(source) for source in sources)]

    def __len__(self) -> int:
        """Number of rows of all sources."""
        return self._starts[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each source."""
        return tuple(source.config.name for source in self.sources)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each source."""
        return tuple(len(source) for source in self.sources)

    @property
    def weights(self) -> tuple[float, ...]:
        """The given weight of each source."""
        return tuple(source.config.weight for source in self.sources)

    @property
    def identities(self) -> tuple[SourceIdentity, ...]:
        """Name and content key of each source."""
        return tuple(SourceIdentity(source.config.name, source.cached.key) for source in self.sources)

    def source_of(self, row: int) -> int:
        """The index of the source that a row belongs to."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return bisect_right(self._starts, row) - 1

    def __getitem__(self, entry: RowDraw) -> Example:
        """The example of a row for a draw key."""
        return self.__getitems__([entry])[0]

    def __getitems__(self, entries: Sequence[RowDraw]) -> list[Example]:
        """The examples of some entries, in their order; those of a source are read together."""
        sources = [self.source_of(entry.row) for entry in entries]
        read = {}
        for source in set(sources):
            own = [entry for entry, its in zip(entries, sources, strict=True) if its == source]
            local = [entry._replace(row=entry.row - self._starts[source]) for entry in own]
            read[source] = iter(self.sources[source].__getitems__(local))
        return [
            replace(next(read[source]), row=entry.row, source=source)
            for entry, source in zip(entries, sources, strict=True)
        ]
