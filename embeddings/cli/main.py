"""The entry point: which command a line of arguments means."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from embeddings.cli.commands import COMMANDS, run_command
from embeddings.cli.errors import ConfigError, run_guarded
from embeddings.cli.fit_line import check_fit_line
from embeddings.cli.recipes import expand_recipe
from embeddings.common.log import shown_on_stderr
from embeddings.common.slurm import check_variables
from embeddings.common.stopping import answering_stops

TRAINER_COMMANDS = {"fit": "train a model from configs"}
# Lightning's other loops, which no module has, and what does their work here.
OTHER_LOOPS = {"validate": "evaluate", "test": "evaluate", "predict": "encode"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `cli.errors`)."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    with shown_on_stderr():
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
        with answering_stops():
            from embeddings.cli.app import run_trainer  # Lightning and torch load only for the commands that train

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
