"""What a signal does to a run: one checkpoint, one place in the queue, one exit code, and the same bits in the end."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from embeddings.callbacks import DurableCheckpointIO, Preemption, preemption
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
    """A run that was stopped ignores signals until its process ends, which is the tests' here."""
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
    """The process is job 77 of SLURM; what `scontrol` is asked."""
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
def test_a_signal_is_one_checkpoint_one_requeue_and_the_runs_own_exit_code(
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


def test_ctrl_c_writes_the_checkpoint_that_a_signal_writes(
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


def test_a_run_that_is_stopped_in_two_lives_ends_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    """The second stop is at the end of an epoch, and both are at a step whose row is due.

    One checkpoint is all there is, and the next takes its place.
    """
    config = preempted_config(tmp_path)
    config["trainer"] |= {"log_every_n_steps": 2}
    assert main(["fit", "--config", write_config(tmp_path, config)]) == 0
    whole, rows = torch.load(tmp_path / "final.pt", weights_only=True), logged_losses(tmp_path / "run")
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
    assert final.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(whole[name], final[name])] == []


def test_gradients_that_are_being_accumulated_are_not_lost(tmp_path: Path) -> None:
    """The signal comes in the first of two batches of a step."""
    config = preempted_config(tmp_path)
    config["trainer"] |= {"accumulate_grad_batches": 2, "max_steps": 3}
    stopped = signalled(config, step=2, numbers=[USR1], at="on_train_batch_start")
    assert main(fit_words(tmp_path, stopped)) == 75
    assert steps(tmp_path) == [0, 1, 1, 2]
    assert main(fit_words(tmp_path, config)) == 0
    assert steps(tmp_path)[4:] == [2, 3]


def test_a_checkpoint_that_is_due_at_the_last_step_is_kept_first(tmp_path: Path) -> None:
    config = preempted_config(tmp_path)
    due = component("ModelCheckpoint", every_n_train_steps=3, save_top_k=-1, filename="due-{step}")
    config["trainer"]["callbacks"].append(due)
    assert main(fit_words(tmp_path, signalled(config, step=3, numbers=[USR1]))) == 75
    assert checkpoints(tmp_path) == ["due-step=3.ckpt", "last.ckpt"]


def test_a_folder_may_be_remote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, remote = preempted_config(tmp_path), f"memory://{tmp_path.name}/run"
    config["trainer"]["callbacks"][0]["init_args"]["dirpath"] = remote
    assert main(["fit", "--config", write_config(tmp_path, signalled(config, step=3, numbers=[USR1]))]) == 75
    assert f"resume with --ckpt_path {remote}/last.ckpt" in capsys.readouterr().err
    assert get_filesystem(remote).exists(f"{remote}/last.ckpt")


def test_a_signal_to_another_rank_stops_this_one_and_the_first_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks agree on the largest signal, which another one has got here in the second step."""
    others = iter([0, 0, USR1])
    monkeypatch.setattr(preemption, "reduce_int", lambda own, operation, device: max(own, next(others)))
    assert main(fit_words(tmp_path, preempted_config(tmp_path))) == 75
    assert steps(tmp_path) == [1, 2]
    assert "SIGUSR1: stopped after step 2" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_is_no_promise_to_go_on(
    tmp_path: Path, requeued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "last.ckpt")

    monkeypatch.setattr(DurableCheckpointIO, "save_checkpoint", refuse)
    assert main(fit_words(tmp_path, signalled(preempted_config(tmp_path), step=2, numbers=[TERM]))) == 74
    assert (checkpoints(tmp_path), requeued.read_text()) == ([], "")


def test_another_runs_last_checkpoint_in_the_same_folder_is_left(tmp_path: Path) -> None:
    config = preempted_config(tmp_path)
    folder = tmp_path / "shared"
    config["trainer"]["callbacks"][0]["init_args"]["dirpath"] = str(folder)
    folder.mkdir()
    (folder / "last.ckpt").write_text("another run's")
    going_on: list[str] = []
    for step in (2, 4):
        stopped = write_config(tmp_path, signalled(config, step=step, numbers=[USR1]))
        assert main(["fit", "--config", stopped, *going_on]) == 75
        assert checkpoints(tmp_path) == ["last-v1.ckpt", "last.ckpt"]
        going_on = ["--ckpt_path", str(folder / "last-v1.ckpt")]
    assert (folder / "last.ckpt").read_text() == "another run's"
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_run_that_keeps_no_checkpoints_has_one_that_it_replaces(tmp_path: Path) -> None:
    config = preempted_config(tmp_path)
    del config["trainer"]["callbacks"][0]
    config["trainer"] |= {"logger": False, "enable_checkpointing": False}
    for step in (2, 4):
        assert main(fit_words(tmp_path, signalled(config, step=step, numbers=[USR1]))) == 75
        assert checkpoints(tmp_path) == ["last.ckpt"]
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_run_that_has_taken_its_last_step_ends_well(tmp_path: Path, scontrol: Callable[..., Path]) -> None:
    log = scontrol()
    assert main(fit_words(tmp_path, signalled(preempted_config(tmp_path), step=STEPS, numbers=[TERM]))) == 0
    assert (tmp_path / "final.pt").exists()
    assert log.read_text() == ""


@pytest.mark.parametrize(
    ("limits", "step", "code"), [({"min_steps": 5}, 5, 0), ({"min_epochs": 1}, 3, 75), ({"min_epochs": 1}, 4, 0)]
)
def test_a_step_is_the_last_only_where_the_trainer_may_stop(
    limits: dict[str, int], step: int, code: int, tmp_path: Path
) -> None:
    """It is asked to at the first step, as by `EarlyStopping` or a `Timer`; an epoch has four."""
    config = preempted_config(tmp_path)
    config["trainer"] |= limits
    config["trainer"]["callbacks"].append(component("tests.callbacks.preempted_runs.StopsEarly"))
    assert main(fit_words(tmp_path, signalled(config, step=step, numbers=[USR1]))) == code
    assert steps(tmp_path) == list(range(1, step + 1))
    assert (tmp_path / "final.pt").exists() == (code == 0)


@pytest.mark.parametrize(("at", "num_ranks"), [("setup", 1), ("on_train_start", 1), ("setup", 2)])
def test_a_signal_before_the_first_step_leaves_nothing_and_is_answered(
    at: str,
    num_ranks: int,
    tmp_path: Path,
    requeued: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One of several ranks waits for the others."""
    if num_ranks > 1:
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    assert main(fit_words(tmp_path, signalled(preempted_config(tmp_path), step=1, numbers=[TERM], at=at))) == 75
    if num_ranks > 1:
        assert "SIGTERM: stopped at step 0, before its first update; job 77" in capsys.readouterr().err
    assert (checkpoints(tmp_path), requeued.read_text()) == ([], "requeue 77\n")


def test_ranks_that_are_no_commands_of_their_own_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = preempted_config(tmp_path)
    config["trainer"] |= {"devices": 2, "strategy": "ddp_spawn"}
    words = ["fit", "--config", write_config(tmp_path, config)]
    assert_refused(capsys, tmp_path, "trainer.strategy must start each rank as a separate command", main, words)


def test_lightnings_own_handlers_are_neither_run_nor_put_in_place(
    tmp_path: Path, scontrol: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    handlers = ("_slurm_sigusr_handler_fn", "_sigterm_notifier_fn", "_sigterm_handler_fn")
    for name in ("register_signal_handlers", *handlers):
        monkeypatch.setattr(_SignalConnector, name, lambda *_, name=name: done.append(name))
    for name, value in (SLURM | SRUN).items():
        monkeypatch.setenv(name, value)
    config, log = preempted_config(tmp_path), scontrol()
    stopped = signalled(config, step=1, numbers=[TERM, USR1], at="on_train_batch_start")
    assert main(fit_words(tmp_path, stopped)) == 75
    assert (done, log.read_text()) == ([], "requeue 77\n")


def test_without_the_command_line_the_callback_hears_and_gives_the_signals_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    trainer = quiet_trainer(callbacks=[Preemption()], limit_val_batches=0, max_steps=2)
    trainer.fit(BoringModel())
    assert trainer.global_step == 2
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert not stop_request.listening
    assert issubclass(PreemptedError, SystemExit)
