"""P1: a GradCache step takes at most 1.40 of its time with every graph kept, and less time than a padded plain step."""

from benchmarks.harness import compare, options, record
from benchmarks.workloads import assert_equal_gradients, gradients, question_answer_workload
from embeddings.training import GradCache


def main() -> None:
    """Time one step of 32 question-answer pairs in three ways."""
    chosen = options(__doc__)
    step, batch = question_answer_workload(chosen.tiny, 32)
    budget = 64 if chosen.tiny else 1024
    cached, plain = GradCache(budget), GradCache(budget, kept_fraction=1.0)
    cached.step(step, batch)
    cached_gradients = gradients(step)
    for other in (lambda: plain.step(step, batch), lambda: step.plain_step(batch)):
        other()
        assert_equal_gradients(cached_gradients, gradients(step))
    ratio = compare(lambda: cached.step(step, batch), lambda: plain.step(step, batch), chosen)
    record(chosen, "P1 GradCache step over the step with every graph kept", ratio, "ratio", "<=1.40", "torch")
    ratio = compare(lambda: cached.step(step, batch), lambda: step.plain_step(batch), chosen)
    record(chosen, "P1 GradCache step over the padded plain step", ratio, "ratio", "<1", "torch")


if __name__ == "__main__":
    main()
