import pytest

from embeddings.cli.main import main
from embeddings.common import InputError
from embeddings.figures.curves import draw_curves, read_curve

METRICS = """step,train/loss,val/ndcg_at_10
0,2.0,
0,,0.25
1,1.0,
2,,0.5
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "metrics.csv").write_text(METRICS)
    return tmp_path


def test_a_curve_is_the_rows_that_have_it(run):
    assert read_curve(run, "train/loss") == ([0, 1], [2.0, 1.0])
    assert read_curve(run, "val/ndcg_at_10") == ([0, 2], [0.25, 0.5])


def test_a_row_that_was_cut_short_is_left_out(run):
    (run / "metrics.csv").write_text(METRICS + "30,1.")
    assert read_curve(run, "train/loss") == ([0, 1], [2.0, 1.0])


def test_the_picture_is_a_png(run):
    pytest.importorskip("matplotlib")
    draw_curves(run, run / "curves.png")
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_metrics_is_one_line(tmp_path, capsys):
    assert main(["show", "curves", "--run", str(tmp_path)]) == 2
    assert "metrics.csv: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(("header", "missing"), [("a,train/loss", "step"), ("step,b", "train/loss"), ("", "step")])
def test_a_file_without_the_columns_is_one_line_and_no_picture(header, missing, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.csv").write_text(f"{header}\n1,2.0\n" if header else "")
    assert main(["show", "curves", "--run", str(tmp_path)]) == 2
    assert f"metrics.csv: has no column '{missing}'; " in capsys.readouterr().err
    assert not (tmp_path / "curves.png").exists()


def test_a_row_that_ends_before_its_step_is_damage(tmp_path):
    (tmp_path / "metrics.csv").write_text("train/loss,step\n2.0\n")
    with pytest.raises(InputError, match="is damaged"):
        read_curve(tmp_path, "train/loss")


@pytest.mark.parametrize("row", ["1,much,0.5\n", "one,2.0,0.5\n", "1,\udc80,\n", ",2.0,\n"])
def test_a_damaged_file_is_one_line_and_no_picture(row, run, capsys):
    pytest.importorskip("matplotlib")
    (run / "metrics.csv").write_text(METRICS + row, encoding="utf-8", errors="surrogateescape")
    assert main(["show", "curves", "--run", str(run)]) == 2
    error = capsys.readouterr().err
    assert "metrics.csv: is damaged (" in error
    assert error.count("\n") == 1
    assert not (run / "curves.png").exists()
