from pathlib import Path

import pytest

from embeddings.cli.errors import ConfigError
from embeddings.cli.recipes import expand_recipe, read_recipes

TABLE = Path("lightning_configs/recipes.csv")


def test_a_recipe_expands_to_its_configs_in_place():
    row = read_recipes(TABLE)["quickstart"]
    argv = expand_recipe(["fit", "--recipe", "quickstart", "--trainer.max_epochs", "2"], TABLE)
    configs = [word for path in row["configs"].split() for word in ("--config", path)]
    assert argv == ["fit", *configs, "--trainer.max_epochs", "2"]


def test_a_line_without_a_recipe_is_untouched():
    assert expand_recipe(["fit", "--config", "a.yaml"], TABLE) == ["fit", "--config", "a.yaml"]


def test_every_config_of_every_recipe_is_there():
    recipes = read_recipes(TABLE)
    assert len(recipes) >= 3
    assert [path for row in recipes.values() for path in row["configs"].split() if not Path(path).is_file()] == []


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"there is no recipe 'nope'.*quickstart"):
        expand_recipe(["fit", "--recipe", "nope"], TABLE)


def test_a_missing_name_is_said():
    with pytest.raises(ConfigError, match="needs a name"):
        expand_recipe(["fit", "--recipe"], TABLE)


def test_a_table_that_is_not_here_is_said(tmp_path):
    with pytest.raises(ConfigError, match="run the command in the project's folder"):
        expand_recipe(["fit", "--recipe", "quickstart"], tmp_path / "recipes.csv")
