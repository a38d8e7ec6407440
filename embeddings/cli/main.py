"""The entry point: which command a line of arguments means."""

import sys
from collections.abc import Sequence

from embeddings.cli.commands import COMMANDS, run_command
from embeddings.cli.errors import ConfigError, run_guarded

TRAINER_COMMANDS = {"fit": "train a model from configs"}
# Lightning's other loops, which no module has, and what does their work here.
OTHER_LOOPS = {"validate": "evaluate", "test": "evaluate", "predict": "encode"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `cli.errors`)."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    return run_guarded(lambda: dispatch(argv))


def dispatch(argv: list[str]) -> None:
    """Run the command that `argv[0]` names.

    Raises:
        ConfigError: If there is no such command, or its arguments do not parse.
    """
    name = argv[0]
    if name in COMMANDS:
        run_command(name, argv[1:])
    elif name in TRAINER_COMMANDS:
        from embeddings.cli.app import run_trainer  # Lightning and torch load only for the commands that train

        run_trainer(argv)
    elif name in OTHER_LOOPS:
        raise ConfigError(f"{name}: no module has such a loop; train with fit, use its model with {OTHER_LOOPS[name]}")
    else:
        known = ", ".join([*TRAINER_COMMANDS, *COMMANDS])
        raise ConfigError(f"there is no command {name!r}; choose one of {known}")


def usage() -> str:
    """The list of commands."""
    lines = ["usage: python main.py COMMAND [options]   (python main.py COMMAND --help says more)", ""]
    rows = {**TRAINER_COMMANDS, **{name: command.summary for name, command in COMMANDS.items()}}
    return "\n".join([*lines, *(f"  {name:<12}{summary}" for name, summary in rows.items())])
