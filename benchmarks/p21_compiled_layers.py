"""P21: a training step with layers compiled by torch.compile, over the same step without; equal gradients.

`backbone.compile: auto` is for GPUs only; this is the effect of `true` on a CPU, without the time of compiling.
"""

import copy
import shutil
from collections.abc import Callable

import torch

from benchmarks.harness import compare, options, record
from benchmarks.workloads import assert_equal_gradients, gradients, question_answer_workload
from embeddings.models.compilation import compile_layers
from embeddings.training import GradCache


def main() -> None:
    """Time one step of 32 question-answer pairs with and without, plain and under GradCache."""
    chosen = options(__doc__)
    if chosen.tiny:
        torch.compiler.set_stance("force_eager")  # the compiler takes most of a minute
    elif shutil.which("g++") is None:
        print("P21 skipped: torch.compile needs a C++ compiler")
        return
    step, batch = question_answer_workload(chosen.tiny, 32)
    compiled = copy.deepcopy(step)
    compile_layers(compiled.backbone)
    cached = GradCache(64 if chosen.tiny else 1024)
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "plain step": (lambda: compiled.plain_step(batch), lambda: step.plain_step(batch)),
        "GradCache step": (lambda: cached.step(compiled, batch), lambda: cached.step(step, batch)),
    }
    for name, (ours, plain) in ways.items():
        for each, run in ((compiled, ours), (step, plain)):
            each.zero_grad()
            run()
        assert_equal_gradients(gradients(compiled), gradients(step))
        ratio = compare(ours, plain, chosen)
        record(chosen, f"P21 compiled {name} over the same without", ratio, "ratio", "none", "torch")


if __name__ == "__main__":
    main()
