"""P3: with half the graphs kept a step costs at most 1.22 of the plain step; a memory budget holds."""

from collections.abc import Iterator

from benchmarks.harness import compare, options, peak_growth_bytes, record
from benchmarks.workloads import assert_equal_gradients, gradients, question_answer_workload
from embeddings.training import GradCache


def measured_step(tiny: bool, budget: int, kept_gib: float | None, kept_fraction: float | None) -> Iterator[None]:
    """One step in a child process, after one that makes the gradients' own memory."""
    step, batch = question_answer_workload(tiny, 32)
    small = question_answer_workload(True, 0)[1] if not tiny else batch
    GradCache(budget).step(step, small)
    yield
    GradCache(budget, kept_gib=kept_gib, kept_fraction=kept_fraction).step(step, batch)


def main() -> None:
    """Time half the graphs, and as many as a budget holds; measure the memory of both ends."""
    chosen = options(__doc__)
    step, batch = question_answer_workload(chosen.tiny, 32)
    tokens = 64 if chosen.tiny else 1024
    plain, half = GradCache(tokens, kept_fraction=1.0), GradCache(tokens, kept_fraction=0.5)
    plain.step(step, batch)
    expected = gradients(step)
    half.step(step, batch)
    assert_equal_gradients(gradients(step), expected)
    ratio = compare(lambda: half.step(step, batch), lambda: plain.step(step, batch), chosen)
    record(chosen, "P3 half the graphs kept over all", ratio, "ratio", "<=1.22", "torch")
    none_bytes = peak_growth_bytes(measured_step, chosen.tiny, tokens, None, 0.0)
    record(chosen, "P3 peak memory with the last graph kept", none_bytes / 2**20, "MiB", "none")
    for kept_gib in (0.25, 0.5):
        engine = GradCache(tokens, kept_gib=kept_gib)
        step.zero_grad()
        engine.step(step, batch)
        assert_equal_gradients(gradients(step), expected)
        ratio = compare(lambda engine=engine: engine.step(step, batch), lambda: plain.step(step, batch), chosen)
        record(chosen, f"P3 {kept_gib} GiB of graphs kept over all", ratio, "ratio", "<=1.40", "torch")
        peak = peak_growth_bytes(measured_step, chosen.tiny, tokens, kept_gib, None)
        target = f"<={kept_gib * 1024 + none_bytes / 2**20:.0f}"
        record(chosen, f"P3 peak memory with {kept_gib} GiB of graphs kept", peak / 2**20, "MiB", target)


if __name__ == "__main__":
    main()
