"""mteb, imported on use and silenced; the prompts of its tasks, from the model, a published table or a file."""

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from embeddings.common.errors import InputError, OptionError, require
from embeddings.common.text import TextSettings, in_context_prompt

_SILENCED = ("mteb", "datasets", "huggingface_hub", "sentence_transformers")
# NV-Embed Table 13 and MGH Table 8; each file names its source.
PUBLISHED = {"nv-embed": "instructions_nv_embed.json", "mgh": "instructions_mgh.json"}
_LAYOUT = 'write {"instructions": {"SciFact": "…", "STS": "…"}}'
_EXAMPLES_LAYOUT = 'write {"examples": {"SciFact": [{"query": "…", "document": "…"}]}} beside the instructions'


def load_mteb() -> ModuleType:
    with quiet():
        return require("mteb", "eval")


@contextmanager
def quiet(keep_bars: bool = False) -> Iterator[None]:
    """Silence warnings, log lines and, unless `keep_bars`, progress bars of mteb and its libraries."""
    import datasets
    import tqdm.auto

    loggers = [logging.getLogger(name) for name in _SILENCED]
    levels = [logger.level for logger in loggers]
    were_drawn = not datasets.are_progress_bars_disabled()
    # mteb has no option that disables all its bars. They all use this class; this project uses `tqdm.tqdm`.
    bar: Any = tqdm.auto.tqdm
    draw = bar.__init__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        if not keep_bars:
            datasets.disable_progress_bars()
            bar.__init__ = partialmethod(draw, disable=True)
        try:
            yield
        finally:
            bar.__init__ = draw
            if were_drawn:
                datasets.enable_progress_bars()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@dataclass(frozen=True)
class Instructions:
    """Instructions by task name or task type (`STS`); the name of the table ends in a hash of its content.

    `examples`, by the same names, are pairs of a query and its answer for in-context learning, which are put before
    the queries of the task (bge-en-icl; MGH, Table 2, "w/ icl").
    """

    name: str
    texts: dict[str, str]
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def prompt(self, task: str, kind: str, text: TextSettings) -> str | None:
        """The prompt of a task: examples, then the instruction; None without one."""
        key = self._key(task, kind)
        if key not in self.texts:
            return None
        prompt = text.instruction_prompt(self.texts[key])
        return in_context_prompt(prompt, [(prompt, *pair) for pair in self.examples.get(key, [])])

    def _key(self, task: str, kind: str) -> str:
        names = (task, re.sub(r"\.v\d+$", "", task))
        return next((name for name in names if name in self.texts), kind)

    @classmethod
    def read(cls, source: str) -> Self:
        """Read a published table by name, or a JSON file: `{"instructions": {"SciFact": "…", "STS": "…"}}`.

        A file may also contain `{"examples": {"SciFact": [{"query": "…", "document": "…"}]}}`.
        """
        path = Path(source)
        if source in PUBLISHED:
            content = (resources.files(__package__) / "tables" / PUBLISHED[source]).read_text(encoding="utf-8")
        elif path.is_file():
            content = path.read_bytes().decode("utf-8", "replace")
        else:
            rule = f"must be a table ({', '.join(PUBLISHED)}) or a JSON file"
            raise OptionError("instructions", source, rule, "name one of them")
        try:
            fields = json.loads(content)
            texts, examples = fields["instructions"], fields.get("examples", {})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(source, "has no object `instructions`", _LAYOUT) from None
        if not isinstance(texts, dict) or not texts or not all(_is_text(text) for text in texts.values()):
            raise InputError(source, "an instruction is empty or not text", _LAYOUT)
        pairs = _example_pairs(source, examples, texts)
        hashed = [texts, pairs] if pairs else texts
        digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
        return cls(f"{path.stem}-{digest[:8]}", texts, pairs)


def _example_pairs(source: str, examples: Any, texts: dict[str, str]) -> dict[str, list[tuple[str, str]]]:
    if not isinstance(examples, dict) or not all(isinstance(pairs, list) for pairs in examples.values()):
        raise InputError(source, "`examples` is not an object of lists", _EXAMPLES_LAYOUT)
    for name, pairs in examples.items():
        if name not in texts:
            raise InputError(source, f"has examples but no instruction for {name!r}", "write one, or remove them")
        for pair in pairs:
            if not isinstance(pair, dict) or not all(_is_text(pair.get(key)) for key in ("query", "document")):
                raise InputError(source, f"an example of {name!r} has no query or no document", _EXAMPLES_LAYOUT)
    return {name: [(pair["query"], pair["document"]) for pair in pairs] for name, pairs in examples.items()}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def task_prompt(text: TextSettings, task: str, task_type: str, role: str | None) -> str:
    """The most specific of a model's prompts for a text, by the rule of mteb; empty if the model has none for it.

    This is the prompt named like the task, else like its type, else like the role of the text, or, without a role, the
    model's default prompt. Names with the suffix `-query` or `-document` come first.
    """
    prompts, names = text.prompts, [task, task_type, text.default_prompt_name]
    if role is not None:
        names = [f"{task}-{role}", task, f"{task_type}-{role}", task_type, role]
    return next((prompts[name] for name in names if name and name in prompts), "")
