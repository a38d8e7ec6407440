import pytest

from embeddings.common.metrics_file import read_metrics

WHOLE = "step,train/loss\r\n0,2.5\r\n1,\r\n"
ROWS = [{"step": "0", "train/loss": "2.5"}, {"step": "1", "train/loss": ""}]


@pytest.mark.parametrize("torn", ["", "2", "20,", "20,1.", "\0\0\0"])
def test_a_line_that_was_cut_short_is_left_out(torn, tmp_path):
    (tmp_path / "metrics.csv").write_text(WHOLE + torn, newline="")
    assert list(read_metrics(tmp_path / "metrics.csv")) == ROWS


@pytest.mark.parametrize("text", ["", "step,train/lo"])
def test_a_file_without_a_whole_line_has_no_columns(text, tmp_path):
    (tmp_path / "metrics.csv").write_text(text)
    reader = read_metrics(tmp_path / "metrics.csv")
    assert (reader.fieldnames, list(reader)) == (None, [])
