"""`fit`: merging of configs, output, warnings held back until training starts, and stand-ins."""

import logging
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embeddings.cli.errors import ConfigError
from embeddings.cli.fit import Checked, check_arguments, held_messages, run_trainer
from embeddings.cli.main import main
from embeddings.common.own_folder import record_all
from tests.helpers.refusals import assert_refused, refused
from tests.helpers.runs import component, run_config, write_config

OFF = {"in_batch_negatives": False}


def sources_of(monkeypatch, folder, config, *extra):
    found = []

    def note(cli):
        found.extend((each.name, each.instruction, each.in_batch_negatives) for each in cli.datamodule.sources)
        raise Checked

    monkeypatch.setattr("embeddings.cli.fit.TrainerCLI.after_instantiate_classes", note)
    with pytest.raises(Checked):
        run_trainer(["fit", "--config", write_config(folder, config), *extra])
    return found


def test_a_list_given_twice_replaces_the_first(tmp_path, monkeypatch):
    config = run_config(tmp_path)
    config["trainer"]["max_steps"] = 2
    path = config["data"]["init_args"]["sources"][0]["path"]
    config["data"]["init_args"]["sources"] = [{"name": "one", "path": path, "instruction": "X"} | OFF]
    later = {"data": {"init_args": {"sources": [{"name": "mine", "path": path}]}}}
    as_config = ["--config", write_config(tmp_path, later, "later.yaml")]
    for extra in (as_config, [f"--data.init_args.sources=[{{name: mine, path: {path}}}]"]):
        assert sources_of(monkeypatch, tmp_path, config, *extra) == [("mine", None, True)]
    expected = [("one", "X", False), ("mine", None, True)]
    assert sources_of(monkeypatch, tmp_path, config, f"--data.sources+=[{{name: mine, path: {path}}}]") == expected


def test_a_path_stands_for_a_source_named_after_its_file(tmp_path, monkeypatch):
    config = run_config(tmp_path)
    config["trainer"]["max_steps"] = 2
    first = Path(config["data"]["init_args"]["sources"][0]["path"])
    second = first.rename(first.with_name("mine.v2.jsonl"))
    first.write_bytes(second.read_bytes())
    expected = [(first.stem, None, True), ("mine", None, True)]
    assert sources_of(monkeypatch, tmp_path, config, "--data.sources", str(second)) == expected[1:]
    assert sources_of(monkeypatch, tmp_path, config, f"--data.sources=[{first},{second}]") == expected
    config["data"]["init_args"]["sources"] = [str(first), {"name": "mine", "path": str(second)}]
    assert sources_of(monkeypatch, tmp_path, config) == expected
    later = ["--config", write_config(tmp_path, {"data": {"init_args": {"sources": str(second)}}}, "later.yaml")]
    assert sources_of(monkeypatch, tmp_path, config, *later) == expected[1:]
    config["data"]["init_args"]["sources"] = str(first)
    added = ["--config", write_config(tmp_path, {"data": {"sources+": [str(second)]}}, "added.yaml")]
    assert sources_of(monkeypatch, tmp_path, config, *added) == expected


def test_one_callback_needs_no_list(tmp_path, capsys):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = component("ExportModel", output="one")
    words = ["fit", "--config", write_config(tmp_path, config), "--limit-data=20", "--check"]
    assert main(words) == 0
    assert "model directory: checkpoints/trials/one" in capsys.readouterr().out


def test_the_help_lists_the_settings_of_a_source(capsys):
    assert main(["fit", "--data.sources.help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in ("name", "path", "weight") if f"\n  --data.sources.{name} " not in shown] == []


def test_arguments_are_checked_without_a_run(tmp_path):
    line = ["fit", "--config", write_config(tmp_path, run_config(tmp_path))]
    before = sorted(tmp_path.rglob("*"))
    check_arguments(line)
    wrongs = {"--trainer.max_steps=x": "expected int", "--ckpt_path=no.ckpt": "no such file"}
    wrongs |= {"--ckpt_path=best": "is not a file; use auto", "--ckpt_path=12:53/no.ckpt": "no such file"}
    for wrong, says in wrongs.items():
        refused(ConfigError, says, check_arguments, [*line, wrong])
    assert sorted(tmp_path.rglob("*")) == before


def occupied(folder):
    """A folder with the model of another run."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    record_all(folder / "model")
    return str(folder / "model")


BEFORE_THE_MODEL = {
    "warm-up": (
        lambda run, _: run["model"]["init_args"]["schedule"].update(warmup_steps=9),
        "the run's 4 optimiser steps",
    ),
    "end": (
        lambda run, _: run["model"]["init_args"]["schedule"].update(total_steps=3),
        "must not be below the run's 4 optimiser steps",
    ),
    "decay": (lambda run, _: run["trainer"].update(max_steps=-1, max_epochs=-1), "must be known to decay"),
    "output": (
        lambda run, folder: run["trainer"]["callbacks"].append(component("ExportModel", output=occupied(folder))),
        "must not contain a model of another run",
    ),
    "folder": (
        lambda run, _: run["trainer"]["callbacks"].append(component("RetrievalEvaluation", folder="no_folder")),
        "no_folder: is not a folder",
    ),
    "file": (lambda run, _: run["data"]["init_args"]["sources"][0].update(path="no.jsonl"), "no.jsonl: no such file"),
}


@pytest.mark.parametrize("name", BEFORE_THE_MODEL)
def test_what_needs_no_model_is_refused_before_it_is_loaded(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("embeddings.models.backbone.load_backbone", lambda *_, **__: pytest.fail("the model is loaded"))
    monkeypatch.setattr("embeddings.modules.base.load_backbone", lambda *_, **__: pytest.fail("the model is loaded"))
    change, says = BEFORE_THE_MODEL[name]
    config = run_config(tmp_path)
    change(config, tmp_path)
    assert_refused(capsys, tmp_path, says, main, ["fit", "--config", write_config(tmp_path, config)])


def with_callbacks(tmp_path, *callbacks):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [{"class_path": path, "init_args": options} for path, options in callbacks]
    return ["fit", "--config", write_config(tmp_path, config)]


def test_fit_prints_paths_and_the_next_two_commands_at_the_end(tmp_path, capsys):
    model = str(tmp_path / "model")
    assert main(with_callbacks(tmp_path, ("embeddings.callbacks.ExportModel", {"output": model}))) == 0
    written = capsys.readouterr()
    run = tmp_path / "run" / "tiny" / "version_0"
    assert written.out.splitlines() == [
        f"run: {run} (metrics.csv, run.json, config.yaml)",
        f"model: {model}",
        f"next: python main.py evaluate --model {model} --data FOLDER",
        f'next: python main.py search --model {model} --corpus FILE "QUERY"',
    ]
    assert f"model directory: {model}" in written.err.splitlines()


@pytest.mark.filterwarnings("ignore:The number of training batches")  # Lightning's advice
@pytest.mark.parametrize(("interval", "commands"), [(1, ["show", "report"]), (50, ["report"])])
def test_each_suggested_command_works_also_after_a_run_too_short_to_have_logged(interval, commands, tmp_path, capsys):
    options = [f"--trainer.log_every_n_steps={interval}", "--trainer.enable_checkpointing=false"]
    assert main([*with_callbacks(tmp_path), *options]) == 0
    following = [shlex.split(line)[3:] for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    assert [words[0] for words in following] == commands
    for words in following:
        assert main(words) == 0


def test_early_stopping_on_an_unknown_metric_is_reported_in_one_line(tmp_path, capsys):
    stopping = ("lightning.pytorch.callbacks.EarlyStopping", {"monitor": "val/nothing"})
    assert main([*with_callbacks(tmp_path, stopping), "--trainer.max_steps=-1", "--trainer.max_epochs=1"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: EarlyStopping.monitor: Early stopping conditioned on metric `val/nothing` which")
    assert "train/loss" in line


def test_warnings_are_held_back_until_training_starts_and_dropped_after_an_error(recwarn):
    warnings.simplefilter("always")
    with held_messages():
        warnings.warn("this trainer is slow", UserWarning, stacklevel=1)
        logging.getLogger("lightning.pytorch").info("GPU available")
        assert len(recwarn) == 0
    assert [str(warning.message) for warning in recwarn] == ["this trainer is slow"]

    def failing():
        with held_messages():
            warnings.warn("this trainer is slow", UserWarning, stacklevel=1)
            raise ConfigError("no such file")

    refused(ConfigError, "no such file", failing)
    assert len(recwarn) == 1


def small(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """Run a small run's config; returns the exit code and the changes."""
    capsys.readouterr()
    code = main(["fit", "--config", write_config(folder, run_config(folder, "mistral")), *words])
    lines = capsys.readouterr().err.splitlines()
    return code, [line.removeprefix("changed ") for line in lines if line.startswith("changed ")]


def test_each_option_reports_its_changes_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = (0, ["data.sources: 1 of 1 limited to 9 rows each"])
    assert small(tmp_path, capsys, "--limit-data", "9", "--check") == cut
    before = sorted(tmp_path.rglob("*"))
    code, changes = small(tmp_path, capsys, "--stand-in", "tiny", "--check")
    assert code == 0
    assert changes[0].startswith(f"model.backbone.name: {tmp_path / 'backbone'} -> ")
    assert changes[1:] == ["data.batch_size: 8 -> 4"]
    assert sorted(tmp_path.rglob("*")) == before


def test_clustered_batches_read_all_rows_also_inside_a_curriculum(tmp_path: Path, capsys: Any) -> None:
    clustered = component("embeddings.data.ClusteredBatchSampler", clusters="clusters")
    for sampler in (clustered, component("embeddings.data.CurriculumBatchSampler", inner=clustered)):
        config = write_config(tmp_path, run_config(tmp_path, sampler=sampler))
        capsys.readouterr()
        check_arguments(["fit", "--config", config, "--limit-data", "9"])
        says = "changed data.sources: all rows, because their clusters contain all rows\n"
        assert capsys.readouterr().err == says


def test_command_line_options_keep_their_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trainer.max-steps=7", "--data.batch_size", "5", "--model.backbone.name", str(tmp_path / "backbone"))
    code, (change,) = small(tmp_path, capsys, "--stand-in=tiny", "--check", *words)
    assert code == 0
    # The stand-in has the architecture of the model on the command line.
    assert change.startswith(f"model.backbone.name: {tmp_path / 'backbone'} -> ")


def test_null_of_a_nested_option_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.backbone.revision", "null", "--model.backbone.dropout=null", "--print_config"]
    assert main(["fit", "--config", write_config(tmp_path, run_config(tmp_path)), *words]) == 0
    backbone = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["backbone"]
    assert (backbone["revision"], backbone["dropout"]) == (None, None)


def test_a_stand_in_replaces_the_weights_that_the_command_line_names(model, tmp_path, capsys) -> None:
    config = run_config(tmp_path)
    config["model"]["init_args"]["pooling"] = component("embeddings.models.MeanPooling")
    words = ["--stand-in=tiny", "--check", "--model.initial_model", model, "--model.backbone.num_layers=1"]
    assert main(["fit", "--config", write_config(tmp_path, config), *words]) == 0
    says = capsys.readouterr().err
    assert "changed model.backbone.num_layers: 1 -> None\n" in says
    assert f"changed model.initial_model: {model} -> None\n" in says


@pytest.mark.parametrize(
    ("precision", "has_bfloat16", "on_command_line"),
    [
        ("bf16-mixed", False, False),
        ("bf16-mixed", False, True),
        ("bf16-mixed", True, False),
        ("bf16-true", False, False),
    ],
)
def test_a_cpu_that_emulates_bfloat16_trains_in_float32_unless_the_command_line_says_otherwise(
    precision: str,
    has_bfloat16: bool,
    on_command_line: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("embeddings.cli.trainer.has_native_bfloat16", lambda device: has_bfloat16)
    config = run_config(tmp_path, "mistral")
    config["trainer"] |= {"precision": precision, "max_steps": 2}
    config["model"]["init_args"]["backbone"]["dtype"] = "bfloat16"
    config["model"]["init_args"]["lora"] = {"rank": 2}
    chosen = []
    monkeypatch.setattr(
        "embeddings.cli.fit.TrainerCLI.run_command",
        lambda run: chosen.append((run.trainer.precision, {weight.dtype for weight in run.model.parameters()})),
    )
    words = [f"--trainer.precision={precision}"] if on_command_line else []
    run_trainer(["fit", "--config", write_config(tmp_path, config), *words])
    changes = precision == "bf16-mixed" and not has_bfloat16 and not on_command_line
    dtypes = {torch.float32} if changes else {torch.float32, torch.bfloat16}
    assert chosen == [("32-true" if changes else precision, dtypes)]
    says = "changed trainer.precision: bf16-mixed -> 32-true, as this device has no products in bfloat16"
    assert (says in capsys.readouterr().err) is changes


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--limit-data", "0"), "limit_data must be >= 1, got 0; 2000 is enough"),
        (("--stand-in", "small"), "--stand-in"),
        (("--stand-in", "tiny", "--model.backbone.name", "a/b"), "a/b: is not on this machine, and its architecture"),
    ],
)
def test_a_bad_value_is_refused_in_a_line(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, run_config(tmp_path, "mistral"))
    assert_refused(capsys, tmp_path, says, main, ["fit", "--config", config, *words])
