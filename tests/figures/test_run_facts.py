"""The data of a run from its folder: configs, logs, records, parts of a resumed run."""

import json
from pathlib import Path

import pytest

from embeddings.common import InputError
from embeddings.figures.run_facts import (
    RunFacts,
    Summary,
    read_curves,
    read_run_config,
    read_run_record,
    run_parts,
)
from tests.figures.run_folders import write_run


def test_logged_values_are_summarised(tmp_path):
    facts = RunFacts.read(write_run(tmp_path / "run"))
    assert facts.summaries["val/ndcg_at_10"] == Summary((0, 0.25), (20, 0.5), (10, 0.75))
    assert "epoch" not in facts.summaries
    assert facts.last_step == 20
    assert facts.not_finite == {}
    assert facts.config_text == (tmp_path / "run" / "config.yaml").read_text()


def test_the_last_step_comes_from_the_record_or_the_log(tmp_path):
    end = {"end": {"how": "failed", "step": 23}}
    assert RunFacts.read(write_run(tmp_path / "a", record=end)).last_step == 23
    # The loss of the twentieth step is logged as that of step 19.
    only_loss = "step,train/loss\n18,1.0\n19,1.0\n"
    assert RunFacts.read(write_run(tmp_path / "b", record={"end": None}, metrics=only_loss)).last_step == 20
    assert RunFacts.read(write_run(tmp_path / "c", record={"end": None}, metrics=None)).last_step == 0


def test_settings_and_callbacks_are_found_in_any_config(tmp_path):
    facts = RunFacts.read(write_run(tmp_path / "run"))
    assert facts.setting("model.init_args.pooling.init_args.num_latents") == 64
    assert facts.setting("model.init_args.lora.rank") is None
    assert facts.setting("seed_everything.no.such") is None
    assert facts.callbacks("ExportModel") == [{"output": "checkpoints/small"}]
    assert facts.callbacks("RunHealth") == [{}]
    odd = RunFacts.read(write_run(tmp_path / "odd", {"trainer": {"callbacks": ["a", None]}, "model": 3}))
    assert odd.callbacks("ExportModel") == []
    assert odd.setting("model.init_args") is None


def test_each_part_of_a_run_has_its_record_and_errors(tmp_path):
    first = write_run(tmp_path / "name" / "version_0", record={"id": "one", "end": {"how": "interrupted"}})
    for rank, text in enumerate(('{"step": 3}', "{", "[1]")):
        (first / f"numeric-error-rank-{rank}.json").write_text(text)
    checkpoint = "runs/name/version_0/checkpoints/last.ckpt"
    later = write_run(tmp_path / "name" / "version_1", {"ckpt_path": checkpoint}, {"continued_id": "one"})
    parts = RunFacts.read(later).parts
    assert [part.folder.name for part in parts] == ["version_0", "version_1"]
    assert [part.resumed_from for part in parts] == [None, checkpoint]
    assert [part.end["how"] for part in parts] == ["interrupted", "finished"]
    assert [part.seconds for part in parts] == [None, 3930.0]
    assert parts[0].numeric_errors == [{"step": 3}, {}, {}]


def write_part(run, metrics=None, continued=None):
    """The folder of a process: its config and record, and what it logged; its id is made of its path."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("ckpt_path: null\n")
    (run / "run.json").write_text(json.dumps({"id": f"{run.parent.name}/{run.name}", "continued_id": continued}))
    if metrics is not None:
        (run / "metrics.csv").write_text(f"step,epoch,train/loss,val/ndcg_at_10\n{metrics}")
    return run


def names(parts):
    return [part.name for part in parts]


@pytest.mark.parametrize(
    ("name", "read", "damages"),
    [
        ("config.yaml", read_run_config, [b"", b"a: [", b"[" * 5000]),
        ("run.json", read_run_record, [b"[]", b"{", b"\xff"]),
    ],
)
def test_a_missing_or_damaged_file_is_one_line(name, read, damages, tmp_path):
    with pytest.raises(InputError, match=f"{name}: no such file; give a run.s folder"):
        read(tmp_path)
    for damage in damages:
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(InputError, match=f"{name}: is damaged; "):
            read(tmp_path)


def test_a_run_that_did_not_continue_a_neighbour_is_one_part(tmp_path):
    alone = write_part(tmp_path / "a" / "version_0")
    assert run_parts(alone) == [alone]
    elsewhere = write_part(tmp_path / "a" / "version_1", None, "b/version_0")
    assert run_parts(elsewhere) == [elsewhere]
    bare = tmp_path / "bare"
    bare.mkdir()
    assert run_parts(bare) == [bare]


def test_a_run_is_followed_from_part_to_part(tmp_path, monkeypatch):
    runs = tmp_path / "name"
    for number in range(12):
        write_part(runs / f"version_{number}", None, f"name/version_{number - 2}" if number > 1 else None)
    runs = runs.rename(tmp_path / "moved")
    assert names(run_parts(runs / "version_10")) == [f"version_{number}" for number in (0, 2, 4, 6, 8, 10)]
    monkeypatch.chdir(runs / "version_3")
    assert [part.resolve() for part in run_parts(Path())] == [runs / "version_1", runs / "version_3"]
    # A second run that continues the same one is not a part.
    (runs / "version_1" / "run.json").write_text("{")
    assert names(run_parts(write_part(tmp_path / "moved" / "version_12", None, "name/version_0"))) == [
        "version_0",
        "version_12",
    ]


def test_a_curve_is_the_rows_that_have_it(tmp_path):
    run = write_part(tmp_path / "run", "0,0,2.0,\n0,0,,0.25\n1,0,1.0,\n2,0,,0.5\n30,0,1.")
    curves = {"train/loss": ([0, 1], [2.0, 1.0]), "val/ndcg_at_10": ([0, 2], [0.25, 0.5])}
    assert read_curves(run) == curves  # without the row that was cut short
    assert read_curves(run)["val/mrr"] == ([], [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file; give a run.s folder"),
        ("a,train/loss\n1,2.0\n", "has no column 'step'; "),
        ("step,train/loss\n1,much\n", r"is damaged \("),
    ],
)
def test_a_missing_or_damaged_log_is_refused(text, says, tmp_path):
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(InputError, match=rf"metrics.csv: {says}"):
        read_curves(tmp_path)


def test_a_part_that_was_killed_before_it_logged_is_skipped(tmp_path):
    runs = tmp_path / "runs" / "name"
    write_part(runs / "version_0", "0,0,4.0,\n")
    killed = write_part(runs / "version_1", None, "name/version_0")
    later = write_part(runs / "version_2", "1,0,3.0,\n", "name/version_1")
    assert read_curves(later)["train/loss"] == ([0, 1], [4.0, 3.0])
    assert read_curves(killed)["train/loss"] == ([0], [4.0])


def test_values_after_the_last_checkpoint_are_dropped_in_all_columns(tmp_path):
    runs = tmp_path / "runs" / "name"
    lost = "".join(f"{step},0,{4 - step / 10},\n" for step in range(25))
    write_part(runs / "version_0", f"{lost}10,0,,0.3\n20,0,,0.9\n")
    own = "".join(f"{step},0,{3 - step / 10},\n" for step in range(10, 15))
    later = write_part(runs / "version_1", own, "name/version_0")
    assert read_curves(later)["train/loss"][0] == list(range(15))
    # Logged under the ten steps made before the step that is numbered 10.
    assert read_curves(later)["val/ndcg_at_10"] == ([10], [0.3])
    scored = write_part(runs / "version_2", "13,0,,0.4\n", "name/version_1")
    assert read_curves(scored) == {
        "train/loss": (list(range(12)), [4 - step / 10 for step in range(10)] + [2.0, 1.9]),
        "val/ndcg_at_10": ([10, 13], [0.3, 0.4]),
    }
