"""A search: points that follow from the results of those before, kept across kills, in the usual table."""

import json
import statistics
import sys

import pytest

from embeddings.cli.main import main
from embeddings.cli.sweep_file import NUM_RANDOM, Search, next_point

RANGES = {"a": {"low": 0.0, "high": 1.0}, "b": {"low": 1, "high": 64, "int": True, "log": True}}


@pytest.fixture
def has_optuna():
    pytest.importorskip("optuna", reason="the extra optuna is not installed")


def walked(search, mode, num_points, value_of):
    """The points of a search whose runs reach `value_of` each point."""
    tried = []
    for _ in range(num_points):
        point = next_point(search, mode, tried)
        tried.append((point, value_of(point)))
    return [point for point, _ in tried]


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_a_search_comes_nearer_to_the_best_than_random_points(mode, sign, has_optuna):
    found = walked(Search(RANGES, 40, 0), mode, 40, lambda point: sign * (point["a"] - 0.3) ** 2)
    distances = [abs(point["a"] - 0.3) for point in found]
    # Evenly drawn values lie 0.25 from it in the median.
    assert statistics.median(distances[NUM_RANDOM:]) < 0.15
    assert all(0 <= point["a"] <= 1 and 1 <= point["b"] <= 64 for point in found)
    assert {type(point["b"]) for point in found} == {int}
    assert all(point["a"] == float(f"{point['a']:.6g}") for point in found)


def test_a_point_follows_from_seed_and_results_alone(has_optuna):
    search = Search(RANGES, 20, 3)
    found = walked(search, "min", 20, lambda point: point["a"])
    assert walked(search, "min", 20, lambda point: point["a"]) == found
    assert walked(Search(RANGES, 20, 4), "min", 1, lambda point: 0.0) != found[:1]
    other = walked(search, "max", 20, lambda point: point["a"])
    assert other[:NUM_RANDOM] == found[:NUM_RANDOM]
    assert other[NUM_RANDOM:] != found[NUM_RANDOM:]


def test_choices_may_be_mappings_and_a_run_without_a_result_counts_for_nothing(has_optuna):
    poolings = [{"class_path": "x.Mean"}, {"class_path": "x.Cls", "init_args": {"n": 1}}, None, "text", 2]
    search = Search({"p": poolings, "a": [0.1, 0.2]}, 30, 0)
    found = walked(search, "max", 30, lambda point: float(point["p"] == poolings[1]))
    assert all(point["p"] in poolings and point["a"] in (0.1, 0.2) for point in found)
    assert sum(point["p"] == poolings[1] for point in found[NUM_RANDOM:]) > 10
    unknown = walked(search, "max", 30, lambda point: None)
    assert len({json.dumps(point["p"]) for point in unknown}) == 5


def trained(folders):
    """The points of the runs that were trained, in their order."""
    (proposals,) = folders[0].parent.glob("points-*.json")
    return json.loads(proposals.read_text())


def test_a_search_trains_each_point_once_and_ends_in_the_usual_table(sweep_file, faked, has_optuna, capsys):
    folders, endings = faked
    search = {"method": "tpe", "num_runs": 13, "seed": 1}
    file = sweep_file({"a": {"low": 0.1, "high": 9.0, "log": True}}, **search)
    endings[4] = (7,)
    assert main(["sweep", file, "--count"]) == 0
    assert main(["sweep", file, "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["13", "13 more points follow from the results of those before them"]
    assert main(["sweep", file]) == 7
    assert "1 of 13 runs failed: point 4 with exit code 7; " in capsys.readouterr().err
    points = trained(folders)
    assert len(points) == len(set(folders)) == 13
    del endings[4]
    assert main(["sweep", file]) == 0
    assert "12 of 13 done already" in capsys.readouterr().out
    assert folders[13:] == [folders[4]]
    assert trained(folders) == points
    assert main(["sweep", sweep_file({"a": {"low": 0.1, "high": 9.0, "log": True}}, **search | {"num_runs": 14})]) == 0
    assert len(folders) == 15
    assert trained(folders)[:13] == points
    capsys.readouterr()
    assert main(["sweep", file, "--results", "true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["point", "a", "train/loss", "last", "best"]
    values = [float(line.split()[1]) for line in lines[1:15]]
    assert values == sorted(values)
    assert "14 of 14 done" in lines


def test_a_task_of_an_array_draws_what_is_missing_before_it(sweep_file, faked, has_optuna, capsys):
    folders, _ = faked
    file = sweep_file({"a": {"low": 0.0, "high": 1.0}}, method="tpe", num_runs=4)
    assert main(["sweep", file, "--index", "2"]) == 0
    assert len(trained(folders)) == 3
    assert len(folders) == 1
    assert main(["sweep", file]) == 0
    assert len(set(folders)) == 4
    assert main(["sweep", file, "--index", "4"]) == 2
    assert "index must lie in 0 … 3, got 4" in capsys.readouterr().err


def test_without_the_extra_a_search_is_one_line(sweep_file, faked, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    file = sweep_file({"a": {"low": 0.0, "high": 1.0}}, method="tpe", num_runs=4)
    before = sorted(tmp_path.rglob("*"))
    assert main(["sweep", file]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line == "error: optuna is not installed; run: pip install -e '.[optuna]'"
    assert sorted(tmp_path.rglob("*")) == before
