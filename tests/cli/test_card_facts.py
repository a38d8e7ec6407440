import json
from pathlib import Path

import pytest

from embeddings.cli.export import facts_of_checkpoint, read_scores, run_folder
from embeddings.common import InputError

STATE = {"run_config": {"seed_everything": 0}, "global_step": 3}


def test_a_run_is_the_folder_around_its_checkpoints(tmp_path):
    assert run_folder(tmp_path / "run" / "checkpoints" / "last.ckpt") == tmp_path / "run"
    assert run_folder(tmp_path / "run" / "last.ckpt") == tmp_path / "run"


def test_the_facts_are_those_of_the_checkpoints_step(tmp_path):
    (tmp_path / "run.json").write_text('{"commit": "abc"}')
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/ndcg_at_10\n1,0.5,\n2,,0.25\n4,,0.75\n")
    facts = facts_of_checkpoint(STATE, tmp_path)
    assert (facts.num_steps, facts.record) == (3, {"commit": "abc"})
    assert facts.validation == [(2, 0.25)]


def test_files_that_are_missing_or_damaged_say_nothing(tmp_path):
    facts = facts_of_checkpoint({"run_config": {}}, tmp_path)
    assert (facts.num_steps, facts.record, facts.validation) == (0, {}, [])
    (tmp_path / "run.json").write_text("[")
    (tmp_path / "metrics.csv").write_text("step\n1\n")
    facts = facts_of_checkpoint({"run_config": {}}, tmp_path)
    assert (facts.record, facts.validation) == ({}, [])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "[1]",
        '[{"name": "a"}]',
        '[{"name": "a", "metrics": {}}]',
        '[{"name": "a", "metrics": {"x": "high"}}]',
        '[{"name": 3, "metrics": {"x": 0.5}}]',
        '[{"name": "a", "metrics": {"x": 0.5, "y": NaN}}]',
        '[{"name": "a", "metrics": {"x": -Infinity}}]',
        '[{"name": "a", "metrics": {"x": 1e999}}]',
        '[{"name": "a", "metrics": {"x": 1%s}}]' % ("0" * 400),
        '[{"name": "a", "metrics": {"x": true}}]',
        "[" * 100_000,
    ],
)
def test_what_evaluate_did_not_write_is_refused(content, tmp_path):
    path = Path(tmp_path / "scores.json")
    path.write_text(content)
    with pytest.raises(InputError, match=r"scores.json: .*; give the file that evaluate --output wrote"):
        read_scores(path)
    result = {"name": "a", "metrics": {"x": 0.5}}
    path.write_text(json.dumps([result]))
    assert read_scores(path) == [result]
