"""A model directory's backbone as an ONNX graph, in float32 and int8, checked before it is kept."""

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
from embeddings.models.backbone import load_model
from embeddings.models.directory import plain_tokenizer
from embeddings.models.embedder import Embedder
from embeddings.models.lora import plain_backbone
from embeddings.models.moe.rotary_moe import RotaryMoeModel

GRAPH_FILE = Path("onnx", "model.onnx")
_INPUTS, _OUTPUT = ("input_ids", "attention_mask"), "last_hidden_state"
_TOLERANCE = 1e-5
_OPSET = 18
# The graph is one file of a format that holds less than 2 GiB.
_MAX_BYTES = 2**31 - 2**24
# Texts and tokens of the batches that both are compared on, none of them that of the tracing.
CHECKED_SHAPES = ((1, 1), (2, 5), (5, 33))
# The longest text that both are compared on, in tokens: the attention of a layer takes its square times the heads.
_MAX_LENGTH = 4098


class Comparison(NamedTuple):
    """The largest difference of a graph's and torch's states, and the longest text that was compared, in tokens.

    `beyond` are lengths past which the model computes otherwise, too long to be compared.
    """

    difference: float
    longest: int
    beyond: tuple[int, ...]

    def __str__(self) -> str:
        words = f"within {self.difference:.0e} of torch's states on texts of up to {self.longest:,} tokens"
        lengths = " and ".join(f"{length:,}" for length in self.beyond)
        return words + (f"; past {lengths} tokens, where the model computes otherwise, not compared" if lengths else "")


def check_onnx(embedder: Embedder) -> None:
    """Refuse a model whose directory sentence-transformers would not read a graph from, before anything is written."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        require(package, "onnx")
    travels = hasattr(embedder, "embed_context") or isinstance(plain_backbone(embedder.backbone), RotaryMoeModel)
    if travels or plain_tokenizer(embedder.pooling, embedder.text, embedder.tokenizer) is None:
        rule = "is for models that load without code of their own: mean, cls or last-token pooling, the prompt pooled"
        raise OptionError("format", "onnx", rule, "leave it out")
    num_bytes = 4 * sum(weight.numel() for weight in embedder.backbone.parameters())
    if num_bytes > _MAX_BYTES:
        raise OptionError("format", "onnx", f"is for models below 2 GiB, this one has {num_bytes:,}", "leave it out")


def write_onnx(folder: Path) -> Comparison:
    """Write the graph of a model directory's backbone as `onnx/model.onnx`, with any number of texts and tokens.

    Its states may differ from torch's by 1e-5, on short texts and just past each length from which the model computes
    otherwise (its window, or where its rotary angles change), up to 4,096 tokens.
    """
    model = load_model(folder, torch.float32)
    (folder / GRAPH_FILE).parent.mkdir(exist_ok=True)
    with atomic_path(folder / GRAPH_FILE) as temporary:
        _export(model, temporary)
        found = _compared(model, temporary)
        if not found.difference <= _TOLERANCE:
            rule = f"must give torch's states to {_TOLERANCE:.0e}, this graph's differ by {found.difference:.1e}"
            raise OptionError("format", "onnx", rule, "leave it out for this backbone")
    return found


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
            how: Any = {"opset_version": _OPSET, "dynamo": True, "verbose": False}
            program = torch.onnx.export(_States(model), example_inputs(model.config, 3, 17), **names, **how)
            assert program is not None
            program.save(str(path))
    except (torch.onnx.OnnxExporterError, RuntimeError, TypeError) as error:
        rule = f"is for backbones that torch makes a graph of, not {type(model).__name__} ({type(error).__name__})"
        raise OptionError("format", "onnx", rule, "leave it out for this backbone") from error


def open_graph(path: Path) -> Callable[[tuple[Tensor, Tensor]], npt.NDArray[np.float32]]:
    """What turns ids and mask, (N, L) int64, into the states, (N, L, H), that a graph gives for them."""
    onnxruntime = require("onnxruntime", "onnx")
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])

    def states(inputs: tuple[Tensor, Tensor]) -> npt.NDArray[np.float32]:
        (found_NLH,) = session.run(None, {name: tensor.numpy() for name, tensor in zip(_INPUTS, inputs, strict=True)})
        return np.asarray(found_NLH, np.float32)

    return states


@torch.inference_mode()
def _compared(model: PreTrainedModel, path: Path) -> Comparison:
    largest, turns, states_of = 0.0, _turning_lengths(model.config), open_graph(path)
    shapes = (*CHECKED_SHAPES, *((1, length + 2) for length in turns if length + 2 <= _MAX_LENGTH))
    for num_texts, length in shapes:
        inputs = example_inputs(model.config, num_texts, length)
        expected = _States(model)(*inputs).numpy()
        found = states_of(inputs)
        is_text = inputs[1].numpy().astype(bool)
        # NaN is no small difference.
        largest = float(np.maximum(largest, np.abs(found - expected)[is_text].max()))
    beyond = tuple(length for length in turns if length + 2 > _MAX_LENGTH)
    return Comparison(largest, max(length for _, length in shapes), beyond)


def _turning_lengths(config: PretrainedConfig) -> list[int]:
    """Lengths past which a model computes otherwise: its window, and where its rotary angles change."""
    rope = getattr(config, "rope_parameters", None) or {}
    # An encoder that has layers of two kinds keeps the angles of each kind apart.
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    ends = [getattr(config, name, None) for name in ("sliding_window", "local_attention")]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            ends.append(kind.get("original_max_position_embeddings") or config.max_position_embeddings)
    return sorted({end for end in ends if isinstance(end, int)})


def example_inputs(config: PretrainedConfig, num_texts: int, length: int) -> tuple[Tensor, Tensor]:
    """Random ids of texts of falling lengths, and their mask, (N, L) int64."""
    generator = torch.Generator().manual_seed(length)
    ids_NL = torch.randint(0, config.vocab_size, (num_texts, length), generator=generator)
    lengths_N1 = (length - torch.arange(num_texts)).clamp_min(1)[:, None]
    return ids_NL, (torch.arange(length) < lengths_N1).long()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what the exporter tells of its own parts, and the preparation that onnxruntime proposes."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# The file name that sentence-transformers gives: signed weights of 8 bits, for CPUs that sum their products in 32.
INT8_GRAPH_FILE = GRAPH_FILE.with_name("model_qint8_avx512_vnni.onnx")


def write_int8_onnx(folder: Path) -> float:
    """Write a model directory's graph once more, its weights rounded to 8 bits and its inputs rounded as they come.

    Each weight row has one scale. The input of a layer has one too, which onnxruntime computes at each call: a
    text's vector depends a little on the texts beside it. Returns the least cosine between a text's mean state in both
    graphs, over texts of random tokens.
    """
    quantization = require("onnxruntime.quantization", "onnx")
    with atomic_path(folder / INT8_GRAPH_FILE) as temporary:
        with _quiet():
            signed = quantization.QuantType.QInt8
            quantization.quantize_dynamic(folder / GRAPH_FILE, temporary, weight_type=signed, per_channel=True)
        cosine = _least_cosine(folder, folder / GRAPH_FILE, temporary)
        if not np.isfinite(cosine):
            rule = "must give finite states: this model's values are too large for one scale a layer"
            raise OptionError("format", "onnx-int8", rule, "use onnx")
    return cosine


def _least_cosine(folder: Path, exact: Path, rounded: Path) -> float:
    config, least = AutoConfig.from_pretrained(folder, local_files_only=True), 1.0
    graphs = [open_graph(path) for path in (exact, rounded)]
    for num_texts, length in CHECKED_SHAPES:
        inputs = example_inputs(config, num_texts, length)
        is_text = inputs[1].numpy()[..., None]
        first, second = ((states_of(inputs) * is_text).sum(axis=1) for states_of in graphs)
        sizes = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
        least = float(np.minimum(least, ((first * second).sum(axis=1) / sizes).min()))
    return least
