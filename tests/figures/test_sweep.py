import pytest

from embeddings.figures.png import pyplot
from embeddings.figures.sweep import draw_sweep, is_numeric, means, spans_decades

DOTS = [
    ({"lr": lr, "pooling": pooling}, lr * 100 + len(pooling)) for lr in (0.001, 0.01) for pooling in ("cls", "mean")
]


@pytest.fixture
def axes(monkeypatch):
    """The panels of each picture, which is not written."""
    pytest.importorskip("matplotlib")
    kept = []
    monkeypatch.setattr("embeddings.figures.sweep.write_png", lambda figure, output: kept.extend(figure.axes))
    yield kept
    pyplot().close("all")


def test_numbers_have_an_axis_and_names_rows(axes, tmp_path):
    draw_sweep(DOTS, "score", "max", "two", tmp_path / "a.png")
    numbers, names = axes
    assert (numbers.get_xlabel(), numbers.get_ylabel(), numbers.get_xscale()) == ("lr", "score", "log")
    assert [text.get_text() for text in numbers.get_xticklabels()] == ["0.001", "0.01"]
    assert (names.get_title(), names.get_xlabel()) == ("pooling", "score")
    assert [text.get_text() for text in names.get_yticklabels()] == ["cls", "mean"]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_run_is_marked_in_every_panel_and_on_top(mode, axes, tmp_path):
    draw_sweep(DOTS, "score", mode, "two", tmp_path / "a.png")
    best = (max if mode == "max" else min)(value for _, value in DOTS)
    names = axes[1]
    found = [line for axis in axes for line in axis.get_lines() if line.get_label() == "best run"]
    assert [float(found[0].get_ydata()[0]), float(found[1].get_xdata()[0])] == [best, best]
    bottom, top = names.get_ylim()
    assert (bottom < top) == (mode == "max")


def test_means_are_drawn_where_runs_share_a_value(axes, tmp_path):
    draw_sweep(DOTS, "score", "max", "shared", tmp_path / "a.png")
    draw_sweep([({"lr": lr}, lr) for lr in (1.0, 2.0, 3.0)], "score", "max", "alone", tmp_path / "a.png")
    has_means = ["mean" in axis.get_legend_handles_labels()[1] for axis in axes]
    assert has_means == [True, True, False]
    assert axes[2].get_xscale() == "linear"


def test_means_are_in_the_order_of_numbers_or_of_the_metric():
    assert means(DOTS, "lr") == pytest.approx({0.001: 3.6, 0.01: 4.5})
    assert list(means([({"a": "x"}, 2.0), ({"a": "y"}, 1.0)], "a")) == ["y", "x"]
    assert is_numeric(DOTS, "lr")
    assert not is_numeric(DOTS, "pooling")
    assert [spans_decades(values) for values in ([1, 9], [1, 10], [0, 10])] == [False, True, False]


def test_one_run_alone_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    draw_sweep([({"a very long name " * 9: "value " * 40}, 0.5)], "score", "min", "one", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_dollar_sign_of_a_value_or_a_name_begins_no_formula(tmp_path):
    pytest.importorskip("matplotlib")
    odd = r"my$\a{$"
    draw_sweep([({odd: odd, f"{odd}2": 1.0}, 0.5)], odd, "min", odd, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
