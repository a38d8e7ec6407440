"""A tiny starting model, one that training made of it, and retrieval data with queries of several kinds."""

import torch

from embeddings.models import Embedder
from tests.evaluation.data import write_rows
from tests.inference.models import some_texts, tiny_embedder


def write_models(folder, **text):
    """The directories `start` and `trained`, whose weights differ a little."""
    embedder = tiny_embedder(**text)
    embedder.save_pretrained(folder / "start")
    return folder / "start", write_trained(embedder, folder / "trained")


def write_trained(embedder: Embedder, folder, scale=0.02):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in embedder.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator)
    embedder.save_pretrained(folder)
    return folder


def write_test_set(folder, num_documents=30, num_queries=12, kinds=("real",), seed=0):
    """Each query is a part of its relevant document; a kind of None is not written."""
    texts = some_texts(num_documents, seed)
    rows = [{"_id": f"d{row}", "title": f"title {row % 5}", "text": text} for row, text in enumerate(texts)]
    write_rows(folder / "corpus.jsonl", rows)
    queries, lines = [], ["query-id\tcorpus-id\tscore"]
    for row in range(num_queries):
        kind = kinds[row % len(kinds)]
        words = texts[row].split()
        query = {"_id": f"q{row}", "text": " ".join([*words[len(words) // 2 :], "fox"])}
        queries.append(query if kind is None else {**query, "kind": kind})
        lines.append(f"q{row}\td{row}\t1")
    write_rows(folder / "queries.jsonl", queries)
    (folder / "qrels.tsv").write_text("\n".join(lines) + "\n")
    return folder
