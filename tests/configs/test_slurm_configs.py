"""The batch files for SLURM, run with a fake `srun` that records its arguments."""

import os
import subprocess
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "lightning_configs" / "slurm"
JOB = {"SLURM_JOB_ID": "91", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "8"}
TASK = JOB | {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_ARRAY_JOB_ID": "90"}


def run(folder: Path, name: str, words: list[str], environment: dict[str, str], code: int = 0) -> tuple[int, str, str]:
    """The exit code of a batch file, the arguments of `srun`, and standard error."""
    cpus = f'echo "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS" > "{folder}/cpus.txt"'
    (folder / "srun").write_text(f'#!/bin/sh\necho "$@" > "{folder}/given.txt"\n{cpus}\nexit {code}\n')
    (folder / "srun").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    clean |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    line = ["bash", str(SLURM / name), *words]
    ended = subprocess.run(line, env=clean | environment, cwd=folder, capture_output=True, text=True)
    given = folder / "given.txt"
    return ended.returncode, given.read_text().strip() if given.exists() else "", ended.stderr


def test_a_job_trains_on_all_its_tasks_and_resumes_in_its_folder(tmp_path: Path) -> None:
    code, given, _ = run(tmp_path, "train.sbatch", ["--recipe", "mgh_h100x1"], JOB, code=75)
    assert code == 75
    assert given == (
        "--kill-on-bad-exit=1 embeddings fit --recipe mgh_h100x1 --trainer.num_nodes 2 --trainer.devices 8 "
        "--trainer.default_root_dir checkpoints/runs/91 --ckpt_path auto"
    )


@pytest.mark.parametrize(("name", "words"), [("train.sbatch", ["--recipe", "a"]), ("array.sbatch", ["rates.yaml"])])
def test_a_checkout_runs_its_main_py(name: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "main.py").touch()
    _, given, _ = run(tmp_path, name, words, TASK | {"SLURM_ARRAY_TASK_ID": "0"})
    assert given.startswith("--kill-on-bad-exit=1 python main.py ")


def test_an_array_task_trains_its_line_in_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "runs.txt").write_text("--recipe first\n--recipe second --seed_everything 1\n")
    words = ["runs.txt", "--trainer.max_steps", "9"]
    code, given, _ = run(tmp_path, "array.sbatch", words, TASK | {"SLURM_ARRAY_TASK_ID": "2"})
    assert code == 0
    assert given == (
        "--kill-on-bad-exit=1 embeddings fit --recipe second --seed_everything 1 --trainer.max_steps 9 "
        "--trainer.num_nodes 1 --trainer.devices 1 --trainer.default_root_dir checkpoints/runs/90_2 --ckpt_path auto"
    )


def test_an_array_task_trains_its_point_of_a_sweep_and_fails_without_a_line(tmp_path: Path) -> None:
    code, given, _ = run(tmp_path, "array.sbatch", ["rates.yaml"], TASK | {"SLURM_ARRAY_TASK_ID": "0"}, code=143)
    assert (code, given) == (143, "--kill-on-bad-exit=1 embeddings sweep rates.yaml --index 0")
    (tmp_path / "given.txt").unlink()
    (tmp_path / "runs.txt").write_text("# two runs\n--recipe first\n \n\n  --recipe second")
    for line in ("1", "3", "4", "6"):
        code, given, errors = run(tmp_path, "array.sbatch", ["runs.txt"], TASK | {"SLURM_ARRAY_TASK_ID": line})
        assert (code, given) == (2, "")
        assert errors == f"error: runs.txt has no run in line {line}; give --array=2,5\n"


@pytest.mark.parametrize("name", ["train.sbatch", "array.sbatch"])
def test_a_batch_file_requests_requeueing_and_signals_and_passes_cpus_to_tasks(name: str, tmp_path: Path) -> None:
    lines = (SLURM / name).read_text().splitlines()
    for option in ("--requeue", "--open-mode=append", "--signal=SIGUSR1@120"):
        assert f"#SBATCH {option}" in lines
    # sbatch ignores options after the first command.
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    code, given, errors = run(tmp_path, name, ["runs.txt"], {})
    assert (code != 0, given) == (True, "")
    assert "submit this file with sbatch" in errors
    # `srun` reads its own variable, not that of sbatch.
    run(tmp_path, name, ["rates.yaml"], TASK | {"SLURM_ARRAY_TASK_ID": "0", "SLURM_CPUS_PER_TASK": "6"})
    assert (tmp_path / "cpus.txt").read_text() == "6 6\n"
