"""`passages`: documents of many kinds as passages that can be encoded and searched."""

from pathlib import Path

from embeddings.adaptation import Splitter, TokenCounter, write_passages
from embeddings.adaptation.corpus import DEFAULT_SIMILARITY, PassageReport
from embeddings.common.text import format_table, one_line, shorten
from embeddings.models.model_files import PACKAGED_NAME

# A tokenizer that does not know this share of the letters does not suit the documents' language.
_MANY_UNKNOWN = 0.05


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
