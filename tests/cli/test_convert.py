"""From learned positions to rotary ones through the command line; the conversion itself is tested beside its code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel, XLMRobertaConfig, XLMRobertaForMaskedLM

from embeddings.cli.main import main
from embeddings.models import BackboneConfig, load_backbone
from embeddings.modules import MaskedLMModule
from tests.helpers.refusals import assert_refused
from tests.helpers.tiny import save_backbone, wordpiece_tokenizer

MAIN = Path(__file__).parents[2] / "main.py"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
KINDS = {"xlm-roberta": (XLMRobertaConfig, XLMRobertaForMaskedLM), "bert": (BertConfig, BertForMaskedLM)}


def source_model(kind: str, has_head: bool = True) -> PreTrainedModel:
    config, model = KINDS[kind]
    made = model(config(vocab_size=390, max_position_embeddings=66, **SIZES))
    return made if has_head else made.base_model


def source_folder(folder: Path, kind: str = "bert", has_head: bool = True) -> Path:
    return Path(save_backbone(str(folder), source_model(kind, has_head), wordpiece_tokenizer()))


def convert(source: Path | str, output: Path, *options: str) -> int:
    return main(["convert", "--source", str(source), "--output", str(output), *options])


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_converted_and_one_line_says_how_large_it_is(
    kind: str, has_head: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_folder(tmp_path / "source", kind, has_head)
    capsys.readouterr()  # what libraries said while the source was written
    options = ["--num-positions", "3000", "--rope-theta", "20000", "--keep-head", str(has_head).lower()]
    assert convert(source, tmp_path / "new" / "rotary", *options) == 0
    out = capsys.readouterr().out
    backbone, tokenizer = load_backbone(BackboneConfig(str(tmp_path / "new" / "rotary")))
    assert type(backbone).__name__ == "JinaEmbeddingsV3Model"
    assert (backbone.config.max_position_embeddings, tokenizer.model_max_length) == (3000, 3000)
    assert backbone.config.rope_parameters["rope_theta"] == 20000
    # The dense layer, the norm and the bias of the head; its matrix is that of the embeddings.
    head = 32 * 32 + 32 + 2 * 32 + 448 if has_head else 0
    size = backbone.num_parameters() + head
    where = tmp_path / "new" / "rotary"
    rows = "vocabulary of 390 rows padded to 448"
    assert out == f"wrote {where}: {size:,} parameters, {rows}, rotary positions for 3,000 tokens\n"
    if has_head:
        module = MaskedLMModule("mlm", BackboneConfig(str(where)))
        assert module.language_model.model.num_parameters() == size


def test_an_earlier_model_is_replaced_and_the_output_is_no_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = source_folder(tmp_path / "source"), tmp_path / "rotary"
    assert convert(source, output, "--num-positions", "100") == 0
    (output / "notes.txt").write_text("mine")
    assert convert(source, output) == 0
    assert load_backbone(BackboneConfig(str(output)))[0].config.max_position_embeddings == 2048
    assert (output / "notes.txt").read_text() == "mine"


def test_what_cannot_be_converted_is_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source_folder(Path("headless"), has_head=False)
    head = "of its language-model head or of its encoder; set keep_head to false to convert only"
    nowhere = "nowhere/at/all: is no directory; give a model directory or a Hub id"
    for source, says in (("headless", head), ("nowhere/at/all", nowhere)):
        assert_refused(capsys, tmp_path, says, convert, source, Path("rotary"))


@pytest.mark.slow
def test_nothing_but_the_result_is_written_where_deepspeed_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    source = source_folder(tmp_path / "source")
    words = ["convert", "--source", str(source), "--output", str(tmp_path / "rotary"), "--num-positions", "100"]
    done = subprocess.run([sys.executable, str(MAIN), *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"wrote \S+/rotary: [^\n]+\n", done.stdout)
    assert "accelerator" not in done.stderr
