"""Model directories and checkpoints that are damaged, incomplete or of another type."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.reliability.cases import FIT, Make, both, bytes_of, copied, edited, nothing, rows, run, without

SEARCH = "search --model model --corpus corpus.jsonl fox"
WEIGHTS = "model.safetensors"


def model(damage: Callable[[Path], object], name: str = "model") -> Make:
    """A corpus, and a damaged model directory."""
    return both(rows("corpus.jsonl", {"text": "a"}), copied(name, damage, "model"))


def backbone(damage: Callable[[Path], object], name: str = "backbone") -> Make:
    """A run with a damaged backbone."""
    return both(copied(name, damage, "model"), run(lambda c: c["model"]["init_args"]["backbone"].update(name="model")))


def weights(change: Callable[[dict[str, torch.Tensor]], object], name: str = WEIGHTS) -> Callable[[Path], object]:
    """Changes the tensors of a folder."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return rewrite


def poisoned(tensors: dict[str, torch.Tensor]) -> None:
    """Set an element of a weight to NaN."""
    tensors["encoder.layer.1.output.dense.weight"][0, 0] = torch.nan


def pickled(folder: Path) -> None:
    """Convert the weights to a pickle, the format of older models."""
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def more_tokens(folder: Path) -> None:
    """Add a token beyond the embeddings to the tokenizer."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["zebra"] = 900
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def adapters_alone(folder: Path) -> None:
    """Replace the model by adapters without a base model."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "gone", "r": 2}')
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")


EXPORT, CONVERT = "export --checkpoint last.ckpt --output out", "convert --source model --output out --no-keep-head"
RESUME = FIT + " --ckpt_path last.ckpt --trainer.max_steps 4"
CASES = {
    SEARCH: {
        "truncated weights": (model(bytes_of(WEIGHTS, lambda data: data[:-900])), "model: cannot be loaded: "),
        "pickled weights": (model(pickled), "model: cannot be loaded: "),
        "NaN weights": (model(weights(poisoned)), "encoder.layer.1.output.dense.weight"),
        "a config of another width": (
            model(edited("config.json", hidden_size=64)),
            "model: embeddings.LayerNorm.bias has shape (32,), config.json expects (64,)",
        ),
        "a config of another architecture": (model(edited("config.json", model_type="mistral")), "model: "),
        "a config with heads that do not divide the width": (
            model(edited("config.json", num_attention_heads=5)),
            "model: cannot be loaded: ",
        ),
        "a text instead of a number": (model(edited("config.json", num_hidden_layers="two")), "model/config.json: "),
        "a million layers": (
            model(edited("config.json", num_hidden_layers=10**6)),
            "model/config.json: num_hidden_layers must be at most 2,000, got 1,000,000",
        ),
        "adapters without their model": (
            model(adapters_alone),
            "model: contains adapters of another model, 'gone'; merge them into it with peft's merge_and_unload",
        ),
        "no config": (model(without("config.json")), "model/config.json: "),
        "no tokenizer": (model(without("tokenizer.json")), "model: "),
        "a tokenizer of another model": (model(more_tokens), "model: the tokenizer has id 900, the model has 384"),
        "an unknown pooling": (
            model(edited("1_Pooling/config.json", pooling_mode_mean_tokens=False)),
            "model/1_Pooling/config.json: has a pooling without a mode",
        ),
        "a pooling without its weights": (
            model(without("1_Pooling/model.safetensors"), "latent"),
            "model/1_Pooling/model.safetensors: cannot be loaded",
        ),
        "a prompt that is a number": (
            model(edited("config_sentence_transformers.json", prompts={"query": 3})),
            "model/config_sentence_transformers.json: ",
        ),
        "Matryoshka widths above that of the vectors": (
            model(edited("config_sentence_transformers.json", matryoshka_dimensions=[64])),
            "model/config_sentence_transformers.json: matryoshka_dimensions must list widths from 1 to 32",
        ),
    },
    FIT: {
        "a missing shard of weights": (
            backbone(lambda folder: next(folder.glob("model-00002*")).unlink(), "sharded"),
            "model: cannot be loaded: ",
        ),
    },
    EXPORT: {
        "no checkpoint to export": (nothing, "last.ckpt: no such checkpoint file"),
        "a truncated checkpoint": (copied("last.ckpt", lambda path: os.truncate(path, 5000)), "last.ckpt: "),
    },
    RESUME: {
        "a missing checkpoint": (run(), "--ckpt_path last.ckpt: no such file"),
        "a named pipe as a checkpoint": (
            both(run(), lambda place: os.mkfifo(place.folder / "last.ckpt")),
            "--ckpt_path last.ckpt: is not a regular file",
        ),
    },
    CONVERT.replace(" out", " model"): {
        "a model to convert onto itself": (copied("backbone", to="model"), "output must not be the source")
    },
}
