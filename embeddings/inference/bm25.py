"""BM25, the lexical baseline for embedding models, as a sparse matrix of scipy; PyStemmer stems the words."""

import json
import math
import re
import sys
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import Stemmer
from scipy import sparse

from embeddings.common.errors import InputError, OptionError, require_minimum
from embeddings.common.io import check_file, load_array, write_text
from embeddings.common.process import trim_malloc
from embeddings.common.progress import progress_bar
from embeddings.common.text import canonical
from embeddings.inference.encoder import require_list

Tokenize = Callable[[str], list[str]]

# Lucene's English list.
# fmt: off
_STOP_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
))
# fmt: on
_ASCII_WORD = re.compile(r"\w+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_STEMMER = Stemmer.Stemmer("porter")
_MAX_SCORES = 1 << 24
# Texts whose weights are computed at a time, and tokens that are counted at a time.
_WEIGHED_TEXTS, _COUNTED_TOKENS = 1 << 14, 1 << 22
# Longer words outside ASCII are compared by their first letters, which most inflections leave, in any language.
_STEM_LENGTH = 5
# Words whose tokens are cached, some 20 MB.
_CACHED_WORDS = 1 << 16
# The files of an index: the arrays of a sparse matrix, and the tokens of its rows.
_ARRAYS, _VOCABULARY = ("data", "indices", "indptr"), "vocabulary.json"


def word_tokens(text: str) -> list[str]:
    """The tokens of a text in any language.

    Words in ASCII are lower-case stems without English stop words, split at identifiers' parts, which come first. Other
    words are their first five letters. Where a script has no spaces between words, and in Korean, tokens are pairs of
    adjacent characters.

    nDCG@10 on held-out packages of the docstring corpus is 0.278 for full words, 0.497 with identifiers split, 0.547
    without stop words, 0.576 with stems, and 0.573 with full identifiers too, which raises held-out functions of the
    training packages from 0.766 to 0.779.
    """
    text = canonical(text)
    words = _ASCII_WORD if text.isascii() else _words_of_any_script()
    return list(chain.from_iterable(map(_word_tokens, words.findall(text))))


@lru_cache(_CACHED_WORDS)
def _word_tokens(word: str) -> list[str]:
    """The tokens of a word, in a list that no caller changes."""
    if not word.isascii():
        return [token[:_STEM_LENGTH] for token in tokenizer(NO_LANGUAGE)(word)]
    parts = _PART.findall(word)
    tokens = [part.lower() for part in parts]
    if len(parts) > 1:
        tokens.append(word.lower())
    kept = [token for token in tokens if token not in _STOP_WORDS]
    return [_STEMMER.stemWord(token) if len(token) > 2 else token for token in kept]


ANY_LANGUAGE, NO_LANGUAGE = "any", "none"
# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# Lucene, too, splits Hangul into pairs: Korean words have particles without a space.
_PAIRED_RUN = re.compile(f"([{UNSPACED}\uac00-\ud7a3]+)")


@cache
def tokenizer(language: str = ANY_LANGUAGE) -> Tokenize:
    """The function that splits texts of a language into tokens: for `any` and `english`, `word_tokens`.

    For another language of PyStemmer, tokens are the stems of lower-case words; for `none`, the words as they are. A
    word is a sequence of letters, digits and marks of any script. Where a script has no spaces between words, and in
    Korean, tokens are pairs of adjacent characters.
    """
    if language in (ANY_LANGUAGE, "english"):
        return word_tokens
    if language != NO_LANGUAGE and language not in Stemmer.algorithms():
        known = ", ".join([ANY_LANGUAGE, NO_LANGUAGE, *Stemmer.algorithms()])
        rule = "must be any, none or a language that PyStemmer stems"
        raise OptionError("language", language, rule, f"known: {known}")
    stem = str if language == NO_LANGUAGE else Stemmer.Stemmer(language).stemWord

    @lru_cache(_CACHED_WORDS)
    def tokens_of(word: str) -> list[str]:
        tokens: list[str] = []
        # Every second part is a run of such a script.
        for number, part in enumerate(_PAIRED_RUN.split(word)):
            if number % 2 and len(part) > 1:
                tokens += [first + second for first, second in pairwise(part)]
            elif number % 2:
                tokens.append(part)
            else:
                tokens += [stem(piece) for piece in part.split("_") if piece]
        return tokens

    find_words = _words_of_any_script().findall
    return lambda text: list(chain.from_iterable(map(tokens_of, find_words(canonical(text).lower()))))


@cache
def _words_of_any_script() -> re.Pattern[str]:
    # `\w` lacks marks, such as the vowel signs of Hindi and Thai.
    characters = map(chr, range(sys.maxunicode + 1))
    marks = "".join(character for character in characters if unicodedata.category(character)[0] == "M")
    return re.compile(f"[\\w{marks}]+")


class BM25:
    """An index that ranks texts by BM25 as Lucene computes it.

    score(q, d) = sum over the query's tokens t of idf(t) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|)),
    idf(t) = ln(1 + (n - df + 0.5) / (df + 0.5)). A token that the query repeats counts each time.

    Args:
        corpus: Texts to rank, at least one.
        tokenize: Splits texts and queries into tokens.
        k1: Saturation of repeated words. Lucene's default is 1.2; published baselines use 1.5.
        b: Penalty for long texts, from 0 (none) to 1.

    Shape/precision: weights and sums in float32.
    Source: Robertson and Zaragoza 2009, Eq. 3.15, with Lucene's idf; weights computed once, as in bm25s (Lù 2024,
        arXiv:2407.03618). Differs: exact lengths, where Lucene rounds them.
    """

    def __init__(
        self, corpus: Iterable[str], tokenize: Tokenize = word_tokens, k1: float = 1.5, b: float = 0.75
    ) -> None:
        require_list("corpus", corpus)
        self._tokenize = tokenize
        self._vocabulary: dict[str, int] = {}
        # Of each text its tokens and their frequencies, in arrays: 8 bytes an entry, which become the weights.
        token_E, frequency_E, end_N, length_N = array("i"), array("f"), array("q", [0]), array("q")
        for text in progress_bar(None, "indexing words", "text", iterable=corpus):
            tokens = [self._vocabulary.setdefault(token, len(self._vocabulary)) for token in self._tokenize(text)]
            frequencies = Counter(tokens)
            token_E.extend(frequencies)
            frequency_E.extend(frequencies.values())
            end_N.append(len(token_E))
            length_N.append(len(tokens))
        if not length_N:
            raise OptionError("corpus", 0, "must have at least one text", "check the corpus file")
        row_E, weight_E = np.frombuffer(token_E, np.int32), np.frombuffer(frequency_E, np.float32)
        starts, lengths = np.frombuffer(end_N, np.int64), np.frombuffer(length_N, np.int64)
        self.mean_length = float(lengths.mean())
        shape = (max(1, len(self._vocabulary)), len(lengths))
        df_V = np.zeros(shape[0], np.int64)
        for first in range(0, len(row_E), _COUNTED_TOKENS):
            # It converts what it counts to 64 bits.
            df_V += np.bincount(row_E[first : first + _COUNTED_TOKENS], minlength=shape[0])
        idf_V = np.log1p((len(lengths) - df_V + 0.5) / (df_V + 0.5)).astype(np.float32)
        for first in range(0, len(lengths), _WEIGHED_TEXTS):
            last = min(first + _WEIGHED_TEXTS, len(lengths))
            part, sizes = slice(starts[first], starts[last]), np.diff(starts[first : last + 1])
            share_n = k1 * ((1 - b) + b * lengths[first:last] / (self.mean_length or 1))
            weight_E[part] *= idf_V[row_E[part]] / (weight_E[part] + np.repeat(share_n, sizes))
        # What the growing arrays left behind: a gigabyte for a million texts of 125 words.
        trim_malloc()
        # With ends in 64 bits the rows would be in 64 bits too.
        ends = starts.astype(sparse.get_index_dtype(maxval=len(row_E)))
        self._weight_VN = sparse.csr_array(sparse.csc_array((weight_E, row_E, ends), shape=shape))

    def idf(self, token: str) -> float:
        """The inverse document frequency of a token, which need not be in the corpus."""
        row, starts = self._vocabulary.get(token), self._weight_VN.indptr
        df = 0 if row is None else int(starts[row + 1] - starts[row])
        return math.log1p((self.num_texts - df + 0.5) / (df + 0.5))

    @property
    def num_texts(self) -> int:
        """Number of texts of the corpus."""
        return int(self._weight_VN.shape[1])

    @property
    def num_tokens(self) -> int:
        """Number of different tokens in the corpus."""
        return len(self._vocabulary)

    def write(self, folder: Path) -> None:
        """Write the index into a folder: the weights of tokens in texts as three arrays, and the vocabulary."""
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self._weight_VN, name))
        write_text(folder / _VOCABULARY, json.dumps([*self._vocabulary]))

    @classmethod
    def read(cls, folder: Path, num_texts: int, tokenize: Tokenize, hint: str) -> Self:
        """The index that `write` wrote, for texts tokenised by the same function; its arrays are mapped into memory.

        The folder has a manifest, whose hashes are compared. An `InputError` for a missing or damaged file ends with
        `hint`.
        """
        path, index = folder / _VOCABULARY, cls.__new__(cls)
        check_file(path, hint)
        try:
            vocabulary = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            raise InputError(str(path), "is missing or damaged", hint) from None
        arrays = tuple(load_array(folder / f"{name}.npy", hint, mapped=True) for name in _ARRAYS)
        index._tokenize, index._vocabulary = tokenize, {token: row for row, token in enumerate(vocabulary)}
        index._weight_VN = sparse.csr_array(arrays, shape=(max(1, len(vocabulary)), num_texts))
        return index

    def scores(self, queries: Sequence[str]) -> npt.NDArray[np.float32]:
        """The scores of all texts for each query, (Q, N) float32."""
        score_QN: npt.NDArray[np.float32] = (self._counts(queries) @ self._weight_VN).toarray()
        return score_QN

    def search(
        self, queries: Sequence[str], top_k: int, tie_order_N: npt.NDArray[np.int64] | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The rows of the `top_k` best texts of each query, (Q, k) int64, best first, and their scores, (Q, k) float32.

        Equal scores, such as the zeros of texts that share no token with the query, are in the order of the rows
        `tie_order_N`, by default in corpus order.
        """
        require_minimum("top_k", top_k, 1, "10 is what nDCG@10 needs")
        require_list("queries", queries)
        num_texts = self.num_texts
        k = min(top_k, num_texts)
        index_Qk, score_Qk = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        step = max(1, _MAX_SCORES // num_texts)
        for start in range(0, len(queries), step):
            for row, score_N in enumerate(self.scores(queries[start : start + step]), start):
                index_Qk[row] = best_places(score_N, k, tie_order_N)
                score_Qk[row] = score_N[index_Qk[row]]
        return index_Qk, score_Qk

    def coverage(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """How much of any one corpus text each text covers, at most, (Q,) float32, from 0 to 1.

        This is the BM25 score of a corpus text for the given text, divided by its score for itself, maximised over the
        corpus. Each token counts once.
        """
        present_QV = self._counts(texts)
        present_QV.data[:] = 1
        best_Q = np.zeros(len(texts), dtype=np.float32)
        step = max(1, _MAX_SCORES // self._weight_VN.shape[1])
        for start in range(0, len(texts), step):
            shares = present_QV[start : start + step] @ self._share_VN
            best_Q[start : start + step] = shares.max(axis=1).toarray().ravel()
        return np.minimum(best_Q, 1)

    @cached_property
    def _share_VN(self) -> sparse.csr_array:
        """The weight of each token in each corpus text, divided by the sum of that text's weights."""
        total_N = np.asarray(self._weight_VN.sum(axis=0), dtype=np.float32).ravel()
        scale_N = np.divide(1, total_N, out=np.zeros_like(total_N), where=total_N > 0)
        return sparse.csr_array(self._weight_VN @ sparse.diags_array(scale_N))

    def _counts(self, texts: Sequence[str]) -> sparse.csr_array:
        """Counts of the vocabulary's tokens in texts, (n, V) float32; other tokens are ignored."""
        columns: list[int] = []
        ends = [0]
        for text in texts:
            known = map(self._vocabulary.get, self._tokenize(text))
            columns += [column for column in known if column is not None]
            ends.append(len(columns))
        ones, shape = np.ones(len(columns), dtype=np.float32), (len(texts), self._weight_VN.shape[0])
        # With other integers each product would convert those of the index, which takes longer than the product.
        kind = self._weight_VN.indices.dtype
        counts = sparse.csr_array((ones, np.array(columns, kind), np.array(ends, kind)), shape=shape)
        counts.sum_duplicates()
        return counts


def best_places(
    score_N: npt.NDArray[Any], k: int, order_N: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """The places of the k largest scores, best first; equal ones in the order `order_N`, by default that of places."""
    ordered_N = score_N if order_N is None else score_N[order_N]
    least = np.partition(ordered_N, -k)[-k]
    above = np.flatnonzero(ordered_N > least)
    equal = np.flatnonzero(ordered_N == least)[: k - len(above)]
    best_k = np.concatenate([above[np.argsort(-ordered_N[above], kind="stable")], equal])
    return best_k if order_N is None else order_N[best_k]
