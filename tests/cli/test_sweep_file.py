"""Sweep files: points, searches, names of runs, and refused files."""

import datetime
import json
import math
import statistics
import sys
from pathlib import Path

import pytest
import yaml

from embeddings.cli.errors import ConfigError
from embeddings.cli.main import main
from embeddings.cli.sweep_file import NUM_RANDOM, Search, next_point, read_sweep, short_names
from embeddings.common import UserError
from tests.helpers.refusals import assert_refused, refused

TEMPERATURE = "model.init_args.loss.init_args.temperature"


@pytest.fixture
def write(tmp_path):
    """Writes a sweep file over an existing config; returns its path."""
    config = tmp_path / "method.yaml"
    config.write_text("model: {class_path: a.B}\n")

    def write_sweep(content, name="tried.yaml"):
        whole = {"configs": [str(config)], **content} if isinstance(content, dict) else content
        (tmp_path / name).write_text(yaml.safe_dump(whole) if isinstance(whole, dict | list) else whole)
        return tmp_path / name

    return write_sweep


def points(path):
    return list(read_sweep(path).points)


def test_a_grid_is_every_combination_the_last_key_fastest_and_a_list_is_unchanged(write):
    path = write("configs: [PLACE]\nparameters: {b: [1, 2], a: [x, y, null]}\n")
    path.write_text(path.read_text().replace("PLACE", str(path.parent / "method.yaml")))
    expected = [{"b": b, "a": a} for b in (1, 2) for a in ("x", "y", None)]
    assert points(path) == expected
    sweep = read_sweep(path)
    assert (sweep.name, sweep.recipe, sweep.method) == ("tried", "method", "grid")
    assert sweep.contents == ({"model": {"class_path": "a.B"}},)
    given = [{"a.b": 1, "c": "x"}, {"a.b": 2}]
    assert points(write({"method": "list", "parameters": given})) == given


def test_a_drawn_point_depends_only_on_seed_index_and_key(write):
    parameters = {"a": {"low": 1e-5, "high": 1e-1, "log": True}, "b": ["x", "y", "z"], "c": {"low": -1, "high": 1}}
    content = {"method": "random", "num_runs": 40, "seed": 3, "parameters": parameters}
    found = points(write(content))
    assert len(found) == 40
    assert points(write(content)) == found
    assert points(write(content | {"num_runs": 50}))[:40] == found
    fewer = points(write(content | {"parameters": {"c": parameters["c"]}}))
    assert [point["c"] for point in fewer] == [point["c"] for point in found]
    assert points(write(content | {"seed": 4})) != found
    # Literal numbers, to notice a version that draws other values.
    assert found[0] == {"a": 0.0191932, "b": "y", "c": -0.410577}
    assert {point["b"] for point in found} == {"x", "y", "z"}
    assert all(-1 <= point["c"] <= 1 for point in found)
    logarithms = [math.log10(point["a"]) for point in found]
    assert all(-5 <= value <= -1 for value in logarithms)
    assert sum(value < -3 for value in logarithms) == pytest.approx(20, abs=9)


@pytest.mark.parametrize("log", [True, False])
def test_integers_reach_both_ends(log, write):
    source = {"low": 1, "high": 4, "int": True, "log": log}
    found = [p["a"] for p in points(write({"method": "random", "num_runs": 60, "parameters": {"a": source}}))]
    assert set(found) == {1, 2, 3, 4}
    assert all(type(value) is int for value in found)


def test_numbers_without_a_point_are_numbers(write):
    text = f"configs: [{write({}).parent / 'method.yaml'}]\nparameters: {{a: [1e-5, 2E3, 1e5x, [1e-2]]}}"
    assert points(write(text)) == [{"a": 1e-5}, {"a": 2000.0}, {"a": "1e5x"}, {"a": [0.01]}]


def test_a_recipe_is_replaced_by_its_configs(tmp_path):
    (tmp_path / "s.yaml").write_text("recipe: mgh_h100x1\nparameters: {a: [1]}\n")
    sweep = read_sweep(tmp_path / "s.yaml")
    assert sweep.recipe == "mgh_h100x1"
    assert [Path(config).stem for config in sweep.configs] == ["base", "mgh", "h100x1_batch64", "mgh", "mgh_synthetic"]
    assert len(sweep.contents) == 5
    (tmp_path / "s.yaml").write_text("recipe: nope\nparameters: {a: [1]}\n")
    refused(ConfigError, "there is no recipe 'nope'", read_sweep, tmp_path / "s.yaml")


def test_runs_are_named_after_the_config_that_chooses_the_method(write, tmp_path):
    for name, text in (("data", "data: {}\n"), ("scale", "trainer: {devices: 2}\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
    configs = [str(tmp_path / f"{name}.yaml") for name in ("data", "method", "scale")]
    assert read_sweep(write({"configs": configs, "parameters": {"a": [1]}})).recipe == "method"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "named.yaml").write_text("config: ../method.yaml\n")
    named = [configs[0], str(tmp_path / "sub" / "named.yaml"), configs[2]]
    sweep = read_sweep(write({"configs": named, "parameters": {"a": [1]}}))
    assert sweep.recipe == "named"
    assert read_sweep(write({"configs": configs[::2], "parameters": {"a": [1]}})).recipe == "scale"


DATE = datetime.date(2024, 5, 1)
RANDOM = {"method": "random", "num_runs": 2}


ONE = {"a": [1]}
UNPARSED = [
    ("a: [1,", "not a YAML file"),
    ("[1]", "must be a mapping"),
    ({"parametres": {}}, "'parametres' is not accepted; did you mean parameters"),
    ({"recipe": "quickstart", "parameters": ONE}, "needs either recipe or configs"),
    ({"configs": [], "parameters": ONE}, "needs either recipe or configs"),
    ({"configs": ["nope.yaml"], "parameters": ONE}, r"config nope\.yaml: no such file"),
    ({"method": "bayes"}, "method: expected 'grid', .*, got bayes"),
    ({"parameters": ONE, "metric": {"mode": "most"}}, "metric: mode: expected 'max', 'min', got most"),
    ({"parameters": ONE, "metric": {"name": "x"}}, "metric: Option 'name' is not accepted"),
    ({"parameters": ONE, "metric": "x"}, "metric: must be a mapping, got 'x'"),
    ({"parameters": {}}, "parameters: must map config keys"),
    ({"parameters": {"a": []}}, r"parameters\.a: must be a list of values, got \[\]"),
    ({"parameters": {"a": [1, 2, 1]}}, r"parameters\.a: contains 1 twice"),
    ({"parameters": {"a": [1, DATE]}}, r"parameters\.a: datetime.date\(2024, 5, 1\) cannot be passed to fit; put"),
    ({"parameters": {"a": [{DATE: 1}, {1: 1, "b": 2}]}}, r"parameters\.a: .* cannot be passed to fit"),
    ({"parameters": {f"a{key}": list(range(10)) for key in range(10)}}, "makes 10000000000 points, more than"),
    ({"parameters": {"a b": [1]}}, "point 0: 'a b' is not a config key"),
    ({"parameters": {"trainer.logger": [True]}}, "trainer.logger is set by the sweep for each run"),
    ({"parameters": ONE, "num_runs": 3}, "num_runs: has no effect on method grid"),
    ({"method": "list", "parameters": []}, "must be a list of mappings"),
    ({"method": "list", "parameters": [{"a": 1}, {"a": 1}]}, "twice"),
    ({**RANDOM, "parameters": ONE, "num_runs": 10**10}, "num_runs: makes 10000000000 points"),
    ({**RANDOM, "parameters": ONE, "num_runs": 0}, "num_runs: must be an integer >= 1, got 0"),
    ({**RANDOM, "parameters": ONE, "seed": "x"}, "seed: expected int or null, got x"),
]
BAD_RANGES = [
    ({"low": 1}, "required: high"),
    ({"low": 2, "high": 2}, "low must be < high"),
    ({"low": 0, "high": math.inf}, "both finite"),
    ({"low": 0, "high": 10**400}, "too large"),
    ({"low": "0", "high": 2}, "must contain numbers"),
    ({"low": 0, "high": 2, "log": True}, r"low: must be > 0 with log"),
    ({"low": 0.5, "high": 2, "int": True}, "needs integers"),
    ({"low": 0, "high": 2, "log": "yes"}, "true or false"),
    ({"low": 0, "hihg": 2}, "'hihg' is not accepted; did you mean high"),
]
UNPARSED += [({**RANDOM, "parameters": {"a": source}}, rf"parameters\.a.*{says}") for source, says in BAD_RANGES]


@pytest.mark.parametrize(("content", "says"), UNPARSED)
def test_an_invalid_sweep_file_is_refused_with_the_key(content, says, write):
    path = write(content)
    assert str(path) in refused(UserError, says, read_sweep, path)


def test_a_short_name_has_as_few_parts_as_make_it_unique():
    keys = [TEMPERATURE, "model.init_args.router.temperature", "model.init_args.pooling.class_path", "a.lr"]
    found = list(short_names([dict.fromkeys(keys)]).values())
    assert found == ["loss.temperature", "router.temperature", "pooling", "lr"]
    twice = ["model.pooling", "model.pooling.class_path"]
    assert list(short_names([{twice[0]: 1}, {twice[1]: 2}]).values()) == twice


RANGES = {"a": {"low": 0.0, "high": 1.0}, "b": {"low": 1, "high": 64, "int": True, "log": True}}


@pytest.fixture
def has_optuna():
    pytest.importorskip("optuna", reason="the extra optuna is not installed")


def walked(search, mode, num_points, value_of):
    """The points of a search in which each run has the result `value_of(point)`."""
    tried = []
    for _ in range(num_points):
        point = next_point(search, mode, tried)
        tried.append((point, value_of(point)))
    return [point for point, _ in tried]


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_a_search_comes_nearer_to_the_best_than_random_points(mode, sign, has_optuna):
    found = walked(Search(RANGES, 40, 0), mode, 40, lambda point: sign * (point["a"] - 0.3) ** 2)
    distances = [abs(point["a"] - 0.3) for point in found]
    # The median distance of uniformly drawn values is 0.25.
    assert statistics.median(distances[NUM_RANDOM:]) < 0.15
    assert all(0 <= point["a"] <= 1 and 1 <= point["b"] <= 64 for point in found)
    assert {type(point["b"]) for point in found} == {int}
    assert all(point["a"] == float(f"{point['a']:.6g}") for point in found)


def test_a_proposed_point_depends_only_on_seed_and_results(has_optuna):
    search = Search(RANGES, 20, 3)
    found = walked(search, "min", 20, lambda point: point["a"])
    assert walked(search, "min", 20, lambda point: point["a"]) == found
    assert walked(Search(RANGES, 20, 4), "min", 1, lambda point: 0.0) != found[:1]
    other = walked(search, "max", 20, lambda point: point["a"])
    assert other[:NUM_RANDOM] == found[:NUM_RANDOM]
    assert other[NUM_RANDOM:] != found[NUM_RANDOM:]


def test_choices_may_be_mappings_and_runs_without_a_result_are_ignored(has_optuna):
    poolings = [{"class_path": "x.Mean"}, {"class_path": "x.Cls", "init_args": {"n": 1}}, None, "text", 2]
    search = Search({"p": poolings, "a": [0.1, 0.2]}, 30, 0)
    found = walked(search, "max", 30, lambda point: float(point["p"] == poolings[1]))
    assert all(point["p"] in poolings and point["a"] in (0.1, 0.2) for point in found)
    assert sum(point["p"] == poolings[1] for point in found[NUM_RANDOM:]) > 10
    unknown = walked(search, "max", 30, lambda point: None)
    assert len({json.dumps(point["p"]) for point in unknown}) == 5


def trained(folders):
    """The points of the trained runs, in order."""
    (proposals,) = folders[0].parent.glob("points-*.json")
    return json.loads(proposals.read_text())


def test_a_search_trains_each_point_once_and_prints_the_usual_table(sweep_file, faked, has_optuna, capsys):
    folders, endings = faked
    search = {"method": "tpe", "num_runs": 13, "seed": 1}
    file = sweep_file({"a": {"low": 0.1, "high": 9.0, "log": True}}, **search)
    endings[4] = (7,)
    assert main(["sweep", file, "--count"]) == 0
    assert main(["sweep", file, "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["13", "13 more points depend on the results of earlier ones"]
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


def test_an_array_task_proposes_the_missing_points_before_its_own(sweep_file, faked, has_optuna, tmp_path, capsys):
    folders, _ = faked
    file = sweep_file({"a": {"low": 0.0, "high": 1.0}}, method="tpe", num_runs=4)
    assert main(["sweep", file, "--index", "2"]) == 0
    assert len(trained(folders)) == 3
    assert len(folders) == 1
    assert main(["sweep", file]) == 0
    assert len(set(folders)) == 4
    assert_refused(capsys, tmp_path, "index must be from 0 to 3, got 4", main, ["sweep", file, "--index", "4"])


def test_without_the_extra_a_search_is_reported_in_one_line(sweep_file, faked, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    file = sweep_file({"a": {"low": 0.0, "high": 1.0}}, method="tpe", num_runs=4)
    says = "error: optuna is not installed; run: pip install -e '.[optuna]'"
    assert_refused(capsys, tmp_path, says, main, ["sweep", file])
