"""Inputs that look odd and are read on purpose."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq

from tests.reliability.cases import CLUSTER, ENCODE, EVALUATE, FILTER, Case, both, copied, put, rows
from tests.reliability.world import Place

ROW = b'{"query": "pad", "positive": "the pad"}\n'
OTHER = b'{"query": "fox", "positive": "the fox"}\n'
TWO = "records              2"


def parquet(place: Place) -> None:
    """Parquet under the name of JSON lines."""
    pq.write_table(pa.table({"query": ["a", "b"], "positive": ["c", "d"]}), place.folder / "pairs.jsonl")


# A name, what makes it, the line, and what is printed.
CASES = [
    Case("a byte-order mark", put("pairs.jsonl", b"\xef\xbb\xbf" + ROW + OTHER), FILTER, TWO, 0),
    Case("lines that end as on Windows", put("pairs.jsonl", (ROW + OTHER).replace(b"\n", b"\r\n")), FILTER, TWO, 0),
    Case("blank lines between rows", put("pairs.jsonl", b"\n" + ROW + b" \n" + OTHER + b"\n\n"), FILTER, TWO, 0),
    Case("no line end after the last row", put("pairs.jsonl", ROW + OTHER.strip()), FILTER, TWO, 0),
    Case("two gzip files, one after the other", put("pairs.jsonl", gzip.compress(ROW) * 2), FILTER, TWO, 0),
    Case("Parquet under a plain name", parquet, FILTER, TWO, 0),
    Case(
        "columns of no use", rows("pairs.jsonl", {"query": "a", "positive": "b", "x": [None, {}]}), FILTER, "wrote 1", 0
    ),
    Case("an empty text in a corpus", rows("corpus.jsonl", {"text": ""}, {"text": "a"}), ENCODE, "wrote 2 vectors", 0),
    Case("a NUL character in a corpus", rows("corpus.jsonl", {"text": "a\0b"}), ENCODE, "wrote 1 vectors", 0),
    Case(
        "records that contradict themselves, by choice",
        put("pairs.jsonl", ROW + b'{"query": "a", "positive": "a"}\n'),
        f"{FILTER} --suspect-rows leave_out",
        "wrote 1 records",
        0,
    ),
    Case(
        "records that are all alike", rows("pairs.jsonl", *[{"query": "a", "positive": "b"}] * 3), CLUSTER, "wrote 2", 0
    ),
    Case(
        "queries that nobody judged",
        both(copied("eval", lambda folder: (folder / "qrels.tsv").write_text("q0 0 d0 1\nq0 0 d0 1\n"))),
        EVALUATE,
        "ndcg_at_10",
        0,
    ),
]
