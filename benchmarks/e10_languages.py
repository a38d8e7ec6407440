"""E10: experts against the dense model at equal active parameters, on pairs of eight languages.

With one expert per token, the active parameters are those of the dense model plus the router. The models train on
questions and paragraphs in Arabic, Chinese and Japanese and on questions and answers in five European languages, with
one language per batch. They are scored on XQuAD in two trained languages (Arabic and Chinese), in German, which has
only 393 training pairs, and in Spanish, which has none. Nomic Embed v2 reports experts below the dense model with 100M
pairs (arXiv:2502.07972, §7.2). Needs EMBED_DATA.
"""

from benchmarks.moe_trials import PAIRS, Recipe, run
from benchmarks.trials import difference, replaced, table, trial_options
from benchmarks.workloads import data_folder

PAGES = ("trained languages", "further languages")
BEFORE = {"before": Recipe(corpus="languages", num_steps=0)}
RECIPES = {
    "dense": Recipe(corpus="languages"),
    "8 experts, top 1": Recipe(top_k=1, corpus="languages"),
    "8 experts, top 2": Recipe(top_k=2, corpus="languages"),
}


def main() -> None:
    """Train each model; print the table and the differences to the dense model."""
    chosen = trial_options(__doc__)
    if not all((data_folder() / name).exists() for name in (*PAIRS, "xquad")):
        print(f"E10 skipped: {data_folder()} does not contain {', '.join(PAIRS)} and xquad; set EMBED_DATA")
        return
    # Before training, the model does not depend on the seed.
    scores = run(replaced(chosen, seeds=1), "E10", BEFORE) + run(chosen, "E10", RECIPES)
    print(f"E10, nDCG@10\n{table(scores, [*PAGES, 'total parameters', 'active parameters'])}")
    _, dense, *sparse = scores
    for page in PAGES:
        for model in sparse:
            print(difference(model, dense, page))


if __name__ == "__main__":
    main()
