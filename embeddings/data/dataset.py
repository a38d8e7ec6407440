"""One source as a data set of examples."""

import os
from collections.abc import Sequence
from functools import partial

from embeddings.common.errors import InputError
from embeddings.common.log import logger
from embeddings.common.randomness import derive_seed
from embeddings.common.text import TextSettings
from embeddings.data.cache import CachedSource, open_cached
from embeddings.data.candidates import CandidateRule, ClassExamples, LabelTexts, StoredCandidates
from embeddings.data.examples import Example, RowDraw
from embeddings.data.files import fill_path
from embeddings.data.level_choice import places_of_level
from embeddings.data.records import label_key
from embeddings.data.sources import SourceConfig
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.data.table import StoredRow

DEFAULT_NUM_NEGATIVES = 7


def open_source(
    config: SourceConfig, cache_dir: str | os.PathLike[str] | None = None, text: TextSettings | None = None
) -> "SourceDataset":
    """A source ready for training, converted first where it has not been yet.

    Args:
        config: The source.
        cache_dir: Folder of converted sources, else `$EMBED_CACHE`, else `.cache/embeddings`.
        text: What an instruction becomes; None for the default template.

    Raises:
        InputError: If the source cannot be read, or its rows do not suit the conversion.
        OptionError: If `label_texts` does not match the labels found.
    """
    return SourceDataset(config, open_cached(config, cache_dir), text)


class SourceDataset:
    """Examples of one source, by row and draw key.

    Determinism: an example is a pure function of (source, row, draw, level rule); neither ranks nor workers matter.
    Length: `max_rows`, or all rows (without those that `single_text_classes` leaves out) where there are no more.
    Guarantees: it can be pickled and forked: data stays in memory-mapped files, which are opened again.

    Args:
        config: The source.
        cached: Its converted form.
        text: What an instruction becomes; None for the default template.

    Raises:
        InputError: If the rows do not suit the conversion.
        OptionError: If `label_texts` does not match the labels found.
    """

    def __init__(self, config: SourceConfig, cached: CachedSource, text: TextSettings | None = None) -> None:
        self.config, self.cached, self._text = config, cached, text or TextSettings()
        self._candidates = _candidate_rule(config, cached)
        self._paired = cached.classes if config.single_text_classes == "leave_out" else None
        self._total = len(cached.table) if self._paired is None else self._paired.num_paired
        self._length = min(self._total, config.max_rows or self._total)
        self._prompts = config.query_prompts(self._text)
        self._surrogates: SurrogateVectors | None = None
        if config.surrogate_vectors is not None:
            self._surrogates = SurrogateVectors(fill_path(config.surrogate_vectors), cached.folder.name)
        if self._total == 0:
            raise InputError(f"source {config.name!r}", "no class has two texts", "use conversion: class_by_label")
        if self._total < len(cached.table):
            logger.info(
                "source %s: %d of %d rows are no queries, since their class has only one text",
                config.name,
                len(cached.table) - self._total,
                len(cached.table),
            )

    def __len__(self) -> int:
        """Number of examples of an epoch."""
        return self._length

    @property
    def surrogate_width(self) -> int | None:
        """Width of the surrogate's vectors, S, or None where the source has none."""
        return None if self._surrogates is None else self._surrogates.width

    def warn_of_unused_columns(self, num_negatives: int) -> None:
        """Name, in one line, columns that look like a field and are not used; not negatives that nobody asked for."""
        found = {
            name: field
            for name, field in self.cached.unused_columns.items()
            if num_negatives > 0 or field != "negatives"
        }
        if not found:
            return
        fixes: list[str] = []
        first: dict[str, str] = {}
        for name, field in found.items():
            if field:
                first.setdefault(field, name)
        if mapping := ", ".join(f"{field}: {name}" for field, name in first.items()):
            fixes.append(f"to use one, map it: columns: {{{mapping}}}")
        if "" in found.values():
            fixes.append("a score counts with conversion: sts alone")
        logger.warning("source %s: columns not used: %s; %s", self.config.name, ", ".join(found), "; ".join(fixes))

    def warn_of_unscored_negatives(self) -> None:
        """Say so where hard negatives have no vectors by the surrogate, so that a filter leaves them where they are."""
        if self._surrogates is None or self._surrogates.has_negatives:
            return
        if any(levels.size for levels in self.cached.table.negative_levels()):
            logger.warning(
                "source %s: its hard negatives have no vectors in %s, so a filter of false negatives leaves those of "
                "other queries in; encode them too (`cluster --negatives true`)",
                self.config.name,
                self._surrogates.folder,
            )

    def __getitem__(self, entry: RowDraw) -> Example:
        """The example of a row of this source; `source` is 0."""
        return self.__getitems__([entry])[0]

    def __getitems__(self, entries: Sequence[RowDraw]) -> list[Example]:
        """The examples of some entries, in their order; their rows are read together."""
        indices = [self._stored_index(entry.row) for entry in entries]
        return list(map(self._example, entries, indices, self.cached.table.rows(indices)))

    def _example(self, entry: RowDraw, index: int, stored: StoredRow) -> Example:
        positives, negatives, negative_labels = self._candidates(stored, index, entry.draw)
        places: Sequence[int] = range(len(negatives))
        if entry.rule is not None:
            places = places_of_level(negatives, entry.rule, entry.draw)
            negatives = tuple(negatives[place] for place in places)
        prompt = self._prompts[0]
        if stored.instruction:
            prompt = self._text.instruction_prompt(stored.instruction)
        elif len(self._prompts) > 1:
            prompt = self._prompts[derive_seed(entry.draw, "instruction") % len(self._prompts)]
        return Example(
            row=entry.row,
            draw=entry.draw,
            source=0,
            query=stored.query,
            positives=positives,
            negatives=negatives,
            label=stored.label,
            negative_labels=negative_labels,
            query_prompt=prompt,
            document_prompt=prompt if self.config.symmetric else self.config.document_prompt,
            in_batch_negatives=self.config.in_batch_negatives,
            surrogate_query=None if self._surrogates is None else self._surrogates.query(index),
            surrogate_positives=None if self._surrogates is None else self._surrogates.positives(index),
            surrogate_negatives=(
                partial(self._surrogates.negatives, index, places)
                if self._surrogates is not None and self._surrogates.has_negatives
                else None
            ),
            level=0 if entry.rule is None else entry.rule.level,
        )

    def _stored_index(self, row: int) -> int:
        """The stored row of a row: with `max_rows`, a random one of the row's own stretch of the source."""
        if not 0 <= row < self._length:
            raise IndexError(f"row {row} of {self._length}")
        if self._length < self._total:
            start, end = row * self._total // self._length, (row + 1) * self._total // self._length
            row = start + derive_seed(self.config.seed, "max_rows", row) % (end - start)
        return row if self._paired is None else self._paired.paired(row)


def _candidate_rule(config: SourceConfig, cached: CachedSource) -> CandidateRule:
    if cached.classes is None:
        return StoredCandidates()
    if len(cached.labels) < 2:
        raise InputError(
            f"source {config.name!r}", f"all rows have the label {cached.labels[0]!r}", "give it two classes or more"
        )
    num_negatives = DEFAULT_NUM_NEGATIVES if config.num_negatives is None else config.num_negatives
    if config.conversion == "class_by_example":
        if cached.lone_class is not None and config.single_text_classes == "refuse":
            label, where = cached.lone_class
            raise InputError(
                where,
                f"the class {label!r} has only one text, so it has no positive",
                "remove its rows, or set single_text_classes: leave_out",
            )
        return ClassExamples(cached.table, cached.classes, num_negatives)
    if config.conversion == "binary_by_label" and len(cached.labels) != 2:
        raise InputError(
            f"source {config.name!r}",
            f"it has {len(cached.labels)} labels, expected two",
            "use conversion: class_by_example or class_by_label",
        )
    return LabelTexts(_label_texts(config, cached.labels), num_negatives)


def _label_texts(config: SourceConfig, labels: list[str]) -> list[str]:
    """The text of each label, by its code."""
    if not config.label_texts:
        for label in labels:
            if label.lstrip("-").isdigit() or label in ("true", "false"):
                raise config.fault("label_texts", label, "must give a text to labels that are no words", "add it")
        return labels
    given = {label_key(label): text for label, text in config.label_texts.items()}
    for label in labels:
        if label not in given:
            raise config.fault("label_texts", sorted(given), f"must give a text to the label {label!r}", "add it")
    for label in given:
        if label not in labels:
            raise config.fault("label_texts", label, "names a label that the source does not have", "remove it")
    if len(set(given.values())) < len(given):
        raise config.fault("label_texts", given, "must give each label its own text", "tell them apart")
    return [given[label] for label in labels]
