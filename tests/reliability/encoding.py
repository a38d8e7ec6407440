"""Files in an encoding that is not UTF-8, or with characters that no text has."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.reliability.cases import ENCODE, EVALUATE, FILTER, FIT, SEARCH, Case, Make, both, copied, put, rows, table
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
            "UTF-16, big end first": (
                put("pairs.jsonl", b"\xfe\xff" + '{"query"'.encode("utf-16-be")),
                "pairs.jsonl:1: the file is UTF-16",
            ),
            "UTF-16 without a mark": (encoded("utf-16-le"), "pairs.jsonl:1: the row holds a NUL byte"),
            "UTF-32": (encoded("utf-32"), "pairs.jsonl:1: the file is UTF-32; save it as UTF-8"),
            "UTF-16 behind UTF-8": (pairs('{"query": "a"}\n'.encode("utf-16")), "pairs.jsonl:2: byte 1 of the row"),
            "a mark in the middle of a file": (
                pairs('\ufeff{"query": "a", "positive": "b"}\n'.encode()),
                "pairs.jsonl:2: the row is not JSON at column 1",
            ),
            "a NUL byte": (pairs(b'{"query": "a\x00b", "positive": "c"}\n'), "pairs.jsonl:2: the row holds a NUL byte"),
            "NUL bytes that fill up a block": (pairs(b"\x00" * 4096), "pairs.jsonl:2: the row holds a NUL byte"),
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
            "half of a character in a negative": (
                rows("pairs.jsonl", {**GOOD, "negatives": ["\ud83d!"]}),
                f"pairs.jsonl:1: negatives[0] {HALF}",
            ),
            "half of a character in a column's name": (
                rows("pairs.jsonl", {"\ud83d": 1}),
                "pairs.jsonl:1: field 'query': no column 'query' among \\ud83d",
            ),
            "a row of 100 MB in gzip": (
                long_line("pairs.jsonl", compressed=True),
                "pairs.jsonl:2: the row is longer than 32 MiB",
            ),
            "a character cut off at the end": (
                pairs('{"query": "naï'.encode()[:-1]),
                "pairs.jsonl:2: the file ends in the middle of this row",
            ),
            "an overlong character": (
                pairs(b'{"query": "\xc0\x80"}\n'),
                f"pairs.jsonl:2: byte 12 of the row {NOT_UTF8}",
            ),
            "half of a character as three bytes": (
                pairs(b'{"query": "\xed\xa0\xbd"}\n'),
                f"pairs.jsonl:2: byte 12 of the row {NOT_UTF8}",
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
            "half of a character in an id": (
                rows("corpus.jsonl", {"_id": "\udead", "text": "a"}),
                f"corpus.jsonl:1: field '_id' {HALF}",
            ),
            "a row of 100 MB": (long_line("corpus.jsonl"), "corpus.jsonl:2: the row is longer than 32 MiB"),
        },
    ),
    *table(
        EVALUATE,
        {
            "Latin-1 in queries": (latin("queries.jsonl"), f"queries.jsonl:8: byte 36 of the row {NOT_UTF8}"),
            "Latin-1 in judgments": (latin("qrels.tsv"), f"qrels.tsv:9: {NOT_UTF8}"),
            "UTF-16 judgments": (
                copied("eval", lambda d: (d / "qrels.tsv").write_bytes("q0\td0\t1\n".encode("utf-16"))),
                f"qrels.tsv:1: {NOT_UTF8}",
            ),
        },
    ),
    Case(
        "half of a character to search for",
        rows("corpus.jsonl", {"text": "a"}),
        [*SEARCH.split()[:-1], "fox \udc80"],
        "'fox \\udc80' on the command line is not valid UTF-8; write it as UTF-8",
    ),
    Case(
        "half of a character to show",
        put("a", ""),
        ["show", "anchor-tokens", "--model", "MODEL", "fox \udc80"],
        "'fox \\udc80' on the command line is not valid UTF-8",
    ),
    *table(
        FIT,
        {
            "half of a character in an instruction": (
                instruction("find \ud83d"),
                "--config config.yaml: not a YAML file: half of a character, line 8",
            ),
            "a Latin-1 config": (config(b"# caf\xe9\n"), "--config config.yaml: not a YAML file"),
            "a UTF-16 config": (
                both(
                    lambda p: p.config(),
                    lambda p: p.write("config.yaml", (p.folder / "config.yaml").read_text().encode("utf-16")),
                ),
                "--config config.yaml: not a YAML file",
            ),
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
        "a Latin-1 sweep",
        put("sweep.yaml", b"recipe: caf\xe9\n"),
        "sweep sweep.yaml --count true",
        "sweep.yaml: not a YAML file",
    ),
    Case(
        "a Latin-1 tokenizer",
        copied("model", lambda d: spoil(d / "tokenizer.json")),
        "search --model model --corpus model/config.json fox",
        "model: tokenizer cannot be read",
    ),
    Case(
        "a mark before a model's settings",
        copied(
            "model", lambda d: (d / "modules.json").write_bytes(b"\xef\xbb\xbf" + (d / "modules.json").read_bytes())
        ),
        "search --model model --corpus model/config.json fox",
        "model/modules.json: is no readable JSON",
    ),
    Case(
        "Latin-1 in a run's metrics",
        put("run/metrics.csv", b"step,train/loss\n0,caf\xe9\n"),
        "show curves --run run",
        "run/metrics.csv: is damaged",
    ),
]
