"""Examples of a source, and of all sources of a run: converted rows with their positives and negatives chosen."""

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
from embeddings.common.io import atomic_path
from embeddings.common.process import logger
from embeddings.common.random import derive_seed, numpy_generator
from embeddings.common.text import TextSettings
from embeddings.data.records import Example, Negative, label_key
from embeddings.data.samplers.base import LevelRule, PlanEntry, SourceIdentity
from embeddings.data.sources import SourceConfig, check_names, fill_path
from embeddings.data.store import CachedSource, ClassIndex, cache_folder, open_cached, writing_cache
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.data.table import StoredRow, Table

DEFAULT_NUM_NEGATIVES = 7
_RANDOM_TRIES = 16


class ExampleTexts(NamedTuple):
    """The texts of an example besides its query. `negative_labels` is as long as `negatives`, or empty."""

    positives: tuple[str, ...]
    negatives: tuple[Negative, ...] = ()
    negative_labels: tuple[int, ...] = ()


# (stored row, its index, draw key) → the texts; every random choice is a pure function of the index and the key.
ChooseTexts = Callable[[StoredRow, int, int], ExampleTexts]


def stored_texts(stored: StoredRow, index: int, draw: int) -> ExampleTexts:
    return ExampleTexts(tuple(stored.positives), tuple(map(Negative, stored.negatives, stored.levels)))


class ClassExamples:
    """A random text of the query's class as the positive, random texts of other classes as negatives.

    No text is the query's, and no two are equal. The positive is uniform over the class's other texts, negatives over
    all rows outside the class; fewer than `num_negatives` come back where there are not that many different texts.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, sections 4.2 and 5.2.4.
    """

    def __init__(self, table: Table, classes: ClassIndex, num_negatives: int) -> None:
        self.table, self.classes, self.num_negatives = table, classes, num_negatives

    def __call__(self, stored: StoredRow, index: int, draw: int) -> ExampleTexts:
        label, size = stored.label, self.classes.size(stored.label)
        generator = numpy_generator(draw, "class_by_example", index)
        seen = {stored.query.strip()}
        # A class made almost only of one text could be drawn from forever, so its rows are searched in the end.
        for position in chain(generator.integers(size, size=_RANDOM_TRIES).tolist(), range(size)):
            (positive,) = self.table.queries([self.classes.member(label, position)])
            if positive.strip() not in seen:
                break
        seen.add(positive.strip())
        num_outside = self.classes.num_outside(label)
        # Twice as many as are needed, to make up for texts that occur more than once.
        drawn = generator.choice(num_outside, size=min(num_outside, 2 * self.num_negatives), replace=False).tolist()
        rows, labels = zip(*(self.classes.outsider(label, position) for position in drawn), strict=True)
        found: list[tuple[Negative, int]] = []
        for text, label_of_row in zip(self.table.queries(rows), labels, strict=True):
            if text.strip() not in seen and len(found) < self.num_negatives:
                seen.add(text.strip())
                found.append((Negative(text), label_of_row))
        negatives, negative_labels = zip(*found, strict=True) if found else ((), ())
        return ExampleTexts((positive,), negatives, negative_labels)


class LabelTexts:
    """The text of the query's label as the positive, texts of other labels, each once, as negatives.

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


def places_of_level(negatives: Sequence[Negative], rule: LevelRule, draw: int) -> list[int]:
    """The places of the negatives that a level allows, in the row's order; where levels add up, in a random order.

    `negatives` are hardest first. A row without the level gives those of its nearest coarser level, or none: a step
    never sees what is harder than its level. Negatives without levels belong to every level.
    """
    if not any(negative.level for negative in negatives):
        return list(range(len(negatives)))
    allowed = [place for place, negative in enumerate(negatives) if negative.level >= rule.level]
    if not rule.cumulative:
        nearest = min((negatives[place].level for place in allowed), default=0)
        return [place for place in allowed if negatives[place].level == nearest]
    order = numpy_generator(draw, "levels").permutation(len(allowed)).tolist()
    return [allowed[place] for place in order]


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


def source_from_rows(
    rows: Iterable[Mapping[str, Any]], name: str, cache_dir: str | os.PathLike[str] | None = None, **options: Any
) -> SourceConfig:
    """A source of rows in memory: a `datasets.Dataset`, or a list of dictionaries.

    They are written as JSON lines to a file that is named by its SHA-256, in the folder `rows/` of the converted
    sources: a run resumes with the same rows, and the file may stand in a config.

    Args:
        rows: Rows by column name, as `SourceConfig` reads them from a file; arrays become lists.
        name: Name of the source.
        cache_dir: Folder of converted sources, else `$EMBED_CACHE`, else `.cache/embeddings`.
        options: Further options of `SourceConfig`.

    Raises:
        InputError: If there is no row, or one cannot be written as JSON; or the folder cannot be written.
        OptionError: If an option is impossible.
    """
    root = cache_folder(cache_dir).absolute()
    written, digest = root / "rows" / f"{uuid.uuid4().hex}.jsonl", hashlib.sha256()
    with writing_cache(root), atomic_path(written) as temporary, open(temporary, "wb") as file:
        for number, row in enumerate(rows):
            line = _json_line(row, f"source {name!r}: rows[{number}]")
            digest.update(line)
            file.write(line)
        if not file.tell():
            raise InputError(f"source {name!r}", "there are no rows", "give at least one")
    path = written.with_stem(digest.hexdigest())
    # A file that is there keeps its times, by which its hash is remembered.
    if path.exists():
        written.unlink()
    else:
        os.replace(written, path)
    return SourceConfig(name, str(path), **options)


def _json_line(row: Any, where: str) -> bytes:
    if not isinstance(row, Mapping):
        fix = "choose a split of a DatasetDict; give DataFrame.to_dict('records')"
        raise InputError(where, f"is a {type(row).__name__}, expected a mapping of column names to values", fix)
    try:
        return json.dumps(dict(row), default=_as_list).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(where, f"cannot be written as JSON ({error})", "give texts, numbers and lists") from None


def _as_list(value: Any) -> Any:
    """An array of NumPy or torch as lists, one of its numbers as that number."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__}")
    return value.tolist()


class SourceDataset:
    """Examples of one source, by row and draw key; it can be pickled and forked.

    Determinism: an example is a pure function of (source, row, draw, level rule); neither ranks nor workers matter.
    Length: `max_rows`, or all rows (without those that `single_text_classes` leaves out) where there are no more.

    Raises:
        InputError: If the rows do not suit the conversion.
        OptionError: If `label_texts` does not match the labels found.
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
            self.surrogates = SurrogateVectors(fill_path(config.surrogate_vectors), cached.folder.name)
        if self._total == 0:
            raise InputError(f"source {config.name!r}", "no class has two texts", "use conversion: class_by_label")
        if left_out := len(cached.table) - self._total:
            why = "are left out as queries, since their class has only one text"
            logger.info("source %s: %d of %d rows %s", config.name, left_out, len(cached.table), why)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, entry: PlanEntry) -> Example:
        return self.__getitems__([entry])[0]

    def __getitems__(self, entries: Sequence[PlanEntry]) -> list[Example]:
        """The examples of some entries, in their order, with `source` 0; their rows are read together."""
        indices = [self._stored_index(entry.row) for entry in entries]
        return list(map(self._example, entries, indices, self.cached.table.rows(indices)))

    def _example(self, entry: PlanEntry, index: int, stored: StoredRow) -> Example:
        positives, negatives, negative_labels = self._choose_texts(stored, index, entry.draw)
        places: Sequence[int] = range(len(negatives))
        if entry.rule is not None:
            places = places_of_level(negatives, entry.rule, entry.draw)
            negatives = tuple(negatives[place] for place in places)
        scores: Sequence[float] = stored.scores
        if scores and entry.rule is not None:
            own = len(positives)
            scores = [*scores[:own], *(scores[own + place] for place in places)]
        prompt = self._prompts[0]
        if stored.instruction:
            prompt = self._text.instruction_prompt(stored.instruction)
        elif len(self._prompts) > 1:
            prompt = self._prompts[derive_seed(entry.draw, "instruction") % len(self._prompts)]
        surrogates, scored = self.surrogates, None
        if surrogates is not None and surrogates.has_negatives:
            scored = partial(surrogates.negatives, index, places)
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
            surrogate_negatives=scored,
            level=0 if entry.rule is None else entry.rule.level,
            scores=tuple(scores),
        )

    def _stored_index(self, row: int) -> int:
        """The stored row of a row: with `max_rows`, a random one of the row's own stretch of the source."""
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
        raise InputError(where, f"all rows have the label {cached.labels[0]!r}", "give it two classes or more")
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
    if len(set(texts.values())) < len(texts):
        raise config.fault("label_texts", texts, "must give each label its own text", "tell them apart")
    return [texts.get(label, label) for label in labels]


class Mixture:
    """The rows of all sources one after another; it can be pickled and forked.

    Determinism: an example is a pure function of the sources and of (row, draw, level rule).

    Raises:
        OptionError: If there is no source, two share a name, or their surrogates' vectors differ in width.
    """

    def __init__(self, sources: Sequence[SourceDataset]) -> None:
        if not sources:
            raise OptionError("data.sources", [], "must not be empty", "name at least one source")
        check_names([source.config.name for source in sources])
        widths = {source.surrogates.width for source in sources if source.surrogates is not None}
        if len(widths) > 1:
            rule = f"must be of one width in all sources, found {sorted(widths)}"
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
        """The examples of some entries, in their order; those of a source are read together."""
        if (row := next((entry.row for entry in entries if not 0 <= entry.row < len(self)), None)) is not None:
            raise IndexError(f"row {row} of {len(self)}")
        sources = [bisect_right(self._starts, entry.row) - 1 for entry in entries]
        pairs = list(zip(entries, sources, strict=True))
        read = {}
        for source in set(sources):
            local = [entry._replace(row=entry.row - self._starts[source]) for entry, its in pairs if its == source]
            read[source] = iter(self.sources[source].__getitems__(local))
        return [replace(next(read[source]), row=entry.row, source=source) for entry, source in pairs]
