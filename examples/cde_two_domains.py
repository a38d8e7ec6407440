"""Train a contextual model on two domains, and search each with its own (matched) and the other's (foreign) context.

python examples/cde_two_domains.py data/torch.jsonl data/sympy.jsonl

Each file contains pairs of one domain. The last `num_held_out` lines are held out for the search. The other lines are
clustered and trained on, so that a batch contains neighbours of one domain. Prints, for each domain and context, the
fraction of queries whose own document is ranked first. A context may not help on vocabulary that the encoder was
trained on; docs/methods/cde.md shows where it helps. Vectors and clusters are stored in `--output` and reused: choose
another folder for other data or another batch size.
"""

import json
from functools import partial
from pathlib import Path

import lightning as L
import torch
from jsonargparse import auto_cli

import embeddings as emb
from embeddings.data import ClusteredBatchSampler
from embeddings.data.store import open_cached
from embeddings.inference import sample_context
from embeddings.mining import ClusterSettings, VectorFeatures, cluster_pairs, encode_pairs
from embeddings.modules.cde import ContextSettings, FirstStageTraining


def main(
    first: str,
    second: str,
    output: str = "checkpoints/cde_two_domains",
    model: str = "all-MiniLM-L6-v2",
    steps: int = 80,
    batch_size: int = 32,
    num_held_out: int = 200,
) -> None:
    """Train `model` on the files `first` and `second`; the first half of the steps trains the first stage only."""
    L.seed_everything(0)
    sources, clusters, held_out = [], {}, {}
    for name, file in (("first", first), ("second", second)):
        with open(file, encoding="utf-8") as rows:
            lines = rows.readlines()
        held_out[name] = [json.loads(line) for line in lines[-num_held_out:]]
        (folder := Path(output) / name).mkdir(parents=True, exist_ok=True)
        (folder / "train.jsonl").write_text("".join(lines[:-num_held_out]), encoding="utf-8")
        sources.append(emb.SourceConfig(name, str(folder / "train.jsonl")))
        pairs = open_cached(sources[-1])
        vectors = encode_pairs(emb.Encoder.from_pretrained(model), pairs, folder / "vectors")
        cluster_pairs(VectorFeatures(vectors), pairs, folder / "clusters", ClusterSettings(cluster_size=batch_size))
        clusters[name] = str(folder / "clusters")

    module = emb.CDEModule(
        emb.BackboneConfig(model),
        context=ContextSettings(num_context=batch_size),
        first_stage_training=FirstStageTraining(word_steps=steps // 2, frozen_steps=None),
        loss=emb.InfoNCE(temperature=0.05),
        optimizer=partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.01),
        schedule=emb.Schedule(),
    )
    text = emb.TextSettings(query_max_length=64, document_max_length=64)
    sampler = partial(ClusteredBatchSampler, clusters=clusters)
    data = emb.EmbeddingDataModule(sources, text=text, sampler=sampler, batch_size=batch_size, num_negatives=0)
    callbacks = [emb.GradCacheCallback(mini_batch_tokens=1024), emb.ExportModel(f"{output}/model", replace=True)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    L.Trainer(max_steps=steps, devices=1, precision=emb.mixed_precision(), callbacks=callbacks, **quiet).fit(
        module, data
    )

    encoder = emb.Encoder.from_pretrained(f"{output}/model")
    documents = {name: [pair["positive"] for pair in pairs] for name, pairs in held_out.items()}
    contexts = {"none": None, **{name: sample_context(encoder, texts) for name, texts in documents.items()}}
    for name, pairs in held_out.items():
        for other, context in contexts.items():
            query = encoder.encode_query([pair["query"] for pair in pairs], context)
            scores = encoder.similarity(query, encoder.encode_document(documents[name], context))
            right = (scores.argmax(axis=1) == range(len(pairs))).mean()
            kind = {name: "matched", "none": "none"}.get(other, "foreign")
            print(f"domain {name:8}context {kind:9}own document first {right:.3f}")


if __name__ == "__main__":
    auto_cli(main)
