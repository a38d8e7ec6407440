"""Files in an encoding that is not UTF-8, or with characters that no text has."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.reliability.cases import ENCODE, EVALUATE, FILTER, FIT, GOOD, SEARCH, Make, cases, copied, pairs, put, rows
from tests.reliability.world import Place

NOT_UTF8 = "is not valid UTF-8; save the file as UTF-8"
HALF = "holds half of a character"


def second(content: bytes) -> Make:
    """Training records: a good row, then these bytes."""
    return put("pairs.jsonl", b'{"query": "pad", "positive": "the pad"}\n' + content)


def encoded(encoding: str) -> Make:
    """Training records in another encoding."""
    return put("pairs.jsonl", '{"query": "pad", "positive": "the pad"}\n'.encode(encoding))


def spoil(path: Path) -> None:
    """Put a Latin-1 letter before the last character of a file."""
    path.write_bytes(path.read_bytes()[:-1] + b"\xe9\n")


def long_line(place: Place) -> None:
    """A corpus whose second row is one text of 100 MB."""
    place.write("corpus.jsonl", b'{"text": "short"}\n{"text": "' + b"x" * 100_000_000 + b'"}\n')


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


CASES = cases(
    {
        FILTER: {
            "Latin-1 in a record": (
                second(b'{"query": "na\xefve"}\n'),
                f"pairs.jsonl:2: byte 14 of the row {NOT_UTF8}",
            ),
            "Latin-1 in a column of Parquet": (parquet_bytes, "pairs.jsonl:2: a text is not valid UTF-8"),
            "UTF-16, little end first": (encoded("utf-16"), "pairs.jsonl:1: the file is UTF-16; save it as UTF-8"),
            "UTF-16 without a mark": (encoded("utf-16-le"), "pairs.jsonl:1: the row holds a NUL byte"),
            "a mark in the middle of a file": (
                second('\ufeff{"query": "a", "positive": "b"}\n'.encode()),
                "pairs.jsonl:2: the row is not JSON at column 1",
            ),
            "a NUL byte": (
                second(b'{"query": "a\x00b", "positive": "c"}\n'),
                "pairs.jsonl:2: the row holds a NUL byte",
            ),
            "an escaped NUL in a record": (
                pairs(positive="a\0b"),
                "pairs.jsonl:2: positive holds a NUL character",
            ),
            "half of a character in a query": (
                pairs(query="a\ud83d"),
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
        ENCODE: {
            "Latin-1 in a corpus": (
                put("corpus.jsonl", b'{"text": "caf\xe9"}\n'),
                f"corpus.jsonl:1: byte 14 of the row {NOT_UTF8}",
            ),
            "half of a character in a corpus": (
                rows("corpus.jsonl", {"text": "\udead"}),
                f"corpus.jsonl:1: field 'text' {HALF}",
            ),
            "a row of 100 MB": (long_line, "corpus.jsonl:2: the row is longer than 32 MiB"),
        },
        EVALUATE: {
            "Latin-1 in judgments": (
                copied("eval", lambda folder: spoil(folder / "qrels.tsv")),
                f"qrels.tsv:9: {NOT_UTF8}",
            ),
        },
        (
            *SEARCH.split()[:-1],
            "fox \udc80",
        ): {
            "half of a character to search for": (
                rows("corpus.jsonl", {"text": "a"}),
                "'fox \\udc80' on the command line is not valid UTF-8; write it as UTF-8",
            ),
        },
        FIT: {
            "half of a character in an instruction": (
                instruction("find \ud83d"),
                "--config config.yaml: not a YAML file: half of a character, line 8",
            ),
            "a Latin-1 config": (config(b"# caf\xe9\n"), "--config config.yaml: not a YAML file"),
            "a config with a control character": (config(b"# \x07\n"), "--config config.yaml: not a YAML file"),
        },
        FILTER + " --config job.yaml": {
            "a Latin-1 config of a job": (
                put("job.yaml", b"# caf\xe9\nseed: 1\n"),
                "--config job.yaml: not a YAML file",
            ),
        },
        "search --model model --corpus model/config.json fox": {
            "a Latin-1 tokenizer": (
                copied("model", lambda d: spoil(d / "tokenizer.json")),
                "model: tokenizer cannot be read",
            ),
        },
        "show curves --run run": {
            "Latin-1 in a run's metrics": (
                put("run/metrics.csv", b"step,train/loss\n0,caf\xe9\n"),
                "run/metrics.csv: is damaged",
            ),
        },
    }
)
