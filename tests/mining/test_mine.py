"""Mining writes the same file with any number of tasks and after kills, and a curriculum reads it."""

import json
import os
import signal
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.data import CurriculumBatchSampler, EmbeddingDataModule, PlanEntry, SourceConfig, open_source
from embeddings.mining.mine import MiningReport, SearchOptions, Teachers, mine_negatives
from embeddings.mining.negatives import LevelRules, NegativeRules, TextQrels, draw_documents
from tests.data.rows import write_jsonl
from tests.helpers.forks import in_a_child
from tests.helpers.refusals import refused
from tests.mining.teachers import Teacher, know_teachers, unit

ROWS = [
    {
        "query": f"t{row % 4} question {row}",
        "positive": f"t{row % 4} answer {row}",
        "label": f"class {row % 4}",
        "negatives": ["t9 mine"] if row == 3 else [],
        **({"instruction": "find it"} if row == 5 else {}),
        **({"score": row / 4, "id": f"row-{row}"} if row % 2 else {}),
    }
    for row in range(22)
]
RULES = NegativeRules(num_negatives=3, margin=0.95, last_rank=12)
QUANTILES = LevelRules("quantiles")
STRANGE = TextQrels.of([("nobody's", "a", 1), ("nobody's", "b", 0)], "qrels")


@pytest.fixture(autouse=True)
def _teachers(monkeypatch):
    know_teachers(monkeypatch)


def run(folder, output, rules=RULES, rows=ROWS, models=("teacher",), reranker=None, source=None, **options):
    path = folder / f"{len(rows)}-pairs.jsonl"
    if not path.exists():
        write_jsonl(path, rows)
    return mine_negatives(
        SourceConfig("pairs", str(path), **(source or {})),
        folder / output,
        Teachers(models, Teacher, reranker=reranker),
        rules,
        **{"shard_size": 5, "cache_dir": folder / "cache", **options},
    )


def outputs(folder, output):
    """The bytes of a run's output and manifest."""
    return [(folder / name).read_bytes() for name in (output, f"{output}.manifest.json")]


def test_the_records_are_a_source_again_with_negatives_and_scores(tmp_path):
    report = run(tmp_path, "mined.parquet")
    rows = pq.read_table(tmp_path / "mined.parquet").to_pylist()
    assert [row["query"] for row in rows] == [row["query"] for row in ROWS]
    assert [row["positive"] for row in rows] == [[row["positive"]] for row in ROWS]
    assert [row["label"] for row in rows] == [row["label"] for row in ROWS]
    for field in ("instruction", "score", "id"):
        assert [row[field] for row in rows] == [row.get(field) for row in ROWS]
    documents = {row["positive"] for row in ROWS}
    for row in rows:
        assert len(row["negatives"]) == len(set(row["negatives"])) == len(row["negative_scores"]) <= 3
        assert set(row["negatives"]) <= documents - set(row["positive"])
        assert row["negative_scores"] == sorted(row["negative_scores"], reverse=True)
        (positive,) = row["positive_scores"]
        assert all(score < positive - abs(positive) * 0.05 for score in row["negative_scores"])
    source = open_source(SourceConfig("mined", str(tmp_path / "mined.parquet")), tmp_path / "cache")
    assert len(source) == len(ROWS)
    for number, row in enumerate(rows):
        assert [negative.text for negative in source[PlanEntry(number, 0)].negatives] == row["negatives"]
    counts = [len(row["negatives"]) for row in rows]
    assert report == MiningReport(
        tmp_path / "mined.parquet", 22, 22, report.num_candidates, report.removed, report.num_left,
        sum(counts), sum(count < 3 for count in counts), counts.count(0), 1,
    )  # fmt: skip
    assert report.num_left == report.num_candidates - sum(report.removed.values())
    assert report.removed["own_positive"] == 22
    assert report.removed["margin"] > 0


def test_shard_sizes_tasks_and_shared_vectors_change_no_record(tmp_path):
    run(tmp_path, "whole.parquet")
    whole = outputs(tmp_path, "whole.parquet")
    reports = [run(tmp_path, "parts.parquet", task=ArrayTask(index, 3)) for index in (2, 0, 1)]
    assert [report is None for report in reports] == [True, True, False]
    assert outputs(tmp_path, "parts.parquet") == whole
    run(tmp_path, "kept.parquet", vectors=tmp_path / "vectors")
    assert not (tmp_path / "kept.parquet.work" / "vectors").exists()
    run(tmp_path, "again.parquet", vectors=tmp_path / "vectors", rules=NegativeRules(2))
    assert outputs(tmp_path, "kept.parquet") == whole
    for size in (3, 100):
        run(tmp_path, f"{size}.parquet", shard_size=size)
        assert pq.read_table(tmp_path / f"{size}.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))


def test_a_finished_file_is_reused_and_another_input_is_refused_by_name(tmp_path):
    first = run(tmp_path, "mined.parquet")
    before = outputs(tmp_path, "mined.parquet")
    assert run(tmp_path, "mined.parquet") == first
    refused(InputError, r"field 'rules\.", run, tmp_path, "mined.parquet", rules=NegativeRules(3, 0.9))
    refused(InputError, "field 'teachers'", run, tmp_path, "mined.parquet", models=["other"])
    with pytest.raises(InputError, match="field 'source_key' differs: the output was made with another source"):
        run(tmp_path, "mined.parquet", rows=ROWS[:9])
    with pytest.raises(InputError, match=r"'source_settings\.suspect_rows' is 'leave_out', expected 'keep'; make"):
        run(tmp_path, "mined.parquet", source={"suspect_rows": "keep"})
    assert outputs(tmp_path, "mined.parquet") == before
    (tmp_path / "mined.parquet").unlink()
    assert run(tmp_path, "mined.parquet") == first
    assert outputs(tmp_path, "mined.parquet") == before
    (tmp_path / "mined.parquet").write_bytes(before[0][:-1])
    refused(InputError, "is not the file that its manifest describes", run, tmp_path, "mined.parquet")


def test_a_run_killed_at_its_renames_ends_with_the_same_bytes(tmp_path):
    options = {"shard_size": 9}
    run(tmp_path, "whole.parquet", **options)
    replace, kills = os.replace, 0

    def killed_at(count, after):
        """Kill this process before or after its `count`-th rename of a file."""
        calls = []

        def counted(*arguments):
            calls.append(arguments)
            if len(calls) == count and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*arguments)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = counted
        run(tmp_path, "killed.parquet", **options)

    # Each new process completes one or two more renames than the last, until the run is finished.
    for attempt in range(40):
        status = in_a_child(partial(killed_at, 2, after=attempt % 2 == 0))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert status == 0
    assert kills >= 8
    assert outputs(tmp_path, "killed.parquet") == outputs(tmp_path, "whole.parquet")
    shards = sorted(path.name for path in (tmp_path / "whole.parquet.work").glob("mined-*"))
    assert len(shards) == 3
    for name in shards:
        whole, killed = (tmp_path / f"{run}.parquet.work" / name for run in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()


@pytest.mark.parametrize(("size", "rows_together", "num_shards"), [(5, 1 << 20, 5), (5, 10, 3), (5, 5, 2), (1, 1, 3)])
def test_probing_all_lists_gives_the_exact_records(size, rows_together, num_shards, tmp_path, monkeypatch):
    monkeypatch.setattr("embeddings.mining.mine._ROWS_PER_SHARD_TOGETHER", rows_together)
    run(tmp_path, "exact.parquet", shard_size=size)
    run(tmp_path, "ivf.parquet", shard_size=size, search=SearchOptions("ivf", num_lists=3, num_probes=3))
    for name, number in (("exact", -(-22 // size)), ("ivf", num_shards)):
        assert len([*(tmp_path / f"{name}.parquet.work").glob("mined-*.parquet")]) == number
    found, exact = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("ivf", "exact"))
    assert found["negatives"].equals(exact["negatives"])
    scores = (np.concatenate(table["negative_scores"].to_pylist()) for table in (found, exact))
    np.testing.assert_allclose(*scores, atol=1e-6)


def test_a_corpus_gives_more_negatives_and_never_the_querys_own_text(tmp_path):
    texts = ["t0 question 0", "t0 stranger", "t0 answer 4", "t1 stranger"]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])
    report = run(tmp_path, "mined.parquet", rules=NegativeRules(20, None), corpus=corpus)
    assert report.num_documents == 25
    first, second = pq.read_table(tmp_path / "mined.parquet").to_pylist()[:2]
    assert {"t0 stranger", "t1 stranger", "t0 answer 4"} <= set(first["negatives"])
    assert "t0 question 0" not in first["negatives"]
    assert report.removed["own_text"] == 1
    assert second["negatives"]


def test_equal_teachers_are_refused():
    refused(OptionError, "must name one or several different models", Teachers, ["a", "a"], Teacher)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rules": NegativeRules(22, None)}, "has 22 distinct documents, too few for 22 negatives"),
        ({"rules": NegativeRules(7), "levels": QUANTILES}, "num_negatives must be a multiple of 4 with levels"),
        ({"levels": LevelRules("grades", STRANGE)}, "judgments: has no judgment of a document for a query"),
        ({"source": {"conversion": "class_by_label"}}, "has no records to mine for"),
    ],
)
def test_sources_that_cannot_be_mined_leave_no_files(options, says, tmp_path):
    with pytest.raises((InputError, OptionError), match=says):
        run(tmp_path, "deep/mined.parquet", **{"rules": NegativeRules(4), "vectors": tmp_path / "vectors", **options})
    assert {path.name for path in tmp_path.iterdir()} <= {"22-pairs.jsonl", "cache"}


LEVEL_ROWS = [{"query": f"t{row % 4} question {row}", "positive": f"t{row % 4} answer {row}"} for row in range(22)]
STRANGERS = [{"text": f"t{row % 6} stranger {row}"} for row in range(40)]
# For query r: answer r + 4 is one grade below its own, r + 8 lower, r + 12 irrelevant.
GRADES = {0: 3, 4: 2, 8: 1, 12: 0}
JUDGED = TextQrels.of(
    [
        (LEVEL_ROWS[row]["query"], LEVEL_ROWS[(row + step) % 22]["positive"], g)
        for row in range(21)
        for step, g in GRADES.items()
    ],
    "qrels",
)


@pytest.fixture
def mine(tmp_path):
    """A function that mines with levels in the test's folder and returns the report."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", STRANGERS)

    def go(output="mined.parquet", levels=QUANTILES, **options):
        given = {"rules": NegativeRules(4, 0.95, last_rank=8), "rows": LEVEL_ROWS, **options}
        return run(tmp_path, output, corpus=corpus, levels=levels, **given)

    return go


def loop(rules, teachers):
    """The levels of each record by a loop over all documents, nearest first."""
    documents = [row["positive"] for row in LEVEL_ROWS] + [row["text"] for row in STRANGERS]
    queries = [row["query"] for row in LEVEL_ROWS]
    scores = [unit(t.encode(queries)).astype(float) @ unit(t.encode(documents)).astype(float).T for t in teachers]
    expected = []
    for row in range(len(LEVEL_ROWS)):
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
    manifest = json.loads((tmp_path / "mined.parquet.manifest.json").read_text())
    assert (manifest["levels"], manifest["by_level"]) == ({"kind": "quantiles"}, report.by_level)
    mine("parts.parquet", rules=rules, models=models, task=ArrayTask(1, 2))
    assert mine("parts.parquet", rules=rules, models=models)._replace(output=report.output) == report
    assert outputs(tmp_path, "parts.parquet") == outputs(tmp_path, "mined.parquet")
    for levels in (None, LevelRules("grades", JUDGED)):
        refused(InputError, "field 'levels", mine, rules=rules, models=models, levels=levels)


def test_grades_determine_the_levels_and_the_report_counts_missing_ones(mine, tmp_path, caplog):
    report = mine(levels=LevelRules("grades", JUDGED), rules=NegativeRules(4, 0.95, last_rank=4, choice="random"))
    rows = pq.read_table(tmp_path / "mined.parquet").to_pylist()
    documents = {row["positive"] for row in LEVEL_ROWS} | {row["text"] for row in STRANGERS}
    for number, row in enumerate(rows[:-1]):
        levels = {item["level"]: item["text"] for item in row["negatives"]}
        assert [levels[level] for level in (1, 2, 3)] == [
            LEVEL_ROWS[(number + 4 * level) % 22]["positive"] for level in (1, 2, 3)
        ]
        assert levels.get(4, "t0 stranger 0") in documents - {LEVEL_ROWS[(number + s) % 22]["positive"] for s in GRADES}
    assert rows[-1]["negatives"] == []
    lacking = [sum(level not in {n["level"] for n in row["negatives"]} for row in rows) for level in (1, 2, 3, 4)]
    assert [part["num_lacking"] for part in report.by_level.values()] == lacking
    assert lacking[:3] == [1, 1, 1]
    assert report.removed["query_not_judged"] > 0
    assert "1 of 22 records have no negative of level 1" in caplog.text


def data(folder, **options):
    """A data module whose curriculum reads the mined records."""
    return EmbeddingDataModule(
        [SourceConfig("mined", str(folder / "mined.parquet"))],
        batch_size=4,
        num_negatives=1,
        sampler=partial(CurriculumBatchSampler, **options),
        cache_dir=str(folder / "cache"),
    )


def test_a_curriculum_reads_the_file_and_refuses_one_without_levels(mine, tmp_path):
    mine(rules=NegativeRules(4, None, last_rank=8))
    data(tmp_path).prepare_data()
    rows = pq.read_table(tmp_path / "mined.parquet").to_pylist()
    assert [[item["level"] for item in row["negatives"]] for row in rows] == [[1, 2, 3, 4]] * 22
    plain = tmp_path / "plain"
    plain.mkdir()
    mine("plain/mined.parquet", rules=NegativeRules(4, None, last_rank=8), levels=None)
    with pytest.raises(OptionError, match="needs negatives with levels"):
        data(plain).prepare_data()
