"""Training records, corpora, evaluation data and their configs: invalid bytes, rows, texts and contradictions."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.runs import component
from tests.reliability.cases import (
    CLUSTER,
    ENCODE,
    EVALUATE,
    FILTER,
    FIT,
    GOOD,
    MINE,
    SEARCH,
    Make,
    at,
    both,
    bytes_of,
    content,
    copied,
    pairs,
    put,
    rows,
    run,
    source,
    unchanged,
)
from tests.reliability.world import Place

SHOW = "show anchor-tokens --model MODEL"
LINE = json.dumps(GOOD).encode() + b"\n"
NOT_UTF8 = "is not valid UTF-8; save the file as UTF-8"
CLUSTERS = component("embeddings.data.ClusteredBatchSampler", clusters={"pairs": "clusters"})
DATA = "data.init_args"


def config(change: bytes) -> Make:
    """A config with these bytes at its start."""
    return lambda place: place.write("config.yaml", change + place.config().read_bytes())


def parquet(columns: dict[str, object], change: Callable[[bytes], bytes] = bytes, **options: Any) -> Make:
    """A Parquet file with the name of a JSON Lines file and changed bytes."""

    def make(place: Place) -> None:
        path = place.folder / "pairs.jsonl"
        pq.write_table(pa.table(columns, **options), path)
        path.write_bytes(change(path.read_bytes()))

    return make


def several(count: int) -> Make:
    return rows("pairs.jsonl", *({"query": f"q {row}", "positive": f"p {row}"} for row in range(count)))


def clustered_on(damage: Callable[[Path], object]) -> Make:
    """A run on a damaged copy of the clusters of the world's pairs."""
    return both(copied("clusters", damage), at(DATA, sampler=CLUSTERS))


CASES = {
    FILTER: {
        "Latin-1 in a record": (
            put("pairs.jsonl", LINE + b'{"query": "na\xefve"}\n'),
            f"pairs.jsonl:2: byte 14 of the row {NOT_UTF8}",
        ),
        "a lone surrogate in a column name": (
            rows("pairs.jsonl", {"\ud83d": 1}),
            "pairs.jsonl:1: field 'query': no column 'query' among \\ud83d",
        ),
        "a damaged Parquet page": (
            parquet(
                {"query": ["a text"] * 2000, "positive": list(map(str, range(2000)))},
                lambda data: data[:4] + bytes(596) + data[600:],
            ),
            "the Parquet data is truncated or damaged",
        ),
    },
    EVALUATE: {
        "Latin-1 qrels": (copied("eval", bytes_of("qrels.tsv", lambda data: data[:-1] + b"\xe9\n")), f"9: {NOT_UTF8}"),
    },
    SEARCH.replace("fox", "'fox \udc80'"): {
        "a lone surrogate in a search query": (
            rows("corpus.jsonl", {"text": "a"}),
            "'fox \\udc80' on the command line is not valid UTF-8; write it as UTF-8",
        )
    },
    FIT: {
        "a lone surrogate in an instruction": (
            source(instruction="find \ud83d"),
            "--config config.yaml: not a YAML file: found invalid Unicode character",
        ),
        "a Latin-1 config": (config(b"# caf\xe9\n"), "--config config.yaml: not a YAML file"),
        "a config with a control character": (config(b"# \x07\n"), "--config config.yaml: not a YAML file"),
        "an instruction in a row as long as the texts": (
            both(
                rows(
                    "pairs.jsonl",
                    *({**GOOD, "query": f"pad {number}"} for number in range(8)),
                    {**GOOD, "instruction": "pad sequences " * 20},
                ),
                run(),
            ),
            "pairs.jsonl:9: the instruction leaves no room for the query in 16 tokens",
        ),
        "texts of three tokens": (at(DATA, text={"query_max_length": 3}), "data.text.query_max_length must be >= 4"),
        "clusters of another source": (both(several(12), clustered_on(unchanged)), "clusters"),
    },
    "show curves --run run": {
        "Latin-1 in metrics": (put("run/metrics.csv", b"step,train/loss\n0,caf\xe9\n"), "run/metrics.csv: is damaged")
    },
    MINE: {"fewer documents than negatives": (pairs(positive="another"), "2 distinct documents, too few for 2")},
    FILTER.replace(".jsonl", ".parquet"): {
        "JSON lines in a .parquet file": (put("pairs.parquet", LINE), "pairs.parquet: is not a Parquet file")
    },
    SEARCH.replace("fox", "' '"): {"an empty query": (rows("corpus.jsonl", {"text": "a"}), "query must not be empty")},
    EVALUATE.replace(" eval ", " [] "): {"an empty list of folders": (put("a", ""), "--data: has no folder")},
}

ROW = b'{"query": "pad", "positive": "the pad"}\n'
OTHER = b'{"query": "fox", "positive": "the fox"}\n'
TWO = "records              2"
# Unusual inputs that are accepted, with expected output instead of an error.
ACCEPTED = {
    FILTER: {
        "blank lines between rows": (put("pairs.jsonl", b"\n" + ROW + b" \n" + OTHER + b"\n\n"), TWO, 0),
        "no line end after the last row": (put("pairs.jsonl", ROW + OTHER.strip()), TWO, 0),
        "two concatenated gzip files": (put("pairs.jsonl", gzip.compress(ROW) * 2), TWO, 0),
        "unused columns": (rows("pairs.jsonl", {"query": "a", "positive": "b", "x": [None, {}]}), "wrote 1", 0),
    },
    ENCODE: {"a NUL character in a corpus": (rows("corpus.jsonl", {"text": "a\0b"}), "wrote 1 vectors", 0)},
    FILTER + " --suspect-rows leave_out": {
        "suspect records": (put("pairs.jsonl", ROW + b'{"query": "a", "positive": "a"}\n'), "wrote 1 records", 0)
    },
    CLUSTER: {"identical records": (rows("pairs.jsonl", *[{"query": "a", "positive": "b"}] * 3), "wrote 2", 0)},
    EVALUATE: {"queries without qrels": (copied("eval", content("qrels.tsv", "q0 0 d0 1\nq0 0 d0 1\n")), "ndcg_at", 0)},
}
