"""Conversion of a model's JSON answer to a training record: checks of fields, texts, levels and leaked texts."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import regex

from embeddings.common.errors import InputError
from embeddings.common.text import canonical, one_line
from embeddings.data.records import parse_record
from embeddings.synthesis.prompts import LEVELS, Category

Reason = Literal[
    "refused", "empty_answer", "cut_off", "not_json", "repeated_key", "no_tasks", "not_an_object", "missing_field",
    "wrong_type", "empty_text", "template_text", "unusable_text", "wrong_levels", "repeated_text", "leaked_query",
    "leaked_label", "duplicate_query", "copied_seed", "echoed_prompt", "poor_query",
]  # fmt: skip


class RejectedAnswer(Exception):
    """An answer that is not used: the reason, as counted in reports, and a detail."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, one_line(detail, 120)

    @property
    def cause(self) -> str:
        """The reason in words; the detail of a poor query says why it is poor."""
        return self.detail if self.reason == "poor_query" else self.reason.replace("_", " ")


class Answer(NamedTuple):
    """One answer of an endpoint, as saved in the journal.

    `refused` says why the model or the endpoint refused; `limit` is the maximum of tokens at which it was cut off.
    """

    content: str | None
    finish_reason: str | None = None
    refused: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    limit: int | None = None


def parse_answer(answer: Answer) -> Any:
    """The JSON value of an answer, repaired if needed (see `_REPAIRS`); a truncated value is never completed."""
    if answer.refused is not None or answer.finish_reason == "content_filter":
        raise RejectedAnswer("refused", answer.refused or "the endpoint's filter")
    text = (answer.content or "").strip()
    if not text:
        raise RejectedAnswer("empty_answer")
    for repair in _REPAIRS:
        text = repair(text)
        with suppress(ValueError, RecursionError):
            # Not strict: models write line breaks into texts.
            return json.loads(text, strict=False, object_pairs_hook=_object_of)
    if answer.finish_reason == "length":
        raise RejectedAnswer("cut_off", "the answer reached its limit of tokens")
    raise RejectedAnswer("not_json", " ".join(text.split()))


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; with a repeated key, such as of two records in one, a query could get another's positive."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RejectedAnswer("repeated_key", next(key for key in keys if keys.count(key) > 1))
    return value


_FENCE = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)
# Thoughts that a limit cut off contain no answer.
_THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)
_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(\s*[}\]])', re.DOTALL)


def _outermost(text: str) -> str:
    """The first complete JSON value, or the text from the first opening bracket to the last closing one of its kind."""
    starts = [index for index in (text.find("{"), text.find("[")) if index >= 0]
    if not starts:
        return text
    start = min(starts)
    with suppress(ValueError, RecursionError):
        return text[start : json.JSONDecoder(strict=False).raw_decode(text, start)[1]]
    end = text.rfind("}" if text[start] == "{" else "]")
    return text[start : end + 1] if end > start else text


_REPAIRS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: _THOUGHTS.sub("", text).strip(),
    lambda text: match[1].strip() if (match := _FENCE.search(text)) else text,
    _outermost,
    # Commas before a closing bracket.
    lambda text: _COMMA.sub(lambda match: match[1] or match[2], text),
)


# A shorter query occurs in many documents by chance.
MIN_LEAKED_WORDS = 5
# A text of eight words has so many triples of words, of which one changed word takes three.
MIN_TRIPLES = 6
MAX_TASK_CHARACTERS = 400

# In scripts without spaces between words each character is a unit that counts as half a word.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
# The vowel signs of Indian scripts are marks.
_UNIT = regex.compile(rf"{_UNSPACED.pattern}|(?:[^\W{_UNSPACED.pattern[1:-1]}]|(?!{_UNSPACED.pattern})\p{{M}})+")
_NUMBERING = re.compile(r"^\s*(?:\d+\s*[.):]|[-*•])\s+")


def read_tasks(value: Any) -> list[str]:
    """The different usable tasks of a brainstorming answer: a list of texts, or an object with exactly one list."""
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


def read_example(answer: Any, category: Category, task: str, prompt: str, id: str) -> dict[str, Any]:
    """The record `id` from an answer to an example prompt; its instruction is the category's, or else the task."""
    value = _object(answer)
    query = _text(value, category.query_field, prompt)
    if json.dumps(query, ensure_ascii=False) in prompt or _copies(prompt, query):
        raise RejectedAnswer("copied_seed", query)
    positive = _text(value, category.positive_field, prompt)
    if category.graded:
        negatives = _graded(value, category.negative_fields[0], prompt)
    else:
        negatives = [_text(value, name, prompt) for name in category.negative_fields]
    _require_different([query, positive, *negatives])
    if category.label:
        if _contains(query, positive, 0):
            raise RejectedAnswer("leaked_label", positive)
    else:
        _require_no_leak(query, [positive, *negatives])
    fields = {"id": id, "query": query, "positive": positive, "negatives": _written(negatives, category.graded)}
    return _checked({**fields, "instruction": category.instruction or task})


def read_negatives(answer: Any, record: Mapping[str, Any], field: str, prompt: str) -> dict[str, Any]:
    """The record with the negatives in `field` of an answer (see `read_example`); its `positive` is a list."""
    negatives = _graded(_object(answer), field, prompt)
    _require_different([record["query"], *record["positive"]], negatives)
    _require_no_leak(record["query"], negatives)
    return _checked({**record, "negatives": _written(negatives, graded=True)})


def normalised(text: str) -> str:
    """A text without case, white space and punctuation; a text without words is only stripped."""
    return " ".join(_units(text)) or canonical(text)


def _units(text: str) -> list[str]:
    units: list[str] = _UNIT.findall(canonical(text).casefold())
    return units


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise RejectedAnswer("not_an_object", type(value).__name__)
    return value


def _text(value: Mapping[str, Any], name: str, prompt: str) -> str:
    if name not in value:
        raise RejectedAnswer("missing_field", name)
    if not isinstance(value[name], str):
        raise RejectedAnswer("wrong_type", f"{name} is {type(value[name]).__name__}")
    cleaned = str(value[name]).strip()
    if not cleaned:
        raise RejectedAnswer("empty_text", name)
    # A copied placeholder, with or without its brackets.
    if f'"<{cleaned.strip("<>")}>"'.casefold() in prompt.casefold():
        raise RejectedAnswer("template_text", name)
    return cleaned


def _graded(value: Mapping[str, Any], name: str, prompt: str) -> list[str]:
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
    return [texts[index] for index in order]


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


def _copies(text: str, part: str) -> bool:
    """Whether a text contains `part`, or half of the triples of its successive words if it is longer."""
    triples = list(zip(*(_units(part)[start:] for start in range(3)), strict=False))
    if len(triples) < MIN_TRIPLES:
        return _contains(text, part, MIN_LEAKED_WORDS)
    units = _units(text)
    present = set(zip(units, units[1:], units[2:], strict=False))
    return 2 * sum(triple in present for triple in triples) >= len(triples)


def _written(negatives: Sequence[str], graded: bool) -> list[Any]:
    if not graded:
        return list(negatives)
    return [{"text": text, "level": level} for level, text in enumerate(negatives, start=1)]


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    """A record's fields, if they are valid training data."""
    try:
        suspicion = parse_record(fields, {}, "answer").suspicion
    except InputError as error:
        raise RejectedAnswer("unusable_text", str(error)) from None
    if suspicion is not None:
        raise RejectedAnswer("repeated_text", suspicion)
    return fields
