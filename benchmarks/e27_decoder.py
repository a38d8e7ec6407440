"""E27: NV-Embed's choices on a pretrained decoder: mask, pooling, masked next-token prediction, stages, negatives.

SmolLM2-135M trains with LoRA on 1,280 pairs: 40 batches of 32, queries of 24 tokens, documents of 32. Masked next-token
prediction (MNTP) on the positives of the same pairs comes before. NV-Embed reports gains from removing the mask, from
latent attention and from a second stage without in-batch negatives (arXiv:2405.17428, Tables 2 to 4). LLM2Vec reports
that a Llama model is worse without its mask unless MNTP comes first (arXiv:2404.05961, §3). Differences have 95 %
bootstrap intervals over the queries; a query's score is its mean over the seeds. Needs EMBED_DATA.

`--only` runs some variants; a variant that has rows is not run again.
"""

from argparse import Namespace
from dataclasses import asdict, replace

from benchmarks.decoder_data import SIMILARITY, TESTS
from benchmarks.decoder_trials import Recipe, StagesRecipe, compare, run_trial
from benchmarks.docstring_trials import MODEL
from benchmarks.trials import Trial, run_trials, sized, table, trial_parser
from benchmarks.workloads import data_folder

METRICS = [*TESTS, SIMILARITY, "validation", "CPU seconds"]
CAUSAL, OPEN, ADAPTED = (Recipe(), Recipe(bidirectional=True), Recipe(bidirectional=True, mntp_steps=150))
WHOLE, LAST = "MNTP, mask removed, latent", "MNTP, mask removed, last token"
MAIN = {
    WHOLE: replace(ADAPTED, pooling="latent"),
    "causal, mean": CAUSAL,
    "MNTP, mask removed, mean": ADAPTED,
    "mask removed, mean": OPEN,
    "mask removed, latent": replace(OPEN, pooling="latent"),
    "causal, last token": replace(CAUSAL, pooling="last"),
}
UNTRAINED = {
    f"untrained, {name}": replace(recipe, num_steps=0)
    for name, recipe in {
        "MiniLM": replace(CAUSAL, backbone=MODEL),
        "causal, mean": CAUSAL,
        "mask removed, mean": OPEN,
        "50 steps of MNTP, mean": replace(ADAPTED, mntp_steps=50),
        "150 steps of MNTP, mean": ADAPTED,
        "500 steps of MNTP, mean": replace(ADAPTED, mntp_steps=500),
    }.items()
}
# The learning rate that validation chose.
FAST = ", learning rate 0.002"
# The other combinations of mask, pooling and start, at that rate. MNTP itself is always without the causal mask.
GRID = {
    f"{name}{FAST}": replace(recipe, learning_rate=2e-3)
    for name, recipe in {
        "causal, latent": replace(CAUSAL, pooling="latent"),
        "mask removed, last token": replace(OPEN, pooling="last"),
        LAST: replace(ADAPTED, pooling="last"),
        "MNTP, causal, mean": replace(CAUSAL, mntp_steps=150),
        "MNTP, causal, last token": replace(CAUSAL, mntp_steps=150, pooling="last"),
        "MNTP, causal, latent": replace(CAUSAL, mntp_steps=150, pooling="latent"),
    }.items()
}
# Variants of which all seeds run; the others of `MORE` run with one.
_STAGES = ("one stage", "two stages")
THREE_SEEDS = (
    "causal, latent",
    f"{LAST}, 10,200 pairs{FAST}",
    *_STAGES,
    *(f"{name}, 3,840 pairs{FAST}" for name in (WHOLE, "causal, mean")),
    *(f"{steps} steps of MNTP, mask removed, latent{FAST}" for steps in (50, 500)),
    *(f"{name}{FAST}" for name in (*MAIN, *_STAGES, "two stages, in-batch negatives in both")),
    *(f"{name}, seven negatives{FAST}" for name in _STAGES),
    *GRID,
)
MORE = {
    "causal, latent": replace(CAUSAL, pooling="latent"),
    "one stage": replace(MAIN[WHOLE], negatives=True),
    "two stages": replace(MAIN[WHOLE], negatives=True, first_steps=20, in_batch=False),
    f"one stage{FAST}": replace(MAIN[WHOLE], negatives=True, learning_rate=2e-3),
    f"two stages{FAST}": replace(MAIN[WHOLE], negatives=True, first_steps=20, in_batch=False, learning_rate=2e-3),
    "two stages, in-batch negatives in both": replace(MAIN[WHOLE], negatives=True, first_steps=20),
    f"two stages, in-batch negatives in both{FAST}": replace(
        MAIN[WHOLE], negatives=True, first_steps=20, learning_rate=2e-3
    ),
    f"two stages, 5e-4 in the second{FAST}": StagesRecipe(
        **asdict(replace(MAIN[WHOLE], negatives=True, first_steps=20, in_batch=False, learning_rate=2e-3)),
        second_rate=5e-4,
    ),
    "one stage, no in-batch negatives": replace(MAIN[WHOLE], negatives=True, in_batch=False),
    # As many as in the paper.
    **{
        f"{name}, seven negatives{suffix}": replace(recipe, negatives=7, learning_rate=rate)
        for suffix, rate in (("", MAIN[WHOLE].learning_rate), (FAST, 2e-3))
        for name, recipe in {
            "one stage": MAIN[WHOLE],
            "two stages": replace(MAIN[WHOLE], first_steps=20, in_batch=False),
        }.items()
    },
    **{
        f"{name}, learning rate {rate:g}": replace(MAIN[name], learning_rate=rate)
        for name in MAIN
        for rate in (2.5e-4, 1e-3, 2e-3, 4e-3)
    },
    "50 steps of MNTP, mask removed, latent": replace(MAIN[WHOLE], mntp_steps=50),
    "500 steps of MNTP, mask removed, latent": replace(MAIN[WHOLE], mntp_steps=500),
    "mask removed, last token": replace(OPEN, pooling="last"),
    LAST: replace(ADAPTED, pooling="last"),
    **{f"{name}, 3,840 pairs": replace(MAIN[name], num_pairs=3840, num_steps=120) for name in (WHOLE, "causal, mean")},
    # The most that the smallest of the five sets allows.
    f"{WHOLE}, 10,200 pairs": replace(MAIN[WHOLE], num_pairs=10200, num_steps=318),
    f"{LAST}, 10,200 pairs{FAST}": replace(ADAPTED, pooling="last", learning_rate=2e-3, num_pairs=10200, num_steps=318),
    **{
        f"{name}, 3,840 pairs{FAST}": replace(MAIN[name], num_pairs=3840, num_steps=120, learning_rate=2e-3)
        for name in (WHOLE, "causal, mean")
    },
    **{
        f"{steps} steps of MNTP, mask removed, latent{FAST}": replace(MAIN[WHOLE], mntp_steps=steps, learning_rate=2e-3)
        for steps in (50, 500)
    },
    **GRID,
}
MAIN_GAINS = [
    (WHOLE, "causal, mean"),
    (WHOLE, "MNTP, mask removed, mean"),
    ("MNTP, mask removed, mean", "mask removed, mean"),
    ("MNTP, mask removed, mean", "causal, mean"),
    ("mask removed, mean", "causal, mean"),
    ("mask removed, latent", "mask removed, mean"),
    ("causal, mean", "causal, last token"),
]
GAINS = [
    *MAIN_GAINS,
    *((f"{better}{FAST}", f"{than}{FAST}") for better, than in MAIN_GAINS),
    (WHOLE, "untrained, MiniLM"),
    (f"{WHOLE}{FAST}", "untrained, MiniLM"),
    ("causal, latent", "causal, mean"),
    ("untrained, 150 steps of MNTP, mean", "untrained, causal, mean"),
    ("two stages", "one stage"),
    (f"two stages{FAST}", f"one stage{FAST}"),
    ("two stages", "two stages, in-batch negatives in both"),
    (f"two stages{FAST}", f"two stages, in-batch negatives in both{FAST}"),
    (f"two stages, in-batch negatives in both{FAST}", f"one stage{FAST}"),
    (f"one stage{FAST}", f"{WHOLE}{FAST}"),
    ("one stage", "one stage, no in-batch negatives"),
    *(
        (f"{better}{suffix}", f"{than}{suffix}")
        for suffix in ("", FAST)
        for better, than in (
            ("two stages, seven negatives", "one stage, seven negatives"),
            ("two stages, seven negatives", "two stages"),
            ("one stage, seven negatives", "one stage"),
        )
    ),
    (f"{WHOLE}, 3,840 pairs", "causal, mean, 3,840 pairs"),
    (f"{WHOLE}, 10,200 pairs", "untrained, MiniLM"),
    (f"two stages, 5e-4 in the second{FAST}", f"one stage{FAST}"),
    (f"{LAST}, 10,200 pairs{FAST}", "untrained, MiniLM"),
    (f"{WHOLE}, 3,840 pairs{FAST}", f"causal, mean, 3,840 pairs{FAST}"),
    (f"{WHOLE}, 3,840 pairs{FAST}", "untrained, MiniLM"),
    (f"causal, latent{FAST}", f"causal, mean{FAST}"),
    (f"mask removed, last token{FAST}", f"causal, last token{FAST}"),
]


def trials_of(chosen: Namespace) -> list[Trial]:
    """The trials, the most important ones first. Before training, a model does not depend on the seed."""
    recipes = sized(chosen, {**MAIN, **UNTRAINED, **MORE})
    seeds = range(1 if chosen.tiny else chosen.seeds)
    late = [name for name in UNTRAINED if "500" in name]
    places = [(0, name) for name in (*MAIN, *UNTRAINED) if name not in late]
    places += [(seed, name) for seed in seeds[1:] for name in MAIN]
    places += [(seed, name) for name in MORE for seed in (seeds if name in THREE_SEEDS else (0,))]
    places += [(0, name) for name in late]
    chosen_names = chosen.only or list(recipes)
    return [Trial("E27", name, seed, asdict(recipes[name])) for seed, name in places if name in chosen_names]


def main() -> None:
    """Run the trials, print the table, and record the differences."""
    parser = trial_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="VARIANT", choices=[*MAIN, *UNTRAINED, *MORE], help="run these only"
    )
    parser.set_defaults(workers=1)
    chosen = parser.parse_args()
    if not chosen.tiny and not data_folder().is_dir():
        print("E27 skipped: set EMBED_DATA to the folder with the data sets")
        return
    trials = trials_of(chosen)
    scores = run_trials(chosen, trials, run_trial)
    print(f"E27, nDCG@10; {SIMILARITY}: Spearman's correlation\n{table(scores, METRICS)}")
    compare(chosen, scores, trials, GAINS)


if __name__ == "__main__":
    main()
