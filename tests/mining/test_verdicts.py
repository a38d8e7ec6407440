"""Shards cover all rows once, and what is damaged is refused."""

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import open_verdicts, require_shard_size, save_array, shard_rows


@pytest.mark.parametrize(("num_rows", "shard_size"), [(1, 1), (5, 2), (6, 2), (3, 100)])
def test_shards_cover_all_rows_in_order(num_rows, shard_size):
    num_shards = -(-num_rows // shard_size)
    covered = [row for shard in range(num_shards) for row in shard_rows(shard, shard_size, num_rows)]
    assert covered == list(range(num_rows))
    assert all(shard_rows(shard, shard_size, num_rows) for shard in range(num_shards))


def test_an_array_comes_back_from_exactly_the_path_it_was_written_to(tmp_path):
    verdict_N = np.array([0, 2, 1], dtype=np.uint8)
    save_array(tmp_path / "no_suffix", verdict_N)
    assert open_verdicts(tmp_path / "no_suffix").tolist() == [0, 2, 1]


@pytest.mark.parametrize("content", [None, b"", b"not an array"])
def test_missing_and_damaged_verdicts_are_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "verdicts.npy").write_bytes(content)
    with pytest.raises(InputError, match=r"verdicts\.npy: is missing, empty or damaged; delete its folder"):
        open_verdicts(tmp_path / "verdicts.npy")


@pytest.mark.parametrize("shard_size", [0, -1])
def test_a_shard_has_a_row(shard_size):
    require_shard_size(1)
    with pytest.raises(OptionError, match="shard_size must be >= 1"):
        require_shard_size(shard_size)
