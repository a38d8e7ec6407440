"""Scores of a cross-encoder for what mining chose: a teacher of margins that reads the query and the text together."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embeddings.common.errors import InputError, OptionError, require
from embeddings.common.jobs import ShardedJob, load_shard, save_array
from embeddings.common.process import quiet_libraries
from embeddings.common.text import one_line
from embeddings.data.records import Record
from embeddings.data.table import StoredRow
from embeddings.inference.encoder import module_sha256
from embeddings.mining.mined_shards import read_shard
from embeddings.mining.search import Floats
from embeddings.models.backbone import quiet_transformers

BATCH_PAIRS = 32
# Heads that a checkpoint may have for scores of pairs; without one the library would draw a head at random.
_SCORING = ("ForSequenceClassification", "ForCausalLM")


class Reranker:
    """A cross-encoder of sentence-transformers, which scores a query and a text that it reads together.

    Scores are those of `CrossEncoder.predict`, after the model's own activation: logits, or their sigmoid.

    Args:
        model: A directory or Hub id, as `CrossEncoder` takes it.
        device: Where it runs; None for the GPU if there is one.

    Precision: the model's own dtype; scores are float32.
    Determinism: pairs are sorted by length into batches of `BATCH_PAIRS`, so the same pairs have the same scores.
    Raises:
        MissingExtraError: If sentence-transformers is not installed.
        InputError: If the model cannot be loaded.
        OptionError: If it does not give one score, or its weights have no head for scores.
    """

    def __init__(self, model: str, device: str | None = None) -> None:
        with quiet_libraries():
            library = require("sentence_transformers", "rerank")
        self.name = model
        try:
            with quiet_libraries(), quiet_transformers():
                self.model: Any = library.CrossEncoder(model, device=device)
        except (OSError, ValueError, RuntimeError) as error:
            what = f"cannot be loaded as a cross-encoder ({one_line(str(error), 120)})"
            raise InputError(model, what, "check the name and the network, or give a directory") from error
        head = next(iter(self.model.config.architectures or ()), "no known class")
        if len(self.model) == 1 and not head.endswith(_SCORING):
            rule = f"must be a cross-encoder, and its weights, of {head}, have no head for scores"
            raise OptionError("reranker", model, rule, "name one such as cross-encoder/ms-marco-MiniLM-L6-v2")
        if self.model.num_labels != 1:
            rule = f"must give one score for a pair, and gives {self.model.num_labels}"
            raise OptionError("reranker", model, rule, "name a model for ranking")

    @cached_property
    def fields(self) -> dict[str, Any]:
        """What decides its scores, as JSON types."""
        settings = {"activation": repr(self.model.activation_fn), "max_length": self.model.max_seq_length}
        return {
            "model_sha256": module_sha256(self.model, self.model.tokenizer, settings),
            "precision": str(self.model.dtype).removeprefix("torch."),
            "batch_pairs": BATCH_PAIRS,
        }

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Floats:
        """The scores of P pairs of a query and a text, (P,) float32; an `InputError` where one is not finite."""
        found = self.model.predict(list(pairs), batch_size=BATCH_PAIRS, show_progress_bar=False)
        score_P: Floats = np.asarray(found, np.float32)
        if not np.isfinite(score_P).all():
            query, text = pairs[int(np.flatnonzero(~np.isfinite(score_P))[0])]
            what = f"gives {query[:40]!r} with {text[:40]!r} a score that is not finite"
            raise InputError(self.name, what, "give a model whose weights and dtype are sound")
        return score_P


def scoring_job(folder: Path, reranker: Reranker, num_shards: int) -> ShardedJob:
    """The job that scores what shards of mining hold; each model has a folder of its own in `folder`."""
    fields = {"kind": "reranker's scores", **reranker.fields}
    return ShardedJob(folder / f"scores-{fields['model_sha256'][:12]}", fields, num_shards, stem="scores")


def score_shard(reranker: Reranker, rows: Sequence[StoredRow], mined: Path, path: Path) -> None:
    """Write the scores of the texts of some rows: of each row its positives, then the negatives that were mined."""
    negatives = read_shard(mined)["negatives"].to_pylist()
    pairs = [
        (row.query, text)
        for row, found in zip(rows, negatives, strict=True)
        for text in chain(row.positives, (item if isinstance(item, str) else item["text"] for item in found))
    ]
    save_array(path, reranker.scores(pairs))


def read_scores(path: Path, records: Sequence[Record], mined: pa.Table) -> pa.Array:
    """The scores of a shard, a list for each of its records with what was mined for them."""
    counts = [len(record.positives) for record in records]
    offsets = np.cumsum([0, *np.add(counts, pc.list_value_length(mined["negatives"]).to_pylist())])
    score_P = load_shard(path)
    if score_P.dtype != np.float32 or score_P.shape != (offsets[-1],):
        raise InputError(str(path), "is not the file that was written", "delete its folder and run again")
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(score_P))
