"""E4: does the order of the levels matter? Coarse to fine against reverse, random, cumulative, and each level alone.

MGH trains on hard negatives from level 4, the easiest, to level 1, a quarter of the steps each, and finds this better
than any level alone, the reverse and a random order ("Negative Matters", §4.1). Every recipe here has as many steps on
the same rows in the same order; only the level of each row's one hard negative differs.
"""

from benchmarks.mgh_trials import PAGES, Recipe, run
from benchmarks.trials import difference, table, trial_options

RECIPES = {
    "coarse to fine": Recipe(),
    "reverse": Recipe(order="reverse"),
    "random order": Recipe(order="random"),
    "cumulative": Recipe(order="cumulative"),
    **{f"level {level} alone": Recipe(order="fixed", level=level) for level in (1, 2, 3, 4)},
    "no hard negatives": Recipe(order=None),
    "before training": Recipe(num_steps=0),
}


def main() -> None:
    """Train with each order; print the table, and how far the curriculum lies above each other order."""
    chosen = trial_options(__doc__)
    scores = run(chosen, "E4", RECIPES)
    print(f"E4, nDCG@10\n{table(scores, PAGES)}")
    curriculum, *others = scores
    for page in PAGES:
        for other in others:
            print(difference(curriculum, other, page))


if __name__ == "__main__":
    main()
