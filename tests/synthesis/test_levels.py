"""Similarity by level against cosines that can be checked by eye."""

import json

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.synthesis.validate import check_levels


class Angles:
    """Every text is an angle in degrees, and its vector three long in that direction."""

    def encode(self, texts, *, role=None):
        angle = np.deg2rad([float(text.removesuffix(" degrees")) for text in texts])
        return 3 * np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def write(path, *rows):
    lines = [
        {
            "query": "0 degrees",
            "positive": f"{positive} degrees",
            "negatives": [{"text": f"{angle} degrees", "level": level} for level, angle in enumerate(angles, start=1)],
        }
        for positive, *angles in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_cosines_are_averaged_by_level(tmp_path):
    paths = [write(tmp_path / "a.jsonl", (1, 10, 20, 30, 40)), write(tmp_path / "b.jsonl", (3, 30, 20, 50, 60))]
    found = check_levels(paths, Angles())
    expected = [
        (np.cos(np.deg2rad(a)) + np.cos(np.deg2rad(b))) / 2 for a, b in [(10, 30), (20, 20), (30, 50), (40, 60)]
    ]
    assert found.levels == pytest.approx(expected, abs=1e-6)
    assert found.positive == pytest.approx((np.cos(np.deg2rad(1)) + np.cos(np.deg2rad(3))) / 2, abs=1e-6)
    assert (found.num_records, found.falling_fraction) == (2, 0.5)
    assert not found.is_falling


def test_records_are_taken_evenly_and_only_those_with_every_level(tmp_path):
    rows = [(1, 10 + n, 20 + n, 30 + n, 40 + n) for n in range(10)]
    path = write(tmp_path / "a.jsonl", *rows, (1, 10, 20))
    assert check_levels([path], Angles()).num_records == 10
    found = check_levels([path], Angles(), max_records=2)
    assert found.levels[0] == pytest.approx((np.cos(np.deg2rad(10)) + np.cos(np.deg2rad(15))) / 2, abs=1e-6)
    assert found.is_falling
    assert found.falling_fraction == 1


def test_records_without_levels_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", (1, 10))
    with pytest.raises(InputError, match="no record has four levels"):
        check_levels([path], Angles())
    with pytest.raises(InputError):
        check_levels([], Angles())
