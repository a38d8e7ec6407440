"""`filter`: the records of a training set that are worth training on."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from embeddings.mining.decontaminate import EvaluationTexts
    from embeddings.mining.filter import FilterReport


def filter_records(
    input: str | list[str],
    output: Path,
    model: str | None = None,
    top_k: int | None = None,
    segment_size: int = 1_000_000,
    segment_by: Literal["source", "language"] = "source",
    remove_copies: bool = True,
    near_duplicates: float | None = None,
    shingle: Literal["word", "character"] = "word",
    decontaminate: Path | list[Path] | None = None,
    decontaminate_documents: bool = True,
    bm25_threshold: float | None = None,
    columns: dict[str, str] | None = None,
    conversion: Literal["pairs", "class_by_example", "class_by_label", "binary_by_label"] = "pairs",
    suspect_rows: Literal["refuse", "leave_out", "keep"] = "refuse",
    vectors: Path | None = None,
    query_vectors: Path | None = None,
    document_vectors: Path | None = None,
    query_prompt_name: str | None = None,
    document_prompt_name: str | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    seed: int = 0,
    shard_size: int = 65_536,
    task_index: int | None = None,
    num_tasks: int | None = None,
) -> None:
    """Keep the training records that are worth training on; the same line resumes after a kill.

    The rules, in this order: copies, near-copies, records equal or similar to evaluation texts, and records whose query
    has other documents nearer to it than its own. Input is one source; where it holds several languages, records of one
    are compared with each other alone with `--segment-by language`.

    Args:
        input: A file, a glob, a list of these, or `hub:organisation/name`, of what `conversion` says.
        output: The Parquet file to write; `NAME.manifest.json` and the folder of work lie beside it.
        model: A model directory or Hub id that judges consistency; no model, no such rule.
        top_k: Keep a pair whose document is among this many nearest to its query; 2 where a model is given.
        segment_size: Records that are compared with each other for consistency.
        segment_by: Compare records of the whole source, or those of one `language` (a field that every record then has;
            `--columns {language: lang}` where its column has another name).
        remove_copies: Whether a record with an earlier one's query and positives goes.
        near_duplicates: Similarity from which query and positives are those of an earlier record, 0.5 to 1.
        shingle: Compare near-copies by runs of 3 words, or of 5 characters (languages without spaces).
        decontaminate: A folder that is, or holds, evaluation folders; several as `[FOLDER, FOLDER]`.
        decontaminate_documents: Whether a document of a retrieval folder takes records out; false where training and
            evaluation share one corpus by design.
        bm25_threshold: Share of an evaluation text's BM25 weight from which a text is similar to it, up to 1.
        columns: Column of a field, for fields whose column has another name.
        conversion: What the input holds: `pairs`, records with `query` and `positive`; the others, rows with `text` and
            `label`, for which there are the rules on copies and on evaluation texts.
        suspect_rows: What becomes of records that contradict themselves.
        vectors: Folder of the input's vectors by the same model, written where they are not there yet.
        query_vectors: A folder that `encode --role query` wrote with the same model: queries found in it by their text
            are not encoded again.
        document_vectors: The same of documents.
        query_prompt_name: Which of the model's prompts goes before each query.
        document_prompt_name: Which goes before each document.
        query_prompt: What goes before each query, in place of one of the model's prompts, such as `"query: "`; a
            record's own instruction takes the place of `{instruction}`.
        document_prompt: What goes before each document.
        precision: Format of matrix products.
        seed: Seed of which records are compared with each other.
        shard_size: Records of a shard.
        task_index: Which of several processes this is, from 0; a SLURM array's task by itself.
        num_tasks: How many processes share the work.
    """
    from embeddings.common import OptionError
    from embeddings.common.text import choose_prompt
    from embeddings.data import SourceConfig
    from embeddings.inference import Encoder
    from embeddings.mining.decontaminate import Decontaminator
    from embeddings.mining.encoded_texts import EncodedTexts
    from embeddings.mining.filter import FilterRules, filter_pairs
    from embeddings.mining.jobs import ArrayTask

    task = ArrayTask.resolve(task_index, num_tasks)
    top_k = 2 if model is not None and top_k is None else top_k
    prompts = (
        choose_prompt("query_prompt", query_prompt_name, query_prompt),
        choose_prompt("document_prompt", document_prompt_name, document_prompt),
    )
    given = (top_k, vectors, query_vectors, document_vectors, *prompts)
    if model is None and (segment_by != "source" or any(value is not None for value in given)):
        rule = "must be given for top_k, segment_by, vectors and prompts to take effect"
        raise OptionError("model", None, rule, "name a model directory")
    rules = FilterRules(remove_copies, near_duplicates, shingle, top_k, segment_size, seed, segment_by, *prompts)
    if decontaminate is None and bm25_threshold is not None:
        rule = "needs evaluation texts to compare with"
        raise OptionError("bm25_threshold", bm25_threshold, rule, "give --decontaminate FOLDER")
    decontaminator = None
    if decontaminate is not None:
        folders = decontaminate if isinstance(decontaminate, list) else [decontaminate]
        decontaminator = Decontaminator(evaluation_texts(folders, decontaminate_documents), bm25_threshold)
    report = filter_pairs(
        SourceConfig("input", input, conversion, columns=columns or {}, suspect_rows=suspect_rows),
        output,
        rules,
        decontaminator=decontaminator,
        encoder=None if model is None else Encoder.from_pretrained(model, precision=precision, show_progress=True),
        vectors=vectors,
        encoded=EncodedTexts(query_vectors, document_vectors),
        shard_size=shard_size,
        task=task,
    )
    print(table(report))


def evaluation_texts(roots: list[Path], documents: bool = True) -> "EvaluationTexts":
    """The texts of the evaluation folders at or below some folders.

    Queries and documents of retrieval and reranking folders; of the other kinds all texts that are tested on, in both
    roles.

    Args:
        roots: Where to look.
        documents: Whether the documents of retrieval and reranking folders count.
    """
    from embeddings.evaluation import find_evaluation_folders, read_evaluation_folder
    from embeddings.evaluation.folders import ClassificationFolder, RetrievalFolder
    from embeddings.evaluation.reranking import RerankingFolder
    from embeddings.evaluation.runner import corpus_texts
    from embeddings.mining.decontaminate import EvaluationTexts

    queries: list[str] = []
    found: list[str] = []
    for path in (path for root in roots for path in find_evaluation_folders(root)):
        folder = read_evaluation_folder(path)
        if isinstance(folder, RetrievalFolder | RerankingFolder):
            queries += folder.queries
            found += folder.documents if documents else []
            continue
        # Of a classification the part to train on is left out: nothing is scored by its texts.
        texts = folder.test_texts if isinstance(folder, ClassificationFolder) else corpus_texts(folder)
        queries += texts
        found += texts
    return EvaluationTexts(queries, found)


def table(report: "FilterReport") -> str:
    """What each rule took out, and what was left, as text."""
    left, lines = (
        report.num_records,
        [f"{'':<30}{'removed':>12}{'left':>12}", f"{'records':<42}{report.num_records:>12}"],
    )
    for rule, count in report.removed.items():
        left -= count
        lines.append(f"{rule:<30}{count:>12}{left:>12}")
    return "\n".join([*lines, f"wrote {left} records to {report.output}"])
