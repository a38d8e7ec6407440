"""The commands that train: LightningCLI with our parser, our checks and our record of a run."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from embeddings.callbacks.run_record import RunRecord
from embeddings.cli.errors import ConfigError, reason, with_way_out
from embeddings.cli.recipes import expand_recipe

UNION_ERROR = "Does not validate against any of the Union subtypes"


class OneLineParser(LightningArgumentParser):
    """Lightning's parser with errors that are one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message for the command line to print; parsers nested inside types keep the library's exception."""
        if not self.exit_on_error:
            super().error(message, ex)
        raise ConfigError(with_way_out(message, re.findall(r"--[\w.]+", self.format_help()))) from ex


class TrainerCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` over any of our modules, with configs that merge left to right."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments given, whatever `sys.argv` holds."""
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """Make the module, the data module and the trainer.

        Raises:
            ConfigError: If an option is impossible and the parser put the reason inside an error of its own.
        """
        try:
            super().instantiate_classes()
        except ValueError as error:
            if UNION_ERROR not in str(error):
                raise
            raise ConfigError(reason(str(error))) from error


def run_trainer(argv: Sequence[str]) -> TrainerCLI:
    """Run one of LightningCLI's commands.

    Args:
        argv: The command and its options; `--recipe NAME` stands for the configs that `recipes.csv` lists.

    Raises:
        ConfigError: If the arguments do not parse, or two configs choose a method.
    """
    expanded = expand_recipe(list(argv))
    if expanded != list(argv):
        print("python main.py " + " ".join(expanded), file=sys.stderr)
    check_one_method(expanded)
    return TrainerCLI(
        model_class=L.LightningModule,
        datamodule_class=L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=RunRecord,
        save_config_kwargs={"overwrite": True, "command": ["main.py", *expanded]},
        seed_everything_default=0,
        parser_class=OneLineParser,
        auto_configure_optimizers=False,
        args=expanded,
    )


def check_one_method(argv: Sequence[str]) -> None:
    """Refuse two configs that each choose a method: the second would inherit the first's nested arguments in silence.

    Raises:
        ConfigError: Naming both files.
    """
    chosen = [path for path in config_paths(argv) if _chooses_method(path)]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} both choose model.class_path; give one method config a run")


def config_paths(argv: Sequence[str]) -> list[str]:
    """The files that `--config` (or `-c`) names, in order."""
    paths = []
    for position, word in enumerate(argv):
        if word in ("--config", "-c") and position + 1 < len(argv):
            paths.append(argv[position + 1])
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
    return paths


def _chooses_method(path: str) -> bool:
    if not Path(path).is_file():
        raise ConfigError(
            f"--config {path}: no such file; lightning_configs/ holds the ones that come with the library"
        )
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not a YAML file: {error}; mend the line") from error
    model = content.get("model") if isinstance(content, dict) else None
    return isinstance(model, dict) and "class_path" in model
