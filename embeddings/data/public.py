"""Public data sets: the location of each source of a recipe, and the conversion of its rows to a training file."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from embeddings.common.errors import CHECKOUT, PACKAGE, InputError, OptionError
from embeddings.common.io import atomic_path, check_file_manifest, lists_of
from embeddings.common.jobs import JobFolder, discard_on_user_error, finished_manifest, manifest_path, output_file
from embeddings.common.process import logger
from embeddings.common.progress import progress_bar
from embeddings.common.text import canonical, shorten
from embeddings.data.readers import resolve_revision, unreachable
from embeddings.data.records import (
    LABELLED_FIELDS,
    parse_labelled_text,
    parse_record,
    parse_scored_pair,
    record_schema,
    table_writer,
)
from embeddings.data.sources import SourceConfig

CONFIGS = (CHECKOUT or PACKAGE) / "lightning_configs" / "data"
TABLE = "public_sources.yaml"
# Environment variable at the start of the paths in data configs: the output folder of `prepare`.
ROOT_VARIABLE = "EMBED_TRAIN_DATA"


def texts_of(value: Any) -> Iterator[str]:
    """The non-empty texts of a cell: a text, a list of texts, or passages with `title` and `text`."""
    if isinstance(value, str):
        # The reader refuses NUL characters.
        text = value.replace("\x00", " ").strip()
        if text:
            yield text
    elif isinstance(value, Mapping):
        passage = " ".join(part for name in ("title", "text") for part in texts_of(value.get(name)))
        yield from texts_of(passage)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


def names_of(columns: str | list[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else columns


def one_text(row: Mapping[str, Any], names: str | list[str]) -> str:
    """The text of one column, or of several columns joined by spaces."""
    return " ".join(texts_of([row.get(name) for name in names_of(names)]))


def convert(kind: str, row: Mapping[str, Any], columns: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """The row of the output file; `columns` maps a field to its column, or to several whose texts are joined."""
    texts = {
        name: one_text(row, names) for name, names in columns.items() if name not in ("negatives", "label", "score")
    }
    if kind == "first_line":
        title, _, body = texts["text"].partition("\n")
        return {"query": title.strip(), "positive": [body.strip()]}
    if kind == "scored":
        score = row[str(columns["score"])]
        return {**texts, "score": None if score is None else float(score)}
    if kind in ("labelled", "first_label"):
        label = row[str(columns["label"])]
        if isinstance(label, list):
            label = label[0] if label else None
        words = "" if label is None else str(label)
        return {**texts, "label": next(iter(words.split()), "") if kind == "first_label" else words}
    query, positive = texts["query"], columns["positive"]
    is_list = isinstance(positive, str) and isinstance(row[positive], list)
    positives = list(texts_of(row[str(positive)])) if is_list else [texts["positive"]]
    negatives = texts_of([row[name] for name in names_of(columns.get("negatives", []))])
    # Some data sets list a positive or the query among the negatives.
    own = {canonical(text) for text in (query, *positives)}
    kept = [text for text in negatives if canonical(text) not in own]
    return {"query": query, "positive": positives, "negatives": kept or None}


_PAIRS = record_schema(False), parse_record
_LABELLED = pa.schema([(name, pa.string()) for name in LABELLED_FIELDS]), parse_labelled_text
_SCORED = (
    pa.schema([("sentence1", pa.string()), ("sentence2", pa.string()), ("score", pa.float64())]),
    parse_scored_pair,
)
_CORPUS = pa.schema([(name, pa.string()) for name in ("_id", "title", "text")])

# The schema of the output file of each kind, and the parser of its reader, which refuses some rows.
# `beir` has three tables, which `_join` makes into pairs.
KINDS = {
    "pairs": _PAIRS,
    "first_line": _PAIRS,
    "beir": _PAIRS,
    "labelled": _LABELLED,
    "first_label": _LABELLED,
    "scored": _SCORED,
}


@dataclass(frozen=True)
class PublicSource:
    """Public location of one source, and the conversion of its rows; the head of the YAML table explains the fields."""

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

    @property
    def key(self) -> str:
        """FOLDER/NAME, the path of the source's file without its suffix."""
        return f"{self.folder}/{self.name}"

    @property
    def place(self) -> str:
        """The data set with its subset, split or files, for messages."""
        details = [self.subset, self.data_files, "" if self.split == "train" else ", ".join(names_of(self.split))]
        shown = ", ".join(detail for detail in details if detail)
        return f"{self.repository or 'none found'}{f' [{shown}]' if shown else ''}"

    @property
    def why_left_out(self) -> str | None:
        """Why `prepare` does not fetch the source by default; None for a source that it fetches."""
        if self.kind is None:
            return self.note
        return None if self.confirmed else "not confirmed to be the data of the recipe"

    def num_rows(self, limit: int | None) -> int | None:
        """The number of rows to fetch; None if it is unknown."""
        return limit or (self.rows and -(-self.rows // self.every))

    @property
    def recipe(self) -> dict[str, Any]:
        """The fields that affect the records, in JSON types."""
        names = ("repository", "kind", "columns", "subset", "split", "revision", "data_files", "every")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Stage:
    """The preparation steps for one data config (a file in `CONFIGS`, without its suffix); None skips a step."""

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
        root, sources = f"${{{ROOT_VARIABLE}}}/", self.data["sources"]
        return {entry["path"].removeprefix(root).removesuffix(".parquet"): SourceConfig(**entry) for entry in sources}


@dataclass(frozen=True)
class PublicTable:
    """The table of all data configs and all sources, including those of collections."""

    stages: Sequence[Stage]
    sources: Sequence[PublicSource]

    @classmethod
    @cache
    def read(cls, path: Path = CONFIGS / TABLE) -> Self:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        sources = [
            PublicSource(group["folder"], collection=group.get("collection"), **{**group.get("defaults", {}), **entry})
            for group in content["groups"]
            for entry in group["sources"]
        ]
        return cls([Stage(**stage) for stage in content["stages"]], sources)

    def stages_of(self, recipe: str, stage: str | None) -> list[Stage]:
        stages = [each for each in self.stages if each.recipe == recipe]
        chosen = [each for each in stages if stage in (None, each.stage)]
        if not chosen:
            names = [each.stage for each in stages if each.stage]
            rule = f"must be {' or '.join(names)}" if names else f"has no effect on {recipe}, which has one stage"
            raise OptionError("stage", stage, rule, "leave it out for all")
        return chosen

    def place_of(self, key: str, collection: str | None) -> PublicSource:
        """The source in the collection if the collection contains it, else its separate location."""
        by_collection = {source.collection: source for source in self.sources if source.key == key}
        return by_collection.get(collection, by_collection[None])

    def collections(self, keys: Sequence[str]) -> list[str]:
        return sorted({source.collection for source in self.sources if source.key in keys and source.collection})


# Rows per part: the maximum that a kill loses, and that is in memory at once.
PART_ROWS = 16_384


def _stream(
    source: PublicSource, subset: str | None, split: str | list[str], commit: str | None, mirror: Path | None
) -> Any:
    """One or several splits of a data set as a `datasets.IterableDataset`, without a copy on disk."""
    from datasets import concatenate_datasets, load_dataset  # slow to import

    path = str(source.repository if mirror is None else mirror / str(source.repository))
    if mirror is not None and not Path(path).is_dir():
        raise InputError(f"hub:{source.repository}", f"is not in {mirror}", "download it to that folder")
    options = {} if source.data_files is None else {"data_files": source.data_files}
    with _reading(source):
        splits = [
            load_dataset(path, subset, split=name, revision=commit, streaming=True, **options)
            for name in names_of(split)
        ]
        return splits[0] if len(splits) == 1 else concatenate_datasets(splits)


@contextmanager
def _reading(source: PublicSource) -> Iterator[None]:
    try:
        yield
    # `datasets` raises errors of several libraries, which change between its versions.
    except Exception as error:
        raise unreachable(str(source.repository), error) from error


def _rows(source: PublicSource, stream: Any) -> Iterator[Mapping[str, Any]]:
    with _reading(source):
        yield from stream


def check_source(source: PublicSource, mirror: Path | None = None) -> None:
    """Read the first row of a source; an `InputError` if it is missing, gated or unreachable."""
    commit = None if mirror else resolve_revision(str(source.repository), source.revision)
    subset = "default" if source.kind == "beir" else source.subset
    next(_rows(source, _stream(source, subset, source.split, commit, mirror)), None)


def fetch_source(
    source: PublicSource, output: Path, mirror: Path | None = None, limit: int | None = None
) -> dict[str, Any]:
    """Write the first `limit` rows of a source, or every `every`-th, to a Parquet file; returns its manifest.

    Rows are streamed from the Hub, or from the folder `mirror` with data sets as `ORGANISATION/NAME`, and written in
    parts with the position in the source, so that a killed job resumes after its last part. Rows without a text, and
    rows that the reader of the file would refuse, are left out and counted. For `beir`, the documents are written to
    `NAME.corpus.parquet` too. A complete file is reused. A data set that is missing, gated, changed or has no usable
    row, and another file at `output`, are an `InputError`.
    """
    fields = {"kind": "public data", "source": source.recipe, "limit": limit}
    if (found := finished_manifest(output, fields)) is not None:
        return found
    work = output.with_name(f"{output.name}.work")
    with discard_on_user_error(work, unless=lambda: any(work.glob("*.parquet"))):
        commit = None if mirror else resolve_revision(str(source.repository), source.revision)
        commit = JobFolder(work, fields, {"commit": commit}).fields["commit"]
        made = {"source": source.recipe, "commit": commit, "licence": source.licence}
        facts = _write_parts(work, source, output, mirror, limit, made)
        if not facts["rows"]:
            shutil.rmtree(work)
            reason = f" ({facts['left_out_first']})" if facts["left_out"] else ""
            raise InputError(f"hub:{source.repository}", f"has no usable row{reason}", "leave the source out")
        schema, _ = KINDS[str(source.kind)]
        with output_file(output, {**fields, **made, **facts}) as temporary, table_writer(temporary, schema) as write:
            for part in sorted(work.glob("*.parquet")):
                write(pq.read_table(part).replace_schema_metadata(None))
    shutil.rmtree(work)
    if facts["left_out"]:
        logger.warning("%s: %d rows left out (%s)", source.key, facts["left_out"], facts["left_out_first"])
    return check_file_manifest(manifest_path(output), fields)


def _write_parts(
    work: Path, source: PublicSource, output: Path, mirror: Path | None, limit: int | None, made: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the missing parts; returns the number of rows written and left out, and the first reason."""
    (schema, parse), columns, every = KINDS[str(source.kind)], source.columns, source.every if limit is None else 1
    if source.kind == "beir":
        stream, columns, every = (
            _join(source, output, mirror, limit, made),
            {"query": "query", "positive": "positive"},
            1,
        )
    else:
        stream = _stream(source, source.subset, source.split, made["commit"], mirror)
    used = {name for names in columns.values() for name in names_of(names)}
    parts = sorted(work.glob("*.parquet"))
    facts: dict[str, Any] = {"rows": 0, "left_out": 0, "left_out_first": None}
    if parts:
        note = json.loads(pq.read_schema(parts[-1]).metadata[b"note"])
        facts = note["facts"]
        stream.load_state_dict(note["state"])
    rows = islice(_rows(source, stream), None if limit is None else limit - facts["rows"] - facts["left_out"])
    with progress_bar(source.num_rows(limit), source.key, "row", initial=facts["rows"]) as bar:
        # Stops after PART_ROWS * every rows, so that the next part starts at a multiple of `every`.
        while group := list(islice(rows, 0, PART_ROWS * every, every)):
            if missing := sorted(used - set(group[0])):
                what = f"has no column {missing[0]!r} among {shorten(', '.join(map(str, group[0])), 80)}"
                raise InputError(f"hub:{source.repository}", what, "the data set has changed; leave the source out")
            records = []
            for number, row in enumerate(group, facts["rows"] + facts["left_out"] + 1):
                try:
                    record = convert(str(source.kind), row, columns)
                    parse(record, {}, f"row {number}")
                    records.append(record)
                # Python errors come from cells of an unexpected type, such as a score that is not a number.
                except (InputError, KeyError, TypeError, ValueError) as fault:
                    facts["left_out_first"] = facts["left_out_first"] or str(fault)
            facts["rows"] += len(records)
            facts["left_out"] += len(group) - len(records)
            note = json.dumps({"facts": facts, "state": stream.state_dict()})
            parts.append(work / f"rows-{len(parts):05d}.parquet")
            with atomic_path(parts[-1]) as temporary:
                pq.write_table(pa.Table.from_pylist(records, schema.with_metadata({"note": note})), temporary)
            bar.update(len(records))
    return facts


def corpus_path(output: Path) -> Path:
    """The file of documents of a `beir` source."""
    return output.with_name(f"{output.stem}.corpus.parquet")


def _join(source: PublicSource, output: Path, mirror: Path | None, limit: int | None, made: Mapping[str, Any]) -> Any:
    """The pair of each qrel above 0, in the order of the qrels, as an `IterableDataset`; writes the documents' file.

    With a limit, only the documents of the pairs are written. A qrel with a missing text becomes a row without a text,
    which is left out later.
    """
    from datasets import Dataset

    qrels, queries, corpus = (
        _rows(source, _stream(source, subset, split, made["commit"], mirror))
        for subset, split in (("default", source.split), ("queries", "queries"), ("corpus", "corpus"))
    )
    judged = ((str(row["query-id"]), str(row["corpus-id"])) for row in qrels if float(row["score"]) > 0)
    pairs = list(islice(judged, 0, limit, source.every if limit is None else 1))
    asked, relevant = {query for query, _ in pairs}, {document for _, document in pairs}
    query_texts = {str(row["_id"]): one_text(row, "text") for row in queries if str(row["_id"]) in asked}
    document_texts = {}
    manifest = {"kind": "public corpus", **made}
    with output_file(corpus_path(output), manifest) as temporary, table_writer(temporary, _CORPUS) as write:
        for group in lists_of(corpus, PART_ROWS):
            documents = []
            for row in group:
                name, text = str(row["_id"]), one_text(row, ["title", "text"])
                if text and name in relevant:
                    document_texts[name] = text
                if text and (limit is None or name in relevant):
                    documents.append({"_id": name, "title": one_text(row, "title"), "text": one_text(row, "text")})
            write(pa.Table.from_pylist(documents, _CORPUS))
    texts = {
        "query": [query_texts.get(query, "") for query, _ in pairs],
        "positive": [document_texts.get(document, "") for _, document in pairs],
    }
    return Dataset.from_dict(texts).to_iterable_dataset()
