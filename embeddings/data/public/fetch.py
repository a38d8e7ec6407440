"""The job that fetches one public data set: streamed, in parts that outlive a kill, into one file of training rows."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError
from embeddings.common.io import atomic_path, check_manifest, file_sha256, write_file_manifest
from embeddings.common.jobs import JobFolder, discard_on_user_error, finished_manifest, manifest_path, progress_bar
from embeddings.common.process import logger
from embeddings.common.text import shorten
from embeddings.data.public.table import CORPUS, KINDS, Kind, PublicSource, Row, one_text
from embeddings.data.readers import ask_commit, resolve_revision, unreachable
from embeddings.data.records import table_writer

# Rows of a part: what a kill costs at most, and what is in memory at once.
PART_ROWS = 16_384


@dataclass(frozen=True)
class Hub:
    """Where data sets are read: the Hub, or a folder that holds some of them as `ORGANISATION/NAME`.

    Args:
        mirror: The folder, for a machine without a network; what `hf download --repo-type dataset --local-dir` writes
            is one of its data sets.
    """

    mirror: Path | None = None

    def commit(self, source: PublicSource) -> str | None:
        """The commit that is read; None of a mirror, which says of none."""
        return None if self.mirror else resolve_revision(str(source.repository), source.revision)

    def check(self, source: PublicSource) -> str:
        """What is there, in words, without reading a row; an `InputError` where it cannot be had."""
        name = str(source.repository)
        if self.mirror:
            return str(self._folder(source))
        # The Hub's client is slow to import.
        from huggingface_hub import HfApi

        try:
            HfApi().auth_check(name, repo_type="dataset")
        except Exception as error:
            raise unreachable(name, error) from error
        return ask_commit(name, source.revision)

    def rows(self, source: PublicSource, subset: str | None, split: str, commit: str | None) -> Any:
        """One split of a data set as an `IterableDataset` of the library `datasets`."""
        # Imported here because it is slow to load.
        from datasets import load_dataset

        place = str(self._folder(source) if self.mirror else source.repository)
        files = {} if source.data_files is None else {"data_files": source.data_files}
        # Files are of one split, whatever the data set calls it.
        return load_dataset(place, subset, split=split, revision=commit, streaming=True, **files)

    def _folder(self, source: PublicSource) -> Path:
        assert self.mirror is not None
        folder = self.mirror / str(source.repository)
        if not folder.is_dir():
            raise InputError(f"hub:{source.repository}", f"is not in {self.mirror}", "download it to there")
        return folder


class RowStream:
    """The rows of one table of a data set, one split after another, from the `state` of an earlier process on.

    `columns` are those that the rows must have.
    """

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
        # The library raises the errors of several others, which change with its versions.
        except Exception as error:
            raise unreachable(name, error) from error

    def _check(self, row: Row) -> None:
        """Check the columns of the first row; the others of a table have the same."""
        missing = sorted(self.columns - set(row))
        if missing:
            what = f"has no column {missing[0]!r} among {shorten(', '.join(map(str, row)), 80)}"
            raise InputError(f"hub:{self.source.repository}", what, "it has changed; leave the source out")
        self.columns = set()


class Parts:
    """The parts of one file: converted rows, and with each part the place up to which the source was read."""

    def __init__(self, folder: Path, stem: str, kind: Kind) -> None:
        self.folder, self.stem, self.kind = folder, stem, kind

    @property
    def paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.stem}-*.parquet"))

    @property
    def note(self) -> dict[str, Any]:
        """How far the last part reaches: rows written, read, and left out with the first reason; the source's state."""
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
        """Write the parts that are missing; returns how many rows there are, were read and left out, and why.

        `rows` are those behind the last part's, and `state` says where reading them has come.
        """
        note, remaining = self.note, iter(rows)
        total = source.rows and -(-source.rows // source.every)
        title = f"{source.key} {self.stem}"
        with progress_bar(limit if total is None else min(limit or total, total), title, "row") as bar:
            bar.update(note["rows"])
            while not note["last"]:
                made: list[dict[str, Any]] = []
                while len(made) < PART_ROWS and not note["last"]:
                    row = None if limit is not None and note["rows"] + len(made) >= limit else next(remaining, None)
                    note["last"] = row is None
                    if row is None:
                        break
                    note["read"] += 1
                    if (note["read"] - 1) % source.every:
                        continue
                    try:
                        ours = self.kind.convert(row, source.columns)
                        self.kind.check(ours, {}, f"row {note['read']}")
                    # Those of Python are of a cell of another type, such as a score that is no number.
                    except (InputError, TypeError, ValueError) as fault:
                        note |= {
                            "left_out": note["left_out"] + 1,
                            "left_out_first": note["left_out_first"] or str(fault),
                        }
                        continue
                    if keep is None or keep(ours):
                        made.append(ours)
                        bar.update()
                note |= {"rows": note["rows"] + len(made), "state": state()}
                schema = self.kind.schema.with_metadata({"note": json.dumps(note)})
                with atomic_path(self.folder / f"{self.stem}-{len(self.paths):05d}.parquet") as temporary:
                    pq.write_table(pa.Table.from_pylist(made, schema), temporary, compression="zstd")
        return {name: note[name] for name in ("rows", "read", "left_out", "left_out_first")}

    def merge(self, output: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write the parts as one file, and its manifest; the file comes last, so where it is its manifest is too."""
        with atomic_path(output) as temporary:
            with table_writer(temporary, self.kind.schema) as write:
                for part in self.paths:
                    write(pq.read_table(part).replace_schema_metadata(None))
            manifest = {**fields, "output_sha256": file_sha256(temporary)}
            write_file_manifest(manifest_path(output), manifest)
        return manifest


def fetch_source(source: PublicSource, output: Path, hub: Hub, limit: int | None = None) -> dict[str, Any]:
    """Write one source's rows to a Parquet file that training or mining reads; the manifest beside it is returned.

    The rows come streamed and are written in parts, each with the place where the next one begins. A kill costs one
    part, and a resumed process gives the same bytes. Rows without a text, or that the reader of the file would refuse,
    are left out and counted. A set of `beir` gets the file `NAME.corpus.parquet` too, its documents.

    Args:
        source: Where the rows lie, and how they become ours.
        output: The file to write, `NAME.parquet`; a finished one of the same source and limit is kept.
        hub: Where data sets are read.
        limit: Maximum rows written, the first ones of all; None for each `every`-th of all.

    Raises:
        InputError: If the data set is gone, gated or changed, has no usable row, or something else lies at `output`.
    """
    assert source.kind is not None
    kind = KINDS[source.kind]
    source = source if limit is None else replace(source, every=1)
    fields = {"kind": "public data", "source": source.recipe, "limit": limit}
    if (found := finished_manifest(output, fields)) is not None:
        return found
    work = output.with_name(f"{output.name}.work")
    with discard_on_user_error(work, unless=lambda: any(work.glob("*.parquet"))):
        begun = (work / "manifest.json").exists()
        commit = check_manifest(work, {})["commit"] if begun else hub.commit(source)
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
            raise InputError(f"hub:{source.repository}", f"has no row that can be used{reason}", "leave the source out")
        facts |= {"commit": commit, "licence": source.licence}
        manifest = parts.merge(output, {**fields, **facts})
    shutil.rmtree(work)
    if facts["left_out"]:
        logger.warning("%s: %d rows left out (%s)", source.key, facts["left_out"], facts["left_out_first"])
    return manifest


def corpus_path(output: Path) -> Path:
    """The file of the documents of a fetched set of `beir`."""
    return output.with_name(f"{output.stem}.corpus.parquet")


def _join(
    source: PublicSource, output: Path, parts: Parts, hub: Hub, commit: str | None, limit: int | None
) -> dict[str, Any]:
    """Write a pair for each judgment above 0, in the order of the judgments, and the file of the documents.

    With a limit the documents are those of the pairs alone, and reading them ends with the last one.
    """
    split = source.split if isinstance(source.split, str) else source.split[0]
    stream = partial(RowStream, hub, source, commit)
    judged = (
        (str(row["query-id"]), str(row["corpus-id"]))
        for row in stream("default", [split], ("query-id", "corpus-id", "score"))
        if float(row["score"]) > 0
    )
    pairs = list(islice(judged, 0, limit, source.every))
    queries, wanted = {}, {query for query, _ in pairs}
    for row in stream("queries", ["queries"], ("_id", "text")):
        if str(row["_id"]) in wanted:
            queries[str(row["_id"])] = one_text(row, "text")
            if len(queries) == len(wanted):
                break
    wanted = {document for _, document in pairs}
    corpus = Parts(parts.folder, "documents", CORPUS)
    documents = stream("corpus", ["corpus"], ("_id", "text"), corpus.note["state"])
    whole = replace(source, every=1, rows=None)
    if limit is None:
        facts = corpus.write(documents, documents.state, whole, None)
    else:
        facts = corpus.write(documents, documents.state, whole, len(wanted), lambda row: row["_id"] in wanted)
    corpus.merge(corpus_path(output), {"kind": "public corpus", "source": source.recipe, **facts, "commit": commit})
    texts = {
        row["_id"]: one_text(row, ["title", "text"])
        for path in corpus.paths
        for row in pq.read_table(path).to_pylist()
        if row["_id"] in wanted
    }
    # A judgment of a text that is not there is left out with the other rows that have none.
    joined = ({"query": queries.get(query, ""), "positive": texts.get(name, "")} for query, name in pairs)
    behind = islice(joined, parts.note["read"], None)
    return parts.write(behind, lambda: None, replace(whole, columns={"query": "query", "positive": "positive"}), limit)
