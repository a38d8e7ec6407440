"""Compression of a trained model in phases: pruning, optional retraining, quantisation.

Every phase reads a model directory and writes another, layer by layer, in a work folder. A killed run resumes at the
layer where it stopped.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from embeddings.common import OptionError, require_minimum
from embeddings.common.io import MANIFEST, atomic_folder, file_sha256, link_or_copy, share_files, write_json, write_text
from embeddings.common.jobs import discard_on_user_error
from embeddings.common.own_folder import record_all
from embeddings.compression.calibration import CalibrationOptions, calibration_texts, tokenise
from embeddings.compression.layerwise import LayerwiseJob, LayerwiseModel, linear_layers
from embeddings.compression.pruning import (
    PruningMethod,
    Sparsity,
    prune_by_magnitude,
    prune_by_sparsegpt,
    prune_by_wanda,
)
from embeddings.compression.quantization import FORMAT_OF, NumberName, quantise_by_gptq, quantization_config
from embeddings.models import ContextualEmbedder, keep_layers, load_embedder
from embeddings.models.backbone import has_pooling_layer
from embeddings.models.bidirectional import layers
from embeddings.models.model_card import plain, table
from embeddings.models.model_files import (
    ADAPTER_FOLDER,
    CARD_FILE,
    GOLDEN_FILE,
    QUANTIZATION,
    SCORES_FILE,
    is_own_card,
    read_json,
    resolve_model,
    weight_files,
    zeros_by_matrix,
)
from embeddings.models.pooling import plain_backbone

# Files that are not copied from the source: weights and graphs that the compressed model replaces, and its scores.
_NOT_COPIED = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.msgpack", "*.ot"),
    *("onnx", "openvino", ADAPTER_FOLDER, GOLDEN_FILE, SCORES_FILE, MANIFEST, ".*"),
)
# Retrains the model of a directory; writes the new directory in the work folder (second argument) and returns it.
Retrain = Callable[[Path, Path], Path]


@dataclass(frozen=True)
class PruningOptions:
    """Options for pruning.

    Args:
        prune: `magnitude` removes the smallest weights, `wanda` the smallest products of weight and input, `sparsegpt`
            the weights whose removal the others can compensate, and updates those. None prunes nothing.
        pattern: `N:M` keeps N of every M neighbouring inputs (the papers use 2:4 and 4:8); `unstructured` allows zeros
            anywhere.
        sparsity: Fraction of zeros for `unstructured`; 0.5, as in the papers, if left out.
        damping: Value added to the diagonal of the inputs' Gram matrix, as a fraction of the diagonal's mean
            (`sparsegpt`, `quantize`).
        block_size: Number of inputs that `sparsegpt` and `quantize` process at a time.
        layers: Number of layers to keep, evenly spread from the first to the last; the others are removed first. None
            keeps all.
    """

    prune: PruningMethod | None = None
    pattern: str = "unstructured"
    sparsity: float | None = None
    damping: float = 0.01
    block_size: int = 128
    layers: int | None = None

    def __post_init__(self) -> None:
        check_solver(self.damping, self.block_size)
        group = self.amount().group
        if self.prune is None:
            for name, value, default in (("pattern", self.pattern, "unstructured"), ("sparsity", self.sparsity, None)):
                if value != default:
                    raise OptionError(name, value, "has no effect without --prune", "name a method, such as sparsegpt")
        if self.prune == "sparsegpt" and group is not None and self.block_size % group:
            rule = f"must be a multiple of {group}, the group size of the pattern"
            raise OptionError("block_size", self.block_size, rule, "128 suits 2:4 and 4:8")

    def amount(self) -> Sparsity:
        return Sparsity.parse(self.pattern, self.sparsity)

    @property
    def needs_inputs(self) -> bool:
        return self.prune in ("wanda", "sparsegpt")

    def fields(self) -> dict[str, Any]:
        names = ["prune", "pattern", *(["damping", "block_size"] if self.prune == "sparsegpt" else [])]
        return {**{name: getattr(self, name) for name in names}, "sparsity": self.amount().fraction}

    def __call__(self, weight_OI: Tensor, gram_II: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        amount = self.amount()
        if self.prune == "magnitude" or gram_II is None:
            pruned_OI = prune_by_magnitude(weight_OI, amount)
        elif self.prune == "wanda":
            pruned_OI = prune_by_wanda(weight_OI, gram_II, amount)
        else:
            pruned_OI = prune_by_sparsegpt(weight_OI, gram_II, amount, self.damping, self.block_size)
        return {"weight": pruned_OI.to(dtype)}


@dataclass(frozen=True)
class QuantizationOptions:
    """Options for quantisation by GPTQ.

    Args:
        quantize: `int8`, or 8-bit floating-point numbers: `fp8_e4m3` has finer steps, `fp8_e5m2` a wider range. None
            does not quantise.
        group_size: Neighbouring inputs of an output that share a scale, such as 128; one scale per output if left out.
        damping: Value added to the diagonal of the inputs' Gram matrix, as a fraction of the diagonal's mean
            (`sparsegpt`, `quantize`).
        block_size: Number of inputs that `sparsegpt` and `quantize` process at a time.
    """

    needs_inputs: ClassVar[bool] = True

    quantize: NumberName | None = None
    group_size: int | None = None
    damping: float = 0.01
    block_size: int = 128

    def __post_init__(self) -> None:
        check_solver(self.damping, self.block_size)
        require_minimum("group_size", self.group_size, 1, "128 is usual; leave it out for none", optional=True)
        if self.group_size is not None and self.quantize is None:
            raise OptionError("group_size", self.group_size, "has no effect without --quantize", "try --quantize int8")

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    def __call__(self, weight_OI: Tensor, gram_II: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        assert self.quantize is not None
        assert gram_II is not None
        # The scales of E5M2 are too small for float16.
        scale_dtype = torch.float32 if dtype == torch.float16 else dtype
        options = (self.group_size, self.damping, self.block_size, scale_dtype)
        matrix = quantise_by_gptq(weight_OI, gram_II, FORMAT_OF[self.quantize], *options)
        return {"weight": matrix.code_OI, "weight_scale": matrix.scale_OG}


def check_solver(damping: float, block_size: int) -> None:
    if not damping > 0:
        raise OptionError("damping", damping, "must be > 0", "the papers use 0.01")
    require_minimum("block_size", block_size, 1, "the papers use 128")


@dataclass(frozen=True)
class CompressionReport:
    """The compressed model directory, bytes of weights, and the fraction of zeros in the layers' matrices.

    `calibration` describes the calibration texts; None if there were none.
    """

    folder: Path
    bytes_before: int
    bytes_after: int
    zeros_before: float
    zeros: float
    calibration: Mapping[str, Any] | None


class Compression:
    """The compression of one model directory in phases: remove layers, prune, retrain, quantise.

    The work folder is `OUTPUT.work` beside the output. One layer at a time is on `device`; None for a GPU if there is
    one.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        output: Path,
        pruning: PruningOptions,
        quantization: QuantizationOptions,
        calibration: CalibrationOptions,
        device: str | torch.device | None = None,
    ) -> None:
        if pruning.prune is None and quantization.quantize is None and pruning.layers is None:
            rule = "or quantize or layers must be given"
            raise OptionError("prune", None, rule, "try --prune sparsegpt --pattern 2:4")
        if pruning.prune != "sparsegpt" and quantization.quantize is None:
            for name in ("damping", "block_size"):
                if (value := getattr(pruning, name)) != getattr(PruningOptions, name):
                    rule = "has no effect without --prune sparsegpt or --quantize"
                    raise OptionError(name, value, rule, "leave it out")
        self.output = output.expanduser().absolute()
        if os.path.lexists(self.output):
            raise OptionError("output", str(output), "already exists", "name a new folder, or remove it")
        self.source, self._name = resolve_model(os.fspath(model)), Path(model).name
        self.work = self.output.with_name(f"{self.output.name}.work")
        self.pruning, self.quantization = pruning, quantization
        self._device = device_of(device)
        needs_texts = quantization.quantize is not None or pruning.needs_inputs
        layered = LayerwiseModel(self.source, self._device)
        self._num_layers = len(layered.layers)
        if pruning.layers is not None and not 1 <= pruning.layers < self._num_layers:
            rule = f"must be from 1 to {self._num_layers - 1}: the model has {self._num_layers}"
            raise OptionError("layers", pruning.layers, rule, "leave it out to keep all")
        self._check_widths(layered)
        if calibration.calibration and not needs_texts:
            rule = "has no effect without --prune wanda, --prune sparsegpt or --quantize"
            raise OptionError("calibration", calibration.calibration, rule, "leave it out")
        self._texts = calibration_texts(calibration) if needs_texts else []
        self._max_length = calibration.max_length
        self.calibration: dict[str, Any] | None = None
        if self._texts:
            tokens, _ = tokenise(self._texts, layered, self._max_length)
            digest = sha256(json.dumps(self._texts).encode()).hexdigest()
            self.calibration = {
                "num_texts": len(self._texts),
                "num_tokens": tokens.num_tokens,
                "max_length": self._max_length,
                "seed": calibration.calibration_seed,
                "texts_sha256": digest,
            }

    def _check_widths(self, model: LayerwiseModel) -> None:
        group = self.pruning.amount().group if self.pruning.prune is not None else None
        for option, value, size in (
            ("pattern", self.pruning.pattern, group),
            ("group_size", self.quantization.group_size, self.quantization.group_size),
        ):
            for layer_name, layer in model.layers:
                for name, linear in linear_layers(layer).items():
                    if size is not None and linear.in_features % size:
                        rule = f"must divide the {linear.in_features} inputs of {layer_name}.{name}"
                        raise OptionError(option, value, rule, "choose another one")

    def run(self, retrain: Retrain | None = None) -> Path:
        """Run the phases that are not finished; returns the directory of the compressed model in the work folder.

        `retrain` trains a pruned model under its mask, between pruning and quantisation. It returns a new directory in
        the work folder, or the one that it wrote there earlier.
        """
        model = self.source
        # A later user error must not delete layers that are written already.
        with discard_on_user_error(self.work, unless=lambda: any(self.work.glob("*/layer-*.safetensors"))):
            if self.pruning.layers is not None:
                model = self._shorten(self.pruning.layers)
            if self.pruning.prune is not None:
                model = self._phase("prune", model, self.pruning)
            if retrain is not None:
                model = retrain(model, self.work)
            if self.quantization.quantize is not None:
                number, size = FORMAT_OF[self.quantization.quantize], self.quantization.group_size
                config = quantization_config(number, size, self._outside_linear())
                model = self._phase("quantise", model, self.quantization, config)
        return model

    def _phase(
        self,
        name: str,
        source: Path,
        treatment: PruningOptions | QuantizationOptions,
        config: dict[str, Any] | None = None,
    ) -> Path:
        target = self.work / f"{name}d"
        model = LayerwiseModel(source, self._device)
        calibration = self.calibration if treatment.needs_inputs else None
        hashes = {"weights_sha256": weights_sha256(source)}
        fields = {"kind": f"{name} layers", **hashes, **treatment.fields(), "calibration": calibration}
        tokens, pad = (None, 0) if calibration is None else tokenise(self._texts, model, self._max_length)
        job = LayerwiseJob(model, self.work / f"{name}.layers", fields, treatment, tokens, pad)
        if target.exists():  # written with the same options, as the manifest of the job shows
            return target
        job.run()
        assemble(source, job.files, target, config)
        return target

    def _shorten(self, num_layers: int) -> Path:
        """Write a model directory with fewer layers; the whole model is in memory meanwhile."""
        digest = sha256(json.dumps(weights_sha256(self.source)).encode()).hexdigest()
        target = self.work / f"layers-{num_layers}-{digest[:12]}"
        if not target.exists():
            embedder = load_embedder(str(self.source))
            if isinstance(embedder, ContextualEmbedder):
                raise OptionError("layers", num_layers, "does not support contextual models", "leave it out")
            keep_layers(plain_backbone(embedder.backbone), num_layers)
            embedder.save_pretrained(target, card=False)
        return target

    def _outside_linear(self) -> list[str]:
        """The linear modules outside the layers, which are not quantised; regular expressions start with `re:`."""
        model = LayerwiseModel(self.source, self._device).model
        inside = {module for layer in layers(model) for module in layer.modules()}
        names = [
            name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in inside
        ]
        # Other libraries build the pooling layer that some architectures have; embeddings do not use it.
        return [*names, *(["re:.*pooler.*"] if has_pooling_layer(model.config) else [])]

    def publish(self, staged: Path, scores: Mapping[str, float] | None = None) -> CompressionReport:
        """Add a model card with `scores` to the result of `run`, move it to the output, and remove the work folder."""
        before, after = (sum(file.stat().st_size for file in weight_files(folder)) for folder in (self.source, staged))
        zeros = zeros_fraction(self.source), zeros_fraction(staged)
        report = CompressionReport(self.output, before, after, *zeros, self.calibration)
        card = compressed_card(self.source, self.output.name, self._card_rows(report, scores or {}))
        write_text(staged / CARD_FILE, card)
        record_all(staged)
        share_files(staged)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        os.rename(staged, self.output)
        shutil.rmtree(self.work, ignore_errors=True)
        return report

    def _card_rows(self, report: CompressionReport, scores: Mapping[str, float]) -> dict[str, str]:
        rows = {"made from": self._name}
        if self.pruning.layers is not None:
            rows["layers"] = f"{self.pruning.layers} of {self._num_layers}, evenly spread"
        if self.pruning.prune is not None:
            rows["pruning"] = f"{self.pruning.prune}, {self.pruning.pattern}"
            rows["zeros in the layers' matrices"] = f"{report.zeros:.2%}"
        if self.quantization.quantize is not None:
            size = self.quantization.group_size
            scales = "an output" if size is None else f"{size} inputs of an output"
            rows["quantisation"] = f"GPTQ to {self.quantization.quantize}, one scale for {scales}"
        if report.calibration is not None:
            texts = report.calibration
            limit = "the model's own limits" if texts["max_length"] is None else f"at most {texts['max_length']}"
            size_of_texts = f"{texts['num_texts']} texts, {texts['num_tokens']:,} tokens"
            rows["calibration"] = f"{size_of_texts} ({limit} a text), seed {texts['seed']}"
        rows["bytes of weights"] = f"{report.bytes_before:,} before, {report.bytes_after:,} after"
        return rows | {name: f"{value:.4f}" for name, value in scores.items()}


def weights_sha256(folder: Path) -> dict[str, str]:
    return {file.name: file_sha256(file) for file in weight_files(folder)}


def device_of(name: str | torch.device | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    # torch without CUDA raises an AssertionError; the meta device has no data.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = "use cpu, or cuda where there is a GPU"
        raise OptionError("device", str(name), "must be a device of this machine", hint) from error
    return device


def zeros_fraction(folder: Path) -> float:
    matrices = zeros_by_matrix(folder)
    return sum(matrix.num_zeros for matrix in matrices) / sum(matrix.num_weights for matrix in matrices)


def assemble(source: Path, files: list[Path], target: Path, quantization: dict[str, Any] | None) -> None:
    """Write a model directory atomically, with the settings of `source` and weights from `files`, linked or copied."""
    patterns = shutil.ignore_patterns(*_NOT_COPIED)

    def ignored(directory: str, names: list[str]) -> set[str]:
        """The files to ignore at the top level; modules such as a head keep their weights in subfolders."""
        return patterns(directory, names) if Path(directory) == source else set()

    with atomic_folder(target) as folder:
        shutil.copytree(source, folder, ignore=ignored, dirs_exist_ok=True)
        config = read_json(source / "config.json")
        if quantization is not None:
            write_json(folder / "config.json", {**config, QUANTIZATION: quantization})
        weight_map: dict[str, str] = {}
        for number, file in enumerate(files, start=1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            link_or_copy(file, folder / name)
            with safe_open(file, framework="pt") as opened:
                weight_map |= dict.fromkeys(sorted(opened.keys()), name)
        total = sum(file.stat().st_size for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def compressed_card(source: Path, name: str, rows: Mapping[str, str]) -> str:
    """The card of the source without its scores, with a section on the compression; our own has the new name."""
    section = f"## Compression\n\n{table(('', ''), [(plain(key), plain(value)) for key, value in rows.items()])}\n"
    path = source / CARD_FILE
    text = ""
    with suppress(OSError):
        text = path.read_text("utf-8", errors="replace")
    if not text.strip():
        return f"---\nlibrary_name: sentence-transformers\n---\n\n# {plain(name)}\n\n{section}"
    text = re.sub(r"(?m)^model-index:\n(?:(?:- |  ).*\n)*", "", text, count=1)
    if is_own_card(path):
        text = (
            text.partition("\n## Scores\n")[0]
            .replace(repr(source.name), repr(name))
            .replace(f"\n# {plain(source.name)}\n", f"\n# {plain(name)}\n")
        )
    parts = re.split(r"(?m)^(?=## Licence$)", text, maxsplit=1)
    return "\n".join([f"{parts[0].rstrip()}\n", section, *parts[1:]])
