"""Examples of one source or of all sources of a run, made from converted rows."""

import hashlib
import json
import os
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import atomic_path, cache_folder
from embeddings.common.process import logger
from embeddings.common.random import derive_seed, numpy_generator
from embeddings.common.text import TextSettings, canonical
from embeddings.data.records import Example, Negative, label_key
from embeddings.data.samplers.base import LevelRule, PlanEntry, SourceIdentity
from embeddings.data.sources import ROWS_FOLDER, SourceConfig, fill_path
from embeddings.data.store import CachedSource, ClassIndex, StoredRow, Table, open_cached, writing_cache
from embeddings.data.surrogate_vectors import SurrogateVectors

DEFAULT_NUM_NEGATIVES = 7
_RANDOM_TRIES = 16


class ExampleTexts(NamedTuple):
    """The positives and negatives of an example. `negative_labels` is as long as `negatives`, or empty."""

    positives: tuple[str, ...]
    negatives: tuple[Negative, ...] = ()
    negative_labels: tuple[int, ...] = ()


# (stored row, row index, draw key) → texts; random choices depend only on the index and the key.
ChooseTexts = Callable[[StoredRow, int, int], ExampleTexts]


def stored_texts(stored: StoredRow, index: int, draw: int) -> ExampleTexts:
    return ExampleTexts(tuple(stored.positives), tuple(map(Negative, stored.negatives, stored.levels)))


class ClassExamples:
    """A random other text of the query's class as the positive, random different texts of other classes as negatives.

    There are fewer than `num_negatives` if too few different texts exist.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, sections 4.2 and 5.2.4.
    """

    def __init__(self, table: Table, classes: ClassIndex, num_negatives: int) -> None:
        self.table, self.classes, self.num_negatives = table, classes, num_negatives

    def __call__(self, stored: StoredRow, index: int, draw: int) -> ExampleTexts:
        label, size = stored.label, self.classes.size(stored.label)
        generator = numpy_generator(draw, "class_by_example", index)
        seen = {canonical(stored.query)}
        # If nearly all texts of the class are equal, random draws may all fail; then its rows are searched in order.
        for position in chain(generator.integers(size, size=_RANDOM_TRIES).tolist(), range(size)):
            (positive,) = self.table.queries([self.classes.member(label, position)])
            if canonical(positive) not in seen:
                break
        seen.add(canonical(positive))
        num_outside = self.classes.num_outside(label)
        # Twice the number, because some texts may be duplicates.
        drawn = generator.choice(num_outside, size=min(num_outside, 2 * self.num_negatives), replace=False).tolist()
        rows, labels = zip(*(self.classes.outsider(label, position) for position in drawn), strict=True)
        chosen: list[tuple[Negative, int]] = []
        for text, label_of_row in zip(self.table.queries(rows), labels, strict=True):
            if canonical(text) not in seen and len(chosen) < self.num_negatives:
                seen.add(canonical(text))
                chosen.append((Negative(text), label_of_row))
        negatives, negative_labels = zip(*chosen, strict=True) if chosen else ((), ())
        return ExampleTexts((positive,), negatives, negative_labels)


class LabelTexts:
    """The text of the query's label as the positive, texts of other labels as negatives, each at most once.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, sections 4.2 and 5.2.4.
    """

    def __init__(self, texts: Sequence[str], num_negatives: int) -> None:
        self.texts, self.num_negatives = texts, num_negatives

    def __call__(self, stored: StoredRow, index: int, draw: int) -> ExampleTexts:
        num_others = len(self.texts) - 1
        generator = numpy_generator(draw, "class_by_label", index)
        drawn = generator.choice(num_others, size=min(num_others, self.num_negatives), replace=False).tolist()
        others = tuple(code + (code >= stored.label) for code in drawn)
        return ExampleTexts((self.texts[stored.label],), tuple(Negative(self.texts[code]) for code in others), others)


def positions_of_level(negatives: Sequence[Negative], rule: LevelRule, draw: int) -> list[int]:
    """Positions of the negatives (hardest first) that a level rule allows; with `cumulative`, in random order.

    A row without the level uses its nearest coarser level, or none. Negatives without levels belong to every level.
    """
    if not any(negative.level for negative in negatives):
        return list(range(len(negatives)))
    allowed = [position for position, negative in enumerate(negatives) if negative.level >= rule.level]
    if not rule.cumulative:
        nearest = min((negatives[position].level for position in allowed), default=0)
        return [position for position in allowed if negatives[position].level == nearest]
    order = numpy_generator(draw, "levels").permutation(len(allowed)).tolist()
    return [allowed[index] for index in order]


def open_source(
    config: SourceConfig, cache_dir: str | os.PathLike[str] | None = None, text: TextSettings | None = None
) -> "SourceDataset":
    """Open a source for training; the first call converts it.

    Args:
        config: The source.
        cache_dir: Folder of converted sources, else `$EMBED_CACHE`, else `.cache/embeddings`.
        text: Settings with the template of instructions; None for the defaults.
    """
    return SourceDataset(config, open_cached(config, cache_dir), text)


def source_from_rows(
    rows: Iterable[Mapping[str, Any]], name: str, cache_dir: str | os.PathLike[str] | None = None, **options: Any
) -> SourceConfig:
    """A source from rows in memory: a `datasets.Dataset`, or a list of dictionaries.

    The rows are written as JSON lines to a file named by its SHA-256, in the folder `rows/` of the converted sources,
    so that a run can resume with the same rows.

    Args:
        rows: Rows by column name, as `SourceConfig` reads them from a file; arrays become lists.
        name: Name of the source.
        cache_dir: Folder of converted sources, else `$EMBED_CACHE`, else `.cache/embeddings`.
        options: Other options of `SourceConfig`.
    """
    root = cache_folder(cache_dir).absolute()
    written, digest = root / ROWS_FOLDER / f"{uuid.uuid4().hex}.jsonl", hashlib.sha256()
    with writing_cache(root), atomic_path(written) as temporary, open(temporary, "wb") as file:
        for number, row in enumerate(rows):
            line = _json_line(row, f"source {name!r}: rows[{number}]")
            digest.update(line)
            file.write(line)
        if not file.tell():
            raise InputError(f"source {name!r}", "there are no rows", "give at least one")
    path = written.with_stem(digest.hexdigest())
    # An existing file keeps its times, so its cached hash stays valid.
    if path.exists():
        written.unlink()
    else:
        os.replace(written, path)
    return SourceConfig(name, str(path), **options)


def _json_line(row: Any, where: str) -> bytes:
    if not isinstance(row, Mapping):
        fix = "choose a split of a DatasetDict, or pass DataFrame.to_dict('records')"
        raise InputError(where, f"is a {type(row).__name__}, expected a mapping of column names to values", fix)
    try:
        # Arrays of NumPy and torch become lists, and their scalars numbers.
        return json.dumps(dict(row), default=lambda value: value.tolist()).encode() + b"\n"
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(where, f"cannot be written as JSON ({error})", "give texts, numbers and lists") from None


class SourceDataset:
    """Examples of one source: a pure function of row, draw key and level rule; safe to pickle and fork.

    Its length is `max_rows`, or all rows (without those that `single_text_classes` leaves out).
    """

    def __init__(self, config: SourceConfig, cached: CachedSource, text: TextSettings | None = None) -> None:
        self.config, self.cached, self._text = config, cached, text or TextSettings()
        self._choose_texts = _texts_rule(config, cached)
        self._paired = cached.classes if config.single_text_classes == "leave_out" else None
        self._total = len(cached.table if self._paired is None else self._paired.paired)
        self._length = min(self._total, config.max_rows or self._total)
        self._prompts = config.query_prompts(self._text)
        self.surrogates: SurrogateVectors | None = None
        if config.surrogate_vectors is not None:
            self.surrogates = SurrogateVectors(fill_path(config.surrogate_vectors), cached.key)
        if self._total == 0:
            raise InputError(f"source {config.name!r}", "no class has two texts", "use conversion: class_by_label")
        if left_out := len(cached.table) - self._total:
            why = "are left out as queries, because their class has only one text"
            logger.info("source %s: %d of %d rows %s", config.name, left_out, len(cached.table), why)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, entry: PlanEntry) -> Example:
        return self.__getitems__([entry])[0]

    def __getitems__(self, entries: Sequence[PlanEntry]) -> list[Example]:
        """The examples of a batch of entries, in order, with `source` 0; their rows are read together."""
        indices = [self._stored_index(entry.row) for entry in entries]
        return list(map(self._example, entries, indices, self.cached.table.rows(indices)))

    def _example(self, entry: PlanEntry, index: int, stored: StoredRow) -> Example:
        positives, negatives, negative_labels = self._choose_texts(stored, index, entry.draw)
        positions: Sequence[int] = range(len(negatives))
        scores: Sequence[float] = stored.scores
        if entry.rule is not None:
            positions = positions_of_level(negatives, entry.rule, entry.draw)
            negatives = tuple(negatives[position] for position in positions)
            if scores:
                num_positives = len(positives)
                scores = [*scores[:num_positives], *(scores[num_positives + position] for position in positions)]
        prompt = self._prompts[0]
        if stored.instruction:
            prompt = self._text.instruction_prompt(stored.instruction)
        elif len(self._prompts) > 1:
            prompt = self._prompts[derive_seed(entry.draw, "instruction") % len(self._prompts)]
        surrogates, negative_vectors = self.surrogates, None
        if surrogates is not None and surrogates.has_negatives:
            negative_vectors = partial(surrogates.negatives, index, positions)
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
            surrogate_query=None if surrogates is None else surrogates.query(index),
            surrogate_positives=None if surrogates is None else surrogates.positives(index),
            surrogate_negatives=negative_vectors,
            level=0 if entry.rule is None else entry.rule.level,
            scores=tuple(scores),
        )

    def _stored_index(self, row: int) -> int:
        """Index in the table of a row; with `max_rows`, a random one in the row's section of the source."""
        if not 0 <= row < self._length:
            raise IndexError(f"row {row} of {self._length}")
        if self._length < self._total:
            start, end = row * self._total // self._length, (row + 1) * self._total // self._length
            row = start + derive_seed(self.config.seed, "max_rows", row) % (end - start)
        return row if self._paired is None else int(self._paired.paired[row])


def _texts_rule(config: SourceConfig, cached: CachedSource) -> ChooseTexts:
    if cached.classes is None:
        return stored_texts
    where = f"source {config.name!r}"
    if len(cached.labels) < 2:
        raise InputError(where, f"all rows have the label {cached.labels[0]!r}", "provide at least two classes")
    num_negatives = DEFAULT_NUM_NEGATIVES if config.num_negatives is None else config.num_negatives
    if config.conversion == "class_by_example":
        if cached.lone_class is not None and config.single_text_classes == "refuse":
            label, where = cached.lone_class
            what = f"the class {label!r} has only one text, so it has no positive"
            raise InputError(where, what, "remove its rows, or set single_text_classes: leave_out")
        return ClassExamples(cached.table, cached.classes, num_negatives)
    if config.conversion == "binary_by_label" and len(cached.labels) != 2:
        what = f"it has {len(cached.labels)} labels, expected two"
        raise InputError(where, what, "use conversion: class_by_example or class_by_label")
    return LabelTexts(_label_texts(config, cached.labels), num_negatives)


def _label_texts(config: SourceConfig, labels: list[str]) -> list[str]:
    texts = {label_key(label): text for label, text in config.label_texts.items()}
    for label in labels:
        if not texts and (label.lstrip("-").isdigit() or label in ("true", "false")):
            raise config.fault("label_texts", label, "must give a text to labels that are not words", "add it")
        if texts and label not in texts:
            raise config.fault("label_texts", sorted(texts), f"must give a text to the label {label!r}", "add it")
    for label in texts:
        if label not in labels:
            raise config.fault("label_texts", label, "names a label that the source does not have", "remove it")
    if len(set(map(canonical, texts.values()))) < len(texts):
        raise config.fault("label_texts", texts, "must give each label a different text", "make them different")
    return [texts.get(label, label) for label in labels]


class Mixture:
    """The rows of all sources, concatenated; safe to pickle and fork."""

    def __init__(self, sources: Sequence[SourceDataset]) -> None:
        widths = {source.surrogates.width for source in sources if source.surrogates is not None}
        if len(widths) > 1:
            rule = f"must have the same width in all sources, got {sorted(widths)}"
            raise OptionError("data.sources.surrogate_vectors", "vectors", rule, "encode them with one model")
        self.surrogate_width = widths.pop() if widths else None
        self.has_scores = any(source.cached.table.has_scores for source in sources)
        self.sources = tuple(sources)
        self._starts = [0, *accumulate(len(source) for source in sources)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(source) for source in self.sources)

    @property
    def identities(self) -> tuple[SourceIdentity, ...]:
        return tuple(SourceIdentity(source.config.name, source.cached.key) for source in self.sources)

    def __getitem__(self, entry: PlanEntry) -> Example:
        return self.__getitems__([entry])[0]

    def __getitems__(self, entries: Sequence[PlanEntry]) -> list[Example]:
        """The examples of a batch of entries, in order; the rows of one source are read together."""
        if (row := next((entry.row for entry in entries if not 0 <= entry.row < len(self)), None)) is not None:
            raise IndexError(f"row {row} of {len(self)}")
        sources = [bisect_right(self._starts, entry.row) - 1 for entry in entries]
        pairs = list(zip(entries, sources, strict=True))
        examples = {}
        for source in set(sources):
            local = [entry._replace(row=entry.row - self._starts[source]) for entry, owner in pairs if owner == source]
            examples[source] = iter(self.sources[source].__getitems__(local))
        return [replace(next(examples[source]), row=entry.row, source=source) for entry, source in pairs]
