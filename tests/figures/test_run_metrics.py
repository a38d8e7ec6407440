import pytest
import yaml

from embeddings.common import InputError
from embeddings.figures.run_metrics import read_curve, read_curves

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


def write_part(run, metrics, ckpt_path=None):
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text(f"step,epoch,train/loss,val/ndcg_at_10\n{metrics}")
    (run / "config.yaml").write_text(yaml.safe_dump({"ckpt_path": ckpt_path}))
    return run


def test_a_curve_is_the_rows_that_have_it(run):
    assert read_curve(run, "train/loss") == ([0, 1], [2.0, 1.0])
    assert read_curve(run, "val/ndcg_at_10") == ([0, 2], [0.25, 0.5])
    assert read_curve(run, "val/mrr") == ([], [])


def test_all_columns_are_all_but_step_and_epoch(tmp_path):
    run = write_part(tmp_path / "version_0", "0,0,2.0,\n1,0,1.0,0.5\n")
    assert read_curves(run) == {"train/loss": ([0, 1], [2.0, 1.0]), "val/ndcg_at_10": ([1], [0.5])}


def test_a_row_that_was_cut_short_is_left_out(run):
    (run / "metrics.csv").write_text(METRICS + "30,1.")
    assert read_curve(run, "train/loss") == ([0, 1], [2.0, 1.0])


def test_a_run_that_went_on_has_what_it_went_on_from_and_its_own_steps_count(tmp_path):
    runs = tmp_path / "runs" / "name"
    write_part(runs / "version_0", "0,0,4.0,\n1,0,3.0,\n2,0,,0.1\n2,0,2.0,\n3,0,1.5,\n")
    later = write_part(runs / "version_1", "2,0,2.5,\n4,0,0.5,\n4,0,,0.3\n", "runs/name/version_0/checkpoints/a.ckpt")
    # Step 3 of the first part came to nothing.
    assert read_curve(later, "train/loss") == ([0, 1, 2, 4], [4.0, 3.0, 2.5, 0.5])
    assert read_curve(later, "val/ndcg_at_10") == ([2, 4], [0.1, 0.3])
    assert read_curve(runs / "version_0", "train/loss")[0] == [0, 1, 2, 3]


def test_what_a_lost_branch_logged_is_cut_in_all_columns_at_one_step(tmp_path):
    runs = tmp_path / "runs" / "name"
    lost = "".join(f"{step},0,{4 - step / 10},\n" for step in range(25))
    write_part(runs / "version_0", f"{lost}10,0,,0.3\n20,0,,0.9\n")
    own = "".join(f"{step},0,{3 - step / 10},\n" for step in range(10, 15))
    later = write_part(runs / "version_1", own, "runs/name/version_0/checkpoints/step10.ckpt")
    assert read_curve(later, "train/loss")[0] == list(range(15))
    # Logged under the ten steps made before the step that is numbered 10.
    assert read_curve(later, "val/ndcg_at_10") == ([10], [0.3])
    scored = write_part(runs / "version_2", "13,0,,0.4\n", "runs/name/version_1/checkpoints/step12.ckpt")
    assert read_curves(scored) == {
        "train/loss": (list(range(12)), [4 - step / 10 for step in range(10)] + [2.0, 1.9]),
        "val/ndcg_at_10": ([10, 13], [0.3, 0.4]),
    }


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"metrics.csv: no such file; give the folder of a run"):
        read_curve(tmp_path, "train/loss")


def test_parts_that_were_killed_before_they_logged_are_passed_over(tmp_path):
    runs = tmp_path / "runs" / "name"
    write_part(runs / "version_0", "0,0,4.0,\n")
    killed = write_part(runs / "version_1", "", "runs/name/version_0/checkpoints/a.ckpt")
    (killed / "metrics.csv").unlink()
    later = write_part(runs / "version_2", "1,0,3.0,\n", "runs/name/version_1/checkpoints/a.ckpt")
    assert read_curve(later, "train/loss") == ([0, 1], [4.0, 3.0])
    assert read_curve(killed, "train/loss") == ([0], [4.0])


@pytest.mark.parametrize("text", ["", "step,epoch,val/ndcg_at_10\n0,0,0.5\n"])
def test_a_run_that_has_logged_no_loss_yet_has_what_it_logged(text, tmp_path):
    (tmp_path / "metrics.csv").write_text(text)
    assert read_curve(tmp_path, "train/loss") == ([], [])
    assert read_curves(tmp_path) == ({"val/ndcg_at_10": ([0], [0.5])} if text else {})


def test_a_file_without_steps_is_no_runs(tmp_path):
    (tmp_path / "metrics.csv").write_text("a,train/loss\n1,2.0\n")
    with pytest.raises(InputError, match=r"metrics.csv: has no column 'step'; "):
        read_curve(tmp_path, "train/loss")


def test_a_row_that_ends_before_its_step_is_damage(tmp_path):
    (tmp_path / "metrics.csv").write_text("train/loss,step\n2.0\n")
    with pytest.raises(InputError, match="is damaged"):
        read_curve(tmp_path, "train/loss")


@pytest.mark.parametrize("row", ["1,much,0.5\n", "one,2.0,0.5\n", "1,\udc80,\n", ",2.0,\n"])
def test_a_value_that_is_no_number_is_damage(row, run):
    (run / "metrics.csv").write_text(METRICS + row, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(InputError, match=r"metrics.csv: is damaged \("):
        read_curves(run)
