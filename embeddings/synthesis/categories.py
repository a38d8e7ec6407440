"""The task categories of the two papers: the fields of an answer, and the values that a prompt's placeholders take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MethodName = Literal["mgh", "nv_embed"]

# From the hardest to the easiest: the order is the level, 1 to 4.
LEVELS = ("high", "medium", "medium", "low")

_QUERY_TYPES = ("extremely long-tail", "long-tail", "common")
_QUERY_LENGTHS = ("less than 5 words", "5 to 15 words", "at least 10 words")
_DIFFICULTIES = ("high school", "college", "PhD")
_CLARITIES = ("clear", "understandable with some effort", "ambiguous")
_DOCUMENT_WORDS = ("50", "100", "200", "300", "400", "500")
_TEXT_WORDS = ("less than 10", "at least 10", "at least 50", "at least 100", "at least 200")

_RETRIEVAL = {
    "query_type": _QUERY_TYPES,
    "query_length": _QUERY_LENGTHS,
    "difficulty": _DIFFICULTIES,
    "clarity": _CLARITIES,
    "num_words": _DOCUMENT_WORDS,
}
_CLASSIFICATION = {"num_words": _TEXT_WORDS, "difficulty": _DIFFICULTIES, "clarity": _CLARITIES}
_LONG_LONG = {"num_words": _DOCUMENT_WORDS, "difficulty": _DIFFICULTIES, "clarity": _CLARITIES}
_SHORT_SHORT = {"query_length": _QUERY_LENGTHS, "difficulty": _DIFFICULTIES, "clarity": _CLARITIES}
_SIMILARITY = {
    "unit": ("phrase", "sentence", "passage"),
    "difficulty": ("elementary school", "high school", "college"),
}


@dataclass(frozen=True)
class Category:
    """One kind of task, and what an answer to its example prompt must hold.

    Args:
        name: Name of its templates and of the file of its records.
        query_field: Field of the query.
        positive_field: Field of the positive.
        negative_fields: Field of each negative, hardest first; or the one field of a list of four with levels.
        graded: Whether the negatives are such a list.
        placeholders: Values of each placeholder, one of which is drawn for each prompt.
        label: Whether positive and negatives are labels of the query: then the query must not contain the label,
            where elsewhere no document may contain the query.
        instruction: What a record is for, where it is not the task itself.
    """

    name: str
    query_field: str
    positive_field: str
    negative_fields: tuple[str, ...]
    graded: bool
    placeholders: Mapping[str, tuple[str, ...]]
    label: bool = False
    instruction: str | None = None


@dataclass(frozen=True)
class Method:
    """What one paper generates.

    Args:
        name: Name of its templates' folder.
        categories: Its task categories.
        shares: Share of each category among the examples, relative to the others.
        tasks_per_list: Tasks that one brainstorming prompt asks for.
        has_languages: Whether its prompts name a language.
    """

    name: MethodName
    categories: tuple[Category, ...]
    shares: Mapping[str, float]
    tasks_per_list: int
    has_languages: bool

    def category(self, name: str) -> Category:
        """The category with a name."""
        return {category.name: category for category in self.categories}[name]


_GRADED = ("hard_negative_examples",)

# Pan et al. 2025 (MGH), section 2.1, Figure 2, Table 6, Appendix A. Table 6 prints the prompt of short-long alone; of
# the others the text gives the category and the four levels, so their fields are Figure 2's and their placeholders
# those of NV-Embed's Table 16 and, for STS, of Wang et al. 2024, arXiv:2401.00368, Table 12, whom the paper follows;
# the two similarity scores there have become the four levels. Figure 6 has no numbers in its text: the shares keep its
# order (short-long, long-short and STS are most of the data). Which languages is not stated.
MGH = Method(
    "mgh",
    (
        Category("short_long", "user_query", "positive_document", ("hard_negative_document",), True, _RETRIEVAL),
        Category("long_short", "input_text", "label", ("misleading_labels",), True, _CLASSIFICATION, label=True),
        Category("long_long", "query", "positive_example", _GRADED, True, _LONG_LONG),
        Category("short_short", "query", "positive_example", _GRADED, True, _SHORT_SHORT),
        Category(
            "sts",
            "query",
            "positive_example",
            _GRADED,
            True,
            _SIMILARITY,
            instruction="Retrieve semantically similar text",
        ),
    ),
    {"short_long": 30, "long_short": 30, "sts": 30, "long_long": 5, "short_short": 5},
    tasks_per_list=20,
    has_languages=True,
)

# Lee et al. 2024 (NV-Embed), section 4.3, Tables 15 and 16: 40,000 examples of each category, in English. The prompt of
# short-short is not printed; ours has short-long's two negatives.
NV_EMBED = Method(
    "nv_embed",
    (
        Category(
            "short_long",
            "user_query",
            "positive_document",
            ("hard_negative_document1", "hard_negative_document2"),
            False,
            _RETRIEVAL,
        ),
        Category("long_short", "input_text", "label", ("misleading_label",), False, _CLASSIFICATION, label=True),
        Category(
            "short_short",
            "user_query",
            "positive_document",
            ("hard_negative_document1", "hard_negative_document2"),
            False,
            _SHORT_SHORT,
        ),
    ),
    {"short_long": 1, "long_short": 1, "short_short": 1},
    tasks_per_list=40,
    has_languages=False,
)

METHODS: dict[str, Method] = {"mgh": MGH, "nv_embed": NV_EMBED}

# The pairs that exist already: their positives stay, and the answer holds the negatives alone (MGH, section 2.1).
REGENERATED_FIELD = "hard_negative_examples"
