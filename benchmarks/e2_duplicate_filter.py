"""E2: the surrogate's false-negative filter, with and without a planted near-copy of every training pair.

A near-copy in the same batch is a false negative. Clustered batches often contain both copies, random batches rarely.
The copy's query and document both differ from the pair's, so the masks by text hash do not remove it.
"""

from benchmarks.docstring_trials import Recipe, run
from benchmarks.trials import difference, table, trial_options

RECIPES = {
    f"{'copies' if copies else 'no copies'}, {'no filter' if margin is None else f'margin {margin:g}'}": Recipe(
        num_steps=30, cluster_size=32, copies=copies, filter_margin=margin
    )
    for copies in (True, False)
    for margin in (None, 0.0)
}
PAGES = ("held-out packages", "held-out functions")


def main() -> None:
    """Train bi-encoders with and without copies and filter; print the table and the filter's gains."""
    chosen = trial_options(__doc__)
    scores = run(chosen, "E2", RECIPES)
    print(f"E2, nDCG@10 and batch difficulty\n{table(scores, [*PAGES, 'batch difficulty'])}")
    for without, with_filter in zip(scores[::2], scores[1::2], strict=True):
        for page in PAGES:
            print(difference(with_filter, without, page))


if __name__ == "__main__":
    main()
