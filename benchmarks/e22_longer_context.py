"""E22: E1 with twice the steps: does the context help after more training if the first stage learns words first?

In E1 the context of this model (`FirstStageTraining` with word steps, then frozen) kept an effect, but the model gained
nothing over the bi-encoder in 40 steps. Here both train 80 steps on the same batches after the same 60 warm-up steps.
They are scored on held-out packages and on `codebase_chunks`, pieces of files of other projects. The contextual model
is scored with context documents of the collection, with those of another one, and without context. A second pair has
twice the context documents: batches of 64 pairs from clusters of 64 contain 64 documents. It trains 40 steps, that is
on as many pairs.
"""

from typing import Any

from benchmarks.docstring_trials import CONTEXTS, Recipe, WordsFirst, run
from benchmarks.trials import difference, table, trial_options

STEPS = 80
OTHERS = ("codebase_chunks",)
RECIPES = {
    "bi-encoder": Recipe(num_steps=STEPS, warmup_steps=60, cluster_size=32),
    "contextual, words first": WordsFirst(num_steps=STEPS, warmup_steps=60, contextual=True, cluster_size=32),
}
LARGE: dict[str, Any] = {"num_steps": STEPS // 2, "warmup_steps": 30, "batch_size": 64, "cluster_size": 64}
MORE_DOCUMENTS = {
    "bi-encoder, batches of 64": Recipe(**LARGE),
    "contextual, 64 documents": WordsFirst(**LARGE, contextual=True, num_context=64),
}


def main() -> None:
    """Train the models with each seed; print the scores by context and the gains over the bi-encoder."""
    chosen = trial_options(__doc__)
    for recipes in (RECIPES, MORE_DOCUMENTS):
        plain, contextual = scores = run(chosen, "E22", recipes, OTHERS)
        pages = [page for page in ("held-out packages", "held-out functions", *OTHERS) if page in plain.metrics]
        print(f"E22, nDCG@10\n{table(scores, pages)}")
        for page in pages:
            print(difference(contextual, plain, page))
            columns = [f"{page}, {kind} context" for kind in CONTEXTS]
            if columns[0] in contextual.metrics:
                print(f"nDCG@10 on {page} by context\n{table([contextual], columns)}")
        print(f"One minus the cosine between context vectors\n{table([contextual], ['context spread'])}")


if __name__ == "__main__":
    main()
