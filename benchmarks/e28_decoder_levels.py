"""E28: MGH on a pretrained decoder: what its anchor tokens are, their pooling, and the orders of mined levels.

SmolLM2-135M trains with LoRA on the retrieval sets of E27 (1,024 pairs, 32 steps of 32 pairs). The first part compares
poolings without hard negatives at two learning rates, the second the orders of four levels that MiniLM mines. The third
measures which tokens get the weight of anchor-token-aware pooling before training, on functions of held-out packages as
in E7.
MGH reports 65.87 on MTEB for anchor tokens, 65.41 for the mean, 64.97 for the last token ("Negative Matters", Table 3),
and the curriculum above its reverse and a random order (Fig. 3). Needs EMBED_DATA.

`--only` runs some variants; a variant that has rows is not run again.
"""

from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.decoder_data import SIMILARITY, TESTS
from benchmarks.decoder_trials import DECODER, LevelsRecipe, Workspace, compare, run_trial
from benchmarks.docstring_trials import Workspace as Docstrings
from benchmarks.e7_anchor_shares import Case, shares
from benchmarks.trials import Metrics, Trial, replaced, run_recipes, run_trials, sized, table, trial_parser
from benchmarks.workloads import data_folder
from embeddings.inference.inspection import PLACES

CAUSAL = LevelsRecipe(num_steps=32, pooling="anchor")
ADAPTED = replace(CAUSAL, bidirectional=True, mntp_steps=150)
POOLINGS = {
    f"{mask}, {name}": replace(recipe, pooling=pooling)
    for mask, recipe in (("MNTP, mask removed", ADAPTED), ("causal", CAUSAL))
    for name, pooling in (("anchor tokens", "anchor"), ("mean", "mean"), ("last token", "last"))
}
# The learning rate that validation chooses in E27.
FAST = ", learning rate 0.002"
POOLINGS |= {f"{name}{FAST}": replace(recipe, learning_rate=2e-3) for name, recipe in POOLINGS.items()}
ORDERS = {
    "levels, coarse to fine": replace(ADAPTED, order="coarse_to_fine"),
    "levels, reverse": replace(ADAPTED, order="reverse"),
    "levels, random": replace(ADAPTED, order="random"),
}
ORDERS |= {f"{name}{FAST}": replace(recipe, learning_rate=2e-3) for name, recipe in ORDERS.items()}
# The decoder after masked next-token prediction.
MNTP = "SmolLM2-135M after MNTP"
CASES = {
    "weights, causal": Case(DECODER, by_visible_queries=True, num_texts=128),
    "weights, mask removed": Case(DECODER, bidirectional=True, num_texts=128),
    "weights, MNTP, mask removed": Case(MNTP, bidirectional=True, num_texts=128),
}
GAINS = [
    *(
        (f"{mask}, anchor tokens{rate}", f"{mask}, {other}{rate}")
        for mask in ("MNTP, mask removed", "causal")
        for other in ("mean", "last token")
        for rate in ("", FAST)
    ),
    *(
        (f"levels, coarse to fine{rate}", f"{other}{rate}")
        for rate in ("", FAST)
        for other in ("levels, reverse", "levels, random", "MNTP, mask removed, anchor tokens")
    ),
]


def main() -> None:
    """Measure the weights; train with each pooling and order; print the tables and record the differences."""
    parser = trial_parser(__doc__)
    recipes = {**POOLINGS, **ORDERS}
    parser.add_argument("--only", nargs="+", metavar="VARIANT", choices=list(recipes), help="train these only")
    parser.set_defaults(workers=1)
    chosen = parser.parse_args()
    if not chosen.tiny and not data_folder().is_dir():
        print("E28 skipped: set EMBED_DATA to the folder with the data sets")
        return
    recipes = dict(sized(chosen, recipes))
    seeds = range(1 if chosen.tiny else chosen.seeds)
    names = chosen.only or list(recipes)
    trials = [Trial("E28", name, seed, asdict(recipes[name])) for seed in seeds for name in names]
    scores = run_trials(chosen, trials, run_trial)
    print(f"E28, nDCG@10; {SIMILARITY}: Spearman's correlation\n{table(scores, [*TESTS, SIMILARITY, 'CPU seconds'])}")
    compare(chosen, scores, trials, GAINS)
    docstrings = Docstrings(chosen.work, chosen.tiny)
    with docstrings.locked():
        docstrings.prepare([])
    weights = run_recipes(replaced(chosen, seeds=1), "E28", CASES, weight_shares)
    print(f"E28, share of the weight\n{table(weights, [f'weight on {place}' for place in PLACES])}")
    print(f"\nshare of the tokens\n{table(weights, [f'tokens, {place}' for place in PLACES])}")


def weight_shares(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Mean shares of weight and of tokens over documents of the held-out packages, as in E7."""
    workspace = Workspace(work, tiny)
    recipe = {DECODER: CAUSAL, MNTP: ADAPTED}[str(trial.settings["model"])]
    recipe = recipe.tiny() if tiny else recipe
    return shares(replace(trial, settings={**trial.settings, "model": workspace.backbone(recipe).name}), work, tiny)


if __name__ == "__main__":
    main()
