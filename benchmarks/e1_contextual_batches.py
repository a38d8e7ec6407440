"""E1: the paper's Table 1 in miniature: random or clustered batches, a bi-encoder or a contextual model.

CDE reports, on shortened BEIR, 59.9 for neither, 61.7 for clustered batches, 62.4 for the contextual model, and 63.1
for both (arXiv:2410.02525, Table 1). Here all variants train the same number of steps on the same number of pairs:
first a warm-up on random batches that all seeds share, then steps on the variant's own batches. The contextual model is
scored on held-out domains with context documents of the domain, of another domain, and without context. In a fifth
variant the contextual model's first stage learns word prediction before the contrastive steps of the warm-up, and is
then frozen (`FirstStageTraining`).
"""

from benchmarks.docstring_trials import CONTEXTS, OTHER_DOMAINS, Recipe, WordsFirst, run
from benchmarks.trials import difference, table, trial_options

RECIPES = {
    "bi-encoder, random": Recipe(warmup_steps=60),
    "bi-encoder, clustered": Recipe(warmup_steps=60, cluster_size=32),
    "contextual, random": Recipe(warmup_steps=60, contextual=True),
    "contextual, clustered": Recipe(warmup_steps=60, contextual=True, cluster_size=32),
    "contextual, clustered, words first": WordsFirst(warmup_steps=60, contextual=True, cluster_size=32),
}
PAGES = ("held-out packages", "held-out functions")


def main() -> None:
    """Run each variant with each seed; print the table and the differences between variants."""
    chosen = trial_options(__doc__)
    scores = run(chosen, "E1", RECIPES)
    print(f"E1, nDCG@10 and batch difficulty\n{table(scores, [*PAGES, 'batch difficulty', 'training seconds'])}")
    neither, batches, architecture, both, words_first = scores
    for page in PAGES:
        for better, than in (
            (batches, neither),
            (architecture, neither),
            (both, neither),
            (both, batches),
            (words_first, batches),
            (words_first, both),
        ):
            print(difference(better, than, page))
    contextual = [architecture, both, words_first]
    names = [name for name in ("held-out packages", *OTHER_DOMAINS) if f"{name}, no context" in both.metrics]
    for name in names:
        columns = [f"{name}, {kind} context" for kind in CONTEXTS]
        print(f"\nnDCG@10 on {name} by context\n{table(contextual, columns)}")


if __name__ == "__main__":
    main()
