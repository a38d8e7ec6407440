"""`queries`: queries for the passages of one's own documents, with held-out documents and real queries."""

from pathlib import Path

from embeddings.adaptation.queries import QueriesReport, QuerySettings, make_queries
from embeddings.cli.mining import evaluation_texts
from embeddings.common.text import format_table


def queries(
    passages: Path,
    output: Path,
    queries: Path | None = None,
    query_columns: dict[str, str] | None = None,
    evaluation_data: Path | list[Path] | None = None,
    *,
    settings: QuerySettings,
) -> None:
    """Make training pairs and evaluation folders from the passages of documents, without a language model.

    Queries are what the documents offer: sentences (removed from their passage), questions, headings, texts of links
    and docstrings. Whole documents are held out. Real queries with judgements are the test and validation.

    Args:
        passages: JSON lines with `text`, and optionally `_id`, `title`, `document`, `file` and `links`.
        output: The folder to write, with `pairs.jsonl`, evaluation folders and `summary.json`.
        queries: Real queries: a log (JSON lines, CSV, TSV or text), pairs, or a labelled evaluation folder.
        query_columns: Columns of the log that are named differently, such as `{query: q, passage: page}`.
        evaluation_data: An evaluation folder, or a folder of them; several as `[FOLDER, FOLDER]`. Training queries that
            resemble their queries are removed.
    """
    roots = evaluation_data if isinstance(evaluation_data, list) else [evaluation_data] if evaluation_data else []
    more = evaluation_texts(roots, documents=False) if roots else None
    report = make_queries(passages, output, log=queries, columns=query_columns, evaluation=more, settings=settings)
    print(f"{output} already exists for these inputs" if report.reused else queries_table(report))
    for note in report.notes:
        print(note)


def queries_table(report: QueriesReport) -> str:
    """How many queries of each kind were proposed, kept and rejected, as text."""
    rows = [["", "proposed", "training", "pseudo test", "rejected, mostly because"]]
    for kind, counts in report.kinds.items():
        rejected = sorted(counts["rejected"].items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{reason} ({count})" for reason, count in rejected[:3])
        rows.append([kind, counts["proposed"], counts["training"], counts["pseudo_test"], reasons])
    counts = report.counts
    lines = [format_table(rows, "<>>><")] if report.kinds else []
    held_out = f"{counts['held_out_documents']} of {counts['documents']} documents"
    lines.append(f"held out: {held_out}, {counts['held_out_passages']} of {counts['passages']} passages")
    lines.append(f"{counts['pairs']} training pairs")
    if real := counts["evaluation_queries"] + counts["validation_queries"]:
        lines.append(
            f"{real} real queries: {counts['evaluation_queries']} test, {counts['validation_queries']} validation"
        )
    if counts["pseudo_test_queries"]:
        line = f"{counts['pseudo_test_queries']} queries of held-out documents in evaluation-pseudo: a weak judge, "
        lines.append(f"{line}which may prefer a model that real queries do not")
    return "\n".join(lines)
