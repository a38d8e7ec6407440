"""Reading and checking configs: plain YAML, allowed classes, one method, and no dropped callbacks."""

from pathlib import Path

import pytest
import yaml

from embeddings.cli.errors import ConfigError
from embeddings.cli.fit import Checked, CheckingCLI, check_arguments, run_trainer
from embeddings.cli.parser import (
    check_configs,
    expand_recipe,
    located,
    parse_yaml,
    read_config,
    read_configs,
    read_recipes,
    unfolded,
)
from embeddings.common import InputError, UserError
from tests.helpers.refusals import refused
from tests.helpers.runs import run_config, write_config

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "lightning_configs"


def checked(*paths, words=()):
    """The configs of a run, checked."""
    check_configs([config for path in paths for config in read_configs(str(path))], words)


def test_yaml_is_read_with_numbers_in_scientific_notation_and_dates_as_text():
    text = "a: &a {x: 1e-3, y: [no, 07, ~]}\nb:\n  <<: *a\n  x: 2\n'a b': 2020-01-01\n"
    inner = {"x": 1e-3, "y": [False, 7, None]}
    assert parse_yaml(text, "x") == {"a": inner, "b": {**inner, "x": 2}, "a b": "2020-01-01"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1,\n", "not a YAML file: did not find expected node content, line 2; correct the line"),
        ("a: !!python/object/apply:os.system [true]\n", "not a YAML file: could not determine a constructor"),
        ("a: " + "[" * 5000 + "]" * 5000, "not a YAML file: "),
        ("a: &a [*a]\n", "Circular reference"),
        ("a: !!bool x\n", "not a YAML file: 'x'"),
        ("a: !!binary aGVsbG8=\n", "not a YAML file: "),
        ("a: 1\nb: 2\na: 3\n", "has the key a a second time in line 3; merge the two"),
        ("- a: [{b: 1, c: {b: 2}},\n  {b: 1, b: 2}]", "has the key b a second time in line 2; merge the two"),
    ],
)
def test_a_config_that_is_not_plain_yaml_is_refused_in_one_line(text, says):
    assert says in refused(InputError, r"^x\.yaml: ", parse_yaml, text, "x.yaml")


def test_a_config_may_be_text_that_is_too_long_for_a_name():
    assert read_config(f"{{data: {'x' * 5000}}}") == {"data": "x" * 5000}


def test_dotted_keys_of_one_config_are_merged_at_every_depth():
    dotted = {"a": {"b.c": 1, "b": {"d": [2]}}, "a.b.e.f": 3, "a.b.e.g": {"h": 4}, "a.i": 5}
    assert unfolded(dotted) == {"a": {"b": {"c": 1, "d": [2], "e": {"f": 3, "g": {"h": 4}}}, "i": 5}}
    assert unfolded({"a.b": 1, "a": None}) == {"a": None}


def test_a_recipe_expands_to_its_configs_in_place():
    row = read_recipes()["quickstart"]
    argv = expand_recipe(["fit", "--recipe", "quickstart", "--trainer.max_epochs", "2"])
    configs = [word for path in row["configs"].split() for word in ("--config", path)]
    assert argv == ["fit", *configs, "--trainer.max_epochs", "2"]
    refused(ConfigError, r"there is no recipe 'nope'.*quickstart", expand_recipe, ["fit", "--recipe", "nope"])
    with pytest.raises(ConfigError, match=r"'mgh_h100'; did you mean mgh_h100x1 or .*\? .*recipes\.csv lists all"):
        expand_recipe(["fit", "--recipe", "mgh_h100"])


def test_the_librarys_configs_are_found_from_any_folder_and_a_file_that_is_here_comes_first(tmp_path):
    name = "lightning_configs/base.yaml"
    assert Path(located(name)) == CONFIGS / "base.yaml"
    assert located(f"./{name}") == located(name)
    assert read_configs(name) == [(located(name), yaml.safe_load((CONFIGS / "base.yaml").read_text()))]
    assert len(read_recipes()) > 20
    for other in ("base.yaml", "lightning_configs/none.yaml", str(CONFIGS / "base.yaml"), "trainer: {max_steps: 1}"):
        assert located(other) == other
    (tmp_path / "lightning_configs").mkdir()
    (tmp_path / name).write_text("seed_everything: 7\n")
    assert located(name) == name
    assert read_configs(name) == [(name, {"seed_everything": 7})]


def test_two_method_configs_are_refused_by_name(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    texts = {
        "one": "model.class_path: NVEmbedModule\n",
        "two": "model: {class_path: CDEModule}\n",
        "scale": "trainer: {devices: 2}\n",
    }
    for name, text in {**texts, "sub/names": "config: ../two.yaml\n"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    one, scale = tmp_path / "one.yaml", tmp_path / "scale.yaml"
    for second in ("two", "sub/names"):
        checked(scale, tmp_path / f"{second}.yaml")
        says = r"one\.yaml and .*two\.yaml both choose"
        refused(ConfigError, says, checked, one, tmp_path / f"{second}.yaml")
        refused(ConfigError, says, check_arguments, ["fit", f"-c{one}", f"--config={tmp_path}/{second}.yaml"])


def test_a_config_overrides_the_one_that_it_includes(tmp_path):
    whole = write_config(tmp_path, run_config(tmp_path), "whole.yaml")
    over = write_config(tmp_path, {"config": "whole.yaml", "trainer": {"max_steps": 77}}, "over.yaml")
    assert [path for path, _ in read_configs(over)] == [whole, over]
    with pytest.raises(Checked) as stop:
        run_trainer(["fit", "--config", over], CheckingCLI)
    config = stop.value.args[1]
    assert (config.trainer.max_steps, config.trainer.accelerator) == (77, "cpu")
    (tmp_path / "b.yaml").write_text("config: a.yaml")
    itself, several = "a.yaml: includes itself", "config: must be one file; give more files"
    for wrong, says in (("[b.yaml]", several), ("a.yaml", itself), ("b.yaml", itself)):
        (tmp_path / "a.yaml").write_text(f"config: {wrong}")
        refused(InputError, says, read_configs, "a.yaml")


@pytest.mark.parametrize("part", ["model", "data"])
def test_a_config_with_arguments_of_a_class_that_a_later_one_chooses_is_refused(part, tmp_path):
    whole = write_config(tmp_path, {part: {"class_path": "one", "init_args": {"a": 1}}}, "whole.yaml")
    over = write_config(tmp_path, {part: {"init_args": {"a": 2}}, "seed_everything": 1}, "over.yaml")
    checked(whole, over)
    says = f"{over}: sets {part}.init_args before any config chooses {part}.class_path; give the config that chooses it"
    assert refused(ConfigError, "sets", checked, over, whole).startswith(says)
    for chosen in (f"--{part}=one", f"--{part}.class_path=one"):
        checked(over, words=[chosen])


def of_callbacks(folder, name, **trainer):
    return write_config(folder, {"trainer": trainer}, name)


def named(*names):
    return [{"class_path": f"lightning.pytorch.callbacks.{name}"} for name in names]


def test_a_config_that_drops_earlier_callbacks_is_refused(tmp_path):
    base = of_callbacks(tmp_path, "base.yaml", callbacks=named("ModelCheckpoint", "ModelSummary"))
    more = of_callbacks(tmp_path, "more.yaml", **{"callbacks+": named("LearningRateMonitor")})
    mine = of_callbacks(tmp_path, "mine.yaml", callbacks=named("ModelSummary"))
    assert refused(ConfigError, "drops", checked, base, more, mine) == (
        f"{mine}: trainer.callbacks drops ModelCheckpoint, LearningRateMonitor of an earlier config; "
        "write callbacks+: to add to them, or callbacks: [] above callbacks+: to drop them"
    )
    dotted = write_config(tmp_path, {"trainer.callbacks": named("ModelSummary")}, "dotted.yaml")
    refused(ConfigError, "drops ModelCheckpoint of", checked, base, dotted)


def test_callbacks_are_dropped_on_request_and_added_by_their_own_key(tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = named("ModelCheckpoint")
    base = write_config(tmp_path, config, "base.yaml")
    new = tmp_path / "new.yaml"
    new.write_text("trainer:\n  callbacks: []\n  callbacks+:\n    - class_path: ModelSummary\n")
    more = of_callbacks(tmp_path, "more.yaml", **{"callbacks+": named("LearningRateMonitor")})
    whole = of_callbacks(tmp_path, "whole.yaml", callbacks=named("ModelCheckpoint", "ModelSummary"))
    for second, kept in (
        (str(new), ["ModelSummary"]),
        (more, ["ModelCheckpoint", "LearningRateMonitor"]),
        (whole, ["ModelCheckpoint", "ModelSummary"]),
    ):
        with pytest.raises(Checked) as stop:
            run_trainer(["fit", "--config", base, "--config", second], CheckingCLI)
        callbacks = stop.value.args[1].trainer.callbacks
        assert [each.class_path.rpartition(".")[2] for each in callbacks] == kept


def test_an_option_may_not_name_a_class_outside_the_allow_list_nor_a_callback_a_function(tmp_path):
    config = run_config(tmp_path)
    words = ["fit", "--config", write_config(tmp_path, config), "--model.optimizer", "os.system"]
    refused(ConfigError, r"may not name (os|posix)\.system; name a class of embeddings", check_arguments, words)
    hook = {"on_fit_start": "embeddings.callbacks.RunHealth.setup"}
    config["trainer"]["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": hook}]
    words = ["fit", "--config", write_config(tmp_path, config)]
    refused(UserError, "may not name the function .*; name a class", check_arguments, words)


def test_a_trusted_package_is_accepted_and_the_error_says_how_to_trust_it(tmp_path, monkeypatch):
    (tmp_path / "foreign.py").write_text("import lightning as L\nclass Watch(L.Callback):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [{"class_path": "foreign.Watch"}]
    line = ["fit", "--config", write_config(tmp_path, config)]
    assert refused(ConfigError, "may not name", check_arguments, line) == (
        "trainer.callbacks: a config may not name foreign.Watch; name a class of embeddings, "
        "lightning, torch.nn or torch.optim, or set EMBED_IMPORTS=foreign to trust all of that package"
    )
    monkeypatch.setenv("EMBED_IMPORTS", "foreign")
    check_arguments(line)
