"""One closed list of classes, wherever a class path in a file becomes a class: no attack runs or imports anything."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import jsonargparse
import pytest
import yaml

from embeddings import NVEmbedModule
from embeddings.cli.main import main
from embeddings.common import UserError
from tests.helpers.checkpoints import RESUMABLE, save
from tests.reliability.hostile import CANARY, COMMAND, MODULE
from tests.reliability.test_hostile import WATCH
from tests.reliability.world import Place

# The value of an option whose type is a class, and the path that is refused.
ATTACKS: dict[str, tuple[Any, str]] = {
    "a module below a foreign one": ({"class_path": "os.system", "init_args": {"command": COMMAND}}, "os.system"),
    "a module below one of ours": (
        {"class_path": "embeddings.common.io.os.system", "init_args": {"command": COMMAND}},
        "embeddings.common.io.os.system",
    ),
    "a module below an allowed one": (
        {"class_path": "embeddings.callbacks.run_record.os.system", "init_args": {"command": COMMAND}},
        "posix.system",
    ),
    "a string": ("canary_module.Thing", "canary_module.Thing"),
    "a string below one of ours": ("embeddings.common.io.os.system", "embeddings.common.io.os.system"),
    "a class path alone": ({"class_path": "canary_module.Thing"}, "canary_module.Thing"),
    "a function of an allowed module": (
        {"class_path": "embeddings.data.store.write_table", "init_args": {"folder": CANARY, "rows": []}},
        "data.store.write_table",
    ),
    "a list of classes": ([{"class_path": "canary_module.Thing"}], ""),
}
OPTIONS = ("optimizer", "pooling", "loss")


def by_python(place: Place, run: dict[str, Any]) -> None:
    save({"run_config": run, "state_dict": {}}, place.folder / "last.ckpt")
    NVEmbedModule.load_from_checkpoint("last.ckpt")


def by_command(*words: str) -> None:
    """Run a command; its exit code must be 2."""
    assert main(words) == 2
    raise UserError


def by_export(place: Place, run: dict[str, Any]) -> None:
    save({"run_config": run, "state_dict": {}}, place.folder / "last.ckpt")
    by_command("export", "--checkpoint", "last.ckpt", "--output", "out")


def by_config(place: Place, run: dict[str, Any]) -> None:
    place.write("config.yaml", yaml.safe_dump(run))
    by_command("fit", "--config", "config.yaml")


def by_plan(place: Place, run: dict[str, Any]) -> None:
    place.write("config.yaml", yaml.safe_dump(run))
    by_command("plan", "--config", "config.yaml")


def by_sweep(place: Place, run: dict[str, Any]) -> None:
    model = run["model"]["init_args"]
    attacked = {f"model.init_args.{name}": [model.pop(name)] for name in OPTIONS if name in model}
    place.write("config.yaml", yaml.safe_dump(run))
    place.write("sweep.yaml", yaml.safe_dump({"configs": ["config.yaml"], "parameters": attacked}))
    by_command("sweep", "sweep.yaml", "--dry-run")


def attacked_run(place: Place, option: str, value: Any) -> dict[str, Any]:
    """The config of a run with this value of an option of the model."""
    place.config()
    place.write("canary_module.py", MODULE)
    place.patch.syspath_prepend(str(place.folder))
    run = deepcopy(place.world.config)
    run["model"]["init_args"] = {
        **{name: item for name, item in run["model"]["init_args"].items() if name not in OPTIONS},
        option: value,
    }
    return run


DOORS = (by_python, by_export, by_config, by_plan, by_sweep)
# Every attack at every door; the options take turns, so that each is attacked in every way and at every door.
CASES = [
    (name, door, OPTIONS[(row + column) % len(OPTIONS)])
    for row, name in enumerate(ATTACKS)
    for column, door in enumerate(DOORS)
]


@pytest.mark.parametrize(("name", "door", "option"), CASES)
def test_a_foreign_class_or_a_function_is_refused_before_it_is_imported(
    name: str, door: Callable[..., None], option: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    value, refused = ATTACKS[name]
    run = attacked_run(place, option, value)
    with WATCH.over(place.folder) as seen, pytest.raises(UserError) as caught:
        door(place, run)
    assert refused in f"{caught.value}{capsys.readouterr().err}"
    assert seen == []
    assert not (place.folder / CANARY).exists()


def test_a_checkpoint_to_resume_from_does_not_choose_classes(place: Place) -> None:
    run = attacked_run(place, "optimizer", ATTACKS["a module below one of ours"][0])
    place.write("config.yaml", yaml.safe_dump(place.world.config))
    save({**RESUMABLE, "run_config": run}, place.folder / "last.ckpt")
    with WATCH.over(place.folder) as seen:
        main(["fit", "--config", "config.yaml", "--ckpt_path", "last.ckpt"])
    assert seen == []
    assert not (place.folder / CANARY).exists()


def test_loading_a_checkpoint_leaves_the_parsers_of_a_script_as_they_are(place: Place) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--path", type=type)
    checkpoint = place.world.path("last.ckpt")
    NVEmbedModule.load_from_checkpoint(checkpoint)
    assert parser.parse_args(["--path=fractions.Fraction"]).path.__name__ == "Fraction"
