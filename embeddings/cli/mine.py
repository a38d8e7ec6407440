"""`mine`: hard negatives for the records of a training set."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from embeddings.mining.encoded_texts import EncodedTexts
    from embeddings.mining.judgments import JudgedTexts
    from embeddings.mining.mine import MiningReport


def mine(
    model: str | list[str],
    input: str | list[str],
    output: Path,
    corpus: Path | None = None,
    margin: float | None = 0.95,
    absolute_margin: float | None = None,
    num_negatives: int | None = None,
    levels: Literal["quantiles", "grades"] | None = None,
    judgments: Path | None = None,
    first_rank: int = 1,
    last_rank: int = 100,
    choice: Literal["top", "random"] = "top",
    index: Literal["exact", "ivf"] = "exact",
    num_probes: int | None = None,
    num_lists: int | None = None,
    gpu: bool = False,
    query_prompt_name: str | None = None,
    document_prompt_name: str | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    columns: dict[str, str] | None = None,
    conversion: Literal["pairs", "sts"] = "pairs",
    min_score: float | None = None,
    suspect_rows: Literal["refuse", "leave_out", "keep"] = "refuse",
    vectors: Path | None = None,
    query_vectors: Path | list[Path] | None = None,
    document_vectors: Path | list[Path] | None = None,
    precision: Literal["auto", "float32", "bfloat16"] = "auto",
    seed: int = 0,
    shard_size: int = 8192,
    task_index: int | None = None,
    num_tasks: int | None = None,
) -> None:
    """Mine hard negatives that are no hidden positives; the same line resumes after a kill.

    Candidates are the documents nearest to each query. Its own positives and its own text go, and what a teacher scores
    too near to the positive.

    Args:
        model: A model directory or Hub id, the teacher; several as `[MODEL, MODEL]`, each of which can refuse.
        input: A file, a glob, a list of these, or `hub:organisation/name`, of what `conversion` says.
        output: The Parquet file to write; `NAME.manifest.json` and the folder of work lie beside it.
        corpus: A file of more documents, with `text` and maybe `title`, beside the records' positives.
        margin: Share of the positive's score that a negative stays below; `null` for none.
        absolute_margin: Distance by which a negative's score stays below the positive's.
        num_negatives: Negatives of a query; 7 unless given, and with `levels` 4, one of each level.
        levels: What gives negatives a level from 1, the hardest, to 4, as the curriculum needs them: `quantiles` cuts a
            query's candidates and as many documents drawn from all into quarters of the teacher's similarity; `grades`
            takes people's judgments: a step below the positive, further below, irrelevant or not judged, drawn.
        judgments: For `grades`, a qrels file (`FOLDER/qrels.tsv`, `FOLDER/qrels/train.tsv`); its folder's corpus
            is searched, and its queries are found by their text among those of the records.
        first_rank: Rank of the first document considered, from 1; the query's own texts have none.
        last_rank: Rank of the last one.
        choice: Take the hardest of what is left, or draw from it.
        index: Compare with every document, or only with those of the nearest lists.
        num_probes: Lists that `ivf` searches for a query.
        num_lists: Lists of `ivf`.
        gpu: Whether faiss searches on the first GPU.
        query_prompt_name: Which of the model's prompts goes before each query.
        document_prompt_name: Which goes before each document.
        query_prompt: What goes before each query, in place of one of the model's prompts, such as `"query: "`; a
            record's own instruction takes the place of `{instruction}`.
        document_prompt: What goes before each document.
        columns: Column of a field, for fields whose column has another name.
        conversion: What the input holds: `pairs`, records with `query` and `positive`; `sts`, rows with `sentence1`,
            `sentence2` and `score`, of which each pair of a high score becomes two records, one in each direction.
        min_score: Least score of such a pair; 4 unless given.
        suspect_rows: What becomes of records that contradict themselves.
        vectors: Folder of the vectors, written where they are not there yet; the folder of work where none is given.
        query_vectors: A folder that `encode --role query` wrote with the same model: queries found in it by their text
            are not encoded again. Of several models one folder each, as `[FOLDER, FOLDER]`.
        document_vectors: The same of documents, such as `encode` made of the corpus.
        precision: Format of matrix products.
        seed: Seed of the draw and of the lists.
        shard_size: Records of a shard.
        task_index: Which of several processes this is, from 0; a SLURM array's task by itself.
        num_tasks: How many processes share the work.
    """
    from embeddings.common.text import choose_prompt
    from embeddings.data import SourceConfig
    from embeddings.data.records import NUM_LEVELS
    from embeddings.inference import Encoder
    from embeddings.mining.faiss_library import load_faiss
    from embeddings.mining.jobs import ArrayTask
    from embeddings.mining.levels import LevelRules
    from embeddings.mining.mine import SearchOptions, Teachers, mine_negatives
    from embeddings.mining.negatives import NegativeRules

    def load(name: str) -> Encoder:
        return Encoder.from_pretrained(name, precision=precision, show_progress=True)

    prompts = (
        choose_prompt("query_prompt", query_prompt_name, query_prompt),
        choose_prompt("document_prompt", document_prompt_name, document_prompt),
    )
    models = [model] if isinstance(model, str) else model
    encoded = _encoded_texts(query_vectors, document_vectors, len(models))
    load_faiss(gpu)
    judged, corpus = (None, corpus) if judgments is None else _judged_texts(judgments, levels, corpus)
    if num_negatives is None:
        num_negatives = NegativeRules.num_negatives if levels is None else NUM_LEVELS
    report = mine_negatives(
        SourceConfig("input", input, conversion, columns=columns or {}, suspect_rows=suspect_rows, min_score=min_score),
        output,
        Teachers(models, load, *prompts, encoded),
        NegativeRules(num_negatives, margin, absolute_margin, first_rank, last_rank, choice, seed),
        search=SearchOptions(index, num_probes, num_lists, gpu, seed),
        levels=None if levels is None else LevelRules(levels, judged, str(judgments)),
        corpus=corpus,
        vectors=vectors,
        shard_size=shard_size,
        task=ArrayTask.resolve(task_index, num_tasks),
    )
    print("this task's shards are there, others are missing yet" if report is None else table(report))


def _judged_texts(qrels: Path, levels: str | None, corpus: Path | None) -> "tuple[JudgedTexts, Path]":
    """The judgments in a qrels file, by text, and the corpus that they are of.

    Raises:
        OptionError: If they cannot take effect, or a corpus is given beside theirs.
        InputError: If they cannot be used.
    """
    from embeddings.common import OptionError
    from embeddings.evaluation.folders import read_retrieval_files, retrieval_files_of
    from embeddings.mining.judgments import JudgedTexts

    if levels != "grades":
        raise OptionError("judgments", str(qrels), "have no effect without --levels grades", "leave them out")
    files = retrieval_files_of(qrels)
    if corpus is not None:
        raise OptionError("corpus", str(corpus), f"is {files.corpus} with judgments", "leave it out")
    data = read_retrieval_files(files)
    found = data.judgments
    rows = zip(found.query_J.tolist(), found.document_J.tolist(), found.relevance_J.tolist(), strict=True)
    judged = ((data.queries[query], data.documents[document], grade) for query, document, grade in rows)
    return JudgedTexts.of(judged, str(qrels)), files.corpus


def _encoded_texts(
    queries: Path | list[Path] | None, documents: Path | list[Path] | None, num_models: int
) -> "list[EncodedTexts]":
    """The folders of each model, or none at all.

    Raises:
        OptionError: If there are more folders or fewer than models.
    """
    from embeddings.common import OptionError
    from embeddings.mining.encoded_texts import EncodedTexts

    columns: list[Sequence[Path | None]] = []
    for name, given in (("query_vectors", queries), ("document_vectors", documents)):
        folders = [given] if isinstance(given, Path) else given
        if folders is not None and len(folders) != num_models:
            rule = f"must be as many folders as there are models ({num_models})"
            raise OptionError(name, list(map(str, folders)), rule, "name them in the order of the models")
        columns.append(folders or [None] * num_models)
    return [EncodedTexts(*pair) for pair in zip(*columns, strict=True)]


def table(report: "MiningReport") -> str:
    """What each rule removed, and what was left, as text."""
    lines = [
        f"{report.num_queries} queries, {report.num_documents} documents",
        f"{'':<30}{'removed':>14}{'left':>14}",
        f"{'candidates':<44}{report.num_candidates:>14}",
    ]
    left = report.num_candidates
    for reason, count in report.removed.items():
        left -= count
        lines.append(f"{reason.replace('_', ' '):<30}{count:>14}{left:>14}")
    for level, part in (report.by_level or {}).items():
        scores = "no scores"
        if part["num_negatives"]:
            low, mean, high = (f"{part[f'{name}_score']:.3f}" for name in ("lowest", "mean", "highest"))
            scores = f"scores {low} to {high}, mean {mean}"
        count, lacking = part["num_negatives"], part["num_lacking"]
        lines.append(f"level {level}: {count} negatives, {scores}; {lacking} records have none")
    lines.append(f"{report.num_short} records have fewer negatives than asked for, {report.num_empty} of them none")
    return "\n".join([*lines, f"wrote {report.num_negatives} negatives to {report.output}"])
