import pytest

from embeddings.common import UserError, slurm
from tests.callbacks.preempted_runs import fake_scontrol

NAMES = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "RANK", "LOCAL_RANK")
NAMES += ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3"),
    ],
)
def test_a_job_is_named_as_scontrol_names_it(environment, job, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert slurm.job_id() == job


@pytest.mark.parametrize(
    ("environment", "is_first"),
    [
        ({}, True),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "1"}, False),
        # A second process that the first has started inherits what SLURM told the first.
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, False),
        # The first process of a second node.
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
    ],
)
def test_one_process_of_a_run_is_the_first(environment, is_first, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert slurm.is_first_process() is is_first


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, 1),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"WORLD_SIZE": "2"}, 2),
        # A batch script that starts one process.
        ({"SLURM_NTASKS": "8"}, 1),
        # torchrun in a step of one task.
        ({"SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "4"}, 4),
    ],
)
def test_a_runs_processes_are_counted(environment, number, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert slurm.num_processes() == number


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NTASKS", "RANK", "WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["first", "-1", "", "1.0", "¹"])
def test_a_variable_that_is_no_number_is_named(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^{name} must be a whole number >= 0 in the environment, got "):
        slurm.num_processes()


@pytest.mark.parametrize(("code", "refusal"), [(0, ""), (1, "Invalid job id")])
def test_scontrol_is_asked_once_and_its_refusal_is_told(code, refusal, tmp_path, monkeypatch):
    asked = fake_scontrol(tmp_path, code)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert slurm.requeue("12_3") == refusal
    assert asked.read_text() == "requeue 12_3\n"


def test_a_machine_without_scontrol_and_one_that_does_not_answer_are_refusals(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.requeue("12") == "No such file or directory"
    fake_scontrol(tmp_path)
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "TIMEOUT_SECONDS", 0.1)
    assert slurm.requeue("12") == "no answer in 0.1 s"
