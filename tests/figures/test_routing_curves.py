import pytest

from embeddings.common import InputError
from embeddings.figures import routing_curves
from embeddings.figures.png import pyplot
from embeddings.figures.routing_curves import draw_routing_curves

pytest.importorskip("matplotlib")

HEADER = "step,train/loss,routing/load_entropy,routing/idle_experts\n"


def write_run(folder, rows):
    folder.mkdir(parents=True)
    lines = [f"{step - 1},2.0,,\n{step},,{entropy},{idle}\n" for step, entropy, idle in rows]
    (folder / "metrics.csv").write_text(HEADER + "".join(lines))
    return folder


@pytest.fixture
def runs(tmp_path):
    balanced = write_run(tmp_path / "balanced" / "version_0", [(50, 0.9, 2.0), (100, 0.99, 0.0)])
    free = write_run(tmp_path / "free_$x$" / "version_0", [(50, 0.8, 3.0), (100, 0.5, 9.0), (150, 0.4, 11.0)])
    return [balanced, free]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The figure of some runs, kept from being closed."""
    figures = []
    monkeypatch.setattr(routing_curves, "write_png", lambda figure, output: figures.append(figure))

    def draw(runs):
        draw_routing_curves(runs, tmp_path / "a.png")
        figures[-1].draw_without_rendering()
        return figures[-1]

    yield draw
    for figure in figures:
        pyplot().close(figure)


def points(line):
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_each_run_has_a_line_in_both_panels_under_one_name(runs, drawn):
    figure = drawn(runs)
    entropy, idle = figure.axes
    assert [points(line) for line in entropy.lines[:2]] == [
        [(50, 0.9), (100, 0.99)],
        [(50, 0.8), (100, 0.5), (150, 0.4)],
    ]
    assert [points(line) for line in idle.lines] == [
        [(50, 2), (100, 0)],
        [(50, 3), (100, 9), (150, 11)],
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["balanced/version_0", r"free_\$x\$/version_0"]
    for line, handle in zip(entropy.lines[:2], legend.get_lines(), strict=True):
        assert line.get_color() == handle.get_color()
    assert [line.get_color() for line in entropy.lines[:2]] == [line.get_color() for line in idle.lines]
    assert len({line.get_color() for line in idle.lines}) == 2
    assert entropy.get_ylim()[0] < 0.4
    assert entropy.get_ylim()[1] > 1
    assert idle.get_xlabel() == "optimiser step"
    assert "load entropy" in entropy.get_ylabel()
    assert "idle experts" in idle.get_ylabel()


def test_the_legend_lies_below_the_panels_and_on_the_page_whatever_the_names(tmp_path, drawn):
    names = [f"_run_{number}{'_of_a_long_name' * 8}" for number in range(12)]
    figure = drawn([write_run(tmp_path / name / "v", [(10, 0.9, 0.0)]) for name in names])
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 12
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0 < box.y1 < min(axis.get_tightbbox().y0 for axis in figure.axes)
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[1].lines}
    assert len(looks) == 12


def test_the_picture_is_a_png(runs, tmp_path):
    draw_routing_curves(runs, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step,train/loss\n0,2.0\n", "metrics.csv: has no 'routing/load_entropy'; give a run with the callback"),
        (HEADER + "0,2.0,,\n", "has no 'routing/load_entropy'"),
        (HEADER + "50,,0.9,\n", "has no 'routing/idle_experts'"),
        (HEADER + "50,,nan,0\n", "has a 'routing/load_entropy' that is no number"),
        (HEADER + "50,,high,0\n", "is damaged"),
    ],
)
def test_a_run_without_routing_is_named(text, says, runs, tmp_path):
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(InputError, match=says):
        draw_routing_curves([*runs, tmp_path], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
