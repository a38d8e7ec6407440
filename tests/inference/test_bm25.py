import math
import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.inference import bm25
from embeddings.inference.bm25 import BM25, tokenizer, word_tokens
from tests.helpers.refusals import refused


def loop_scores(corpus, query, k1, b):
    documents = [Counter(text.split()) for text in corpus]
    mean_length = sum(sum(document.values()) for document in documents) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for token in query.split():
            frequency = sum(token in other for other in documents)
            idf = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
            norm = k1 * (1 - b + b * sum(document.values()) / mean_length)
            if token in document:
                score += idf * document[token] / (document[token] + norm)
        scores.append(score)
    return scores


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.0, 0.0), (1.2, 1.0)])
def test_scores_and_ranks_equal_a_loop_written_out(k1, b):
    generator = random.Random(0)
    texts = [" ".join(generator.choices("abcdefghij", k=generator.randrange(0, 12))) for _ in range(33)]
    queries = ["a", "a b c", "j j a", "a z", "z", ""]
    index_Qk, score_Qk = BM25(texts, str.split, k1, b).search(queries, top_k=7)
    assert index_Qk.shape == score_Qk.shape == (6, 7)
    assert (index_Qk.dtype, score_Qk.dtype) == (np.int64, np.float32)
    for query, index_k, score_k in zip(queries, index_Qk, score_Qk, strict=True):
        expected = loop_scores(texts, query, k1, b)
        np.testing.assert_allclose(score_k, [expected[row] for row in index_k], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(score_k, sorted(expected, reverse=True)[:7], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("longest", [60, 2])
def test_the_weights_are_those_of_bm25s_in_a_bounded_memory(longest, monkeypatch):
    import bm25s

    for name in ("_WEIGHED_TEXTS", "_COUNTED_TOKENS"):
        monkeypatch.setattr(bm25, name, 700)
    generator = np.random.default_rng(0)
    # Those of at most one word have less than one on average.
    texts = [" ".join(map(str, generator.zipf(1.3, size) % 5000)) for size in generator.integers(0, longest, 5000)]
    tracemalloc.start()
    try:
        found = BM25(texts, str.split)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    weight_VN, vocabulary = found._weight_VN, found._vocabulary
    peer = bm25s.BM25(method="lucene", k1=1.5, b=0.75, csc_backend="scipy")
    tokens = [[vocabulary[token] for token in text.split()] for text in texts]
    peer.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
    for name, found_n in (("data", weight_VN.data), ("indices", weight_VN.indices), ("indptr", weight_VN.indptr)):
        np.testing.assert_array_equal(found_n, peer.scores[name])
        assert found_n.itemsize == 4
    assert found.mean_length == np.mean([len(each) for each in tokens])
    # The weights by text and by token, the arrays' reserve, and each text's length and end. Lists of tokens need more.
    assert peak < 8 * weight_VN.nnz * 2.6 + 60 * len(texts) + 150 * len(vocabulary)


def test_a_search_copies_nothing_of_the_index():
    generator = np.random.default_rng(0)
    found = BM25([" ".join(map(str, generator.integers(0, 5000, 60))) for _ in range(3000)], str.split)
    tracemalloc.start()
    try:
        found.search(["1 2 3"], 10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * found._weight_VN.nnz


@pytest.mark.parametrize("num_scores", [1, 2, 9, 100])
def test_the_best_are_the_first_of_a_stable_sort_of_all(num_scores):
    generator = np.random.default_rng(0)
    for num_values in (1, 2, 5, 1000):
        score_N = generator.integers(0, num_values, num_scores).astype(np.float32)
        for k in range(1, num_scores + 1):
            expected = np.argsort(-score_N, kind="stable")[:k]
            np.testing.assert_array_equal(bm25.best_places(score_N, k), expected)


def test_equal_scores_keep_the_order_of_the_corpus_or_a_given_one():
    index = BM25(["x", "y", "x", "y", "x"], str.split)
    index_Qk, score_Qk = index.search(["y", "x", "z"], top_k=4)
    assert index_Qk.tolist() == [[1, 3, 0, 2], [0, 2, 4, 1], [0, 1, 2, 3]]
    assert (score_Qk[2] == 0).all()
    assert index.search(["x", "z"], 4, tie_order_N=np.array([4, 0, 3, 1, 2]))[0].tolist() == [
        [4, 0, 2, 3],
        [4, 0, 3, 1],
    ]


def test_a_small_corpus_no_query_and_texts_without_words_are_searched():
    index = BM25(["only one"])
    assert index.search(["one"], top_k=10)[0].tolist() == [[0]]
    assert index.search([], top_k=10)[0].shape == (0, 1)
    assert BM25(["", "..."]).search(["x", ""], top_k=2)[1].tolist() == [[0, 0], [0, 0]]


def loop_coverage(corpus, text, k1, b):
    """Scores of queries without repetitions, divided by the score of the document with itself."""
    found = [0.0]
    for row, document in enumerate(corpus):
        shared = " ".join(dict.fromkeys(text.split()))
        maximum = loop_scores(corpus, " ".join(dict.fromkeys(document.split())), k1, b)[row]
        if maximum > 0:
            found.append(loop_scores(corpus, shared, k1, b)[row] / maximum)
    return max(found)


@pytest.mark.parametrize("max_scores", [1, 1 << 24])
def test_coverage_equals_a_loop_and_is_one_for_a_text_within_another(max_scores, monkeypatch):
    monkeypatch.setattr(bm25, "_MAX_SCORES", max_scores)
    generator = random.Random(2)
    corpus = [" ".join(generator.choices("abcdefghijklmnop", k=generator.randrange(0, 9))) for _ in range(15)]
    texts = [" ".join(generator.choices("abcdefghijklmnopz", k=generator.randrange(0, 7))) for _ in range(20)]
    texts += ["", "z", corpus[3], corpus[4] + " z z z " + corpus[4]]
    index = BM25(corpus, str.split)
    expected = [loop_coverage(corpus, text, 1.5, 0.75) for text in texts]
    np.testing.assert_allclose(index.coverage(texts), expected, rtol=1e-5, atol=1e-6)
    assert corpus[3]
    assert corpus[4]
    assert index.coverage(texts)[-4:].tolist() == pytest.approx([0, 0, 1, 1], abs=1e-6)
    assert index.coverage([]).shape == (0,)
    assert BM25(["", "..."]).coverage(["x", ""]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("padSequence_to2", "pad sequenc 2 padsequence_to2"),
        ("HTTPServer XMLHttpRequest2D", "http server httpserver xml http request 2 d xmlhttprequest2d"),
        ("__init__ snake_case SCREAMING_CASE", "init snake case snake_cas scream case screaming_cas"),
        ("torch.nn.LSTMCell(x)", "torch nn lstm cell lstmcell x"),
        # Words outside ASCII are their first five letters, or pairs of characters.
        ("Größe_in_cm 東京都", "größe in cm 東京 京都"),
        # Stop words are removed; words of one or two letters are not stemmed.
        ("the computedValues of x", "comput valu computedvalu x"),
        ("ponies relational hopping OS us x1", "poni relat hop os us x 1 x1"),
        ("", ""),
        ("___ ...", ""),
    ],
)
def test_identifiers_are_split_into_stemmed_words_and_kept(text, tokens):
    assert word_tokens(text) == tokens.split()


@pytest.mark.parametrize(
    ("language", "text", "tokens"),
    [
        ("any", "the computedValues", "comput valu computedvalu"),
        ("english", "the computedValues", "comput valu computedvalu"),
        ("german", "Die Häuser_und die HÄUSERN", "die haus und die haus"),
        ("french", "continuellement continuée", "continuel continu"),
        ("none", "The Häuser x_1", "the häuser x 1"),
        # Vowel signs belong to their word.
        ("none", "हिन्दी में", "हिन्दी में"),
        ("none", "東京都 と iPhone15を", "東京 京都 と iphone15 を"),
        ("none", "ภาษา", "ภา าษ ษา"),
        ("none", "학교에서 책", "학교 교에 에서 책"),
        # A letter and its mark, decomposed.
        ("none", "Cafe\u0301", "caf\u00e9"),
        ("none", "...", ""),
    ],
)
def test_other_languages_have_stems_words_or_pairs_of_characters(language, text, tokens):
    assert tokenizer(language)(text) == tokens.split()


def test_tokens_of_any_language_are_stems_prefixes_and_pairs():
    assert word_tokens("The runners were running") == ["runner", "were", "run"]
    assert word_tokens("getFileName") == ["get", "file", "name", "getfilenam"]
    # The inflections of one Russian word are one token, whatever stands beside them.
    assert len({*word_tokens("правительство правительства правительством")}) == 1
    assert word_tokens("東京都") == ["東京", "京都"]
    assert {*word_tokens("학교에서")} & {*word_tokens("학교는")} == {"학교"}
    assert word_tokens("running – naïve") == ["run", "naïve"]


def test_an_unknown_language_is_refused():
    refused(
        OptionError,
        "language must be any, none or a language that PyStemmer stems, got 'klingon'",
        tokenizer,
        "klingon",
    )


def test_an_empty_corpus_no_result_and_a_text_instead_of_a_list_are_refused():
    refused(OptionError, "corpus must have at least one text", BM25, [])
    refused(OptionError, "top_k must be >= 1, got 0", BM25(["x"]).search, ["x"], top_k=0)
    refused(OptionError, "queries must be a list of texts, got 'x y'", BM25(["x"]).search, "x y", top_k=1)
    refused(OptionError, "corpus must be a list of texts, got 'x y'", BM25, "x y")
