"""E8: how much of the dense model's quality upcycling preserves, before and after training.

`preserving` upcycling starts with the dense model's score for any router weights. `release` copies the construction of
the released model: it drops the biases of the inner layers, and its expert weights do not sum to one. Its score first
drops and must be recovered by training. Both are compared with the dense model trained on the same batches.
"""

from benchmarks.moe_trials import Recipe, run
from benchmarks.trials import difference, replaced, table, trial_options

PAGES = ("held-out packages", "held-out functions")
DENSE_BEFORE = {"dense, before": Recipe(num_steps=0)}
RECIPES = {
    "preserving, before": Recipe(top_k=2, num_steps=0),
    "release, before": Recipe(top_k=2, mode="release", num_steps=0),
    "dense": Recipe(),
    "preserving": Recipe(top_k=2),
    "release": Recipe(top_k=2, mode="release"),
}


def main() -> None:
    """Score each start and train from it; print the table and the differences to the dense model."""
    chosen = trial_options(__doc__)
    # Before training, the dense model does not depend on the seed.
    (dense_before,) = run(replaced(chosen, seeds=1), "E8", DENSE_BEFORE)
    preserving_before, release_before, dense, preserving, release = run(chosen, "E8", RECIPES)
    scores = [dense_before, preserving_before, release_before, dense, preserving, release]
    print(f"E8, nDCG@10\n{table(scores, [*PAGES, 'total parameters', 'active parameters'])}")
    for page in PAGES:
        for sparse in (preserving, release):
            print(difference(sparse, dense, page))


if __name__ == "__main__":
    main()
