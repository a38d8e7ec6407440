"""E6: the temperature of the loss: MGH's 1 against 0.05 and 0.02.

"Negative Matters" sets the factor before the cosine to 1 (Eq. 1), which is temperature 1. The loss of 64 candidates is
then at least log(1 + 63 e^-2) = 2.25, and its gradient weights all negatives almost equally.
"""

from benchmarks.mgh_trials import PAGES, Recipe, run
from benchmarks.trials import difference, table, trial_options

RECIPES = {
    "temperature 0.02": Recipe(temperature=0.02),
    "temperature 0.05": Recipe(temperature=0.05),
    "temperature 1": Recipe(temperature=1.0),
}


def main() -> None:
    """Train at each temperature; print the table and the differences."""
    chosen = trial_options(__doc__)
    scores = run(chosen, "E6", RECIPES)
    print(f"E6, nDCG@10\n{table(scores, [*PAGES, 'last training loss'])}")
    low, middle, one = scores
    for page in PAGES:
        print(difference(low, one, page))
        print(difference(middle, one, page))


if __name__ == "__main__":
    main()
