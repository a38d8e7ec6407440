"""A pair's rank is the number of documents in its segment that are nearer to its query than its own."""

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.common.io import write_manifest
from embeddings.common.jobs import ArrayTask
from embeddings.inference.encoder import unit_rows
from embeddings.mining import filter as consistency
from embeddings.mining.filter import NOT_RANKED, Segments, rank_pairs
from embeddings.mining.pair_index import index_pairs
from tests.helpers.refusals import refused
from tests.mining.pair_sources import made_vectors, source

NUM_ROWS, WIDTH = 50, 4


def some_rows():
    """Records of one, two or three positives; records share positives, and queries too."""
    return [
        {"query": f"q {row % 31}", "positive": [f"d {(row * step) % 37}" for step in range(1, 2 + row % 3)]}
        for row in range(NUM_ROWS)
    ]


def pair_vectors(folder, rows, query_ND, vector_of, shard_size=7):
    """Vectors of a source, those of documents by their text."""
    pairs = source(folder, rows)
    index = index_pairs(pairs, folder / "index")
    document_MD = np.stack([vector_of(text) for text in index.document_texts(range(index.num_documents))])
    sides = (unit_rows(vector_ND.astype(np.float32)) for vector_ND in (query_ND, document_MD))
    return made_vectors(folder, pairs, *sides, shard_size)


def rounded_vectors(folder, shard_size=7):
    """Vectors with few distinct values of both signs, so that there are many ties."""
    generator = np.random.default_rng(0)
    choices = np.array([[1, 1, 1, 1], [1, -1, 1, 1], [-1, -1, 1, 1], [1, -1, -1, -1], [2, 0, 0, 0], [0, -2, 0, 0]])
    query_ND = choices[generator.integers(0, 6, NUM_ROWS)]
    vector_of = dict(zip(map("d {}".format, range(37)), choices[generator.integers(0, 6, 37)], strict=True))
    return pair_vectors(folder, some_rows(), query_ND, vector_of.__getitem__, shard_size), query_ND, vector_of


def loop_ranks(members, query_ND, vector_of, distance=0):
    """Ranks of the records `members`; vectors all have the length 2, and products are four times the cosines."""
    rows = some_rows()
    documents = {text for row in members for text in rows[row]["positive"]}
    ranks = {}
    for row in members:
        own = max(int(query_ND[row] @ vector_of[text]) for text in rows[row]["positive"])
        known = {text for other in rows if other["query"] == rows[row]["query"] for text in other["positive"]}
        nearer = [int(query_ND[row] @ vector_of[text]) > own + 4 * distance for text in documents - known]
        ranks[row] = sum(nearer) if nearer else NOT_RANKED
    return ranks


# Tiles smaller and larger than segments, in one segment and in several; tiles of one are slow.
@pytest.mark.parametrize(
    ("segment_size", "distance", "tile"),
    [
        (13, -0.6, 1),
        (1000, 0, 1),
        (2, 0, 3),
        (13, 0, 3),
        (NUM_ROWS, 0, 3),
        (1000, -0.6, 3),
        (2, 0, 1000),
        (13, -0.6, 1000),
        (25, 0, 1000),
        (1000, 0, 1000),
    ],
)
def test_ranks_equal_a_loop_with_ties_in_the_pairs_favour(segment_size, distance, tile, tmp_path, monkeypatch):
    monkeypatch.setattr(consistency, "_QUERY_TILE", tile)
    monkeypatch.setattr(consistency, "_DOCUMENT_TILE", tile + 1)
    monkeypatch.setattr(consistency, "_SHARD_PAIRS", 1)
    vectors, query_ND, vector_of = rounded_vectors(tmp_path)
    options = {"distance": distance} if distance else {}
    found = rank_pairs(vectors, tmp_path / "work", segment_size=segment_size, seed=1, **options)
    segments = Segments(np.arange(NUM_ROWS, dtype=np.uint32), segment_size, 1)
    expected = {}
    for segment in range(len(segments)):
        expected |= loop_ranks(segments.members(segment).tolist(), query_ND, vector_of, distance)
    assert found.tolist() == [expected[row] for row in range(NUM_ROWS)]
    assert (found == 0).any() or distance
    assert (found > 0).any()


@pytest.mark.parametrize("segment_size", [2, 4])
def test_positives_of_the_same_query_in_other_rows_are_not_compared(segment_size, tmp_path):
    asked = [("one", "a"), (" one", "b"), ("one", "c"), ("two", "d")]
    rows = [{"query": query, "positive": text} for query, text in asked]
    # From the nearest to the farthest of every query.
    angle_of = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}
    query_ND = np.array([[1.0, 0.0]] * 4)
    vector_of = {text: np.array([np.cos(angle), np.sin(angle)]) for text, angle in angle_of.items()}
    vectors = pair_vectors(tmp_path, rows, query_ND, vector_of.__getitem__)
    found = rank_pairs(vectors, tmp_path / "work", segment_size=segment_size)
    # With two segments, one has only two rows of the first query, which are compared with no document.
    assert np.maximum(found, 0).tolist() == [0, 0, 0, segment_size - 1]
    assert sorted(found)[:2] == [NOT_RANKED] * 2 if segment_size == 2 else (found >= 0).all()


def test_an_equal_vector_in_another_tile_is_a_tie(tmp_path, monkeypatch):
    monkeypatch.setattr(consistency, "_DOCUMENT_TILE", 5)
    generator = np.random.default_rng(0)
    rows = [{"query": f"q {row}", "positive": f"d {row}"} for row in range(33)]
    query_ND = generator.normal(size=(33, 257))
    vectors = pair_vectors(tmp_path, rows, query_ND, lambda _: query_ND[0], shard_size=4)
    assert rank_pairs(vectors, tmp_path / "work").tolist() == [0] * 33


def test_tasks_and_shards_of_vectors_change_no_byte(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    vectors, *_ = rounded_vectors(folders[0])
    whole = rank_pairs(vectors, folders[0] / "work", segment_size=9, seed=2)
    vectors, *_ = rounded_vectors(folders[1], shard_size=1000)
    for index in (2, 0, 1):
        parts = rank_pairs(vectors, folders[1] / "work", segment_size=9, seed=2, task=ArrayTask(index, 3))
    assert parts.tolist() == whole.tolist()
    for path in (folders[0] / "work").glob("*.npy"):
        assert path.read_bytes() == (folders[1] / "work" / path.name).read_bytes()


def test_a_shard_is_a_bounded_part_of_a_large_segment():
    segments = Segments(np.arange(2_500_000, dtype=np.uint32), 1_000_000, 0)
    assert len(segments) == 3
    sizes = [len(range(833_333)[block]) for _, block in segments.blocks]
    assert max(sizes) * 833_334 <= 2**31
    assert sum(sizes) >= 3 * 833_333


def test_another_seed_model_or_choice_of_rows_is_refused_by_name(tmp_path):
    vectors, *_ = rounded_vectors(tmp_path)
    rank_pairs(vectors, tmp_path / "work", segment_size=9)
    refused(InputError, "field 'seed' is 0, expected 1", rank_pairs, vectors, tmp_path / "work", segment_size=9, seed=1)
    with pytest.raises(InputError, match="field 'rows_sha256'"):
        rank_pairs(vectors, tmp_path / "work", segment_size=9, is_considered_N=np.arange(NUM_ROWS) > 1)
    fields = {"model_sha256": "other", "precision": "float32", "prompt_name": None}
    write_manifest(vectors.document_shards.folder, fields)
    refused(InputError, "'model_sha256' is 'none', expected", rank_pairs, vectors, tmp_path / "work", segment_size=9)


def test_neighbours_share_segments_at_random_and_the_seed_changes_them():
    row_N = np.arange(20_000, dtype=np.uint32)
    of_row = []
    for seed in (0, 1):
        segment_N = np.empty(len(row_N), dtype=np.int64)
        segments = Segments(row_N, 2000, seed)
        for segment in range(len(segments)):
            segment_N[segments.members(segment)] = segment
        of_row.append(segment_N)
        assert abs((segment_N[1:] == segment_N[:-1]).mean() - 0.1) < 0.01
    assert abs((of_row[0] == of_row[1]).mean() - 0.1) < 0.01


@pytest.mark.parametrize(
    ("groups", "segment_size", "sizes"),
    [([], 2, []), ([7], 2, [1]), ([3] * 10, 10, [10]), ([3] * 11, 10, [5, 6]), ([1, 0] * 6, 4, [3, 3, 3, 3])],
)
def test_a_segment_contains_one_group_and_every_row_is_in_one(groups, segment_size, sizes):
    row_N = np.arange(100, 100 + len(groups), dtype=np.uint32)
    segments = Segments(row_N, segment_size, 0, np.array(groups, np.uint16))
    members = [segments.members(segment).tolist() for segment in range(len(segments))]
    assert sorted(map(len, members)) == sorted(sizes)
    assert sorted(row for rows in members for row in rows) == row_N.tolist()
    for rows in members:
        assert rows == sorted(rows)
        assert len({groups[row - 100] for row in rows}) == 1


@pytest.mark.parametrize("considered", [None, np.arange(NUM_ROWS) % 7 != 0])
def test_only_records_of_one_group_are_compared(considered, tmp_path):
    vectors, query_ND, vector_of = rounded_vectors(tmp_path)
    group_N = (np.arange(NUM_ROWS) * 5 % 3).astype(np.uint16)
    found = rank_pairs(vectors, tmp_path / "work", is_considered_N=considered, group_N=group_N)
    expected = dict.fromkeys(range(NUM_ROWS), NOT_RANKED)
    for group in range(3):
        is_member_N = (group_N == group) & (True if considered is None else considered)
        expected |= loop_ranks(np.flatnonzero(is_member_N).tolist(), query_ND, vector_of)
    assert found.tolist() == list(expected.values())
    whole = rank_pairs(vectors, tmp_path / "whole", is_considered_N=considered)
    assert found.tolist() != whole.tolist()
    refused(InputError, "field 'groups_sha256'", rank_pairs, vectors, tmp_path / "work", is_considered_N=considered)
