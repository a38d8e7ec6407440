"""What a library raises is one line: code 2 before training and 70 in it, the traceback in a file beside the run."""

import re
import tempfile
from pathlib import Path

import pytest

from embeddings.cli.main import main
from tests.reliability.cases import FIT, Make, tree
from tests.reliability.config import at, chosen
from tests.reliability.world import Place


@pytest.mark.parametrize(
    ("make", "code", "says"),
    [
        (
            chosen("model.init_args.optimizer", "torch.optim.SparseAdam"),
            70,
            "SparseAdam does not support dense gradients, please consider Adam instead (RuntimeError)",
        ),
        (at("trainer", strategy="deepspeed"), 2, "The DeepSpeed strategy is only supported on CUDA GPUs"),
    ],
    ids=["an optimiser that takes no dense gradients", "DeepSpeed on a CPU"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_librarys_exception_is_one_line(
    make: Make, code: int, says: str, place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make(place)
    elsewhere = place.folder.parent / "temporary"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    before = tree(place.folder)
    capfd.readouterr()
    assert main(FIT.split()) == code
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line.lower()]
    assert line.startswith(f"error: {says}")
    found = re.search("; the traceback is in (.+)$", line)
    assert found is not None
    file = Path(found[1])
    assert "Traceback (most recent call last)" in file.read_text()
    if code == 2:
        assert file.parent == elsewhere
        assert tree(place.folder) == before
    else:
        assert (file.parent / "run.json").is_file()
