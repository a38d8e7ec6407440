"""A config calls nothing but the classes of a closed list."""

import os
import subprocess
import sys

import pytest

from embeddings.cli.errors import ConfigError
from embeddings.cli.fit import check_arguments, run_trainer
from embeddings.common import UserError
from tests.helpers.runs import run_config, write_config

PLACES = {
    "optimizer": ("model", "init_args", "optimizer"),
    "pooling": ("model", "init_args", "pooling"),
    "loss": ("model", "init_args", "loss"),
    "model": ("model",),
    "data": ("data",),
    "sampler": ("data", "init_args", "sampler"),
    "logger": ("trainer", "logger"),
    "strategy": ("trainer", "strategy"),
    "callbacks": ("trainer", "callbacks"),
}
HOSTILE = {
    "os.system": {"command": "touch CANARY"},
    "subprocess.Popen": {"args": "touch CANARY", "shell": True},
    "builtins.eval": {"source": "open('CANARY', 'w')"},
    "importlib.import_module": {"name": "antigravity"},
    "torch.hub.load": {"repo_or_dir": "x/y", "model": "z"},
    "torch.load": {"f": "CANARY"},
    "embeddings.data.store.os.system": {"command": "touch CANARY"},
    "embeddings.common.errors.require": {"library": "antigravity", "extra": "x"},
    "lightning.pytorch.cli.instantiate_class": {"args": [], "init": {"class_path": "os.system"}},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", HOSTILE)
def test_no_other_class_is_called(path, place, tmp_path):
    config = run_config(tmp_path)
    *parents, last = PLACES[place]
    target = config
    for name in parents:
        target = target[name]
    arguments = {
        name: value.replace("CANARY", str(tmp_path / "canary")) if isinstance(value, str) else value
        for name, value in HOSTILE[path].items()
    }
    value = {"class_path": path, "init_args": arguments}
    target[last] = [value] if place == "callbacks" else value
    before = sorted(tmp_path.rglob("*"))
    file = write_config(tmp_path, config)
    with pytest.raises(ConfigError) as caught:
        run_trainer(["fit", "--config", file])
    assert "antigravity" not in sys.modules
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "config.yaml"])
    assert "may not name" in str(caught.value)


@pytest.mark.parametrize("option", ["--model.optimizer", "--model.pooling", "--data.sampler"])
def test_nor_by_a_word_of_the_command_line(option, tmp_path):
    file = write_config(tmp_path, run_config(tmp_path))
    with pytest.raises(ConfigError, match=r"a config may not name (os|posix)\.system; name a class of embeddings"):
        run_trainer(["fit", "--config", file, option, "os.system"])


@pytest.mark.parametrize(
    "path", ["embeddings.common.io.remove_abandoned", "torch.nn.init.zeros_", "embeddings.callbacks.RunHealth.setup"]
)
def test_a_callbacks_hook_names_no_function(path, tmp_path, monkeypatch):
    config = run_config(tmp_path)
    hook = {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"on_fit_start": path}}
    config["trainer"]["callbacks"] = [hook]
    file = write_config(tmp_path, config)
    with pytest.raises(UserError, match=r"a config may not name the function .*; name a class"):
        run_trainer(["fit", "--config", file])


def test_a_function_that_is_a_classs_own_default_is_none_that_a_config_names(tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.BackboneFinetuning"}]
    check_arguments(["fit", "--config", write_config(tmp_path, config)])


def test_nor_by_a_tag_of_yaml(tmp_path):
    file = write_config(tmp_path, run_config(tmp_path))
    text = (
        tmp_path / "config.yaml"
    ).read_text() + f'ckpt_path: !!python/object/apply:os.system ["touch {tmp_path}/x"]\n'
    (tmp_path / "config.yaml").write_text(text)
    command = [sys.executable, "main.py", "fit", "--config", file]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, (tmp_path / "x").exists()) == (2, False)
    assert "Traceback" not in ended.stderr


def test_the_line_says_how_to_trust_a_package_and_ends_with_code_2(tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [{"class_path": "tests.helpers.poison.PoisonLoss", "init_args": {}}]
    command = [sys.executable, "main.py", "fit", "--config", write_config(tmp_path, config)]
    environment = {name: value for name, value in os.environ.items() if name != "EMBED_IMPORTS"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1] == (
        "error: trainer.callbacks: a config may not name tests.helpers.poison.PoisonLoss; name a class of embeddings, "
        "lightning, torch.nn or torch.optim, or set EMBED_IMPORTS=tests to trust all of that package"
    )


def test_a_package_that_the_user_names_is_trusted(tmp_path):
    """The suite itself runs with `EMBED_IMPORTS=tests`."""
    config = run_config(tmp_path)
    config["trainer"] |= {"max_steps": 2}
    config["trainer"]["callbacks"] = [
        {"class_path": "tests.helpers.poison.PoisonLoss", "init_args": {"rank": 1, "batch": 0}}
    ]
    assert run_trainer(["fit", "--config", write_config(tmp_path, config)]).trainer.global_step == 2
