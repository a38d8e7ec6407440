"""Checkpoints: resuming, loading, omitted weights, and Lightning's callbacks with our modules."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from embeddings.cli.main import main
from embeddings.cli.parser import reason
from embeddings.common import InputError, NumericError
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.models import BackboneConfig, Embedder, compilation
from embeddings.models.lora import frozen_weights
from embeddings.modules import ContrastiveModule, MGHCurriculumModule, NVEmbedModule
from embeddings.modules.base import BaseModule
from embeddings.modules.checkpoint import configured_module
from embeddings.training.optim import Schedule
from tests.helpers.checkpoints import save
from tests.helpers.runs import component, fit, float16_on_cpu, run_config, write_config
from tests.helpers.tiny import save_backbone, sentencepiece_tokenizer, tiny_mistral
from tests.modules.moe_modules import moe_config
from tests.reliability.kills import CLOCK, differences

pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed",
    "ignore:Checkpoint directory",
    # Advice for sharded layers; these are not sharded.
    "ignore:You're using the WeightAveraging callback with a model that overrides",
)

CACHE = component("GradCacheCallback", mini_batch_tokens=40)


class Line(BaseModule):
    """A module with one matrix and one vector."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lambda groups: torch.optim.AdamW(groups, lr=lr, weight_decay=0.5), Schedule(), seed=0)
        self.layer = nn.Linear(2, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value)


class Weights(L.Callback):
    """Stores the weights before the first step and after each step."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_start(self, trainer, pl_module) -> None:
        self.seen.append({name: value.detach().clone() for name, value in pl_module.named_parameters()})

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.on_train_start(trainer, pl_module)


def changes(folder: Path, config: dict[str, Any], batch: int) -> list[bool]:
    """Whether each batch of a run changed the weights, if the gradient of `batch` is infinite."""
    poison = component("tests.helpers.poison.PoisonBackward", rank=0, batch=batch)
    config["trainer"]["callbacks"] += [poison, component(f"{__name__}.Weights")]
    # The learning rate of the first update must not be zero.
    config["model"]["init_args"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    trainer = fit(folder, config).trainer
    seen = next(callback.seen for callback in trainer.callbacks if isinstance(callback, Weights))
    assert all(bool(value.isfinite().all()) for value in seen[-1].values())
    return [any(not torch.equal(old[name], new[name]) for name in old) for old, new in pairwise(seen)]


def test_the_float16_loss_scaler_skips_an_update_with_an_infinite_gradient(tmp_path: Path) -> None:
    assert changes(tmp_path, float16_on_cpu(run_config(tmp_path)), batch=1) == [True, False, True, True]


@pytest.mark.parametrize("callbacks", [[], [CACHE]])
def test_an_infinite_gradient_in_an_accumulated_batch_stops_the_run(
    callbacks: list[dict[str, Any]], tmp_path: Path
) -> None:
    config = run_config(tmp_path)
    config["trainer"] |= {"accumulate_grad_batches": 2, "callbacks": list(callbacks)}
    with pytest.raises(NumericError, match="gradient is inf at step 1: no update was made"):
        changes(tmp_path, config, batch=2)


def test_a_resumed_run_saves_the_text_settings_that_its_batches_have(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [component(f"{__name__}.SavesAfter", folder=str(tmp_path), after=[2])]
    first = fit(tmp_path, config, "--trainer.max_steps=2").model.embedder.text
    goes_on = f"--ckpt_path={tmp_path / 'cut-2.ckpt'}"
    assert fit(tmp_path, config, goes_on).model.embedder.text == first
    changed = fit(tmp_path, config, goes_on, "--data.init_args.text.query_max_length=12")
    assert changed.datamodule.train_dataloader().dataset.collate_fn.tokenizer.settings.query_max_length == 12
    assert changed.model.embedder.text.query_max_length == 12
    assert read_checkpoint(tmp_path / "whole.ckpt")["text_settings"]["query_max_length"] == 12


class SavesAfter(L.Callback):
    """Writes `cut-N.ckpt` after N batches, for each N in `after`, and `whole.ckpt` when the run ends."""

    def __init__(self, folder: str, after: list[int]) -> None:
        self.folder, self.after = Path(folder), after

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        num_batches = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if num_batches in self.after:
            trainer.save_checkpoint(self.folder / f"cut-{num_batches}.ckpt")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "whole.ckpt")


def differences_after_resuming(folder: Path, config: dict[str, Any], *after: int) -> dict[int, list[str]]:
    """Differences between the full run and runs resumed from its checkpoints after these numbers of batches."""

    def run(*words: str, after: tuple[int, ...] = ()) -> dict[str, Any]:
        saving = component(f"{__name__}.SavesAfter", folder=str(folder), after=[*after])
        callbacks = [*config["trainer"]["callbacks"], saving]
        options = {"callbacks": callbacks, "logger": False, "enable_checkpointing": False}
        fit(folder, config | {"trainer": config["trainer"] | options}, *words)
        content = read_checkpoint(folder / "whole.ckpt")
        return {name: value for name, value in content.items() if name not in CLOCK}

    whole, found = run(after=after), {}
    for num_batches in after:
        path = folder / f"cut-{num_batches}.ckpt"
        assert read_checkpoint(path)["global_step"] < whole["global_step"]
        found[num_batches] = differences(run("--ckpt_path", str(path)), whole)
    return {num_batches: names for num_batches, names in found.items() if names}


def test_a_resumed_run_names_the_options_of_the_optimiser_that_it_does_not_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tmp_path)
    saving = component(f"{__name__}.SavesAfter", folder=str(tmp_path), after=[2])
    config["trainer"] |= {"callbacks": [saving], "logger": False, "enable_checkpointing": False}
    rate, words = "--model.optimizer.lr", ("--ckpt_path", str(tmp_path / "cut-2.ckpt"))
    fit(tmp_path, config, f"{rate}=0.25")
    with caplog.at_level("WARNING", "embeddings"):
        fit(tmp_path, config, f"{rate}=0.25", *words)
        assert "the optimiser continues" not in caplog.text
        fit(tmp_path, config, f"{rate}=0.5", *words)
    assert "the optimiser continues with the checkpoint's options: lr 0.25, not 0.5" in caplog.text


@pytest.mark.slow
def test_a_run_stopped_within_an_accumulation_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """In a full accumulation, in an epoch's shorter last one, and in the second epoch."""
    config = moe_config(tmp_path)
    config["trainer"] |= {"accumulate_grad_batches": 3, "max_steps": 6, "callbacks": [CACHE]}
    assert differences_after_resuming(tmp_path, config, 4, 7, 10) == {}


@pytest.mark.filterwarnings("ignore:When using `Trainer.accumulate_grad_batches")
def test_a_run_whose_accumulation_changes_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = run_config(tmp_path, dropout=0.1)
    changing = component("GradientAccumulationScheduler", scheduling={0: 1, 1: 2, 2: 3})
    config["trainer"] |= {"max_epochs": 3, "max_steps": -1, "callbacks": [changing]}
    assert differences_after_resuming(tmp_path, config, 8, 22) == {}
    assert read_checkpoint(tmp_path / "whole.ckpt")["global_step"] == 8 + 4 + 3


@pytest.mark.parametrize(("batches", "accumulate", "limit", "steps"), [(8, 3, 1.0, 6), (8, 1, 5, 10)])
def test_the_length_of_a_run_counts_optimiser_steps(batches, accumulate, limit, steps, tmp_path):
    config = run_config(tmp_path)
    config["trainer"] |= {"max_epochs": 2, "accumulate_grad_batches": accumulate, "limit_train_batches": limit}
    config["trainer"]["max_steps"] = -1
    cli = fit(tmp_path, config)
    assert cli.datamodule.batches_per_epoch == batches
    assert cli.model._trainer_steps() == steps == cli.trainer.global_step


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_compiled_run_resumes_and_exports_like_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_COMPILER", {"backend": "aot_eager"})
    config = run_config(tmp_path)
    keep = {"dirpath": str(tmp_path / "run" / "kept"), "every_n_train_steps": 2, "save_last": True, "save_top_k": 0}
    export = component("ExportModel", output=str(tmp_path / "model"), replace=True)
    config["trainer"]["callbacks"] = [component("ModelCheckpoint", **keep), export]
    is_compiled, goes_on = "--model.init_args.backbone.compile=true", "--ckpt_path=auto"
    fit(tmp_path, config, goes_on, is_compiled, "--trainer.max_steps=2", "--model.init_args.schedule.total_steps=4")
    (compiled,) = tmp_path.rglob("last.ckpt")
    trainer = fit(tmp_path, config, goes_on).trainer
    assert (trainer.ckpt_path, trainer.global_step) == (str(compiled), 4)
    plain = Embedder.from_pretrained(tmp_path / "model")
    fit(tmp_path, config, is_compiled)
    again = Embedder.from_pretrained(tmp_path / "model")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=1e-5)


def test_a_checkpoint_of_lora_omits_the_frozen_base_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = run_config(tmp_path, "mistral", dropout=0.1)
    assert differences_after_resuming(tmp_path, config, 2) == {}
    content = read_checkpoint(tmp_path / "whole.ckpt")
    folder = config["model"]["init_args"]["backbone"]["name"]
    assert (content["frozen_base"]["name"], content["frozen_base"]["commit"]) == (folder, None)
    module = NVEmbedModule.load_from_checkpoint(tmp_path / "whole.ckpt")
    names, frozen = set(module.state_dict()), frozen_weights(module)
    assert content["state_dict"].keys() == names - frozen
    assert {name.split(".")[1] for name in names - frozen} == {"backbone", "pooling"}
    assert len(frozen) > 10
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained <= content["state_dict"].keys()


def stopped_run(folder: Path, **changes: Any) -> tuple[dict[str, Any], Path]:
    """The config of a run with LoRA, and its last checkpoint."""
    config = run_config(folder, "mistral")
    config["model"]["init_args"] |= changes
    stopping = component(f"{__name__}.SavesAfter", folder=str(folder), after=[])
    config["trainer"] |= {"callbacks": [stopping], "max_steps": 2}
    fit(folder, config)
    config["trainer"] |= {"callbacks": [], "max_steps": 3}
    return config, folder / "whole.ckpt"


def test_a_base_of_other_weights_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, checkpoint = stopped_run(tmp_path)
    torch.manual_seed(9)
    name = config["model"]["init_args"]["backbone"]["name"]
    save_backbone(name, tiny_mistral(seed=9), sentencepiece_tokenizer())
    says = f"error: {name}: has other weights than {name} when the checkpoint's LoRA matrices were trained on it; "
    for words in (
        ["fit", "--config", write_config(tmp_path, config), "--ckpt_path", str(checkpoint)],
        ["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")],
    ):
        capsys.readouterr()
        assert main(words) == 2
        assert f"\n{says}" in f"\n{capsys.readouterr().err}"
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_with_all_weights_is_loaded_too(tmp_path: Path) -> None:
    config, checkpoint = stopped_run(tmp_path)
    content = read_checkpoint(checkpoint)
    whole = NVEmbedModule.load_from_checkpoint(checkpoint).state_dict()
    del content["frozen_base"]
    path = save(content | {"state_dict": whole}, tmp_path / "full.ckpt")
    fit(tmp_path, config, "--ckpt_path", path)
    again = NVEmbedModule.load_from_checkpoint(path).state_dict()
    assert [name for name in whole if not torch.equal(whole[name], again[name])] == []


def test_a_module_is_loaded_by_the_config_in_its_checkpoint_or_by_its_arguments(tmp_path: Path) -> None:
    config, checkpoint = stopped_run(tmp_path)
    found = ContrastiveModule.load_from_checkpoint(checkpoint, map_location="cpu")
    assert type(found) is NVEmbedModule
    module = configured_module({"run_config": config}, "config")
    assert isinstance(module, NVEmbedModule)
    backbone = BackboneConfig(**config["model"]["init_args"]["backbone"])
    options = {"backbone": backbone, "pooling": type(module.embedder.pooling), "lora": None}
    with pytest.raises(InputError, match="its content does not match its config"):
        NVEmbedModule.load_from_checkpoint(checkpoint, **options)
    with pytest.raises(InputError, match=r"contains a NVEmbedModule, not a MGHCurriculumModule; call NVEmbedModule"):
        MGHCurriculumModule.load_from_checkpoint(checkpoint)
    content = read_checkpoint(checkpoint)
    del content["run_config"]
    path = save(content, tmp_path / "bare.ckpt")
    with pytest.raises(InputError, match="contains no run_config; use one that `fit`"):
        NVEmbedModule.load_from_checkpoint(path)
    line = Line()
    line.layer.weight.data.fill_(3.0)
    path = save({"state_dict": line.state_dict()}, tmp_path / "line.ckpt")
    assert torch.equal(Line.load_from_checkpoint(path, lr=0.5).layer.weight, line.layer.weight)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (component("embeddings.modules.Nothing"), "module 'embeddings.modules' has no attribute 'Nothing'"),
        (component("embeddings.modules.NVEmbedModule", colour="red"), "Option 'colour' is not accepted"),
        (component("embeddings.modules.NVEmbedModule"), "backbone"),
    ],
)
def test_an_invalid_config_in_a_checkpoint_is_a_one_line_error(model, says):
    with pytest.raises(InputError) as caught:
        configured_module({"run_config": {"model": model}}, "x.ckpt", explain=reason)
    line = str(caught.value)
    assert line.startswith("x.ckpt: its config is invalid: ")
    assert says in line
    assert len(line) <= 200
    assert "\n" not in line


def with_callback(folder: Path, name: str, kind: str = "bert", **options: Any) -> dict[str, Any]:
    """A tiny run with one of Lightning's callbacks, and a checkpoint after each step."""
    config = run_config(folder, kind)
    keep = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", "dirpath": str(folder / "kept")}
    config["trainer"]["callbacks"] = [component("ModelCheckpoint", **keep), component(name, **options)]
    return config


@pytest.mark.parametrize("kind", ["bert", pytest.param("mistral", marks=pytest.mark.slow)])
def test_averaged_weights_are_saved_resumed_and_left_in_the_model(kind: str, tmp_path: Path) -> None:
    config = with_callback(tmp_path, "EMAWeightAveraging", kind, decay=0.5)
    whole = fit(tmp_path, config).model.state_dict()
    last = read_checkpoint(tmp_path / "kept" / "step=4.ckpt")
    assert [name for name, value in last["state_dict"].items() if not torch.equal(value, whole[name])] == []
    assert any(not torch.equal(value, whole[name]) for name, value in last["current_model_state"].items())
    is_lora = kind == "mistral"
    assert (len(last["state_dict"]) < len(whole)) == (len(last["current_model_state"]) < len(whole)) == is_lora
    resumed = fit(tmp_path, config, "--ckpt_path", str(tmp_path / "kept" / "step=2.ckpt")).model.state_dict()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_the_rate_of_the_learning_rate_finder_is_the_peak_of_the_schedule(tmp_path: Path) -> None:
    config = with_callback(tmp_path, "LearningRateFinder", num_training_steps=20, max_lr=0.1, early_stop_threshold=None)
    trainer = fit(tmp_path, config).trainer
    finder = next(one for one in trainer.callbacks if type(one).__name__ == "LearningRateFinder")
    found = finder.optimal_lr.suggestion()
    assert found is not None
    assert trainer.global_step == 4
    assert trainer.lr_scheduler_configs[0].scheduler.base_lrs == [found, found]


def test_the_size_of_the_batch_size_finder_is_used_by_the_data(tmp_path: Path) -> None:
    config = with_callback(tmp_path, "BatchSizeFinder", max_trials=3, steps_per_trial=1, init_val=3)
    cli = fit(tmp_path, config)
    assert cli.datamodule.batch_size == 12
    assert cli.trainer.global_step == 4
    states = read_checkpoint(tmp_path / "kept" / "step=4.ckpt")
    assert states["EmbeddingDataModule"]["loader"]["delivered"] == 4


@pytest.mark.parametrize(
    ("name", "options"), [("BackboneFinetuning", {}), ("StochasticWeightAveraging", {"swa_lrs": 1e-3})]
)
def test_a_callback_that_changes_what_is_trained_is_refused_in_one_line(
    name: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_callback(tmp_path, name, **options)
    assert main(["fit", "--config", write_config(tmp_path, config)]) == 2
    assert (
        f"error: trainer.callbacks would not keep to the optimiser and its schedule, got '{name}'"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()
