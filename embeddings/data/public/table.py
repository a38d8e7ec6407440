"""The table of public data sets: where each source of a recipe lies, what its rows become, and what a recipe needs."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import yaml

from embeddings.common.errors import CHECKOUT, PACKAGE, InputError, OptionError
from embeddings.data.records import (
    LABELLED_FIELDS,
    parse_labelled_text,
    parse_record,
    parse_scored_pair,
    record_schema,
)
from embeddings.data.sources import SourceConfig

CONFIGS = (CHECKOUT or PACKAGE) / "lightning_configs" / "data"
TABLE = "public_sources.yaml"
# What a data config's paths begin with: the folder that `prepare` writes.
ROOT_VARIABLE = "EMBED_TRAIN_DATA"


Row = Mapping[str, Any]
# A column, or several whose texts become one (of `negatives`: whose texts are one list).
Columns = Mapping[str, str | list[str]]


@dataclass(frozen=True)
class Kind:
    """A layout of rows: the fields whose columns a source names, and how its rows become those of the file.

    `check` raises an `InputError` where the reader of that file would refuse our row.
    """

    fields: tuple[str, ...]
    schema: pa.Schema
    convert: Callable[[Row, Columns], dict[str, Any]]
    check: Callable[[Row, Mapping[str, str], str], object]
    optional: tuple[str, ...] = ()


def texts_of(value: Any) -> Iterator[str]:
    """The texts of a cell: one, those of a list, or passages of `title` and `text`; what is empty is left out."""
    if isinstance(value, str):
        # The reader refuses these, and no tokenizer reads them.
        text = value.replace("\x00", " ").strip()
        if text:
            yield text
    elif isinstance(value, Mapping):
        passage = " ".join(part for name in ("title", "text") for part in texts_of(value.get(name)))
        yield from texts_of(passage)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


def cells(row: Row, names: str | list[str]) -> list[Any]:
    return [row[name] for name in ([names] if isinstance(names, str) else names)]


def one_text(row: Row, names: str | list[str]) -> str:
    """The text of one column, or those of several with a space between."""
    return " ".join(texts_of(cells(row, names)))


def _pair(row: Row, columns: Columns) -> dict[str, Any]:
    """`query`, `positive`, and `negatives` where the set brings any."""
    positive = columns["positive"]
    many = isinstance(positive, str) and isinstance(row[positive], list)
    positives = list(texts_of(row[positive])) if many else [one_text(row, positive)]  # type: ignore[index]
    negatives = list(texts_of(cells(row, columns["negatives"]))) if "negatives" in columns else []
    # A set's own lists may name a positive, or the query, among the negatives.
    query = one_text(row, columns["query"])
    negatives = [text for text in negatives if text != query and text not in positives]
    return {"query": query, "positive": positives, "negatives": negatives or None}


def _first_line(row: Row, columns: Columns) -> dict[str, Any]:
    """A text's first line as the query of the rest, as where a corpus has no column of titles."""
    title, _, body = one_text(row, columns["text"]).partition("\n")
    return {"query": title.strip(), "positive": [body.strip()]}


def _labelled(row: Row, columns: Columns) -> dict[str, Any]:
    """`text` and `label`: of several labels the first."""
    (label,) = cells(row, columns["label"])
    if isinstance(label, list):
        label = label[0] if label else None
    return {"text": one_text(row, columns["text"]), "label": label if label is None else str(label)}


def _first_word(row: Row, columns: Columns) -> dict[str, Any]:
    """The same where the label is a list in one text, its parts separated by spaces."""
    labelled = _labelled(row, columns)
    return {**labelled, "label": next(iter((labelled["label"] or "").split()), None)}


def _scored(row: Row, columns: Columns) -> dict[str, Any]:
    """`sentence1`, `sentence2` and `score`, in the set's own unit."""
    (score,) = cells(row, columns["score"])
    first, second = (one_text(row, columns[name]) for name in ("sentence1", "sentence2"))
    return {"sentence1": first, "sentence2": second, "score": None if score is None else float(score)}


def _document(row: Row, _columns: Columns) -> dict[str, Any]:
    """A document of a corpus, in the layout of BEIR."""
    return {
        "_id": str(row["_id"]),
        "title": one_text(row, "title") if "title" in row else "",
        "text": one_text(row, "text"),
    }


def _check_document(row: Row, _columns: Mapping[str, str], where: str) -> None:
    if not row["title"] and not row["text"]:
        raise InputError(where, "the document has no text", "leave the row out")


_LABELLED = pa.schema([(name, pa.string()) for name in LABELLED_FIELDS])
_SCORED = pa.schema([("sentence1", pa.string()), ("sentence2", pa.string()), ("score", pa.float64())])

# `beir` is three of a set's tables, which `fetch` joins: its pairs come from there.
KINDS = {
    "pairs": Kind(
        ("query", "positive", "negatives"), record_schema(False), _pair, parse_record, optional=("negatives",)
    ),
    "first_line": Kind(("text",), record_schema(False), _first_line, parse_record),
    "labelled": Kind(LABELLED_FIELDS, _LABELLED, _labelled, parse_labelled_text),
    "first_label": Kind(LABELLED_FIELDS, _LABELLED, _first_word, parse_labelled_text),
    "scored": Kind(("sentence1", "sentence2", "score"), _SCORED, _scored, parse_scored_pair),
    "beir": Kind(("query", "positive"), record_schema(False), _pair, parse_record, optional=("query", "positive")),
}
CORPUS = Kind((), pa.schema([(name, pa.string()) for name in ("_id", "title", "text")]), _document, _check_document)


@dataclass(frozen=True)
class PublicSource:
    """Where one source lies in public, and how its rows become records; the table's head says what each field means."""

    folder: str
    name: str
    repository: str | None
    kind: str | None
    confirmed: bool
    named_by_paper: bool
    collection: str | None = None
    columns: Mapping[str, str | list[str]] = field(default_factory=dict)
    subset: str | None = None
    split: str | list[str] = "train"
    revision: str | None = None
    data_files: str | None = None
    every: int = 1
    own_negatives: bool = False
    filtered: bool = False
    decontaminate: bool = False
    rows: int | None = None
    licence: str | None = None
    evidence: str | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        kind = None if self.kind is None else KINDS[self.kind]
        assert kind is not None or self.note, f"{self.key}: a source that cannot be fetched needs a note"
        if kind is not None:
            needed = set(kind.fields) - set(kind.optional)
            assert needed <= set(self.columns) <= set(kind.fields), f"{self.key}: columns do not fit kind {self.kind}"
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", self.repository or ""), f"{self.key}: no name of a data set"
        assert self.every >= 1, self.key

    @property
    def key(self) -> str:
        """Folder and name, which name the source's file."""
        return f"{self.folder}/{self.name}"

    @property
    def place(self) -> str:
        """The data set with its subset, split or files, for people."""
        splits = [self.split] if isinstance(self.split, str) else self.split
        more = [self.subset, self.data_files, "" if splits == ["train"] else ", ".join(splits)]
        shown = ", ".join(part for part in more if part)
        return f"{self.repository or 'none found'}{f' [{shown}]' if shown else ''}"

    @property
    def why_left_out(self) -> str | None:
        """Why `prepare` leaves the source out unless it is asked for; None for one that it fetches."""
        if self.kind is None:
            return self.note
        return None if self.confirmed else "not confirmed to be the recipe's data"

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the records besides the data set's content, as JSON types."""
        names = ("repository", "kind", "columns", "subset", "split", "revision", "data_files", "every")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Stage:
    """What one data config (a file of `CONFIGS`, without its suffix) needs; a step that is None is not made.

    Attributes:
        recipe, stage: The recipe's name, as `prepare` takes it, and its stage, None for a recipe of one stage.
        run: A row of recipes.csv that reads the config.
        mine: Teacher, number of negatives, prompt and levels of mining.
        filter: Model, prompts and top k of the filter for consistency.
        cluster: The model that clusters.
        vectors: Model and prompts of the vectors that tell false negatives.
        data_changes: What the data config must say otherwise of files made by these steps.
    """

    recipe: str
    config: str
    run: str
    stage: str | None = None
    mine: Mapping[str, Any] | None = None
    filter: Mapping[str, Any] | None = None
    cluster: Mapping[str, Any] | None = None
    vectors: Mapping[str, Any] | None = None
    data_changes: Mapping[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        content = yaml.safe_load((CONFIGS / f"{self.config}.yaml").read_text(encoding="utf-8"))
        arguments: dict[str, Any] = content["data"]["init_args"]
        return arguments

    def wanted(self) -> dict[str, SourceConfig]:
        """The sources that the data config reads, by `FOLDER/NAME`."""
        found = {}
        for entry in self.data["sources"]:
            match = re.fullmatch(rf"\$\{{{ROOT_VARIABLE}\}}/(\w+/\w+)\.parquet", entry["path"])
            assert match, f"{self.config}: {entry['name']} is no file that prepare writes"
            found[match[1]] = SourceConfig(**entry)
        return found


@dataclass(frozen=True)
class PublicTable:
    """The whole table: what each data config needs, and all sources, those of collections among them."""

    stages: Sequence[Stage]
    sources: Sequence[PublicSource]

    @classmethod
    @cache
    def read(cls, path: Path = CONFIGS / TABLE) -> Self:
        """The table of a file."""
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        known = {each.name for each in fields(PublicSource)}
        sources = []
        for group in content["groups"]:
            for entry in group["sources"]:
                values = {"folder": group["folder"], "collection": group.get("collection")}
                values |= {**group.get("defaults", {}), **entry}
                if values["kind"] == "beir":
                    values.setdefault("columns", {})
                assert set(values) <= known, f"{path.name}: unknown fields {set(values) - known}"
                sources.append(PublicSource(**values))
        keys = [(source.key, source.collection) for source in sources]
        assert len(set(keys)) == len(keys), f"{path.name}: a source comes twice"
        return cls([Stage(**stage) for stage in content["stages"]], sources)

    def stages_of(self, recipe: str, stage: str | None) -> list[Stage]:
        """The stages of a recipe, or the one that is named."""
        stages = [each for each in self.stages if each.recipe == recipe]
        chosen = [each for each in stages if stage in (None, each.stage)]
        if not chosen:
            names = [each.stage for each in stages if each.stage]
            rule = f"must be {' or '.join(names)}" if names else f"has no effect on {recipe}, which has one stage"
            raise OptionError("stage", stage, rule, "leave it out for all")
        return chosen

    def place_of(self, key: str, collection: str | None) -> PublicSource:
        """Where a source lies: in the collection if it is there, else in its own place."""
        found = {source.collection: source for source in self.sources if source.key == key}
        return found.get(collection, found[None])

    def collections(self, keys: Sequence[str]) -> list[str]:
        return sorted({source.collection for source in self.sources if source.key in keys and source.collection})
