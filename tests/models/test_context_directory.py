import json
import shutil
from pathlib import Path

import pytest
from torch import nn

from embeddings.common import InputError
from embeddings.models import ContextualEmbedder, Embedder, MeanPooling, load_embedder
from embeddings.models.directory import ContextForm, is_contextual, read_context_options, write_norm
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.reading import carried_code


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contextual") / "model"
    tiny_contextual().save_pretrained(folder)
    return folder


def test_both_stages_lie_in_the_directory_with_their_code(written: Path) -> None:
    assert is_contextual(written)
    assert len(carried_code(written)) == 5
    assert sorted(str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()) == [
        "0_Context/config.json",
        "0_Context/context.json",
        "0_Context/context.safetensors",
        "0_Context/model.safetensors",
        "1_Pooling/config.json",
        "2_ResidualHead/config.json",
        "2_ResidualHead/model.safetensors",
        "config.json",
        "config_sentence_transformers.json",
        "context_layers.py",
        "model.safetensors",
        "modules.json",
        "pooling.py",
        "poolings.py",
        "portable.py",
        "portable_contextual.py",
        "text_settings.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert read_context_options(written) == {
        "num_context": 5,
        "num_soft_prompts": 3,
        "context_dropout": 0.005,
        "context_max_length": None,
        "residual_projection": True,
        "form": ContextForm(),
    }


def test_a_directory_that_does_not_say_a_documents_limit_has_none(tmp_path: Path) -> None:
    tiny_contextual(context_max_length=4).save_pretrained(tmp_path / "model")
    assert ContextualEmbedder.from_pretrained(tmp_path / "model").first_stage.max_length == 4
    file = tmp_path / "model/0_Context/context.json"
    settings = json.loads(file.read_text())
    del settings["context_max_length"]
    file.write_text(json.dumps(settings))
    assert ContextualEmbedder.from_pretrained(tmp_path / "model").first_stage.max_length is None


def test_the_widths_that_a_model_was_trained_at_stay_with_it(tmp_path: Path) -> None:
    model = tiny_contextual()
    model.trained_widths = (32, 8)
    model.save_pretrained(tmp_path / "model")
    assert load_embedder(tmp_path / "model").trained_widths == (32, 8)


def test_a_plain_model_takes_a_contextual_ones_place_whole(tmp_path: Path) -> None:
    tiny_contextual(num_soft_prompts=0).save_pretrained(tmp_path / "model")
    Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32)).save_pretrained(tmp_path / "model")
    assert not is_contextual(tmp_path / "model")
    assert not list((tmp_path / "model").glob("*.py"))
    assert type(load_embedder(tmp_path / "model")) is Embedder


def insert_norm(folder: Path) -> None:
    """Put a layer norm behind the pooling."""
    write_norm(folder / "3_LayerNorm", nn.LayerNorm(32))
    entries = json.loads((folder / "modules.json").read_text())
    entries.insert(2, {"type": "sentence_transformers.models.LayerNorm", "path": "3_LayerNorm"})
    (folder / "modules.json").write_text(json.dumps(entries))


DAMAGE = {
    "first stage gone": lambda d: (d / "0_Context/model.safetensors").unlink(),
    "first stage without a config": lambda d: (d / "0_Context/config.json").unlink(),
    "layers cut": lambda d: (d / "0_Context/context.safetensors").write_bytes(b"\x08"),
    "layers of another size": lambda d: edit(d / "0_Context/context.json", num_soft_prompts=4),
    "no size": lambda d: edit(d / "0_Context/context.json", num_context=None),
    "impossible limit": lambda d: edit(d / "0_Context/context.json", context_max_length=0),
    "a limit that is no number": lambda d: edit(d / "0_Context/context.json", context_max_length="8"),
    "impossible size": lambda d: edit(d / "0_Context/context.json", num_context=0),
    "settings no JSON": lambda d: (d / "0_Context/context.json").write_text("{"),
    "residual gone": lambda d: shutil.rmtree(d / "2_ResidualHead"),
    "residual without weights": lambda d: (d / "2_ResidualHead/model.safetensors").unlink(),
    "a layer norm": insert_norm,
    "another pooling": lambda d: edit(d / "1_Pooling/config.json", name="cls"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_one_line(tmp_path: Path, written: Path, damage: str) -> None:
    for path in written.rglob("*"):
        if path.is_file():
            target = tmp_path / "model" / path.relative_to(written)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    DAMAGE[damage](tmp_path / "model")
    with pytest.raises(InputError) as caught:
        ContextualEmbedder.from_pretrained(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
