"""Inputs that look odd and are read on purpose."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq

from tests.reliability.cases import CLUSTER, ENCODE, EVALUATE, FILTER, both, cases, copied, put, rows
from tests.reliability.world import Place

ROW = b'{"query": "pad", "positive": "the pad"}\n'
OTHER = b'{"query": "fox", "positive": "the fox"}\n'
TWO = "records              2"


def parquet(place: Place) -> None:
    """Parquet under the name of JSON lines."""
    pq.write_table(pa.table({"query": ["a", "b"], "positive": ["c", "d"]}), place.folder / "pairs.jsonl")


# A name, what makes it, the line, and what is printed.
CASES = cases(
    {
        FILTER: {
            "a byte-order mark": (put("pairs.jsonl", b"\xef\xbb\xbf" + ROW + OTHER), TWO, 0),
            "lines that end as on Windows": (put("pairs.jsonl", (ROW + OTHER).replace(b"\n", b"\r\n")), TWO, 0),
            "blank lines between rows": (put("pairs.jsonl", b"\n" + ROW + b" \n" + OTHER + b"\n\n"), TWO, 0),
            "no line end after the last row": (put("pairs.jsonl", ROW + OTHER.strip()), TWO, 0),
            "two gzip files, one after the other": (put("pairs.jsonl", gzip.compress(ROW) * 2), TWO, 0),
            "Parquet under a plain name": (parquet, TWO, 0),
            "columns of no use": (rows("pairs.jsonl", {"query": "a", "positive": "b", "x": [None, {}]}), "wrote 1", 0),
        },
        ENCODE: {
            "an empty text in a corpus": (rows("corpus.jsonl", {"text": ""}, {"text": "a"}), "wrote 2 vectors", 0),
            "a NUL character in a corpus": (rows("corpus.jsonl", {"text": "a\0b"}), "wrote 1 vectors", 0),
        },
        FILTER + " --suspect-rows leave_out": {
            "records that contradict themselves, by choice": (
                put("pairs.jsonl", ROW + b'{"query": "a", "positive": "a"}\n'),
                "wrote 1 records",
                0,
            ),
        },
        CLUSTER: {
            "records that are all alike": (rows("pairs.jsonl", *[{"query": "a", "positive": "b"}] * 3), "wrote 2", 0),
        },
        EVALUATE: {
            "queries that nobody judged": (
                both(copied("eval", lambda folder: (folder / "qrels.tsv").write_text("q0 0 d0 1\nq0 0 d0 1\n"))),
                "ndcg_at_10",
                0,
            ),
        },
    }
)
