"""`export`: a training checkpoint becomes a model directory."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from embeddings.cli.parser import reason
from embeddings.common import InputError, OptionError
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.common.errors import refuse_given
from embeddings.figures.run_facts import SCORE, read_curves, read_run_record
from embeddings.interop.released import import_released
from embeddings.models.hub import push_to_hub
from embeddings.models.lora import save_adapters
from embeddings.models.model_card import TrainingFacts, check_licence, keeps_card, read_scores, write_model_card
from embeddings.models.model_files import (
    ADAPTER_FOLDER,
    CURVES_FILE,
    SCORES_FILE,
    replaced_folder,
    require_folder_or_nothing,
)
from embeddings.models.rotary import write_rotary_model
from embeddings.modules.checkpoint import configured_module, set_weights


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
        output: The directory to write; an existing one is replaced once the new one is complete.
        scores: A JSON file that `evaluate --output` wrote, for the card; `scores.json` in the directory is a copy.
        licence: The model's licence for the card, as the Hub names it (`apache-2.0`).
        format: `onnx` writes the backbone's graph too, as `onnx/model.onnx`, where sentence-transformers looks for it;
            for models that load without code of their own. `onnx-int8` writes that and, beside it, the same graph with
            its linear layers in int8, as `onnx/model_qint8_avx512_vnni.onnx`. `adapter` writes the LoRA matrices
            unmerged too, as `adapter/` in peft's layout; the model itself has them merged either way.
    """
    from embeddings.interop.onnx import check_onnx

    require_folder_or_nothing(output)
    check_licence("licence", licence)
    if not checkpoint.is_file():
        raise InputError(str(checkpoint), "no such checkpoint file", "give the .ckpt file of a run under checkpoints/")
    results = [] if scores is None else read_scores(scores)
    state = read_checkpoint(checkpoint)
    module: Any = configured_module(state, str(checkpoint), explain=reason)
    set_weights(module, state, str(checkpoint))
    embedder = getattr(module, "embedder", None)
    if embedder is None:
        given = {"scores": scores, "licence": licence, "format": None if format == "torch" else format}
        refuse_given(given, "is for embedding models only")
        module.save_pretrained(output)
        print(f"wrote {output}")
        return
    if format == "adapter" and embedder.frozen_base is None:
        rule = "needs LoRA matrices on a model that has files of its own"
        raise OptionError("format", format, rule, "leave it out: the model directory holds all weights")
    if format in ("onnx", "onnx-int8"):
        check_onnx(embedder)
    output, run = output.expanduser(), checkpoint.absolute().parent
    run = run.parent if run.name == "checkpoints" else run
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
        if scores is not None:
            shutil.copyfile(scores, new / SCORES_FILE)
        if not keeps_card(output):
            facts, name = facts_of_checkpoint(state, run), output.resolve().name
            write_model_card(new, embedder, facts, scores=results, licence=licence, name=name)
    print(*lines, sep="\n")


def push(
    model: Path,
    name: str,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload the model",
    update: bool = False,
) -> None:
    """Upload a model directory with its card to the Hugging Face Hub, in one commit.

    Only files of the model go up, with `README.md`, `scores.json` and the licence. The card shows the scores of
    `scores.json`, which `evaluate --output` wrote. The token is that of `HF_TOKEN` or of `hf auth login`.

    Args:
        model: The directory.
        name: The repository, `OWNER/NAME`; `NAME` alone is one of the token's owner.
        private: Whether a new repository is private.
        revision: The branch to commit to, made where it is missing; main where none is given.
        message: First line of the commit.
        update: Whether a repository of this name may exist; its model files that the directory lacks are deleted.
    """
    pushed = push_to_hub(model, name, private=private, revision=revision, message=message, update=update)
    size = f"{pushed.num_bytes / 1e6:,.1f} MB"
    print(f"pushed {len(pushed.files)} files ({size}) to {pushed.url}, commit {pushed.commit[:12]}")
    if pushed.left_out:
        print(f"left out, since they are no files of the model: {', '.join(pushed.left_out)}")


def write_graphs(folder: Path, output: Path, *, with_int8: bool) -> list[str]:
    """Write the ONNX graphs of a model directory, and return a line on each, by the place where it will lie."""
    from embeddings.interop.onnx import GRAPH_FILE, INT8_GRAPH_FILE, write_int8_onnx, write_onnx

    lines = [f"wrote {output / GRAPH_FILE}: {write_onnx(folder)}"]
    if with_int8:
        told = f"least cosine {write_int8_onnx(folder):.4f} of mean states over texts of random tokens"
        lines.append(f"wrote {output / INT8_GRAPH_FILE}: {told}")
    return lines


def import_checkpoint(
    source: str,
    output: Path,
    revision: str | None = None,
    base: list[str] | str | None = None,
    known_as: str | None = None,
    assume: dict[str, int | float] | None = None,
) -> None:
    """Write the model directory of a published checkpoint, without running its code.

    Known are NV-Embed v1 and v2, nomic-embed-text-v1, v1.5 and v2-moe, nomic-bert-2048, cde-small v1 and v2, LLM2Vec's
    adapters, and sentence-transformers directories. Read are config.json, safetensors, the tokenizer and what a
    sentence-transformers directory says. The checkpoint must be complete and of one family; what it has that the
    model has no use for is named. An embedding model gets a card, `README.md`, with the source, the licence that the
    source's own card states, prompts and use. Numbers that the model needs and no file states (cde-small's heads,
    rotation and windows, the longest text) are printed, and kept in import.json.

    Args:
        source: A directory or Hub id.
        output: The directory to write; an existing one is replaced once the new one is complete.
        revision: Commit, tag or branch of a Hub id.
        base: What an adapter was trained on, where its files do not say it: directories or Hub ids, the decoder last.
        known_as: The published name of a model in a directory of another name, whose card uses vectors as no file
            states: `nomic-embed-text-v1.5` (layer norm and widths) or `nomic-embed-text-v2-moe` (widths).
        assume: Numbers that no file states, by the names that this command prints: `--assume.num_attention_heads 8`.
    """
    bases = [base] if isinstance(base, str) else base or ()
    made = import_released(source, output, revision, bases, known_as, assume)
    left = made.report.left
    names = f", left {len(left)} ({', '.join(left[:4])}{', …' if len(left) > 4 else ''})" if left else ", left none"
    used_as = "" if made.used_as is None else f"; vectors as the card of {made.used_as} has them"
    print(f"wrote {output} from {made.family}: used {len(made.report.used)} tensors, none missing{names}{used_as}")
    if made.assumed:
        numbers = ", ".join(f"{name} {value:g}" for name, value in made.assumed.items())
        print(f"assumed, since no file states it: {numbers}; --assume.NAME gives another")


def convert(
    source: str, output: Path, num_positions: int = 2048, rope_theta: float = 10_000.0, keep_head: bool = True
) -> None:
    """Write the rotary model of an XLM-R, RoBERTa or BERT checkpoint.

    All weights but the position table stay, so the model has to get used to its new positions before it is of use:
    `fit` with `lightning_configs/methods/mlm_adapt.yaml`.

    Args:
        source: A directory or Hub id of XLM-R, RoBERTa or BERT, with its language-model head or without.
        output: The directory to write; an existing one is replaced once the new one is complete.
        num_positions: Tokens that the model is meant for; its tokenizer cuts longer texts.
        rope_theta: Base of the rotation's angles.
        keep_head: Whether the language-model head goes along, which the adaptation needs.
    """
    made = write_rotary_model(source, output, num_positions, rope_theta, keep_head)
    vocabulary = f"vocabulary of {made.vocabulary_before:,} rows padded to {made.vocabulary_after:,}"
    positions = f"rotary positions for {num_positions:,} tokens"
    print(f"wrote {output}: {made.num_parameters:,} parameters, {vocabulary}, {positions}")


def facts_of_checkpoint(state: Mapping[str, Any], run: Path) -> TrainingFacts:
    """What a checkpoint and its run's folder say of the training; a missing or damaged file says nothing."""
    steps = state.get("global_step")
    steps = steps if isinstance(steps, int) else 0
    record: dict[str, Any] = {}
    known: list[tuple[int, float]] = []
    with suppress(InputError):
        record = read_run_record(run)
    with suppress(InputError):
        scores = zip(*read_curves(run, [SCORE])[SCORE], strict=True)
        known = [(step, value) for step, value in scores if step <= steps]
    return TrainingFacts(state["run_config"], steps, record, known)
