"""How the cost of each operation grows with the rows: `python -m benchmarks.growth --rows 10k,100k,1M[,10M]`.

Each operation runs as a command in a separate process, over generated records. Its CPU-seconds are those of the process
and of its children. The exponent between two sizes is the slope of the logarithms, net of starting, measured at 100
rows: 1 is linear. An encoding model would take nearly all of the time, so vectors of hashed words stand in for it
(`hashed`): operations marked with * show the cost of the tool alone. Peers run on the same files.

Rows go to `benchmarks/growth.csv`, one for each operation and size. `--draw FILE` draws the newest rows (log-log).
"""

import argparse
import csv
import datetime
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import BertConfig, BertModel

from benchmarks.harness import commit, hardware
from embeddings.inference import Encoder
from embeddings.inference.encoder import TEXTS_PER_BLOCK
from embeddings.models import Embedder, MeanPooling
from embeddings.models.stand_in import wordpiece_tokenizer

RESULTS = Path(__file__).with_name("growth.csv")
START_ROWS = 100
WIDTH = 64
VOCABULARY = 50_000
QUERY_WORDS, DOCUMENT_WORDS = 10, 40
NUM_TOPICS, NUM_NAMES = 4_096, 65_536
EVAL_QUERIES = 1_000
UNITS = {"k": 1_000, "M": 1_000_000}
# The largest relative growth per factor of ten that counts as linear.
MAX_EXPONENT = 1.1

FIT = "fit --config config.yaml"
FILTER = "filter --input pairs.jsonl --output out.parquet"
MINE = "mine --model MODEL --input pairs.jsonl --output out.parquet --margin null --num-negatives 4"
CLUSTER = "cluster --input pairs.jsonl --output out --num-iterations 10 --num-runs 1 --cluster-size 256"
SEARCH = "search --model MODEL --corpus vectors w1"


@dataclass(frozen=True)
class Row:
    """One row of `growth.csv`; memory and bytes are in MB (10^6), `exponent` is from the size before, if any.

    The peak memory includes mapped files, whose pages the system may drop at any time; `anonymous_mb` does not.
    """

    operation: str
    rows: int
    cpu_seconds: float
    wall_seconds: float
    peak_mb: float
    anonymous_mb: float
    read_mb: float
    written_mb: float
    exponent: float
    hardware: str
    commit: str
    date: str


@dataclass(frozen=True)
class Operation:
    """A command over generated records.

    Args:
        line: The command line, or the name of a peer's function in this file, such as `peer_convert`.
        before: Command lines that are not measured.
        templated: Whether the texts are sentences of one pattern.
        linear: Whether the exponent should be at most 1.1.
        max_rows: The largest size; None for any.
    """

    line: str
    before: tuple[str, ...] = ()
    templated: bool = False
    linear: bool = True
    max_rows: int | None = None


ENCODE = "encode --model MODEL --input corpus.jsonl --output vectors --precision float32"
OPERATIONS = {
    "fit, cold": Operation(FIT),
    "fit, warm": Operation(FIT, before=(FIT,)),
    "filter near-copies": Operation(f"{FILTER} --near-duplicates 0.8"),
    "filter near-copies, templated": Operation(f"{FILTER} --near-duplicates 0.8", templated=True),
    "filter consistency*": Operation(f"{FILTER} --model MODEL --top-k 2", linear=False, max_rows=100_000),
    "filter decontaminate": Operation(f"{FILTER} --decontaminate held --bm25-threshold 0.8"),
    "mine exact*": Operation(MINE, linear=False, max_rows=100_000),
    "mine ivf*": Operation(f"{MINE} --index ivf"),
    "cluster vectors*": Operation(f"{CLUSTER} --model MODEL", linear=False),
    "encode*": Operation(ENCODE),
    "evaluate*": Operation("evaluate --model MODEL --data evaluation --output scores.json --precision float32"),
    "search exact*": Operation(SEARCH, before=(ENCODE,), linear=False),
    "search ivf*": Operation(f"{SEARCH} --index ivf", before=(ENCODE, "index --vectors vectors")),
    "peer: datasets, conversion": Operation("peer_convert"),
    "peer: rensa, near-copies": Operation("peer_near_copies"),
    "peer: rensa, near-copies, templated": Operation("peer_near_copies", templated=True),
    "peer: sentence-transformers, mining exact*": Operation("peer_mine", linear=False, max_rows=100_000),
    "peer: sentence-transformers, encode*": Operation("peer_encode"),
    "peer: faiss, k-means": Operation("peer_cluster"),
}  # fmt: skip


# Generated records


def texts(num_rows: int, num_words: int, seed: int, templated: bool) -> Iterator[str]:
    """Texts whose first two words are a topic and the record's name, then words with Zipf's frequencies."""
    rng = np.random.default_rng(seed)
    if templated:
        for row in range(num_rows):
            place = f"in the t{row * 7 % 97} district of the t{row * 3 % 31} province"
            yield f"t{row % NUM_TOPICS} n{row} {'is a village' if seed else 'which village lies'} {place}"
        return
    words = np.array([f"w{number}" for number in range(VOCABULARY)], dtype=object)
    share_V = 1 / np.arange(1, VOCABULARY + 1)
    bound_V = np.cumsum(share_V) / share_V.sum()
    for start in range(0, num_rows, 10_000):
        count = min(10_000, num_rows - start)
        word_NW = words[np.searchsorted(bound_V, rng.random((count, num_words)))]
        for row, line in enumerate(word_NW, start):
            yield f"t{row % NUM_TOPICS} n{row} {' '.join(line)}"


def write_records(folder: Path, num_rows: int, templated: bool) -> None:
    """Write the records, one in 20 a near-copy of the record before, their documents, and evaluation data.

    `evaluation/` has all documents and `EVAL_QUERIES` of the queries; `held/` has other texts for decontamination.
    """
    for name in ("evaluation", "held"):
        (folder / name).mkdir()
    queries, documents = texts(num_rows, QUERY_WORDS, 0, templated), texts(num_rows, DOCUMENT_WORDS, 1, templated)
    step = max(1, num_rows // EVAL_QUERIES)
    with (
        open(folder / "pairs.jsonl", "w", encoding="utf-8") as pairs,
        open(folder / "corpus.jsonl", "w", encoding="utf-8") as corpus,
        open(folder / "evaluation" / "queries.jsonl", "w", encoding="utf-8") as asked,
        open(folder / "evaluation" / "qrels.tsv", "w", encoding="utf-8") as qrels,
    ):
        qrels.write("query-id\tcorpus-id\tscore\n")
        last = ("", "")
        for row, (query, document) in enumerate(zip(queries, documents, strict=True)):
            if row % 20 == 19 and not templated:
                query, document = (f"{text.rpartition(' ')[0]} copied" for text in last)
            last = query, document
            pairs.write(json.dumps({"query": query, "positive": document}) + "\n")
            corpus.write(json.dumps({"_id": f"d{row}", "text": document}) + "\n")
            if row % step == 0:
                asked.write(json.dumps({"_id": f"q{row}", "text": query}) + "\n")
                qrels.write(f"q{row}\td{row}\t1\n")
    os.link(folder / "corpus.jsonl", folder / "evaluation" / "corpus.jsonl")
    held = list(
        zip(texts(EVAL_QUERIES, QUERY_WORDS, 2, False), texts(EVAL_QUERIES, DOCUMENT_WORDS, 3, False), strict=True)
    )
    for name, key, side in (("queries.jsonl", "q", 0), ("corpus.jsonl", "d", 1)):
        lines = (json.dumps({"_id": f"{key}{row}", "text": pair[side]}) for row, pair in enumerate(held))
        (folder / "held" / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    judged = "".join(f"q{row}\td{row}\t1\n" for row in range(EVAL_QUERIES))
    (folder / "held" / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged, encoding="utf-8")


@cache
def tables() -> list[npt.NDArray[np.float32]]:
    """Random vectors of topics, names and whole texts."""
    rng = np.random.default_rng(0)
    sizes = ((NUM_TOPICS, 1.0), (NUM_NAMES, 0.5), (NUM_NAMES, 0.3))
    return [scale * rng.standard_normal((count, WIDTH), dtype=np.float32) for count, scale in sizes]


def hashed(lines: Sequence[str]) -> npt.NDArray[np.float32]:
    """Vectors in place of a model's: the topic's, plus half of the name's, plus noise of the whole text, (N, 64)."""
    keys = []
    for line in lines:
        topic, _, rest = line.partition(" ")
        keys += [zlib.crc32(part.encode()) for part in (topic, rest.partition(" ")[0], line)]
    key_N3 = np.array(keys, dtype=np.int64).reshape(-1, 3)
    parts = zip(tables(), key_N3.T, strict=True)
    vector_ND = np.sum([table[key_N % len(table)] for table, key_N in parts], axis=0, dtype=np.float32)
    return np.asarray(vector_ND / np.linalg.norm(vector_ND, axis=1, keepdims=True))


def hashed_blocks(lines: Iterable[str]) -> Iterator[npt.NDArray[np.float32]]:
    """The same vectors in blocks, as `Encoder.encode_blocks` returns them."""
    remaining = iter(lines)
    while block := list(islice(remaining, TEXTS_PER_BLOCK)):
        yield hashed(block)


# The processes that are measured


def write_model(folder: Path) -> None:
    """Write a tiny model, whose place `hashed` takes, and the config of a run of two steps with it."""
    torch.manual_seed(0)
    tokenizer = wordpiece_tokenizer()
    backbone = BertModel(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=WIDTH,
        ),
        add_pooling_layer=False,
    )
    Embedder(backbone, tokenizer, MeanPooling(WIDTH)).save_pretrained(folder / "model")
    backbone.save_pretrained(folder / "backbone")
    tokenizer.save_pretrained(folder / "backbone")
    config = {
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 2, "default_root_dir": "run", "callbacks": []},
        "model": {
            "class_path": "embeddings.modules.NVEmbedModule",
            "init_args": {
                "backbone": {"name": str(folder / "backbone"), "bidirectional": False},
                "pooling": {"class_path": "embeddings.models.MeanPooling"},
                "lora": None,
                "schedule": {"warmup_steps": 0, "decay": "constant"},
            },
        },
        "data": {
            "class_path": "embeddings.data.EmbeddingDataModule",
            "init_args": {
                "batch_size": 32,
                "num_workers": 0,
                "cache_dir": "cache",
                "sources": [{"name": "pairs", "path": "pairs.jsonl"}],
                "text": {"query_max_length": 32, "document_max_length": 64},
            },
        },
    }
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")


def run_child(line: str, usage: Path) -> int:
    """Run a command with hashed vectors, or a peer, in this process; writes the bytes that it read and wrote."""
    if line in PEERS:
        PEERS[line]()
        code = 0
    else:
        from embeddings.cli.main import main as run_command

        Encoder.encode = lambda self, lines, *_, **__: hashed(lines)  # type: ignore[method-assign]
        Encoder.encode_blocks = lambda self, lines, *_, **__: hashed_blocks(lines)  # type: ignore[method-assign]
        code = run_command(shlex.split(line))
    counts = dict(entry.split(": ") for entry in Path("/proc/self/io").read_text("ascii").splitlines())
    usage.write_text(json.dumps(counts), encoding="ascii")
    return code


class AnonymousMemory(threading.Thread):
    """The largest anonymous memory of a process, in MB: read four times a second until it ends."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_mb, self._status = 0.0, Path(f"/proc/{pid}/status")
        self.start()

    def run(self) -> None:
        # A process that has ended has no memory, and no file once it was waited for.
        with suppress(OSError):
            while match := re.search(r"RssAnon:\s+(\d+) kB", self._status.read_text("ascii")):
                self.peak_mb = max(self.peak_mb, int(match[1]) * 1024 / 1e6)
                time.sleep(0.25)


def measure(line: str, folder: Path) -> dict[str, float]:
    """Run a command in a new process; its CPU-seconds, wall-clock seconds, peak memory, and bytes read and written.

    Raises:
        RuntimeError: If the command fails.
    """
    usage, start = folder / "usage.json", time.perf_counter()
    words = [sys.executable, "-m", "benchmarks.growth", "--child", line, "--usage", str(usage)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "EMBED_CACHE": str(folder / "cache")}
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
        memory = AnonymousMemory(process.pid)
        _, status, spent = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{line}: exit code {process.returncode}: {(folder / 'log.txt').read_text('utf-8')[-2000:]}")
    counts = json.loads(usage.read_text("ascii"))
    return {
        "cpu_seconds": spent.ru_utime + spent.ru_stime,
        "wall_seconds": time.perf_counter() - start,
        "peak_mb": spent.ru_maxrss * 1024 / 1e6,
        "anonymous_mb": memory.peak_mb,
        "read_mb": int(counts["rchar"]) / 1e6,
        "written_mb": int(counts["wchar"]) / 1e6,
    }


def measure_operation(operation: Operation, num_rows: int, model: Path) -> dict[str, float]:
    """The cost of an operation over records that all operations of a size share."""
    records = model.parent / f"records-{num_rows}-{operation.templated}"
    if not records.exists():
        records.mkdir()
        write_records(records, num_rows, operation.templated)
    with tempfile.TemporaryDirectory(dir=model.parent) as name:
        folder = Path(name, "run")
        shutil.copytree(records, folder, copy_function=os.link)
        (folder / "config.yaml").symlink_to(model / "config.yaml")
        lines = [line.replace("MODEL", str(model / "model")) for line in (*operation.before, operation.line)]
        costs = [measure(line, folder) for line in lines]
        return costs[-1]


# Peers, on the same files


def peer_convert() -> None:
    """Convert `pairs.jsonl` by `datasets`, without validation."""
    from datasets import Dataset

    Dataset.from_json("pairs.jsonl", cache_dir="peer")


def peer_near_copies() -> None:
    """Group `pairs.jsonl` by MinHash and LSH of `rensa`: 128 permutations of single words, threshold 0.8."""
    from rensa import RMinHash, RMinHashLSH

    index = RMinHashLSH(threshold=0.8, num_perm=128, num_bands=16)
    with open("pairs.jsonl", encoding="utf-8") as file:
        for row, line in enumerate(file):
            record = json.loads(line)
            signature = RMinHash(num_perm=128, seed=0)
            signature.update(f"{record['query']} {record['positive']}".split())
            if not index.query(signature):
                index.insert(row, signature)


class Hashed(torch.nn.Module):
    """A module of sentence-transformers that returns hashed vectors."""

    def tokenize(self, lines: list[str], **_: Any) -> dict[str, Any]:
        return {"vectors": torch.from_numpy(hashed(lines))}

    preprocess = tokenize

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        return features | {"sentence_embedding": features["vectors"]}

    def get_sentence_embedding_dimension(self) -> int:
        return WIDTH


def peer_encode() -> None:
    """Encode `corpus.jsonl` by sentence-transformers with hashed vectors, and write them."""
    from sentence_transformers import SentenceTransformer

    with open("corpus.jsonl", encoding="utf-8") as file:
        lines = [json.loads(line)["text"] for line in file]
    np.save("peer.npy", SentenceTransformer(modules=[Hashed()], device="cpu").encode(lines, batch_size=256))


def peer_mine() -> None:
    """Mine four negatives of each record by sentence-transformers with hashed vectors."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    model = SentenceTransformer(modules=[Hashed()], device="cpu")
    data = Dataset.from_json("pairs.jsonl", cache_dir="peer")
    mine_hard_negatives(data, model, num_negatives=4, range_max=100, batch_size=256, verbose=False)


def peer_cluster() -> None:
    """Ten rounds of faiss' k-means over the documents' hashed vectors, clusters of 256."""
    import faiss

    with open("corpus.jsonl", encoding="utf-8") as file:
        vector_ND = hashed([json.loads(line)["text"] for line in file])
    k = max(1, len(vector_ND) // 256)
    faiss.Kmeans(WIDTH, k, niter=10, seed=0, max_points_per_centroid=2**31 - 1).train(vector_ND)


PEERS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (peer_convert, peer_near_copies, peer_encode, peer_mine, peer_cluster)
}


# The table


def exponent(before: tuple[int, float], after: tuple[int, float], start: float) -> float:
    """The slope between two (rows, CPU-seconds), without starting; nan if a net time is below a second."""
    (small, cheap), (large, dear) = before, after
    if min(cheap, dear) - start < 1.0:
        return math.nan
    return math.log((dear - start) / (cheap - start)) / math.log(large / small)


def run_operations(names: Sequence[str], sizes: Sequence[int], keep: bool) -> list[str]:
    """Measure operations at each size, and print and keep their rows; the names that grow faster than linear."""
    faster = []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary, "model")
        model.mkdir()
        write_model(model)
        for name in names:
            operation = OPERATIONS[name]
            # The smaller of two: on a busy machine one start is often slower by a second, half of a small net time.
            start = min(measure_operation(operation, START_ROWS, model)["cpu_seconds"] for _ in range(2))
            print(f"{name}: starting takes {start:.1f} CPU-s", flush=True)
            before = None
            for num_rows in sizes:
                if operation.max_rows is not None and num_rows > operation.max_rows:
                    continue
                cost = measure_operation(operation, num_rows, model)
                after = num_rows, cost["cpu_seconds"]
                slope = math.nan if before is None else exponent(before, after, start)
                before = after
                row = Row(
                    name,
                    num_rows,
                    **{key: round(value, 1) for key, value in cost.items()},
                    exponent=round(slope, 2),
                    hardware=hardware(),
                    commit=commit(),
                    date=datetime.date.today().isoformat(),
                )
                cost_text = ", ".join(f"{key} {getattr(row, key)}" for key in (*cost, "exponent"))
                print(f"{name}: {num_rows:,} rows, {cost_text}", flush=True)
                if operation.linear and slope > MAX_EXPONENT:
                    faster.append(f"{name} ({slope:.2f} to {num_rows:,} rows)")
                if keep:
                    append(row)
    return faster


def append(row: Row) -> None:
    """Append a row to `growth.csv`."""
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow([field.name for field in fields(Row)])
        writer.writerow(astuple(row))


def draw(path: Path) -> None:
    """Draw the newest rows of each operation, CPU-seconds over rows, log-log; peers are dashed."""
    import matplotlib.pyplot as plt

    newest: dict[tuple[str, int], float] = {}
    with RESULTS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            newest[row["operation"], int(row["rows"])] = float(row["cpu_seconds"])
    figure, axes = plt.subplots(figsize=(10, 7))
    axes.set_prop_cycle(color=plt.get_cmap("tab20").resampled(20)(range(20)))
    for name in OPERATIONS:
        points = sorted((size, seconds) for (operation, size), seconds in newest.items() if operation == name)
        if points:
            axes.loglog(*zip(*points, strict=True), "--" if name.startswith("peer") else "-", marker="o", label=name)
    axes.set(xlabel="rows", ylabel="CPU-seconds, with starting")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7, bbox_to_anchor=(1.01, 1), loc="upper left")
    figure.savefig(path, bbox_inches="tight", dpi=110)


def num_rows(text: str) -> int:
    """A number of rows such as `10k` or `1M`."""
    return int(float(text.rstrip("kM")) * UNITS.get(text[-1], 1))


def main() -> int:
    """Measure the chosen operations; returns 1 if one that should be linear is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="10k,100k,1M", help="sizes, such as 10k,100k,1M,10M")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="operations whose names begin with one of these")
    parser.add_argument("--tiny", action="store_true", help="two sizes below 1,000 rows; keeps no row")
    parser.add_argument("--draw", type=Path, help="draw the kept rows to this file, and measure nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--usage", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        return run_child(chosen.child, chosen.usage)
    if chosen.draw:
        draw(chosen.draw)
        return 0
    names = [name for name in OPERATIONS if not chosen.only or name.startswith(tuple(chosen.only))]
    sizes = [300, 600] if chosen.tiny else sorted(map(num_rows, chosen.rows.split(",")))
    faster = run_operations(names, sizes, keep=not chosen.tiny)
    print("faster than linear: " + (", ".join(faster) or "none"))
    return int(bool(faster))


if __name__ == "__main__":
    raise SystemExit(main())
