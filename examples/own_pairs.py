"""Train on your own pairs, and score the model before and after on held-out pairs.

python examples/own_pairs.py pairs.jsonl checkpoints/mine

Each line of the file, which may be gzipped, is {"query": "…", "positive": "…"} with an optional "negatives": ["…"].
Every tenth pair is held out; its query is searched among all held-out positives. The split is written to
data/own_pairs. Prints nDCG@10 before and after. The output is a sentence-transformers directory.
"""

import gzip
import json
from functools import partial
from pathlib import Path

import lightning as L
import torch
from jsonargparse import auto_cli

import embeddings as emb
from embeddings.evaluation import evaluate_folder
from embeddings.models import MeanPooling


def hold_out(pairs: str, folder: Path) -> None:
    """Write every tenth pair to the retrieval folder `folder`/validation, the others to `folder`/train.jsonl."""
    with (gzip.open if pairs.endswith(".gz") else open)(pairs, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip()]
    held = [json.loads(line) for line in lines[::10]]
    id_of = {pair["positive"]: f"d{row}" for row, pair in enumerate(held)}
    files = {
        "train.jsonl": [line for row, line in enumerate(lines) if row % 10],
        "validation/corpus.jsonl": [json.dumps({"_id": name, "text": text}) for text, name in id_of.items()],
        "validation/queries.jsonl": [json.dumps({"_id": f"q{row}", "text": p["query"]}) for row, p in enumerate(held)],
        "validation/qrels.tsv": ["query-id\tcorpus-id\tscore"]
        + [f"q{row}\t{id_of[pair['positive']]}\t1" for row, pair in enumerate(held)],
    }
    (folder / "validation").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text("\n".join(content) + "\n", encoding="utf-8")


def main(pairs: str, output: str, model: str = "all-MiniLM-L6-v2", epochs: int = 3, batch_size: int = 32) -> None:
    """Train `model` on the file `pairs` and write it to the directory `output`."""
    L.seed_everything(0)
    hold_out(pairs, folder := Path("data/own_pairs"))
    before = evaluate_folder(emb.Encoder.from_pretrained(model), folder / "validation")
    module = emb.NVEmbedModule(
        emb.BackboneConfig(model),
        MeanPooling,
        loss=emb.InfoNCE(temperature=0.05),
        optimizer=partial(torch.optim.AdamW, lr=5e-5, weight_decay=0.01),
    )
    text = emb.TextSettings(query_max_length=64, document_max_length=128)
    source = emb.SourceConfig("mine", str(folder / "train.jsonl"))
    data = emb.EmbeddingDataModule([source], text=text, batch_size=batch_size, num_negatives=3)
    callbacks = [emb.GradCacheCallback(mini_batch_tokens=8192), emb.ExportModel(output, replace=True)]
    # Lightning's trainer with the run record, checkpoints, metrics and checks of `fit`.
    trainer = emb.Trainer(callbacks, max_epochs=epochs, devices=1, precision=emb.mixed_precision(), log_every_n_steps=1)
    trainer.fit(module, data)
    after = evaluate_folder(emb.Encoder.from_pretrained(output), folder / "validation")
    print(f"nDCG@10 before {before.metrics['ndcg_at_10']:.3f}, after {after.metrics['ndcg_at_10']:.3f}")


if __name__ == "__main__":
    auto_cli(main)
