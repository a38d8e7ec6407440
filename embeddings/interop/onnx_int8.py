"""An ONNX graph with its linear layers in int8, for processors."""

import logging
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from embeddings.common.errors import OptionError, require
from embeddings.common.io import atomic_path
from embeddings.interop.onnx_graph import CHECKED_SHAPES, GRAPH_FILE, example_inputs, open_graph

# sentence-transformers names graphs so: signed weights of 8 bits, for processors that sum their products in 32.
INT8_GRAPH_FILE = GRAPH_FILE.with_name("model_qint8_avx512_vnni.onnx")


def write_int8_onnx(folder: Path) -> float:
    """Write a model directory's graph once more, its weights rounded to 8 bits and its inputs rounded as they come.

    A weight's row has one scale, and the whole input of a layer has one, which onnxruntime finds anew at each call: a
    text's vector depends a little on the texts beside it.

    Args:
        folder: The directory, with the graph that `write_onnx` wrote.

    Returns:
        The least cosine between a text's mean state in both graphs, over texts of random tokens.

    Raises:
        OptionError: If the rounded graph's states are not finite.
    """
    quantization = require("onnxruntime.quantization", "onnx")
    with atomic_path(folder / INT8_GRAPH_FILE) as temporary:
        # onnxruntime proposes a preparation that these graphs do not need.
        before = logging.root.manager.disable
        logging.disable(max(before, logging.WARNING))
        try:
            quantization.quantize_dynamic(
                folder / GRAPH_FILE, temporary, weight_type=quantization.QuantType.QInt8, per_channel=True
            )
        finally:
            logging.disable(before)
        cosine = _least_cosine(folder, folder / GRAPH_FILE, temporary)
        if not np.isfinite(cosine):
            rule = "must give finite states: this model's numbers are too large for one scale a layer"
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
