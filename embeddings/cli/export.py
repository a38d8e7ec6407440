"""`export`: a training checkpoint becomes a model directory."""

import re
import shutil
from pathlib import Path
from typing import Any, Literal

from embeddings.cli.errors import reason
from embeddings.common import InputError, OptionError


def export(
    checkpoint: Path,
    output: Path,
    scores: Path | None = None,
    licence: str | None = None,
    format: Literal["torch", "onnx", "onnx-int8", "adapter"] = "torch",
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
            its linear layers in int8, as `onnx/model_qint8_avx512_vnni.onnx`. `adapter` writes the LoRA matrices
            unmerged too, as `adapter/` in peft's layout; the model itself has them merged either way.
    """
    from embeddings.cli.card_facts import facts_of_checkpoint, read_scores, run_folder
    from embeddings.common.checkpoint_file import read_checkpoint
    from embeddings.interop.onnx_graph import check_onnx
    from embeddings.models.directory import ADAPTER_FOLDER, replaced_folder, require_folder_or_nothing
    from embeddings.models.lora import save_adapters
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
    if format == "adapter" and embedder.frozen_base is None:
        rule = "needs LoRA matrices on a model that has files of its own"
        raise OptionError("format", format, rule, "leave it out: the model directory holds all weights")
    if format in ("onnx", "onnx-int8"):
        check_onnx(embedder)
    output, run = output.expanduser(), run_folder(checkpoint)
    lines = [f"wrote {output}"]
    with replaced_folder(output) as new:
        embedder.save_pretrained(new)
        if format == "adapter":
            base = embedder.frozen_base.origin()
            save_adapters(embedder.backbone, new / ADAPTER_FOLDER, base.name, base.commit)
            lines.append(f"wrote {output / ADAPTER_FOLDER}: LoRA matrices for peft, of {base.name}")
        elif format != "torch":
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
    from embeddings.modules.optimized import configured_module, set_weights

    module = configured_module(state, str(checkpoint), explain=reason)
    set_weights(module, state, str(checkpoint))
    return module
