"""E4: does the order of the levels matter? Coarse to fine against reverse, random, cumulative, and each level alone.

MGH trains on hard negatives from level 4, the easiest, to level 1, with a quarter of the steps on each level. It
reports better scores than with any level alone, the reverse order or a random order ("Negative Matters", §4.1). All
recipes here train the same number of steps on the same rows in the same order. Only the level of each row's single hard
negative differs.
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
    """Train with each order; print the table, and the difference between the curriculum and each other order."""
    chosen = trial_options(__doc__)
    scores = run(chosen, "E4", RECIPES)
    print(f"E4, nDCG@10\n{table(scores, PAGES)}")
    curriculum, *others = scores
    for page in PAGES:
        for other in others:
            print(difference(curriculum, other, page))


if __name__ == "__main__":
    main()
