"""P19: a step with torch's deterministic algorithms takes at most 1.10 of the time of one without; equal gradients.

On one CPU training is repeatable without them. They cost time only in operations with a separate deterministic
implementation: on a CPU the sum of embedding gradients, on a GPU more.
"""

from collections.abc import Callable

import torch

from benchmarks.harness import compare, options, record
from benchmarks.workloads import assert_equal_gradients, gradients, question_answer_workload
from embeddings.training import GradCache


def main() -> None:
    """Time one step of 32 question-answer pairs with and without, plain and under GradCache."""
    chosen = options(__doc__)
    step, batch = question_answer_workload(chosen.tiny, 32)
    cached = GradCache(64 if chosen.tiny else 1024)
    ways: dict[str, Callable[[], object]] = {
        "plain step": lambda: step.plain_step(batch),
        "GradCache step": lambda: cached.step(step, batch),
    }
    for name, run in ways.items():

        def deterministic(run: Callable[[], object] = run) -> None:
            torch.use_deterministic_algorithms(True)
            try:
                run()
            finally:
                torch.use_deterministic_algorithms(False)

        step.zero_grad()
        run()
        expected = gradients(step)
        deterministic()
        assert_equal_gradients(gradients(step), expected)
        ratio = compare(deterministic, run, chosen)
        record(chosen, f"P19 deterministic {name} over the same without", ratio, "ratio", "<=1.10", "torch")


if __name__ == "__main__":
    main()
