"""The effect of a signal on a run: one checkpoint, one requeue, one exit code, and bit-identical final weights."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.demos.boring_classes import BoringModel

from embeddings.callbacks import DurableCheckpointIO, Preemption
from embeddings.cli.main import main
from embeddings.common import PreemptedError
from embeddings.common.process import STOP_SIGNALS, stop_request
from tests.callbacks.preempted_runs import STEPS, fake_scontrol, fit_words, preempted_config, signalled
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import component, logged_rows, quiet_trainer, write_config

USR1, TERM = int(signal.SIGUSR1), int(signal.SIGTERM)
SLURM = {"SLURM_JOB_ID": "77"}
ARRAY = {"SLURM_JOB_ID": "80", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
SRUN = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train"}

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:Starting from v1.9.0, `tensorboardX`", "ignore:The `srun` command"
)


@pytest.fixture(autouse=True)
def _own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the handlers: a stopped run ignores signals until its process, here the tests', ends."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "WORLD_SIZE", *SRUN):
        monkeypatch.delenv(name, raising=False)
    yield
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*STOP_SIGNALS} == set()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes the fake `scontrol`."""

    def make(code: int = 0) -> Path:
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        return fake_scontrol(tmp_path, code)

    return make


@pytest.fixture
def requeued(scontrol: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run as SLURM job 77; returns the file with the calls of `scontrol`."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return scontrol()


def preempted_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("preempted: ")]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.ckpt*"))


def steps(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "steps0.txt").read_text().split()]


def logged_losses(folder: Path) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row["train/loss"])) for row in logged_rows(folder, "train/loss")]


@pytest.mark.parametrize(
    ("numbers", "environment", "refuses", "code", "asked"),
    [
        ([TERM], {}, False, 143, []),
        ([TERM], SLURM, False, 75, ["requeue 77"]),
        ([TERM], SLURM, True, 143, ["requeue 77"]),
        ([TERM, TERM, USR1], SLURM | SRUN, False, 75, ["requeue 77"]),
        ([USR1], ARRAY, False, 75, ["requeue 77_3"]),
    ],
)
def test_a_signal_causes_one_checkpoint_one_requeue_and_an_exit_code(
    numbers: list[int],
    environment: dict[str, str],
    refuses: bool,
    code: int,
    asked: list[str],
    tmp_path: Path,
    scontrol: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log, config = scontrol(code=int(refuses)), preempted_config(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(fit_words(tmp_path, signalled(config, step=3, numbers=numbers))) == code
    assert checkpoints(tmp_path) == ["last.ckpt"]
    assert log.read_text().splitlines() == asked
    assert not (tmp_path / "final.pt").exists()
    (line,) = preempted_lines(capsys)
    assert "stopped after step 3" in line
    assert ("scontrol requeue 77 failed (Invalid job id); resume with --ckpt_path" in line) == refuses
    assert line.endswith("last.ckpt")
    assert steps(tmp_path) == [1, 2, 3]


def test_ctrl_c_writes_a_checkpoint_and_does_not_requeue(
    tmp_path: Path, requeued: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = preempted_config(tmp_path)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert main(fit_words(tmp_path, signalled(config, step=3, numbers=[int(signal.SIGINT)]))) == 130
    assert (checkpoints(tmp_path), requeued.read_text(), steps(tmp_path)) == (["last.ckpt"], "", [1, 2, 3])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("interrupted: ")]
    assert line.startswith("interrupted: SIGINT: stopped after step 3; resume with --ckpt_path ")
    assert main(fit_words(tmp_path, config)) == 0
    assert steps(tmp_path) == list(range(1, STEPS + 1))


def test_a_second_ctrl_c_ends_at_once_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = int(signal.SIGINT)
    config = signalled(preempted_config(tmp_path), step=3, numbers=[interrupt, interrupt])
    assert main(fit_words(tmp_path, config)) == 130
    assert (checkpoints(tmp_path), steps(tmp_path)) == ([], [1, 2])
    assert "interrupted" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_is_stopped_twice_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    """Both stops are at steps that are logged, and the second is at the end of an epoch.

    There is only one checkpoint at any time: each one replaces the previous one.
    """
    config = preempted_config(tmp_path)
    config["trainer"] |= {"log_every_n_steps": 2}
    assert main(["fit", "--config", write_config(tmp_path, config)]) == 0
    expected, rows = torch.load(tmp_path / "final.pt", weights_only=True), logged_losses(tmp_path / "run")
    assert [step for step, _ in rows] == [1, 3, 5]
    for written in ("final.pt", "steps0.txt"):
        (tmp_path / written).unlink()
    shutil.rmtree(tmp_path / "run")
    for step in (2, 4):
        assert main(fit_words(tmp_path, signalled(config, step=step, numbers=[USR1]))) == 75
        assert checkpoints(tmp_path) == ["last.ckpt"]
        assert logged_losses(tmp_path / "run") == rows[: step // 2]
    assert main(fit_words(tmp_path, config)) == 0
    assert steps(tmp_path) == list(range(1, STEPS + 1))
    assert logged_losses(tmp_path / "run") == rows
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    assert final.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(expected[name], final[name])] == []


def test_a_signal_within_an_accumulation_stops_the_run_after_the_step(tmp_path: Path) -> None:
    """The signal arrives in the first of two batches of a step."""
    config = preempted_config(tmp_path)
    config["trainer"] |= {"accumulate_grad_batches": 2, "max_steps": 3}
    stopped = signalled(config, step=2, numbers=[USR1], at="on_train_batch_start")
    assert main(fit_words(tmp_path, stopped)) == 75
    assert steps(tmp_path) == [0, 1, 1, 2]
    assert main(fit_words(tmp_path, config)) == 0
    assert steps(tmp_path)[4:] == [2, 3]


def test_a_checkpoint_that_is_due_at_the_last_step_is_written_too(tmp_path: Path) -> None:
    config = preempted_config(tmp_path)
    due = component("ModelCheckpoint", every_n_train_steps=3, save_top_k=-1, filename="due-{step}")
    config["trainer"]["callbacks"].append(due)
    assert main(fit_words(tmp_path, signalled(config, step=3, numbers=[USR1]))) == 75
    assert checkpoints(tmp_path) == ["due-step=3.ckpt", "last.ckpt"]


def test_the_checkpoint_folder_may_be_remote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, remote = preempted_config(tmp_path), f"memory://{tmp_path.name}/run"
    config["trainer"]["callbacks"][0]["init_args"]["dirpath"] = remote
    assert main(["fit", "--config", write_config(tmp_path, signalled(config, step=3, numbers=[USR1]))]) == 75
    assert f"resume with --ckpt_path {remote}/last.ckpt" in capsys.readouterr().err
    assert get_filesystem(remote).exists(f"{remote}/last.ckpt")


def test_a_run_whose_checkpoint_cannot_be_written_is_not_requeued(
    tmp_path: Path, requeued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "last.ckpt")

    monkeypatch.setattr(DurableCheckpointIO, "save_checkpoint", refuse)
    assert main(fit_words(tmp_path, signalled(preempted_config(tmp_path), step=2, numbers=[TERM]))) == 74
    assert (checkpoints(tmp_path), requeued.read_text()) == ([], "")


def test_the_last_checkpoint_of_another_run_in_the_same_folder_is_not_replaced(tmp_path: Path) -> None:
    config = preempted_config(tmp_path)
    folder = tmp_path / "shared"
    config["trainer"]["callbacks"][0]["init_args"]["dirpath"] = str(folder)
    folder.mkdir()
    (folder / "last.ckpt").write_text("another run's")
    resume: list[str] = []
    for step in (2, 4):
        stopped = write_config(tmp_path, signalled(config, step=step, numbers=[USR1]))
        assert main(["fit", "--config", stopped, *resume]) == 75
        assert checkpoints(tmp_path) == ["last-v1.ckpt", "last.ckpt"]
        resume = ["--ckpt_path", str(folder / "last-v1.ckpt")]
    assert (folder / "last.ckpt").read_text() == "another run's"
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_run_without_other_checkpoints_replaces_its_checkpoint(tmp_path: Path) -> None:
    config = preempted_config(tmp_path)
    del config["trainer"]["callbacks"][0]
    config["trainer"] |= {"logger": False, "enable_checkpointing": False}
    for step in (2, 4):
        assert main(fit_words(tmp_path, signalled(config, step=step, numbers=[USR1]))) == 75
        assert checkpoints(tmp_path) == ["last.ckpt"]
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_run_that_has_made_its_last_step_finishes(tmp_path: Path, scontrol: Callable[..., Path]) -> None:
    log = scontrol()
    assert main(fit_words(tmp_path, signalled(preempted_config(tmp_path), step=STEPS, numbers=[TERM]))) == 0
    assert (tmp_path / "final.pt").exists()
    assert log.read_text() == ""


@pytest.mark.parametrize(
    ("limits", "step", "code"), [({"min_steps": 5}, 5, 0), ({"min_epochs": 1}, 3, 75), ({"min_epochs": 1}, 4, 0)]
)
def test_a_step_is_the_last_only_if_the_trainer_may_stop(
    limits: dict[str, int], step: int, code: int, tmp_path: Path
) -> None:
    """`should_stop` is set from the first step on, as by `EarlyStopping` or a `Timer`; an epoch has four steps."""
    config = preempted_config(tmp_path)
    config["trainer"] |= limits
    config["trainer"]["callbacks"].append(component("tests.callbacks.preempted_runs.StopsEarly"))
    assert main(fit_words(tmp_path, signalled(config, step=step, numbers=[USR1]))) == code
    assert steps(tmp_path) == list(range(1, step + 1))
    assert (tmp_path / "final.pt").exists() == (code == 0)


@pytest.mark.parametrize(("at", "num_ranks"), [("setup", 1), ("on_train_start", 1), ("setup", 2)])
def test_a_signal_before_the_first_step_requeues_without_a_checkpoint(
    at: str,
    num_ranks: int,
    tmp_path: Path,
    requeued: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With several ranks the signal is handled when training starts."""
    if num_ranks > 1:
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    assert main(fit_words(tmp_path, signalled(preempted_config(tmp_path), step=1, numbers=[TERM], at=at))) == 75
    if num_ranks > 1:
        assert "SIGTERM: stopped at step 0, before its first update; job 77" in capsys.readouterr().err
    assert (checkpoints(tmp_path), requeued.read_text()) == ([], "requeue 77\n")


def test_a_strategy_that_starts_ranks_with_multiprocessing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = preempted_config(tmp_path)
    config["trainer"] |= {"devices": 2, "strategy": "ddp_spawn"}
    words = ["fit", "--config", write_config(tmp_path, config)]
    assert_refused(capsys, tmp_path, "trainer.strategy must start each rank as a separate command", main, words)


def test_without_the_command_line_the_callback_installs_and_restores_the_handlers() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    trainer = quiet_trainer(callbacks=[Preemption()], limit_val_batches=0, max_steps=2)
    trainer.fit(BoringModel())
    assert trainer.global_step == 2
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert not stop_request.listening
    assert issubclass(PreemptedError, SystemExit)
