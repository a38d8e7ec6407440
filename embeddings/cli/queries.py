"""`queries`: queries for the passages of one's own documents, with held-out documents and real queries."""

from pathlib import Path

from embeddings.adaptation.model_queries import MAX_REQUESTS, Form, QueryModel
from embeddings.adaptation.queries import MODEL_PAIRS, QueriesReport, QuerySettings, make_queries
from embeddings.cli.mining import evaluation_texts
from embeddings.common.errors import refuse_given
from embeddings.common.text import format_table

# The parts of the real queries.
PARTS = {"evaluation": "test", "validation": "validation", "training": "training"}


def queries(
    passages: Path,
    output: Path,
    queries: Path | None = None,
    query_columns: dict[str, str] | None = None,
    evaluation_data: Path | list[Path] | None = None,
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    endpoint_form: Form = "line",
    max_requests: int | None = None,
    stream: bool = True,
    *,
    settings: QuerySettings,
) -> None:
    """Make training pairs and evaluation folders from the passages of documents, also without a language model.

    Queries are what the documents offer: sentences (removed from their passage), questions, headings, texts of links
    and docstrings; with `--endpoint` also, in a file of its own, what a language model writes. Whole documents are held
    out. Real queries with judgements are the test and validation; of many (`--training-share`) a half is trained on.

    Args:
        passages: JSON lines with `text`, and optionally `_id`, `title`, `document`, `file` and `links`.
        output: The folder to write, with `pairs.jsonl`, evaluation folders and `summary.json`; with `--endpoint` also
            `pairs-model.jsonl`.
        queries: Real queries: a log (JSON lines, CSV, TSV or text), pairs, or a labelled evaluation folder.
        query_columns: Columns of the log that are named differently, such as `{query: q, passage: page}`.
        evaluation_data: An evaluation folder, or a folder of them; several as `[FOLDER, FOLDER]`. Training queries that
            resemble their queries are removed.
        endpoint: Base URL of a server with OpenAI's chat protocol, such as `http://localhost:8000/v1`, whose model
            writes a query for training passages. The key, if any, is the environment variable OPENAI_API_KEY. Answers
            are kept in `OUTPUT.work`: after a kill the same command asks nothing twice.
        endpoint_model: The model's name at the endpoint; by default the only one that it lists.
        endpoint_form: `line` asks for a query after examples of the documents' own; `tasks`, for strong models, first
            for kinds of search, then for queries of random kinds, lengths and difficulties.
        max_requests: Maximum passages that the model is asked about, a random sample; default 2,000.
        stream: Whether answers come in parts; false for a server that cannot.
    """
    if endpoint is None:
        given = {"endpoint_model": endpoint_model, "max_requests": max_requests, "stream": None if stream else False}
        given |= {"endpoint_form": None if endpoint_form == "line" else endpoint_form}
        refuse_given(given, "needs --endpoint")
        model = None
    else:
        limit = MAX_REQUESTS if max_requests is None else max_requests
        model = QueryModel(endpoint, endpoint_model, limit, stream, endpoint_form)
    roots = evaluation_data if isinstance(evaluation_data, list) else [evaluation_data] if evaluation_data else []
    more = evaluation_texts(roots, documents=False) if roots else None
    report = make_queries(
        passages, output, log=queries, columns=query_columns, evaluation=more, settings=settings, model=model
    )
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
    if counts["model_pairs"]:
        lines.append(f"{counts['model_pairs']} more by the language model in {MODEL_PAIRS}")
    parts = {part: counts[f"{name}_queries"] for name, part in PARTS.items() if counts[f"{name}_queries"]}
    if parts:
        sizes = ", ".join(f"{count} {part}" for part, count in parts.items())
        lines.append(f"{sum(parts.values())} real queries: {sizes}")
    if counts["pseudo_test_queries"]:
        line = f"{counts['pseudo_test_queries']} queries of held-out documents in evaluation-pseudo: a weak judge, "
        lines.append(f"{line}which may prefer a model that real queries do not")
    return "\n".join(lines)
