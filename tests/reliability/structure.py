"""Files whose rows, columns or compression are not what they should be."""

import gzip
import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.reliability.cases import CLUSTER, EVALUATE, FILTER, GOOD, MINE, Make, cases, copied, pairs, put, rows
from tests.reliability.world import Place

LINE = json.dumps(GOOD).encode() + b"\n"
AGAIN = "fetch or compress the file again"


def raw(content: bytes, name: str = "pairs.jsonl") -> Make:
    """A file of these bytes."""
    return put(name, content)


def zipped() -> bytes:
    """Many records, compressed."""
    return gzip.compress(b"".join(b'{"query": "q %d", "positive": "p %d"}\n' % (row, row) for row in range(3000)))


def parquet(columns: dict[str, object] | pa.Table, cut: int | None = None) -> Make:
    """A Parquet file of these columns, cut off after some bytes."""

    def make(place: Place) -> None:
        path = place.folder / "pairs.jsonl"
        pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path)
        path.write_bytes(path.read_bytes()[:cut])

    return make


def spoilt_parquet(place: Place) -> None:
    """A Parquet file with zeros where a page of values begins."""
    path = place.folder / "pairs.jsonl"
    pq.write_table(pa.table({"query": ["a text"] * 2000, "positive": [str(row) for row in range(2000)]}), path)
    content = bytearray(path.read_bytes())
    content[4:600] = bytes(596)
    path.write_bytes(content)


def archive(place: Place) -> None:
    """A zip archive of records."""
    with zipfile.ZipFile(place.folder / "pairs.jsonl", "w") as file:
        file.writestr("pairs.jsonl", LINE)


def twice() -> pa.Table:
    """A table with two columns of one name."""
    return pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], ["query", "query", "positive"])


def cut(folder: Path, name: str) -> None:
    """Cut a file off in the middle of its last row."""
    path = folder / name
    path.write_bytes(path.read_bytes()[:-3])


CASES = cases(
    {
        FILTER: {
            "a last row that is cut off": (
                raw(LINE + LINE[:20]),
                "pairs.jsonl:2: the file ends in the middle of this row",
            ),
            "an array among objects": (
                rows("pairs.jsonl", GOOD, ["q", "p"]),
                "pairs.jsonl:2: the row is a JSON array, expected an object",
            ),
            "comma-separated values": (
                raw(b"query,positive\na,b\n"),
                "pairs.jsonl:1: this is a table of separated values (CSV), and its name says otherwise",
            ),
            "an empty file": (raw(b""), "pairs.jsonl: is empty"),
            "a column that is not there": (
                rows("pairs.jsonl", GOOD, {"query": "a", "reply": "b"}),
                "pairs.jsonl:2: field 'positive': no column 'positive' among query, reply; map it with columns",
            ),
            "a number for a text": (pairs(query=3), "pairs.jsonl:2: query is a number, expected text"),
            "an object for a text": (
                pairs(positive={"text": "b"}),
                "pairs.jsonl:2: positive is an object, expected text or a list; write it as a list of texts",
            ),
            "a score that is NaN": (
                pairs(score=float("nan")),
                "pairs.jsonl:2: score is nan, expected a finite number",
            ),
            "a fraction for a label": (
                pairs(label=0.5),
                "pairs.jsonl:2: label is a number, expected text or a whole number",
            ),
            "JSON nested too deep": (raw(b'{"query":' * 100_000 + b"\n"), "pairs.jsonl:1: the JSON is nested too deep"),
            "a number of 5,000 digits": (raw(b'{"id": ' + b"9" * 5000 + b"}\n"), "pairs.jsonl:1: the row is not JSON"),
            "gzip that is cut off": (raw(zipped()[:-4000]), f": the gzip data is cut off or damaged here; {AGAIN}"),
            "a mark of gzip before plain rows": (
                raw(b"\x1f\x8b" + LINE),
                f"pairs.jsonl:1: the gzip data is cut off or damaged here; {AGAIN}",
            ),
            "a zip archive": (archive, "pairs.jsonl:1: the file is a zip archive"),
            "Parquet that is cut off": (
                parquet({"query": ["a"] * 99, "positive": ["b"] * 99}, -30),
                "pairs.jsonl:1: the Parquet data is cut off or damaged",
            ),
            "a page of Parquet that is damaged": (spoilt_parquet, "the Parquet data is cut off or damaged"),
            "Parquet without rows": (
                parquet({"query": pa.array([], pa.string()), "positive": pa.array([], pa.string())}),
                "pairs.jsonl: holds no rows",
            ),
            "Parquet with a column twice": (parquet(twice()), "pairs.jsonl: has two columns 'query'"),
            "Parquet with numbers for texts": (
                parquet({"query": [1, 2], "positive": ["b", "c"]}),
                "pairs.jsonl:1: query is a number, expected text",
            ),
            "a folder for a file": (
                lambda place: (place.folder / "pairs.jsonl").mkdir(),
                "pairs.jsonl: is a folder, expected a file",
            ),
        },
        EVALUATE: {
            "judgments that are cut off": (
                copied("eval", lambda d: cut(d, "qrels.tsv")),
                "eval/qrels.tsv:9: has 2 columns",
            ),
        },
        CLUSTER: {
            "blank lines alone": (raw(b"\n \n\t\n"), "pairs.jsonl: holds no rows"),
        },
        MINE: {
            "one JSON array of all rows": (
                raw(b"[" + LINE.strip() + b",\n" + LINE + b"]\n"),
                "pairs.jsonl:1: a JSON array begins here, expected JSON lines",
            ),
        },
        (
            *FILTER.split(),
            "--columns",
            "{positive: answer}",
        ): {
            "a column mapped to one that is not there": (
                pairs(),
                "pairs.jsonl:1: field 'positive': no column 'answer' among query, positive",
            ),
        },
        FILTER.replace(".jsonl", ".parquet"): {
            "JSON lines called Parquet": (raw(LINE, "pairs.parquet"), "pairs.parquet: is not a Parquet file"),
        },
        FILTER.replace("pairs", "part-*"): {
            "a pattern that matches nothing": (pairs(), "part-*.jsonl: no file matches"),
        },
        (
            *FILTER.split()[:2],
            "[pairs.jsonl, pairs.jsonl]",
            "--output",
            "out.parquet",
        ): {
            "a file named twice": (pairs(), "pairs.jsonl: the path names this file twice"),
        },
    }
)
