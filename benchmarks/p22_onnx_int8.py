"""P22: the int8 graph of `export --format onnx-int8`, over the same graph in float32, both run by onnxruntime.

all-MiniLM-L6-v2 encodes P16's texts in our mini-batches. The minimum cosine between the texts' vectors is recorded too.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch

from benchmarks.harness import Action, compare, options, record
from benchmarks.workloads import minilm_folder, question_answer_texts, small_embedder
from embeddings.common.types import plan_mini_batches
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference.encoder import CPU_MINI_BATCH_TOKENS_PER_THREAD
from embeddings.interop.onnx import GRAPH_FILE, INT8_GRAPH_FILE, write_int8_onnx, write_onnx
from embeddings.models import Embedder

PEERS = "onnxruntime, torch"


def mini_batches(model: Path, texts: list[str]) -> list[dict[str, npt.NDArray[np.int64]]]:
    """Mini-batches with ids and mask of the texts, from the longest to the shortest."""
    embedder = Embedder.from_pretrained(model)
    tokens = TextTokenizer(embedder.tokenizer, embedder.text)(texts, "document")
    batches = []
    for rows_n in plan_mini_batches(tokens.lengths_N, CPU_MINI_BATCH_TOKENS_PER_THREAD * torch.get_num_threads()):
        padded = tokens.padded(rows_n, embedder.pad_token_id)
        mask_nL = padded.attention_mask_NL.long().numpy()
        batches.append({"input_ids": padded.input_ids_NL.numpy(), "attention_mask": mask_nL})
    return batches


def encoding(graph: Path, batches: list[dict[str, npt.NDArray[np.int64]]]) -> Action:
    """An action that encodes all mini-batches with a graph and returns mean-pooled unit vectors."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"])

    def run() -> npt.NDArray[np.float32]:
        vectors = []
        for batch in batches:
            (state_nLH,) = session.run(None, batch)
            sum_nH = (state_nLH * batch["attention_mask"][..., None]).sum(axis=1)
            vectors.append(sum_nH / np.linalg.norm(sum_nH, axis=1, keepdims=True))
        return np.concatenate(vectors).astype(np.float32)

    return run


def main() -> None:
    """Write both graphs, compare their vectors and time one over the other."""
    chosen = options(__doc__, threads=1)
    texts = [text for pair in question_answer_texts(128) for text in pair] if not chosen.tiny else ["a b", "c " * 9]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        if chosen.tiny:
            small_embedder().save_pretrained(folder)
        else:
            shutil.copytree(minilm_folder(), folder)
        write_onnx(folder)
        write_int8_onnx(folder)
        batches = mini_batches(folder, texts)
        exact, rounded = (encoding(folder / graph, batches) for graph in (GRAPH_FILE, INT8_GRAPH_FILE))
        cosine = float((np.asarray(exact()) * np.asarray(rounded())).sum(axis=1).min())
        record(chosen, "P22 least cosine of an ONNX graph in int8", cosine, "cosine", "none", PEERS)
        ratio = compare(rounded, exact, chosen)
    record(chosen, "P22 ONNX graph in int8 over float32", ratio, "ratio", "none", PEERS)


if __name__ == "__main__":
    main()
