"""Upcycle a dense encoder to a sparse mixture of experts, train it at two embedding dimensions, and print its routing.

python examples/upcycle.py data/docstrings_2000/train.jsonl.gz data/docstrings_2000/eval/validation

Upcycling needs rotary positions, so an encoder with learned positions is converted first. Prints the number of
parameters, the difference between the vectors of the dense and the sparse model before training (equal up to rounding),
nDCG@10 with all and with a third of the dimensions, and the fraction of tokens per expert. The new positions lower the
accuracy until the model is adapted to them (lightning_configs/methods/mlm_adapt.yaml). NomicBERT already has rotary
positions: set `rotary = model` instead of converting.
"""

from functools import partial

import lightning as L
import torch
from jsonargparse import auto_cli

import embeddings as emb
from embeddings.data import BlendedBatchSampler
from embeddings.evaluation import evaluate_widths, read_retrieval_folder
from embeddings.inference import expert_loads
from embeddings.losses import MatryoshkaInfoNCE
from embeddings.models import MeanPooling, Upcycling, load_backbone, parameter_counts, write_rotary_model


def main(
    pairs: str,
    validation: str,
    output: str = "checkpoints/upcycle",
    model: str = "all-MiniLM-L6-v2",
    steps: int = 36,
) -> None:
    """Upcycle the BERT, RoBERTa or XLM-R encoder `model`, train it on the file `pairs`, write it below `output`."""
    L.seed_everything(0)
    folder = read_retrieval_folder(validation)
    write_rotary_model(model, rotary := f"{output}/rotary", keep_head=False)
    backbone, tokenizer = load_backbone(emb.BackboneConfig(rotary))
    widths = [backbone.config.hidden_size, backbone.config.hidden_size // 3]
    module = emb.MoEEmbedModule(
        emb.BackboneConfig(rotary),
        upcycling=Upcycling(num_experts=4, top_k=2),  # every other layer
        loss=MatryoshkaInfoNCE(widths=widths, temperature=0.05),
        optimizer=partial(torch.optim.AdamW, lr=1.5e-4, weight_decay=0.01),
        schedule=emb.Schedule(),
    )
    counts = parameter_counts(module.embedder.backbone)
    print(f"{counts.total:,} parameters, of which {counts.active:,} work for a token")

    read = emb.TextSettings(query_max_length=128, document_max_length=128)
    dense = emb.Embedder(backbone, tokenizer, MeanPooling(widths[0]), text=read)
    towers = [emb.Encoder(embedder, precision="float32") for embedder in (dense, module.embedder)]
    vectors = [encoder.encode_query(folder.queries[:32]) for encoder in towers]
    print(f"largest difference of the vectors, dense and sparse: {abs(vectors[0] - vectors[1]).max():.1e}")

    data = emb.EmbeddingDataModule(
        [emb.SourceConfig("pairs", pairs)],
        text=emb.TextSettings(query_max_length=64, document_max_length=64),
        sampler=partial(BlendedBatchSampler, steps_per_epoch=steps),
        num_negatives=0,
    )
    export = emb.ExportModel(f"{output}/model", query_max_length=128, document_max_length=128, replace=True)
    callbacks = [emb.GradCacheCallback(mini_batch_tokens=1024), export]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    L.Trainer(max_epochs=1, devices=1, precision=emb.mixed_precision(), callbacks=callbacks, **quiet).fit(module, data)

    encoder = emb.Encoder.from_pretrained(f"{output}/model")
    for name, scored in (("rotary, untrained", towers[0]), ("sparse, trained", encoder)):
        for result in evaluate_widths(scored, folder, widths):
            print(f"{name:20}{result.dimensions:4} dimensions  nDCG@10 {result.metrics['ndcg_at_10']:.3f}")
    loads = expert_loads(encoder, folder.documents)
    for layer, count_X in zip(loads.layers, loads.count_YX, strict=True):
        print(f"layer {layer}: share of each expert", *(f"{share:.2f}" for share in count_X / count_X.sum()))


if __name__ == "__main__":
    auto_cli(main)
