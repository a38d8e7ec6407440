"""What a person says about one source of training data."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from embeddings.common.errors import OptionError
from embeddings.common.text import TextSettings
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
_DRAWS_NEGATIVES = ("class_by_example", "class_by_label")
_BY_LABEL = ("class_by_label", "binary_by_label")


@dataclass(frozen=True)
class SourceConfig:
    """One source of training data: where it lies, how its rows become examples, and which prompts they carry.

    Conversions:
        pairs: Records with `query`, `positive`, and maybe `negatives`, `instruction`, `label`, `score`, `id`,
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
        max_rows: Most examples of an epoch, or None for all. They are drawn one from each of `max_rows` equal
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

    name: str
    path: str | list[str]
    conversion: Conversion = "pairs"
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    instruction: str | list[str] | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    symmetric: bool = False
    in_batch_negatives: bool = True
    weight: float = 1.0
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
        self._check_origin()
        self._check_prompts()
        self._check_numbers()
        for name in self.columns:
            if name not in self.fields:
                raise self.fault(
                    "columns",
                    name,
                    f"may map only {', '.join(self.fields)} for conversion {self.conversion}",
                    "write it as {field: column}",
                )

    @property
    def is_hub(self) -> bool:
        """Whether the source is a Hub data set."""
        return isinstance(self.path, str) and self.path.startswith(HUB_PREFIX)

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

    def fault(self, option: str, value: object, rule: str, fix: str) -> OptionError:
        """The error of one of this source's options."""
        return OptionError(f"data.sources[{self.name}].{option}", value, rule, fix)

    def _check_origin(self) -> None:
        if not self.name.strip():
            raise OptionError("data.sources.name", self.name, "must not be empty", "name the source")
        if not self.path or (isinstance(self.path, list) and not all(self.path)):
            raise self.fault("path", self.path, "must not be empty", "name a file, a glob, or hub:organisation/name")
        if self.is_hub:
            if not re.fullmatch(r"hub:[\w.-]+(/[\w.-]+)?", str(self.path)):
                raise self.fault("path", self.path, "is no name of a Hub data set", "write hub:organisation/name")
            return
        if isinstance(self.path, list) and any(part.startswith(HUB_PREFIX) for part in self.path):
            raise self.fault("path", self.path, "lists a Hub data set", "give each Hub data set its own source")
        for option in ("subset", "split", "revision"):
            if (value := getattr(self, option)) is not None:
                raise self.fault(option, value, "has no meaning for files", "leave it out, or read from hub:")

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
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise self.fault("weight", self.weight, "must be a finite number > 0", "leave the source out to skip it")
        for option in ("max_rows", "num_negatives"):
            if (count := getattr(self, option)) is not None and count < 1:
                raise self.fault(option, count, "must be >= 1", "leave it out for the default")
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise self.fault("min_score", self.min_score, "must be finite", "the paper uses 4")
        for option, value, where in (
            ("num_negatives", self.num_negatives, _DRAWS_NEGATIVES),
            ("min_score", self.min_score, ("sts",)),
            ("label_texts", self.label_texts or None, _BY_LABEL),
            ("single_text_classes", _unless_refuse(self.single_text_classes), ("class_by_example",)),
            ("suspect_rows", _unless_refuse(self.suspect_rows), ("pairs",)),
            ("surrogate_vectors", self.surrogate_vectors, ("pairs", "sts")),
        ):
            if value is not None and self.conversion not in where:
                raise self.fault(
                    option,
                    value,
                    f"has no effect on conversion {self.conversion}",
                    f"leave it out, or use {' or '.join(where)}",
                )
        if self.licence is not None and not self.licence.strip():
            raise self.fault("licence", self.licence, "must not be empty", "leave it out where it is not known")
        for label, text in self.label_texts.items():
            if not text.strip():
                raise self.fault("label_texts", {label: text}, "must not hold an empty text", "write the label's text")


def check_names(names: Sequence[str], option: str = "sources") -> None:
    """Check that no two sources have one name.

    Args:
        names: The names.
        option: Which option of the data lists the sources.

    Raises:
        OptionError: If two are equal.
    """
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"data.{option}", name, "must have different names", "rename one of them")


def _unless_refuse(policy: str) -> str | None:
    """A policy that was chosen, or None for the one that stands where nothing was said."""
    return None if policy == "refuse" else policy
