"""mteb, loaded on use and kept quiet; prompts of its tasks: a model's own by mteb's rule, a table's, or a file's."""

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from embeddings.common.errors import InputError, OptionError, require
from embeddings.common.text import TextSettings, in_context_prompt

_TALKATIVE = ("mteb", "datasets", "huggingface_hub", "sentence_transformers")
# NV-Embed Table 13 and MGH Table 8; each file names its source.
PUBLISHED = {"nv-embed": "instructions_nv_embed.json", "mgh": "instructions_mgh.json"}
_LAYOUT = 'write {"instructions": {"SciFact": "…", "STS": "…"}}'
_EXAMPLES_LAYOUT = 'write {"examples": {"SciFact": [{"query": "…", "document": "…"}]}} beside the instructions'


def load_mteb() -> ModuleType:
    """The module mteb; a `MissingExtraError` names the extra `eval` where it is not installed."""
    with quiet():
        return require("mteb", "eval")


@contextmanager
def quiet(keep_bars: bool = False) -> Iterator[None]:
    """Silence mteb and the libraries under it: their warnings, log lines and (unless `keep_bars`) progress bars.

    This project's own bars are still drawn. Not for several threads at once: these settings belong to the process.
    """
    import datasets
    import tqdm.auto

    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    were_drawn = not datasets.are_progress_bars_disabled()
    # No option of mteb turns off all its bars. They are all of this class; this project uses the plain one.
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
    """Instructions by a task's name or by a type of tasks (`STS`); the table's name ends in a hash of its content.

    `examples` are solved ones by the same names, each a query and a document that answers it, that precede the task's
    queries (bge-en-icl; MGH, Table 2, "w/ icl").
    """

    name: str
    texts: dict[str, str]
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def of(self, task: str, kind: str) -> str | None:
        """The instruction of a task, or of its type; a later version (`.v2`) has that of the first. None if none."""
        name = self._known(task, kind)
        return None if name is None else self.texts[name]

    def prompt(self, task: str, kind: str, text: TextSettings) -> str | None:
        """The prompt of a task for a model with these settings: its examples, then its instruction; or None."""
        name = self._known(task, kind)
        if name is None:
            return None
        prompt = text.instruction_prompt(self.texts[name])
        return in_context_prompt(prompt, [(prompt, *pair) for pair in self.examples.get(name, [])])

    def _known(self, task: str, kind: str) -> str | None:
        names = (task, re.sub(r"\.v\d+$", "", task), kind)
        return next((name for name in names if name in self.texts), None)

    @classmethod
    def read(cls, source: str) -> Self:
        """A published table by its name, or a JSON file: `{"instructions": {"SciFact": "…", "STS": "…"}}`.

        A file may hold `{"examples": {"SciFact": [{"query": "…", "document": "…"}]}}` as well. An unknown name is an
        `OptionError`, and a file of another kind an `InputError`.
        """
        path = Path(source)
        if source in PUBLISHED:
            content = (resources.files(__package__) / "tables" / PUBLISHED[source]).read_text(encoding="utf-8")
        elif path.is_file():
            content = path.read_bytes().decode("utf-8", "replace")
        else:
            known = ", ".join(PUBLISHED)
            raise OptionError("instructions", source, f"must be a table ({known}) or a JSON file", "name one of them")
        try:
            fields = json.loads(content)
            texts, examples = fields["instructions"], fields.get("examples", {})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(source, "holds no object `instructions`", _LAYOUT) from None
        if not isinstance(texts, dict) or not texts or not all(_is_text(text) for text in texts.values()):
            raise InputError(source, "an instruction is empty or no text", _LAYOUT)
        solved = _pairs(source, examples, texts)
        said = [texts, solved] if solved else texts
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        return cls(f"{path.stem}-{digest[:8]}", texts, solved)


def _pairs(source: str, examples: Any, texts: dict[str, str]) -> dict[str, list[tuple[str, str]]]:
    if not isinstance(examples, dict) or not all(isinstance(pairs, list) for pairs in examples.values()):
        raise InputError(source, "its examples are no object of lists", _EXAMPLES_LAYOUT)
    for name, pairs in examples.items():
        if name not in texts:
            raise InputError(source, f"has examples of {name!r} and no instruction", "write one, or take them out")
        for pair in pairs:
            if not isinstance(pair, dict) or not all(_is_text(pair.get(key)) for key in ("query", "document")):
                raise InputError(source, f"an example of {name!r} lacks a query or a document", _EXAMPLES_LAYOUT)
    return {name: [(pair["query"], pair["document"]) for pair in pairs] for name, pairs in examples.items()}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def task_prompt(prompts: Mapping[str, str], task: str, task_type: str, role: str | None) -> str:
    """The most specific of a model's prompts for a text, by mteb's rule; empty where none fits.

    That is the prompt named like the task, else like its type, else like the text's role. For a text of a role, a name
    with the suffix `-query` or `-document` precedes the bare one. A text of a task without roles (role None: one of a
    pair to compare, one to classify or to cluster) gets no role's prompt.
    """
    names = [task, task_type]
    if role is not None:
        names = [f"{task}-{role}", task, f"{task_type}-{role}", task_type, role]
    return next((prompts[name] for name in names if name and name in prompts), "")
