"""`fit --check`: what a run would do, told on a machine that lacks its hardware, and nothing written."""

import re

import pytest
import torch

from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.cli.plan import num_devices
from embeddings.data import store
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import component, run_config, write_config, write_pairs, write_retrieval_folder

GPUS = {"accelerator": "gpu", "devices": 8, "num_nodes": 2, "strategy": "ddp", "precision": "bf16-mixed"}


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Check a tiny run on two nodes of eight GPUs, none of which is here; returns the lines printed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def check(trainer=GPUS, *words, **data):
        config = run_config(tmp_path, **{"batch_size": 2, **data})
        config["trainer"] |= trainer
        path = write_config(tmp_path, config)
        before = {found: found.read_bytes() for found in tmp_path.rglob("*") if found.is_file()}
        capsys.readouterr()
        assert main(["fit", "--config", path, "--check", *words]) == 0
        assert {found: found.read_bytes() for found in tmp_path.rglob("*") if found.is_file()} == before
        return capsys.readouterr().out.splitlines()

    return check


STRATEGIES = ["ddp", component("embeddings.strategies.FSDP2Strategy"), component("embeddings.strategies.ZeroStrategy")]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["ddp", "fsdp2", "zero"])
def test_a_run_of_two_nodes_is_told_of_on_a_machine_without_a_gpu(strategy, checked, tmp_path):
    lines = checked({**GPUS, "strategy": strategy})
    model, *others = lines
    assert model.startswith(f"model: NVEmbedModule on {tmp_path}/backbone: ")
    total, trained, frozen = re.findall(r"[\d,]+(?= parameters| of them| frozen)", model)
    assert (total, frozen) == (trained, "0")
    given = "accelerator gpu, devices 8, num_nodes 2, " + ("strategy ddp, " if strategy == "ddp" else "")
    assert others == [
        "sources:  rows",
        "  pairs     64",
        "global batch: 32 (2 on each of 16 processes)",
        "steps: 4, 2 batches an epoch",
        f"hardware: {given}precision bf16-mixed; as given, not tried here",
        f"run: {tmp_path}/run/tiny/version_0",
        "resume: no",
        "no fault was found, and nothing was written",
    ]


def test_a_run_on_this_machine_says_nothing_of_missing_hardware(checked, tmp_path):
    model = component("embeddings.callbacks.ExportModel", output=str(tmp_path / "model"))
    lines = checked({"callbacks": [model], "accumulate_grad_batches": 4}, batch_size=4)
    assert "global batch: 4 (4 on each of 1 processes; 4 batches are one step)" in lines
    assert "hardware: accelerator cpu, devices 1, num_nodes 1, strategy auto" in lines
    assert f"model directory: {tmp_path}/model" in lines


@pytest.mark.parametrize(
    ("trainer", "more", "row", "says"),
    [
        (GPUS, {}, "", "the 64 training rows (batch_size x 16 ranks), got 8"),
        ({}, {}, '{"query": "alone"}\n', "pairs.jsonl:65: field 'positive'"),
        ({}, {"check": True}, "", "--check: is an option of the command line alone"),
    ],
    ids=["global batch", "bad row", "in a config"],
)
def test_what_a_run_would_refuse_is_refused_before_it_is_queued(
    trainer, more, row, says, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = run_config(tmp_path)
    config["trainer"] |= trainer
    with open(tmp_path / "pairs.jsonl", "a") as file:
        file.write(row)
    words = ["fit", "--config", write_config(tmp_path, config | more), *([] if more else ["--check"])]
    assert_refused(capsys, tmp_path, says, main, words)


def test_frozen_weights_are_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "lora").mkdir()
    config = run_config(tmp_path / "lora", "mistral", batch_size=2)
    config["trainer"] |= GPUS
    capsys.readouterr()
    assert main(["fit", "--config", write_config(tmp_path, config), "--check"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("model: "))
    total, trained, frozen = (int(number.replace(",", "")) for number in re.findall(r"[\d,]{3,}(?= )", line))
    assert total == trained + frozen
    assert frozen > trained > 0


def test_all_that_is_missing_is_named_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = [{"name": name, "path": f"{name}.jsonl"} for name in ("one", "two", "pairs")]
    config = run_config(tmp_path, sources=sources)
    config["trainer"]["callbacks"] = [component("embeddings.callbacks.RetrievalEvaluation", folder="eval")]
    words = ["fit", "--config", write_config(tmp_path, config), "--check"]
    both = "2 faults: data.sources: 2 paths name no file: one.jsonl (no such file), two.jsonl"
    for missing in (both, " | eval"):
        assert_refused(capsys, tmp_path, missing, main, words)
    for name in ("one", "two"):
        write_pairs(tmp_path / f"{name}.jsonl")
    assert_refused(capsys, tmp_path, "error: eval", main, words)
    write_retrieval_folder(tmp_path / "eval")
    assert main(words) == 0


def test_a_run_that_would_resume_names_its_checkpoint_and_converts_nothing_again(tmp_path, capsys, monkeypatch):
    config = run_config(tmp_path)
    config["trainer"] |= {"max_steps": 2, "callbacks": [component("ModelCheckpoint", every_n_train_steps=1)]}
    path = write_config(tmp_path, config)
    run_trainer(["fit", "--config", path])
    capsys.readouterr()
    monkeypatch.setattr(store, "_convert", lambda *_: pytest.fail("it is converted already"))
    before = sorted(tmp_path.rglob("*"))
    assert main(["fit", "--config", path, "--trainer.max_steps", "4", "--ckpt_path", "auto", "--check"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: "))
    assert re.fullmatch(rf"resume: {tmp_path}/run/tiny/version_0/checkpoints/\S+\.ckpt, step 2", line)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("devices", "count"), [(8, 8), ("8", 8), ([0, 1], 2), ("0,1", 2), ("0,", 1), ("auto", None), (-1, None)]
)
def test_the_devices_of_a_machine_are_counted(devices, count):
    assert num_devices(devices) == count
