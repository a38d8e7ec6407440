"""E5: six poolings on a small decoder, with its causal mask, without it, and without it after an adaptation.

`lightning_configs/small_decoder.yaml` pre-trains the decoder on source code; `small_decoder_mntp.yaml` adapts it by
masked next-token prediction. Both configs run first if their model directories are missing. NV-Embed reports gains from
removing the mask and from latent attention, but not from self-attention (arXiv:2405.17428, Tables 2 and 3). MGH reports
that pooling by received attention is slightly better still: MTEB 65.87 against 65.80, 65.41 for mean and 64.97 for
last-token pooling ("Negative Matters", Table 3).

Self-attention was measured later, on a decoder that the same config had trained again on another CPU. Mean pooling was
repeated on that decoder; both start from the copy that `AGAIN` names.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

from benchmarks.mgh_trials import PAGES, PoolingName, Recipe, run
from benchmarks.trials import difference, table, trial_options
from embeddings.models import FromScratch, LanguageModel
from embeddings.models.language_model import load_language_model

CONFIGS = Path(__file__).parents[1] / "lightning_configs"
AGAIN = "small_decoder_again"
CAUSAL, OPEN, ADAPTED = "causal", "both ways", "both ways, adapted"


def main() -> None:
    """Train with each pooling and mask; print the table and the gains of poolings and masks."""
    chosen = trial_options(__doc__)
    first, adapted = (decoder(chosen.work, chosen.tiny, name) for name in ("small_decoder", "small_decoder_mntp"))
    again = Path(first).with_name(AGAIN)
    if not again.is_dir():
        shutil.copytree(first, again)
    starts = {CAUSAL: (first, False), OPEN: (first, True), ADAPTED: (adapted, True)}
    poolings = [name for name in get_args(PoolingName) if name != "self-attention"]
    cells = {
        f"{pooling}; {mask}": recipe(pooling, *start)
        for mask, start in starts.items()
        for pooling in poolings
        if mask != ADAPTED or pooling in ("mean", "anchor, key axis")
    }
    later = {
        f"{pooling}, again; {mask}": recipe(pooling, str(again), bidirectional)
        for mask, bidirectional in ((CAUSAL, False), (OPEN, True))
        for pooling in ("mean", "self-attention")
    }
    for baseline, variants in (("mean", cells), ("mean, again", later)):
        scores = run(chosen, "E5", variants)
        print(f"E5, nDCG@10\n{table(scores, [*PAGES, 'last training loss', 'training seconds'])}")
        by_variant = {score.variant: score for score in scores}
        for page in PAGES:
            for name, score in by_variant.items():
                pooling, mask = name.split("; ")
                if pooling != baseline:
                    print(difference(score, by_variant[f"{baseline}; {mask}"], page))
                if mask != CAUSAL:
                    print(difference(score, by_variant[f"{pooling}; {CAUSAL}"], page))


def recipe(pooling: PoolingName, decoder: str, bidirectional: bool) -> Recipe:
    """The recipe for training a decoder with a pooling, with or without its causal mask."""
    return Recipe(
        backbone=decoder,
        bidirectional=bidirectional,
        pooling=pooling,
        order=None,
        num_steps=120,
        batch_size=64,
        max_length=32,
        learning_rate=2e-3,
    )


def decoder(work: Path, tiny: bool, name: str) -> str:
    """The directory of a decoder, trained first if it is missing; if tiny, a decoder with random weights."""
    if not tiny:
        folder = f"checkpoints/{name}"
        if not Path(folder).is_dir():
            config = str(CONFIGS / f"{name}.yaml")
            subprocess.run([sys.executable, "main.py", "fit", "--config", config], cwd=CONFIGS.parent, check=True)
        return folder
    folder = str((work / "tiny" / name).absolute())
    sizes: dict[str, bool | int | float | str | None] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    model, tokenizer = load_language_model(FromScratch("all-MiniLM-L6-v2", settings=sizes), "causal")
    LanguageModel(model, tokenizer, causal=True).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
