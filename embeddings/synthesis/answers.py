"""What a language model wrote: the JSON in it, repaired where its meaning is plain, or the reason for rejecting it."""

import ast
import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Reason = Literal[
    "refused",
    "empty_answer",
    "cut_off",
    "not_json",
    "no_tasks",
    "not_an_object",
    "missing_field",
    "wrong_type",
    "empty_text",
    "template_text",
    "unusable_text",
    "wrong_levels",
    "repeated_text",
    "leaked_query",
    "leaked_label",
    "duplicate_query",
    "copied_seed",
]

# What is longer is no answer to any of our prompts, and parsers slow down on it.
_MAX_CHARACTERS = 1_000_000
_SHOWN = 120


class RejectedAnswer(Exception):
    """An answer that no data may come from.

    Args:
        reason: What is wrong, as reports count it.
        detail: Where, for the list of rejected answers.
    """

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason: Reason = reason
        self.detail = detail if len(detail) <= _SHOWN else f"{detail[: _SHOWN - 1]}…"


class Answer(NamedTuple):
    """One answer of an endpoint, as the journal keeps it.

    Attributes:
        content: What the model wrote, or None.
        finish_reason: Why it ended, as the endpoint says: `stop`, `length`, `content_filter`, …
        refused: Why the model or the endpoint did not answer this prompt, or None.
        prompt_tokens: Tokens of the prompt, or None where the endpoint does not say.
        completion_tokens: Tokens of the answer, or None.
    """

    content: str | None
    finish_reason: str | None = None
    refused: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Parsed(NamedTuple):
    """The JSON value of an answer, and what had to be repaired to read it."""

    value: Any
    repairs: tuple[str, ...]


def parse_answer(answer: Answer) -> Parsed:
    """The JSON value that an answer holds.

    Repaired, in this order and as far as is needed: a model's thoughts before the answer, a code fence, text around the
    outermost brackets, raw line breaks inside texts, commas before closing brackets, and Python's way of writing lists
    and objects. Nothing is ever added to an answer that ends too early.

    Raises:
        RejectedAnswer: If the model refused, wrote nothing or was cut off, or this is no JSON.
    """
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
        for decode, extra in ((json.loads, ()), (_lenient, ("raw_line_break",))):
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


def _fenced(text: str) -> str:
    found = _FENCE.search(text)
    return found[1].strip() if found else text


def _outermost(text: str) -> str:
    """From the first opening bracket to the last closing one of its kind."""
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    if not starts:
        return text
    start = min(starts)
    end = text.rfind("}" if text[start] == "{" else "]")
    return text[start : end + 1] if end > start else text


def _without_commas(text: str) -> str:
    return _COMMA.sub(lambda match: match[1] or match[2], text)


_REPAIRS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("none", lambda text: text),
    ("thoughts", lambda text: _THOUGHTS.sub("", text).strip()),
    ("code_fence", _fenced),
    ("text_around", _outermost),
    ("trailing_comma", _without_commas),
)


def _lenient(text: str) -> Any:
    return json.loads(text, strict=False)


def _attempt(decode: Callable[[str], Any], text: str) -> Any:
    """The value of a text, or `_NOTHING`."""
    try:
        return decode(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return _NOTHING


def _is_json(value: Any) -> bool:
    """Whether a Python literal is what JSON could hold, as far as our prompts ask for it."""
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return isinstance(value, str | int | float | bool | None)
