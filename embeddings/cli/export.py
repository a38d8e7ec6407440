"""`export`: a training checkpoint becomes a model directory."""

import re
import shutil
from pathlib import Path
from typing import Any, Literal

from embeddings.cli.errors import reason
from embeddings.common import InputError, OptionError
from embeddings.common.text import one_line

ALLOWED_CLASSES = ("embeddings.", "torch.optim.")


def export(
    checkpoint: Path,
    output: Path,
    scores: Path | None = None,
    licence: str | None = None,
    format: Literal["torch", "onnx", "onnx-int8"] = "torch",
) -> None:
    """Write the model of a training checkpoint: a sentence-transformers directory, or a language model's directory.

    The checkpoint says how its module is built. Only this library's classes and PyTorch's optimisers are made from it,
    and its tensors are read without running any code, so a checkpoint from elsewhere cannot run anything. An embedding
    model gets a card, `README.md`, with what the checkpoint and the files of its run know of the training, and the
    `curves.png` that `show curves` drew there.

    Args:
        checkpoint: A `.ckpt` file that `fit` wrote.
        output: The directory to write; one that is there is replaced once the new one is whole.
        scores: A JSON file that `evaluate --output` wrote, for the card.
        licence: The model's licence for the card, as the Hub names it (`apache-2.0`).
        format: `onnx` writes the backbone's graph too, as `onnx/model.onnx`, where sentence-transformers looks for it;
            for models that load without code of their own. `onnx-int8` writes that and, beside it, the same graph with
            its linear layers in int8, as `onnx/model_qint8_avx512_vnni.onnx`.
    """
    from embeddings.cli.card_facts import facts_of_checkpoint, read_scores, run_folder
    from embeddings.common.checkpoint_file import read_checkpoint
    from embeddings.interop.onnx_graph import check_onnx
    from embeddings.models.directory import replaced_folder, require_folder_or_nothing
    from embeddings.models.model_card import CURVES_FILE, keeps_card, write_model_card

    require_folder_or_nothing(output)
    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence):
        raise OptionError("licence", licence, "must be a name of the Hub's", "write it as apache-2.0 or other")
    if not checkpoint.is_file():
        raise InputError(str(checkpoint), "no such checkpoint file", "give the .ckpt file of a run under checkpoints/")
    results = [] if scores is None else read_scores(scores)
    state = read_checkpoint(checkpoint)
    module = trained_module(state, checkpoint)
    embedder = getattr(module, "embedder", None)
    if embedder is None:
        given = {"scores": scores, "licence": licence, "format": None if format == "torch" else format}
        for option, value in given.items():
            if value is not None:
                raise OptionError(option, str(value), "is for an embedding model, this is none", "leave it out")
        module.save_pretrained(output)
        print(f"wrote {output}")
        return
    if format != "torch":
        check_onnx(embedder)
    output, run = output.expanduser(), run_folder(checkpoint)
    lines = [f"wrote {output}"]
    with replaced_folder(output) as new:
        embedder.save_pretrained(new)
        if format != "torch":
            lines += write_graphs(new, output, with_int8=format == "onnx-int8")
        if (run / CURVES_FILE).is_file():
            shutil.copyfile(run / CURVES_FILE, new / CURVES_FILE)
        if not keeps_card(output):
            facts, name = facts_of_checkpoint(state, run), output.resolve().name
            write_model_card(new, embedder, facts, scores=results, licence=licence, name=name)
    print(*lines, sep="\n")


def write_graphs(folder: Path, output: Path, *, with_int8: bool) -> list[str]:
    """Write the ONNX graphs of a model directory, and return a line on each, by the place where it will lie."""
    from embeddings.interop.onnx_graph import GRAPH_FILE, write_onnx
    from embeddings.interop.onnx_int8 import INT8_GRAPH_FILE, write_int8_onnx

    lines = [f"wrote {output / GRAPH_FILE}: {write_onnx(folder)}"]
    if with_int8:
        told = f"least cosine {write_int8_onnx(folder):.4f} of mean states over texts of random tokens"
        lines.append(f"wrote {output / INT8_GRAPH_FILE}: {told}")
    return lines


def trained_module(state: dict[str, Any], checkpoint: Path) -> Any:
    """The module of a checkpoint with its weights.

    Raises:
        InputError: If the checkpoint does not say how it is built, or it is none of those that train a model, or its
            weights do not fit.
    """
    from embeddings.modules.base import ContrastiveModule
    from embeddings.modules.masked_lm import MaskedLMModule

    config = state.get("run_config")
    if not isinstance(config, dict) or "model" not in config:
        raise InputError(str(checkpoint), "holds no run_config", "export a checkpoint that `main.py fit` wrote")
    module = build_module(config["model"], checkpoint)
    if not isinstance(module, ContrastiveModule | MaskedLMModule):
        raise InputError(str(checkpoint), f"holds a {type(module).__name__}, which trains no model", "export another")
    try:
        module.load_state_dict(state["state_dict"])
        module.on_load_checkpoint(state)
    except (KeyError, RuntimeError, TypeError) as error:
        what = f"its content does not fit its config: {one_line(str(error), 100)}"
        raise InputError(str(checkpoint), what, "export another") from error
    return module


def build_module(model: dict[str, Any], checkpoint: Path) -> Any:
    """The module that a `model:` section describes.

    Raises:
        InputError: If the section names a class that a checkpoint may not make, or makes no module.
    """
    from jsonargparse import ArgumentError, ArgumentParser
    from lightning import LightningModule

    for class_path in class_paths(model):
        if not class_path.startswith(ALLOWED_CLASSES):
            raise InputError(str(checkpoint), f"asks for the class {class_path}", "load it only by a config you wrote")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    try:
        return parser.instantiate(parser.parse_object({"model": model})).model
    except (ArgumentError, TypeError) as error:
        what = f"its config makes no model: {one_line(reason(str(error)), 120)}"
        raise InputError(str(checkpoint), what, "export it with the version that wrote it") from error


def class_paths(value: Any) -> list[str]:
    """Every `class_path` inside nested plain types."""
    if isinstance(value, dict):
        found = [value["class_path"]] if isinstance(value.get("class_path"), str) else []
        return found + [path for item in value.values() for path in class_paths(item)]
    if isinstance(value, list):
        return [path for item in value for path in class_paths(item)]
    return []
