"""What is refused before torch is loaded; each of these lines the parser would refuse too, seconds later."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from embeddings.cli.app import run_trainer
from embeddings.cli.errors import ConfigError
from embeddings.cli.fit_line import KEYS, check_fit_line, check_one_method
from embeddings.common import InputError
from tests.helpers.runs import run_config, write_config

CONFIGS = Path(__file__).parents[2] / "lightning_configs"
# Sweeps, the jobs of other commands, and two tables of a paper are no configs of fit.
NO_RUNS = ("jobs", "sweeps", "nv_embed_tables", "nv_embed_evaluation")
FILES = [path for path in CONFIGS.rglob("*.yaml") if not {path.parent.name, path.stem} & {*NO_RUNS}]
WRONG = [
    ({"modle": {}}, [], "Option 'modle' is not accepted by fit; did you mean model\\? --help"),
    (
        {"trainer": {"max_stepz": 3}},
        [],
        "Option 'trainer.max_stepz' is not accepted by fit; did you mean trainer.max_steps",
    ),
    ({"trainer.max_stepz": 3}, [], "Option 'trainer.max_stepz' is not accepted by fit"),
    ({"model": {"init_args": {"temprature": 1}}}, [], "model: Option 'temprature' is not accepted by NVEmbedModule"),
    (
        {"model.init_args.loss.init_args.temprature": 1},
        [],
        "model.loss: Option 'temprature' is not accepted by",
    ),
    (
        {"trainer": {"callbacks+": [{"class_path": "embeddings.callbacks.RunHealth", "init_args": {"evry": 1}}]}},
        [],
        r"trainer.callbacks\+: Option 'evry' is not accepted by RunHealth",
    ),
    ({}, ["--trainer.max_stepz=3"], "unrecognized arguments: --trainer.max_stepz=3; did you mean --trainer.max_steps"),
    ({}, ["--data.bath_size", "3"], "unrecognized arguments: --data.bath_size; did you mean --data.batch_size"),
    ({}, ["--model.init_args.losss=null"], "unrecognized arguments: --model.init_args.losss=null"),
    ({}, ['--config={"model": {"init_args": {"losss": null}}}'], "model: Option 'losss' is not accepted by NVEmbed"),
    ({}, ["--modle", "x"], "unrecognized arguments: --modle; did you mean --model"),
    ({}, ['--model={"class_path": "embeddings.modules.CDEModule", "init_args": {"x": 1}}'], "accepted by CDEModule"),
]


def wrong_line(folder, changes, words):
    """A run that works, but for the changes: each is merged into the one config, or is an option."""

    def merge(into, value):
        for key, content in value.items():
            first, _, rest = key.partition(".")
            content = {rest: content} if rest else content
            into[first] = merge(into.get(first, {}), content) if isinstance(content, dict) else content
        return into

    return ["fit", "--config", write_config(folder, merge(run_config(folder), changes)), *words]


@pytest.mark.parametrize(("changes", "words", "says"), WRONG)
def test_an_unknown_name_is_refused_and_so_does_the_parser(changes, words, says, tmp_path):
    line = wrong_line(tmp_path, changes, words)
    with pytest.raises(ConfigError, match=says):
        check_fit_line(line)
    with pytest.raises(ConfigError):
        run_trainer(line)
    assert not (tmp_path / "run").exists()


def test_a_later_config_is_checked_by_the_class_that_an_earlier_one_chose(tmp_path):
    first = write_config(tmp_path, run_config(tmp_path), "first.yaml")

    def check(content, *options):
        check_fit_line(["fit", "--config", first, "--config", write_config(tmp_path, content), *options])

    check({"model": {"init_args": {"loss": {"init_args": {"temperature": 1}}}}})
    with pytest.raises(ConfigError, match="model: Option 'lossy' is not accepted by NVEmbedModule; did you mean loss"):
        check({"model": {"init_args": {"lossy": 1}}})
    with pytest.raises(ConfigError, match=r"model\.loss: Option 'widths' is not accepted by InfoNCE"):
        check({"model": {"init_args": {"loss": {"init_args": {"widths": 1}}}}})
    # Another class has other arguments, and other classes inside.
    other = '--model={"class_path": "embeddings.modules.CDEModule"}'
    check({}, other, "--model.context.size=3", '--model={"init_args": {"loss": {"init_args": {"widths": 1}}}}')
    check({}, "--model", "CDEModule", "--model.context.size=3")
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --model\.context\.size=3"):
        check({}, "--model.context.size=3")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_of_our_configs_is_refused(path):
    check_fit_line(["fit", "--config", str(path)])


def test_all_that_the_parser_takes_is_let_through(tmp_path, capsys):
    assert len(FILES) >= 30
    config = run_config(tmp_path) | {"ckpt_path": None, "weights_only": None}
    line = ["fit", "--config", write_config(tmp_path, config), "--trainer.max_steps=1", "--print_config"]
    check_fit_line(line)
    with pytest.raises(SystemExit):
        run_trainer(line)
    whole = yaml.safe_load(capsys.readouterr().out)
    assert sorted(whole) == sorted(KEYS)
    check_fit_line(["fit", "--config", write_config(tmp_path, whole, "whole.yaml")])
    options = ["--trainer.callbacks+=[]", "--trainer", "x.yaml", "--model.help", "--data.batch_size=4", "--help"]
    check_fit_line(["fit", "--seed_everything", "3", *options])


def test_two_method_configs_are_refused_by_name(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"model:\n  class_path: {name}\n")
    (tmp_path / "scale.yaml").write_text("trainer:\n  devices: 2\n")
    line = ["fit", "--config", str(tmp_path / "one.yaml"), "--config", str(tmp_path / "scale.yaml")]
    check_one_method(line)
    with pytest.raises(ConfigError, match=r"one\.yaml and .*two\.yaml both choose"):
        check_one_method([*line, "--config", str(tmp_path / "two.yaml")])


def test_a_config_that_is_no_yaml_names_the_file(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [1,\n")
    with pytest.raises(InputError, match=r"bad\.yaml: not a YAML file"):
        check_one_method(["fit", "--config", str(tmp_path / "bad.yaml")])


def test_torch_is_not_loaded_for_it(tmp_path):
    paths = [str(tmp_path / f"{number}.yaml") for number in range(3)]
    lines = [["fit", "--config", str(tmp_path / "none.yaml")], ["fit", "--recipe", "none"]]
    lines += [["fit", "--config", path] for path in paths]
    Path(paths[0]).write_text("a: [1,\n")
    Path(paths[1]).write_text("trainer: {max_stepz: 3}\n")
    Path(paths[2]).write_text("model: {class_path: embeddings.modules.NVEmbedModule, init_args: {temprature: 3}}\n")
    code = "import sys; from embeddings.cli.main import main; "
    code += f"print([main(line) for line in {lines!r}], 'torch' in sys.modules, 'lightning' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[2, 2, 2, 2, 2] False False\n"
    assert ended.stderr.count("\n") == 5
