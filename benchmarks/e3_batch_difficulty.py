"""E3: does a harder batch make a better model? Random batches of 32, and batches from clusters of several sizes.

Difficulty is the fraction of a batch's queries for which the surrogate ranks another document of the batch above the
query's own. The surrogate is the model that training starts from. CDE reports scores that increase with difficulty
(arXiv:2410.02525, Figure 2).
"""

import numpy as np

from benchmarks.docstring_trials import Recipe, run
from benchmarks.trials import table, trial_options

RECIPES = {
    "random": Recipe(num_steps=30),
    "clusters of 32, any order": Recipe(num_steps=30, cluster_size=32, order="random"),
    "clusters of 32, nearest": Recipe(num_steps=30, cluster_size=32),
    "clusters of 8, nearest": Recipe(num_steps=30, cluster_size=8),
}
PAGES = ("held-out packages", "held-out functions")


def main() -> None:
    """Train bi-encoders on batches of different difficulty; print the table and the correlation."""
    chosen = trial_options(__doc__)
    scores = run(chosen, "E3", RECIPES)
    print(f"E3, nDCG@10 and batch difficulty\n{table(scores, [*PAGES, 'batch difficulty'])}")
    difficulty = [value for score in scores for value in score.values("batch difficulty")]
    for page in PAGES:
        ndcg = [value for score in scores for value in score.values(page)]
        if len(set(ndcg)) > 1 and len(set(difficulty)) > 1:
            correlation = np.corrcoef(difficulty, ndcg)[0, 1]
            print(f"correlation of difficulty and nDCG@10 on {page} over {len(ndcg)} trials: {correlation:+.2f}")


if __name__ == "__main__":
    main()
