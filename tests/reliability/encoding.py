"""Files in an encoding that is not UTF-8, or with characters that no text has."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.reliability.cases import ENCODE, EVALUATE, FILTER, FIT, SEARCH, Case, Make, copied, put, rows, table
from tests.reliability.world import Place

GOOD = {"query": "pad sequences", "positive": "the pad"}
NOT_UTF8 = "is not valid UTF-8; save the file as UTF-8"
HALF = "holds half of a character"


def pairs(second: bytes) -> Make:
    """Training records: a good row, then these bytes."""
    return put("pairs.jsonl", b'{"query": "pad", "positive": "the pad"}\n' + second)


def encoded(encoding: str) -> Make:
    """Training records in another encoding."""
    return put("pairs.jsonl", '{"query": "pad", "positive": "the pad"}\n'.encode(encoding))


def latin(name: str, pattern: str = "caf") -> Make:
    """A copy of the evaluation folder with a Latin-1 letter in one of its files."""
    return copied("eval", lambda folder: spoil(folder / name))


def spoil(path: Path) -> None:
    """Put a Latin-1 letter before the last character of a file."""
    path.write_bytes(path.read_bytes()[:-1] + b"\xe9\n")


def long_line(name: str, compressed: bool = False) -> Make:
    """A file whose second row is one text of 100 MB."""

    def make(place: Place) -> None:
        row = b'{"query": "pad", "positive": "the pad", "text": "'
        content = row + b'short"}\n' + row + b"x" * 100_000_000 + b'"}\n'
        place.write(name, gzip.compress(content, 1) if compressed else content)

    return make


def parquet_bytes(place: Place) -> None:
    """A column of texts of which the second is Latin-1."""
    texts = pa.array([b"pad", "naïve".encode("latin-1")]).view(pa.string())
    pq.write_table(pa.table({"query": texts, "positive": ["a", "b"]}), place.folder / "pairs.jsonl")


def config(change: bytes) -> Make:
    """A config with these bytes before it."""
    return lambda place: place.write("config.yaml", change + place.config().read_bytes())


def instruction(text: str) -> Make:
    """A config whose source has this instruction."""
    return lambda place: place.config(lambda c: c["data"]["init_args"]["sources"][0].update(instruction=text))


CASES = [
    *table(
        FILTER,
        {
            "Latin-1 in a record": (pairs(b'{"query": "na\xefve"}\n'), f"pairs.jsonl:2: byte 14 of the row {NOT_UTF8}"),
            "Latin-1 in a column of Parquet": (parquet_bytes, "pairs.jsonl:2: a text is not valid UTF-8"),
            "UTF-16, little end first": (encoded("utf-16"), "pairs.jsonl:1: the file is UTF-16; save it as UTF-8"),
            "UTF-16 without a mark": (encoded("utf-16-le"), "pairs.jsonl:1: the row holds a NUL byte"),
            "a mark in the middle of a file": (
                pairs('\ufeff{"query": "a", "positive": "b"}\n'.encode()),
                "pairs.jsonl:2: the row is not JSON at column 1",
            ),
            "a NUL byte": (pairs(b'{"query": "a\x00b", "positive": "c"}\n'), "pairs.jsonl:2: the row holds a NUL byte"),
            "an escaped NUL in a record": (
                rows("pairs.jsonl", GOOD, {**GOOD, "positive": "a\0b"}),
                "pairs.jsonl:2: positive holds a NUL character",
            ),
            "half of a character in a query": (
                rows("pairs.jsonl", GOOD, {**GOOD, "query": "a\ud83d"}),
                f"pairs.jsonl:2: query {HALF}",
            ),
            "half of a character in a list": (
                rows("pairs.jsonl", {**GOOD, "positive": ["a", "\udc00"]}),
                f"pairs.jsonl:1: positive[1] {HALF}",
            ),
            "half of a character in a column's name": (
                rows("pairs.jsonl", {"\ud83d": 1}),
                "pairs.jsonl:1: field 'query': no column 'query' among \\ud83d",
            ),
            "rows that end in carriage returns alone": (
                put("pairs.jsonl", b'{"query": "a", "positive": "b"}\r{"query": "c", "positive": "d"}\r'),
                "pairs.jsonl:1: rows end in carriage returns alone",
            ),
        },
    ),
    *table(
        ENCODE,
        {
            "Latin-1 in a corpus": (
                put("corpus.jsonl", b'{"text": "caf\xe9"}\n'),
                f"corpus.jsonl:1: byte 14 of the row {NOT_UTF8}",
            ),
            "half of a character in a corpus": (
                rows("corpus.jsonl", {"text": "\udead"}),
                f"corpus.jsonl:1: field 'text' {HALF}",
            ),
            "a row of 100 MB": (long_line("corpus.jsonl"), "corpus.jsonl:2: the row is longer than 32 MiB"),
        },
    ),
    *table(
        EVALUATE,
        {
            "Latin-1 in judgments": (latin("qrels.tsv"), f"qrels.tsv:9: {NOT_UTF8}"),
        },
    ),
    Case(
        "half of a character to search for",
        rows("corpus.jsonl", {"text": "a"}),
        [*SEARCH.split()[:-1], "fox \udc80"],
        "'fox \\udc80' on the command line is not valid UTF-8; write it as UTF-8",
    ),
    *table(
        FIT,
        {
            "half of a character in an instruction": (
                instruction("find \ud83d"),
                "--config config.yaml: not a YAML file: half of a character, line 8",
            ),
            "a Latin-1 config": (config(b"# caf\xe9\n"), "--config config.yaml: not a YAML file"),
            "a config with a control character": (config(b"# \x07\n"), "--config config.yaml: not a YAML file"),
        },
    ),
    Case(
        "a Latin-1 config of a job",
        put("job.yaml", b"# caf\xe9\nseed: 1\n"),
        FILTER + " --config job.yaml",
        "--config job.yaml: not a YAML file",
    ),
    Case(
        "a Latin-1 tokenizer",
        copied("model", lambda d: spoil(d / "tokenizer.json")),
        "search --model model --corpus model/config.json fox",
        "model: tokenizer cannot be read",
    ),
    Case(
        "Latin-1 in a run's metrics",
        put("run/metrics.csv", b"step,train/loss\n0,caf\xe9\n"),
        "show curves --run run",
        "run/metrics.csv: is damaged",
    ),
]
