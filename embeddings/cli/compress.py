"""`compress`: a finished model directory becomes a smaller one."""

import json
import time
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import yaml

from embeddings.cli.configs import located, read_config
from embeddings.cli.export import write_graphs
from embeddings.cli.retrieval import load_encoder
from embeddings.common import OptionError
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
from embeddings.models import load_embedder


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
    """Prune and quantise the matrices in a model's layers, one layer in memory; the same line resumes after a kill.

    Embeddings, norms, pooling and head stay as they are. The output is a model directory with all else that the model's
    has, and a card that says what was done. What is done so far is in `OUTPUT.work` until the output is complete.

    Args:
        model: A model directory or Hub id.
        output: The directory to write; it must not exist.
        data: A retrieval folder, by which the model is scored before and after.
        format: `onnx` writes the backbone's graph too, `onnx-int8` that and, beside it, one with its linear layers in
            int8 (see `export`). Graphs of quantised weights compute with the numbers that they stand for.
        device: Where each layer lies while its turn lasts, `cpu` or `cuda`; a GPU if there is one.
        retrain: A config of `fit`, or several as `[base.yaml, method.yaml]`, by which the model is trained after
            pruning and before quantisation. It starts from the pruned model with LoRA that keeps its zeros, and its
            logger, output and checkpoints lie in `OUTPUT.work`. The pooling must be the model's.
        pruning: Which weights become zero.
        quantization: In which numbers weights are stored.
        calibration: Which texts show what each layer is given.
    """
    from embeddings.interop.onnx import check_onnx

    folder = None if data is None else read_retrieval_folder(data)
    started = time.perf_counter()
    job = Compression(model, output, pruning, quantization, calibration, device)
    if format != "torch":
        # A model that no graph can be made of is refused before anything is written.
        check_onnx(load_embedder(str(job.source)))
    before = None if folder is None else score(str(job.source), folder, device)
    seconds = -time.perf_counter()
    configs = [retrain] if isinstance(retrain, Path) else retrain
    train = None if configs is None else retraining(configs, pruning)
    staged = job.run(train)
    seconds += time.perf_counter()
    lines = write_graphs(staged, output, with_int8=format == "onnx-int8") if format != "torch" else []
    after = None if folder is None else score(str(staged), folder, device)
    scores = {} if before is None or after is None else {"before": before, "after": after}
    report = job.publish(staged, {f"nDCG@10 {name}": value for name, value in scores.items()})
    print(compression_table(report, scores, seconds, time.perf_counter() - started))
    print(*lines, f"wrote {output}", sep="\n")


def retraining(configs: list[Path], pruning: PruningOptions) -> Retrain:
    """What trains a model directory by configs of `fit` and writes another one; refused where nothing is pruned."""
    if pruning.prune is None and pruning.layers is None:
        raise OptionError("retrain", str(configs[0]), "has no effect without --prune or --layers", "use fit")
    read = [read_config(located(str(path))) for path in configs]

    def train(model: Path, work: Path) -> Path:
        from embeddings.cli.fit import run_trainer

        key = sha256(json.dumps([model.name, *read], default=str).encode()).hexdigest()[:12]
        folder, target = work / f"retrain-{key}", work / f"retrained-{key}"
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        copies = deepcopy(read)
        exported = [export_to(target, config) for config in copies]
        options: dict[str, Any] = {"initial_model": str(model)}
        if pruning.prune is not None:
            options["lora"] = {"keep_zeros": True, "dropout": 0.0}
        added = [component("lightning.pytorch.callbacks.ModelCheckpoint", every_n_train_steps=20, save_last=True)]
        if not any(exported):
            added.append(component("embeddings.callbacks.ExportModel", output=str(target), replace=True))
        logger = component("lightning.pytorch.loggers.CSVLogger", save_dir=str(folder), name="runs")
        trainer = {"default_root_dir": str(folder), "logger": logger, "callbacks+": added}
        words = []
        for number, config in enumerate([*copies, {"trainer": trainer, "model": {"init_args": options}}]):
            path = folder / f"config-{number}.yaml"
            path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            words += ["--config", str(path)]
        run_trainer(["fit", *words, "--ckpt_path", "auto"])
        return target

    return train


def export_to(target: Path, config: dict[str, Any]) -> bool:
    """Have the `ExportModel` of a config write to `target`; returns whether it has one."""
    trainer, found = config.get("trainer") or {}, False
    for callback in [*(trainer.get("callbacks") or []), *(trainer.get("callbacks+") or [])]:
        if isinstance(callback, dict) and str(callback.get("class_path")).rpartition(".")[2] == "ExportModel":
            callback["init_args"] = {**callback.get("init_args", {}), "output": str(target), "replace": True}
            found = True
    return found


def component(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


def score(model: str, folder: RetrievalFolder, device: str | None) -> float:
    """nDCG@10 of a model directory on a retrieval folder."""
    encoder = load_encoder(model, device=device)
    if encoder.num_context:
        raise OptionError("data", model, "cannot score a contextual model", "leave it out")
    return score_retrieval(encoder, folder).metrics["ndcg_at_10"]


def compression_table(report: CompressionReport, scores: dict[str, float], seconds: float, total: float) -> str:
    """What was calibrated on, and size, zeros, score and time as text."""
    rows: list[list[object]] = [["", "before", "after"]]
    rows.append(["weights, MB", f"{report.bytes_before / 1e6:,.1f}", f"{report.bytes_after / 1e6:,.1f}"])
    rows.append(["zeros in the layers' matrices", f"{report.zeros_before:.2%}", f"{report.zeros:.2%}"])
    if scores:
        rows.append(["nDCG@10", f"{scores['before']:.4f}", f"{scores['after']:.4f}"])
    rows.append(["seconds of compression, in all", f"{seconds:.1f}", f"{total:.1f}"])
    lines = [format_table(rows)]
    if report.calibration is not None:
        about = report.calibration
        limit = "the model's limits" if about["max_length"] is None else f"at most {about['max_length']} a text"
        told = f"{about['num_texts']} texts, {about['num_tokens']:,} tokens ({limit}), seed {about['seed']}"
        lines.insert(0, f"calibrated on {told}")
    return "\n".join(lines)
