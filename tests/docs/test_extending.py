"""The classes of docs/extending.md: a run with all three, its model in both libraries, and what is refused."""

import gc
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from embeddings.cli.main import main
from embeddings.common import InputError, OptionError
from embeddings.inference import Encoder
from embeddings.models import Embedder, MeanPooling, Pooling
from tests.docs.pages import ROOT, blocks
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer
from tests.models.reading import carried_code

BLOCKS = blocks(ROOT / "docs" / "extending.md")
TEXTS = ["the quick brown fox", "how do I pad 7", "a"]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with the page's files, a backbone and pairs; the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EMBED_IMPORTS", "my_parts")
    codes = [block.text for block in BLOCKS if block.language == "python"]
    assert len(codes) == 3
    for code in codes:
        match = re.match(r'"""(my_parts/\w+\.py)"""', code)
        assert match is not None
        write(tmp_path / match[1], code)
    (settings,) = (block.text for block in BLOCKS if block.language == "yaml")
    Path("my_run.yaml").write_text(settings)
    pairs = [{"query": f"how do I pad {number}", "positive": f"pad the fox {number}"} for number in range(16)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    save_backbone("backbone", tiny_bert(num_positions=512), wordpiece_tokenizer())
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_parts"]:
        del sys.modules[name]
    # While the classes are there, the parser lists them among the subclasses of ours in later tests.
    sys.modules["jsonargparse._typehints"]._cached_class_parsers.clear()
    gc.collect()


def write(path: Path, code: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)


def fit(*options: str) -> int:
    words = ["fit", "--config", "lightning_configs/own_pairs.yaml", "--config", "my_run.yaml"]
    words += ["--data.sources", "[{name: mine, path: pairs.jsonl}]", "--data.init_args.batch_size=4"]
    words += ["--model.init_args.backbone.name=backbone", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]
    return main([*words, "--trainer.precision=32-true", *options])


@pytest.mark.usefixtures("remote_code")
def test_a_run_with_the_pages_classes_exports_a_model_with_their_code(
    parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fit() == 0
    folder = Path("checkpoints/own_pairs")
    assert carried_code(folder) == {"own_pooling", "pooling", "poolings", "portable"}
    assert "PowerMeanPooling" in (folder / "README.md").read_text()
    (logged,) = Path("checkpoints/runs").rglob("metrics.csv")
    assert "train/spread" in logged.read_text()
    vectors = np.asarray(Encoder.from_pretrained(str(folder), precision="float32", device="cpu").encode(TEXTS))
    # The copy in the directory is used: the package is gone.
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_parts"]:
        del sys.modules[name]
    (parts / "my_parts" / "pooling.py").unlink()
    model = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    assert type(model[1].layer).__name__ == "PowerMeanPooling"
    np.testing.assert_allclose(model.encode_document(TEXTS), vectors, atol=1e-5)
    monkeypatch.setenv("EMBED_IMPORTS", "")
    with pytest.raises(
        InputError, match=r"my_parts\.pooling\.PowerMeanPooling is not a known pooling; .*EMBED_IMPORTS"
    ):
        Encoder.from_pretrained(str(folder))


@pytest.mark.parametrize("options", [("--check",), ()])
def test_a_pooling_that_cannot_be_written_is_refused_before_the_first_step(
    parts: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = parts / "my_parts" / "pooling.py"
    path.write_text(path.read_text().replace("import torch\n", "import numpy\nimport torch\n", 1))
    assert fit(*options) == 2
    assert "cannot be written into a model directory: pooling.py imports numpy" in capsys.readouterr().err
    assert not Path("checkpoints/own_pairs").exists()


class Local(MeanPooling):
    """In a file that imports more than a model directory contains."""


class Untold(Pooling):
    def __init__(self, hidden_size: int, power: float = 2.0) -> None:
        super().__init__(hidden_size)


class OwnEmbedder(Embedder):
    """Without a way to write itself."""


def test_other_parts_that_cannot_be_written_are_refused() -> None:
    class Inner(MeanPooling):
        """Not at the top level."""

    def embedder(kind: type[Embedder] = Embedder, pooling: type[Pooling] = MeanPooling) -> Embedder:
        return kind(tiny_bert(), wordpiece_tokenizer(), pooling(32))

    wrong_head = embedder()
    wrong_head.head = nn.Sequential(nn.Linear(32, 8), nn.Tanh())  # type: ignore[assignment]
    for model, reason in (
        (embedder(pooling=Local), "test_extending.py imports numpy"),
        (embedder(pooling=Inner), "its class must be at the top level of an imported file"),
        (embedder(pooling=Untold), "each argument must be stored as an attribute of the same name"),
        (embedder(OwnEmbedder), "it does not define save_pretrained"),
        (wrong_head, "the head must be a torch.nn.Linear"),
    ):
        with pytest.raises(OptionError, match=f"cannot be written into a model directory: {reason}"):
            model.check_saving()
    assert torch.is_tensor(embedder().pooling(torch.ones(1, 2, 32), torch.ones(1, 2, dtype=torch.bool)))
