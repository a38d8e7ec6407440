"""Text settings, which training, serving and saved model directories share, and helpers for one-line messages."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from embeddings.common.errors import InputError, OptionError, require_minimum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TextRole = Literal["query", "document"]
# How scores are computed from vectors; the names are those of sentence-transformers.
Similarity = Literal["cosine", "dot"]
# NV-Embed Eq. 2, with the line break and the trailing space of its model card.
INSTRUCTION_TEMPLATE = "Instruct: {instruction}\nQuery: "
PoolingRule = Literal["exact", "prompt_length", "after_colon", "instruction_count"]
# A prompt given as text may contain this placeholder for the record's instruction.
INSTRUCTION = "{instruction}"
# The kind of model that a tokenizer.json describes.
_MODEL_TYPE = re.compile(rb'"model":\s*\{\s*"type":\s*"(\w+)"')


class GivenPrompt(TypedDict):
    """A prompt given as text; for the queries of records `{instruction}` is the record's instruction."""

    text: str


# The name of one of the model's prompts, a prompt as text, or None for the prompt named like the role.
PromptChoice = str | GivenPrompt | None

LENGTHS = ("query_max_length", "document_max_length")
# Value of a setting that is not set.
_UNSET: Any = None
_DEFAULTS: Mapping[str, Any] = {
    "query_max_length": 512,
    "document_max_length": 512,
    "append_eos": False,
    "pool_prompt": False,
    "suffix": "",
    "pool_start": True,
    "instruction_template": INSTRUCTION_TEMPLATE,
}


@dataclass(frozen=True)
class TextSettings:
    """Lengths, prompts and special tokens of an embedding model's texts.

    A setting that is not set (null) is that of the model that training starts from (see `following`), else the default.

    Args:
        query_max_length: Maximum number of tokens of a query with prompt and special tokens, >= 4. Default 512, as in
            NV-Embed.
        document_max_length: The same for a document.
        prompts: Prefixes by name; encoding uses `query` and `document` by default. An empty one is no prefix.
        append_eos: Whether every text, also a truncated one, ends with the end-of-sequence token.
        pool_prompt: Whether the prompt's tokens enter the pooling. NV-Embed excludes them.
        suffix: Text appended to every text, also after truncation, and pooled; used by LLM2Vec for chat models.
        pool_start: Whether leading special tokens of a text without a prompt enter the pooling. LLM2Vec excludes them.
        instruction_template: Template that turns the instruction of a source, record or task into a prompt. The default
            is NV-Embed's (Eq. 2); MGH prepends the chat template's `[INST] `.
        pooling_rule: Which tokens belong to the prompt if `pool_prompt` is off. `exact`: by the characters that each
            token covers. `prompt_length`: as many as the prompt alone has, including leading special tokens
            (sentence-transformers' `Pooling(include_prompt=False)`). `after_colon`: all up to the first token `:`, with
            or without a prompt (cde-small-v2). `instruction_count`: as many as the prompt alone has, and truncation
            may remove the end-of-sequence token (NV-Embed's code). Default `exact`.
        default_prompt_name: Name of the prompt before texts that are encoded without a prompt and a role.

    Attributes:
        given: The names of the settings that are set.

    Raises:
        OptionError: If a setting is invalid or conflicts with another one.
    """

    query_max_length: int = _UNSET
    document_max_length: int = _UNSET
    prompts: dict[str, str] = _UNSET
    append_eos: bool = _UNSET
    pool_prompt: bool = _UNSET
    suffix: str = _UNSET
    pool_start: bool = _UNSET
    instruction_template: str = _UNSET
    pooling_rule: PoolingRule | None = None
    default_prompt_name: str | None = None
    given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [option.name for option in fields(self) if option.init]
        object.__setattr__(self, "given", frozenset(name for name in names if getattr(self, name) is not _UNSET))
        for name, default in {"prompts": {}, **_DEFAULTS}.items():
            if name not in self.given:
                object.__setattr__(self, name, default)
        for name in LENGTHS:
            require_minimum(f"data.text.{name}", getattr(self, name), 4, "the paper uses 512")
        if self.instruction_template.count("{instruction}") != 1:
            rule = "must contain {instruction} once"
            raise OptionError("data.text.instruction_template", self.instruction_template, rule, "see NV-Embed's Eq. 2")
        if self.pooling_rule not in (None, *get_args(PoolingRule)):
            rule = f"must be one of {', '.join(get_args(PoolingRule))}"
            raise OptionError("data.text.pooling_rule", self.pooling_rule, rule, "leave it out")
        if self.pooling_rule not in (None, "exact") and (self.suffix or not self.pool_start):
            rule = "does not support suffix or pool_start: false"
            raise OptionError("data.text.pooling_rule", self.pooling_rule, rule, "set suffix: '' and pool_start: true")

        if self.default_prompt_name is not None:
            self._require_prompt("data.text.default_prompt_name", self.default_prompt_name)

    def _require_prompt(self, option: str, name: str) -> None:
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise OptionError(option, name, f"must name a prompt of the model ({known})", "leave it out")

    def max_length(self, role: TextRole) -> int:
        return self.query_max_length if role == "query" else self.document_max_length

    def prompt(self, name: PromptChoice, role: TextRole) -> str:
        """The prompt with this name or this text; by default the prompt named like the role, or an empty string."""
        if name is None:
            return self.prompts.get(role, "")
        if isinstance(name, dict):
            if INSTRUCTION in name["text"]:
                rule = f"may contain {INSTRUCTION} only for the queries of records"
                raise OptionError("prompt", name["text"], rule, "replace it with the instruction")
            return name["text"]
        self._require_prompt("prompt_name", name)
        return self.prompts[name]

    def prompt_or_default(self, prompt: str | None, role: TextRole) -> str:
        return self.prompt(None, role) if prompt is None else prompt

    def instruction_prompt(self, instruction: str) -> str:
        return instruction_prompt(instruction, self.instruction_template)

    def following(self, model: "TextSettings") -> "TextSettings":
        """These settings, with the model's values for all that are not set here; prompts are set one by one."""
        own = {name: getattr(self, name) for name in self.given}
        return TextSettings(**{**model.to_dict(), **own, "prompts": model.prompts | self.prompts})

    def differences(self, model: "TextSettings") -> list[str]:
        old, new = (
            {**text.to_dict(), "prompts": None, **{f"prompts.{name}": value for name, value in text.prompts.items()}}
            for text in (model, self)
        )
        names = [name for name in old | new if old.get(name) != new.get(name)]
        return [f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names]

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain types, for checkpoints and model directories."""
        # Without these defaults, which are not part of the hash of a model.
        omitted = {"pooling_rule": None, "instruction_template": INSTRUCTION_TEMPLATE, "default_prompt_name": None}
        values = {name: value for name, value in asdict(self).items() if name != "given"}
        return {name: value for name, value in values.items() if name not in omitted or value != omitted[name]}


def canonical(text: str) -> str:
    """The form in which texts are compared: Unicode normalisation form C, without outer white space."""
    return (text if text.isascii() else unicodedata.normalize("NFC", text)).strip()


def in_context_prompt(prompt: str, examples: Sequence[tuple[str, str, str]]) -> str:
    """A prompt after in-context examples of its task, each with its prompt, query and relevant document.

    Source: Li et al. 2024 (bge-en-icl), arXiv:2409.15700.
    """
    return "".join(f"{prefix}{query}\nResponse: {document}\n\n" for prefix, query, document in examples) + prompt


def instruction_prompt(instruction: str, template: str = INSTRUCTION_TEMPLATE) -> str:
    return template.replace("{instruction}", instruction)


def check_tokenizer_files(folder: Path) -> None:
    """Refuse a folder without tokenizer.json: transformers would build a different tokenizer from its other files."""
    file, hint = folder / "tokenizer.json", "use a complete copy, or save the tokenizer again"
    if file.is_dir():
        raise InputError(str(file), "is a directory", hint)
    vocabularies = sorted(path.name for path in folder.glob("vocab*"))
    if vocabularies and not file.is_file():
        raise InputError(str(folder), f"contains {vocabularies[0]} but no tokenizer.json", hint)


def load_tokenizer_files(folder: str | Path, kind: Any = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder or Hub id; `kind` is its class, by default that of the files.

    If the class that transformers chooses builds another kind of model than tokenizer.json states, the file is used.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded: PreTrainedTokenizerBase = (kind or AutoTokenizer).from_pretrained(folder, trust_remote_code=False)
    file, backend = Path(folder) / "tokenizer.json", getattr(loaded, "backend_tokenizer", None)
    if backend is not None and file.is_file():
        stated = _MODEL_TYPE.search(file.read_bytes())
        if stated is not None and stated[1].decode() != type(backend.model).__name__:
            loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded


def one_line(message: str, limit: int = 300) -> str:
    """The message as one printable line; a long one keeps its start (what failed) and end (the reason)."""
    line = printable(re.sub(r"\s+", " ", message).strip())
    if len(line) <= limit:
        return line
    first = (limit - 3) // 3
    return f"{line[:first]}...{line[first + 3 - limit :]}"


def shorten(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def printable(text: str) -> str:
    """The text with control characters escaped, so that a terminal does not execute them."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def choose_prompt(option: str, name: str | None, text: str | None) -> PromptChoice:
    """The prompt chosen by option `NAME_name` or by the text of option `NAME`."""
    if text is None:
        return name
    if name is not None:
        raise OptionError(option, text, f"excludes {option}_name", "give one of the two")
    return GivenPrompt(text=text)


def format_table(rows: Sequence[Sequence[object]], align: str = "<>") -> str:
    """Format rows, the header first, as aligned columns; the last letter of `align` applies to all that follow."""
    num_columns = max(map(len, rows))
    texts = [[*map(str, row), *[""] * (num_columns - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    sides = align.ljust(num_columns, align[-1])
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in texts
    )
