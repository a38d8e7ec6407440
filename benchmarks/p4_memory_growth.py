"""P4: from 256 to 8,192 pairs at one mini-batch size, memory grows by at most 4 times the vectors plus 8 MiB."""

from collections.abc import Iterator

from benchmarks.harness import options, peak_growth_bytes, record
from benchmarks.workloads import small_step, synthetic_batch
from embeddings.training import GradCache

WIDTH, LENGTH = 384, 4


def measured_step(num_pairs: int, cached: bool) -> Iterator[None]:
    """One step in a child process, after a small step that allocates the gradients."""
    step, batch, engine = small_step(WIDTH), synthetic_batch(num_pairs, LENGTH), GradCache(512)
    engine.step(step, synthetic_batch(128, LENGTH))
    yield
    if cached:
        engine.step(step, batch)
    else:
        step.plain_step(batch)


def main() -> None:
    """Measure the peaks at both sizes, of cached and of plain steps."""
    chosen = options(__doc__)
    few, many = (32, 64) if chosen.tiny else (256, 8192)
    vectors = 2 * (many - few) * WIDTH * 4
    for name, cached, target in (
        ("cached", True, f"<={(4 * vectors + 8 * 2**20) / 2**20:.0f}"),
        ("plain", False, "none"),
    ):
        peaks = [peak_growth_bytes(chosen, measured_step, num_pairs, cached) for num_pairs in (few, many)]
        growth = (peaks[1] - peaks[0]) / 2**20
        record(chosen, f"P4 growth of peak memory from {few} to {many} pairs, {name}", growth, "MiB", target, "torch")


if __name__ == "__main__":
    main()
