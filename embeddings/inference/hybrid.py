"""Hybrid search: dense scores and BM25 scores fused, over the whole corpus or over the best of both lists."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import Stemmer
import torch

from embeddings.common.errors import InputError, OptionError, program
from embeddings.common.io import MANIFEST, check_file_manifest, file_hash, read_json_or_empty
from embeddings.common.own_folder import replaced_folder
from embeddings.inference.bm25 import ANY_LANGUAGE, BM25, best_places, tokenizer
from embeddings.inference.search import QUERY_TILE, CorpusSearch, Hit, NearestRows, TopK, require_top_k
from embeddings.inference.vector_folder import DOCUMENT_TILE, VectorFolder

Fusion = Literal["zscore", "minmax", "rrf"]
# Share of BM25 in a fused score.
WEIGHT = 0.2
# The constant of reciprocal ranks.
_RANK_OFFSET = 60
# Documents of each list that are fused, unless more are asked for.
_DEPTH = 100
# Scores of a block of queries in memory, per side.
_MAX_SCORES = 1 << 24
# A standard deviation below this fraction of the largest score is rounding.
_ROUNDING = 1e-5
# Folder of the BM25 index, in a folder of vectors, and the version of `word_tokens` in it.
WORDS_FOLDER, _TOKEN_RULES = "words", "2"

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Tiles = Iterable[npt.NDArray[np.float32]]


@dataclass(frozen=True)
class FusionRule:
    """How the dense scores and the BM25 scores of a query become one score per document.

    `zscore`: (1 - w) (s - mean) / std of the dense scores + w (s - mean) / std of the BM25 scores, with mean and
    standard deviation over all documents of the corpus. A side whose scores are all equal counts 0 for each document.

    `minmax`: the same with (s - min) / (max - min) over the best documents of each list: 100 of them, or twice the
    requested number. A document that a list lacks, or that shares no token with the query, counts 0 there.

    `rrf`: the sum of 1 / (60 + rank) over these lists, without a weight.

    Args:
        fusion: The name of the rule.
        weight: The weight w of BM25, from 0 (dense scores only) to 1 (BM25 only).

    Source: Bruch et al. 2023, arXiv:2210.11934 (convex combinations); Cormack et al. 2009 (reciprocal ranks).
    """

    fusion: Fusion = "zscore"
    weight: float = WEIGHT

    @classmethod
    def of(cls, fusion: Fusion | None = None, weight: float | None = None, compares_all: bool = True) -> Self:
        """The rule of two options; without a name it is `zscore` where all documents are scored, else `minmax`."""
        if fusion is None:
            fusion = "zscore" if compares_all else "minmax"
        if fusion not in get_args(Fusion):
            raise OptionError("fusion", fusion, f"must be one of {', '.join(get_args(Fusion))}", "leave it out")
        if fusion == "zscore" and not compares_all:
            rule = "needs the scores of all documents, which an index and binary vectors do not give"
            raise OptionError("fusion", fusion, rule, "use minmax or rrf")
        if weight is None:
            return cls(fusion)
        if fusion == "rrf":
            raise OptionError("hybrid_weight", weight, "has no effect on reciprocal ranks", "leave it out")
        if not 0 <= weight <= 1:
            hint = f"0 is the dense search, 1 is BM25, {WEIGHT} the default"
            raise OptionError("hybrid_weight", weight, "must be from 0 to 1", hint)
        return cls(fusion, weight)


def fused_top_k(
    queries: Sequence[str],
    query_QD: npt.NDArray[np.float32],
    words: BM25,
    top_k: int,
    rules: Sequence[FusionRule],
    *,
    tiles: Callable[[], Tiles],
    nearest: NearestRows,
    device: str | torch.device = "cpu",
    tie_order_N: Rows | None = None,
) -> list[TopK]:
    """The `top_k` documents with the largest fused scores for each query, by each rule; equal scores by `tie_order_N`.

    Dense scores are inner products with `query_QD`. `rules` are weights of one fusion, for all of which the documents
    are scored once: for `zscore` with `tiles`, which returns all vectors once per block of queries, otherwise with
    `nearest`, the best documents by dense score. `tie_order_N` has the rows of all documents; None for their order.

    Shape/precision: both scores in float32, sums and fused scores in float64; 64 MiB of scores of each side at once,
        or one query.
    """
    require_top_k(top_k)
    (fusion,) = {rule.fusion for rule in rules}
    if fusion != "zscore":
        depth = max(_DEPTH, 2 * top_k)
        rank_N = None if tie_order_N is None else np.argsort(tie_order_N)
        index_QK, score_QK = words.search(queries, depth, tie_order_N)
        dense = nearest(query_QD, depth)
        return [fuse_lists(dense, TopK(score_QK, index_QK), top_k, rule, rank_N) for rule in rules]
    num_documents = words.num_texts
    shape = len(queries), min(top_k, num_documents)
    found = [TopK(np.empty(shape, np.float32), np.empty(shape, np.int64)) for _ in rules]
    step = max(1, min(QUERY_TILE, _MAX_SCORES // num_documents))
    for start in range(0, len(queries), step):
        dense_QN = _dense_scores(query_QD[start : start + step], tiles(), num_documents, device)
        words_QN = words.scores(queries[start : start + step])
        for query, (dense_N, words_N) in enumerate(zip(dense_QN, words_QN, strict=True), start):
            dense_score_N, words_score_N = _standardised(dense_N), _standardised(words_N)
            for rule, best in zip(rules, found, strict=True):
                score_N = (1 - rule.weight) * dense_score_N + rule.weight * words_score_N
                row_K = best_places(score_N, shape[1], tie_order_N)
                best.score_QK[query], best.index_QK[query] = score_N[row_K], row_K
    return found


def fuse_lists(dense: TopK, words: TopK, top_k: int, rule: FusionRule, rank_N: Rows | None = None) -> TopK:
    """The documents with the largest fused scores of two lists per query, by `minmax` or `rrf`.

    Equal scores are in the order of `rank_N`, by default that of the rows; row -1 and score -inf where there are fewer.
    """
    best = TopK(
        np.full((len(dense.index_QK), top_k), -np.inf, np.float32), np.full((len(dense.index_QK), top_k), -1, np.int64)
    )
    for query in range(len(best.index_QK)):
        fused: dict[int, float] = {}
        for (score_QK, index_QK), weight in ((dense, 1 - rule.weight), (words, rule.weight)):
            found_K = index_QK[query] >= 0
            row_K, score_K = index_QK[query][found_K], score_QK[query][found_K].astype(np.float64)
            if rule.fusion == "rrf":
                share_K = 1 / (_RANK_OFFSET + 1 + np.arange(len(row_K)))
            else:
                share_K = weight * _scaled(score_K)
            for row, score, share in zip(row_K.tolist(), score_K.tolist(), share_K.tolist(), strict=True):
                # A BM25 score of 0 is that of a document without a token of the query.
                if index_QK is dense.index_QK or score > 0:
                    fused[row] = fused.get(row, 0.0) + share
        row_C = np.array([*fused], np.int64)
        score_C = np.array([*fused.values()])
        kept_K = np.lexsort((row_C if rank_N is None else rank_N[row_C], -score_C))[:top_k]
        best.index_QK[query, : len(kept_K)], best.score_QK[query, : len(kept_K)] = row_C[kept_K], score_C[kept_K]
    return best


def _dense_scores(
    query_QD: npt.NDArray[np.float32], tiles: Tiles, num_documents: int, device: str | torch.device
) -> npt.NDArray[np.float32]:
    """The inner products of queries with all documents, (Q, N) float32."""
    queries = torch.from_numpy(np.ascontiguousarray(query_QD)).to(device)
    score_QN, start = np.empty((len(query_QD), num_documents), np.float32), 0
    for piece in tiles:
        for first in range(0, len(piece), DOCUMENT_TILE):
            # A copy: a memory-mapped tile is read-only, which torch does not support.
            tile_TD = torch.from_numpy(np.array(piece[first : first + DOCUMENT_TILE])).to(device)
            score_QN[:, start : start + len(tile_TD)] = (queries @ tile_TD.T).cpu().numpy()
            start += len(tile_TD)
    assert start == num_documents
    return score_QN


def _standardised(score_N: npt.NDArray[np.float32]) -> Floats:
    """(s - mean) / std, (N,); zeros if the scores are equal up to rounding."""
    values_N = score_N.astype(np.float64)
    centred_N = values_N - values_N.mean()
    deviation = float(np.sqrt(np.mean(centred_N**2)))
    is_constant = deviation <= _ROUNDING * np.abs(values_N).max()
    standardised_N: Floats = np.zeros_like(centred_N) if is_constant else centred_N / deviation
    return standardised_N


def _scaled(score_K: Floats) -> Floats:
    """(s - min) / (max - min), (K,); ones if all scores are equal."""
    width = float(np.ptp(score_K)) if len(score_K) else 0.0
    scaled_K: Floats = (score_K - score_K.min()) / width if width > 0 else np.ones_like(score_K)
    return scaled_K


def index_words(
    folder: VectorFolder, language: str = ANY_LANGUAGE, weight: float | None = None, index: BM25 | None = None
) -> BM25:
    """Build the BM25 index of a folder's documents, in its subfolder `words`; an existing one is replaced.

    Args:
        folder: Output of `encode_corpus`.
        language: Language of the documents and queries (see `bm25.tokenizer`).
        weight: Weight of BM25 in searches of the folder that name none; None for 0.2.
        index: The index of these texts, if there is one.
    """
    FusionRule.of(weight=weight)
    index = BM25(folder.texts(), tokenizer(language)) if index is None else index
    fields: dict[str, Any] = {**_expected(folder), "language": language, "num_documents": folder.num_documents}
    fields |= {} if weight is None else {"weight": weight}
    with replaced_folder(folder.path / WORDS_FOLDER, fields) as new:
        index.write(new)
    return index


def open_words(folder: VectorFolder, language: str | None = None) -> BM25:
    """The index that `index_words` wrote for a folder, mapped into memory; its hashes are checked.

    Args:
        folder: Output of `encode_corpus`.
        language: The language that the index must have; None for any.

    Raises:
        InputError: If there is no index, or one of other vectors, another language or other bytes.
    """
    path = folder.path / WORDS_FOLDER
    chosen = f" --language {language}" if language is not None else ""
    hint = f"make it with {program()} index --hybrid{chosen} --vectors {shlex.quote(str(folder.path))}"
    if not (path / MANIFEST).is_file():
        raise InputError(str(path), "there is no BM25 index of these vectors", hint)
    expected = _expected(folder) if language is None else {**_expected(folder), "language": language}
    fields = check_file_manifest(path / MANIFEST, expected, hint)
    return BM25.read(path, fields.integer("num_documents", minimum=1), tokenizer(fields["language"]), hint)


def _expected(folder: VectorFolder) -> dict[str, str]:
    # Another release of the stemmer, or of the rules, may give queries other tokens.
    return {
        "kind": "words",
        "vectors_xxh3_128": file_hash(folder.path / MANIFEST),
        "stemmer": Stemmer.version(),
        "token_rules": _TOKEN_RULES,
    }


class HybridSearch:
    """A corpus that is searched by vectors and by BM25 at once.

    Args:
        searched: The corpus with its vectors. A folder must have a BM25 index (`index_words`); for a file it is built.
        weight: Weight of BM25, from 0 to 1; None for that of the folder's index, or 0.2.
        fusion: How scores are fused (see `FusionRule`); None for `zscore`, or `minmax` with an index or binary vectors.
        language: Language of the texts (see `bm25.tokenizer`); None for that of the folder's index, or `any`.
    """

    def __init__(
        self,
        searched: CorpusSearch,
        *,
        weight: float | None = None,
        fusion: Fusion | None = None,
        language: str | None = None,
    ) -> None:
        if searched.folder is not None:
            self._words = open_words(searched.folder, language)
            if weight is None and fusion != "rrf":
                weight = read_json_or_empty(searched.folder.path / WORDS_FOLDER / MANIFEST).get("weight")
        else:
            self._words = BM25(searched.texts(), tokenizer(ANY_LANGUAGE if language is None else language))
        self.rule = FusionRule.of(fusion, weight, searched.compares_all)
        self._searched = searched

    def search(self, queries: Sequence[str], top_k: int = 10) -> list[list[Hit]]:
        """At most `top_k` documents with the largest fused scores for each query, best first."""
        searched = self._searched
        (best,) = fused_top_k(
            queries,
            searched.query_vectors(queries),
            self._words,
            top_k,
            [self.rule],
            tiles=searched.tiles,
            nearest=searched.nearest,
            device=searched.encoder.device,
        )
        return searched.hits(best)
