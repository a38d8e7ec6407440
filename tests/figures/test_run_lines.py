from pathlib import Path

from embeddings.figures.run_lines import LONGEST_NAME, line_label, line_style, point_markers, run_names


def test_runs_of_one_name_are_told_apart_by_their_paths():
    runs = [Path("a/x/version_0"), Path("b/x/version_0"), Path("b/x/version_1")]
    assert run_names(runs) == ["a/x/version_0", "b/x/version_0", "x/version_1"]


def test_a_label_is_no_formula_is_seen_and_fits():
    assert line_label("$x$") == r"\$x\$"
    assert line_label("_hidden") == " _hidden"
    long = line_label("begin" + "x" * LONGEST_NAME + "end")
    assert len(long) == LONGEST_NAME
    assert long.startswith("…")
    assert long.endswith("end")


def test_forty_runs_look_unlike_each_other():
    looks = [line_style(number) for number in range(40)]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == 40


def test_few_points_are_marked():
    assert point_markers(1)["marker"] == "o"
    assert point_markers(1000) == {}
