"""The commands that are plain typed functions, and how one becomes a command line."""

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser

from embeddings.cli.errors import ConfigError, with_way_out
from embeddings.cli.given import check_names, check_nulls, given_mappings, signature_of
from embeddings.cli.imports import restrict_imports


@dataclass(frozen=True)
class Command:
    """A function that is a command.

    Args:
        target: Where it is, as `module:function`; it is imported only when the command runs.
        summary: One line for the list of commands.
        positional: Parameters given by position, the last one a list where it may be several words; all others are
            options.
        may_be_none: Whether the last of them may be left out.
    """

    target: str
    summary: str
    positional: tuple[str, ...] = ()
    may_be_none: bool = False

    def load(self) -> Callable[..., Any]:
        """The function."""
        module, _, name = self.target.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


# A name of two words is a command and what it is to do.
COMMANDS = {
    "prepare": Command("embeddings.cli.prepare:prepare", "build a training corpus", ("corpus",)),
    "quickstart": Command("embeddings.cli.quickstart:quickstart", "corpus, training, scores and searches in minutes"),
    "encode": Command("embeddings.cli.serve:encode", "texts of a file to vectors in a folder"),
    "index": Command("embeddings.cli.index:index", "an index of a folder of vectors, for quick searches"),
    "search": Command(
        "embeddings.cli.serve:search", "the documents of a corpus nearest to a query", ("query",), may_be_none=True
    ),
    "evaluate": Command("embeddings.cli.serve:evaluate", "score a model on evaluation folders or tasks of mteb"),
    "cluster": Command("embeddings.cli.cluster:cluster", "rows that lie near each other, for batches that are hard"),
    "mine": Command("embeddings.cli.mine:mine", "hard negatives for training records"),
    "filter": Command("embeddings.cli.filter:filter_records", "the training records that are worth training on"),
    "synthesize": Command("embeddings.cli.synthesize:synthesize", "training records that a language model writes"),
    "export": Command("embeddings.cli.export:export", "a training checkpoint to a model directory"),
    "import": Command(
        "embeddings.cli.import_released:import_checkpoint", "a published checkpoint to a model directory"
    ),
    "convert": Command("embeddings.cli.convert:convert", "a checkpoint with learned positions to one with rotary ones"),
    "sweep": Command(
        "embeddings.cli.sweep:sweep", "runs over a grid, a list or random values of config keys", ("file",)
    ),
    "report": Command("embeddings.cli.report:report", "one HTML page about a run", ("run",)),
    "show curves": Command("embeddings.cli.show:curves", "a picture of the loss and score of runs"),
    "show anchor-tokens": Command(
        "embeddings.cli.show:anchor_tokens", "a picture of texts by anchor-token-aware pooling's weights", ("texts",)
    ),
    "show latent-attention": Command(
        "embeddings.cli.show_latents:latent_attention", "a picture of which latents tokens attend to", ("texts",)
    ),
    "show routing": Command(
        "embeddings.cli.show_routing:routing",
        "a picture of where a sparse model's tokens go, or of runs' expert loads",
        ("texts",),
        may_be_none=True,
    ),
    "show contextual-shift": Command(
        "embeddings.cli.show_contexts:contextual_shift", "a picture of vectors that move between contexts"
    ),
    "show clusters": Command("embeddings.cli.show_clusters:clusters", "a picture of what cluster has put together"),
}


class CommandParser(ArgumentParser):
    """A parser whose errors are one line, without abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message for the command line to print; parsers nested inside types keep the library's exception."""
        if not self.exit_on_error:
            super().error(message, ex)
        raise ConfigError(with_way_out(message, re.findall(r"--[\w.]+", self.format_help()))) from ex


def run_command(name: str, argv: Sequence[str]) -> None:
    """Parse `argv` against the command's signature and call it."""
    restrict_imports()
    command = COMMANDS[name]
    function = command.load()
    parser = CommandParser(prog=f"main.py {name}", description=(function.__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--config", action="config", help="a YAML file of these options")
    added = parser.add_function_arguments(function, skip=set(command.positional), fail_untyped=True)
    for parameter in command.positional:
        parser.add_argument(parameter, **_by_position(function.__annotations__[parameter], command.may_be_none))
    words = underscored(argv)
    mappings = list(given_mappings(words))  # a config that is none is refused before the parser reads it
    parsed, signature = parser.parse_args(words), signature_of(function)
    if signature is not None:
        for given in mappings:
            check_names(given, {}, signature)
        check_nulls(parsed.as_dict(), signature)
    options = parser.instantiate(parsed)
    call(function, {key: options[key] for key in [*added, *command.positional]})


def call(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Do a command's work; an exception that passes here is none of the command line's (see `errors`)."""
    function(**options)


def _by_position(annotation: Any, may_be_none: bool) -> dict[str, Any]:
    """How the parser takes a parameter by position; one that may be left out is never the word null."""
    if get_origin(annotation) is list:
        return {"type": get_args(annotation)[0], "nargs": "*" if may_be_none else "+"}
    if not may_be_none:
        return {"type": annotation}
    (kind,) = (kind for kind in get_args(annotation) if kind is not type(None))
    return {"type": kind, "nargs": "?"}


def underscored(argv: Sequence[str]) -> list[str]:
    """The words with options as the parser knows them (`--top-k=3` is `--top_k=3`); what follows `--` stays."""
    words = list(argv)
    for position, word in enumerate(words):
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            words[position] = f"--{name.replace('-', '_')}{equals}{value}"
    return words
