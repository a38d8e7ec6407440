"""The first sentence of a docstring, as a person would type it into a search box."""

import inspect
import re

MIN_WORDS = 4
MAX_WORDS = 60

# fmt: off
_ABBREVIATIONS = frozenset((
    "e.g", "i.e", "etc", "vs", "cf", "resp", "approx", "incl", "excl", "fig", "figs", "eq", "eqs", "eqn", "sec",
    "ref", "refs", "no", "nos", "vol", "pp", "al", "ca", "dr", "mr", "mrs", "st", "w.r.t", "wrt", "s.t", "a.k.a",
    "viz", "ch", "def", "thm", "prop",
))
# fmt: on
_SENTENCE_END = re.compile(r"[.!?](?=[\s\"')\]]|$)")
_SECTION = re.compile(
    r"^\s*(:(?!\w+:`)[\w ,.*]+:.*|@\w+\b.*|>>>.*|\.\. .*|```.*|\$ .*|[-*+] .*|\d+[.)] .*|[-=~^]{3,}"
    r"|(args?|arguments?|params?|parameters?|returns?|raises?|yields?|examples?|usage|notes?|warnings?|attributes?"
    r"|keyword args?|see also|references?|shape|inputs?|outputs?|todo)\s*:{0,2})\s*$",
    re.IGNORECASE,
)
_SIGNATURE = re.compile(r"^[\w.]+\s*\([^)]*\)?\s*((->|--|=>|:).*)?$|^[\w.]+\(.*\)\s*((->|--|=>).*)?$")
_ARGUMENT = re.compile(r"\s*\*{0,2}\w+\s*(\([^)]*\))?: ")
_CAPITALISED = re.compile(r"\s*[A-Z][a-z]+ [a-z]")
_SHORTEST_WRAPPED = 50
_BOILERPLATE = re.compile(
    r"^\W*(see |refer to|(an )?alias\b|deprecat|inherit|overrid|same as|similar to|equivalent to (calling|the)"
    r"|todo|fixme|xxx|hack|internal\b|private\b|for internal|not implemented|placeholder|dummy|magic method"
    r"|initiali[sz]es? (self|internal|the (object|class|instance))|constructor\b|implementation of (the )?abstract"
    r"|this (method|function|class) (is|has been|(should|must|will|can|may) be) (deprecated|overrid|implemented|called)"
    r"|(must|should|can) be (overrid|implement)|do not |don't |copied from|adapted from|copyright|licen[sc]e"
    r"|(new|added|changed) in |in-?place version of|return self\b|returns? (a )?(string )?repr"
    r"|test(s|ing)? (that|if|whether|for) )",
    re.IGNORECASE,
)
_MARKUP = (
    (re.compile(r"!?\[([^\]]+)\]\((?:[^()\s]+)\)"), r"\1"),
    (re.compile(r":[\w:.+-]+:`~?!?([^`<]+?)\s*<[^`>]*>`"), r"\1"),
    (re.compile(r":[\w:.+-]+:`~([^`]+)`"), lambda match: match[1].rsplit(".", 1)[-1]),
    (re.compile(r":[\w:.+-]+:`!?([^`]+)`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`]+)`_{0,2}"), r"\1"),
    (re.compile(r"(?<![\w*])(\*{1,2})(?=\S)([^*]+?)(?<=\S)\1(?![\w*])"), r"\2"),
    (re.compile(r"\s*\[[\w-]+\]_"), ""),
    (re.compile(r"\|([A-Za-z]\w*)\|"), r"\1"),
    (re.compile(r"\s*\(?\bhttps?://\S+"), ""),
    (re.compile(r"^\W*(?=[A-Za-z])"), ""),
)


def first_sentence(docstring: str) -> str | None:
    """The first sentence of a docstring without its markup and final stop, or None where it says too little.

    A line that only repeats the signature is passed over. Sections, lists, examples and blank lines end the sentence
    where no stop does; the stops of "e.g." and of file names and numbers do not. None stands for a sentence of fewer
    than `MIN_WORDS` or more than `MAX_WORDS` words, one that is not prose, and phrases that any function could carry
    ("See base class", "Initialize self").

    Args:
        docstring: The docstring as the source has it.
    """
    paragraph = _first_paragraph(docstring)
    text = _plain(paragraph)
    sentence = _cut(text).rstrip(" .!;,").strip()
    return sentence if _says_enough(sentence) else None


def _first_paragraph(docstring: str) -> str:
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.strip():
            if lines:
                break
            continue
        if _SECTION.match(line):
            break
        if not lines and _SIGNATURE.match(line.strip()) and "(" in line:
            continue
        if lines and _starts_anew(lines, line):
            break
        lines.append(line.strip())
    return " ".join(lines)


def _starts_anew(lines: list[str], line: str) -> bool:
    """Whether a line describes an argument, or follows a single line that was too short to have been wrapped."""
    unwrapped = len(lines) == 1 and len(lines[0]) <= _SHORTEST_WRAPPED and lines[0][-1].isalnum()
    return _ARGUMENT.match(line) is not None or (unwrapped and _CAPITALISED.match(line) is not None)


def _plain(text: str) -> str:
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _cut(text: str) -> str:
    for match in _SENTENCE_END.finditer(text):
        before, after = text[: match.start()], text[match.end() :].lstrip("\"')] ")
        words = before.split()
        last = words[-1].lstrip("(\"'[") if words else ""
        if not after:
            return text
        is_initial = len(last) == 1 and last.isupper() and after[0].isupper()
        if last.lower() in _ABBREVIATIONS or is_initial:
            continue
        if match[0] == "." and after[0].islower():
            continue
        return before
    return text


def _says_enough(sentence: str) -> bool:
    words = re.findall(r"[^\W\d_]{2,}", sentence)
    if not MIN_WORDS <= len(sentence.split()) <= MAX_WORDS or len(words) < MIN_WORDS:
        return False
    prose = sum((character.isalpha() and character.isascii()) or character == " " for character in sentence)
    return prose >= 0.75 * len(sentence) and not sentence.endswith(":") and not _BOILERPLATE.match(sentence)
