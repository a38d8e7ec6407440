"""Sources without negatives, and records that lack a level, are refused or counted before training."""

import logging
from pathlib import Path
from typing import Any

import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.protocols import BatchNeeds
from embeddings.data import SourceConfig, SourceDataset
from embeddings.data.checks import (
    LevelCoverage,
    check_levels,
    check_negatives_asked_for,
    check_negatives_found,
)
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


NEEDS = {forced: BatchNeeds(in_batch_negatives=forced) for forced in ("source", "on", "off")}


@pytest.mark.parametrize(
    ("options", "needs", "num_negatives", "message"),
    [
        (
            {"in_batch_negatives": False},
            "source",
            0,
            "data.num_negatives to 1 or more, or set in_batch_negatives: true",
        ),
        ({}, "off", 0, "num_negatives to 1 or more, or set model.loss.in_batch_negatives: source"),
        ({"in_batch_negatives": False, "conversion": "sts"}, "source", 7, "`mine --conversion sts`.* as pairs, or set"),
        ({"conversion": "sts"}, "off", 7, "mine negatives for it .* model.loss.in_batch_negatives: source"),
        ({"in_batch_negatives": False, "conversion": "class_by_example"}, "source", 0, "num_negatives to 1"),
        ({}, "source", 0, None),
        ({"in_batch_negatives": False}, "on", 0, None),
        ({"in_batch_negatives": False}, "source", 1, None),
        ({"conversion": "sts"}, "source", 0, None),
        ({"in_batch_negatives": False, "conversion": "binary_by_label"}, "source", 1, None),
    ],
)
def test_a_source_that_may_have_no_negative_is_refused_before_it_is_read(
    options: dict[str, Any], needs: Any, num_negatives: int, message: str | None
) -> None:
    sources = [SourceConfig("fine", "fine.jsonl"), SourceConfig("lonely", "lonely.jsonl", **options)][message is None :]
    if message is None:
        check_negatives_asked_for(sources, NEEDS[needs], num_negatives)
        return
    start = r"source '(lonely|fine)': has neither in-batch nor hard negatives, so its loss is 0 and trains nothing; "
    with pytest.raises(InputError, match=f"{start}.*{message}") as raised:
        check_negatives_asked_for(sources, NEEDS[needs], num_negatives)
    assert "\n" not in str(raised.value)


def test_pairs_without_any_negative_are_refused_where_they_have_no_in_batch_ones(tmp_path: Path) -> None:
    lonely = source(tmp_path, pairs(3), name="lonely", in_batch_negatives=False)
    with pytest.raises(InputError, match=r"source 'lonely': has neither .*give its records `negatives`, which `mine`"):
        check_negatives_found([lonely], NEEDS["source"])
    triplets = source(tmp_path, [{**pairs(1)[0], "negative": "n"}], name="triplets", in_batch_negatives=False)
    with pytest.raises(InputError, match=r"map them with columns: \{negatives: negative\}, or set in_batch_negatives"):
        check_negatives_found([triplets], NEEDS["source"])
    check_negatives_found([lonely], NEEDS["on"])
    check_negatives_found([source(tmp_path, pairs(3), name="in-batch")], NEEDS["source"])
    labelled_texts = source(tmp_path, labelled(3, 3), name="classes", conversion="class_by_example")
    check_negatives_found([labelled_texts], NEEDS["off"])


def test_records_that_train_nothing_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    some = source(tmp_path, graded(2), pairs(3), [{**pairs(1)[0], "negatives": ["plain"]}], in_batch_negatives=False)
    check_negatives_found([some], NEEDS["source"])
    assert [record.getMessage() for record in caplog.records] == [
        "source source: 3 of 6 records have no negative, and without in-batch negatives train nothing"
    ]
