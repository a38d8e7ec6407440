"""From an answer's JSON to a training record: the fields, the texts, the levels, and what gives an answer away."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from embeddings.common.errors import InputError
from embeddings.data.records import parse_record
from embeddings.synthesis.answers import Parsed, RejectedAnswer
from embeddings.synthesis.categories import LEVELS, Category

# A query of fewer words stands in many documents by itself.
LEAST_LEAKED_WORDS = 5
MAX_TASK_CHARACTERS = 400

# Of scripts without spaces between words each character is a unit, and counts half a word.
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")
_UNIT = re.compile(rf"{_UNSPACED.pattern}|[^\W{_UNSPACED.pattern[1:-1]}]+")
_NUMBERING = re.compile(r"^\s*(?:\d+\s*[.):]|[-*•])\s+")


class Draft(NamedTuple):
    """A record that may go to the data, and what was repaired on the way."""

    fields: dict[str, Any]
    repairs: tuple[str, ...]


def read_tasks(parsed: Parsed) -> list[str]:
    """The tasks of a brainstorming answer: a list of texts, or an object whose only list they are.

    Entries that are no text, are empty, longer than `MAX_TASK_CHARACTERS` or hold unprintable characters are left out,
    and so are copies. White space and numbering are put in order.

    Raises:
        RejectedAnswer: If no task is left.
    """
    value = parsed.value
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 else None
    if not isinstance(value, list):
        raise RejectedAnswer("no_tasks", "the answer is no list")
    tasks: dict[str, str] = {}
    for item in value:
        if isinstance(item, str):
            task = " ".join(_NUMBERING.sub("", item).split())
            if task and task.isprintable() and len(task) <= MAX_TASK_CHARACTERS:
                tasks.setdefault(normalised(task), task)
    if not tasks:
        raise RejectedAnswer("no_tasks", "the list holds no usable text")
    return list(tasks.values())


def read_example(parsed: Parsed, category: Category, task: str, prompt: str, id: str) -> Draft:
    """The record that an answer to an example prompt holds.

    Args:
        parsed: The answer.
        category: What it must hold.
        task: The task, which becomes the record's instruction unless the category has its own.
        prompt: The prompt, whose own example texts are no data.
        id: The record's name.

    Raises:
        RejectedAnswer: If a field is missing or of a wrong type, a text is empty, unusable or comes twice, the levels
            are not those asked for, the query is a seed's, or the query (a label: the text) gives the answer away.
    """
    value = _object(parsed.value)
    query = _text(value, category.query_field, prompt)
    if json.dumps(query, ensure_ascii=False) in prompt:
        raise RejectedAnswer("copied_seed", query)
    positive = _text(value, category.positive_field, prompt)
    repairs = parsed.repairs
    if category.graded:
        negatives, sorted_ = _graded(value, category.negative_fields[0], prompt)
        repairs = (*repairs, "levels_sorted") if sorted_ else repairs
    else:
        negatives = [_text(value, name, prompt) for name in category.negative_fields]
    _require_different([query, positive, *negatives])
    if category.label:
        if _contains(query, positive, 0):
            raise RejectedAnswer("leaked_label", positive)
    else:
        _require_no_leak(query, [positive, *negatives])
    fields = {"id": id, "query": query, "positive": positive, "negatives": _written(negatives, category.graded)}
    return Draft(_usable({**fields, "instruction": category.instruction or task}), repairs)


def answer_of(record: Mapping[str, Any], category: Category) -> dict[str, Any]:
    """The answer that a record was read from: the inverse of `read_example`."""
    negatives: dict[str, Any] = dict(zip(category.negative_fields, record["negatives"], strict=False))
    if category.graded:
        texts = [negative["text"] for negative in record["negatives"]]
        graded = [{"similarity_level": level, "text": text} for level, text in zip(LEVELS, texts, strict=True)]
        negatives = {category.negative_fields[0]: graded}
    return {category.query_field: record["query"], category.positive_field: record["positive"], **negatives}


def read_negatives(parsed: Parsed, record: Mapping[str, Any], field: str, prompt: str) -> Draft:
    """A record of a pair that exists with the negatives of an answer in place of its own.

    Args:
        parsed: The answer.
        record: The record's fields; `positive` is a list.
        field: Field of the answer that holds the negatives.
        prompt: The prompt, whose own example texts are no data.

    Raises:
        RejectedAnswer: As in `read_example`.
    """
    negatives, sorted_ = _graded(_object(parsed.value), field, prompt)
    _require_different([record["query"], *record["positive"]], negatives)
    _require_no_leak(record["query"], negatives)
    repairs = (*parsed.repairs, "levels_sorted") if sorted_ else parsed.repairs
    return Draft(_usable({**record, "negatives": _written(negatives, graded=True)}), repairs)


def normalised(text: str) -> str:
    """A text without its case, white space and punctuation; of a text without words, all of it."""
    return " ".join(_UNIT.findall(text.casefold())) or text.strip()


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise RejectedAnswer("not_an_object", type(value).__name__)
    return value


def _text(value: Mapping[str, Any], name: str, prompt: str) -> str:
    if name not in value:
        raise RejectedAnswer("missing_field", name)
    return _clean(value[name], name, prompt)


def _clean(text: Any, name: str, prompt: str) -> str:
    if not isinstance(text, str):
        raise RejectedAnswer("wrong_type", f"{name} is {type(text).__name__}")
    cleaned = str(text).strip()
    if not cleaned:
        raise RejectedAnswer("empty_text", name)
    if cleaned.startswith("<") and cleaned.endswith(">") and f'"{cleaned}"' in prompt:
        raise RejectedAnswer("template_text", name)
    return cleaned


def _graded(value: Mapping[str, Any], name: str, prompt: str) -> tuple[list[str], bool]:
    """The four negatives, hardest first, and whether they had to be sorted by the levels that the answer gives."""
    if name not in value:
        raise RejectedAnswer("missing_field", name)
    items = value[name]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RejectedAnswer("wrong_type", f"{name} is no list of objects")
    texts = [_text(item, "text", prompt) for item in items]
    levels = [str(item.get("similarity_level", "")).strip().lower() for item in items]
    if sorted(levels) != sorted(LEVELS):
        raise RejectedAnswer("wrong_levels", ", ".join(levels))
    order = sorted(range(len(items)), key=lambda place: LEVELS.index(levels[place]))
    return [texts[place] for place in order], order != list(range(len(items)))


def _require_different(*groups: Sequence[str]) -> None:
    """Check that no text is another one; of several groups, only the texts of the last must differ from each other."""
    known = {normalised(text) for group in groups[:-1] for text in group}
    for text in groups[-1]:
        if normalised(text) in known:
            raise RejectedAnswer("repeated_text", text)
        known.add(normalised(text))


def _require_no_leak(query: str, documents: Sequence[str]) -> None:
    for document in documents:
        if _contains(document, query, LEAST_LEAKED_WORDS):
            raise RejectedAnswer("leaked_query", query)


def _contains(text: str, part: str, least_words: float) -> bool:
    """Whether a text holds another, word for word, that has so many words at least."""
    units = _UNIT.findall(part.casefold())
    num_words = sum(0.5 if _UNSPACED.match(unit) else 1.0 for unit in units)
    if not units or num_words < least_words:
        return False
    return f" {' '.join(units)} " in f" {' '.join(_UNIT.findall(text.casefold()))} "


def _written(negatives: Sequence[str], graded: bool) -> list[Any]:
    if not graded:
        return list(negatives)
    return [{"text": text, "level": level} for level, text in enumerate(negatives, start=1)]


def _usable(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, if training would read them as a record without a contradiction."""
    try:
        suspicion = parse_record(fields, {}, "answer").suspicion
    except InputError as error:
        raise RejectedAnswer("unusable_text", str(error)) from None
    if suspicion is not None:
        raise RejectedAnswer("repeated_text", suspicion)
    return fields
