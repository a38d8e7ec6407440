"""Records that lack a level are refused or counted before training."""

import logging
from pathlib import Path
from typing import Any

import pytest

from embeddings.common import InputError, OptionError
from embeddings.data import SourceDataset
from embeddings.data.level_coverage import LevelCoverage, check_levels
from tests.data.rows import dataset, graded, labelled, pairs

EVERY = (1, 2, 3, 4)


def source(folder: Path, *rows: list[dict[str, Any]], **options: Any) -> SourceDataset:
    return dataset(folder, [row for part in rows for row in part], **options)


def test_levels_are_counted_record_by_record(tmp_path: Path) -> None:
    found = LevelCoverage.of(source(tmp_path, graded(3), graded(2, (1, 3)), pairs(4), graded(1, (2,))).cached.table)
    assert found == LevelCoverage(
        num_records=10,
        num_ungraded=4,
        num_lacking={1: 1, 2: 2, 3: 1, 4: 3},
        first_lacking={1: 6, 2: 4, 3: 6, 4: 4},
    )


def test_records_count_on_through_batches_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embeddings.data.table.MAX_BATCH_ROWS", 3)
    found = LevelCoverage.of(source(tmp_path, graded(7), graded(2, (1,)), pairs(1)).cached.table)
    assert (found.num_records, found.num_ungraded) == (10, 1)
    assert found.first_lacking == {1: 10, 2: 8, 3: 8, 4: 8}


def test_whole_records_pass_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="embeddings"):
        check_levels([source(tmp_path, graded(5))], EVERY, stand_in=False)
    assert caplog.records == []


def test_a_record_without_a_level_is_refused_by_source_and_number(tmp_path: Path) -> None:
    whole, partial = source(tmp_path, graded(5), name="whole"), source(tmp_path, graded(2), graded(3, (1, 2, 4)))
    says = r"source 'source': record 3 has no negative of level 3 \(3 of 5 lack one\); add it, or set .*: coarser"
    with pytest.raises(InputError, match=says) as raised:
        check_levels([whole, partial], EVERY, stand_in=False)
    assert "\n" not in str(raised.value)
    check_levels([whole, partial], (1, 2, 4), stand_in=False)


def test_where_levels_stand_in_for_each_other_what_is_lacking_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="embeddings"):
        check_levels([source(tmp_path, graded(2), graded(3, (1, 2, 4)), pairs(4))], EVERY, stand_in=True)
    assert [record.getMessage() for record in caplog.records] == [
        "source source: 3 of 9 records have no negative of level 3",
        "source source: 4 of 9 records have no negative with a level",
    ]


@pytest.mark.parametrize("stand_in", [False, True])
def test_a_curriculum_over_no_levels_at_all_is_refused(stand_in: bool, tmp_path: Path) -> None:
    plain = [record | {"negatives": ["other"]} for record in pairs(4)]
    sources = [
        source(tmp_path, plain, name="plain"),
        source(tmp_path, labelled(3, 3), name="classes", conversion="class_by_example"),
    ]
    with pytest.raises(OptionError, match="needs negatives with levels, and no source has any"):
        check_levels(sources, EVERY, stand_in=stand_in)


def test_a_source_that_draws_its_negatives_lacks_every_level(tmp_path: Path) -> None:
    classes = source(tmp_path, labelled(3, 3), name="classes", conversion="class_by_example")
    check_levels([source(tmp_path, graded(4)), classes], EVERY, stand_in=True)
    with pytest.raises(InputError, match=r"source 'classes': record 1 has no negative of level 4 \(6 of 6"):
        check_levels([source(tmp_path, graded(4)), classes], EVERY, stand_in=False)
