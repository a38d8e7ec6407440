"""Mining with levels ends with the same file whoever made its shards, and a curriculum takes the file as it is."""

import json
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.data import CurriculumBatchSampler, EmbeddingDataModule, SourceConfig
from embeddings.mining.negatives import LevelRules, NegativeRules, TextQrels, draw_documents
from tests.data.rows import write_jsonl
from tests.mining.teachers import Teacher, know_teachers, unit
from tests.mining.test_mine import outputs, run

ROWS = [{"query": f"t{row % 4} question {row}", "positive": f"t{row % 4} answer {row}"} for row in range(22)]
STRANGERS = [{"text": f"t{row % 6} stranger {row}"} for row in range(40)]
RULES = NegativeRules(num_negatives=4, margin=0.95, last_rank=8)
QUANTILES = LevelRules("quantiles")
# Of query r: answer r + 4 one step below its own, r + 8 further below, r + 12 irrelevant.
GRADES = {0: 3, 4: 2, 8: 1, 12: 0}
JUDGED = TextQrels.of(
    [(ROWS[row]["query"], ROWS[(row + step) % 22]["positive"], g) for row in range(21) for step, g in GRADES.items()],
    "qrels",
)


@pytest.fixture(autouse=True)
def _teachers(monkeypatch):
    know_teachers(monkeypatch)


@pytest.fixture
def mine(tmp_path):
    """Mine in the test's folder; gives the report."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", STRANGERS)

    def go(output="mined.parquet", rules=RULES, levels=QUANTILES, **options):
        return run(tmp_path, output, rules, ROWS, corpus=corpus, levels=levels, **options)

    return go


def loop(rules, teachers):
    """The levels of each record by a loop over all documents, nearest first."""
    documents = [row["positive"] for row in ROWS] + [row["text"] for row in STRANGERS]
    queries = [row["query"] for row in ROWS]
    scores = [unit(t.encode(queries)).astype(float) @ unit(t.encode(documents)).astype(float).T for t in teachers]
    expected = []
    for row in range(len(ROWS)):
        drawn = draw_documents(np.array([row]), len(documents), rules)[0].tolist()
        near = sorted(set(range(len(documents))) - {row}, key=lambda d: -sum(score[row, d] for score in scores))
        pool = [d for rank, d in enumerate(near) if rank < rules.last_rank or d in drawn]
        left = [d for d in pool if all(s[row, d] < s[row, row] - abs(s[row, row]) * 0.05 for s in scores)]
        levels, start = [], 0
        for part in range(4):
            size = (len(left) + part) // 4
            levels += [(documents[d], part + 1) for d in left[start : start + size][: rules.num_negatives // 4]]
            start += size
        expected.append(levels)
    return expected


@pytest.mark.parametrize("models", [["teacher"], ["one", "two"]])
def test_mined_levels_equal_a_loop_over_all_documents(models, mine, tmp_path):
    rules = NegativeRules(8, 0.95, last_rank=60)
    report = mine(rules=rules, models=models)
    rows = pq.read_table(tmp_path / "mined.parquet").to_pylist()
    found = [[(item["text"], item["level"]) for item in row["negatives"]] for row in rows]
    expected = loop(rules, [Teacher(name) for name in models])
    assert found == expected
    assert sum(map(len, found)) == report.num_negatives > 150
    scores = {level: [] for level in "1234"}
    for row in rows:
        for item, score in zip(row["negatives"], row["negative_scores"], strict=True):
            scores[str(item["level"])].append(score)
    for level, part in report.by_level.items():
        assert part["num_negatives"] == len(scores[level])
        assert (part["lowest_score"], part["highest_score"]) == (min(scores[level]), max(scores[level]))
        assert part["mean_score"] == pytest.approx(np.mean(scores[level]), abs=1e-6)
    means = [part["mean_score"] for part in report.by_level.values()]
    assert means == sorted(means, reverse=True)
    manifest = json.loads((tmp_path / "mined.manifest.json").read_text())
    assert (manifest["levels"], manifest["by_level"]) == ({"kind": "quantiles"}, report.by_level)


def test_tasks_change_no_byte_and_a_finished_file_is_left(mine, tmp_path):
    first = mine("whole.parquet")
    for index in (2, 0, 1):
        mine("parts.parquet", task=ArrayTask(index, 3))
    assert outputs(tmp_path, "parts.parquet") == outputs(tmp_path, "whole.parquet")
    assert mine("whole.parquet") == first
    for levels in (None, LevelRules("grades", JUDGED)):
        with pytest.raises(InputError, match="field 'levels"):
            mine("whole.parquet", levels=levels)


def test_grades_give_the_levels_and_the_report_counts_what_lacks(mine, tmp_path, caplog):
    report = mine(levels=LevelRules("grades", JUDGED), rules=NegativeRules(4, 0.95, last_rank=4, choice="random"))
    rows = pq.read_table(tmp_path / "mined.parquet").to_pylist()
    documents = {row["positive"] for row in ROWS} | {row["text"] for row in STRANGERS}
    for number, row in enumerate(rows[:-1]):
        levels = {item["level"]: item["text"] for item in row["negatives"]}
        assert [levels[level] for level in (1, 2, 3)] == [
            ROWS[(number + 4 * level) % 22]["positive"] for level in (1, 2, 3)
        ]
        assert levels.get(4, "t0 stranger 0") in documents - {ROWS[(number + s) % 22]["positive"] for s in GRADES}
    assert rows[-1]["negatives"] == []
    lacking = [sum(level not in {n["level"] for n in row["negatives"]} for row in rows) for level in (1, 2, 3, 4)]
    assert [part["num_lacking"] for part in report.by_level.values()] == lacking
    assert lacking[:3] == [1, 1, 1]
    assert report.removed["query_not_judged"] > 0
    assert "1 of 22 records have no negative of level 1" in caplog.text


def test_what_was_judged_as_good_as_the_positive_is_never_a_negative(mine, tmp_path):
    equal = [(row["query"], ROWS[(number + 16) % 22]["positive"], 3) for number, row in enumerate(ROWS)]
    own = [(row["query"], row["positive"], 3) for row in ROWS]
    lower = [(ROWS[0]["query"], STRANGERS[0]["text"], 0)]
    judged = LevelRules("grades", TextQrels.of([*equal, *own, *lower], "qrels"))
    report = mine(levels=judged, rules=NegativeRules(60, None, last_rank=60))
    for number, row in enumerate(pq.read_table(tmp_path / "mined.parquet").to_pylist()):
        texts = [item["text"] for item in row["negatives"]]
        assert len(texts) >= 15
        assert ROWS[(number + 16) % 22]["positive"] not in texts
    assert report.removed["own_positive"] == 44


def data(folder, **options):
    """A data module whose curriculum reads what was mined."""
    return EmbeddingDataModule(
        [SourceConfig("mined", str(folder / "mined.parquet"))],
        batch_size=4,
        num_negatives=1,
        sampler=partial(CurriculumBatchSampler, **options),
        cache_dir=str(folder / "cache"),
    )


def test_a_curriculum_takes_the_file_and_refuses_one_without_levels(mine, tmp_path):
    mine(rules=NegativeRules(4, None, last_rank=8))
    data(tmp_path).prepare_data()
    rows = pq.read_table(tmp_path / "mined.parquet").to_pylist()
    assert [[item["level"] for item in row["negatives"]] for row in rows] == [[1, 2, 3, 4]] * 22
    plain = tmp_path / "plain"
    plain.mkdir()
    mine("plain/mined.parquet", rules=NegativeRules(4, None, last_rank=8), levels=None)
    with pytest.raises(OptionError, match="needs negatives with levels"):
        data(plain).prepare_data()


def test_what_grades_leave_out_needs_a_coarser_level_to_stand_in(mine, tmp_path):
    mine(levels=LevelRules("grades", JUDGED))
    with pytest.raises(InputError, match=r"record \d+ has no negative of level 4"):
        data(tmp_path).prepare_data()
    data(tmp_path, missing_level="coarser").prepare_data()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rules": NegativeRules(7)}, "num_negatives must be a multiple of 4 with levels"),
        (
            {"levels": LevelRules("grades", TextQrels.of([("x", "a", 1), ("x", "b", 0)], "qrels"), "qrels")},
            "qrels: judges no document for any query",
        ),
    ],
)
def test_what_cannot_be_leaves_nothing_behind(options, says, mine, tmp_path):
    with pytest.raises((OptionError, InputError), match=says):
        mine("deep/mined.parquet", **options)
    assert not (tmp_path / "deep").exists()
