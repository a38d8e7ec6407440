"""Evaluation folders as tasks of mteb, so that its metrics hold for data of one's own and no network is needed."""

import hashlib
from collections import defaultdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from datasets import Dataset, DatasetDict
from mteb.abstasks import (
    AbsTaskClassification,
    AbsTaskClustering,
    AbsTaskPairClassification,
    AbsTaskRetrieval,
    AbsTaskSTS,
    AbsTaskSummarization,
)
from mteb.abstasks.task_metadata import TaskMetadata

from embeddings.common.errors import InputError
from embeddings.common.io import file_sha256
from embeddings.evaluation.folders import (
    ClassificationFolder,
    ClusteringFolder,
    EvaluationFolder,
    RetrievalFolder,
    SimilarityFolder,
    find_evaluation_folders,
    read_evaluation_folder,
)
from embeddings.evaluation.pair_classification import PairClassificationFolder
from embeddings.evaluation.reranking import RerankingFolder
from embeddings.evaluation.summarisation import SummarisationFolder
from embeddings.evaluation.task_prompts import TASK_TYPES

if TYPE_CHECKING:
    from mteb import AbsTask

# Of each kind of folder mteb's main score, and the class that computes it.
_KINDS: dict[str, tuple[str, Any]] = {
    "retrieval": ("ndcg_at_10", AbsTaskRetrieval),
    "reranking": ("map_at_1000", AbsTaskRetrieval),
    "pair_classification": ("max_ap", AbsTaskPairClassification),
    "summarisation": ("cosine_spearman", AbsTaskSummarization),
    "sts": ("cosine_spearman", AbsTaskSTS),
    "classification": ("accuracy", AbsTaskClassification),
    "clustering": ("v_measure", AbsTaskClustering),
}


class FolderTask:
    """What a task of a folder has beside what mteb's class of its type brings: it reads the folder when it is run.

    Attributes:
        path: The folder.
    """

    path: ClassVar[Path]
    dataset: Any
    data_loaded: bool
    # mteb embeds 4% of a clustering's texts by default; all of them here.
    max_fraction_of_documents_to_embed: ClassVar[float | None] = None
    # mteb brings marks of summaries to a scale of 0 to 1, which no correlation depends on; they are left as they are.
    min_score: ClassVar[int] = 0
    max_score: ClassVar[int] = 1

    def load_data(self, num_proc: int | None = None, **options: Any) -> None:
        """Read the folder.

        Raises:
            InputError: If it cannot be used, or a grade is no whole number, as mteb wants them.
        """
        if not self.data_loaded:
            self.dataset = _dataset(read_evaluation_folder(self.path), self.path)
            self.data_loaded = True


def folder_tasks(root: str | PathLike[str]) -> list["AbsTask"]:
    """A task for every evaluation folder at or below a folder, named by its path from there: `sets.news.titles`.

    Raises:
        InputError: If there is none, or one cannot be used.
    """
    return [_folder_task(Path(root), path) for path in find_evaluation_folders(root)]


def _folder_task(root: Path, path: Path) -> "AbsTask":
    kind = read_evaluation_folder(path).kind
    main_score, base = _KINDS[kind]
    task_type: Any = TASK_TYPES[kind]
    metadata = TaskMetadata(
        name=".".join((root.resolve().name, *path.relative_to(root).parts)),
        dataset={"path": path.name, "revision": _files_sha256(path)},
        description=f"A {kind} set in a folder.",
        type=task_type,
        eval_splits=["test"],
        eval_langs=["und-Zyyy"],
        main_score=main_score,
    )
    task: AbsTask = type("LocalTask", (FolderTask, base), {"metadata": metadata, "path": path})()
    return task


def _dataset(folder: EvaluationFolder, path: Path) -> Any:
    """The data as mteb's class of the type has them once they are loaded."""
    match folder:
        case RetrievalFolder():
            return {"default": {"test": _retrieval_split(folder, path)}}
        case RerankingFolder():
            return {"default": {"test": _reranking_split(folder)}}
        case SimilarityFolder():
            columns = {"sentence1": folder.first, "sentence2": folder.second, "score": folder.score_N.tolist()}
            return DatasetDict(test=Dataset.from_dict(columns))
        case PairClassificationFolder():
            labelled = {"sentence1": folder.first, "sentence2": folder.second, "labels": folder.label_N.tolist()}
            return DatasetDict(test=Dataset.from_dict(labelled))
        case SummarisationFolder():
            return _summaries(folder)
        case ClassificationFolder():
            return _classification(folder)
        case ClusteringFolder():
            return DatasetDict(test=Dataset.from_dict({"sentences": folder.texts, "labels": folder.labels}))


def _classification(folder: ClassificationFolder) -> DatasetDict:
    """Both parts with numbers for labels: of two of them mteb asks how well the one called 1 is found."""
    # Those of the test part come first, so that they are 0 and 1 where there are two, whatever training has beside.
    names = [*sorted({*folder.test_labels}), *sorted({*folder.train_labels} - {*folder.test_labels})]
    number = {name: row for row, name in enumerate(names)}
    parts = {"train": (folder.train_texts, folder.train_labels), "test": (folder.test_texts, folder.test_labels)}
    return DatasetDict(
        {
            part: Dataset.from_dict({"text": texts, "label": [number[label] for label in labels]})
            for part, (texts, labels) in parts.items()
        }
    )


def _retrieval_split(folder: RetrievalFolder, path: Path) -> dict[str, Any]:
    judged = folder.judgments
    relevant: dict[str, dict[str, int]] = defaultdict(dict)
    rows = zip(judged.query_J.tolist(), judged.document_J.tolist(), judged.relevance_J.tolist(), strict=True)
    for query, document, grade in rows:
        if grade != int(grade):
            what = f"the grade {grade:g} is no whole number, as mteb needs it"
            raise InputError(str(path), what, "scale the grades, or score the folder with --data")
        relevant[folder.query_ids[query]][folder.document_ids[document]] = int(grade)
    return {
        "corpus": Dataset.from_dict({"id": folder.document_ids, "text": folder.documents}),
        "queries": Dataset.from_dict({"id": folder.query_ids, "text": folder.queries}),
        "relevant_docs": dict(relevant),
        "top_ranked": None,
    }


def _reranking_split(folder: RerankingFolder) -> dict[str, Any]:
    documents, queries = ([str(row) for row in range(len(texts))] for texts in (folder.documents, folder.queries))
    candidates = [[documents[row] for row in rows] for rows in folder.candidate_rows]
    relevant = [dict.fromkeys(rows[:number], 1) for rows, number in zip(candidates, folder.num_relevant, strict=True)]
    return {
        "corpus": Dataset.from_dict({"id": documents, "text": folder.documents}),
        "queries": Dataset.from_dict({"id": queries, "text": folder.queries}),
        "relevant_docs": dict(zip(queries, relevant, strict=True)),
        "top_ranked": dict(zip(queries, candidates, strict=True)),
    }


def _summaries(folder: SummarisationFolder) -> DatasetDict:
    """The rows of all texts; mteb wants each text itself too, and has no use for it."""
    columns = {
        "text": [""] * len(folder.relevance),
        "human_summaries": folder.human_summaries,
        "machine_summaries": folder.machine_summaries,
        "relevance": folder.relevance,
    }
    return DatasetDict(test=Dataset.from_dict(columns))


def _files_sha256(path: Path) -> str:
    """A hash of the files that a folder's data lie in."""
    names = sorted(
        file.relative_to(path) for file in (*path.glob("*.jsonl*"), *path.glob("*.tsv"), *path.glob("qrels/*"))
    )
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name} {file_sha256(path / name)}\n".encode())
    return digest.hexdigest()[:40]
