import csv
import json
from dataclasses import replace

import pytest

from embeddings.cli.sweep import collect, logged_metric, result_table, results_of, seed_table, write_results
from embeddings.cli.sweep_file import Metric, Sweep, short_names
from embeddings.cli.sweep_runs import runs_of
from embeddings.common import InputError

MAX, MIN = Metric("val/x"), Metric("val/x", "min", "best")


def finish(run, last, least, most, column="val/x"):
    run.folder.mkdir(parents=True)
    summary = {"last": last, "last_step": 9, "min": least, "min_step": 2, "max": most, "max_step": 5}
    (run.folder / "done.json").write_text(json.dumps({"seconds": 12.4, "metrics": {column: summary}}))


@pytest.fixture
def made(tmp_path):
    """Six runs of two poolings with three seeds: four are done, one has begun, one has not."""
    points = [{"a.pooling": name, "seed_everything": seed} for name in ("x.Mean", "x.Cls") for seed in range(3)]
    runs = runs_of(Sweep("tried", "method", (), ({},), "grid", tuple(points)), tmp_path / "sweeps")
    for run, numbers in zip(runs, [(0.5, 0.3, 0.6), (0.7, 0.2, 0.9), (0.6, 0.1, 0.6), (0.8, 0.4, 0.8)], strict=False):
        finish(run, *numbers)
    (runs[5].folder / "version_0").mkdir(parents=True)
    return runs, short_names(points)


def numbers(results):
    return [result.run.index for result in results]


def test_the_best_is_first_and_what_is_not_done_last(made, tmp_path):
    runs, _ = made
    found = results_of(runs, MAX, tmp_path)
    assert numbers(found) == [3, 1, 2, 0, 4, 5]
    assert [result.status for result in found] == ["done"] * 4 + ["missing", "unfinished"]
    assert (found[1].last, found[1].best, found[1].best_step, found[1].seconds) == (0.7, 0.9, 5, 12.4)
    least = results_of(runs, MIN, tmp_path)
    assert numbers(least) == [2, 1, 0, 3, 4, 5]
    assert (least[0].value(MIN), least[0].best_step) == (0.1, 2)


def test_the_table_has_a_row_a_point_with_its_values(made, tmp_path):
    runs, names = made
    lines = result_table(results_of(runs, MAX, tmp_path), names, MAX).splitlines()
    assert lines[0].split()[:4] == ["point", "pooling", "seed_everything", "val/x"]
    assert lines[1].split() == ["3", "Cls", "0", "0.8000", "0.8000", "5", "12", "done", runs[3].folder.name]
    assert lines[5].split() == ["4", "Cls", "1", "-", "-", "-", "-", "missing", "-"]
    assert len(lines) == 7


def test_the_mean_over_seeds_has_its_spread_and_number(made, tmp_path):
    runs, names = made
    lines = seed_table(results_of(runs, MAX, tmp_path), names, MAX).splitlines()
    # Mean: 0.5, 0.7 and 0.6; Cls: 0.8 alone.
    assert [line.split() for line in lines[1:]] == [["Cls", "0.8000", "-", "1"], ["Mean", "0.6000", "±0.1000", "3"]]
    assert seed_table(results_of(runs, MAX, tmp_path), {"a.pooling": "pooling"}, MAX) is None
    assert seed_table(results_of(runs, MAX, tmp_path), {"seed_everything": "seed_everything"}, MAX) is None


def test_the_csv_has_every_point_and_empty_cells(made, tmp_path):
    runs, names = made
    write_results(results_of(runs, MAX, tmp_path), names, tmp_path / "out" / "r.csv")
    with open(tmp_path / "out" / "r.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["point"]) for row in rows] == [3, 1, 2, 0, 4, 5]
    assert (rows[0]["a.pooling"], rows[0]["seed_everything"], rows[0]["last"]) == ("Cls", "0", "0.8")
    assert (rows[4]["last"], rows[4]["status"]) == ("", "missing")


def test_a_metric_that_no_run_has_lists_those_there_are(made, tmp_path):
    runs, _ = made
    with pytest.raises(InputError, match=r"tried.yaml: metric: no run has logged 'val/y'; column takes one of val/x"):
        results_of(runs, Metric("val/y"), tmp_path / "tried.yaml")
    finish(runs[4], 1.0, 1.0, 1.0, column="val/y")
    assert numbers(results_of(runs, Metric("val/y"), tmp_path))[0] == 4


def test_the_training_loss_stands_in_for_a_default_metric_that_no_run_has_logged(made, tmp_path, capsys):
    runs, _ = made
    assert logged_metric(runs, Metric()) == Metric()
    plan = Sweep("tried", "method", (), ({},), "grid", tuple(run.point for run in runs))
    with pytest.raises(InputError, match="no run has logged 'val/ndcg_at_10'"):
        collect(plan, runs, tmp_path / "r.csv", tmp_path / "tried.yaml")
    finish(runs[4], 0.2, 0.1, 0.9, column="train/loss")
    collect(plan, runs, tmp_path / "r.csv", tmp_path / "tried.yaml")
    lines = capsys.readouterr().out.splitlines()
    assert "train/loss last" in lines[0]
    assert lines[1].split()[:5] == ["4", "Cls", "1", "0.2000", "0.1000"]
    with pytest.raises(InputError, match="no run has logged 'val/y'"):
        collect(replace(plan, metric=Metric("val/y")), runs, tmp_path / "r.csv", tmp_path / "tried.yaml")


def test_a_key_that_a_point_leaves_out_is_a_dash(tmp_path):
    points = ({"a": 1}, {"b": 2, "seed_everything": 1})
    runs = runs_of(Sweep("tried", "method", (), ({},), "list", points), tmp_path)
    found = results_of(runs, MAX, tmp_path)
    lines = result_table(found, short_names(points), MAX).splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [["0", "1", "-", "-"], ["1", "-", "2", "1"]]
    assert "-  2" in seed_table(found, short_names(points), MAX)
