"""`passages` and `queries`: one's own documents as passages, and queries for these passages."""

from pathlib import Path

from embeddings.adaptation import Splitter, TokenCounter, write_passages
from embeddings.adaptation.corpus import DEFAULT_SIMILARITY, PassageReport
from embeddings.adaptation.model_queries import MAX_REQUESTS, Form, QueryModel
from embeddings.adaptation.queries import MODEL_PAIRS, QueriesReport, QuerySettings, make_queries
from embeddings.cli.mining import evaluation_texts
from embeddings.cli.parser import listed
from embeddings.common.errors import refuse_given
from embeddings.common.text import format_table, one_line, shorten
from embeddings.models.model_files import PACKAGED_NAME

# A tokenizer that does not know this share of the letters does not suit the documents' language.
_MANY_UNKNOWN = 0.05
# The parts of the real queries.
PARTS = {"evaluation": "test", "validation": "validation", "training": "training"}


def passages(
    documents: Path,
    output: Path,
    model: str = PACKAGED_NAME,
    max_tokens: int | None = None,
    columns: dict[str, str] | None = None,
    near_duplicates: float | None = DEFAULT_SIMILARITY,
) -> None:
    """Cut documents into passages: a corpus file for `encode`, `search` and `evaluate`.

    Markdown, text, reStructuredText, HTML, notebooks, EPUB, source code, and tables (JSON lines, CSV, Parquet) whose
    rows are documents; with the extra `documents` also PDF and Word. `NAME.log.jsonl` lists what was left out, and
    why.

    Args:
        documents: A folder, which is searched for files, or a file.
        output: The `.jsonl` file to write, with `NAME.jsonl.manifest.json` and `NAME.log.jsonl`.
        model: The model directory or Hub id whose tokenizer, prompt and maximum length count.
        max_tokens: Maximum number of tokens of title and text; default the model's maximum, and at most 256.
        columns: Column names of `text`, `title` or `_id` of tables, if they differ: `{text: body}`.
        near_duplicates: Minimum similarity of near copies, of which the first is retained; null retains all.
    """
    splitter = Splitter(TokenCounter.of_model(model), max_tokens)
    report = write_passages(documents, output, splitter, columns=columns, near_duplicates=near_duplicates)
    print(passage_summary(report))


def passage_summary(report: PassageReport) -> str:
    """What was left out and what was written, in at most some 30 lines."""
    lines = [one_line(f"left out {each}", 240) for each in report.examples]
    if report.num_examples > len(report.examples):
        lines.append(f"... and {report.num_examples - len(report.examples)} more, listed in {report.log}")
    if report.left_out:
        causes = report.left_out.most_common()
        rows = [["left out", ""], *causes[:6]]
        if len(causes) > 6:
            rows.append(["other causes", sum(count for _, count in causes[6:])])
        lines.append(format_table(rows))
    if report.num_repeated:
        lines.append(f"{report.num_repeated} repetitions of paragraphs that many documents share, such as:")
        lines += [f"  {shorten(text, 80)!r} in {count} documents" for text, count in report.repeated]
    if report.num_copies:
        lines.append(f"{report.num_copies} passages left out as near copies")
    if report.unknown >= _MANY_UNKNOWN:
        lines.append(f"the model's tokenizer does not know {report.unknown:.0%} of the letters: choose another --model")
    least, median, largest = report.tokens
    sizes = f"{least} to {largest} tokens, median {median}"
    lines.append(
        f"wrote {report.num_passages} passages of {report.num_documents} documents to {report.output}: {sizes}"
    )
    return "\n".join(lines)


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
    roots = listed(evaluation_data)
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
