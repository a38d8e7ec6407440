"""Stand-ins for public data sets: small files in the layout and with the columns of each, as `datasets` loads them."""

import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from embeddings.data.public import PublicSource
from tests.helpers.runs import WORDS

Rows = list[dict[str, Any]]


# Each row has a unique combination of words, so that a random model can distinguish the texts.
_CHOICES = list(combinations(WORDS, 4))


def words(row: int) -> tuple[str, ...]:
    """The words of a row."""
    return _CHOICES[(row * 101) % len(_CHOICES)]


def question(row: int) -> str:
    """The query of a row."""
    return " ".join(words(row))


def answer(row: int) -> str:
    """The positive of a row."""
    return " ".join(reversed(words(row)))


def _cell(source: PublicSource, field: str, part: int, row: int) -> Any:
    """A cell with the type of the data set."""
    if field == "negatives":
        texts = [answer(row + 500 + n) for n in range(9)]
        if source.repository == "castorini/mr-tydi":
            return [{"docid": str(n), "title": f"Title {n}", "text": text} for n, text in enumerate(texts)]
        return texts[part] if isinstance(source.columns[field], list) else texts
    if field == "positive":
        if source.repository == "castorini/mr-tydi":
            return [{"docid": "p", "title": "A title", "text": answer(row)}]
        return [answer(row)] if source.columns[field] == "pos" else answer(row)
    if field == "label":
        name = source.columns[field]
        if source.kind == "first_label":
            return f"cs.{row % 3} math.{row % 2}"
        if name == "tags":
            return [f"tag{row % 3}", "other"]
        # Binary data sets have two labels.
        two = source.name in ("amazon_counterfactual", "imdb", "amazon_polarity", "toxic_conversations")
        number = row % (2 if two else 5 if source.name == "amazon_reviews" else 3)
        return f"class {number}" if name in ("label_text", "category", "subreddit") else number
    if field == "text":
        if source.columns[field] == "texts":
            return [question(row), answer(row)]
        return f"{question(row)}\n{answer(row)}" if source.kind == "first_line" else f"{question(row)} {part}"
    if field == "score":
        return float(5 - row % 2)
    return question(row) if field in ("query", "sentence1") else answer(row)


def rows_of(source: PublicSource, num_rows: int) -> Rows:
    """Rows with the columns of a source, and an unused column."""
    rows = []
    for row in range(num_rows):
        cells: dict[str, Any] = {"unread": row}
        for field, columns in source.columns.items():
            for part, column in enumerate([columns] if isinstance(columns, str) else columns):
                cells[column] = _cell(source, field, part, row)
        rows.append(cells)
    return rows


def beir_tables(num_rows: int) -> dict[str, Rows]:
    """Queries, corpus and qrels; some documents are not relevant to any query, and one has a qrel of 0."""
    corpus = [{"_id": f"d{row}", "title": f"T{row}", "text": answer(row)} for row in range(num_rows + 12)]
    queries = [{"_id": f"q{row}", "text": question(row)} for row in range(num_rows)]
    judged = [{"query-id": f"q{row}", "corpus-id": f"d{row}", "score": 1.0} for row in range(num_rows)]
    judged.insert(1, {"query-id": "q0", "corpus-id": f"d{num_rows}", "score": 0.0})
    return {"queries": queries, "corpus": corpus, "default": judged}


def write_mirror(
    root: Path,
    sources: Iterable[PublicSource],
    num_rows: int = 40,
    change: Callable[[PublicSource, Rows], Rows] = lambda source, rows: rows,
) -> Path:
    """Write a folder with a stand-in for the data set of each source; returns the folder.

    `change` may replace the rows of a source.
    """
    configs: dict[str, dict[str, dict[str, Rows]]] = {}
    for source in sources:
        if source.kind is None:
            continue
        tables = configs.setdefault(str(source.repository), {})
        splits = [source.split] if isinstance(source.split, str) else source.split
        if source.kind == "beir":
            made = beir_tables(num_rows)
            tables |= {"queries": {"queries": made["queries"]}, "corpus": {"corpus": made["corpus"]}}
            tables["default"] = {splits[0]: change(source, made["default"])}
            continue
        rows = change(source, rows_of(source, num_rows))
        if source.data_files is not None:
            _write_files(root / str(source.repository), source.data_files, rows)
            tables.clear()
            continue
        for split in splits:
            table = tables.setdefault(source.subset or "default", {})
            # Several sources may read different columns of one split.
            shared = table.setdefault(split, [{} for _ in rows])
            table[split] = [{**old, **new} for old, new in zip(shared, rows, strict=True)]
    for name, subsets in configs.items():
        if subsets:
            write_data_set(root / name, subsets)
    return root


def write_data_set(folder: Path, subsets: Mapping[str, Mapping[str, Rows]]) -> None:
    """Write a data set with two Parquet files per split, and a card whose head lists them."""
    entries = []
    for subset, splits in subsets.items():
        files = []
        for split, rows in splits.items():
            for part in range(2):
                path = folder / subset / f"{split}-{part:05d}-of-00002.parquet"
                path.parent.mkdir(parents=True, exist_ok=True)
                half = rows[part * (len(rows) // 2) : len(rows) if part else len(rows) // 2]
                pq.write_table(pa.Table.from_pylist(half), path)
            files.append({"split": split, "path": f"{subset}/{split}-*"})
        entries.append({"config_name": subset, "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': entries})}---\n", encoding="utf-8")


def _write_files(folder: Path, pattern: str, rows: Rows) -> None:
    """Write files that match a pattern, in two folders if it has a star for a folder."""
    half = len(rows) // 2
    parts = [rows[:half], rows[half:]]
    for number, part in enumerate(parts):
        stem, star, rest = pattern.rpartition("/*")[0], pattern.endswith("/*.parquet"), f"{number:04d}.parquet"
        path = folder / (f"{stem}/{rest}" if star else pattern).replace("*/", f"site{number}/").replace("*", "")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))
        else:
            pq.write_table(pa.Table.from_pylist(part), path)
