"""Recipes: named combinations of configs, one row each in `lightning_configs/recipes.csv`."""

import csv
from pathlib import Path

from embeddings.cli.errors import ConfigError

RECIPES = Path("lightning_configs/recipes.csv")


def read_recipes(path: Path = RECIPES) -> dict[str, dict[str, str]]:
    """The rows of the recipe table by name; an empty value means not run."""
    with open(path, encoding="utf-8", newline="") as file:
        return {row["recipe"]: row for row in csv.DictReader(file)}


def expand_recipe(argv: list[str], path: Path = RECIPES) -> list[str]:
    """Replace `--recipe NAME` by the `--config` options of that row; other arguments stay where they are.

    Raises:
        ConfigError: If the option has no name, no table is here, or no row has it.
    """
    if "--recipe" not in argv:
        return argv
    position = argv.index("--recipe")
    if position + 1 == len(argv):
        raise ConfigError("--recipe needs a name; lightning_configs/recipes.csv lists them")
    if not path.is_file():
        raise ConfigError(f"--recipe: {path} is not here; run the command in the project's folder, or give --config")
    name, recipes = argv[position + 1], read_recipes(path)
    if name not in recipes:
        raise ConfigError(f"there is no recipe {name!r}; {path} lists: {', '.join(recipes)}")
    configs = [word for config in recipes[name]["configs"].split() for word in ("--config", config)]
    return [*argv[:position], *configs, *argv[position + 2 :]]
