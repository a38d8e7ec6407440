"""E10: experts against the dense model at equal active parameters, on pairs of eight languages.

One expert a token has the dense model's active parameters, but for the router. Trained on questions and paragraphs in
Arabic, Chinese and Japanese and on questions and answers in five European languages, one language a batch; scored on
XQuAD, in two languages that are trained on and two that are hardly (German has 393 pairs) or not. Nomic Embed v2
finds experts behind the dense model with 100M pairs (arXiv:2502.07972, §7.2). Needs EMBED_DATA.
"""

from benchmarks.moe_trials import PAIRS, Recipe, data_folder, run
from benchmarks.trials import difference, replaced, table, trial_options

PAGES = ("trained languages", "further languages")
BEFORE = {"before": Recipe(corpus="languages", num_steps=0)}
RECIPES = {
    "dense": Recipe(corpus="languages"),
    "8 experts, top 1": Recipe(top_k=1, corpus="languages"),
    "8 experts, top 2": Recipe(top_k=2, corpus="languages"),
}


def main() -> None:
    """Train each model; print the table and the differences to the dense one."""
    chosen = trial_options(__doc__)
    if not all((data_folder() / name).exists() for name in (*PAIRS, "xquad")):
        print(f"E10 left out: {data_folder()} does not hold {', '.join(PAIRS)} and xquad (EMBED_DATA names the folder)")
        return
    # No seed enters a model that is not trained.
    scores = run(replaced(chosen, seeds=1), "E10", BEFORE) + run(chosen, "E10", RECIPES)
    print(f"E10, nDCG@10\n{table(scores, [*PAGES, 'total parameters', 'active parameters'])}")
    _, dense, *sparse = scores
    for page in PAGES:
        for model in sparse:
            print(difference(model, dense, page))


if __name__ == "__main__":
    main()
