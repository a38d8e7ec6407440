"""Sources of training data: their options, their files, and the identity of their content.

The identity of a file is its hash; the identity of a Hub data set is its commit.
"""

import contextlib
import glob
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from embeddings.common.errors import InputError, OptionError, program, require_minimum, run_checks
from embeddings.common.io import check_regular, file_sha256, read_json_or_empty, write_json
from embeddings.common.progress import progress_bar
from embeddings.common.text import TextSettings
from embeddings.data.readers import HubReader, Reader, open_reader, resolve_revision
from embeddings.data.records import LABELLED_FIELDS, RECORD_FIELDS, SCORED_FIELDS

Conversion = Literal["pairs", "class_by_example", "class_by_label", "binary_by_label", "sts"]
SingleTextClasses = Literal["refuse", "leave_out"]
SuspectRows = Literal["refuse", "leave_out", "keep"]
HUB_PREFIX = "hub:"
# Folders of the docstring corpora in the configs, and the option that creates each.
DOCSTRINGS = {"data/docstrings": "", "data/docstrings_small": " --max-rows 10000"}
HASHES = "hashes"
# The folder of the rows that were passed to `source_from_rows`, in files named by their SHA-256.
ROWS_FOLDER = "rows"

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


@dataclass(frozen=True)
class Origin:
    """Options of every kind of source: its files, or a split of a Hub data set, and its weight."""

    name: str
    path: str | list[str] | None
    subset: str | None = field(default=None, kw_only=True)
    split: str | None = field(default=None, kw_only=True)
    revision: str | None = field(default=None, kw_only=True)
    weight: float = field(default=1.0, kw_only=True)

    @property
    def is_hub(self) -> bool:
        return isinstance(self.path, str) and self.path.startswith(HUB_PREFIX)

    def fault(self, option: str, value: object, rule: str, fix: str) -> OptionError:
        return OptionError(f"data.sources[{self.name}].{option}", value, rule, fix)

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise OptionError("data.sources.name", self.name, "must not be empty", "name the source")
        if self.is_hub and not re.fullmatch(r"hub:[\w.-]+(/[\w.-]+)?", str(self.path)):
            raise self.fault("path", self.path, "is not the name of a Hub data set", "write hub:organisation/name")
        if isinstance(self.path, list) and any(part.startswith(HUB_PREFIX) for part in self.path):
            raise self.fault("path", self.path, "must not list a Hub data set", "use a separate source for each")
        for option in ("subset", "split", "revision"):
            if (value := getattr(self, option)) is not None and not self.is_hub:
                raise self.fault(option, value, "has no effect on files", "leave it out, or read from hub:")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise self.fault("weight", self.weight, "must be a finite number > 0", "leave the source out to skip it")


@dataclass(frozen=True)
class SourceConfig(Origin):
    """One source of training data: its location, how its rows become examples, and their prompts.

    Conversions:
        pairs: Records with `query`, `positive`, and optionally `negatives`, `instruction`, `label`, `score`, `id`,
            `language`, `scores`.
        class_by_example: Rows `text`, `label`. A random text of the same class is the positive, random texts of other
            classes are the negatives, drawn again each epoch (NV-Embed: multi-class classification and clustering).
        class_by_label: The same rows; the label's text is the positive, other labels' texts are the negatives.
        binary_by_label: The same with exactly two labels (NV-Embed: binary classification).
        sts: Rows `sentence1`, `sentence2`, `score`. A pair with a score of at least `min_score` becomes two
            examples, one in each direction.

    Args:
        name: Unique name in logs and messages.
        path: File, glob, list of these, or `hub:organisation/name`; `$DATA` and `${DATA}` are expanded. A file is
            Parquet, JSON lines, or a table with a header (named `.csv` or `.tsv`); the last two may be gzipped.
        conversion: How rows become examples (above).
        subset: Configuration of a Hub data set.
        split: Split of a Hub data set; None for `train`.
        revision: Branch, tag or commit of a Hub data set; with a full commit a converted source needs no network.
        columns: Column of each field with a different name; null leaves an optional field out. Without it, the usual
            names of other libraries are recognised (`anchor`, `positive`, `negative_1`).
        instruction: Task instruction of the queries, or a list from which one is drawn for each example and epoch. An
            instruction in a record takes precedence.
        query_prompt: Complete prompt of the query, in place of an instruction; "" for none, null for the prompt of the
            text settings.
        document_prompt: The same for positives and negatives.
        symmetric: Whether positives and negatives get the prompt of the query (NV-Embed: semantic similarity).
        in_batch_negatives: Whether other queries' candidates may serve as negatives.
        weight: Relative weight of this source under proportions `given`, > 0.
        max_rows: Maximum examples per epoch, one from each of `max_rows` equal sections of the source; None for all.
            Positives and negatives of `class_by_example` still come from the whole source.
        seed: Seed of the choice of rows for `max_rows`.
        label_texts: Text of each label, for the conversions by label. Without it, labels must be words.
        num_negatives: Negatives of each query of `class_by_example` and `class_by_label`; None for NV-Embed's 7.
        single_text_classes: What `class_by_example` does with a class that has only one text, hence no positive:
            refuse the source, or leave out its rows as queries (they still serve as negatives).
        min_score: Minimum score of a positive pair of `sts`; None for NV-Embed's 4.
        suspect_rows: What `pairs` does with a record that has one text in two roles, such as a negative that is also a
            positive: leave such rows out, refuse a source that has any, or keep them.
        surrogate_vectors: Folder of another model's vectors of the pairs, for a loss that filters false negatives.
            `cluster --vectors` writes it; `--negatives true` includes the hard negatives.
        licence: Licence of the data, for the model card; None if it is unknown.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, section 4.2 and Table 12.
    """

    path: str | list[str]
    conversion: Conversion = "pairs"
    columns: dict[str, str | None] = field(default_factory=dict)
    instruction: str | list[str] | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    symmetric: bool = False
    in_batch_negatives: bool = True
    max_rows: int | None = None
    seed: int = 0
    label_texts: dict[str, str] = field(default_factory=dict)
    num_negatives: int | None = None
    single_text_classes: SingleTextClasses = "refuse"
    min_score: float | None = None
    suspect_rows: SuspectRows = "leave_out"
    surrogate_vectors: str | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path or (isinstance(self.path, list) and not all(self.path)):
            raise self.fault("path", self.path, "must not be empty", "name a file, a glob, or hub:organisation/name")
        self._check_prompts()
        self._check_numbers()
        for name, column in self.columns.items():
            if column is None and (name in ("query", "positive") or self.conversion != "pairs"):
                raise self.fault(f"columns.{name}", column, "must name a column", "null leaves out optional fields")
            if name not in self.fields:
                rule = f"may map only {', '.join(self.fields)} for conversion {self.conversion}"
                raise self.fault("columns", name, rule, "write it as {field: column}")

    @property
    def fields(self) -> tuple[str, ...]:
        return _FIELDS[self.conversion]

    @property
    def score_threshold(self) -> float:
        return 4.0 if self.min_score is None else self.min_score

    def query_prompts(self, text: TextSettings) -> tuple[str | None, ...]:
        """The possible prompts of a query, of which one is drawn for each example; None for that of the settings."""
        if self.instruction is None:
            return (self.query_prompt,)
        alternates = [self.instruction] if isinstance(self.instruction, str) else self.instruction
        return tuple(text.instruction_prompt(alternate) for alternate in alternates)

    def _check_prompts(self) -> None:
        if self.instruction is not None:
            alternates: Sequence[str] = [self.instruction] if isinstance(self.instruction, str) else self.instruction
            if not alternates or not all(text.strip() for text in alternates):
                raise self.fault("instruction", self.instruction, "must not be empty", "leave it out for no prompt")
            if self.query_prompt is not None:
                raise self.fault("query_prompt", self.query_prompt, "excludes instruction", "give one of the two")
        if self.symmetric and self.document_prompt is not None:
            raise self.fault("document_prompt", self.document_prompt, "excludes symmetric", "give one of the two")
        if self.symmetric and self.instruction is None and self.query_prompt is None:
            raise self.fault("symmetric", True, "needs an instruction or a query_prompt", "give one, or leave it out")

    def _check_numbers(self) -> None:
        for option in ("max_rows", "num_negatives"):
            require_minimum(f"data.sources[{self.name}].{option}", getattr(self, option), 1, optional=True)
        if not all(map(str.strip, self.label_texts.values())):
            raise self.fault("label_texts", self.label_texts, "must not contain an empty text", "write the text")
        for option, where in _ONLY_ON.items():
            default = self.__dataclass_fields__[option].default
            if (value := getattr(self, option)) not in (default, {}) and self.conversion not in where:
                rule = f"has no effect on conversion {self.conversion}"
                raise self.fault(option, value, rule, f"leave it out, or use {' or '.join(where)}")


def check_names(names: Sequence[str], option: str = "sources") -> None:
    """Check that the names of sources are unique; `option` is the option under `data` that lists the sources."""
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"data.{option}", name, "must have different names", "rename one of them")


_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def resolve_files(path: str | Sequence[str]) -> list[Path]:
    """The files of a path, a glob or a list of these (see `fill_path`), in list order; glob matches are sorted."""
    files = [file for part in ([path] if isinstance(path, str) else path) for file in _expand(part)]
    for file, count in Counter(files).items():
        if count > 1:
            raise InputError(str(file), "the path names this file twice", "name it once")
    return files


def check_files(sources: Iterable[Origin]) -> None:
    """Check that the files of all sources exist, and name all missing ones; the Hub is not asked."""
    paths = [source.path for source in sources if source.path and not source.is_hub]
    run_checks(partial(_expand, part) for path in paths for part in ([path] if isinstance(path, str) else path))
    run_checks(partial(resolve_files, path) for path in paths)


AnyOrigin = TypeVar("AnyOrigin", bound=Origin)


def one_after_another(title: str, sources: Sequence[AnyOrigin]) -> Iterator[AnyOrigin]:
    """The sources in order, with one bar for all, over their bytes; the bars of the work with a source move it."""
    has_files = all(source.path and not source.is_hub for source in sources)
    sizes = [1] * len(sources)
    if has_files:
        sizes = [sum(file.stat().st_size for file in resolve_files(source.path or [])) for source in sources]
    with progress_bar(sum(sizes), title, "B" if has_files else "source", unit_scale=has_files) as bar:
        for source, size in zip(sources, sizes, strict=True):
            bar.set_description(f"{title} {source.name}", refresh=False)
            with bar.item(size):
                yield source


def fill_path(path: str) -> Path:
    """A path with environment variables (`$DATA`, `${DATA}`) and `~` expanded."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise InputError(path, f"the environment variable {name} is not set", f"run: export {name}=FOLDER")
        return os.environ[name]

    return Path(os.path.expanduser(_VARIABLE.sub(value, path)))


def _expand(part: str) -> list[Path]:
    # A file of this very name is meant, also one whose folder has a `$` in its name.
    filled = part if os.path.isfile(part) else str(fill_path(part))
    if os.path.isdir(filled):
        raise InputError(filled, "is a folder, expected a file", "name its files, such as FOLDER/*.jsonl")
    if os.path.isfile(filled):
        return [Path(filled)]
    check_regular(filled)
    if not glob.has_magic(filled):
        outputs = [folder + option for folder, option in DOCSTRINGS.items() if filled.startswith(f"{folder}/")]
        hint = f"run: {program()} prepare docstrings --output {outputs[0]}" if outputs else "check the path"
        raise InputError(filled, "no such file", hint)
    matches = [Path(match) for match in sorted(glob.glob(filled, recursive=True)) if os.path.isfile(match)]
    if not matches:
        raise InputError(filled, "no file matches", "check the pattern")
    return matches


class HashedFile:
    """A file and its SHA-256, which the folder `cache` holds while size, times and inode of the file are the same."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.path = path
        self._cache_file = cache / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
        try:
            self._stamp = _stamp(path)
            cached = read_json_or_empty(self._cache_file)
            unchanged = cached.get("stamp") == self._stamp and "sha256" in cached
            self.sha256: str = cached["sha256"] if unchanged else file_sha256(path)
        except OSError as error:
            raise InputError(str(path), f"cannot be read ({error.strerror})", "check its permissions") from None

    def is_current(self) -> bool:
        return self.path.exists() and _stamp(self.path) == self._stamp

    def remember(self) -> None:
        """Cache the hash; if that fails, the next run is only slower."""
        if read_json_or_empty(self._cache_file).get("stamp") != self._stamp:
            with contextlib.suppress(OSError):
                write_json(self._cache_file, {"stamp": self._stamp, "sha256": self.sha256})


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


class SourceInputs:
    """The files or the Hub split of a source; `identity` identifies their content, in JSON types.

    `root` is the folder of converted sources. `commit` is of the Hub data set; None for that of the source's revision.
    """

    def __init__(self, source: Origin, root: Path, commit: str | None = None) -> None:
        self._is_hub = source.is_hub
        self._files: list[HashedFile] = []
        self.identity: list[dict[str, Any]]
        if source.is_hub:
            name = str(source.path).removeprefix(HUB_PREFIX)
            split, commit = source.split or "train", commit or resolve_revision(name, source.revision)
            self.identity = [{"hub": name, "subset": source.subset, "split": split, "commit": commit}]
        else:
            self._files = [HashedFile(path, root / HASHES) for path in resolve_files(source.path or [])]
            self.identity = [{"sha256": file.sha256} for file in self._files]

    @property
    def paths(self) -> list[str]:
        """The files; empty for a Hub data set."""
        return [str(file.path) for file in self._files]

    def readers(self, columns: Sequence[str], required: Sequence[str]) -> list[Reader]:
        """Readers of these columns, one for each file; see `open_reader`."""
        if self._is_hub:
            (hub,) = self.identity
            return [HubReader(hub["hub"], hub["subset"], hub["split"], hub["commit"])]
        return [open_reader(file.path, columns, required) for file in self._files]

    def require_unchanged(self) -> None:
        for file in self._files:
            if not file.is_current():
                raise InputError(str(file.path), "the file changed while it was read", "run again after it is written")

    def remember(self) -> None:
        """Cache the hashes of the files for the next run."""
        for file in self._files:
            file.remember()
