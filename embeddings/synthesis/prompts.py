"""Prompts: templates of the package or the user, with placeholder values drawn by the seed."""

import hashlib
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

from embeddings.common.errors import InputError, OptionError
from embeddings.common.random import derive_seed

MethodName = Literal["mgh", "nv_embed"]

# Similarity of the negatives of levels 1 (hardest) to 4.
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
_SIMILARITY = {"unit": ("phrase", "sentence", "passage"), "difficulty": ("elementary school", "high school", "college")}


@dataclass(frozen=True)
class Category:
    """A category of tasks, the fields of an answer to its example prompt, and the values of that prompt's placeholders.

    The negatives have a field each, hardest first; if `graded`, one field has a list of four with levels. With `label`,
    positive and negatives are labels of the query. The default `instruction` of the records is the task.
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
    """The data of one paper: its name, also that of its folder of templates, and its categories with their shares."""

    name: MethodName
    categories: tuple[Category, ...]
    shares: Mapping[str, float]
    tasks_per_list: int
    has_languages: bool

    def category(self, name: str) -> Category:
        return {category.name: category for category in self.categories}[name]


_GRADED, _TWO = ("hard_negative_examples",), ("hard_negative_document1", "hard_negative_document2")
_STS_INSTRUCTION = "Retrieve semantically similar text"

# Pan et al. 2025 (MGH), section 2.1, Figure 2, Table 6, Appendix A. Table 6 prints the prompt of short-long only; for
# the others the paper states the category and the four levels. So their fields are Figure 2's. Their placeholders are
# those of NV-Embed's Table 16 and, for STS, of Table 12 in Wang et al. 2024, arXiv:2401.00368, which the paper follows;
# the four levels replace the two similarity scores there. The paper states neither languages nor shares: ours follow
# the order in Figure 6, in which short-long, long-short and STS are most of the data.
MGH = Method(
    "mgh",
    (
        Category("short_long", "user_query", "positive_document", ("hard_negative_document",), True, _RETRIEVAL),
        Category("long_short", "input_text", "label", ("misleading_labels",), True, _CLASSIFICATION, label=True),
        Category("long_long", "query", "positive_example", _GRADED, True, _LONG_LONG),
        Category("short_short", "query", "positive_example", _GRADED, True, _SHORT_SHORT),
        Category("sts", "query", "positive_example", _GRADED, True, _SIMILARITY, instruction=_STS_INSTRUCTION),
    ),
    {"short_long": 30, "long_short": 30, "sts": 30, "long_long": 5, "short_short": 5},
    tasks_per_list=20,
    has_languages=True,
)

# Lee et al. 2024 (NV-Embed), section 4.3, Tables 15 and 16: 40,000 examples of each category, in English. The prompt of
# short-short is not printed; ours has two negatives like that of short-long.
NV_EMBED = Method(
    "nv_embed",
    (
        Category("short_long", "user_query", "positive_document", _TWO, False, _RETRIEVAL),
        Category("long_short", "input_text", "label", ("misleading_label",), False, _CLASSIFICATION, label=True),
        Category("short_short", "user_query", "positive_document", _TWO, False, _SHORT_SHORT),
    ),
    {"short_long": 1, "long_short": 1, "short_short": 1},
    tasks_per_list=40,
    has_languages=False,
)

METHODS: dict[str, Method] = {"mgh": MGH, "nv_embed": NV_EMBED}

# The field of the negatives in answers for existing pairs (MGH, section 2.1).
REGENERATED_FIELD = "hard_negative_examples"

_FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class PromptOptions:
    """Options of the prompts of a method.

    Args:
        templates: A folder of templates that replace the package's files of the same names.
        languages: Languages to draw from; None for English.
        seeds: The folder of an earlier job by a stronger model. All example prompts of a category begin with the same
            records of that job, so that an endpoint can cache them (MGH, §3.1).
        num_seeds: Number of these records, spread evenly over the earlier job's.
    """

    templates: Path | None = None
    languages: Sequence[str] | None = None
    seeds: Path | None = None
    num_seeds: int = 4

    def __post_init__(self) -> None:
        if self.templates is not None and not self.templates.is_dir():
            hint = "leave it out for the package's templates"
            raise OptionError("templates", str(self.templates), "must be a folder", hint)


class Templates:
    """The prompts of one method.

    A template is a text file with placeholders such as `$task`. Placeholders of `brainstorm_CATEGORY.txt` are
    `examples` and `num_tasks`; of `example_CATEGORY.txt` `task`, `language`, and those of the category; of
    `negatives.txt` `query` and `positive`.

    Args:
        method: The method.
        options: Options of the prompts; None for the package's templates in English.
    """

    def __init__(self, method: Method, options: PromptOptions | None = None) -> None:
        options = options or PromptOptions()
        languages, seeds, num_seeds = options.languages, options.seeds, options.num_seeds
        if languages is not None and not method.has_languages:
            rule = f"has no effect on {method.name}"
            raise OptionError("languages", list(languages), rule, "its prompts are English")
        self.method, self.folder = method, options.templates
        self.languages = tuple(languages or ("English",))
        self._texts: dict[str, string.Template] = {}
        for category in method.categories:
            self._read(f"brainstorm_{category.name}.txt", {"examples", "num_tasks"}, ("num_tasks",))
            known = {"task", *category.placeholders, *(["language"] if method.has_languages else [])}
            self._read(f"example_{category.name}.txt", known, ("task",))
        self._seeds: dict[str, str] = {}
        for category in method.categories:
            if seeds is not None and (path := seeds / f"{category.name}.jsonl").is_file():
                self._seeds[category.name] = _seed_block(path, category, num_seeds)
        if seeds is not None and not self._seeds:
            raise InputError(str(seeds), f"contains no records of {method.name}", "use the folder of a finished job")
        if method is MGH:
            self._read("negatives.txt", {"query", "positive"}, ("query", "positive"))

    @property
    def sha256(self) -> str:
        """A hash of all templates, reference tasks, languages and seeds."""
        digest = hashlib.sha256(repr(self.languages).encode())
        for name, template in sorted(self._texts.items()):
            digest.update(f"{name}\0{template.template}\0".encode())
        for category in self.method.categories:
            digest.update("\n".join(reference_tasks(category)).encode())
            digest.update(self._seeds.get(category.name, "").encode())
        return digest.hexdigest()

    def brainstorm(self, category: Category, seed: int, call: int) -> str:
        """The prompt for one list of tasks; its reference tasks are drawn by (seed, category, call)."""
        pairs = list(permutations(reference_tasks(category), 2))
        shown = pairs[derive_seed(seed, "references", category.name, call) % len(pairs)]
        examples = "\n".join(f"- {task}" for task in shown)
        values = {"examples": examples, "num_tasks": str(self.method.tasks_per_list)}
        return self._texts[f"brainstorm_{category.name}.txt"].substitute(values)

    def example(self, category: Category, task: str, seed: int, index: int) -> str:
        """The prompt for one example; its placeholders are drawn by (seed, category, index)."""
        values = {"task": task, **self.drawn(category, seed, index)}
        return self._seeds.get(category.name, "") + self._texts[f"example_{category.name}.txt"].substitute(values)

    def drawn(self, category: Category, seed: int, index: int) -> dict[str, str]:
        choices: Mapping[str, Sequence[str]] = {**category.placeholders, "language": self.languages}
        seeds = {name: derive_seed(seed, "placeholder", category.name, index, name) for name in choices}
        return {name: values[seeds[name] % len(values)] for name, values in choices.items()}

    def negatives(self, query: str, positive: str) -> str:
        return self._texts["negatives.txt"].substitute(query=query, positive=positive)

    def _read(self, name: str, known: Iterable[str], required: Iterable[str]) -> None:
        path = _FOLDER / self.method.name / name
        if self.folder is not None and (self.folder / name).is_file():
            path = self.folder / name
        try:
            template = string.Template(path.read_text(encoding="utf-8").strip())
        except UnicodeDecodeError:
            raise InputError(str(path), "is not UTF-8", "save it as UTF-8") from None
        if not template.is_valid():
            raise InputError(str(path), "contains a $ that starts no placeholder", "write $$ for a dollar sign")
        placeholders = set(template.get_identifiers())
        if unknown := sorted(placeholders - set(known)):
            raise InputError(str(path), f"has the unknown placeholder ${unknown[0]}", f"use {', '.join(sorted(known))}")
        if missing := sorted(set(required) - placeholders):
            raise InputError(str(path), f"lacks the placeholder ${missing[0]}", "add it")
        self._texts[name] = template


def _seed_block(path: Path, category: Category, num_seeds: int) -> str:
    """Some records of a file as prompt text: each with its task, in the form of a model's answer."""
    # Texts may contain other separators of lines.
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    if len(lines) < num_seeds:
        raise InputError(str(path), f"contains {len(lines)} of the {num_seeds} records requested", "lower num_seeds")
    parts = ["These examples keep to every rule below, each for a task of its own. Do not reuse their texts."]
    for number in range(num_seeds):
        record = json.loads(lines[number * len(lines) // num_seeds])
        answer = json.dumps(answer_of(record, category), ensure_ascii=False, indent=2)
        parts.append(f"Task: {record['instruction']}\n{answer}")
    return "\n\n".join(parts) + "\n\n"


def reference_tasks(category: Category) -> list[str]:
    return (_FOLDER / "reference_tasks" / f"{category.name}.txt").read_text(encoding="utf-8").splitlines()


def answer_schema(category: Category) -> dict[str, Any]:
    """The JSON schema of a model's answer (see `answer_of`), in the form that strict endpoints require."""
    fields = {category.query_field, category.positive_field, *category.negative_fields}
    properties: dict[str, Any] = {name: {"type": "string"} for name in sorted(fields)}
    if category.graded:
        properties[category.negative_fields[0]] = GRADED_SCHEMA
    return _object_schema(properties)


def _object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_LEVEL_SCHEMA = {"type": "string", "enum": sorted(set(LEVELS))}
GRADED_SCHEMA = {
    "type": "array",
    "items": _object_schema({"similarity_level": _LEVEL_SCHEMA, "text": {"type": "string"}}),
    "minItems": len(LEVELS),
    "maxItems": len(LEVELS),
}
NEGATIVES_SCHEMA = _object_schema({REGENERATED_FIELD: GRADED_SCHEMA})


def answer_of(record: Mapping[str, Any], category: Category) -> dict[str, Any]:
    """A record in the form of a model's answer: the inverse of `validate.read_example`."""
    negatives: dict[str, Any] = dict(zip(category.negative_fields, record["negatives"], strict=False))
    if category.graded:
        texts = [negative["text"] for negative in record["negatives"]]
        graded = [{"similarity_level": level, "text": text} for level, text in zip(LEVELS, texts, strict=True)]
        negatives = {category.negative_fields[0]: graded}
    return {category.query_field: record["query"], category.positive_field: record["positive"], **negatives}
