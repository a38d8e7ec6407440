"""How a text becomes tokens, and how a message becomes a line.

The settings of tokenising are those that training, serving and a saved model directory share.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, get_args

from embeddings.common.errors import InputError, OptionError

TextRole = Literal["query", "document"]
# NV-Embed Eq. 2, with the line break and the trailing space of its model card.
INSTRUCTION_TEMPLATE = "Instruct: {instruction}\nQuery: "
PoolingRule = Literal["exact", "prompt_length", "after_colon", "instruction_count"]
# Where a given prompt holds this, a record's own instruction stands in its place.
INSTRUCTION = "{instruction}"


class GivenPrompt(TypedDict):
    """A prompt that is given as a text, in place of one of the model's; manifests hold it as it is.

    In jobs that encode the queries of records, a record's own instruction takes the place of `{instruction}`.
    """

    text: str


# One of the model's prompts by its name, a given one, or None for the one named like the role.
PromptChoice = str | GivenPrompt | None


@dataclass(frozen=True)
class TextSettings:
    """Lengths, prompts and special tokens of an embedding model's texts.

    Args:
        query_max_length: Maximum of tokens of a query with prompt and special tokens, >= 4. NV-Embed uses 512.
        document_max_length: The same of a document.
        prompts: Texts put before a text, by name; encoding uses `query` and `document` where none is named.
        append_eos: Whether every text, truncated or not, ends in the tokenizer's end-of-sequence token.
        pool_prompt: Whether the prompt's tokens enter the pooling. NV-Embed leaves them out.
        suffix: Text put behind every text, under truncation too, and pooled. LLM2Vec closes a text of a chat model so.
        pool_start: Whether the special tokens before a text without a prompt enter the pooling. LLM2Vec's do not.
        instruction_template: The prompt that a source's, a record's or a task's instruction becomes. The default is
            NV-Embed's (Eq. 2); MGH puts the chat template's `[INST] ` before it.
        pooling_rule: Which tokens are the prompt's, where `pool_prompt` is off. `exact`: by the characters that each
            token covers. `prompt_length`: as many as the prompt alone has, special tokens before it included
            (sentence-transformers' `Pooling(include_prompt=False)`). `after_colon`: all up to the first token `:`, with
            a prompt or without (cde-small-v2). `instruction_count`: as many as the prompt alone has, and the
            end-of-sequence token is cut off as any other (NV-Embed's code). None: as the model that training starts
            from, `exact` for any but an imported one.

    Raises:
        OptionError: If a setting is impossible or does not go with the others.
    """

    query_max_length: int = 512
    document_max_length: int = 512
    prompts: dict[str, str] = field(default_factory=dict)
    append_eos: bool = False
    pool_prompt: bool = False
    suffix: str = ""
    pool_start: bool = True
    instruction_template: str = INSTRUCTION_TEMPLATE
    pooling_rule: PoolingRule | None = None

    def __post_init__(self) -> None:
        for name in ("query_max_length", "document_max_length"):
            if getattr(self, name) < 4:
                raise OptionError(f"data.text.{name}", getattr(self, name), "must be >= 4", "the paper uses 512")
        if self.instruction_template.count("{instruction}") != 1:
            rule = "must hold {instruction} once"
            raise OptionError("data.text.instruction_template", self.instruction_template, rule, "see NV-Embed's Eq. 2")
        if self.pooling_rule not in (None, *get_args(PoolingRule)):
            rule = f"must be one of {', '.join(get_args(PoolingRule))}"
            raise OptionError("data.text.pooling_rule", self.pooling_rule, rule, "leave it out")
        if self.pooling_rule not in (None, "exact") and (self.suffix or not self.pool_start):
            rule = "knows neither a suffix nor special tokens that are left out"
            raise OptionError("data.text.pooling_rule", self.pooling_rule, rule, "set suffix '' and pool_start true")

    def max_length(self, role: TextRole) -> int:
        return self.query_max_length if role == "query" else self.document_max_length

    def prompt(self, name: PromptChoice, role: TextRole) -> str:
        """The prompt of this name, or the one given; without either the one named like the role, or none."""
        if name is None:
            return self.prompts.get(role, "")
        if isinstance(name, dict):
            if INSTRUCTION in name["text"]:
                rule = f"may hold {INSTRUCTION} only where it goes before the queries of records"
                raise OptionError("prompt", name["text"], rule, "write the instruction itself")
            return name["text"]
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise OptionError("prompt_name", name, f"must name a prompt of the model ({known})", "leave it out")
        return self.prompts[name]

    def instruction_prompt(self, instruction: str) -> str:
        return instruction_prompt(instruction, self.instruction_template)

    def following(self, model: "TextSettings") -> Self:
        """These settings with a model's pooling rule, unless they give one themselves."""
        return self if self.pooling_rule is not None else replace(self, pooling_rule=model.pooling_rule)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, as a checkpoint or a model directory holds them."""
        # Left out where they are the default, so that hashes of models of earlier versions stay what they were.
        later = {"pooling_rule": None, "instruction_template": INSTRUCTION_TEMPLATE}
        return {name: value for name, value in asdict(self).items() if name not in later or value != later[name]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The settings that `to_dict` wrote."""
        return cls(**fields)


def in_context_prompt(prompt: str, examples: Sequence[tuple[str, str, str]]) -> str:
    """A prompt behind solved examples of its task: each one's prompt, query, and document that answers it.

    Source: Li et al. 2024 (bge-en-icl), arXiv:2409.15700.
    """
    return "".join(f"{own}{query}\nResponse: {document}\n\n" for own, query, document in examples) + prompt


def instruction_prompt(instruction: str, template: str = INSTRUCTION_TEMPLATE) -> str:
    """The prompt of an instruction: the template filled with it."""
    return template.replace("{instruction}", instruction)


def check_tokenizer_files(folder: Path) -> None:
    """Refuse a folder without tokenizer.json: the library would make another tokenizer of its other files."""
    file, hint = folder / "tokenizer.json", "take a whole copy, or save the tokenizer again"
    if file.is_dir():
        raise InputError(str(file), "is a folder", hint)
    vocabularies = sorted(path.name for path in folder.glob("vocab*"))
    if vocabularies and not file.is_file():
        raise InputError(str(folder), f"holds {vocabularies[0]} and no tokenizer.json", hint)


def one_line(message: str, limit: int = 300) -> str:
    """The message as one printable line; of one above `limit` characters the first third and last two thirds."""
    line = printable(re.sub(r"\s+", " ", message).strip())
    if len(line) <= limit:
        return line
    # It begins with what failed and ends with why.
    first = (limit - 3) // 3
    return f"{line[:first]}...{line[first + 3 - limit :]}"


def shorten(text: str, length: int) -> str:
    """The beginning of a text on one line of at most `length` characters, with an ellipsis where more follows."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def printable(text: str) -> str:
    """A text with control characters as escapes, which a terminal does not obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def choose_prompt(option: str, name: str | None, text: str | None) -> PromptChoice:
    """The prompt that option `NAME_name` or the text of option `NAME` chooses; both together are refused."""
    if text is None:
        return name
    if name is not None:
        raise OptionError(option, text, f"excludes {option}_name", "give one of the two")
    return GivenPrompt(text=text)


def format_table(rows: Sequence[Sequence[object]], align: str = "<>") -> str:
    """Rows, the names of the columns first, as lines of aligned columns; a short row leaves its last columns empty.

    `align` has `<` or `>` for each column; its last letter counts for all further columns.
    """
    num_columns = max(map(len, rows))
    texts = [[*map(str, row), *[""] * (num_columns - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    sides = align.ljust(num_columns, align[-1])
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in texts
    )
