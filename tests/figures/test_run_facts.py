import json

import pytest

from embeddings.common import InputError
from embeddings.figures.run_facts import RunFacts, Summary, when
from embeddings.figures.run_words import opening
from tests.figures.run_folders import METRICS, write_run


def test_what_was_logged_is_summed_up(tmp_path):
    facts = RunFacts.read(write_run(tmp_path / "run"))
    assert facts.summaries["val/ndcg_at_10"] == Summary((0, 0.25), (20, 0.5), (10, 0.75), 0.5)
    assert facts.summaries["throughput/padding"] == Summary((10, 0.125), (20, 0.25), (20, 0.25), 0.1875)
    assert "epoch" not in facts.summaries
    assert facts.last_step == 20
    assert facts.not_finite == {}
    assert facts.config_text == (tmp_path / "run" / "config.yaml").read_text()


def test_the_last_step_is_known_from_the_note_of_the_end_or_from_the_log(tmp_path):
    end = {"end": {"how": "failed", "step": 23}}
    assert RunFacts.read(write_run(tmp_path / "a", record=end)).last_step == 23
    # The loss of the twentieth step is logged as that of step 19.
    only_loss = "step,train/loss\n18,1.0\n19,1.0\n"
    assert RunFacts.read(write_run(tmp_path / "b", record={"end": None}, metrics=only_loss)).last_step == 20
    assert RunFacts.read(write_run(tmp_path / "c", record={"end": None}, metrics=None)).last_step == 0


def test_values_that_are_no_number_are_counted_and_left_out(tmp_path):
    run = write_run(tmp_path / "run", metrics=METRICS + "21,1,nan,inf,,\n22,1,nan,,,\n")
    facts = RunFacts.read(run)
    assert facts.not_finite == {"train/loss": 2, "val/ndcg_at_10": 1}
    assert facts.summaries["train/loss"].last == (20, 2.1)
    empty = RunFacts.read(write_run(tmp_path / "empty", metrics="step,train/loss\n0,nan\n"))
    assert empty.summaries == {}


def test_settings_and_callbacks_are_found_whatever_the_config_holds(tmp_path):
    facts = RunFacts.read(write_run(tmp_path / "run"))
    assert facts.setting("model.init_args.pooling.init_args.num_latents") == 64
    assert facts.setting("model.init_args.lora.rank") is None
    assert facts.setting("seed_everything.no.such") is None
    assert facts.callbacks("ExportModel") == [{"output": "checkpoints/small"}]
    assert facts.callbacks("RunHealth") == [{}]
    odd = RunFacts.read(write_run(tmp_path / "odd", {"trainer": {"callbacks": ["a", None]}, "model": 3}))
    assert odd.callbacks("ExportModel") == []
    assert odd.setting("model.init_args") is None


def test_the_parts_of_a_run_have_their_own_records_and_errors(tmp_path):
    first = write_run(tmp_path / "name" / "version_0", record={"end": {"how": "interrupted"}})
    for rank, text in enumerate(('{"step": 3}', "{", "[1]")):
        (first / f"numeric-error-rank-{rank}.json").write_text(text)
    checkpoint = "runs/name/version_0/checkpoints/last.ckpt"
    later = write_run(tmp_path / "name" / "version_1", {"ckpt_path": checkpoint})
    parts = RunFacts.read(later).parts
    assert [part.folder.name for part in parts] == ["version_0", "version_1"]
    assert [part.went_on_from for part in parts] == [None, checkpoint]
    assert [part.end["how"] for part in parts] == ["interrupted", "finished"]
    assert [part.seconds for part in parts] == [None, 3930.0]
    assert parts[0].numeric_errors == [{"step": 3}, {}, {}]


def test_a_process_that_ended_before_it_started_took_no_known_time(tmp_path):
    end = {"how": "finished", "step": 20, "time": "2026-03-01T09:00:00+00:00"}
    facts = RunFacts.read(write_run(tmp_path / "run", record={"end": end}))
    assert facts.parts[0].seconds is None
    assert "It took" not in opening(facts)


def test_a_folder_that_lacks_files_says_less_and_one_without_a_config_nothing(tmp_path):
    run = write_run(tmp_path / "run", metrics=None)
    (run / "run.json").unlink()
    facts = RunFacts.read(run)
    assert (facts.record, facts.curves, facts.parts[0].end) == ({}, {}, {})
    (run / "config.yaml").unlink()
    with pytest.raises(InputError, match=r"config.yaml: no such file"):
        RunFacts.read(run)
    (run / "config.yaml").write_text("a: 1")
    (run / "run.json").write_text(json.dumps([1]))
    with pytest.raises(InputError, match=r"run.json: is damaged"):
        RunFacts.read(run)


def test_times_are_compared_in_utc():
    assert when("2026-03-01T12:00:00+02:00") == when("2026-03-01T10:00:00+00:00")
    for text in (None, 3, "yesterday", "9999-99-99"):
        assert when(text) is None
