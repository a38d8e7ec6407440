"""Published checkpoints through the command line; each family's arithmetic is tested beside its key map."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from embeddings.cli.main import main
from tests.interop.released import nomic
from tests.interop.released.nomic import MOE, nomic_folder
from tests.interop.released.published import changed_config, encoded


def run(source: Path, output: Path, *options: str) -> int:
    return main(["import", "--source", str(source), "--output", str(output), *options])


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Put tensors into a folder's weights, or take them out."""
    state = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors")


def test_one_line_says_what_was_used_and_what_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, state, _ = nomic_folder(tmp_path / "published", MOE)
    assert run(folder, tmp_path / "plain") == 0
    used = f"used {len(state)} tensors, none missing"
    where = tmp_path / "plain"
    assert capsys.readouterr().out == f"wrote {where} from Nomic's encoder with experts: {used}, left none\n"
    change(folder, **{"pooler.dense.weight": torch.zeros(32, 32), "pooler.dense.bias": torch.zeros(32)})
    assert run(folder, tmp_path / "pooled") == 0
    assert f"{used}, left 2 (pooler.dense.bias, pooler.dense.weight)\n" in capsys.readouterr().out
    assert torch.equal(encoded(tmp_path / "plain"), encoded(tmp_path / "pooled"))


def test_a_copy_of_a_model_whose_card_says_more_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nomic, "HIDDEN", 768)
    folder, _, _ = nomic_folder(tmp_path / "copy", MOE | {"n_embd": 768, "n_layer": 2}, layers=2)
    assert run(folder, tmp_path / "ours", "--known-as", "nomic-embed-text-v1.5") == 2
    assert "known_as cannot apply to" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
    assert run(folder, tmp_path / "ours", "--known-as", "nomic-embed-text-v2-moe") == 0
    assert capsys.readouterr().out.endswith("; vectors as the card of nomic-embed-text-v2-moe has them\n")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "the lazy dog"}\n')
    line = ["encode", "--model", str(tmp_path / "ours"), "--input", str(texts), "--output"]
    for width, warns in (("256", False), ("64", True)):
        assert main([*line, str(tmp_path / width), "--dimensions", width]) == 0
        assert ("the model was trained at 768, 256; scores may suffer" in caplog.text) == warns


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: change(folder, **{"emb_ln.bias": None}), "lacks 1 of the 52 tensors of Nomic's encoder with"),
        (lambda folder: change(folder, **{"extra.weight": torch.zeros(1)}), "has no place for, extra.weight first"),
        (
            lambda folder: change(folder, **{"emb_ln.bias": torch.zeros(9)}),
            "emb_ln.bias has shape (9,), by config.json",
        ),
        (lambda folder: changed_config(folder, model_type="t5"), "model_type 't5' belongs to no published family"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "model.bin is a pickle, which"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "model.safetensors: is damaged"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: is no readable JSON"),
        (lambda folder: changed_config(folder, moe_every_n_layers="two"), "config.json: makes no model: "),
        (lambda folder: changed_config(folder, moe_top_k=9), "config.json: makes no model: top_k must be from 1 to"),
        (
            lambda folder: changed_config(folder, initializer_range=True),
            "has initializer_range True, expected a number",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "published: "),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_one_line_and_nothing_is_written(
    damage: object, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, _ = nomic_folder(tmp_path / "published", MOE)
    assert callable(damage)
    damage(folder)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    capsys.readouterr()
    assert run(folder, tmp_path / "ours") == 2
    written = capsys.readouterr()
    assert says in written.err
    assert (written.err.count("\n"), written.out) == (1, "")
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
