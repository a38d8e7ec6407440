"""E5: six poolings on a small decoder, with its causal mask, without it, and without it after an adaptation.

The decoder is that of `lightning_configs/small_decoder.yaml`, pre-trained here on source code, and the adaptation that
of `small_decoder_mntp.yaml`, masked next-token prediction, which both run first where their directories are missing.
NV-Embed finds the mask's removal and latent attention better, and self-attention no better than the mean
(arXiv:2405.17428, Tables 2 and 3); MGH finds pooling by received attention a little better still (MTEB 65.87 against
65.80, 65.41 for mean and 64.97 for last-token pooling; "Negative Matters", Table 3).
"""

import subprocess
import sys
from pathlib import Path
from typing import get_args

from benchmarks.mgh_trials import PAGES, PoolingName, Recipe, run
from benchmarks.trials import difference, table, trial_options
from embeddings.models import FromScratch, LanguageModel
from embeddings.models.language_model import load_language_model

CONFIGS = Path(__file__).parents[1] / "lightning_configs"
CAUSAL, OPEN, ADAPTED = "causal", "both ways", "both ways, adapted"


def main() -> None:
    """Train with each pooling and mask; print the table, and what poolings and masks bring."""
    chosen = trial_options(__doc__)
    scores = run(
        chosen,
        "E5",
        recipes(*(decoder(chosen.work, chosen.tiny, name) for name in ("small_decoder", "small_decoder_mntp"))),
    )
    print(f"E5, nDCG@10\n{table(scores, [*PAGES, 'last training loss', 'training seconds'])}")
    found = {score.variant: score for score in scores}
    poolings = get_args(PoolingName)
    for page in PAGES:
        for name, score in found.items():
            pooling, mask = name.split("; ")
            if pooling != poolings[0]:
                print(difference(score, found[f"{poolings[0]}; {mask}"], page))
            if mask != CAUSAL:
                print(difference(score, found[f"{pooling}; {CAUSAL}"], page))


def recipes(decoder: str, adapted: str) -> dict[str, Recipe]:
    """Each pooling with each mask, the adapted decoder with two of them, by the name of the variant."""
    starts = {CAUSAL: (decoder, False), OPEN: (decoder, True), ADAPTED: (adapted, True)}
    return {
        f"{pooling}; {mask}": Recipe(
            backbone=start,
            bidirectional=is_open,
            pooling=pooling,
            order=None,
            num_steps=120,
            batch_size=64,
            max_length=32,
            learning_rate=2e-3,
        )
        for mask, (start, is_open) in starts.items()
        for pooling in get_args(PoolingName)
        if mask != ADAPTED or pooling in ("mean", "anchor, key axis")
    }


def decoder(work: Path, tiny: bool, name: str) -> str:
    """The directory of a decoder, which is trained where there is none; a tiny one has random weights."""
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
