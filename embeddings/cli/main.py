"""The entry point: which command a line of arguments means."""

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser

from embeddings.cli.errors import ConfigError, run_guarded, with_way_out
from embeddings.cli.fit_line import check_fit_line
from embeddings.cli.given import check_names, check_nulls, given_mappings, signature_of
from embeddings.cli.imports import restrict_imports
from embeddings.cli.recipes import expand_recipe
from embeddings.common.process import check_variables, log_to_stderr
from embeddings.common.signals import handle_preemption

TRAINER_COMMANDS = {"fit": "train a model from configs"}
# Lightning's other loops, which no module has, and what does their work here.
OTHER_LOOPS = {"validate": "evaluate", "test": "evaluate", "predict": "encode"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `cli.errors`)."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    with log_to_stderr():
        return run_guarded(lambda: dispatch(argv))


def dispatch(argv: list[str]) -> None:
    """Run the command that `argv[0]` names.

    Raises:
        ConfigError: If there is no such command, or its arguments do not parse or are no text.
    """
    check_words(argv)
    name, pair = argv[0], " ".join(argv[:2])
    kinds = [command.removeprefix(f"{name} ") for command in COMMANDS if command.startswith(f"{name} ")]
    if pair in COMMANDS:
        run_command(pair, argv[2:])
    elif name in COMMANDS:
        run_command(name, argv[1:])
    elif kinds and argv[1:2] in (["-h"], ["--help"]):
        print(usage(name))
    elif kinds:
        given = f"got {argv[1]!r}" if argv[1:] else "got nothing"
        raise ConfigError(f"{name}: the next word must be {' or '.join(kinds)}, {given}; {name} --help lists them")
    elif name in TRAINER_COMMANDS:
        check_variables()
        check_fit_line(expand_recipe(argv))
        with handle_preemption():
            from embeddings.cli.fit import run_trainer  # Lightning and torch load only for the commands that train

            run_trainer(argv)
    elif name in OTHER_LOOPS:
        raise ConfigError(f"{name}: no module has such a loop; train with fit, use its model with {OTHER_LOOPS[name]}")
    else:
        known = [*TRAINER_COMMANDS, *COMMANDS]
        alike = get_close_matches(name, known, n=1)
        guess = f"did you mean {alike[0]}? " if alike else ""
        raise ConfigError(f"there is no command {name[:40]!r}; {guess}--help lists all")


def check_words(argv: Sequence[str]) -> None:
    """Check that the words are text: others can be neither tokenised nor written to a manifest.

    Raises:
        ConfigError: Naming the first that holds bytes of another encoding.
    """
    for word in argv:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{word!r} on the command line is not valid UTF-8; write it as UTF-8") from None


def usage(first_word: str = "") -> str:
    """The list of commands, or of those that begin with a word."""
    lines = ["usage: python main.py COMMAND [options]   (python main.py COMMAND --help says more)", ""]
    rows = {**TRAINER_COMMANDS, **{name: command.summary for name, command in COMMANDS.items()}}
    chosen = {name: summary for name, summary in rows.items() if not first_word or name.split()[0] == first_word}
    return "\n".join([*lines, *(f"  {name:<23}{summary}" for name, summary in chosen.items())])


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
    "prepare": Command("embeddings.cli.quickstart:prepare", "build a training corpus", ("corpus",)),
    "quickstart": Command("embeddings.cli.quickstart:quickstart", "corpus, training, scores and searches in minutes"),
    "encode": Command("embeddings.cli.encode:encode", "texts of a file to vectors in a folder"),
    "index": Command("embeddings.cli.search:index", "an index of a folder of vectors, for quick searches"),
    "search": Command(
        "embeddings.cli.search:search", "the documents of a corpus nearest to a query", ("query",), may_be_none=True
    ),
    "evaluate": Command("embeddings.cli.evaluate:evaluate", "score a model on evaluation folders or tasks of mteb"),
    "cluster": Command("embeddings.cli.mining:cluster", "rows that lie near each other, for batches that are hard"),
    "mine": Command("embeddings.cli.mining:mine", "hard negatives for training records"),
    "filter": Command("embeddings.cli.mining:filter_records", "the training records that are worth training on"),
    "synthesize": Command("embeddings.cli.synthesize:synthesize", "training records that a language model writes"),
    "export": Command("embeddings.cli.export:export", "a training checkpoint to a model directory"),
    "import": Command("embeddings.cli.export:import_checkpoint", "a published checkpoint to a model directory"),
    "convert": Command("embeddings.cli.export:convert", "a checkpoint with learned positions to one with rotary ones"),
    "sweep": Command(
        "embeddings.cli.sweep:sweep", "runs over a grid, a list or random values of config keys", ("file",)
    ),
    "report": Command("embeddings.cli.show:report", "one HTML page about a run", ("run",)),
    "show curves": Command("embeddings.cli.show:curves", "a picture of the loss and score of runs"),
    "show anchor-tokens": Command(
        "embeddings.cli.show:anchor_tokens", "a picture of texts by anchor-token-aware pooling's weights", ("texts",)
    ),
    "show latent-attention": Command(
        "embeddings.cli.show:latent_attention", "a picture of which latents tokens attend to", ("texts",)
    ),
    "show routing": Command(
        "embeddings.cli.show:routing",
        "a picture of where a sparse model's tokens go, or of runs' expert loads",
        ("texts",),
        may_be_none=True,
    ),
    "show contextual-shift": Command(
        "embeddings.cli.show:contextual_shift", "a picture of vectors that move between contexts"
    ),
    "show clusters": Command("embeddings.cli.show:clusters", "a picture of what cluster has put together"),
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
