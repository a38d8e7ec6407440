"""Sources of training data: their options, and readers of JSON lines, Parquet files and data sets of the Hub."""

import glob
import gzip
import json
import math
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError, OptionError, program
from embeddings.common.text import TextSettings, one_line
from embeddings.data.records import LABELLED_FIELDS, RECORD_FIELDS, SCORED_FIELDS

Conversion = Literal["pairs", "class_by_example", "class_by_label", "binary_by_label", "sts"]
SingleTextClasses = Literal["refuse", "leave_out"]
SuspectRows = Literal["refuse", "leave_out", "keep"]
HUB_PREFIX = "hub:"

_FIELDS: dict[Conversion, tuple[str, ...]] = {
    "pairs": RECORD_FIELDS,
    "class_by_example": LABELLED_FIELDS,
    "class_by_label": LABELLED_FIELDS,
    "binary_by_label": LABELLED_FIELDS,
    "sts": SCORED_FIELDS,
}
# The conversions on which an option has an effect.
_ONLY_ON: dict[str, tuple[Conversion, ...]] = {
    "num_negatives": ("class_by_example", "class_by_label"),
    "min_score": ("sts",),
    "label_texts": ("class_by_label", "binary_by_label"),
    "single_text_classes": ("class_by_example",),
    "suspect_rows": ("pairs",),
    "surrogate_vectors": ("pairs", "sts"),
}
_NOT_GIVEN: tuple[object, ...] = (None, {}, "refuse")


@dataclass(frozen=True)
class Origin:
    """Where a source lies, files or a split of a Hub data set, and its share: what every kind of source has."""

    name: str
    path: str | list[str] | None
    subset: str | None = field(default=None, kw_only=True)
    split: str | None = field(default=None, kw_only=True)
    revision: str | None = field(default=None, kw_only=True)
    weight: float = field(default=1.0, kw_only=True)

    @property
    def is_hub(self) -> bool:
        """Whether the source is a Hub data set."""
        return isinstance(self.path, str) and self.path.startswith(HUB_PREFIX)

    def fault(self, option: str, value: object, rule: str, fix: str) -> OptionError:
        """The error of one of this source's options."""
        return OptionError(f"data.sources[{self.name}].{option}", value, rule, fix)

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise OptionError("data.sources.name", self.name, "must not be empty", "name the source")
        if self.is_hub and not re.fullmatch(r"hub:[\w.-]+(/[\w.-]+)?", str(self.path)):
            raise self.fault("path", self.path, "is no name of a Hub data set", "write hub:organisation/name")
        if isinstance(self.path, list) and any(part.startswith(HUB_PREFIX) for part in self.path):
            raise self.fault("path", self.path, "lists a Hub data set", "give each Hub data set its own source")
        for option in ("subset", "split", "revision"):
            if (value := getattr(self, option)) is not None and not self.is_hub:
                raise self.fault(option, value, "has no meaning for files", "leave it out, or read from hub:")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise self.fault("weight", self.weight, "must be a finite number > 0", "leave the source out to skip it")


@dataclass(frozen=True)
class SourceConfig(Origin):
    """One source of training data: where it lies, how its rows become examples, and which prompts they carry.

    Conversions:
        pairs: Records with `query`, `positive`, and optionally `negatives`, `instruction`, `label`, `score`, `id`,
            `language`.
        class_by_example: Rows `text`, `label`. A random text of the same class is the positive, random texts of other
            classes are the negatives, drawn anew each epoch (NV-Embed: multi-class classification and clustering).
        class_by_label: The same rows; the label's text is the positive, other labels' texts are the negatives.
        binary_by_label: The same with exactly two labels (NV-Embed: binary classification).
        sts: Rows `sentence1`, `sentence2`, `score`. A pair with a score of at least `min_score` gives two examples,
            one in each direction.

    Args:
        name: Name in logs and messages, unique in the mixture.
        path: File, glob, list of these, or `hub:organisation/name`. Environment variables (`$DATA`, `${DATA}`) are
            filled in. A file is JSON lines, plain or gzipped, or Parquet; its content decides, not its name.
        conversion: How rows become examples (above).
        subset: Configuration of a Hub data set.
        split: Split of a Hub data set, `train` where none is given.
        revision: Branch, tag or commit of a Hub data set; with a full commit a converted source needs no network.
        columns: Column of a field, for fields whose column has another name.
        instruction: What the queries are for; several alternates are drawn from at random, each epoch anew. A record
            with an instruction of its own goes by that one.
        query_prompt: The query's prompt as it is, in place of an instruction.
        document_prompt: Text put before positives and negatives.
        symmetric: Whether positives and negatives carry the query's prompt (NV-Embed: semantic similarity).
        in_batch_negatives: Whether other queries' candidates may serve as negatives.
        weight: Share of this source where the proportions are given, > 0, relative to the other sources.
        max_rows: Maximum examples of an epoch, or None for all. They are drawn one from each of `max_rows` equal
            stretches of the source, so that a sorted file is sampled evenly; positives and negatives of
            `class_by_example` still come from the whole source.
        seed: Seed of the choice that `max_rows` makes.
        label_texts: Text of each label, for the conversions by label. Without it labels must be words.
        num_negatives: Negatives drawn for each query by `class_by_example` and `class_by_label`; NV-Embed uses 7,
            which None means.
        single_text_classes: What `class_by_example` does with a class that has only one text, hence no positive:
            refuse the source, or leave the class's rows out as queries (they still serve as negatives).
        min_score: Least score of a positive pair of `sts`; NV-Embed uses 4, which None means.
        suspect_rows: What `pairs` does with a record whose negative is also a positive, or whose positive or negative
            is the query itself: refuse the source at the first, leave such rows out, or keep them (the losses mask
            such negatives; a positive that is the query is told from it by dropout alone).
        surrogate_vectors: Folder of another model's vectors of this source's pairs, for a loss that filters false
            negatives by them; `cluster --vectors` writes it, hard negatives included with `--negatives true`.
            Environment variables are filled in.
        licence: The licence of the data, for the model's card; None where it is not known.

    Raises:
        OptionError: If a value is impossible or cannot take effect.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, section 4.2 and Table 12.
    """

    path: str | list[str]
    conversion: Conversion = "pairs"
    columns: dict[str, str] = field(default_factory=dict)
    instruction: str | list[str] | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    symmetric: bool = False
    in_batch_negatives: bool = True
    max_rows: int | None = None
    seed: int = 0
    label_texts: dict[str, str] = field(default_factory=dict)
    num_negatives: int | None = None
    single_text_classes: SingleTextClasses = "refuse"
    min_score: float | None = None
    suspect_rows: SuspectRows = "refuse"
    surrogate_vectors: str | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path or (isinstance(self.path, list) and not all(self.path)):
            raise self.fault("path", self.path, "must not be empty", "name a file, a glob, or hub:organisation/name")
        self._check_prompts()
        self._check_numbers()
        for name in self.columns:
            if name not in self.fields:
                rule = f"may map only {', '.join(self.fields)} for conversion {self.conversion}"
                raise self.fault("columns", name, rule, "write it as {field: column}")

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a row that the conversion knows."""
        return _FIELDS[self.conversion]

    def query_prompts(self, text: TextSettings) -> tuple[str, ...]:
        """The prompts that a query may carry under these settings; one of them is drawn for each example."""
        if self.instruction is None:
            return (self.query_prompt,)
        alternates = [self.instruction] if isinstance(self.instruction, str) else self.instruction
        return tuple(text.instruction_prompt(alternate) for alternate in alternates)

    def _check_prompts(self) -> None:
        if self.instruction is not None:
            alternates: Sequence[str] = [self.instruction] if isinstance(self.instruction, str) else self.instruction
            if not alternates or not all(text.strip() for text in alternates):
                raise self.fault("instruction", self.instruction, "must not be empty", "leave it out for no prompt")
            if self.query_prompt:
                raise self.fault("query_prompt", self.query_prompt, "excludes instruction", "give one of the two")
        if self.symmetric and self.document_prompt:
            raise self.fault("document_prompt", self.document_prompt, "excludes symmetric", "give one of the two")
        if self.symmetric and self.instruction is None and not self.query_prompt:
            raise self.fault("symmetric", True, "needs an instruction or a query_prompt", "give one, or leave it out")

    def _check_numbers(self) -> None:
        for option in ("max_rows", "num_negatives"):
            if (count := getattr(self, option)) is not None and count < 1:
                raise self.fault(option, count, "must be >= 1", "leave it out for the default")
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise self.fault("min_score", self.min_score, "must be finite", "the paper uses 4")
        for option, where in _ONLY_ON.items():
            if (value := getattr(self, option)) not in _NOT_GIVEN and self.conversion not in where:
                rule = f"has no effect on conversion {self.conversion}"
                raise self.fault(option, value, rule, f"leave it out, or use {' or '.join(where)}")
        if self.licence is not None and not self.licence.strip():
            raise self.fault("licence", self.licence, "must not be empty", "leave it out where it is not known")
        for label, text in self.label_texts.items():
            if not text.strip():
                raise self.fault("label_texts", {label: text}, "must not hold an empty text", "write the label's text")


def check_names(names: Sequence[str], option: str = "sources") -> None:
    """Check that no two sources have one name; `option` is the option of the data that lists them.

    Raises:
        OptionError: If two have.
    """
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"data.{option}", name, "must have different names", "rename one of them")


_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def resolve_files(path: str | Sequence[str]) -> list[Path]:
    """The files that a path, a glob or a list of these names (see `fill_path`): the list's order, matches sorted.

    Raises:
        InputError: If a variable is not set, a file is missing, or a folder or a pipe, a glob matches nothing, or a
            file comes twice.
    """
    found = [file for part in ([path] if isinstance(path, str) else path) for file in _expand(part)]
    for file, count in Counter(found).items():
        if count > 1:
            raise InputError(str(file), "the path names this file twice", "name it once")
    return found


def fill_path(path: str) -> Path:
    """A path with its environment variables (`$DATA`, `${DATA}`) and `~` filled in.

    Raises:
        InputError: If a variable is not set.
    """
    return Path(_fill(path))


def _fill(part: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise InputError(part, f"the environment variable {name} is not set", f"run: export {name}=FOLDER")
        return os.environ[name]

    return os.path.expanduser(_VARIABLE.sub(value, part))


def _expand(part: str) -> list[Path]:
    filled = _fill(part)
    if os.path.isdir(filled):
        raise InputError(filled, "is a folder, expected a file", "name its files, such as FOLDER/*.jsonl")
    if os.path.isfile(filled):
        return [Path(filled)]
    if os.path.exists(filled):
        raise _not_regular(filled)
    if not glob.has_magic(filled):
        hint = f"run: {program()} prepare docstrings --output {DOCSTRINGS}"
        raise InputError(filled, "no such file", hint if filled.startswith(f"{DOCSTRINGS}/") else "check the path")
    matches = [Path(match) for match in sorted(glob.glob(filled, recursive=True)) if os.path.isfile(match)]
    if not matches:
        raise InputError(filled, "no file matches", "check the pattern")
    return matches


def _not_regular(path: str) -> InputError:
    return InputError(path, "is no regular file", "write what it gives to a file, and name that")


MAX_LINE_BYTES = 32 * 2**20
# A gzip file of a few kilobytes can unpack to hours of blank lines.
MAX_BLANK_LINES = 2**20
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
# First bytes of what is often met in place of JSON lines; of two that fit the first one holds.
_FOREIGN = {
    b"\xff\xfe\x00\x00": ("UTF-32", "save it as UTF-8"),
    b"\xff\xfe": ("UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "save it as UTF-8"),
    b"BZh": ("compressed by bzip2", "unpack it, or compress it by gzip"),
    b"\xfd7zX": ("compressed by xz", "unpack it, or compress it by gzip"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it, or compress it by gzip"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"ARRO": ("an Arrow file", "write it as Parquet"),
}
_BOM = b"\xef\xbb\xbf"
# A first line of column names, such as `query,positive`.
_HEADER = re.compile(rb'"?[A-Za-z_]\w*"?([,;\t]"?[A-Za-z_]\w*"?)+\s*')
# Where the quickstart's corpus lies, by its config.
DOCSTRINGS = "data/docstrings"
_PARQUET_ROWS = 1024


class Row(NamedTuple):
    """One row: `where` is file and row for messages, `fields` its values by column name."""

    where: str
    fields: Mapping[str, Any]


class Reader(ABC):
    """Rows in their order, and how far reading has come.

    Attributes:
        total_bytes: Bytes to read, or None where it is not known.
        bytes_read: Bytes read so far.
        unread_columns: Columns that the rows leave out, known once the first row is read.
    """

    total_bytes: int | None = None
    bytes_read: int = 0
    unread_columns: Sequence[str] = ()

    @abstractmethod
    def __iter__(self) -> Iterator[Row]:
        """The rows from the first."""


def open_reader(path: Path, fields: Sequence[str], required: Sequence[str]) -> Reader:
    """The reader for a file's content: gzip and Parquet are known by their first bytes, whatever the name says.

    Args:
        path: File to read.
        fields: Columns that are of use; Parquet reads no others.
        required: Columns without which a row is refused; where one is missing Parquet reads all columns, so that the
            refusal can name them.

    Raises:
        InputError: If the file is empty, cannot be opened, or contradicts its name.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise _not_regular(str(path))
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise InputError(str(path), what, "check the path and its permissions") from None
    if not start:
        raise InputError(str(path), "is empty", "write the file again, or leave it out")
    if start == _PARQUET:
        return ParquetReader(path, fields, required)
    if path.suffix == ".parquet":
        raise InputError(str(path), "is not a Parquet file, whatever its name says", "check how it was written")
    return JsonlReader(path, gzipped=start.startswith(_GZIP))


class JsonlReader(Reader):
    """Rows of a file with one JSON object a line; rows count from 1 as an editor's lines do.

    A byte-order mark and blank lines are passed over, up to `MAX_BLANK_LINES` of them in one stretch.

    Raises:
        InputError: While reading, at the first row that is not UTF-8, not JSON, not an object, too long, or cut off,
            after too many blank lines, or where the compressed data ends or breaks; the message names the row.
    """

    def __init__(self, path: Path, gzipped: bool) -> None:
        self.path, self.gzipped = path, gzipped
        self.total_bytes = path.stat().st_size

    def __iter__(self) -> Iterator[Row]:
        """The rows from the first."""
        number, last = 0, 0
        with open(self.path, "rb") as raw, gzip.GzipFile(fileobj=raw) if self.gzipped else raw as file:
            while line := self._next_line(file, number + 1):
                number += 1
                self.bytes_read = raw.tell()
                if number == 1:
                    line = self._without_mark(line)
                if not line or line.isspace():
                    if number - last > MAX_BLANK_LINES:
                        what = f"{MAX_BLANK_LINES} blank lines follow each other"
                        raise InputError(f"{self.path}:{number}", what, "take them out, or leave the file out")
                    continue
                last = number
                where = f"{self.path}:{number}"
                yield Row(where, _parse_line(line, where))
        if not last:
            raise InputError(str(self.path), "holds no rows", "write the file again, or leave it out")

    def _next_line(self, file: IO[bytes] | gzip.GzipFile, number: int) -> bytes:
        where = f"{self.path}:{number}"
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except (OSError, EOFError, zlib.error):
            if not self.gzipped:
                raise
            what = "the gzip data is cut off or damaged here"
            raise InputError(where, what, "fetch or compress the file again") from None
        if len(line) > MAX_LINE_BYTES:
            what = f"the row is longer than {MAX_LINE_BYTES >> 20} MiB"
            raise InputError(where, what, "check that the file is JSON lines, or cut the text")
        return line

    def _without_mark(self, line: bytes) -> bytes:
        for mark, (kind, fix) in _FOREIGN.items():
            if line.startswith(mark):
                raise InputError(f"{self.path}:1", f"the file is {kind}", fix)
        return line.removeprefix(_BOM)


class ParquetReader(Reader):
    """Rows of a Parquet file, counted from 1; one batch of rows is in memory at a time.

    Raises:
        InputError: If the file is damaged, has no rows, or a column twice that is asked for.
    """

    def __init__(self, path: Path, fields: Sequence[str], required: Sequence[str]) -> None:
        self.path, self.fields, self.required = path, fields, required
        self.total_bytes: int = path.stat().st_size

    def __iter__(self) -> Iterator[Row]:
        """The rows from the first."""
        number = 0
        try:
            with pq.ParquetFile(self.path) as file:
                total = file.metadata.num_rows
                for batch in file.iter_batches(_PARQUET_ROWS, columns=self._selected(file.schema_arrow.names)):
                    for fields in self._rows(batch, number):
                        number += 1
                        yield Row(f"{self.path}:{number}", fields)
                    self.bytes_read = self.total_bytes * number // total
        except (pa.ArrowException, OSError) as error:
            reason = one_line(str(error) or type(error).__name__, 100)
            what = f"the Parquet data is cut off or damaged ({reason})"
            raise InputError(f"{self.path}:{number + 1}", what, "write the file again") from error
        if number == 0:
            raise InputError(str(self.path), "holds no rows", "write the file again, or leave it out")

    def _selected(self, names: list[str]) -> list[str] | None:
        for name in self.fields:
            if names.count(name) > 1:
                raise InputError(str(self.path), f"has two columns {name!r}", "rename one of them")
        if not set(self.required) <= set(names):
            return None
        self.unread_columns = [name for name in names if name not in self.fields]
        return [name for name in names if name in self.fields]

    def _rows(self, batch: pa.RecordBatch, done: int) -> Iterator[dict[str, Any]]:
        """The rows of a batch; where one cannot be decoded the rows are tried one at a time to name it."""
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            for index in range(batch.num_rows):
                try:
                    batch.slice(index, 1).to_pylist()
                except UnicodeDecodeError:
                    where, fix = f"{self.path}:{done + index + 1}", "write the file again as UTF-8"
                    raise InputError(where, "a text is not valid UTF-8", fix) from None


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    """The object of one line."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise _cut_off(where) from None
        what = f"byte {error.start + 1} of the row is not valid UTF-8"
        raise InputError(where, what, "save the file as UTF-8") from None
    except RecursionError:
        raise InputError(where, "the JSON is nested too deep", "write flat records") from None
    except ValueError as error:
        raise _not_json(line, where, error) from None
    if not isinstance(value, dict):
        kind = "a JSON array" if isinstance(value, list) else "a JSON value"
        raise InputError(where, f"the row is {kind}, expected an object", "write one JSON object a line")
    return value


def _not_json(line: bytes, where: str, error: ValueError) -> InputError:
    if b"\x00" in line:
        return InputError(where, "the row holds a NUL byte", "fetch or write the file again")
    if line.lstrip().startswith(b"["):
        return InputError(where, "a JSON array begins here, expected JSON lines", "write one JSON object a line")
    if b"\r" in line.strip():
        return InputError(where, "rows end in carriage returns alone", "save the file with line feeds")
    if line.lstrip().startswith(b"{") and not line.endswith(b"\n"):
        return _cut_off(where)
    if where.split(":")[0].endswith((".csv", ".tsv")) or (where.endswith(":1") and _HEADER.fullmatch(line)):
        what = "this is a table of separated values (CSV), expected JSON lines or Parquet"
        return InputError(where, what, "convert it: pandas.read_csv(FILE).to_json(OUT, orient='records', lines=True)")
    column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    return InputError(where, f"the row is not JSON{column}", "write one JSON object a line")


def _cut_off(where: str) -> InputError:
    return InputError(where, "the file ends in the middle of this row", "fetch it again, or delete the row")


def resolve_revision(name: str, revision: str | None) -> str:
    """The commit that a revision of a Hub data set stands for; a full commit needs no network.

    Raises:
        InputError: If the Hub cannot be reached, or does not know the data set or the revision.
    """
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    return _ask_commit(name, revision)


def _ask_commit(name: str, revision: str | None) -> str:
    # The Hub's client is slow to import, and most runs read files.
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(name, revision=revision, timeout=20).sha
    # The client raises the errors of several libraries, which change with its versions.
    except Exception as error:
        raise _unreachable(name, error) from error
    assert commit is not None
    return commit


class HubReader(Reader):
    """Rows of one split of a Hub data set, streamed, counted from 1; at a commit, so that they are known to the byte.

    Raises:
        InputError: While reading, if the Hub cannot be reached or the split is not there.
    """

    def __init__(self, name: str, subset: str | None, split: str, commit: str) -> None:
        self.name, self.subset, self.split, self.commit = name, subset, split, commit

    def __iter__(self) -> Iterator[Row]:
        """The rows from the first."""
        # Streaming would try an unreachable Hub again for half a minute, and say so each time.
        _ask_commit(self.name, self.commit)
        number = 0
        try:
            # Imported here because it is slow to load, and most runs read files.
            from datasets import load_dataset

            rows = load_dataset(self.name, self.subset, split=self.split, revision=self.commit, streaming=True)
            for number, fields in enumerate(rows, start=1):
                yield Row(f"hub:{self.name}[{self.split}]:{number}", fields)
        except Exception as error:
            raise _unreachable(self.name, error) from error
        if number == 0:
            raise InputError(f"hub:{self.name}", f"split {self.split!r} holds no rows", "choose another split")


def _unreachable(name: str, error: Exception) -> InputError:
    reason = one_line((str(error).strip().splitlines() or [type(error).__name__])[0], 160)
    fix = "check name, split and network, or download it and give its files"
    return InputError(f"hub:{name}", f"cannot be read ({reason})", fix)
