"""Commands that write a model directory: `export`, `import`, `convert`, `compress`, and `push` to the Hub."""

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from embeddings.cli.parser import listed, read_configs, reason
from embeddings.cli.retrieval import load_encoder
from embeddings.common import InputError, OptionError
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.common.errors import refuse_given, require_minimum
from embeddings.common.own_folder import replaced_folder, require_replaceable
from embeddings.common.text import format_table
from embeddings.compression import (
    CalibrationOptions,
    Compression,
    CompressionReport,
    PruningOptions,
    QuantizationOptions,
    Retrain,
)
from embeddings.evaluation.folders import RetrievalFolder, read_retrieval_folder
from embeddings.evaluation.runner import score_retrieval
from embeddings.figures.run_facts import read_run_record, validation_scores
from embeddings.interop.golden import add_golden
from embeddings.interop.released import import_released
from embeddings.models import load_embedder
from embeddings.models.gguf import write_gguf
from embeddings.models.lora import save_adapters
from embeddings.models.model_card import TrainingFacts, check_licence, push_to_hub, read_scores, write_model_card
from embeddings.models.model_files import ADAPTER_FOLDER, CURVES_FILE, SCORES_FILE
from embeddings.models.moe.upcycling import write_rotary_model
from embeddings.modules.checkpoint import configured_module, set_weights


def export(
    checkpoint: Path,
    output: Path,
    scores: Path | None = None,
    licence: str | None = None,
    format: Literal["torch", "onnx", "onnx-int8", "adapter"] = "torch",
) -> None:
    """Write the model of a training checkpoint: a sentence-transformers directory, or a language model's directory.

    The checkpoint contains its module's config. Only this library's classes and PyTorch's optimisers are instantiated,
    and tensors are read without running code, so an untrusted checkpoint is safe to export. An embedding model gets a
    card, `README.md`, with the training facts of the checkpoint and its run, and the run's `curves.png`.

    Args:
        checkpoint: A `.ckpt` file that `fit` wrote.
        output: The directory to write; an existing one is replaced once the new one is complete.
        scores: A JSON file that `evaluate --output` wrote, for the card and `scores.json`.
        licence: The model's licence for the card, as the Hub names it (`apache-2.0`).
        format: `onnx` also writes the backbone's graph, for models without custom code, `onnx-int8` also that graph
            with int8 linear layers. `adapter` also writes the LoRA matrices, which the model has merged, for peft.
    """
    from embeddings.interop.onnx import check_onnx

    require_replaceable(output)
    check_licence("licence", licence)
    if not checkpoint.exists():
        raise InputError(str(checkpoint), "no such checkpoint file", "give the .ckpt file of a run under checkpoints/")
    if scores is not None:
        read_scores(scores)
    state = read_checkpoint(checkpoint)
    module: Any = configured_module(state, str(checkpoint), explain=reason)
    set_weights(module, state, str(checkpoint))
    embedder = getattr(module, "embedder", None)
    if embedder is None:
        options = {"scores": scores, "licence": licence, "format": None if format == "torch" else format}
        refuse_given(options, "is for embedding models only")
        module.save_pretrained(output)
        print(f"wrote {output}")
        return
    if format == "adapter" and embedder.frozen_base is None:
        rule = "needs LoRA matrices on a base model that is a directory or a Hub id"
        raise OptionError("format", format, rule, "leave it out: the model directory holds all weights")
    if format in ("onnx", "onnx-int8"):
        check_onnx(embedder)
    output, run = output.expanduser(), checkpoint.absolute().parent
    run = run.parent if run.name == "checkpoints" else run
    lines = [f"wrote {output}"]
    with replaced_folder(output) as new:
        embedder.save_pretrained(new, card=False)
        if format == "adapter":
            base = embedder.frozen_base.origin()
            if base.commit is None and not Path(base.name).is_dir():
                # The name of an installed model, which other libraries do not know.
                base = base._replace(name=str(embedder.frozen_base.folder))
            save_adapters(embedder.backbone, new / ADAPTER_FOLDER, base.name, base.commit, output)
            lines.append(f"wrote {output / ADAPTER_FOLDER}: LoRA matrices for peft, of {base.name}")
        elif format != "torch":
            lines += write_graphs(new, output, with_int8=format == "onnx-int8")
        if (run / CURVES_FILE).is_file():
            shutil.copyfile(run / CURVES_FILE, new / CURVES_FILE)
        if scores is not None:
            shutil.copyfile(scores, new / SCORES_FILE)
        add_golden(new)
        write_model_card(new, embedder, facts_of_checkpoint(state, run), licence=licence, location=output)
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

    Only the model's files are uploaded, with `README.md`, `scores.json` and the licence. The token comes from
    `HF_TOKEN` or `hf auth login`.

    Args:
        model: The model directory.
        name: The repository, `OWNER/NAME`; `NAME` alone belongs to the token's owner.
        private: Whether a new repository is private.
        revision: The branch to commit to, created if it does not exist; default main.
        message: First line of the commit.
        update: Whether to update an existing repository; its model files that the directory lacks are deleted.
    """
    pushed = push_to_hub(model, name, private=private, revision=revision, message=message, update=update)
    size = f"{pushed.num_bytes / 1e6:,.1f} MB"
    print(f"pushed {len(pushed.files)} files ({size}) to {pushed.url}, commit {pushed.commit[:12]}")


def write_graphs(folder: Path, output: Path, *, with_int8: bool) -> list[str]:
    """Write the ONNX graphs of a model directory; returns a line on each, with its final path below `output`."""
    from embeddings.interop.onnx import GRAPH_FILE, INT8_GRAPH_FILE, write_int8_onnx, write_onnx

    lines = [f"wrote {output / GRAPH_FILE}: {write_onnx(folder)}"]
    if with_int8:
        accuracy = f"minimum cosine {write_int8_onnx(folder):.4f} of mean states over texts of random tokens"
        lines.append(f"wrote {output / INT8_GRAPH_FILE}: {accuracy}")
    return lines


def import_checkpoint(
    source: str,
    output: Path,
    revision: str | None = None,
    base: list[str] | str | None = None,
    known_as: str | None = None,
) -> None:
    """Write the model directory of a published checkpoint, without running its code.

    Supported are NV-Embed v1 and v2, nomic-embed-text-v1, v1.5 and v2-moe, nomic-bert-2048, cde-small v1 and v2,
    LLM2Vec's adapters, and sentence-transformers directories. The checkpoint must be complete; unused tensors are
    named. An embedding model gets a card with the source, its licence, prompts and usage. Numbers that the model needs
    but no file states are printed, and recorded in import.json.

    Args:
        source: A directory or Hub id.
        output: The directory to write; an existing one is replaced once the new one is complete.
        revision: Commit, tag or branch of a Hub id.
        base: The models that an adapter was trained on, if its files do not say: directories or Hub ids, decoder last.
        known_as: The published name of a renamed model whose card defines settings that are in no file:
            `nomic-embed-text-v1.5` or `nomic-embed-text-v2-moe`.
    """
    made = import_released(source, output, revision, listed(base), known_as)
    left = made.report.left
    names = f" ({', '.join(left[:4])}{', …' if len(left) > 4 else ''})" if left else ""
    unused = f", {len(left) or 'none'} unused{names}"
    used_as = "" if made.used_as is None else f"; with the vector settings of {made.used_as}'s card"
    print(f"wrote {output} from {made.family}: used {len(made.report.used)} tensors, none missing{unused}{used_as}")
    if made.assumed:
        numbers = ", ".join(f"{name} {value:g}" for name, value in made.assumed.items())
        print(f"assumed, since no file states it: {numbers}")


def convert(
    source: str, output: Path, num_positions: int = 2048, rope_theta: float = 10_000.0, keep_head: bool = True
) -> None:
    """Replace the learned positions of an XLM-R, RoBERTa or BERT checkpoint by rotary ones, or convert a GGUF file.

    All weights except the position table are copied, so the model must be adapted to its new positions before use: run
    `fit` with `lightning_configs/methods/mlm_adapt.yaml`.

    A `.gguf` file becomes a directory of its dequantised language model in bfloat16, without other changes.

    Args:
        source: A directory or Hub id of XLM-R, RoBERTa or BERT, with or without its language-model head; or a `.gguf`
            file of any architecture that transformers reads (extra `decoder`).
        output: The directory to write; an existing one is replaced once the new one is complete.
        num_positions: Maximum tokens of a text; the tokenizer truncates longer ones.
        rope_theta: Base of the rotary angles.
        keep_head: Whether to copy the language-model head, which the adaptation needs.
    """
    if source.endswith(".gguf"):
        given = {
            "num_positions": (num_positions, 2048),
            "rope_theta": (rope_theta, 1e4),
            "keep_head": (keep_head, True),
        }
        changed = {name: value for name, (value, default) in given.items() if value != default}
        refuse_given(changed, "has no effect on a GGUF file, whose model is not changed")
        file = Path(source).expanduser()
        if not file.is_file():
            raise InputError(source, "no such file", "check the path")
        with replaced_folder(output) as new:
            model = write_gguf(file, new)
        print(f"wrote {output}: {model.num_parameters():,} parameters of {type(model).__name__} in bfloat16")
        return
    require_minimum("num_positions", num_positions, 1, "the paper uses 2,048")
    rotary = write_rotary_model(source, output, num_positions, rope_theta, keep_head)
    size = f"{rotary.num_parameters():,} parameters, vocabulary of {rotary.config.vocab_size:,} rows"
    print(f"wrote {output}: {size}, rotary positions for {num_positions:,} tokens")


def facts_of_checkpoint(state: Mapping[str, Any], run: Path) -> TrainingFacts:
    """The training facts in a checkpoint and its run's folder; missing and damaged files are skipped."""
    steps = state.get("global_step")
    steps = steps if isinstance(steps, int) else 0
    record: dict[str, Any] = {}
    with suppress(InputError):
        record = read_run_record(run)
    return TrainingFacts(state["run_config"], steps, record, validation_scores(run, steps))


def compress(
    model: str,
    output: Path,
    data: Path | None = None,
    format: Literal["torch", "onnx", "onnx-int8"] = "torch",
    device: str | None = None,
    retrain: Path | list[Path] | None = None,
    *,
    pruning: PruningOptions,
    quantization: QuantizationOptions,
    calibration: CalibrationOptions,
) -> None:
    """Prune and quantise the matrices of a model's layers, layer by layer; to resume, run the same command again.

    Embeddings, norms, pooling and head are unchanged. Partial results are in `OUTPUT.work` until the output, a model
    directory with a card, is complete.

    Args:
        model: A model directory or Hub id.
        output: The directory to write; it must not exist.
        data: A retrieval folder on which the model is scored before and after.
        format: `onnx` also writes the backbone's graph; `onnx-int8` also one with int8 linear layers (see `export`).
        device: Device on which each layer is compressed, `cpu` or `cuda`; default a GPU if there is one.
        retrain: A config of `fit` with the model's pooling, or several as `[base.yaml, method.yaml]`, to train the
            pruned model with, by LoRA that preserves its zeros, before quantisation.
    """
    from embeddings.interop.onnx import check_onnx

    folder = None if data is None else read_retrieval_folder(data)
    started = time.perf_counter()
    job = Compression(model, output, pruning, quantization, calibration, device)
    if format != "torch":
        # Refuse a model that cannot be exported to ONNX before anything is written.
        check_onnx(load_embedder(str(job.source)))
    before = None if folder is None else score(str(job.source), folder, device)
    seconds = -time.perf_counter()
    configs = listed(retrain)
    staged = job.run(retraining(configs, pruning) if configs else None)
    seconds += time.perf_counter()
    lines = write_graphs(staged, output, with_int8=format == "onnx-int8") if format != "torch" else []
    after = None if folder is None else score(str(staged), folder, device)
    scores = {} if before is None or after is None else {"before": before, "after": after}
    add_golden(staged)
    report = job.publish(staged, {f"nDCG@10 {name}": value for name, value in scores.items()})
    print(compression_table(report, scores, seconds, time.perf_counter() - started))
    print(*lines, f"wrote {output}", sep="\n")


def retraining(configs: list[Path], pruning: PruningOptions) -> Retrain:
    """A function that trains a pruned model directory with configs of `fit` and returns the new directory.

    Its runs are in folders named by a hash of model and configs, so only an unfinished one trains again.
    """
    if pruning.prune is None and pruning.layers is None:
        raise OptionError("retrain", str(configs[0]), "has no effect without --prune or --layers", "use fit")
    contents = [content for path in configs for _, content in read_configs(str(path))]

    def train(model: Path, work: Path) -> Path:
        from embeddings.cli.fit import run_trainer

        key = sha256(json.dumps([model.name, *contents], default=str).encode()).hexdigest()[:12]
        folder = work / f"retrain-{key}"
        target = folder / "model"
        if target.exists():
            return target
        added = [
            component("lightning.pytorch.callbacks.ModelCheckpoint", every_n_train_steps=20, save_last=True),
            # It replaces that of the configs.
            component("embeddings.callbacks.ExportModel", output=str(target)),
        ]
        options: dict[str, Any] = {"initial_model": str(model)}
        if pruning.prune is not None:
            options["lora"] = {"keep_zeros": True, "dropout": 0.0}
        own = {"model": {"init_args": options}, "trainer": {"callbacks+": added}}
        words = [f"--config={json.dumps(config, default=str)}" for config in (*contents, own)]
        run_trainer(["fit", *words, f"--run-dir={folder}", "--ckpt_path=auto"])
        return target

    return train


def component(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


def score(model: str, folder: RetrievalFolder, device: str | None) -> float:
    """nDCG@10 of a model directory on a retrieval folder."""
    encoder = load_encoder(model, device=device)
    if encoder.num_context:
        raise OptionError("data", model, "cannot score a contextual model", "leave it out")
    return score_retrieval(encoder, folder).metrics["ndcg_at_10"]


def compression_table(report: CompressionReport, scores: dict[str, float], seconds: float, total: float) -> str:
    """The calibration texts, and a table of size, zeros, score and time."""
    rows: list[list[object]] = [["", "before", "after"]]
    rows.append(["weights, MB", f"{report.bytes_before / 1e6:,.1f}", f"{report.bytes_after / 1e6:,.1f}"])
    rows.append(["zeros in the layers' matrices", f"{report.zeros_before:.2%}", f"{report.zeros:.2%}"])
    if scores:
        rows.append(["nDCG@10", f"{scores['before']:.4f}", f"{scores['after']:.4f}"])
    rows.append(["seconds of compression, in total", f"{seconds:.1f}", f"{total:.1f}"])
    lines = [format_table(rows)]
    if report.calibration is not None:
        texts = report.calibration
        limit = "the model's limits" if texts["max_length"] is None else f"at most {texts['max_length']} a text"
        size = f"{texts['num_texts']} texts, {texts['num_tokens']:,} tokens ({limit})"
        lines.insert(0, f"calibrated on {size}, seed {texts['seed']}")
    return "\n".join(lines)
