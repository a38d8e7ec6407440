"""E11: scores of truncated vectors, trained with and without a Matryoshka loss.

Nomic Embed v2 trains 768 and 256 dimensions (arXiv:2502.07972, §4.5). The model here is dense and has 384 dimensions.
"""

from benchmarks.moe_trials import Recipe, run
from benchmarks.trials import difference, table, trial_options

PAGES = (
    "held-out packages",
    *(f"held-out packages, width {width}" for width in (256, 128, 64)),
)
RECIPES = {
    "whole vector alone": Recipe(),
    "widths 384 and 128": Recipe(widths=(384, 128)),
    "widths 384, 256, 128 and 64": Recipe(widths=(384, 256, 128, 64)),
}


def main() -> None:
    """Train with each loss; print the table and the gains of the Matryoshka losses."""
    chosen = trial_options(__doc__)
    scores = run(chosen, "E11", RECIPES)
    print(f"E11, nDCG@10\n{table(scores, PAGES)}")
    plain, *matryoshka = scores
    for page in PAGES:
        for model in matryoshka:
            print(difference(model, plain, page))


if __name__ == "__main__":
    main()
