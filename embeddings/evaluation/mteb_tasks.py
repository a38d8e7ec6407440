"""Adapters to mteb: evaluation folders as tasks, which need no network, and an encoder as a model."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset, DatasetDict
from mteb import AbsTask
from mteb.abstasks import (
    AbsTaskClassification,
    AbsTaskClustering,
    AbsTaskPairClassification,
    AbsTaskRetrieval,
    AbsTaskSTS,
    AbsTaskSummarization,
)
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from mteb.models.search_wrappers import SearchEncoderWrapper
from mteb.similarity_functions import cos_sim, dot_score, pairwise_cos_sim, pairwise_dot_score

from embeddings.common.errors import InputError
from embeddings.common.io import file_sha256, load_array
from embeddings.common.text import TextRole
from embeddings.evaluation.folders import EvaluationFolder, TaskFolder, find_evaluation_folders, read_evaluation_folder
from embeddings.evaluation.mteb_library import task_prompt
from embeddings.inference.context import encode_documents, sample_context, sample_rows
from embeddings.inference.encoder import Context, Encoder, Vectors, unit_rows
from embeddings.inference.vector_folder import Document

# mteb passes texts in batches of this size; the encoder plans its own mini-batches.
TEXTS_PER_BATCH = 1024
# For each kind of folder: the task type and class of mteb, and the metrics for tables, the main score of mteb first.
KINDS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "retrieval": ("Retrieval", AbsTaskRetrieval, ("ndcg_at_10",)),
    "reranking": ("Reranking", AbsTaskRetrieval, ("map_at_1000", "mrr_at_10", "ndcg_at_10")),
    "pair_classification": ("PairClassification", AbsTaskPairClassification, ("max_ap",)),
    "summarisation": ("Summarization", AbsTaskSummarization, ("cosine_spearman",)),
    "sts": ("STS", AbsTaskSTS, ("cosine_spearman",)),
    "classification": ("Classification", AbsTaskClassification, ("accuracy", "f1")),
    "clustering": ("Clustering", AbsTaskClustering, ("v_measure",)),
}


class FolderTask:
    """A mixin for the task classes of mteb that loads `source`, a folder or its data."""

    source: ClassVar[Path | EvaluationFolder]
    dataset: Any
    data_loaded: bool
    # By default mteb embeds 4% of the texts to cluster; here it embeds all of them.
    max_fraction_of_documents_to_embed: ClassVar[float | None] = None
    # mteb scales ratings of summaries from this range to 0 to 1, which does not change rank correlations.
    min_score: ClassVar[int] = 0
    max_score: ClassVar[int] = 1

    def load_data(self, num_proc: int | None = None, **options: Any) -> None:
        if not self.data_loaded:
            folder = read_evaluation_folder(self.source) if isinstance(self.source, Path) else self.source
            self.dataset = _dataset(folder, str(self.source))
            self.data_loaded = True


def folder_tasks(root: str | PathLike[str]) -> list[AbsTask]:
    """A task for every evaluation folder at or below `root`, named by its path from there: `sets.news.titles`."""
    root = Path(root)
    tasks = []
    for path in find_evaluation_folders(root):
        name = ".".join((root.resolve().name, *path.relative_to(root).parts))
        tasks.append(folder_task(name, read_evaluation_folder(path).kind, path))
    return tasks


def folder_task(name: str, kind: str, source: Path | EvaluationFolder) -> AbsTask:
    """The task of a folder, or of the data read from one."""
    task_type, base, metrics = KINDS[kind]
    path, revision = (source.name, _files_sha256(source)) if isinstance(source, Path) else (name, "0")
    metadata = TaskMetadata(
        name=name,
        dataset={"path": path, "revision": revision},
        description=f"A {kind} set in a folder.",
        type=task_type,
        eval_splits=["test"],
        eval_langs=["und-Zyyy"],
        main_score=metrics[0],
    )
    task: AbsTask = type("LocalTask", (FolderTask, base), {"metadata": metadata, "source": source})()
    return task


def _dataset(folder: EvaluationFolder, where: str) -> Any:
    """The data in the form that the task class of mteb has after loading."""
    if isinstance(folder, TaskFolder):
        return DatasetDict({split: Dataset.from_dict(columns) for split, columns in folder.splits.items()})
    qrels, candidates = folder.qrels, folder.candidates
    relevant: dict[str, dict[str, int]] = defaultdict(dict)
    rows = zip(qrels.query_J.tolist(), qrels.document_J.tolist(), qrels.relevance_J.tolist(), strict=True)
    for query, document, grade in rows:
        if grade != int(grade):
            what = f"the grade {grade:g} is not an integer, which mteb requires"
            raise InputError(where, what, "scale the grades, or score the folder with --data")
        relevant[folder.query_ids[query]][folder.document_ids[document]] = int(grade)
    ranked = [[folder.document_ids[row] for row in rows_of_query] for rows_of_query in candidates or ()]
    split = {
        "corpus": Dataset.from_dict({"id": list(folder.document_ids), "text": list(folder.documents)}),
        "queries": Dataset.from_dict({"id": folder.query_ids, "text": folder.queries}),
        "relevant_docs": dict(relevant),
        "top_ranked": None if candidates is None else dict(zip(folder.query_ids, ranked, strict=True)),
    }
    return {"default": {"test": split}}


def _files_sha256(path: Path) -> str:
    files = (*path.glob("*.jsonl*"), *path.glob("*.tsv"), *path.glob("qrels/*"))
    names = sorted(file.relative_to(path) for file in files)
    lines = "".join(f"{name} {file_sha256(path / name)}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()[:40]


class TaskEncoder:
    """A model that implements the encoder protocol of mteb.

    Texts of tasks without roles are encoded as documents. For each task the caller sets `instruction_prompt`, `width`
    (of the vectors to compare) and `folder`, where vectors are stored for the next width.
    """

    def __init__(self, encoder: Encoder, meta: ModelMeta, prompt_name: str | None = None) -> None:
        self.encoder, self.mteb_model_meta, self.prompt_name = encoder, meta, prompt_name
        self.instruction_prompt: str | None = None
        self.width = encoder.embedding_dim
        self.folder: Path | None = None

    def encode(
        self,
        inputs: Iterable[dict[str, Any]],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: str | None = None,
        **options: Any,
    ) -> Vectors:
        """The vectors of batches with a `text` column, (N, `width`) float32."""
        texts = [text for batch in inputs for text in batch["text"]]
        role: TextRole = "query" if prompt_type == "query" else "document"
        prompt = self.prompt(task_metadata, prompt_type)
        context = self._context_for(f"{task_metadata.name} {hf_subset}", texts)
        vector_ND = self._vectors(texts, prompt, role, context)
        if self.width == self.encoder.embedding_dim:
            return vector_ND
        truncated_ND = vector_ND[:, : self.width]
        return unit_rows(truncated_ND) if self.encoder.embedder.normalize else truncated_ND

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        score = dot_score if self.encoder.embedder.compares_lengths else cos_sim
        return score(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        score = pairwise_dot_score if self.encoder.embedder.compares_lengths else pairwise_cos_sim
        return score(embeddings1, embeddings2)

    def prompt(self, task: TaskMetadata, prompt_type: Any) -> str:
        """The prompt for texts with the role `query`, `document` or None."""
        text = self.encoder.embedder.text
        if prompt_type != "document":
            if self.instruction_prompt is not None:
                return self.instruction_prompt
            if self.prompt_name is not None:
                return text.prompt(self.prompt_name, "query")
        return task_prompt(text, task.name, task.type, None if prompt_type is None else str(prompt_type))

    def _context_for(self, data: str, texts: list[str]) -> Context | None:
        return None

    def _vectors(self, texts: list[str], prompt: str, role: TextRole, context: Context | None) -> Vectors:
        """The vectors at full width, read from `folder` if the task has encoded the same texts for another width."""
        if self.folder is None:
            return self.encoder.encode(texts, context=context, role=role, prompt=prompt)
        digest = hashlib.sha256(repr((prompt, role, context and context.summary(), texts)).encode())
        path = self.folder / f"{digest.hexdigest()}.npy"
        if not path.exists():
            np.save(path, self.encoder.encode(texts, context=context, role=role, prompt=prompt))
        return np.asarray(load_array(path, "run the task again"))


class ContextualTaskEncoder(TaskEncoder):
    """A contextual model that implements the search and encoder protocols of mteb.

    The context of a retrieval task is drawn from its corpus, that of another task from the texts that it encodes first.
    """

    def __init__(
        self, encoder: Encoder, meta: ModelMeta, prompt_name: str | None, context_size: int, context_seed: int
    ) -> None:
        super().__init__(encoder, meta, prompt_name)
        self.context_size, self.context_seed = context_size, context_seed
        self._drawn_for: str | None = None
        self._context: Context | None = None
        self._searcher = SearchEncoderWrapper(self)

    def index(self, corpus: Any, *, task_metadata: TaskMetadata, hf_subset: str, **options: Any) -> None:
        """Draw the context from a corpus with `id`, `text` and optionally `title`, and index the corpus."""
        rows = sample_rows(len(corpus), self.context_size, self.context_seed).tolist()
        texts = [f"{corpus[row].get('title') or ''} {corpus[row]['text']}".strip() for row in rows]
        documents = [Document(str(row), text) for row, text in zip(rows, texts, strict=True)]
        self._drawn_for = f"{task_metadata.name} {hf_subset}"
        self._context = encode_documents(self.encoder, documents, self.context_seed)
        self._searcher.index(corpus, task_metadata=task_metadata, hf_subset=hf_subset, **options)

    def search(self, queries: Any, **options: Any) -> dict[str, dict[str, float]]:
        return self._searcher.search(queries, **options)

    def _context_for(self, data: str, texts: list[str]) -> Context | None:
        if self._drawn_for != data:
            self._drawn_for = data
            self._context = sample_context(self.encoder, texts, self.context_size, self.context_seed)
        return self._context
