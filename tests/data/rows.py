"""Files and sources of a few rows."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.data import SourceConfig, open_source


def write_jsonl(path, rows):
    """Write one JSON value per line, gzipped if the name ends in .gz."""
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_rows(path, rows):
    """Write the rows as Parquet or JSON lines, by the name."""
    if path.suffix != ".parquet":
        return write_jsonl(path, rows)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def pairs(count, prefix=""):
    """Distinct records."""
    return [{"query": f"{prefix}query {i}", "positive": f"{prefix}positive {i}"} for i in range(count)]


def graded(count, levels=(1, 2, 3, 4)):
    """Records with one negative of each level; its text names the level."""
    return [
        record | {"negatives": [{"text": f"negative {i} of level {level}", "level": level} for level in levels]}
        for i, record in enumerate(pairs(count))
    ]


def labelled(*sizes):
    """Texts of classes `class a`, `class b`, … of these sizes, alternating."""
    rows = [(i, code) for code, size in enumerate(sizes) for i in range(size)]
    return [{"text": f"text {i} of {chr(97 + code)}", "label": f"class {chr(97 + code)}"} for i, code in sorted(rows)]


def dataset(folder, rows, **options):
    """A source of these rows, converted in `folder`."""
    name = options.pop("name", "source")
    path = write_jsonl(folder / f"{name}.jsonl", rows)
    return open_source(SourceConfig(name, str(path), **options), folder / "cache")


def placed(sampler, rank, num_ranks):
    """A sampler as on one of several ranks."""
    for each in filter(None, (sampler, getattr(sampler, "inner", None))):
        each.place = (rank, num_ranks)
    return sampler


def rows_of(sampler, epoch=0):
    """The rows of each batch of an epoch."""
    sampler.set_epoch(epoch)
    return [[entry.row for entry in batch] for batch in sampler]
