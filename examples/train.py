"""Train an embedding model on pairs in Python, score it on held-out queries, and search with it.

python main.py prepare docstrings --output data/docstrings
python examples/train.py data/docstrings checkpoints/docstrings
"""

from functools import partial

import lightning as L
import torch
from jsonargparse import auto_cli

import embeddings as emb
from embeddings.data import BlendedBatchSampler
from embeddings.models import MeanPooling


def main(data: str, output: str, steps: int = 36, batch_size: int = 32) -> None:
    """Train on `data`/train.jsonl.gz and write a sentence-transformers directory to `output`."""
    L.seed_everything(0)
    module = emb.NVEmbedModule(
        backbone=emb.BackboneConfig("all-MiniLM-L6-v2"),  # a directory, or any encoder or decoder on the Hub
        pooling=MeanPooling,
        loss=emb.InfoNCE(temperature=0.05),
        optimizer=partial(torch.optim.AdamW, lr=7e-5, weight_decay=0.01),
    )
    pairs = emb.EmbeddingDataModule(
        [emb.SourceConfig("docstrings", path=f"{data}/train.jsonl.gz")],  # lines of query, positive, negatives
        text=emb.TextSettings(query_max_length=64, document_max_length=64),
        sampler=partial(BlendedBatchSampler, steps_per_epoch=steps),
        batch_size=batch_size,
        num_negatives=3,
    )
    callbacks = [
        emb.GradCacheCallback(mini_batch_tokens=1024),  # large batches with less memory and the same gradient
        emb.RetrievalEvaluation(f"{data}/eval/validation", every_n_steps=18),
        emb.ExportModel(output, document_max_length=128, query_max_length=128),
    ]
    # Lightning's trainer with the run record, checkpoints, metrics and checks of `fit`.
    trainer = emb.Trainer(callbacks, max_epochs=1, precision=emb.mixed_precision(), log_every_n_steps=1)
    trainer.fit(module, pairs)

    encoder = emb.Encoder.from_pretrained(output)
    documents = ["Pad sequences to one length.", "Copy a file to another file system.", "Shortest path in a graph."]
    query = encoder.encode_query(["how do I find the quickest route between two nodes"])
    scores = encoder.similarity(query, encoder.encode_document(documents))[0]
    for score, text in sorted(zip(scores, documents, strict=True), reverse=True):
        print(f"{score:.3f}  {text}")


if __name__ == "__main__":
    auto_cli(main)
