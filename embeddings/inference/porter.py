"""Porter's stemmer: English words to stems, so that "computes" and "computed" meet."""

import re
from functools import lru_cache

# A stem as the paper writes it, [C](VC)^m[V]: `y` is a vowel after a consonant, and a consonant elsewhere.
_CONSONANT = r"(?:[^aeiouy]|(?<![^aeiou])y|^y)"
_VOWEL = r"(?:[aeiou]|(?<=[^aeiou])y)"
_MEASURE = re.compile(rf"{_VOWEL}+{_CONSONANT}+")
_HAS_VOWEL = re.compile(_VOWEL)
_DOUBLE_CONSONANT = re.compile(rf"({_CONSONANT})\1$")
_SHORT_END = re.compile(rf"{_CONSONANT}{_VOWEL}(?![wxy]){_CONSONANT}$")

# fmt: off
_STEP_2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "bli": "ble", "alli": "al",
    "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate", "alism": "al",
    "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble",
    "logi": "log",
}
_STEP_3 = {
    "icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": "",
}
_STEP_4 = dict.fromkeys((
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti",
    "ous", "ive", "ize",
), "")
# fmt: on


@lru_cache(maxsize=1 << 17)
def porter_stem(word: str) -> str:
    """The stem of a lower-case English word; a word of one or two letters is its own.

    Source: Porter 1980, "An algorithm for suffix stripping", with its author's later corrections (`bli`, `logi`).
    """
    if len(word) <= 2:
        return word
    word = _plural(word)
    word = _past_and_gerund(word)
    if word.endswith("y") and _HAS_VOWEL.search(word[:-1]):
        word = word[:-1] + "i"
    word = _replace(word, _STEP_2, 0)
    word = _replace(word, _STEP_3, 0)
    word = _replace(word, _STEP_4, 1)
    return _final_letters(word)


def _measure(stem: str) -> int:
    return len(_MEASURE.findall(stem))


def _plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past_and_gerund(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        stem = word.removesuffix(suffix)
        if stem != word and _HAS_VOWEL.search(stem):
            if stem.endswith(("at", "bl", "iz")) or (_measure(stem) == 1 and _SHORT_END.search(stem)):
                return stem + "e"
            if _DOUBLE_CONSONANT.search(stem) and stem[-1] not in "lsz":
                return stem[:-1]
            return stem
        if stem != word:
            return word
    return word


def _replace(word: str, endings: dict[str, str], above: int) -> str:
    """The word with its longest listed ending replaced, where what comes before it has a measure above `above`."""
    ending = max((ending for ending in endings if word.endswith(ending)), key=len, default=None)
    if ending is None:
        return word
    stem = word.removesuffix(ending)
    if _measure(stem) <= above or (ending == "ion" and not stem.endswith(("s", "t"))):
        return word
    return stem + endings[ending]


def _final_letters(word: str) -> str:
    if word.endswith("e"):
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _SHORT_END.search(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word
