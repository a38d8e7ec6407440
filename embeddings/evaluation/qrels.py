"""Relevance judgments in a tab-separated file."""

import math
from collections.abc import Collection
from os import PathLike
from pathlib import Path

from embeddings.common.errors import InputError, shown

_HEADER = ("query-id", "corpus-id", "score")


def read_qrels(
    path: str | PathLike[str], query_ids: Collection[str], document_ids: Collection[str]
) -> dict[str, dict[str, float]]:
    """The grade of each judged document of each query.

    Columns are query-id, corpus-id, score under that header (BEIR), or query, iteration, document, score without one
    (TREC, tabs or spaces). A grade of 0 or below means judged and not relevant.

    Args:
        path: The file.
        query_ids: Ids that may be judged.
        document_ids: Ids that may be judged relevant.

    Raises:
        InputError: If the file is empty, names an id that is not there, judges a pair twice in two ways, or has no
            relevant pair; the message names file and row.
    """
    relevance: dict[str, dict[str, float]] = {}
    for number, line in enumerate(_lines(Path(path)), start=1):
        where = f"{path}:{number}"
        if not line.strip() or (number == 1 and tuple(line.strip().split("\t")) == _HEADER):
            continue
        query, document, grade = _parse(where, line)
        for name, value, known in (("query", query, query_ids), ("document", document, document_ids)):
            if value not in known:
                raise InputError(where, f"no {name} has the id {shown(value)}", f"add that {name}, or drop the row")
        if relevance.setdefault(query, {}).setdefault(document, grade) != grade:
            first = relevance[query][document]
            raise InputError(
                where, f"{shown(query)} and {shown(document)} were judged {first:g} above, here {grade:g}", "keep one"
            )
    if not any(grade > 0 for grades in relevance.values() for grade in grades.values()):
        what = "no document is relevant to any query" if relevance else "holds no judgment"
        raise InputError(str(path), what, "give at least one row a score above 0")
    return relevance


def _lines(path: Path) -> list[str]:
    content = path.read_bytes()
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{path}:{number}", "is not valid UTF-8", "save the file as UTF-8") from None
    return content.decode("utf-8-sig").split("\n")


def _parse(where: str, line: str) -> tuple[str, str, float]:
    columns = [column.strip() for column in line.split("\t")]
    if len(columns) == 1:
        columns = line.split()
    if len(columns) == 4:
        del columns[1]
    if len(columns) != 3:
        raise InputError(where, f"has {len(columns)} columns", f"write {', '.join(_HEADER)} with tabs between")
    try:
        grade = float(columns[2])
    except ValueError:
        grade = math.nan
    if not math.isfinite(grade):
        raise InputError(where, f"the score must be a number, got {shown(columns[2])}", "write 0, 1, 2, …")
    return columns[0], columns[1], grade
