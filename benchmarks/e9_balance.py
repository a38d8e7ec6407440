"""E9: how evenly the experts are used with a load-balancing loss and without, step by step.

Nomic Embed v2 pre-trains with coefficient 1 (arXiv:2502.07972, §4.3); its released fine-tuning uses 0. Entropy 1 means
an even load over all experts, entropy 0 one expert for all tokens. Each run's `metrics.csv` contains all steps;
`python main.py show routing --runs …` plots them.
"""

from benchmarks.docstring_trials import Workspace
from benchmarks.moe_trials import ENTROPY_STEPS, Recipe, run
from benchmarks.trials import difference, table, trial_options

RECIPES = {
    "coefficient 0": Recipe(top_k=2, coefficient=0.0),
    "coefficient 0.01": Recipe(top_k=2, coefficient=0.01),
    "coefficient 1": Recipe(top_k=2, coefficient=1.0),
}


def main() -> None:
    """Train with each coefficient; print the entropies and the scores."""
    chosen = trial_options(__doc__)
    scores = run(chosen, "E9", RECIPES)
    steps = [f"load entropy after {step}" for step in ENTROPY_STEPS if not chosen.tiny or step == 1]
    print(f"E9\n{table(scores, [*steps, 'idle experts at the end', 'held-out packages', 'held-out functions'])}")
    none, _, whole = scores
    print(difference(whole, none, "held-out packages"))
    print(f"runs: {Workspace(chosen.work, chosen.tiny).runs_folder('E9')}")


if __name__ == "__main__":
    main()
