"""A shard's negatives equal a loop over all documents and teachers, and the report sums up the shards."""

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.mining.mined_shards import (
    ShardMiner,
    read_shard,
)
from embeddings.mining.negatives import NegativeRules
from embeddings.mining.pair_index import index_pairs
from embeddings.mining.pair_vectors import encode_pairs
from embeddings.mining.search import ExactSearch
from tests.helpers.refusals import refused
from tests.mining.pair_sources import source
from tests.mining.teachers import Teacher, know_teachers, unit

ROWS = [
    {
        "query": f"t{row % 4} question {row % 17}",
        "positive": [f"t{row % 4} answer {row}", f"t{row % 4} answer {row % 9}"],
    }
    for row in range(20)
]


@pytest.fixture
def world(tmp_path, monkeypatch):
    know_teachers(monkeypatch)
    pairs = source(tmp_path, [*ROWS, {"query": "t1 answer 5", "positive": "t1 answer 1"}])
    index = index_pairs(pairs, tmp_path / "index")

    def miner(rules, *teachers):
        vectors = [encode_pairs(t, pairs, tmp_path / t.name, index=index, shard_size=6) for t in teachers]
        return ShardMiner(index, vectors, [ExactSearch(made.document_shards) for made in vectors], rules)

    return index, miner


def loop(index, teachers, rules):
    """The negatives of all queries by a loop over all documents, and the scores of all positives."""
    documents = index.document_texts(range(index.num_documents))
    queries = index.source.table.queries(range(index.num_queries))
    scores = [
        np.einsum("qd,nd->qn", *(unit(t.encode(texts)).astype(np.float64) for texts in (queries, documents)))
        for t in teachers
    ]
    mined, positive_scores = [], []
    for row, query in enumerate(queries):
        own = index.positives(row).tolist()
        known = {d for other, text in enumerate(queries) if text == query for d in index.positives(other).tolist()}
        usable = [d for d in range(len(documents)) if d not in known and documents[d] != query]
        usable.sort(key=lambda d: -sum(score[row, d] for score in scores))
        lowest = [min(score[row, d] for d in own) for score in scores]
        mined.append(
            [
                d
                for d in usable[rules.first_rank - 1 : rules.last_rank]
                if all(s[row, d] < p - abs(p) * (1 - rules.margin) for s, p in zip(scores, lowest, strict=True))
            ][: rules.num_negatives]
        )
        positive_scores += [np.mean([score[row, d] for score in scores]) for d in own]
    return mined, positive_scores


@pytest.mark.parametrize("names", [["one"], ["one", "two", "three"]])
def test_a_shards_negatives_equal_a_loop_over_all_documents(names, world):
    index, miner = world
    teachers = [Teacher(name, spread=0.5 + place / 4) for place, name in enumerate(names)]
    rules = NegativeRules(num_negatives=4, margin=0.9, first_rank=2, last_rank=100)
    mined = [miner(rules, *teachers).mine(range(first, min(first + 6, 21))) for first in range(0, 21, 6)]
    found = [[d for d in row if d >= 0] for shard in mined for row in shard.negatives.row_QN.tolist()]
    expected, positive_scores = loop(index, teachers, rules)
    assert found == expected
    assert sum(map(len, found)) > 20
    np.testing.assert_allclose(np.concatenate([s.positive_score_P for s in mined]), positive_scores, atol=1e-5)
    for shard in mined:
        assert shard.num_candidates == shard.negatives.num_left + sum(shard.negatives.removed.values())


def test_a_query_among_its_own_positives_still_gets_all_ranks(world):
    index, miner = world
    rules = NegativeRules(num_negatives=12, margin=None, last_rank=12)
    mined = miner(rules, Teacher(spread=0.1)).mine(range(12, 18))
    assert (mined.negatives.row_QN >= 0).all()
    assert mined.negatives.removed["own_positive"] > 6
    assert mined.num_candidates < 6 * index.num_documents


@pytest.mark.parametrize("content", [None, b"", b"no parquet"])
def test_a_damaged_shard_is_named(content, tmp_path):
    path = tmp_path / "mined-00000.parquet"
    if content is not None:
        path.write_bytes(content)
    refused(InputError, r"mined-00000\.parquet: the shard is missing or damaged", read_shard, path)
