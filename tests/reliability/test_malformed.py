"""Malformed inputs end with exit code 2 and one short line with the file and a hint; no files are written."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embeddings.cli.main import main
from tests.reliability import checkpoints, config, environment, index, records
from tests.reliability.cases import FIT, by_name, chosen, faults, tree
from tests.reliability.world import Place

ROOT = Path(__file__).parents[2]
GROUPS = (records, config, checkpoints, index, environment)
CASES = {
    f"{group.__name__.rpartition('.')[2]}: {name}": case
    for group in GROUPS
    for name, case in by_name(group.CASES).items()
}
ACCEPTED = by_name(records.ACCEPTED)
# The goal is ten; on a slow CPU, importing torch, Lightning and transformers takes nine to ten.
MAX_SECONDS = 20.0


@pytest.mark.parametrize("name", CASES)
def test_malformed_input_is_rejected_in_one_line_and_nothing_is_written(
    name: str, place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    case.make(place)
    words = place.world.words(case.line)
    before = tree(place.folder)
    capfd.readouterr()
    # CPU time, because the machine may be busy.
    start = time.process_time()
    code = main(words)
    assert time.process_time() - start <= MAX_SECONDS
    assert faults(case, code, capfd.readouterr().err, place, before) == []


@pytest.mark.slow
def test_a_new_interpreter_rejects_it_too(place: Place) -> None:
    case = CASES["config: a batch of 0"]
    case.make(place)
    before = tree(place.folder)
    clean = {**os.environ, "PYTHONPATH": str(ROOT), "EMBED_IMPORTS": ""}
    words = [sys.executable, str(ROOT / "main.py"), *place.world.words(case.line)]
    done = subprocess.run(words, env=clean, capture_output=True, text=True, timeout=200)
    assert faults(case, done.returncode, done.stderr, place, before) == []


@pytest.mark.parametrize("name", ACCEPTED)
def test_unusual_inputs_are_accepted(name: str, place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    case = ACCEPTED[name]
    case.make(place)
    words = place.world.words(case.line)
    capfd.readouterr()
    assert main(words) == case.code
    assert case.says in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_an_exception_during_training_is_shown_with_its_traceback(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen("model.init_args.optimizer", "torch.optim.SparseAdam")(place)
    assert main(FIT.split()) == 1
    written = capfd.readouterr().err
    assert "Traceback (most recent call last):\n" in written
    assert written.endswith("RuntimeError: SparseAdam does not support dense gradients, please consider Adam instead\n")
