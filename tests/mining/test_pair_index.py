"""Distinct documents are numbered by first appearance, and every positive has its document."""

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.common.io import text_hash
from embeddings.data.sources import SourceConfig
from embeddings.data.store import open_cached
from embeddings.mining import pair_index
from embeddings.mining.pair_index import distinct, find, index_pairs
from tests.data.rows import write_jsonl
from tests.helpers.refusals import refused

ROWS = [
    {"query": "q0", "positive": "a"},
    {"query": "q1", "positive": ["b", " a ", "b"]},
    {"query": "q2", "positive": "c"},
    {"query": "q0", "positive": ["b", "q1"]},
]
CORPUS = [{"text": "c"}, {"title": "T", "text": "d"}, {"text": " "}, {"text": "a\u0000"}, {"text": "d"}, {"text": "b "}]


def source(folder, rows=ROWS, **options):
    return open_cached(
        SourceConfig("pairs", str(write_jsonl(folder / "pairs.jsonl", rows)), **options), folder / "cache"
    )


def reference(rows, corpus):
    """The documents in order of first appearance, and each row's positives, in plain Python."""
    documents, positives = {}, []
    for row in rows:
        texts = row["positive"] if isinstance(row["positive"], list) else [row["positive"]]
        distinct = dict.fromkeys(text.strip() for text in texts)
        positives.append([documents.setdefault(text, len(documents)) for text in distinct])
    for document in corpus:
        text = " ".join(part for part in (document.get("title", ""), document["text"]) if part).strip()
        if text and "\x00" not in text:
            documents.setdefault(text, len(documents))
    return list(documents), positives


@pytest.mark.parametrize("negatives", [None, [["x", "c "], [], ["a", "y", "x"], ["z"]]])
@pytest.mark.parametrize("corpus", [[], CORPUS])
@pytest.mark.parametrize("rows_at_once", [1, 3, 1 << 16])
def test_the_index_equals_a_loop_over_the_texts(negatives, corpus, rows_at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(pair_index, "_TEXT_ROWS", rows_at_once)
    given = negatives or [[]] * 4
    rows = [{**row, "negatives": texts} for row, texts in zip(ROWS, given, strict=True)]
    path = write_jsonl(tmp_path / "corpus.jsonl", corpus) if corpus else None
    index = index_pairs(source(tmp_path, rows), tmp_path / "index", path, negatives=negatives is not None)
    documents, positives = reference(ROWS, [{"text": text} for texts in given for text in texts] + corpus)
    assert (index.num_queries, index.num_documents) == (4, len(documents))
    assert [index.positives(row).tolist() for row in range(4)] == positives
    assert [text.strip() for text in index.document_texts(range(len(documents)))] == documents
    assert index.source.table.queries(range(4)) == [row["query"] for row in ROWS]
    assert index.document_hashes.tolist() == [text_hash(text) for text in documents]
    if negatives is not None:
        found = [index.negative_rows[slice(*index.negative_offsets[row : row + 2])].tolist() for row in range(4)]
        assert found == [[documents.index(text.strip()) for text in texts] for texts in given]


def test_indices_with_and_without_negatives_are_distinguished(tmp_path):
    pairs = source(tmp_path, [{**row, "negatives": ["n"]} for row in ROWS])
    index = index_pairs(pairs, tmp_path / "with", negatives=True)
    refused(InputError, "field 'negatives' is True, expected None", index_pairs, pairs, tmp_path / "with")
    without = index_pairs(pairs, tmp_path / "without")
    refused(InputError, "'negatives' is None, expected True", index_pairs, pairs, tmp_path / "without", negatives=True)
    assert index.key != without.key
    assert without.negative_rows is None


def test_a_source_without_negatives_is_refused_and_leaves_no_files(tmp_path):
    with pytest.raises(InputError, match="no row has negatives; leave out the option negatives"):
        index_pairs(source(tmp_path), tmp_path / "index", negatives=True)
    assert not (tmp_path / "index").exists()


def test_hashes_are_numbered_by_first_appearance_and_found():
    generator = np.random.default_rng(0)
    hash_E = generator.integers(-(2**63), 2**63 - 1, 40)[generator.integers(0, 40, 300)]
    numbers: dict[int, int] = {}
    number_E = [numbers.setdefault(value, len(numbers)) for value in hash_E.tolist()]
    hash_D, entry_D, found_E = distinct(hash_E)
    assert 30 < len(numbers) <= 40
    assert (hash_D.tolist(), found_E.tolist()) == (list(numbers), number_E)
    assert entry_D.tolist() == [number_E.index(number) for number in range(len(numbers))]
    missing = np.array([0, 2**63 - 1, -(2**63)])
    assert find(np.append(hash_D, missing), hash_E).tolist() == [*entry_D.tolist(), -1, -1, -1]


@pytest.mark.parametrize("rows", [range(4), range(1, 2), range(2, 4)])
def test_known_positives_are_those_of_all_rows_with_the_same_query(rows, tmp_path):
    index = index_pairs(source(tmp_path, [*ROWS, {"query": " q0 ", "positive": "z"}]), tmp_path / "index")
    known = index.known_positives(np.arange(rows.start, rows.stop))
    found = [known.row_P[known.group_P == group].tolist() for group in known.group_Q.tolist()]
    # Documents: a 0, b 1, c 2, q1 3, z 4.
    assert found == [[[0, 1, 3, 4], [0, 1], [2], [0, 1, 3, 4]][row] for row in rows]
    assert len(known.row_P) == sum(map(len, {tuple(rows) for rows in found}))


TITLED = [
    {"title": "T", "text": "a"},
    {"title": "", "text": "c"},
    {"title": "U", "text": " a\n"},
    {"title": "q1", "text": " "},
    {"title": "V", "text": "b"},
    {"title": "V", "text": "b"},
    {"title": "W", "text": "nobody asks"},
    {"text": "nobody asks"},
]


def test_a_text_with_and_without_its_title_are_both_known_positives(tmp_path):
    rows = [*ROWS, {"query": "titled", "positive": "V b"}]
    index = index_pairs(source(tmp_path, rows), tmp_path / "index", write_jsonl(tmp_path / "corpus.jsonl", TITLED))
    known = index.known_positives(np.arange(5))
    found = [
        {text.strip() for text in index.document_texts(known.row_P[known.group_P == group])}
        for group in known.group_Q.tolist()
    ]
    assert found == [
        {"a", "b", "q1", "T a", "U  a", "V b"},
        {"b", "a", "T a", "U  a", "V b"},
        {"c"},
        {"a", "b", "q1", "T a", "U  a", "V b"},
        {"V b", "b"},
    ]
    assert len(np.unique(np.stack([known.group_P, known.row_P]), axis=1).T) == len(known.row_P)


def test_a_finished_index_is_opened_and_another_input_is_refused(tmp_path, monkeypatch):
    pairs = source(tmp_path)
    index_pairs(pairs, tmp_path / "index")
    monkeypatch.setattr(pair_index, "_index", lambda *_: pytest.fail("made again"))
    assert index_pairs(pairs, tmp_path / "index").num_documents == 4
    with pytest.raises(InputError, match="field 'corpus_sha256'"):
        index_pairs(pairs, tmp_path / "index", write_jsonl(tmp_path / "corpus.jsonl", CORPUS))
    (tmp_path / "other").mkdir()
    refused(InputError, "field 'source_key'", index_pairs, source(tmp_path / "other", ROWS[:2]), tmp_path / "index")


@pytest.mark.parametrize("content", ['{"text": 3}\n', '{"txt": "a"}\n', '{"text": "a"'])
def test_an_invalid_corpus_leaves_no_files(content, tmp_path):
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(InputError, match=r"corpus\.jsonl:1"):
        index_pairs(source(tmp_path), tmp_path / "index", tmp_path / "corpus.jsonl")
    assert not (tmp_path / "index").exists()
