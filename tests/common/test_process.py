"""What the environment says of a process, its logger, its machine and its memory."""

import importlib
import logging
import os
import platform
import subprocess
import sys
import warnings

import pytest
import torch

from embeddings.common import UserError, process
from embeddings.common.process import cpu_name, device_name, lazy_names, log_to_stderr, logger, quiet_libraries
from tests.callbacks.preempted_runs import fake_scontrol

NAMES = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "RANK", "LOCAL_RANK")
NAMES += ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "job", "is_first", "number"),
    [
        ({}, None, True, 1),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, "12", True, 8),
        ({"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3", True, 1),
        ({"SLURM_PROCID": "1", "WORLD_SIZE": "2"}, None, False, 2),
        # A second process that the first has started inherits what SLURM told the first.
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, None, False, 1),
        # The first process of a second node.
        ({"RANK": "8", "LOCAL_RANK": "0"}, None, False, 1),
        # A batch script that starts one process, and torchrun in a step of one task.
        ({"SLURM_NTASKS": "8"}, None, True, 1),
        ({"SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "4"}, None, True, 4),
    ],
)
def test_the_environment_says_which_job_and_which_of_its_processes_this_is(
    environment, job, is_first, number, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (process.job_id(), process.is_first_process(), process.num_processes()) == (job, is_first, number)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NTASKS", "RANK", "WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["first", "-1", "", "1.0", "¹"])
def test_a_variable_that_is_no_number_is_named(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^{name} must be an integer >= 0 in the environment, got "):
        process.num_processes()


@pytest.mark.parametrize(("code", "refusal"), [(0, ""), (1, "Invalid job id")])
def test_scontrol_is_asked_once_and_its_refusal_is_told(code, refusal, tmp_path, monkeypatch):
    asked = fake_scontrol(tmp_path, code)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert process.requeue("12_3") == refusal
    assert asked.read_text() == "requeue 12_3\n"
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(process, "TIMEOUT_SECONDS", 0.1)
    assert process.requeue("12") == "no answer in 0.1 s"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process.requeue("12") == "No such file or directory"


def test_a_command_shows_notes_and_warnings_and_leaves_the_logger_as_it_was(capsys, monkeypatch):
    level = logger.level
    assert not logger.handlers
    with log_to_stderr():
        logger.info("a note of %d", 1)
        logger.warning("a warning")
        logger.debug("a detail")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with log_to_stderr():
        logger.info("another rank's note")
        logger.warning("another rank's warning")
    assert capsys.readouterr().err.splitlines() == ["a note of 1", "a warning", "another rank's warning"]
    assert not logger.handlers
    assert (logger.level, logger.getEffectiveLevel()) == (level, logging.WARNING)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lazy_names("embeddings.common")("nothing")


@pytest.mark.parametrize(
    "package", ["embeddings", *(f"embeddings.{name}" for name in ["common", "data", "mining", "synthesis"])]
)
def test_every_public_name_of_a_package_that_loads_on_use_can_be_had(package):
    names = importlib.import_module(package).__all__
    assert len(names) > 10
    assert all(getattr(importlib.import_module(package), name) is not None for name in names)


def test_the_processors_are_counted_and_named(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    info.write_bytes(b"processor : 0\nmodel name\t: Some CPU: 2.1\xffGHz\n\nprocessor : 1\nmodel name\t: Some CPU\n")
    monkeypatch.setattr(process, "_CPU_INFO", info)
    assert cpu_name().startswith("2 x Some CPU")
    assert device_name(torch.device("cpu")) == cpu_name()
    info.unlink()
    monkeypatch.setattr(platform, "processor", lambda: "riscv64")
    assert cpu_name() == "riscv64"


FAULTS = """
import resource, torch
from embeddings.common.process import tune_malloc
print({call})
for _ in range(10):
    torch.ones(10, 2**20).neg().sum()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(10, 2**20).neg().sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: str, **environment: str) -> tuple[bool, int]:
    """What the call gave, and page faults of 20 rounds of two tensors of 40 MiB, 20,480 pages, that are freed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    code = FAULTS.format(call=call)
    run = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    said, count = run.stdout.split()
    return said == "True", int(count)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_not_asked_for_again() -> None:
    kept, few = faults("tune_malloc()")
    assert kept
    # At most three times all pages of a round, where it takes a while to find a place for both.
    assert few < 3 * 20480
    assert faults("False")[1] >= 20 * 20480


@pytest.mark.slow
def test_the_environment_goes_before() -> None:
    assert not faults("tune_malloc()", MALLOC_ARENA_MAX="2")[0]
    assert not faults("tune_malloc()", GLIBC_TUNABLES="glibc.malloc.arena_max=2")[0]


def test_libraries_do_not_speak_of_themselves(capsys):
    """DeepSpeed's logger writes to standard output as soon as any module loads transformers, outside of `main` too."""
    deepspeed, known = logging.getLogger("DeepSpeed"), logging.StreamHandler(sys.stdout)
    deepspeed.addHandler(known)
    try:
        deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, …")
        with quiet_libraries():
            deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, …")
            deepspeed.warning("the optimizer overflowed")
            warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use …", FutureWarning, stacklevel=1)
            with pytest.warns(FutureWarning, match="something else"):
                warnings.warn("something else is deprecated", FutureWarning, stacklevel=1)
        deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, …")
    finally:
        deepspeed.removeHandler(known)
    assert capsys.readouterr().out == "the optimizer overflowed\n"
