"""An encoder as mteb wants a model: prompts by task and role, several widths, a context from each corpus."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from mteb.models.search_wrappers import SearchEncoderWrapper
from mteb.similarity_functions import cos_sim, pairwise_cos_sim

from embeddings.common.io import load_array
from embeddings.common.text import TextRole
from embeddings.evaluation.task_prompts import task_prompt
from embeddings.inference.context import ContextDraw, sample_context, sample_rows
from embeddings.inference.corpus import Document
from embeddings.inference.encoder import Context, Encoder
from embeddings.inference.vectors import unit_rows

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models import ModelMeta

Vectors = npt.NDArray[np.float32]


class TaskEncoder:
    """A model in mteb's encoder protocol.

    Queries are encoded as queries and documents as documents; the texts of tasks that know no roles as documents, with
    no prompt but their task's, as mteb does it. Of the model's prompts the most special one holds (`task_prompt`).

    Args:
        encoder: The model, at its full width.
        meta: What mteb is to know of it.
        prompt_name: Which of the model's prompts goes before queries, or before every text of a task without roles.

    Attributes:
        instruction_prompt: What the task's queries, or all its texts where it knows no roles, are encoded with in place
            of the model's own prompts; None for these. Whoever runs a task sets it.
        width: How many of the first numbers of each vector are compared. Whoever runs a task sets it.
        folder: Where vectors are kept to be cut to the next width, or None where there is one alone.
    """

    def __init__(self, encoder: Encoder, meta: "ModelMeta", prompt_name: str | None = None) -> None:
        self.encoder, self.mteb_model_meta, self.prompt_name = encoder, meta, prompt_name
        self.instruction_prompt: str | None = None
        self.width = encoder.embedding_dim
        self.folder: Path | None = None

    def encode(
        self,
        inputs: Iterable[dict[str, Any]],
        *,
        task_metadata: "TaskMetadata",
        hf_split: str,
        hf_subset: str,
        prompt_type: str | None = None,
        **options: Any,
    ) -> Vectors:
        """The vectors of texts, (N, D) float32 of the chosen width.

        Args:
            inputs: Batches of texts, under `text`.
            task_metadata: The task.
            hf_split: Its split.
            hf_subset: Its subset, such as a language.
            prompt_type: `query`, `document`, or None where the task knows no roles.
            options: What else mteb hands on.

        Raises:
            OptionError: If a prompt leaves no room for a text.
            InputError: If a vector is not finite because the model is damaged.
            NumericError: If it is not finite for another reason.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        role: TextRole = "query" if prompt_type == "query" else "document"
        prompt = self._prompt(task_metadata, prompt_type)
        context = self._context_of(f"{task_metadata.name} {hf_subset}", texts)
        vector_ND = self._vectors(texts, prompt, role, context)
        if self.width == self.encoder.embedding_dim:
            return vector_ND
        cut_ND = vector_ND[:, : self.width]
        return unit_rows(cut_ND) if self.encoder.embedder.normalize else cut_ND

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines of all pairs."""
        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines row by row."""
        return pairwise_cos_sim(embeddings1, embeddings2)

    def _prompt(self, task: "TaskMetadata", prompt_type: Any) -> str:
        text = self.encoder.embedder.text
        if prompt_type != "document":
            if self.instruction_prompt is not None:
                return self.instruction_prompt
            if self.prompt_name is not None:
                return text.prompt(self.prompt_name, "query")
        return task_prompt(text.prompts, task.name, task.type, None if prompt_type is None else str(prompt_type))

    def _context_of(self, owner: str, texts: list[str]) -> Context | None:
        return None

    def _vectors(self, texts: list[str], prompt: str, role: TextRole, context: Context | None) -> Vectors:
        """The whole vectors, read where a task was given the same texts at another width."""
        if self.folder is None:
            return self.encoder.encode(texts, context=context, role=role, prompt=prompt)
        digest = hashlib.sha256(repr((prompt, role, context and context.summary(), texts)).encode())
        path = self.folder / f"{digest.hexdigest()}.npy"
        if not path.exists():
            np.save(path, self.encoder.encode(texts, context=context, role=role, prompt=prompt))
        return np.asarray(load_array(path, "run the task again"))


class ContextualTaskEncoder(TaskEncoder):
    """A contextual model in mteb's protocols for searching and encoding.

    A retrieval task's queries and documents are read behind documents drawn from its own corpus, never from its
    queries. Another task's texts are read behind texts that are drawn from those that it asks for first: the training
    texts of a classification, the first sentences of pairs, the texts to cluster.

    Args:
        encoder: The model, at its full width.
        meta: What mteb is to know of it.
        prompt_name: As for a `TaskEncoder`.
        context_size: Documents that are drawn.
        context_seed: Seed of the draws.
    """

    def __init__(
        self, encoder: Encoder, meta: "ModelMeta", prompt_name: str | None, context_size: int, context_seed: int
    ) -> None:
        super().__init__(encoder, meta, prompt_name)
        self.context_size, self.context_seed = context_size, context_seed
        self._owner: str | None = None
        self._context: Context | None = None
        self._searcher = SearchEncoderWrapper(self)

    def index(self, corpus: Any, *, task_metadata: "TaskMetadata", hf_subset: str, **options: Any) -> None:
        """Draw the context from a corpus, and take it to be searched.

        Args:
            corpus: Rows of `id`, `text` and maybe `title`.
            task_metadata: The task.
            hf_subset: Its subset.
            options: What else mteb hands on.
        """
        rows = sample_rows(len(corpus), self.context_size, self.context_seed).tolist()
        documents = tuple(Document(str(row), _document_text(corpus[row])) for row in rows)
        self._owner = f"{task_metadata.name} {hf_subset}"
        self._context = ContextDraw(documents, self.context_seed).encoded(self.encoder)
        self._searcher.index(corpus, task_metadata=task_metadata, hf_subset=hf_subset, **options)

    def search(self, queries: Any, **options: Any) -> dict[str, dict[str, float]]:
        """The cosines of the nearest documents of each query.

        Args:
            queries: Rows of `id` and `text`.
            options: What else mteb hands on: the task, how many documents, which ones where a task reranks.
        """
        return self._searcher.search(queries, **options)

    def _context_of(self, owner: str, texts: list[str]) -> Context | None:
        if self._owner != owner:
            self._owner = owner
            self._context = sample_context(self.encoder, texts, self.context_size, self.context_seed)
        return self._context


def _document_text(row: dict[str, Any]) -> str:
    return f"{row.get('title') or ''} {row['text']}".strip()
