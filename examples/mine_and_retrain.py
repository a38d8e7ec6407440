"""Train on pairs, mine hard negatives with the trained model, and train again with them.

python examples/mine_and_retrain.py data/docstrings_2000/train.jsonl.gz data/docstrings_2000/eval/validation

Both runs start from the same encoder and have the same number of steps, so that they differ only in the negatives.
Prints how many candidates each mining rule removed, and nDCG@10 of the untrained encoder, of the model trained on pairs
and of the model trained with mined negatives. Mined negatives are stored in `--output` and reused: choose another
folder for other data or another margin.
"""

from functools import partial

import lightning as L
import torch
from jsonargparse import auto_cli

import embeddings as emb
from embeddings.cli.mining import mining_table
from embeddings.data import BlendedBatchSampler
from embeddings.evaluation import evaluate_folder, read_retrieval_folder
from embeddings.mining import NegativeRules, Teachers, mine_negatives
from embeddings.models import MeanPooling


def train(start: str, source: emb.SourceConfig, output: str, steps: int, num_negatives: int) -> None:
    """Train the encoder `start` on a source and write the model to `output`."""
    L.seed_everything(0)
    module = emb.NVEmbedModule(
        emb.BackboneConfig(start),
        MeanPooling,
        loss=emb.InfoNCE(temperature=0.05),
        optimizer=partial(torch.optim.AdamW, lr=7e-5, weight_decay=0.01),
    )
    text = emb.TextSettings(query_max_length=64, document_max_length=64)
    sampler = partial(BlendedBatchSampler, steps_per_epoch=steps)
    data = emb.EmbeddingDataModule([source], text=text, sampler=sampler, num_negatives=num_negatives)
    export = emb.ExportModel(output, query_max_length=128, document_max_length=128, replace=True)
    callbacks = [emb.GradCacheCallback(mini_batch_tokens=1024), export]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    L.Trainer(max_epochs=1, devices=1, precision=emb.mixed_precision(), callbacks=callbacks, **quiet).fit(module, data)


def main(
    pairs: str,
    validation: str,
    output: str = "checkpoints/mine_and_retrain",
    model: str = "all-MiniLM-L6-v2",
    steps: int = 36,
    margin: float | None = 0.95,
) -> None:
    """Train `model` on the file `pairs` twice, score it on the retrieval folder `validation`, write below `output`."""
    folder = read_retrieval_folder(validation)  # read first, so that an error in it is found before training
    first, second, mined = f"{output}/pairs", f"{output}/mined", f"{output}/mined_{steps}_steps.parquet"
    train(model, emb.SourceConfig("pairs", pairs), first, steps, num_negatives=0)

    # A candidate is a negative if its score is below 95 % of the positive's. Above, it may be relevant to the query.
    rules = NegativeRules(num_negatives=3, margin=margin)
    teacher = Teachers([first], emb.Encoder.from_pretrained)
    report = mine_negatives(emb.SourceConfig("pairs", pairs), mined, teacher, rules)
    print(mining_table(report))

    train(model, emb.SourceConfig("mined", mined), second, steps, num_negatives=3)
    for name, place in (("as it comes", model), ("trained on pairs", first), ("with mined negatives", second)):
        result = evaluate_folder(emb.Encoder.from_pretrained(place), folder)
        print(f"{name:22}nDCG@10 {result.metrics['ndcg_at_10']:.3f}")


if __name__ == "__main__":
    auto_cli(main)
