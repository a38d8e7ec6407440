"""Conversion of a model's JSON answer to a training record: checks of fields, texts, levels and leaked texts."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.common.io import check_vectors
from embeddings.common.text import canonical
from embeddings.data.readers import open_reader
from embeddings.data.records import NUM_LEVELS, Record, parse_record
from embeddings.synthesis.prompts import LEVELS, Category

if TYPE_CHECKING:
    from embeddings.inference.encoder import Encoder

Reason = Literal[
    "refused", "empty_answer", "cut_off", "not_json", "no_tasks", "not_an_object", "missing_field", "wrong_type",
    "empty_text", "template_text", "unusable_text", "wrong_levels", "repeated_text", "leaked_query", "leaked_label",
    "duplicate_query", "copied_seed",
]  # fmt: skip

# A longer text is not a valid answer to any of our prompts, and would slow the parsers down.
_MAX_CHARACTERS = 1_000_000
_MAX_DETAIL_CHARACTERS = 120


class RejectedAnswer(Exception):
    """An answer that is not used: the reason, as counted in reports, and a detail."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason: Reason = reason
        is_short = len(detail) <= _MAX_DETAIL_CHARACTERS
        self.detail = detail if is_short else f"{detail[: _MAX_DETAIL_CHARACTERS - 1]}…"


class Answer(NamedTuple):
    """One answer of an endpoint, as saved in the journal; token counts are None if the endpoint does not report them.

    `finish_reason` is `stop`, `length`, `content_filter`, …; `refused` says why the model or the endpoint refused.
    """

    content: str | None
    finish_reason: str | None = None
    refused: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Parsed(NamedTuple):
    """The JSON value of an answer, and the names of the repairs that were needed to parse it."""

    value: Any
    repairs: tuple[str, ...]


def parse_answer(answer: Answer) -> Parsed:
    """The JSON value of an answer, repaired if needed (see `_REPAIRS`); a truncated answer is never completed."""
    if answer.refused is not None or answer.finish_reason == "content_filter":
        raise RejectedAnswer("refused", answer.refused or "the endpoint's filter")
    if answer.finish_reason == "length":
        raise RejectedAnswer("cut_off", "the answer reached its limit of tokens")
    text = (answer.content or "").strip()
    if not text:
        raise RejectedAnswer("empty_answer")
    if len(text) > _MAX_CHARACTERS:
        raise RejectedAnswer("not_json", f"{len(text)} characters")
    repairs: list[str] = []
    for name, repair in _REPAIRS:
        changed = repair(text)
        if changed != text:
            text = changed
            repairs.append(name)
        for decode, extra in ((json.loads, ()), (partial(json.loads, strict=False), ("raw_line_break",))):
            value = _attempt(decode, text)
            if value is not _NOTHING:
                return Parsed(value, (*repairs, *extra))
    value = _attempt(ast.literal_eval, text)
    if value is _NOTHING or not _is_json(value):
        raise RejectedAnswer("not_json", " ".join(text.split()))
    return Parsed(value, (*repairs, "python_literal"))


_NOTHING = object()
_FENCE = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)
_THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(\s*[}\]])', re.DOTALL)


def _outermost(text: str) -> str:
    """The text from the first opening bracket to the last closing bracket of the same kind."""
    starts = [index for index in (text.find("{"), text.find("[")) if index >= 0]
    if not starts:
        return text
    start = min(starts)
    end = text.rfind("}" if text[start] == "{" else "]")
    return text[start : end + 1] if end > start else text


_REPAIRS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("none", lambda text: text),
    ("thoughts", lambda text: _THOUGHTS.sub("", text).strip()),
    ("code_fence", lambda text: match[1].strip() if (match := _FENCE.search(text)) else text),
    ("text_around", _outermost),
    ("trailing_comma", lambda text: _COMMA.sub(lambda match: match[1] or match[2], text)),
)


def _attempt(decode: Callable[[str], Any], text: str) -> Any:
    try:
        return decode(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return _NOTHING


def _is_json(value: Any) -> bool:
    """Whether a Python literal consists of JSON types."""
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return isinstance(value, str | int | float | bool | None)


# A shorter query occurs in many documents by chance.
MIN_LEAKED_WORDS = 5
MAX_TASK_CHARACTERS = 400

# In scripts without spaces between words each character is a unit that counts as half a word.
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")
_UNIT = re.compile(rf"{_UNSPACED.pattern}|[^\W{_UNSPACED.pattern[1:-1]}]+")
_NUMBERING = re.compile(r"^\s*(?:\d+\s*[.):]|[-*•])\s+")


class Draft(NamedTuple):
    """An accepted record, and the names of the repairs that were needed."""

    fields: dict[str, Any]
    repairs: tuple[str, ...]


def read_tasks(parsed: Parsed) -> list[str]:
    """The different usable tasks of a brainstorming answer: a list of texts, or an object with exactly one list."""
    value = parsed.value
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 else None
    if not isinstance(value, list):
        raise RejectedAnswer("no_tasks", "the answer is not a list")
    tasks: dict[str, str] = {}
    for item in value:
        if isinstance(item, str):
            task = " ".join(_NUMBERING.sub("", item).split())
            if task and task.isprintable() and len(task) <= MAX_TASK_CHARACTERS:
                tasks.setdefault(normalised(task), task)
    if not tasks:
        raise RejectedAnswer("no_tasks", "the list contains no usable text")
    return list(tasks.values())


def read_example(parsed: Parsed, category: Category, task: str, prompt: str, id: str) -> Draft:
    """The record `id` from an answer to an example prompt; its instruction is the category's, or else the task.

    Rejected are: missing fields and wrong types; texts that are empty, unusable, repeated, or copied from the prompt's
    template; levels other than the requested ones; queries that are copied from a seed or leaked into a document; and
    labels that are leaked into the query.
    """
    value = _object(parsed.value)
    query = _text(value, category.query_field, prompt)
    if json.dumps(query, ensure_ascii=False) in prompt:
        raise RejectedAnswer("copied_seed", query)
    positive = _text(value, category.positive_field, prompt)
    repairs = parsed.repairs
    if category.graded:
        negatives, was_sorted = _graded(value, category.negative_fields[0], prompt)
        repairs = (*repairs, "levels_sorted") if was_sorted else repairs
    else:
        negatives = [_text(value, name, prompt) for name in category.negative_fields]
    _require_different([query, positive, *negatives])
    if category.label:
        if _contains(query, positive, 0):
            raise RejectedAnswer("leaked_label", positive)
    else:
        _require_no_leak(query, [positive, *negatives])
    fields = {"id": id, "query": query, "positive": positive, "negatives": _written(negatives, category.graded)}
    return _draft({**fields, "instruction": category.instruction or task}, repairs)


def read_negatives(parsed: Parsed, record: Mapping[str, Any], field: str, prompt: str) -> Draft:
    """The record with the negatives in `field` of an answer (see `read_example`); its `positive` is a list."""
    negatives, was_sorted = _graded(_object(parsed.value), field, prompt)
    _require_different([record["query"], *record["positive"]], negatives)
    _require_no_leak(record["query"], negatives)
    repairs = (*parsed.repairs, "levels_sorted") if was_sorted else parsed.repairs
    return _draft({**record, "negatives": _written(negatives, graded=True)}, repairs)


def normalised(text: str) -> str:
    """A text without case, white space and punctuation; a text without words is only stripped."""
    return " ".join(_units(text)) or canonical(text)


def _units(text: str) -> list[str]:
    return _UNIT.findall(canonical(text).casefold())


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise RejectedAnswer("not_an_object", type(value).__name__)
    return value


def _text(value: Mapping[str, Any], name: str, prompt: str) -> str:
    """A text field of an answer, stripped."""
    if name not in value:
        raise RejectedAnswer("missing_field", name)
    if not isinstance(value[name], str):
        raise RejectedAnswer("wrong_type", f"{name} is {type(value[name]).__name__}")
    cleaned = str(value[name]).strip()
    if not cleaned:
        raise RejectedAnswer("empty_text", name)
    if cleaned.startswith("<") and cleaned.endswith(">") and f'"{cleaned}"' in prompt:
        raise RejectedAnswer("template_text", name)
    return cleaned


def _graded(value: Mapping[str, Any], name: str, prompt: str) -> tuple[list[str], bool]:
    """The four negatives, hardest first, and whether they had to be sorted by their levels."""
    if name not in value:
        raise RejectedAnswer("missing_field", name)
    items = value[name]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RejectedAnswer("wrong_type", f"{name} is not a list of objects")
    texts = [_text(item, "text", prompt) for item in items]
    levels = [str(item.get("similarity_level", "")).strip().lower() for item in items]
    if sorted(levels) != sorted(LEVELS):
        raise RejectedAnswer("wrong_levels", ", ".join(levels))
    order = sorted(range(len(items)), key=lambda index: LEVELS.index(levels[index]))
    return [texts[index] for index in order], order != list(range(len(items)))


def _require_different(*groups: Sequence[str]) -> None:
    """Check that the texts of the last group differ from each other and from those of the other groups."""
    seen = {normalised(text) for group in groups[:-1] for text in group}
    for text in groups[-1]:
        if normalised(text) in seen:
            raise RejectedAnswer("repeated_text", text)
        seen.add(normalised(text))


def _require_no_leak(query: str, documents: Sequence[str]) -> None:
    if any(_contains(document, query, MIN_LEAKED_WORDS) for document in documents):
        raise RejectedAnswer("leaked_query", query)


def _contains(text: str, part: str, min_words: float) -> bool:
    """Whether a text contains `part` word for word, and `part` has at least `min_words` words."""
    units = _units(part)
    num_words = sum(0.5 if _UNSPACED.match(unit) else 1.0 for unit in units)
    if not units or num_words < min_words:
        return False
    return f" {' '.join(units)} " in f" {' '.join(_units(text))} "


def _written(negatives: Sequence[str], graded: bool) -> list[Any]:
    if not graded:
        return list(negatives)
    return [{"text": text, "level": level} for level, text in enumerate(negatives, start=1)]


def _draft(fields: dict[str, Any], repairs: tuple[str, ...]) -> Draft:
    """The record of these fields, if it is valid training data."""
    try:
        suspicion = parse_record(fields, {}, "answer").suspicion
    except InputError as error:
        raise RejectedAnswer("unusable_text", str(error)) from None
    if suspicion is not None:
        raise RejectedAnswer("repeated_text", suspicion)
    return Draft(fields, repairs)


_FIELDS = ("query", "positive", "negatives")


class LevelCheck(NamedTuple):
    """Mean cosines with the query, of the positive and of the negative of each level, 1 (hardest) to 4.

    In `falling_fraction` of the records the similarity never increases from one level to the next.
    """

    num_records: int
    positive: float
    levels: tuple[float, ...]
    falling_fraction: float

    @property
    def is_falling(self) -> bool:
        return all(hard > easy for hard, easy in zip(self.levels, self.levels[1:], strict=False))


def check_levels(paths: Sequence[Path], encoder: "Encoder", max_records: int = 1000) -> LevelCheck:
    """The mean similarity of each level, as the paper reports it for its data (.881, .857, .845, .793 for N1 to N4).

    `encoder` should not have been trained on such data. At most `max_records` records are used, evenly spread.

    Source: Pan et al. 2025 (MGH), section 5.1, Table 4.
    """
    records = list(_graded_records(paths))
    if not records:
        raise InputError(str(paths[0]) if paths else "levels", "no record has four levels", "check another file")
    count = min(max_records, len(records))
    chosen = [records[index * len(records) // count] for index in range(count)]
    query_ND = _unit(encoder.encode([record.query for record in chosen], role="query"))
    texts = [[record.positives[0], *(negative.text for negative in record.negatives)] for record in chosen]
    similarity = [_unit(encoder.encode(list(column), role="document")) for column in zip(*texts, strict=True)]
    cosine_SN = np.stack([np.einsum("nd,nd->n", query_ND, vector_ND) for vector_ND in similarity])
    falling_N = (np.diff(cosine_SN[1:], axis=0) <= 0).all(axis=0)
    positive, *levels = cosine_SN.mean(axis=1).tolist()
    return LevelCheck(count, positive, tuple(levels), float(falling_N.mean()))


def _graded_records(paths: Sequence[Path]) -> Iterator[Record]:
    for path in paths:
        for where, fields in open_reader(path, _FIELDS, _FIELDS):
            record = parse_record(fields, {}, where)
            if [negative.level for negative in record.negatives] == list(range(1, NUM_LEVELS + 1)):
                yield record


def _unit(vector_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    check_vectors(vector_ND, "the judge's vectors")
    wide_ND = vector_ND.astype(np.float64)
    unit_ND: npt.NDArray[np.float64] = wide_ND / np.linalg.norm(wide_ND, axis=1, keepdims=True)
    return unit_ND
