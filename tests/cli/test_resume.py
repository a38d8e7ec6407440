"""The checkpoint that a run resumes from, and checkpoints of other runs."""

import inspect
import os
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from embeddings import data, losses, models, modules
from embeddings.cli.fit import run_trainer
from embeddings.cli.main import dispatch
from embeddings.cli.trainer import _FREE, check_resumable, find_latest_checkpoint, first_difference, pin_checkpoint_dir
from embeddings.common import InputError, OptionError
from embeddings.common.checkpoint_file import peek_checkpoint
from tests.helpers.checkpoints import RESUMABLE, damage, save
from tests.helpers.refusals import refused
from tests.helpers.runs import run_config, write_config, write_pairs


def test_the_newest_checkpoint_at_any_depth_is_taken(tmp_path):
    save(RESUMABLE, tmp_path / "a" / "version_0" / "last.ckpt", 1)
    newest = save(RESUMABLE, tmp_path / "a" / "version_1" / "step=3.ckpt", 3)
    save(RESUMABLE, tmp_path / "a" / "version_1" / "last.ckpt", 2)
    (tmp_path / ".step=4.ckpt.abc.tmp").write_bytes(b"half a file")
    (tmp_path / "link.ckpt").symlink_to("gone.ckpt")
    assert find_latest_checkpoint(tmp_path) == newest
    assert find_latest_checkpoint(f"{tmp_path}/a/../a/") == newest
    (tmp_path / "step=4.ckpt" / "parts-of-a-killed-run").mkdir(parents=True)
    assert find_latest_checkpoint(tmp_path) == newest


def test_an_unusable_checkpoint_is_skipped_with_a_line(tmp_path, capsys, monkeypatch):
    oldest = save(RESUMABLE, tmp_path / "step=1.ckpt", 1)
    damage(save(RESUMABLE | {"state_dict": {"w": torch.ones(3)}}, tmp_path / "step=2.ckpt", 2))
    weights = {key: RESUMABLE[key] for key in RESUMABLE if key not in ("optimizer_states", "lr_schedulers")}
    save(weights, tmp_path / "w.ckpt", 3)
    torch.save(RESUMABLE, tmp_path / "torch.ckpt")
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "step=1.ckpt").read_bytes()[:-9])
    for place, name in ((4, "torch.ckpt"), (5, "last.ckpt")):
        os.utime(tmp_path / name, (place, place))
    assert find_latest_checkpoint(tmp_path) == oldest
    lines = capsys.readouterr().err.splitlines()
    says = [
        "last.ckpt: is not a complete checkpoint of this library; ",
        "torch.ckpt: is not a complete checkpoint of this library; ",
        "w.ckpt: cannot be resumed from, because it has no lr_schedulers, optimizer_states; ",
        "step=2.ckpt: is damaged: ",
    ]
    assert len(lines) == len(says)
    beginnings = [f"left out: {tmp_path}/{beginning}" for beginning in says]
    assert all(line.startswith(beginning) for line, beginning in zip(lines, beginnings, strict=True))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert find_latest_checkpoint(tmp_path) == oldest
    assert capsys.readouterr().err == ""
    os.unlink(oldest)
    assert find_latest_checkpoint(tmp_path) is None


def test_a_checkpoint_that_another_run_removes_meanwhile_is_skipped(tmp_path, monkeypatch):
    oldest, newest = (save(RESUMABLE, tmp_path / f"step={step}.ckpt", step) for step in (1, 2))

    def peek(path):
        Path(newest).unlink(missing_ok=True)
        return peek_checkpoint(path)

    monkeypatch.setattr("embeddings.cli.trainer.peek_checkpoint", peek)
    assert find_latest_checkpoint(tmp_path) == oldest


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_checkpoint_of_another_run_is_skipped(tmp_path, capsys):
    config = run_config(tmp_path)
    keep = {"every_n_train_steps": 1, "save_top_k": 0, "save_last": True, "dirpath": str(tmp_path / "run" / "kept")}
    config["trainer"]["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keep}]

    def fit(*words):
        return run_trainer(["fit", "--config", write_config(tmp_path, config), *words]).trainer

    def left_out():
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out: ")]

    fit("--trainer.max_steps=2")
    last = str(tmp_path / "run" / "kept" / "last.ckpt")
    same = ("--trainer.max_steps=3", "--data.init_args.num_workers=1", "--trainer.logger=false")
    trainer = fit("--ckpt_path=auto", *same)
    assert (trainer.ckpt_path, trainer.global_step, left_out()) == (last, 3, [])
    trainer = fit("--ckpt_path=auto", "--model.init_args.loss.init_args.temperature=0.2", "--trainer.max_steps=2")
    assert (trainer.ckpt_path, trainer.global_step) == (None, 2)
    differs = "model.init_args.loss.init_args.temperature is 0.1 in the checkpoint and 0.2 here"
    says = f"left out: {last}: belongs to another run: {differs}; restore it, or give the file by --ckpt_path"
    assert left_out() == [says]
    assert fit("--ckpt_path", last, "--model.init_args.normalize=false", "--trainer.max_steps=3").ckpt_path == last


def test_another_global_batch_is_another_run_and_the_same_one_over_other_ranks_is_not(tmp_path):
    """The checkpoint's plan has the global batch size: 16 may be 16 on one rank or 8 on two."""
    run = {"data": {"class_path": "embeddings.data.EmbeddingDataModule", "init_args": {"batch_size": 8}}}
    plan = {"EmbeddingDataModule": {"loader": {"plan": {"global_batch_size": 16}}}}
    saved = save(RESUMABLE | plan | {"run_config": run}, tmp_path / "last.ckpt")
    assert find_latest_checkpoint(tmp_path, run, 16) == saved
    assert check_resumable(Path(saved), run, 16) is None
    assert check_resumable(Path(saved), run, 32) == "its global batch size is 16, this run's is 32"


def test_a_checkpoint_with_another_pooling_is_refused_by_name(tmp_path):
    config = run_config(tmp_path)
    for name in ("MeanPooling", "LastTokenPooling"):
        config["model"]["init_args"]["pooling"] = {"class_path": f"embeddings.models.{name}"}
        if name == "MeanPooling":
            saved = save(RESUMABLE | {"run_config": {"model": deepcopy(config["model"])}}, tmp_path / "last.ckpt")
    words = ["fit", "--config", write_config(tmp_path, config), "--ckpt_path", saved]
    what = "the checkpoint has MeanPooling, this config LastTokenPooling"
    says = f"--ckpt_path {saved}: {what}; resume with the configs that wrote it"
    assert refused(InputError, "Pooling", run_trainer, words) == says


def test_checkpoints_continue_in_the_folder_that_lightning_recognises(tmp_path):
    """Lightning recognises its best checkpoints only if the folder is written in the same way."""
    saved = save(RESUMABLE, tmp_path / "runs" / "checkpoints" / "last.ckpt", 1)
    for root in ("runs", "./runs", str(tmp_path / "runs")):
        before = ModelCheckpoint(monitor="x")
        options = {"default_root_dir": root, "logger": False, "accelerator": "cpu"}
        trainer = Trainer(callbacks=[before], **options)
        before.setup(trainer, trainer.lightning_module, "validate")
        kept, elsewhere = ModelCheckpoint(monitor="x"), ModelCheckpoint(dirpath=tmp_path / "best")
        trainer = Trainer(callbacks=[kept, elsewhere], **options)
        found = find_latest_checkpoint(root)
        assert os.path.samefile(found, saved)
        pin_checkpoint_dir(trainer, found)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept.load_state_dict(before.state_dict() | {"best_k_models": {"a.ckpt": 1.0}})
        assert kept.best_k_models
        assert elsewhere.dirpath == str(tmp_path / "best")


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:The dirpath has changed")
def test_another_plan_of_the_data_is_refused_before_a_file_is_written(tmp_path):
    config = run_config(tmp_path)

    def fit(*words):
        return run_trainer(["fit", "--config", write_config(tmp_path, config), *words]).trainer

    kept = fit("--trainer.max_steps=2").checkpoint_callback.best_model_path
    before = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
    assert len(before) >= 4
    write_pairs(tmp_path / "pairs.jsonl", num_pairs=24)
    refused(OptionError, r"data num_steps must be 8 as in the checkpoint .*, got 3", fit, "--ckpt_path", kept)
    assert {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()} == before
    write_pairs(tmp_path / "pairs.jsonl")
    assert fit("--ckpt_path", "auto").global_step == 4


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_auto_is_refused_where_it_would_not_find_the_runs_checkpoints(tmp_path):
    """A job that is queued again would start from the beginning each time."""
    path = write_config(tmp_path, run_config(tmp_path))
    words = ["fit", "--config", path, "--ckpt_path=auto", "--trainer.max_steps=2"]
    apart = f"must contain the run's checkpoints for --ckpt_path auto, but they are in {tmp_path / 'run/tiny'}, got "
    for checked in ([], ["--check"]):
        assert apart in refused(
            OptionError, "give --run-dir", dispatch, [*words, "--trainer.default_root_dir=job", *checked]
        )
    for steps in (2, 3):
        root = ["--trainer.default_root_dir=job", "--run-dir=job", f"--trainer.max_steps={steps}"]
        trainer = run_trainer([*words, *root]).trainer
    assert trainer.ckpt_path.endswith("step=2.ckpt")


def test_a_second_run_does_not_write_to_the_folder_of_the_first(tmp_path):
    words = ["fit", "--config", write_config(tmp_path, run_config(tmp_path)), "--trainer.logger.init_args.version=one"]
    run_trainer(words)
    for path in (tmp_path / "run").rglob("*.ckpt"):
        path.unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    says = "/one: is the folder of another run; leave out the version of trainer.logger"
    for more in ([], ["--ckpt_path=auto"]):
        refused(InputError, says, run_trainer, [*words, *more])
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    # A run that ended before its first checkpoint starts again in its folder.
    record = tmp_path / "run/tiny/one/run.json"
    record.write_text(record.read_text().replace('"finished"', '"failed"'))
    refused(InputError, says, run_trainer, [*words, "--ckpt_path=auto", "--model.normalize=false"])
    assert run_trainer([*words, "--ckpt_path=auto"]).trainer.global_step == 4


RUN: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"devices": 1, "num_nodes": 1, "max_steps": 4, "logger": None},
    "model": {
        "class_path": "embeddings.modules.NVEmbedModule",
        "init_args": {
            "backbone": {"name": "a", "gradient_checkpointing": False},
            "lora": None,
            "schedule": {"warmup_steps": 1, "total_steps": None},
        },
    },
    "data": {
        "class_path": "embeddings.data.EmbeddingDataModule",
        "init_args": {
            "batch_size": 8,
            "num_workers": 0,
            "sampler": {"class_path": "CurriculumBatchSampler", "init_args": {"total_steps": None}},
            "sources": [{"name": "pairs", "path": "pairs.jsonl", "licence": None}],
            "text": {"prompts": {"query": "q: "}},
        },
    },
}


def changed(**values: Any) -> dict[str, Any]:
    """The run with other settings: `a__b` is the setting b of a."""
    run = deepcopy(RUN)
    for path, value in values.items():
        owner: Any = run
        *owners, name = path.split("__")
        for key in owners:
            owner = owner[int(key) if key.isdigit() else key]
        owner[name] = value
    return run


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (changed(seed_everything=1), "seed_everything is 0 in the checkpoint and 1 here"),
        (changed(model__init_args__backbone__name="b"), "model.init_args.backbone.name is 'a' in the checkpoint"),
        (changed(model__init_args__lora={"rank": 4}), "model.init_args.lora is None in the checkpoint and {'rank': 4}"),
        (changed(data__init_args__sources__0__path="other.jsonl"), "data.init_args.sources[0].path is 'pairs.jsonl'"),
        (changed(data__init_args__sources=[]), "data.init_args.sources is [{"),
        (changed(data__init_args__sampler__init_args__total_steps=9), "data.init_args.sampler.init_args.total_steps"),
        (
            changed(data__init_args__text__prompts__document="d: "),
            "data.init_args.text.prompts.document is None in the",
        ),
        (
            changed(data__init_args__text__suffix="!"),
            "data.init_args.text.suffix is None in the checkpoint and '!' here",
        ),
    ],
)
def test_another_model_data_or_seed_is_another_run(given: dict[str, Any], says: str) -> None:
    assert (first_difference(RUN, given) or "").startswith(says)


@pytest.mark.parametrize(
    "given",
    [
        RUN,
        changed(seed_everything=True),
        changed(trainer__max_steps=9, trainer__logger={"class_path": "CSVLogger"}),
        changed(model__init_args__schedule__total_steps=9),
        changed(data__init_args__sources__0__licence="apache-2.0"),
        changed(model__init_args__new="an option that a later version has"),
        changed(data__init_args__batch_size=16),  # the global batch size is in the checkpoint's plan
        changed(trainer__devices=2, trainer__num_nodes=2, data__init_args__batch_size=4),
    ],
)
def test_options_of_hardware_and_length_do_not_make_another_run(given: dict[str, Any]) -> None:
    assert first_difference(RUN, given) is None
    assert first_difference({}, given) is None  # a checkpoint without a config


# All options whose names are in `_FREE`. Samplers get the batch size of a rank from the data.
FREE = {
    "BackboneConfig": "attn_implementation compile gradient_checkpointing",
    "BatchSampler": "batch_size",
    "BlendedBatchSampler": "batch_size",
    "ClusteredBatchSampler": "batch_size",
    "CurriculumBatchSampler": "batch_size total_steps",
    "EmbeddingDataModule": "batch_size cache_dir num_workers",
    "FromScratch": "attn_implementation",
    "HeadSettings": "tile_logits",
    "HomogeneousBatchSampler": "batch_size",
    "InfoNCE": "tile_size",
    "MoEEmbedModule": "expert_backend",
    "ResumableLoader": "num_workers",
    "SourceConfig": "licence",
    "TextDataModule": "batch_size cache_dir num_workers",
}


def test_all_options_with_free_names_are_listed() -> None:
    """A new option with such a name may change in the same run, so it must be checked here."""
    free = {name.rpartition(".")[2] for name in _FREE}
    found: dict[str, str] = {}
    for package in (data, losses, models, modules):
        for kind in filter(inspect.isclass, (getattr(package, name) for name in package.__all__)):
            if names := free & inspect.signature(kind).parameters.keys():
                found[kind.__name__] = " ".join(sorted(names))
    assert found == FREE
