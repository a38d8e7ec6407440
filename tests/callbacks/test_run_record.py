"""A run's folder, metrics, record and lock, and the device settings."""

import errno
import fcntl
import json
import subprocess
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml
from lightning import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment

from embeddings.callbacks import DurableCheckpointIO, run_record
from embeddings.callbacks.run_record import LOCK_FILE, ResumedRun, RunLogger, RunRecord, keep_metrics, run_logger
from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.common import PreemptedError
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.common.own_folder import replaced_folder
from embeddings.common.process import cpu_name
from embeddings.figures import draw_curves
from embeddings.figures.report import write_report
from embeddings.figures.run_facts import RunFacts, read_curves
from tests.helpers.processes import Command
from tests.helpers.runs import component, fit, logged_rows, run_config, write_config


def test_a_record_contains_command_versions_hardware_sizes_and_the_end_of_the_run(tmp_path):
    path = write_config(tmp_path, run_config(tmp_path))
    cli = run_trainer(["fit", "--config", path, "--trainer.max_steps", "2"])
    run = Path(cli.trainer.log_dir)
    record = json.loads((run / "run.json").read_text())
    assert record["command"] == f"python main.py fit --config {path} --trainer.max_steps 2"
    assert record["versions"]["torch"] == torch.__version__
    total = sum(weight.numel() for weight in cli.model.parameters())
    assert record["parameters"] == {"total": total, "active": total, "trained": total}
    assert record["source_rows"] == {"pairs": 64}
    assert record["method"].startswith("NV-Embed (Lee")
    assert record["hardware"] == cpu_name()
    assert {name: record["end"][name] for name in ("step", "how", "why")} == {"step": 2, "how": "finished", "why": ""}
    assert datetime.fromisoformat(record["started"]) <= datetime.fromisoformat(record["end"]["time"])
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 2
    (checkpoint,) = run.rglob("*.ckpt")
    state = read_checkpoint(checkpoint)
    assert state["run_config"]["model"]["class_path"] == "embeddings.modules.NVEmbedModule"
    assert state["run_config"]["trainer"]["max_steps"] == 2


def test_the_commit_is_marked_if_files_have_changed(tmp_path, monkeypatch):
    git_commit = run_record.git_commit.__wrapped__
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_record, "CHECKOUT", None)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    for command in (["init", "-q"], ["config", "user.name", "n"], ["config", "user.email", "e@example.org"]):
        subprocess.run(["git", *command], check=True)
    (tmp_path / "file").write_text("one")
    subprocess.run("git add file && git commit -qm one", shell=True, check=True)
    clean = git_commit()
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert git_commit() == clean + "+"


class Raises(L.Callback):
    """Raises an error at the end of the second step."""

    def __init__(self, kind: str) -> None:
        self.error = {"failed": ValueError("bad"), "interrupted": PreemptedError("SIGTERM: stopped", 75)}[kind]

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            raise self.error


@pytest.mark.parametrize(("how", "why"), [("failed", "ValueError: bad"), ("interrupted", "SIGTERM: stopped")])
def test_an_early_end_is_recorded(how, why, tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [component(f"{__name__}.Raises", kind=how)]
    with pytest.raises((ValueError, PreemptedError)):
        fit(tmp_path, config)
    (path,) = tmp_path.rglob("run.json")
    end = json.loads(path.read_text())["end"]
    assert (end["how"], end["why"], end["step"]) == (how, why, 2)


def test_a_run_that_fails_before_its_folder_is_known_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = RunRecord(LightningArgumentParser(), {}, ["main.py"])
    record.on_exception(L.Trainer(logger=False, accelerator="cpu"), L.LightningModule(), ValueError("early"))
    assert list(tmp_path.iterdir()) == []


pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:Starting from v1.9.0, `tensorboardX`", "ignore:The dirpath has changed"
)

HOLDER = """
import sys, time
from embeddings.callbacks.run_record import ResumedRun, RunLogger
from pathlib import Path
logger = RunLogger(ResumedRun(Path(sys.argv[1]), 0), save_dir=".")
logger.hold()
print("held", flush=True)
time.sleep(60)
"""


class Board(TensorBoardLogger):
    """A TensorBoard logger that needs no TensorBoard: it only records the folders it would write to."""

    def __init__(self, save_dir: str, name: str = "lightning_logs") -> None:
        self._root_dir, self._name, self._version, self._sub_dir = save_dir, name, None, None
        self._fs = CSVLogger(save_dir)._fs
        self.seen: list[str] = []

    @property
    @rank_zero_experiment
    def experiment(self):
        return SimpleNamespace(log_dir=self.log_dir)

    def log_hyperparams(self, *_, **__) -> None: ...

    def log_graph(self, *_, **__) -> None: ...

    def log_metrics(self, metrics, step=None) -> None:
        self.seen.append(self.log_dir)

    def save(self) -> None: ...

    def finalize(self, status) -> None: ...


class Remote(Logger):
    """A logger like those of Weights & Biases and MLflow: one place for all runs, with another name and version."""

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self.place, self.steps = save_dir, []

    @property
    def name(self) -> str:
        return "project"

    @property
    def version(self) -> str:
        return "a1b2c3"

    @property
    def save_dir(self) -> str:
        return self.place

    def log_hyperparams(self, *_, **__) -> None: ...

    def log_metrics(self, metrics, step=None) -> None:
        self.steps.append(step)


def logging_to(folder: Path, kind: object, **trainer) -> str:
    """Write the config of a run with a logger of a kind; returns the path."""
    config = run_config(folder)
    save_dir = str(folder / "run")
    named = component(f"{__name__}.{kind.__name__}", save_dir=save_dir) if isinstance(kind, type) else kind
    config["trainer"] |= {"logger": named, **trainer}
    return write_config(folder, config)


def rows_of(folder: Path) -> list[int]:
    """The steps whose loss is in a run's `metrics.csv`, in order."""
    return [int(row["step"]) for row in logged_rows(folder, "train/loss")]


@pytest.mark.parametrize("kind", [None, Remote], ids=["no choice", "wandb"])
def test_each_run_has_a_folder_and_metrics_with_any_logger(kind, tmp_path):
    path = logging_to(tmp_path, kind)
    trainers = [run_trainer(["fit", "--config", path]).trainer for _ in range(2)]
    folders = [Path(trainer.log_dir) for trainer in trainers]
    assert [logger.steps[-1] for trainer in trainers for logger in trainer.loggers[1:]] == [3, 3][: 2 * bool(kind)]
    assert folders == [tmp_path / f"run/lightning_logs/version_{number}" for number in (0, 1)]
    for folder in folders:
        assert rows_of(folder) == [0, 1, 2, 3]
        assert {"config.yaml", "run.json", "checkpoints"} <= {found.name for found in folder.iterdir()}
        draw_curves([folder], folder / "curves.png")
        write_report(folder, folder / "report.html")
    ids = [json.loads((folder / "run.json").read_text())["id"] for folder in folders]
    assert len(set(ids)) == 2


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_tensorboards_files_are_in_the_runs_folder_also_after_a_resume(tmp_path):
    path = logging_to(tmp_path, Board)
    for words in ([], ["--ckpt_path=auto", "--trainer.max_steps=6"]):
        own, board = run_trainer(["fit", "--config", path, *words]).trainer.loggers
        assert isinstance(own, RunLogger)
        assert own.log_dir == str(tmp_path / "run/lightning_logs/version_0")
        assert set(board.seen) == {own.log_dir}


def test_options_of_a_csv_logger_are_kept_and_a_dry_run_writes_nothing(tmp_path):
    given = CSVLogger(tmp_path, name="mine", version=7, prefix="p", flush_logs_every_n_steps=3)
    trainer = Trainer(logger=given, accelerator="cpu")
    keep_metrics(trainer)
    (logger,) = trainer.loggers
    assert logger.log_dir == str(tmp_path / "mine/version_7")
    assert (logger._prefix, logger._flush_logs_every_n_steps) == ("p", 3)
    dry = Trainer(fast_dev_run=True, accelerator="cpu", logger=False)
    keep_metrics(dry)
    assert run_logger(dry) is None


def test_two_runs_that_start_at_once_get_two_folders(tmp_path, monkeypatch):
    """All have read the next number before any has created its folder."""
    monkeypatch.setattr(RunLogger, "_get_next_version", lambda self: 4)
    loggers = [RunLogger(save_dir=str(tmp_path)) for _ in range(3)]
    assert [logger.experiment.log_dir.rpartition("_")[2] for logger in loggers] == ["4", "5", "6"]
    for logger in loggers:
        logger.finalize("success")


def test_a_resumed_run_stays_in_its_folder_and_logs_each_step_once(tmp_path):
    """The first process logs one step more than its checkpoint contains, and is then killed."""
    config = run_config(tmp_path)
    keep = component("ModelCheckpoint", every_n_train_steps=2, save_top_k=0, save_last=True)
    config["trainer"]["callbacks"] = [keep]
    words = ["fit", "--config", write_config(tmp_path, config)]
    folder = Path(run_trainer([*words, "--trainer.max_steps=3"]).trainer.log_dir)
    record = json.loads((folder / "run.json").read_text())
    del record["end"]
    (folder / "run.json").write_text(json.dumps(record))
    with open(folder / "metrics.csv", "a") as file:
        file.write("0,3,to")
    assert rows_of(folder)[:3] == [0, 1, 2]
    last = folder / "checkpoints" / "last.ckpt"
    trainer = run_trainer([*words, "--trainer.max_steps=6", "--ckpt_path", str(last)]).trainer
    assert (Path(trainer.log_dir), trainer.global_step) == (folder, 6)
    assert rows_of(folder) == [0, 1, 2, 3, 4, 5]
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["last.ckpt"]

    now = json.loads((folder / "run.json").read_text())
    assert (now["id"], now["resumed_from"], now["end"]["how"]) == (record["id"], str(last), "finished")
    assert [earlier["started"] for earlier in now["earlier"]] == [record["started"]]
    facts = RunFacts.read(folder)
    assert [(part.resumed_from, part.end.get("how")) for part in facts.parts] == [(None, None), (str(last), "finished")]
    assert read_curves(folder)["train/loss"][0] == [0, 1, 2, 3, 4, 5]
    write_report(folder, folder / "report.html")
    page = (folder / "report.html").read_text()
    assert "It ran to its end at step 6." in page
    assert "killed" not in page


def test_a_checkpoint_that_may_start_a_variant_gets_a_new_folder(tmp_path):
    """A finished run, and another option."""
    config = run_config(tmp_path)
    keep = component("ModelCheckpoint", every_n_train_steps=1, save_top_k=-1, save_last=True)
    config["trainer"]["callbacks"] = [keep]
    words = ["fit", "--config", write_config(tmp_path, config), "--trainer.max_steps=3"]
    folder = Path(run_trainer(words).trainer.log_dir)
    last = folder / "checkpoints" / "last.ckpt"
    before = (folder / "metrics.csv").read_bytes(), (folder / "run.json").read_bytes()
    for number, more in enumerate([[], ["--model.init_args.normalize=false"]]):
        resumed = run_trainer([*words, "--trainer.max_steps=4", "--ckpt_path", str(last), *more]).trainer
        assert Path(resumed.log_dir).name == f"version_{number + 1}"
        assert [part.folder for part in RunFacts.read(Path(resumed.log_dir)).parts] == [folder, Path(resumed.log_dir)]
        assert read_curves(Path(resumed.log_dir))["train/loss"][0] == [0, 1, 2, 3]
    assert ((folder / "metrics.csv").read_bytes(), (folder / "run.json").read_bytes()) == before


def test_a_run_of_another_process_is_not_resumed_and_a_killed_process_leaves_no_lock(tmp_path, capsys):
    config = run_config(tmp_path)
    words = ["fit", "--config", write_config(tmp_path, config)]
    folder = Path(run_trainer([*words, "--trainer.max_steps=2"]).trainer.log_dir)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with Command(["-c", HOLDER, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert main([*words, "--trainer.max_steps=4", "--ckpt_path=auto"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"error: {folder}: another process is already running this run; ")
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert after | {folder / LOCK_FILE: b""} == before | {folder / LOCK_FILE: b""}
        # A new run is not affected.
        assert main([*words, "--trainer.max_steps=2"]) == 0
        holder.kill()
    logger = RunLogger(ResumedRun(folder, 0), save_dir=str(tmp_path))
    logger.hold()
    logger.finalize("success")


def test_a_moved_run_is_resumed_in_its_new_folder(tmp_path):
    config = run_config(tmp_path)
    words = ["fit", "--config", write_config(tmp_path, config)]
    folder = Path(run_trainer([*words, "--trainer.max_steps=2"]).trainer.log_dir)
    moved = tmp_path / "elsewhere" / "version_0"
    moved.parent.mkdir()
    folder.rename(moved)
    root = f"--trainer.default_root_dir={tmp_path / 'elsewhere'}"
    trainer = run_trainer([*words, root, "--trainer.max_steps=4", "--ckpt_path=auto"]).trainer
    assert Path(trainer.log_dir) == moved
    assert rows_of(moved) == [0, 1, 2, 3]
    # The record has the path that `auto` selected; that checkpoint is superseded.
    assert json.loads((moved / "run.json").read_text())["resumed_from"] == trainer.ckpt_path
    assert [path.name for path in moved.rglob("*.ckpt")] == ["epoch=0-step=4.ckpt"]


def test_runs_and_models_can_be_written_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    logger = RunLogger(save_dir=str(tmp_path))
    logger.log_metrics({"val/score": 0.5}, step=3)
    logger.finalize("success")
    assert "0.5" in next(tmp_path.rglob("metrics.csv")).read_text()
    with replaced_folder(tmp_path / "model") as new:
        (new / "config.json").write_text("{}")
    assert (tmp_path / "model" / "config.json").is_file()


def test_rows_are_on_disk_before_a_checkpoint_is_written(tmp_path, monkeypatch):
    config, seen = run_config(tmp_path), []
    config["trainer"]["callbacks"] = [component("ModelCheckpoint", every_n_train_steps=1)]
    write = DurableCheckpointIO.save_checkpoint

    def save(self, *words, **options):
        seen.append([len(rows_of(path.parent)) for path in tmp_path.rglob("metrics.csv")])
        write(self, *words, **options)

    monkeypatch.setattr(DurableCheckpointIO, "save_checkpoint", save)
    run_trainer(["fit", "--config", write_config(tmp_path, config)])
    # The row of a step is logged after its checkpoint.
    assert seen == [[], [1], [2], [3]]
