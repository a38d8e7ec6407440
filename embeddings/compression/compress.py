"""A finished model made smaller: pruned, then retrained where that is asked for, then quantised, each a phase of work.

Every phase reads a model directory and writes one, layer by layer, in a folder of its own beside the output; a killed
run resumes in the phase and at the layer where it was.
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
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from embeddings.common import OptionError
from embeddings.common.io import atomic_folder, file_sha256, share_files, write_json, write_text
from embeddings.common.jobs import discard_on_user_error
from embeddings.compression.calibration import CalibrationOptions, calibration_texts, tokenise
from embeddings.compression.layerwise import LayerwiseJob, LayerwiseModel, Statistic, Treatment, linear_layers
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
from embeddings.models.lora import plain_backbone
from embeddings.models.model_card import plain, table
from embeddings.models.model_files import (
    ADAPTER_FOLDER,
    CARD_FILE,
    CARD_MARK,
    QUANTIZATION,
    is_own_card,
    read_json,
    resolve_model,
    weight_files,
    zeros_by_matrix,
)

# What a directory's copy leaves out: weights and graphs that are no longer those of the model.
_LEFT_OUT = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.msgpack", "*.ot"),
    *("onnx", "openvino", ADAPTER_FOLDER, ".*"),
)
# Takes a model directory and the folder of work, in which it writes the retrained one, and returns that.
Retrain = Callable[[Path, Path], Path]


@dataclass(frozen=True)
class PruningOptions:
    """How weights are pruned.

    Args:
        prune: `magnitude` takes the smallest weights, `wanda` the smallest products of weight and input, `sparsegpt`
            those whose loss the others can make up for, and changes these. None prunes nothing.
        pattern: `N:M` keeps N of every M neighbouring inputs (2:4 and 4:8 are the paper's); `unstructured` lets zeros
            lie anywhere.
        sparsity: Share of zeros for `unstructured`; 0.5 if left out, the paper's.
        damping: What is added to the diagonal of the inputs' Gram matrix (`sparsegpt`, `quantize`), over its mean.
        block_size: Inputs that `sparsegpt` and `quantize` work on at once.
        layers: How many layers stay, evenly spread from the first to the last; the others go before anything else.
            None keeps all.
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
            rule = f"must be a multiple of {group}, the pattern's group"
            raise OptionError("block_size", self.block_size, rule, "128 suits 2:4 and 4:8")

    def amount(self) -> Sparsity:
        return Sparsity.parse(self.pattern, self.sparsity)

    @property
    def needs(self) -> Statistic:
        if self.prune == "sparsegpt":
            return "gram"
        return "squares" if self.prune == "wanda" else "none"

    def fields(self) -> dict[str, Any]:
        names = ["prune", "pattern", *(["damping", "block_size"] if self.prune == "sparsegpt" else [])]
        return {**{name: getattr(self, name) for name in names}, "sparsity": self.amount().fraction}

    def __call__(self, weight_OI: Tensor, statistic: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        amount = self.amount()
        if self.prune == "magnitude" or statistic is None:
            pruned_OI = prune_by_magnitude(weight_OI, amount)
        elif self.prune == "wanda":
            pruned_OI = prune_by_wanda(weight_OI, statistic, amount)
        else:
            pruned_OI = prune_by_sparsegpt(weight_OI, statistic, amount, self.damping, self.block_size)
        return {"weight": pruned_OI.to(dtype)}


@dataclass(frozen=True)
class QuantizationOptions:
    """How weights are quantised, by GPTQ.

    Args:
        quantize: `int8`, or 8-bit floating-point numbers: `fp8_e4m3` has finer steps, `fp8_e5m2` a wider range. None
            leaves the weights as they are.
        group_size: Neighbouring inputs of an output that share a scale, such as 128; one scale an output if left out.
        damping: What is added to the diagonal of the inputs' Gram matrix (`sparsegpt`, `quantize`), over its mean.
        block_size: Inputs that `sparsegpt` and `quantize` work on at once.
    """

    quantize: NumberName | None = None
    group_size: int | None = None
    damping: float = 0.01
    block_size: int = 128

    def __post_init__(self) -> None:
        check_solver(self.damping, self.block_size)
        if self.group_size is not None and self.quantize is None:
            raise OptionError("group_size", self.group_size, "has no effect without --quantize", "try --quantize int8")
        if self.group_size is not None and self.group_size < 1:
            raise OptionError("group_size", self.group_size, "must be >= 1", "128 is usual; leave it out for none")

    @property
    def needs(self) -> Statistic:
        return "gram"

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    def __call__(self, weight_OI: Tensor, statistic: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """The numbers and their scales (see `Treatment`); scales are in the weight's dtype, but for float16's."""
        assert self.quantize is not None
        assert statistic is not None
        # A scale of E5M2 is too small for float16.
        scales = torch.float32 if dtype == torch.float16 else dtype
        how = (self.group_size, self.damping, self.block_size, scales)
        made = quantise_by_gptq(weight_OI, statistic, FORMAT_OF[self.quantize], *how)
        return {"weight": made.code_OI, "weight_scale": made.scale_OG}


def check_solver(damping: float, block_size: int) -> None:
    """Check the options of the solver; an `OptionError` where one is impossible."""
    if not damping > 0:
        raise OptionError("damping", damping, "must be > 0", "0.01 is the papers'")
    if block_size < 1:
        raise OptionError("block_size", block_size, "must be >= 1", "128 is the papers'")


@dataclass(frozen=True)
class CompressionReport:
    """The model directory of a compression, and what it changed: bytes of weights, zeros of the layers' matrices.

    `calibration` says what was calibrated on; None where nothing was.
    """

    folder: Path
    bytes_before: int
    bytes_after: int
    zeros_before: float
    zeros: float
    calibration: Mapping[str, Any] | None


class Compression:
    """The compression of one model directory, in phases: take layers, prune, retrain, quantise.

    The folder of work is `OUTPUT.work` beside the output. Each layer lies on `device`, a GPU if there is one, while its
    turn lasts.

    Raises:
        OptionError: If nothing is asked for, an option has no effect, a pattern or group does not divide a matrix, or
            the output exists.
        InputError: If the model or a text file cannot be used.
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
        self.output = output.expanduser().absolute()
        if os.path.lexists(self.output):
            raise OptionError("output", str(output), "exists already", "name a new folder, or remove it")
        self.source, self._name = resolve_model(os.fspath(model)), Path(model).name
        self.work = self.output.with_name(f"{self.output.name}.work")
        self.pruning, self.quantization = pruning, quantization
        self._device = device_of(device)
        needs_texts = quantization.quantize is not None or pruning.needs != "none"
        if not needs_texts and calibration.calibration is not None:
            rule = "has no effect on pruning by magnitude, which reads weights alone"
            raise OptionError("calibration", calibration.calibration, rule, "leave it out")
        layered = LayerwiseModel(self.source, self._device)
        self._num_layers = len(layered.layers)
        if pruning.layers is not None and not 1 <= pruning.layers < self._num_layers:
            rule = f"must be from 1 to {self._num_layers - 1}: the model has {self._num_layers}"
            raise OptionError("layers", pruning.layers, rule, "leave it out to keep all")
        self._check_widths(layered)
        self._texts = calibration_texts(calibration) if needs_texts else []
        self._max_length = calibration.max_length
        self.calibration: dict[str, Any] | None = None
        if self._texts:
            tokens, _ = tokenise(self._texts, layered, self._max_length)
            digest = sha256(json.dumps(self._texts).encode()).hexdigest()
            facts = {"num_texts": len(self._texts), "num_tokens": tokens.num_tokens, "max_length": self._max_length}
            self.calibration = {**facts, "seed": calibration.calibration_seed, "texts_sha256": digest}

    def _check_widths(self, model: LayerwiseModel) -> None:
        group = self.pruning.amount().group if self.pruning.prune is not None else None
        for option, value, size in (
            ("pattern", self.pruning.pattern, group),
            ("group_size", self.quantization.group_size, self.quantization.group_size),
        ):
            for name, layer in model.layers:
                for part, linear in linear_layers(layer).items():
                    if size is not None and linear.in_features % size:
                        rule = f"must divide the {linear.in_features} inputs of {name}.{part}"
                        raise OptionError(option, value, rule, "choose another one")

    def run(self, retrain: Retrain | None = None) -> Path:
        """Run the phases that are not done yet; returns the compressed model's directory within the folder of work.

        `retrain` trains the pruned model of a directory under its mask, between pruning and quantisation; it returns a
        new directory within the folder that it is given, or the one that it wrote there before. Layers cannot be chosen
        of a contextual model, or one whose layers cannot be told: an `OptionError`.
        """
        model = self.source
        # A layer that is written already must not be lost by a later mistake.
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

    def _phase(self, name: str, source: Path, treatment: Treatment, config: dict[str, Any] | None = None) -> Path:
        """Treat every matrix of a model directory; returns the new directory, whose config.json names `config`."""
        target = self.work / f"{name}d"
        model = LayerwiseModel(source, self._device)
        calibration = None if treatment.needs == "none" else self.calibration
        hashes = {file.name: file_sha256(file) for file in weight_files(source)}
        fields = {"kind": f"{name} layers", "weights_sha256": hashes, **treatment.fields(), "calibration": calibration}
        tokens, pad = (None, 0) if calibration is None else tokenise(self._texts, model, self._max_length)
        job = LayerwiseJob(model, self.work / f"{name}.layers", fields, treatment, tokens, pad)
        if target.exists():  # of these options: the job's manifest was compared
            return target
        job.run()
        assemble(source, job.files, target, config)
        return target

    def _shorten(self, num_layers: int) -> Path:
        """The model directory of some of the layers; the whole model is in memory meanwhile."""
        target = self.work / f"layers-{num_layers}"
        if not target.exists():
            embedder = load_embedder(str(self.source))
            if isinstance(embedder, ContextualEmbedder):
                rule = "cannot be chosen of a contextual model"
                raise OptionError("layers", num_layers, rule, "leave it out")
            backbone = plain_backbone(embedder.backbone)
            keep_layers(backbone, num_layers)
            embedder.save_pretrained(target)
        return target

    def _outside_linear(self) -> list[str]:
        """The linear parts of the model outside its layers, which keep their weights; patterns begin with `re:`."""
        model = LayerwiseModel(self.source, self._device).model
        inner = {part for layer in layers(model) for part in layer.modules()}
        found = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part not in inner]
        # Others build the pooling layer that some architectures have and embeddings do not use.
        return [*found, *(["re:.*pooler.*"] if has_pooling_layer(model.config) else [])]

    def publish(self, staged: Path, scores: Mapping[str, float] | None = None) -> CompressionReport:
        """Give what `run` returned its card, with metrics by name, and its place, and remove the folder of work."""
        before, after = (sum(file.stat().st_size for file in weight_files(folder)) for folder in (self.source, staged))
        zeros = zeros_fraction(self.source), zeros_fraction(staged)
        report = CompressionReport(self.output, before, after, *zeros, self.calibration)
        card = compressed_card(self.source, self.output.name, self._facts(report, scores or {}))
        write_text(staged / CARD_FILE, card)
        share_files(staged)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        os.rename(staged, self.output)
        shutil.rmtree(self.work, ignore_errors=True)
        return report

    def _facts(self, report: CompressionReport, scores: Mapping[str, float]) -> dict[str, str]:
        facts = {"made from": self._name}
        if self.pruning.layers is not None:
            facts["layers"] = f"{self.pruning.layers} of {self._num_layers}, evenly spread"
        if self.pruning.prune is not None:
            facts["pruning"] = f"{self.pruning.prune}, {self.pruning.pattern}"
            facts["zeros in the layers' matrices"] = f"{report.zeros:.2%}"
        if self.quantization.quantize is not None:
            size = self.quantization.group_size
            scales = "an output" if size is None else f"{size} inputs of an output"
            facts["quantisation"] = f"GPTQ to {self.quantization.quantize}, one scale for {scales}"
        if report.calibration is not None:
            about = report.calibration
            limit = "the model's own limits" if about["max_length"] is None else f"at most {about['max_length']}"
            texts = f"{about['num_texts']} texts, {about['num_tokens']:,} tokens ({limit} a text), seed {about['seed']}"
            facts["calibration"] = texts
        facts["bytes of weights"] = f"{report.bytes_before:,} before, {report.bytes_after:,} after"
        return facts | {name: f"{value:.4f}" for name, value in scores.items()}


def device_of(name: str | torch.device | None) -> torch.device:
    """The device of a name, None for a GPU if there is one; an `OptionError` where the machine has no such device."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    # A torch without CUDA asserts; the meta device has no numbers.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        hint = "use cpu, or cuda where there is a GPU"
        raise OptionError("device", str(name), "must be a device of this machine", hint) from error
    return device


def zeros_fraction(folder: Path) -> float:
    found = zeros_by_matrix(folder)
    return sum(matrix.num_zeros for matrix in found) / sum(matrix.num_weights for matrix in found)


def assemble(source: Path, files: list[Path], target: Path, quantization: dict[str, Any] | None) -> None:
    """Write a model directory of one's settings and files of weights, linked or copied, atomically.

    Weights and graphs of the source are left out; `quantization` is what config.json says of quantised weights.
    """
    patterns = shutil.ignore_patterns(*_LEFT_OUT)

    def left_out(inner: str, names: list[str]) -> set[str]:
        """What is not copied of the source's own folder; parts such as a head keep their weights."""
        return patterns(inner, names) if Path(inner) == source else set()

    with atomic_folder(target) as folder:
        shutil.copytree(source, folder, ignore=left_out, dirs_exist_ok=True)
        config = read_json(source / "config.json")
        if quantization is not None:
            write_json(folder / "config.json", {**config, QUANTIZATION: quantization})
        weight_map: dict[str, str] = {}
        for number, file in enumerate(files, start=1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            try:
                os.link(file, folder / name)
            except OSError:
                shutil.copyfile(file, folder / name)
            with safe_open(file, framework="pt") as opened:
                weight_map |= dict.fromkeys(sorted(opened.keys()), name)
        total = sum(file.stat().st_size for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def compressed_card(source: Path, name: str, facts: Mapping[str, str]) -> str:
    """The card of a compressed model: its source's, with a section on the compression.

    A card that this library wrote says the new name in place of the old one.
    """
    rows = [(plain(key), plain(value)) for key, value in facts.items()]
    section = f"## Compression\n\n{table(('', ''), rows)}\n"
    path = source / CARD_FILE
    text = ""
    with suppress(OSError):
        text = path.read_text("utf-8", errors="replace")
    if not text.strip():
        return f"---\n{CARD_MARK}\nlibrary_name: sentence-transformers\n---\n\n# {plain(name)}\n\n{section}"
    if is_own_card(path):
        text = text.replace(repr(source.name), repr(name)).replace(
            f"\n# {plain(source.name)}\n", f"\n# {plain(name)}\n"
        )
    parts = re.split(r"(?m)^(?=## Licence$)", text, maxsplit=1)
    return "\n".join([f"{parts[0].rstrip()}\n", section, *parts[1:]])
