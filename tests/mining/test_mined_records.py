"""What shards hold of each level adds up to the report, and their files come back as records."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError
from embeddings.data.records import Record
from embeddings.mining.mined_shards import MinedShard, read_shard, report_levels, shard_counts, with_mined, write_shard
from embeddings.mining.negatives import NegativeRules, Negatives
from embeddings.mining.pair_index import index_pairs
from tests.mining.test_pair_index import source

ROWS = [{"query": f"q{row}", "positive": f"d{row}", "negatives": ["x"] if row == 1 else []} for row in range(6)]
LEVELS = np.array([1, 2, 3, 4], np.int8)


def shard(index, path, first, rows, scores, levels=LEVELS):
    """The file of a shard with these negatives, one column a level."""
    row_QN, score_QN = np.array(rows), np.array(scores, np.float32)
    mined = MinedShard(
        range(first, first + len(rows)),
        Negatives(row_QN, score_QN, {"margin": 2}, 7, levels),
        np.linspace(0.5, 1, len(rows), dtype=np.float32),
        9,
    )
    write_shard(mined, index, NegativeRules(4), path)
    return read_shard(path)


@pytest.fixture
def index(tmp_path):
    return index_pairs(source(tmp_path, ROWS), tmp_path / "index")


def test_levels_lie_beside_the_texts_and_add_up_over_shards(index, tmp_path):
    none = -np.inf
    first = shard(
        index, tmp_path / "0", 0, [[1, 2, -1, 3], [0, -1, -1, 5]], [[0.75, 0.5, none, 0.25], [0.5, none, none, -0.25]]
    )
    second = shard(index, tmp_path / "1", 2, [[-1, -1, -1, 4]], [[none, none, none, -0.5]])
    assert first["negatives"].to_pylist() == [
        [{"text": "d1", "level": 1}, {"text": "d2", "level": 2}, {"text": "d3", "level": 4}],
        [{"text": "d0", "level": 1}, {"text": "d5", "level": 4}],
    ]
    assert first["negative_scores"].to_pylist() == [[0.75, 0.5, 0.25], [0.5, -0.25]]
    counts, levels = zip(*map(shard_counts, (first, second)), strict=True)
    assert [part["num_short"] for part in counts] == [2, 1]
    assert [part["num_replaced"] for part in counts] == [1, 0]

    def facts(count, lacking, lowest=None, mean=None, highest=None):
        return {
            "num_negatives": count,
            "num_lacking": lacking,
            "lowest_score": lowest,
            "mean_score": mean,
            "highest_score": highest,
        }

    assert report_levels(levels) == {
        "1": facts(2, 1, 0.5, 0.625, 0.75),
        "2": facts(1, 2, 0.5, 0.5, 0.5),
        "3": facts(0, 3),
        "4": facts(3, 0, -0.5, -0.5 / 3, 0.25),
    }
    table = with_mined([Record("q0", ("d0",)), Record("q1", ("d1",))], first, graded=True)
    assert table["query"].to_pylist() == ["q0", "q1"]
    assert table["negatives"].to_pylist() == first["negatives"].to_pylist()


def test_without_levels_negatives_are_texts_and_the_report_has_none(index, tmp_path):
    plain = shard(index, tmp_path / "0", 0, [[1, 2, -1]], [[0.5, 0.25, -np.inf]], levels=None)
    assert plain["negatives"].to_pylist() == [["d1", "d2"]]
    assert report_levels([shard_counts(plain)[1]]) is None
    old = plain.replace_schema_metadata({"counts": plain.schema.metadata[b"counts"]})
    pq.write_table(old, tmp_path / "old")
    assert shard_counts(read_shard(tmp_path / "old")) == shard_counts(plain)


@pytest.mark.parametrize("content", [None, b"", b"no parquet"])
def test_a_damaged_shard_is_named(content, tmp_path):
    path = tmp_path / "mined-00000.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"mined-00000\.parquet: the shard is missing or damaged"):
        read_shard(path)
