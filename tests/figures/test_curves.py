"""Curves of one run and of several."""

import pytest

from embeddings.common import InputError
from embeddings.figures.drawing import WINDOW, draw_curves, draw_routing_curves

pytest.importorskip("matplotlib")

HEADER = "step,train/loss,val/ndcg_at_10\n"
ONE = HEADER + "0,2.0,\n0,,0.25\n1,1.0,\n2,,0.5\n"


def write_run(folder, text=ONE):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text(text)
    return folder


@pytest.fixture
def drawn(kept, tmp_path):
    """The figure of some runs."""

    def draw(runs, function=draw_curves):
        function(runs, tmp_path / "a.png")
        return kept[-1]

    return draw


def points(line):
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_a_run_has_loss_running_mean_and_scores(tmp_path, drawn):
    many = "".join(f"{step},{float(step)},\n" for step in range(20))
    figure = drawn([write_run(tmp_path / "name" / "version_0", HEADER + "0,,0.25\n" + many + "20,,0.5\n")])
    loss, score = figure.axes
    each, mean = loss.lines
    assert points(each) == [(step + 1, step) for step in range(20)]
    assert mean.get_ydata()[0] == 0
    assert mean.get_ydata()[3] == sum(range(4)) / 4
    assert mean.get_ydata()[-1] == sum(range(20 - WINDOW, 20)) / WINDOW
    assert points(score.lines[0]) == [(0, 0.25), (20, 0.5)]
    assert legend_of(figure) == ["name/version_0"]
    assert (score.get_ylabel(), score.get_xlabel()) == ("validation nDCG@10", "optimiser step")
    assert "training loss" in loss.get_ylabel()


ROUTED = "step,train/loss,routing/load_entropy,routing/idle_experts\n"


def write_routed(folder, rows):
    lines = [f"{step - 1},2.0,,\n{step},,{entropy},{idle}\n" for step, entropy, idle in rows]
    return write_run(folder, ROUTED + "".join(lines))


@pytest.fixture
def runs(tmp_path):
    balanced = write_routed(tmp_path / "balanced" / "version_0", [(50, 0.9, 2.0), (100, 0.99, 0.0)])
    free = write_routed(tmp_path / "free_$x$" / "version_0", [(50, 0.8, 3.0), (100, 0.5, 9.0), (150, 0.4, 11.0)])
    return [balanced, free]


def test_each_run_has_a_line_in_both_panels_under_one_name(runs, drawn):
    figure = drawn(runs, draw_routing_curves)
    entropy, idle = figure.axes
    expected = [[(50, 0.9), (100, 0.99)], [(50, 0.8), (100, 0.5), (150, 0.4)]]
    assert [points(line) for line in entropy.lines] == expected
    wanted = [[(50, 2), (100, 0)], [(50, 3), (100, 9), (150, 11)]]
    assert [points(line) for line in idle.lines] == wanted
    (legend,) = figure.legends
    assert legend_of(figure) == ["balanced/version_0", r"free_\$x\$/version_0"]
    for line, handle in zip(entropy.lines, legend.get_lines(), strict=True):
        assert line.get_color() == handle.get_color()
    assert [line.get_color() for line in entropy.lines] == [line.get_color() for line in idle.lines]
    assert len({line.get_color() for line in idle.lines}) == 2
    assert idle.get_xlabel() == "optimiser step"
    assert "load entropy" in entropy.get_ylabel()
    assert "idle experts" in idle.get_ylabel()


def test_a_run_without_the_values_is_named(runs, tmp_path):
    write_run(tmp_path, "step,val/loss\n0,2.0\n")
    with pytest.raises(InputError, match=r"metrics\.csv: has no 'routing/load_entropy'; name a run with the callback"):
        draw_routing_curves([*runs, tmp_path], tmp_path / "a.png")
    with pytest.raises(InputError, match=r"has no 'train/loss'; name a run that logged"):
        draw_curves([tmp_path], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
