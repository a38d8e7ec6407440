import pytest

from embeddings.cli.main import main
from embeddings.figures import curves
from embeddings.figures.curves import WINDOW, draw_curves
from embeddings.figures.png import pyplot

HEADER = "step,train/loss,val/ndcg_at_10\n"
ONE = HEADER + "0,2.0,\n0,,0.25\n1,1.0,\n2,,0.5\n"


def write_run(folder, text=ONE):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text(text)
    return folder


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The figure of some runs, kept from being closed."""
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(curves, "write_png", lambda figure, output: figures.append(figure))

    def draw(runs):
        draw_curves(runs, tmp_path / "a.png")
        figures[-1].draw_without_rendering()
        return figures[-1]

    yield draw
    for figure in figures:
        pyplot().close(figure)


def points(line):
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_a_run_has_its_loss_its_mean_and_its_scores(tmp_path, drawn):
    many = "".join(f"{step},{float(step)},\n" for step in range(20))
    figure = drawn([write_run(tmp_path / "name" / "version_0", HEADER + "0,,0.25\n" + many + "20,,0.5\n")])
    loss, score = figure.axes
    each, mean = loss.lines
    assert points(each) == [(step + 1, step) for step in range(20)]
    assert mean.get_ydata()[0] == 0
    assert mean.get_ydata()[3] == sum(range(4)) / 4
    assert mean.get_ydata()[-1] == sum(range(20 - WINDOW, 20)) / WINDOW
    assert points(score.lines[0]) == [(0, 0.25), (20, 0.5)]
    assert [text.get_text() for text in score.texts] == ["0.250", "0.500"]
    assert legend_of(figure) == ["name/version_0"]
    assert (score.get_ylabel(), score.get_xlabel()) == ("validation nDCG@10", "optimiser step")
    assert "training loss" in loss.get_ylabel()


def test_several_runs_have_a_colour_each_in_both_panels(tmp_path, drawn):
    two = HEADER + "0,3.0,\n4,2.5,\n5,,0.75\n"
    figure = drawn([write_run(tmp_path / "one" / "version_0"), write_run(tmp_path / "two" / "version_0", two)])
    loss, score = figure.axes
    assert [points(line) for line in score.lines] == [[(0, 0.25), (2, 0.5)], [(5, 0.75)]]
    assert points(loss.lines[2]) == [(1, 3.0), (5, 2.5)]
    colours = [line.get_color() for line in score.lines]
    assert len(set(colours)) == 2
    assert [line.get_color() for line in loss.lines] == [colours[0], colours[0], colours[1], colours[1]]
    assert legend_of(figure) == ["one/version_0", "two/version_0"]
    assert len(score.texts) == 0


def test_without_scores_there_is_one_panel_and_a_run_without_has_no_line(tmp_path, drawn):
    bare = write_run(tmp_path / "bare", HEADER + "0,3.0,\n")
    assert len(drawn([bare]).axes) == 1
    loss, score = drawn([bare, write_run(tmp_path / "scored")]).axes
    assert [points(line) for line in score.lines] == [[], [(0, 0.25), (2, 0.5)]]
    # One value alone is a dot: a line of it would not be seen.
    assert loss.lines[1].get_marker() == "o"


def test_no_text_leaves_the_page_however_many_runs_and_scores(tmp_path, drawn):
    many = HEADER + "".join(f"{step},2.0,\n{step},,0.{step % 9}1\n" for step in range(300))
    runs = [write_run(tmp_path / f"_run_{number}{'_of_a_long_name' * 8}" / "v", many) for number in range(12)]
    figure = drawn(runs)
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 12
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0 < box.y1 < min(axis.get_tightbbox().y0 for axis in figure.axes)
    assert len(drawn(runs[:1]).axes[1].texts) <= 12


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    draw_curves([write_run(tmp_path / "run")], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "metrics.csv: no such file"),
        ("a,train/loss\n", "metrics.csv: has no column 'step'; "),
        ("", "metrics.csv: has no 'train/loss'; give a run that logged its loss"),
        (HEADER + "0,,0.25\n", "metrics.csv: has no 'train/loss'; "),
        (ONE + "1,much,0.5\n", "metrics.csv: is damaged ("),
    ],
)
def test_what_is_no_runs_file_is_one_line_and_no_picture(text, says, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    if text is not None:
        write_run(tmp_path, text)
    assert main(["show", "curves", "--run", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "curves.png").exists()
