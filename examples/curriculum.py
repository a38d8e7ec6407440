"""Mine hard negatives of four levels and train on them from easy to hard (MGH).

python examples/curriculum.py data/docstrings_2000/train.jsonl.gz data/docstrings_2000/eval/validation

Each query's candidates are divided into quarters by the encoder's similarity: level 4 is the easiest, level 1 the
hardest. Each level is trained for a quarter of the steps. Prints how many candidates each mining rule removed, the
scores of each level, and nDCG@10 before and after. Mined negatives are stored in `--output` and reused: choose another
folder for other data or another margin.
"""

from functools import partial

import lightning as L
import torch
from jsonargparse import auto_cli

import embeddings as emb
from embeddings.cli.mining import mining_table
from embeddings.data import BlendedBatchSampler, CurriculumBatchSampler
from embeddings.evaluation import evaluate_folder, read_retrieval_folder
from embeddings.mining import LevelRules, NegativeRules, Teachers, mine_negatives


def main(
    pairs: str,
    validation: str,
    output: str = "checkpoints/curriculum",
    model: str = "all-MiniLM-L6-v2",
    steps: int = 40,
    margin: float | None = 0.95,
) -> None:
    """Mine negatives for the file `pairs`, train `model`, score it on the folder `validation`, write below `output`."""
    L.seed_everything(0)
    folder = read_retrieval_folder(validation)  # read first, so that an error in it is found before training
    teacher = Teachers([model], emb.Encoder.from_pretrained)
    rules = NegativeRules(num_negatives=4, margin=margin)  # one per level
    mined = f"{output}/levels.parquet"
    report = mine_negatives(emb.SourceConfig("pairs", pairs), mined, teacher, rules, levels=LevelRules("quantiles"))
    print(mining_table(report))

    module = emb.MGHCurriculumModule(
        emb.BackboneConfig(model),
        loss=emb.InfoNCE(temperature=0.05),
        optimizer=partial(torch.optim.AdamW, lr=7e-5, weight_decay=0.01),
        schedule=emb.Schedule(),  # warm-up is a tenth of the steps; the paper's 300 steps suit only its longer run
    )
    # A query without a negative of the current level uses one of the next easier level.
    rows = partial(BlendedBatchSampler, steps_per_epoch=steps)
    data = emb.EmbeddingDataModule(
        [emb.SourceConfig("mined", mined)],
        text=emb.TextSettings(query_max_length=64, document_max_length=64),
        sampler=partial(CurriculumBatchSampler, inner=rows, missing_level="coarser"),
        num_negatives=1,
    )
    # Exports the last weights, because the hardest level is trained last.
    export = emb.ExportModel(f"{output}/model", query_max_length=128, document_max_length=128, replace=True)
    callbacks = [emb.GradCacheCallback(mini_batch_tokens=1024), export]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    L.Trainer(max_epochs=1, devices=1, precision=emb.mixed_precision(), callbacks=callbacks, **quiet).fit(module, data)
    for name, place in (("before", model), ("after", f"{output}/model")):
        result = evaluate_folder(emb.Encoder.from_pretrained(place), folder)
        print(f"{name:8}nDCG@10 {result.metrics['ndcg_at_10']:.3f}")


if __name__ == "__main__":
    auto_cli(main)
