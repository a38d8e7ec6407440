"""P12: our store reads random batches no slower than a shuffled Hugging Face Dataset, in 60 MiB a worker.

Each side has ten million short rows in one memory-mapped Arrow file, and two workers that read batches in random order:
ours by a keyed permutation, the peer's by the index mapping that `Dataset.shuffle()` writes. Both read a whole batch
in one call. Ours reads whole rows, as in training; the peer reads only the two columns that are used.

There are two measurements. In one a worker uses the texts itself, as in training, which tokenises them: here it adds up
their lengths. In the other it sends the texts to the parent process. That costs both sides the same, which moves the
ratio towards 1.

On both sides the workers start as in training. They and the parent exclude the libraries' objects from garbage
collection: it takes a quarter of a second, which would count for either side by chance. A worker's memory is what it
shares with no other process, without the pages of the mapped file, which the operating system may drop at any time.
"""

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, disable_progress_bars
from torch.utils.data import DataLoader
from tqdm import tqdm

from benchmarks.harness import Ratio, compare, options, record
from embeddings.common.random import KeyedPermutation
from embeddings.data.datamodule import start_worker
from embeddings.data.store import ROWS_FILE, StoredRow, Table, write_table

NUM_ROWS, BATCH_SIZE, NUM_BATCHES = 10_000_000, 1024, 64
NUM_WORKERS = 2
# Rows in a record batch of the peer's own writer.
PEER_GROUP_ROWS = 1000
PEERS = "datasets, pyarrow, torch"

Texts = list[tuple[str, str]]


class OurRows:
    """Rows of our store, indexed by a batch of row numbers."""

    def __init__(self, folder: Path) -> None:
        self.table = Table(folder)

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, rows: list[int]) -> Texts:
        """The texts of some rows."""
        return [(row.query, row.positives[0]) for row in self.table.rows(rows)]


class PeerRows:
    """Rows of a shuffled Dataset, indexed by a batch of positions in its order."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, positions: list[int]) -> Texts:
        """The texts at some positions."""
        batch = self.dataset[positions]
        return [(query, positives[0]) for query, positives in zip(batch["query"], batch["positives"], strict=True)]


class RandomBatches:
    """Endless batches of numbers below `num_rows`, in the order of an epoch's permutation or in ascending order."""

    def __init__(self, num_rows: int, permuted: bool, batch_size: int) -> None:
        self.num_rows, self.permuted, self.batch_size = num_rows, permuted, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        epoch = 0
        while True:
            order = KeyedPermutation(self.num_rows, epoch)
            for start in range(0, self.num_rows - self.batch_size + 1, self.batch_size):
                positions = np.arange(start, start + self.batch_size, dtype=np.int64)
                yield (order(positions) if self.permuted else positions).tolist()
            epoch += 1


def write_rows(folder: Path, num_rows: int) -> Path:
    """Write our store, and the peer's file with the same rows; returns the path of that file."""
    rows = tqdm(range(num_rows), desc="writing rows", delay=2)
    write_table(folder, (StoredRow(f"question {row} of many", [f"the answer number {row * 7919}"]) for row in rows))
    path = folder / "peer.arrow"
    with pa.memory_map(str(folder / ROWS_FILE)) as source, pa.OSFile(str(path), "wb") as sink:
        reader = pa.ipc.open_file(source)
        schema = pa.schema([reader.schema.field(name) for name in ("query", "positives")])
        with pa.ipc.new_stream(sink, schema) as writer:
            for number in range(reader.num_record_batches):
                table = pa.Table.from_batches([reader.get_batch(number)]).select(schema.names)
                writer.write_table(table, max_chunksize=PEER_GROUP_ROWS)
    return path


def num_characters(texts: Texts) -> int:
    """Characters of a batch."""
    return sum(len(query) + len(positive) for query, positive in texts)


def loader_of(
    rows: Any, permuted: bool, batch_size: int, collate: Callable[[Texts], Any]
) -> tuple[Iterator[Any], Callable[[], list[int]]]:
    """Endless batches, collated by two workers, and a function that returns the workers' process ids."""
    loader: DataLoader[Any] = DataLoader(
        rows,
        batch_sampler=RandomBatches(len(rows), permuted, batch_size),  # type: ignore[arg-type]
        collate_fn=collate,
        num_workers=NUM_WORKERS,
        worker_init_fn=start_worker,
    )
    batches = iter(loader)
    return batches, lambda: [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]


def unique_mib(process: int) -> float:
    """Memory of a process in MiB that it shares with no other process and that is not backed by a file."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "SwapPss"))) / 1024


def main() -> None:
    """Check that both return the same rows, time them, and measure the workers' memory."""
    chosen = options(__doc__, threads=2)
    disable_progress_bars()
    num_rows, num_batches, batch_size = (2000, 2, 16) if chosen.tiny else (NUM_ROWS, NUM_BATCHES, BATCH_SIZE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shuffled = Dataset.from_file(str(write_rows(folder, num_rows))).shuffle(seed=0)
        ours, peer = OurRows(folder), PeerRows(shuffled)
        order = shuffled._indices.column(0).slice(0, batch_size).to_pylist()
        assert ours.__getitems__(order) == peer.__getitems__(list(range(batch_size)))
        gc.freeze()

        def read(batches: Iterator[Any]) -> None:
            for _ in range(num_batches):
                assert next(batches)

        def time_of(ours: Iterator[Any], peer: Iterator[Any]) -> Ratio:
            read(ours)
            read(peer)
            return compare(lambda: read(ours), lambda: read(peer), chosen)

        what = f"random batches of {batch_size} from {num_rows} rows, {NUM_WORKERS} workers"
        ratio = time_of(loader_of(ours, True, batch_size, list)[0], loader_of(peer, False, batch_size, list)[0])
        record(chosen, f"P12 time of {what}, sent to the parent as texts", ratio, "ratio", "none", PEERS)

        our_batches, our_workers = loader_of(ours, True, batch_size, num_characters)
        peer_batches, peer_workers = loader_of(peer, False, batch_size, num_characters)
        read(our_batches)
        read(peer_batches)
        before = {
            key: list(map(unique_mib, workers())) for key, workers in (("ours", our_workers), ("peer", peer_workers))
        }
        ratio = time_of(our_batches, peer_batches)
        record(chosen, f"P12 time of {what}, used up there", ratio, "ratio", "<=1.05", PEERS)
        # Read every row at least once, so that memory that grows with the rows read has grown.
        for _ in range(0 if chosen.tiny else num_rows // (num_batches * batch_size) + 1):
            read(our_batches)
        for key, workers, target in (("ours", our_workers, "<=60"), ("peer", peer_workers, "none")):
            after = list(map(unique_mib, workers()))
            growth = max(end - start for end, start in zip(after, before[key], strict=True))
            record(chosen, f"P12 memory of a worker of its own, {key}, {what}", max(after), "MiB", target, PEERS)
            flat = "<=1" if key == "ours" else "none"
            record(chosen, f"P12 growth of that memory with the rows read, {key}, {what}", growth, "MiB", flat, PEERS)


if __name__ == "__main__":
    main()
