"""GradCache under Lightning; other tests compare its gradient with the full batch's."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from safetensors.torch import load_file

from embeddings.callbacks import GradCacheCallback
from embeddings.common import OptionError, UserError
from tests.helpers.processes import run_command
from tests.helpers.runs import component, fit, quiet_trainer, run_config, write_config


class Module(L.LightningModule):
    grad_cache = None


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 1024), ("cuda", 16384)])
def test_mini_batches_may_be_larger_on_a_gpu(device, tokens):
    trainer = SimpleNamespace(strategy=SingleDeviceStrategy(device=torch.device(device)), datamodule=None)
    callback = GradCacheCallback(mini_batch_tokens=1024, gpu_mini_batch_tokens=16384)
    callback.setup(trainer, Module(), "fit")
    assert callback.engine.mini_batch_tokens == tokens
    with pytest.raises(OptionError, match="gpu_mini_batch_tokens must be >= 1, got 0"):
        GradCacheCallback(gpu_mini_batch_tokens=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0.0), ({"kept_gib": None}, None), ({"kept_gib": 3}, 3), ({"kept_fraction": 0.5}, None), ({"kept_gib": 0}, 0)],
)
def test_memory_is_measured_only_for_auto_without_kept_fraction(options, expected):
    callback = GradCacheCallback(**options)
    callback.setup(quiet_trainer(), Module(), "fit")
    assert callback.engine.budget.kept_gib == expected
    assert callback._is_auto == (options == {})


def auto_run(tmp_path, monkeypatch, free_gib, *words):
    """A run of four steps; returns the callback and the forwards without a graph in each step."""
    monkeypatch.setattr("embeddings.callbacks.gradcache.free_memory_bytes", lambda device: int(free_gib * 2**30))
    config = run_config(tmp_path)
    keep = component("ModelCheckpoint", every_n_train_steps=2, save_top_k=-1)
    cache = component("GradCacheCallback", mini_batch_tokens=40)
    config["trainer"]["callbacks"] = [cache, keep, component(f"{__name__}.Count")]
    cli = fit(tmp_path, config, *words)
    found = {type(callback): callback for callback in cli.trainer.callbacks}
    return found[GradCacheCallback], found[Count].recomputed


class Count(L.Callback):
    """Counts the texts' forwards without a graph in each step."""

    def setup(self, trainer, pl_module, stage):
        self.recomputed, embed = [], pl_module.embed

        def counted(*args, **kwargs):
            self.recomputed[-1] += not torch.is_grad_enabled()
            return embed(*args, **kwargs)

        pl_module.embed = counted

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.recomputed.append(0)


def test_auto_keeps_every_graph_that_fits_after_the_first_step_and_logs_the_memory(tmp_path, monkeypatch, caplog):
    with caplog.at_level("INFO", "embeddings"):
        callback, recomputed = auto_run(tmp_path, monkeypatch, 3)
    assert callback.engine.budget.kept_gib == 1.5
    assert recomputed[0] > 2
    assert recomputed[1:] == [0, 0, 0]
    lines = [record.getMessage() for record in caplog.records if "GradCache" in record.getMessage()]
    assert lines == ["GradCache keeps graphs in up to 1.50 GiB per rank, half of the memory free after the first step"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(("free_gib", "kept_gib", "at_once"), [(2, 1.5, True), (1, 0.5, False)])
def test_a_resumed_run_uses_the_saved_value_unless_it_has_less_memory(
    free_gib, kept_gib, at_once, tmp_path, monkeypatch
):
    auto_run(tmp_path, monkeypatch, 3)
    checkpoint = tmp_path / "run" / "tiny" / "version_0" / "checkpoints" / "epoch=0-step=2.ckpt"
    callback, recomputed = auto_run(tmp_path, monkeypatch, free_gib, "--ckpt_path", str(checkpoint))
    assert callback.engine.budget.kept_gib == kept_gib
    assert [count == 0 for count in recomputed] == [at_once, True]


def test_other_modules_and_strategies_and_invalid_options_are_refused():
    with pytest.raises(UserError, match="needs a contrastive module"):
        GradCacheCallback().setup(quiet_trainer(), L.LightningModule(), "fit")
    sharded = SimpleNamespace(strategy=FSDPStrategy.__new__(FSDPStrategy))
    with pytest.raises(UserError, match=r"does not run under FSDPStrategy; set trainer\.strategy to ddp"):
        GradCacheCallback().setup(sharded, Module(), "fit")
    with pytest.raises(OptionError, match="mini_batch_tokens must be >= 1, got 0"):
        GradCacheCallback(mini_batch_tokens=0)
    with pytest.raises(OptionError, match="kept_gib must be a number, auto or null, got 'all'"):
        GradCacheCallback(kept_gib="all")


def test_two_ranks_train_the_weights_of_one_with_twice_the_batch(tmp_path):
    """Two gloo processes with GradCache and LoRA in float64; schedule, clipping and plan equal those of one process."""
    config = run_config(tmp_path, "mistral")
    config["trainer"] |= {"precision": "64-true", "gradient_clip_val": 0.05, "max_steps": 2}
    cache = component("GradCacheCallback", mini_batch_tokens=40)
    weights = {}
    for ranks, batch_size in ((1, 16), (2, 8)):
        export = component("ExportModel", output=str(tmp_path / f"m{ranks}"))
        config["trainer"] |= {"devices": ranks, "callbacks": [cache, export]}
        config["trainer"]["strategy"] = "ddp" if ranks > 1 else "auto"
        config["data"]["init_args"]["batch_size"] = batch_size
        path = write_config(tmp_path, config, f"{ranks}.yaml")
        run_command(["main.py", "fit", "--config", path], check=True)
        weights[ranks] = load_file(tmp_path / f"m{ranks}" / "model.safetensors")
    assert len(weights[1]) > 10
    difference = {name: (weights[1][name] - weights[2][name]).abs().max().item() for name in weights[1]}
    assert max(difference.values()) < 1e-10
    assert weights[1][next(iter(weights[1]))].dtype == torch.float64
