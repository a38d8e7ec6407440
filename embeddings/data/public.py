"""Public data sets: the location of each source of a recipe, the conversion of its rows, and the download job.

The job streams one data set into one file of training rows, in parts, so that it can resume after a kill.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from embeddings.common.errors import CHECKOUT, PACKAGE, InputError, OptionError
from embeddings.common.io import atomic_path, check_manifest, file_sha256, write_file_manifest
from embeddings.common.jobs import JobFolder, discard_on_user_error, finished_manifest, manifest_path, progress_bar
from embeddings.common.process import logger
from embeddings.common.text import canonical, shorten
from embeddings.data.readers import ask_commit, resolve_revision, unreachable
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


Row = Mapping[str, Any]
# Field → its column, or several columns whose texts are joined (for `negatives`: collected in one list).
Columns = Mapping[str, str | list[str]]


@dataclass(frozen=True)
class Kind:
    """A layout of rows: its fields, the schema of the output file, and the conversion of rows.

    `check` raises an `InputError` if the reader of the output file would refuse the converted row.
    """

    fields: tuple[str, ...]
    schema: pa.Schema
    convert: Callable[[Row, Columns], dict[str, Any]]
    check: Callable[[Row, Mapping[str, str], str], object]
    optional: tuple[str, ...] = ()


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


def cells(row: Row, names: str | list[str]) -> list[Any]:
    return [row[name] for name in ([names] if isinstance(names, str) else names)]


def one_text(row: Row, names: str | list[str]) -> str:
    """The text of one column, or of several columns joined by spaces."""
    return " ".join(texts_of(cells(row, names)))


def _pair(row: Row, columns: Columns) -> dict[str, Any]:
    """`query`, `positive`, and `negatives` if the data set has any."""
    positive = columns["positive"]
    is_list = isinstance(positive, str) and isinstance(row[positive], list)
    positives = list(texts_of(row[positive])) if is_list else [one_text(row, positive)]  # type: ignore[index]
    negatives = list(texts_of(cells(row, columns["negatives"]))) if "negatives" in columns else []
    # Some data sets list a positive or the query among the negatives.
    query = one_text(row, columns["query"])
    own = {canonical(text) for text in (query, *positives)}
    negatives = [text for text in negatives if canonical(text) not in own]
    return {"query": query, "positive": positives, "negatives": negatives or None}


def _first_line(row: Row, columns: Columns) -> dict[str, Any]:
    """The first line of a text as the query, the rest as the positive, for a corpus without a title column."""
    title, _, body = one_text(row, columns["text"]).partition("\n")
    return {"query": title.strip(), "positive": [body.strip()]}


def _labelled(row: Row, columns: Columns) -> dict[str, Any]:
    """`text` and `label`; the first of several labels."""
    (label,) = cells(row, columns["label"])
    if isinstance(label, list):
        label = label[0] if label else None
    return {"text": one_text(row, columns["text"]), "label": label if label is None else str(label)}


def _first_word(row: Row, columns: Columns) -> dict[str, Any]:
    """As `_labelled`, for labels in one text separated by spaces."""
    labelled = _labelled(row, columns)
    return {**labelled, "label": next(iter((labelled["label"] or "").split()), None)}


def _scored(row: Row, columns: Columns) -> dict[str, Any]:
    """`sentence1`, `sentence2` and `score`, in the unit of the data set."""
    (score,) = cells(row, columns["score"])
    first, second = (one_text(row, columns[name]) for name in ("sentence1", "sentence2"))
    return {"sentence1": first, "sentence2": second, "score": None if score is None else float(score)}


def _document(row: Row, _columns: Columns) -> dict[str, Any]:
    """A document of a corpus, in the BEIR layout."""
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

# `beir` has three tables, which `fetch_source` joins into pairs.
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

    def __post_init__(self) -> None:
        kind = None if self.kind is None else KINDS[self.kind]
        assert kind is not None or self.note, f"{self.key}: a source that cannot be fetched needs a note"
        if kind is not None:
            needed = set(kind.fields) - set(kind.optional)
            assert needed <= set(self.columns) <= set(kind.fields), f"{self.key}: columns do not fit kind {self.kind}"
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", self.repository or ""), f"{self.key}: not the name of a data set"
        assert self.every >= 1, self.key

    @property
    def key(self) -> str:
        """FOLDER/NAME, the path of the source's file without its suffix."""
        return f"{self.folder}/{self.name}"

    @property
    def place(self) -> str:
        """The data set with its subset, split or files, for messages."""
        splits = [self.split] if isinstance(self.split, str) else self.split
        details = [self.subset, self.data_files, "" if splits == ["train"] else ", ".join(splits)]
        shown = ", ".join(detail for detail in details if detail)
        return f"{self.repository or 'none found'}{f' [{shown}]' if shown else ''}"

    @property
    def why_left_out(self) -> str | None:
        """Why `prepare` does not fetch the source by default; None for a source that it fetches."""
        if self.kind is None:
            return self.note
        return None if self.confirmed else "not confirmed to be the data of the recipe"

    @property
    def recipe(self) -> dict[str, Any]:
        """The fields that affect the records, in JSON types."""
        names = ("repository", "kind", "columns", "subset", "split", "revision", "data_files", "every")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Stage:
    """The preparation steps for one data config (a file in `CONFIGS`, without its suffix); None skips a step.

    Attributes:
        recipe, stage: Name of the recipe, as in `prepare`, and its stage; None for a recipe with one stage.
        run: A row of recipes.csv that uses the config.
        mine: Teacher, number of negatives, prompt and levels of mining.
        filter: Model, prompts and top k of the consistency filter.
        cluster: The model for clustering.
        vectors: Model and prompts of the vectors that identify false negatives.
        data_changes: Changes of the data config that the output of these steps requires.
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
        sources = {}
        for entry in self.data["sources"]:
            match = re.fullmatch(rf"\$\{{{ROOT_VARIABLE}\}}/(\w+/\w+)\.parquet", entry["path"])
            assert match, f"{self.config}: {entry['name']} is not a file that prepare writes"
            sources[match[1]] = SourceConfig(**entry)
        return sources


@dataclass(frozen=True)
class PublicTable:
    """The table of all data configs and all sources, including the sources of collections."""

    stages: Sequence[Stage]
    sources: Sequence[PublicSource]

    @classmethod
    @cache
    def read(cls, path: Path = CONFIGS / TABLE) -> Self:
        """Read the table from a file."""
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        field_names = {each.name for each in fields(PublicSource)}
        sources = []
        for group in content["groups"]:
            for entry in group["sources"]:
                values = {"folder": group["folder"], "collection": group.get("collection")}
                values |= {**group.get("defaults", {}), **entry}
                if values["kind"] == "beir":
                    values.setdefault("columns", {})
                assert set(values) <= field_names, f"{path.name}: unknown fields {set(values) - field_names}"
                sources.append(PublicSource(**values))
        keys = [(source.key, source.collection) for source in sources]
        assert len(set(keys)) == len(keys), f"{path.name}: a source comes twice"
        return cls([Stage(**stage) for stage in content["stages"]], sources)

    def stages_of(self, recipe: str, stage: str | None) -> list[Stage]:
        """All stages of a recipe, or only `stage`."""
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


@dataclass(frozen=True)
class Hub:
    """Reads data sets from the Hub, or from a local folder of data sets in subfolders `ORGANISATION/NAME`.

    Args:
        mirror: The local folder, for a machine without a network; `hf download --repo-type dataset --local-dir` writes
            a data set into it.
    """

    mirror: Path | None = None

    def commit(self, source: PublicSource) -> str | None:
        """The commit to read; None for a mirror."""
        return None if self.mirror else resolve_revision(str(source.repository), source.revision)

    def check(self, source: PublicSource) -> str:
        """The folder or commit of a data set, without reading rows; raises `InputError` if it cannot be accessed."""
        name = str(source.repository)
        if self.mirror:
            return str(self._folder(source))
        # Slow to import.
        from huggingface_hub import HfApi

        try:
            HfApi().auth_check(name, repo_type="dataset")
        except Exception as error:
            raise unreachable(name, error) from error
        return ask_commit(name, source.revision)

    def rows(self, source: PublicSource, subset: str | None, split: str, commit: str | None) -> Any:
        """One split of a data set as a `datasets.IterableDataset`."""
        # Slow to import.
        from datasets import load_dataset

        path = str(self._folder(source) if self.mirror else source.repository)
        files = {} if source.data_files is None else {"data_files": source.data_files}
        return load_dataset(path, subset, split=split, revision=commit, streaming=True, **files)

    def _folder(self, source: PublicSource) -> Path:
        assert self.mirror is not None
        folder = self.mirror / str(source.repository)
        if not folder.is_dir():
            raise InputError(f"hub:{source.repository}", f"is not in {self.mirror}", "download it to that folder")
        return folder


class RowStream:
    """The rows of one table of a data set, split after split, resumed from `state`; rows must have all `columns`."""

    def __init__(
        self,
        hub: Hub,
        source: PublicSource,
        commit: str | None,
        subset: str | None,
        splits: list[str],
        columns: Iterable[str],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.hub, self.source, self.commit, self.subset = hub, source, commit, subset
        self.splits, self.columns = splits, set(columns)
        self._split: int = state["split"] if state else 0
        self._resumed: dict[str, Any] | None = state["rows"] if state else None
        self._rows: Any = None

    def state(self) -> dict[str, Any]:
        return {"split": self._split, "rows": None if self._rows is None else self._rows.state_dict()}

    def __iter__(self) -> Iterator[Row]:
        name = str(self.source.repository)
        try:
            for number in range(self._split, len(self.splits)):
                self._split, self._rows = number, None
                rows = self.hub.rows(self.source, self.subset, self.splits[number], self.commit)
                if self._resumed is not None:
                    rows.load_state_dict(self._resumed)
                    self._resumed = None
                self._rows = rows
                for row in rows:
                    if self.columns:
                        self._check(row)
                    yield row
        except InputError:
            raise
        # `datasets` raises errors of several libraries, which change between its versions.
        except Exception as error:
            raise unreachable(name, error) from error

    def _check(self, row: Row) -> None:
        """Check the columns of the first row; all rows of a table have the same columns."""
        missing = sorted(self.columns - set(row))
        if missing:
            what = f"has no column {missing[0]!r} among {shorten(', '.join(map(str, row)), 80)}"
            raise InputError(f"hub:{self.source.repository}", what, "the data set has changed; leave the source out")
        self.columns = set()


class Parts:
    """The parts of one output file; each part stores converted rows and the position in the source."""

    def __init__(self, folder: Path, stem: str, kind: Kind) -> None:
        self.folder, self.stem, self.kind = folder, stem, kind

    @property
    def paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.stem}-*.parquet"))

    @property
    def note(self) -> dict[str, Any]:
        """Progress up to the last part: rows written, read, left out (with the first reason), and the source state."""
        note = {"rows": 0, "read": 0, "left_out": 0, "left_out_first": None, "state": None, "last": False}
        if paths := self.paths:
            try:
                note = json.loads(pq.read_schema(paths[-1]).metadata[b"note"])
            except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
                raise InputError(str(paths[-1]), "is damaged", "delete it, and run again") from None
        return note

    def write(
        self,
        rows: Iterable[Row],
        state: Callable[[], dict[str, Any] | None],
        source: PublicSource,
        limit: int | None,
        keep: Callable[[Row], bool] | None = None,
    ) -> dict[str, Any]:
        """Write the missing parts; returns the number of rows written, read and left out, and the first reason.

        `rows` are the rows after the last part; `state` returns the current position in them.
        """
        note, remaining = self.note, iter(rows)
        total = source.rows and -(-source.rows // source.every)
        title = f"{source.key} {self.stem}"
        with progress_bar(limit if total is None else min(limit or total, total), title, "row") as bar:
            bar.update(note["rows"])
            while not note["last"]:
                converted: list[dict[str, Any]] = []
                while len(converted) < PART_ROWS and not note["last"]:
                    is_full = limit is not None and note["rows"] + len(converted) >= limit
                    row = None if is_full else next(remaining, None)
                    note["last"] = row is None
                    if row is None:
                        break
                    note["read"] += 1
                    if (note["read"] - 1) % source.every:
                        continue
                    try:
                        record = self.kind.convert(row, source.columns)
                        self.kind.check(record, {}, f"row {note['read']}")
                    # Python errors come from cells of an unexpected type, such as a score that is not a number.
                    except (InputError, TypeError, ValueError) as fault:
                        note |= {
                            "left_out": note["left_out"] + 1,
                            "left_out_first": note["left_out_first"] or str(fault),
                        }
                        continue
                    if keep is None or keep(record):
                        converted.append(record)
                        bar.update()
                note |= {"rows": note["rows"] + len(converted), "state": state()}
                schema = self.kind.schema.with_metadata({"note": json.dumps(note)})
                with atomic_path(self.folder / f"{self.stem}-{len(self.paths):05d}.parquet") as temporary:
                    pq.write_table(pa.Table.from_pylist(converted, schema), temporary, compression="zstd")
        return {name: note[name] for name in ("rows", "read", "left_out", "left_out_first")}

    def merge(self, output: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write the parts as one file with a manifest; the file comes last, so it never exists without a manifest."""
        with atomic_path(output) as temporary:
            with table_writer(temporary, self.kind.schema) as write:
                for part in self.paths:
                    write(pq.read_table(part).replace_schema_metadata(None))
            manifest = {**fields, "output_sha256": file_sha256(temporary)}
            write_file_manifest(manifest_path(output), manifest)
        return manifest


def fetch_source(source: PublicSource, output: Path, hub: Hub, limit: int | None = None) -> dict[str, Any]:
    """Write the rows of one source to a Parquet file for training or mining; returns its manifest.

    Rows are streamed and written in parts with the position in the source. A kill loses at most one part, and a resumed
    process writes the same bytes. Rows without a text, and rows that the reader of the file would refuse, are left out
    and counted. For `beir`, the documents are written to `NAME.corpus.parquet` too.

    Args:
        source: Location of the rows and their conversion.
        output: The file to write, `NAME.parquet`; a complete file of the same source and limit is reused.
        hub: Reader of data sets.
        limit: Write only the first `limit` rows; None for every `every`-th row.

    Raises:
        InputError: If the data set is missing, gated or changed, has no usable row, or `output` is another file.
    """
    assert source.kind is not None
    kind = KINDS[source.kind]
    source = source if limit is None else replace(source, every=1)
    fields = {"kind": "public data", "source": source.recipe, "limit": limit}
    if (found := finished_manifest(output, fields)) is not None:
        return found
    work = output.with_name(f"{output.name}.work")
    with discard_on_user_error(work, unless=lambda: any(work.glob("*.parquet"))):
        is_resumed = (work / "manifest.json").exists()
        commit = check_manifest(work, {})["commit"] if is_resumed else hub.commit(source)
        JobFolder(work, fields, {"commit": commit})
        parts = Parts(work, "rows", kind)
        if source.kind == "beir":
            facts = _join(source, output, parts, hub, commit, limit)
        else:
            names = chain.from_iterable([name] if isinstance(name, str) else name for name in source.columns.values())
            splits = [source.split] if isinstance(source.split, str) else source.split
            stream = RowStream(hub, source, commit, source.subset, splits, names, parts.note["state"])
            facts = parts.write(stream, stream.state, source, limit)
        if not facts["rows"]:
            reason = f" ({facts['left_out_first']})" if facts["left_out"] else ""
            shutil.rmtree(work)
            raise InputError(f"hub:{source.repository}", f"has no usable row{reason}", "leave the source out")
        facts |= {"commit": commit, "licence": source.licence}
        manifest = parts.merge(output, {**fields, **facts})
    shutil.rmtree(work)
    if facts["left_out"]:
        logger.warning("%s: %d rows left out (%s)", source.key, facts["left_out"], facts["left_out_first"])
    return manifest


def corpus_path(output: Path) -> Path:
    """The file of documents of a `beir` source."""
    return output.with_name(f"{output.stem}.corpus.parquet")


def _join(
    source: PublicSource, output: Path, parts: Parts, hub: Hub, commit: str | None, limit: int | None
) -> dict[str, Any]:
    """Write a pair for each qrel above 0, in the order of the qrels, and the file of documents.

    With a limit, only the documents of the pairs are written.
    """
    split = source.split if isinstance(source.split, str) else source.split[0]
    stream = partial(RowStream, hub, source, commit)
    qrels = (
        (str(row["query-id"]), str(row["corpus-id"]))
        for row in stream("default", [split], ("query-id", "corpus-id", "score"))
        if float(row["score"]) > 0
    )
    pairs = list(islice(qrels, 0, limit, source.every))
    queries, wanted = {}, {query for query, _ in pairs}
    for row in stream("queries", ["queries"], ("_id", "text")):
        if str(row["_id"]) in wanted:
            queries[str(row["_id"])] = one_text(row, "text")
            if len(queries) == len(wanted):
                break
    wanted = {document for _, document in pairs}
    corpus = Parts(parts.folder, "documents", CORPUS)
    documents = stream("corpus", ["corpus"], ("_id", "text"), corpus.note["state"])
    all_rows = replace(source, every=1, rows=None)
    if limit is None:
        facts = corpus.write(documents, documents.state, all_rows, None)
    else:
        facts = corpus.write(documents, documents.state, all_rows, len(wanted), lambda row: row["_id"] in wanted)
    corpus.merge(corpus_path(output), {"kind": "public corpus", "source": source.recipe, **facts, "commit": commit})
    texts = {
        row["_id"]: one_text(row, ["title", "text"])
        for path in corpus.paths
        for row in pq.read_table(path).to_pylist()
        if row["_id"] in wanted
    }
    # A qrel with a missing text becomes a row without a text, which `write` leaves out.
    joined = ({"query": queries.get(query, ""), "positive": texts.get(name, "")} for query, name in pairs)
    remaining = islice(joined, parts.note["read"], None)
    pair_source = replace(all_rows, columns={"query": "query", "positive": "positive"})
    return parts.write(remaining, lambda: None, pair_source, limit)
