"""Runs that are killed right after a checkpoint or after their last step, and resumed: they end like a whole run."""

import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging

from embeddings.cli.main import main
from tests.callbacks.preempted_runs import fit_words, preempted_config
from tests.helpers.forks import in_a_child
from tests.helpers.runs import component, logged_rows, write_retrieval_folder
from tests.modules.language_runs import language_config

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory",
    "ignore:You're using the WeightAveraging callback with a model that overrides",
)

KEEP = component("ModelCheckpoint", every_n_train_steps=1, save_last=True, save_top_k=0)
NOTES = "tests.callbacks.preempted_runs.Notes"


class KilledAfterSave(Callback):
    """Kills this process when its `number`-th checkpoint is complete; 0 for none."""

    def __init__(self, number: int) -> None:
        self.left = number

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        writer: Any = trainer.strategy.checkpoint_io
        save = writer.save_checkpoint

        def counted(*arguments: Any, **options: Any) -> None:
            save(*arguments, **options)
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)

        writer.save_checkpoint = counted


class KilledIn(Callback):
    """Kills this process in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


class FailsIn(Callback):
    """Raises an error at the `number`-th call of a hook, in a run from the beginning."""

    def __init__(self, hook: str, number: int) -> None:
        self.left = number
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Trainer, *_: Any) -> None:
        self.left -= trainer.ckpt_path is None
        if not self.left:
            raise RuntimeError("a failure")


class EpochAverage(WeightAveraging):
    """Averages the weights at the end of each epoch."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


def stopping(**options: Any) -> dict[str, Any]:
    """An `EarlyStopping` that stops at the first score that is not better than all before."""
    return component("EarlyStopping", monitor="val/ndcg_at_10", mode="max", patience=1, min_delta=2.0, **options)


# Runs of four steps an epoch. Each has the trainer's options and its callbacks.
RUNS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    # Scores at steps 3 and 6, read at the ends of epochs, so after steps 4 and 8.
    "scored every three steps": (
        {"max_epochs": 4, "max_steps": -1},
        [component("RetrievalEvaluation", folder="FOLDER", every_n_steps=3), stopping(), KEEP],
    ),
    "scored after each epoch": (
        {"max_epochs": 4, "max_steps": -1},
        [component("RetrievalEvaluation", folder="FOLDER", every_n_steps=None), stopping(), KEEP],
    ),
    "scored after each epoch, with a maximum of steps": (
        {"max_steps": 11},
        [component("RetrievalEvaluation", folder="FOLDER", every_n_steps=None), stopping(), KEEP],
    ),
    "saved after each epoch": (
        {"max_epochs": 3, "max_steps": -1},
        [
            component("RetrievalEvaluation", folder="FOLDER", every_n_steps=None),
            component("ModelCheckpoint", every_n_epochs=1, save_last=True),
            component("ModelCheckpoint", monitor="val/ndcg_at_10", mode="max", filename="best-{step}"),
        ],
    ),
    "saved after each epoch, until it stops": (
        {"max_epochs": 4, "max_steps": -1},
        [
            component("RetrievalEvaluation", folder="FOLDER", every_n_steps=None),
            stopping(),
            component("ModelCheckpoint", every_n_epochs=1, save_last=True),
        ],
    ),
    "validated every three steps": (
        {"max_steps": 11, "val_check_interval": 3, "check_val_every_n_epoch": None},
        [
            component("EarlyStopping", monitor="val/loss", patience=1, min_delta=99.0),
            component("ModelCheckpoint", monitor="val/loss", filename="best-{step}"),
            KEEP,
        ],
    ),
    # Two checkpoints of three remain at each time, and the last one.
    "best two": (
        {"max_steps": 5},
        [
            component("RetrievalEvaluation", folder="FOLDER", every_n_steps=1),
            component("ModelCheckpoint", monitor="val/ndcg_at_10", every_n_train_steps=1, save_top_k=2, save_last=True),
        ],
    ),
    "saved after each epoch and after a time": (
        {"max_epochs": 2, "max_steps": -1},
        [
            component("ModelCheckpoint", every_n_epochs=1, save_last=True),
            component("ModelCheckpoint", train_time_interval="0:00:00"),
        ],
    ),
    "saved after each epoch, with a maximum of steps": (
        {"max_steps": 10},
        [component("ModelCheckpoint", every_n_epochs=1, save_last=True)],
    ),
    "failed": (
        {"max_epochs": 2, "max_steps": -1},
        [component("ModelCheckpoint", every_n_train_steps=8, save_on_exception=True, filename="last")],
    ),
    "averaged": ({"max_steps": 6}, [component("EMAWeightAveraging", decay=0.5), KEEP]),
    "averaged after each epoch": (
        {"max_epochs": 3, "max_steps": -1},
        [component("tests.callbacks.test_loops.EpochAverage"), KEEP],
    ),
}


def run_in(folder: Path, name: str) -> dict[str, Any]:
    """The config of a run in a new folder."""
    folder.mkdir()
    trainer, callbacks = RUNS[name]
    config = language_config(folder, "mlm") if name.startswith("validated") else preempted_config(folder)
    data = str(write_retrieval_folder(folder / "eval"))
    placed = [{**one, "init_args": {**one["init_args"]}} for one in callbacks]
    for callback in placed:
        if "folder" in callback["init_args"]:
            callback["init_args"]["folder"] = data
    config["trainer"] |= {**trainer, "callbacks": [component(NOTES, folder=str(folder)), *placed]}
    return config


def status_of(folder: Path, config: dict[str, Any], *added: dict[str, Any]) -> int:
    """Train with more callbacks in a child; returns its exit status, negative for a signal."""
    trainer = config["trainer"] | {"callbacks": [*added, *config["trainer"]["callbacks"]]}
    return in_a_child(lambda: os._exit(main(fit_words(folder, config | {"trainer": trainer}))))


def losses_of(folder: Path) -> list[tuple[str, str]]:
    return [(row["step"], row["train/loss"]) for row in logged_rows(folder, "train/loss")]


def outcome(folder: Path) -> dict[str, Any]:
    """What a run leaves: weights, steps, scores by step, and the names of its checkpoints."""
    scores = [(row["step"], row[name]) for name in ("val/ndcg_at_10", "val/loss") for row in logged_rows(folder, name)]
    return {
        "weights": torch.load(folder / "final.pt", weights_only=True),
        "steps": max(int(line) for line in (folder / "steps0.txt").read_text().split()),
        "scores": scores,
        "files": sorted(path.name for path in folder.rglob("*.ckpt")),
    }


def unlike(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    weights, others = found["weights"], expected["weights"]
    different = [name for name in others if not torch.equal(weights[name], others[name])]
    return different + [name for name in ("steps", "scores", "files") if found[name] != expected[name]]


def whole_run(folder: Path, name: str) -> dict[str, Any]:
    """The outcome of an uninterrupted run."""
    assert status_of(folder, run_in(folder, name)) == 0
    return outcome(folder)


def resumed_run(folder: Path, name: str, killer: dict[str, Any]) -> dict[str, Any] | None:
    """The outcome of a run that is killed and resumed; None if it ends before the kill."""
    config = run_in(folder, name)
    status = status_of(folder, config, killer)
    if status == 0:
        return None
    assert status == -signal.SIGKILL
    assert status_of(folder, config) == 0
    return outcome(folder)


def after_save(number: int) -> dict[str, Any]:
    return component("tests.callbacks.test_loops.KilledAfterSave", number=number)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in RUNS if name != "failed"])  # it writes one checkpoint
def test_a_run_that_is_killed_after_any_checkpoint_ends_like_a_whole_run(name: str, tmp_path: Path) -> None:
    expected, wrong = whole_run(tmp_path / "whole", name), {}
    for number in count(1):
        found = resumed_run(tmp_path / str(number), name, after_save(number))
        if found is None:
            break
        wrong[number] = unlike(found, expected)
    assert len(wrong) > 2
    assert {number: found for number, found in wrong.items() if found} == {}


def test_what_follows_the_step_of_a_checkpoint_is_done_after_a_kill(tmp_path: Path) -> None:
    """The validation loop after step 6, which is due after the checkpoint, ends the run."""
    name = "validated every three steps"
    expected = whole_run(tmp_path / "whole", name)
    found = resumed_run(tmp_path / "killed", name, after_save(7))
    assert found is not None
    assert unlike(found, expected) == []


@pytest.mark.parametrize(("hook", "number"), [("on_train_epoch_start", 2), ("on_before_optimizer_step", 3)])
def test_a_run_that_an_error_ends_is_resumed_with_all_of_its_steps(hook: str, number: int, tmp_path: Path) -> None:
    name = "failed"
    expected = whole_run(tmp_path / "whole", name)
    config = run_in(tmp_path / "failed", name)
    failure = component("tests.callbacks.test_loops.FailsIn", hook=hook, number=number)
    assert status_of(tmp_path / "failed", config, failure) != 0
    assert status_of(tmp_path / "failed", config) == 0
    # The file that the error left remains.
    assert set(unlike(outcome(tmp_path / "failed"), expected)) <= {"files"}
    assert losses_of(tmp_path / "failed") == losses_of(tmp_path / "whole")


@pytest.mark.parametrize("hook", ["on_train_end", pytest.param("on_fit_end", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_after_its_last_step_only_ends(hook: str, tmp_path: Path) -> None:
    name = "saved after each epoch, until it stops"
    expected = whole_run(tmp_path / "whole", name)
    found = resumed_run(tmp_path / "killed", name, component("tests.callbacks.test_loops.KilledIn", hook=hook))
    assert found is not None
    assert expected["steps"] == 8
    assert unlike(found, expected) == []


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(
            [
                ({"max_epochs": 2, "max_steps": -1}, 8),
                ({"max_epochs": 1, "max_steps": -1}, 8),
                ({"max_epochs": -1, "max_steps": 5}, 8),
            ],
            marks=pytest.mark.slow,
        ),
        [({"max_steps": 6}, 6), ({"max_steps": 3}, 6), ({"max_steps": 7}, 7)],
    ],
)
def test_a_finished_run_trains_only_up_to_a_higher_limit(
    limits: list[tuple[dict[str, Any], int]], tmp_path: Path
) -> None:
    config = preempted_config(tmp_path)
    config["trainer"]["callbacks"] = [component(NOTES, folder=str(tmp_path)), KEEP]
    for limit, steps in limits:
        config["trainer"] |= limit
        assert main(fit_words(tmp_path, config)) == 0
        assert (tmp_path / "steps0.txt").read_text().split()[-1] == str(steps)
        (tmp_path / "final.pt").unlink()


@pytest.mark.parametrize("within", [False, True])
def test_a_run_whose_time_is_over_says_so_and_continues_only_if_it_gets_more(
    within: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = preempted_config(tmp_path)
    schedule = {"warmup_steps": 0, "decay": "constant", "within_max_time": within}
    config["model"]["init_args"] |= {"schedule": schedule, "optimizer": component("torch.optim.SGD", lr=0.5)}
    config["trainer"]["callbacks"] = [component(NOTES, folder=str(tmp_path), seconds=0.4), KEEP]
    config["trainer"]["max_time"] = {"seconds": 1}
    done = tmp_path / "steps0.txt"
    assert main(fit_words(tmp_path, config)) == 0
    num_steps = len(done.read_text().split())
    assert 0 < num_steps < 6
    ended = f"(max_time) ended training at step {num_steps} of 6, at a learning rate of "
    _, found, rest = capfd.readouterr().err.partition(ended)
    rate = float(rest.split(":")[0])
    assert found
    # Two steps of 0.4 s leave at most a fifth of the time.
    assert (rate <= 0.1) if within else (rate == 0.5)
    assert main(fit_words(tmp_path, config)) == 0
    assert len(done.read_text().split()) == num_steps
    config["trainer"]["max_time"] = {"hours": 1}
    assert main(fit_words(tmp_path, config)) == 0
    assert done.read_text().split() == [str(step) for step in range(1, 7)]
