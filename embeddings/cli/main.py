"""The entry point: the list of commands, and the parsing and running of one."""

import atexit
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from embeddings import __version__
from embeddings.cli.errors import EXIT_INTERRUPTED, ConfigError, run_guarded
from embeddings.cli.parser import CONFIGS, OneLineParser
from embeddings.common.class_paths import restricted_imports
from embeddings.common.errors import program
from embeddings.common.process import (
    handle_preemption,
    ignore_stop_signals,
    is_first_process,
    limit_kernel_cache,
    log_to_stderr,
    quiet_libraries,
)
from embeddings.common.progress import reported


@dataclass(frozen=True)
class Command:
    """A command: a function whose parameters, and the fields of its dataclass parameters, are the options."""

    # `module:function`; it is imported only when the command runs.
    target: str
    summary: str
    # Positional parameters; the last one may be a list, and may be optional.
    positional: tuple[str, ...] = ()
    is_optional: bool = False

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = resolve_name(self.target)
        return function


def _own(target: str, summary: str, positional: tuple[str, ...] = (), is_optional: bool = False) -> Command:
    return Command(f"embeddings.cli.{target}", summary, positional, is_optional)


# A name of two words is a command with its subcommand.
COMMANDS = {
    "prepare": _own("prepare:prepare", "make a recipe's training data from public data sets", ("recipe",)),
    "prepare docstrings": _own("quickstart:docstrings", "make a training corpus of installed packages"),
    "quickstart": _own("quickstart:quickstart", "train, evaluate and search in minutes"),
    "passages": _own("documents:passages", "cut documents into passages", ("documents",)),
    "queries": _own("documents:queries", "make queries for passages, and hold documents out", ("passages",)),
    "adapt": _own("adapt:adapt", "from one's own documents to better search, measured", ("documents",)),
    "encode": _own("retrieval:encode", "encode the texts of a file into a folder of vectors"),
    "index": _own("retrieval:index", "build an index of encoded vectors, for faster search"),
    "search": _own("retrieval:search", "find the documents nearest to a query", ("query",), is_optional=True),
    "evaluate": _own("retrieval:evaluate", "score a model on evaluation folders or mteb tasks"),
    "compare": _own("compare:compare", "score a model and what was made of it on test queries, and recommend one"),
    "interpolate": _own("compare:interpolate", "write a model between a starting model and its trained one"),
    "whiten": _own("compare:whiten", "write a model whose vectors are whitened for a corpus"),
    "cluster": _own("mining:cluster", "cluster similar records, for hard in-batch negatives"),
    "mine": _own("mining:mine", "mine hard negatives for training records"),
    "filter": _own("mining:filter_records", "remove duplicate and contaminated training records"),
    "synthesize": _own("mining:synthesize", "generate training records with a language model"),
    "export": _own("export:export", "convert a training checkpoint to a model directory"),
    "verify": _own("verify:verify", "say whether a server or a library computes a model"),
    "push": _own("export:push", "upload a model directory to the Hugging Face Hub", ("model", "name")),
    "import": _own("export:import_checkpoint", "convert a published checkpoint to a model directory"),
    "convert": _own("export:convert", "replace a checkpoint's learned positions by rotary ones"),
    "compress": _own("export:compress", "prune and quantise a model"),
    "sweep": _own("sweep:sweep", "train runs over a grid, a list or random values of config keys", ("file",)),
    "report": _own("show:report", "write an HTML report on a run", ("run",)),
    "show curves": _own("show:curves", "plot the loss and score of runs"),
    "show anchor-tokens": _own("show:anchor_tokens", "show the weights of anchor-token-aware pooling", ("texts",)),
    "show latent-attention": _own("show:latent_attention", "show which latents tokens attend to", ("texts",)),
    "show routing": _own("show:routing", "show the experts of tokens, or those of runs", ("texts",), is_optional=True),
    "show contextual-shift": _own("show:contextual_shift", "plot how vectors move between contexts"),
    "show clusters": _own("show:clusters", "plot the rows of some clusters"),
}
# After an interruption these continue when they are run again, as does `evaluate --tasks`.
RESUMING = {"adapt", "prepare", "encode", "compare", "cluster", "mine", "filter", "synthesize", "compress", "sweep"}
RESUMING |= {"quickstart"}
TRAINER_COMMANDS = {
    "fit": "train a model from configs (--config FILE, or --recipe NAME)",
    "plan": "estimate what the same training needs: memory, arithmetic, hours, disk",
}
# All others report every half minute that they are running: `search` waits for input, and training reports itself.
UNREPORTED = {"search", "sweep", *TRAINER_COMMANDS}
# Names of the commands in other tools, and Lightning's other loops, which our modules do not have.
ALIASES = {"train": "fit", "finetune": "fit", "embed": "encode", "predict": "encode"}
ALIASES |= dict.fromkeys(("benchmark", "validate", "test"), "evaluate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `cli.errors`)."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    limit_kernel_cache()
    is_reported = bool(argv) and argv[0] not in UNREPORTED
    with log_to_stderr(), quiet_libraries(), reported(argv[0]) if is_reported else nullcontext():
        return run_guarded(lambda: dispatch(argv), resumes(argv))


def run() -> NoReturn:
    """Run the command of `sys.argv`, and exit with its code."""
    code = main()
    # The command has ended: a signal during the exit would only change the exit code.
    ignore_stop_signals()
    if code == EXIT_INTERRUPTED:
        # The user waits, and unloading the libraries takes a second or more.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    raise SystemExit(code)


def resumes(argv: Sequence[str]) -> bool:
    """Whether a command that was interrupted continues after its finished work when it is run again."""
    if argv[:1] == ["evaluate"]:
        return any(word.partition("=")[0] == "--tasks" for word in argv)
    if argv[:1] == ["queries"]:
        return any(word.partition("=")[0] == "--endpoint" for word in argv)
    return bool(RESUMING.intersection(argv[:1])) and list(argv[:2]) != ["prepare", "docstrings"]


@restricted_imports()
def dispatch(argv: list[str]) -> None:
    """Run the command that `argv[0]` names, or print the help."""
    for word in argv:
        if re.search(r"[\ud800-\udfff]", word):  # lone surrogates cannot be encoded as UTF-8
            raise ConfigError(f"{word!r} on the command line is not valid UTF-8; write it as UTF-8")
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return
    if argv[0] == "--version":
        print(f"embeddings {__version__}")
        return
    name, pair = argv[0], " ".join(argv[:2])
    subcommands = [command.removeprefix(f"{name} ") for command in COMMANDS if command.startswith(f"{name} ")]
    if pair in COMMANDS:
        run_command(pair, argv[2:])
    elif name in COMMANDS:
        run_command(name, argv[1:])
    elif subcommands and argv[1:2] in (["-h"], ["--help"]):
        print(usage(name))
    elif subcommands:
        got = f"got {argv[1]!r}" if argv[1:] else "got nothing"
        raise ConfigError(f"{name}: the next word must be {' or '.join(subcommands)}, {got}; {name} --help lists them")
    elif name in TRAINER_COMMANDS:
        with handle_preemption():
            if name == "plan" and is_first_process():
                print("reading the configs", file=sys.stderr)
            # Lightning is imported, which takes seconds, only by the commands that train.
            target = "plan:plan" if name == "plan" else "plan:check_run" if "--check" in argv else "fit:run_trainer"
            resolve_name(f"embeddings.cli.{target}")(argv)
    else:
        matches = [ALIASES[name]] if name in ALIASES else get_close_matches(name, [*TRAINER_COMMANDS, *COMMANDS], n=1)
        guess = f"did you mean {matches[0]}? " if matches else ""
        raise ConfigError(f"there is no command {name[:40]!r}; {guess}--help lists all")


def run_command(name: str, argv: Sequence[str]) -> None:
    """Parse `argv` against the command's signature and call it."""
    command = COMMANDS[name]
    function = command.load()
    hints = get_type_hints(function)
    groups = {parameter: hint for parameter, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parser = OneLineParser(prog=f"{program()} {name}", description=(function.__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--config", action="config")
    added = parser.add_function_arguments(function, skip={*command.positional, *groups}, fail_untyped=True)
    for group in groups.values():
        # A field that several dataclasses share is one option.
        added += parser.add_class_arguments(group, None, skip=set(added), fail_untyped=True, instantiate=False)
    for parameter in command.positional:
        parser.add_argument(parameter, **_positional(hints[parameter], command.is_optional))
    options = parser.parse_args(parser.normalised(argv)).as_dict()
    arguments = {key: options[key] for key in [*added, *command.positional] if key in hints}
    for parameter, group in groups.items():
        arguments[parameter] = group(**{field.name: options[field.name] for field in fields(group)})
    function(**arguments)


def _positional(annotation: Any, is_optional: bool) -> dict[str, Any]:
    """The parser's arguments for a positional parameter; the word `null` is text, not None."""
    if get_origin(annotation) is list:
        return {"type": get_args(annotation)[0], "nargs": "*" if is_optional else "+"}
    if not is_optional:
        return {"type": annotation}
    (kind,) = (kind for kind in get_args(annotation) if kind is not type(None))
    return {"type": kind, "nargs": "?"}


def usage(first_word: str = "") -> str:
    """The list of all commands, or of those whose first word is given."""
    line = f"{program()} COMMAND"
    lines = [f"usage: {line} [options]   ({line} --help lists its options)", ""]
    rows = {**TRAINER_COMMANDS, **{name: command.summary for name, command in COMMANDS.items()}}
    chosen = {name: summary for name, summary in rows.items() if not first_word or name.split()[0] == first_word}
    lines += [f"  {name:<23}{summary}" for name, summary in chosen.items()]
    return "\n".join(lines if first_word else [*lines, "", f"configs and recipes: {CONFIGS}"])
