"""Export a model directory's backbone as an ONNX graph, in float32 and int8, with a check of its outputs."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from embeddings.common.errors import OptionError, require
from embeddings.common.io import atomic_path
from embeddings.common.own_folder import record_files
from embeddings.models.backbone import load_model
from embeddings.models.directory import plain_tokenizer
from embeddings.models.embedder import Embedder
from embeddings.models.moe.rotary_moe import RotaryMoeModel
from embeddings.models.pooling import plain_backbone

GRAPH_FILE = Path("onnx", "model.onnx")
_INPUTS, _OUTPUT = ("input_ids", "attention_mask"), "last_hidden_state"
_TOLERANCE = 1e-5
_OPSET = 18
# One ONNX file must be smaller than 2 GiB.
_MAX_BYTES = 2**31 - 2**24
# (texts, tokens) of the batches on which graph and torch are compared; none has the shape of the traced batch.
CHECKED_SHAPES = ((1, 1), (2, 5), (5, 33))
# Tokens of the longest compared text: the memory of attention grows with the square of the length.
_MAX_LENGTH = 4098


class Comparison(NamedTuple):
    """The largest difference of a graph's and torch's states, and the longest compared text, in tokens."""

    difference: float
    longest: int

    def __str__(self) -> str:
        return f"within {self.difference:.0e} of torch's states on texts of up to {self.longest:,} tokens"


def check_onnx(embedder: Embedder) -> None:
    """Check that sentence-transformers could load the model's graph; call it before anything is written."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        require(package, "onnx")
    has_custom_code = hasattr(embedder, "embed_context") or isinstance(
        plain_backbone(embedder.backbone), RotaryMoeModel
    )
    if has_custom_code or plain_tokenizer(embedder.pooling, embedder.text, embedder.tokenizer) is None:
        rule = "needs a model that loads without custom code: mean, cls or last-token pooling, with the prompt pooled"
        raise OptionError("format", "onnx", rule, "leave it out")
    num_bytes = 4 * sum(weight.numel() for weight in embedder.backbone.parameters())
    if num_bytes > _MAX_BYTES:
        rule = f"needs a model smaller than 2 GiB; this one has {num_bytes:,} bytes"
        raise OptionError("format", "onnx", rule, "leave it out")


def write_onnx(folder: Path) -> Comparison:
    """Write the graph of a model directory's backbone as `onnx/model.onnx`, for batches of any size and length.

    Its states may differ from torch's by at most 1e-5: on short texts, and just above each length of `_length_limits`.
    """
    model = load_model(folder, torch.float32)
    (folder / GRAPH_FILE).parent.mkdir(exist_ok=True)
    with atomic_path(folder / GRAPH_FILE) as temporary:
        _export(model, temporary)
        comparison = _compare(model, temporary)
        if not comparison.difference <= _TOLERANCE:
            rule = f"must match torch's states to {_TOLERANCE:.0e}; this graph's differ by {comparison.difference:.1e}"
            raise OptionError("format", "onnx", rule, "leave it out for this backbone")
    # A model that is written here later replaces the graph too.
    record_files(folder, GRAPH_FILE.as_posix())
    return comparison


class _States(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return states


def _export(model: PreTrainedModel, path: Path) -> None:
    shapes = {name: {0: "batch", 1: "length"} for name in _INPUTS}
    try:
        with _quiet():
            names: Any = {"input_names": list(_INPUTS), "output_names": [_OUTPUT], "dynamic_shapes": shapes}
            options: Any = {"opset_version": _OPSET, "dynamo": True, "verbose": False}
            program = torch.onnx.export(_States(model), example_inputs(model.config, 3, 17), **names, **options)
            assert program is not None
            program.save(str(path))
    except (torch.onnx.OnnxExporterError, RuntimeError, TypeError) as error:
        rule = f"failed: torch cannot export {type(model).__name__} ({type(error).__name__})"
        raise OptionError("format", "onnx", rule, "leave it out for this backbone") from error


def open_graph(path: Path) -> Callable[[tuple[Tensor, Tensor]], npt.NDArray[np.float32]]:
    """A function that runs a graph: ids and mask, (N, L) int64, to states, (N, L, H)."""
    onnxruntime = require("onnxruntime", "onnx")
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])

    def states(inputs: tuple[Tensor, Tensor]) -> npt.NDArray[np.float32]:
        (state_NLH,) = session.run(None, {name: tensor.numpy() for name, tensor in zip(_INPUTS, inputs, strict=True)})
        return np.asarray(state_NLH, np.float32)

    return states


@torch.inference_mode()
def _compare(model: PreTrainedModel, path: Path) -> Comparison:
    largest, limits, states_of = 0.0, _length_limits(model.config), open_graph(path)
    shapes = (*CHECKED_SHAPES, *((1, length + 2) for length in limits if length + 2 <= _MAX_LENGTH))
    for num_texts, length in shapes:
        inputs = example_inputs(model.config, num_texts, length)
        expected = _States(model)(*inputs).numpy()
        states = states_of(inputs)
        is_text = inputs[1].numpy().astype(bool)
        # `np.maximum` propagates NaN.
        largest = float(np.maximum(largest, np.abs(states - expected)[is_text].max()))
    return Comparison(largest, max(length for _, length in shapes))


def _length_limits(config: PretrainedConfig) -> list[int]:
    """Lengths above which a model's computation changes: its attention windows and the limits of its rotary scaling."""
    rope = getattr(config, "rope_parameters", None) or {}
    # An encoder with two kinds of layers has nested parameters for each kind.
    rope_settings = [settings for settings in (rope, *rope.values()) if isinstance(settings, dict)]
    limits = [getattr(config, name, None) for name in ("sliding_window", "local_attention")]
    for settings in rope_settings:
        if settings.get("rope_type") in ("dynamic", "longrope"):
            limits.append(settings.get("original_max_position_embeddings") or config.max_position_embeddings)
    return sorted({limit for limit in limits if isinstance(limit, int)})


def example_inputs(config: PretrainedConfig, num_texts: int, length: int) -> tuple[Tensor, Tensor]:
    """Random ids of texts of decreasing lengths, and their mask, (N, L) int64."""
    generator = torch.Generator().manual_seed(length)
    ids_NL = torch.randint(0, config.vocab_size, (num_texts, length), generator=generator)
    lengths_N1 = (length - torch.arange(num_texts)).clamp_min(1)[:, None]
    return ids_NL, (torch.arange(length) < lengths_N1).long()


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# The file name that sentence-transformers uses for signed 8-bit weights on CPUs with 32-bit accumulation.
INT8_GRAPH_FILE = GRAPH_FILE.with_name("model_qint8_avx512_vnni.onnx")


def write_int8_onnx(folder: Path) -> float:
    """Write an int8 version of a model directory's graph; returns the minimum cosine of a text's mean states in both.

    onnxruntime computes each layer's scale in every call, so a text's vector depends slightly on its batch.
    """
    quantization = require("onnxruntime.quantization", "onnx")
    with atomic_path(folder / INT8_GRAPH_FILE) as temporary:
        with _quiet():
            signed = quantization.QuantType.QInt8
            quantization.quantize_dynamic(folder / GRAPH_FILE, temporary, weight_type=signed, per_channel=True)
        cosine = _minimum_cosine(folder, folder / GRAPH_FILE, temporary)
        if not np.isfinite(cosine):
            rule = "must produce finite states: this model's activations are too large for one scale per layer"
            raise OptionError("format", "onnx-int8", rule, "use onnx")
    record_files(folder, INT8_GRAPH_FILE.as_posix())
    return cosine


def _minimum_cosine(folder: Path, exact: Path, quantised: Path) -> float:
    config, minimum = AutoConfig.from_pretrained(folder, local_files_only=True), 1.0
    graphs = [open_graph(path) for path in (exact, quantised)]
    for num_texts, length in CHECKED_SHAPES:
        inputs = example_inputs(config, num_texts, length)
        is_text = inputs[1].numpy()[..., None]
        first, second = ((states_of(inputs) * is_text).sum(axis=1) for states_of in graphs)
        norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
        minimum = float(np.minimum(minimum, ((first * second).sum(axis=1) / norms).min()))
    return minimum
