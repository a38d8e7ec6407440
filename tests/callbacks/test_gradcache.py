"""GradCache under Lightning; that its gradient is right is tested with the engine and end to end."""

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from safetensors.torch import load_file

from embeddings.callbacks import GradCacheCallback
from embeddings.common import OptionError, UserError
from embeddings.training.gradcache import GradCache
from tests.helpers.processes import run_command
from tests.helpers.runs import component, run_config, write_config


class Module(L.LightningModule):
    grad_cache = None


def test_the_engine_is_handed_over_and_taken_back():
    callback, module = GradCacheCallback(mini_batch_tokens=100, kept_fraction=0.5), Module()
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    callback.setup(trainer, module, "fit")
    assert isinstance(module.grad_cache, GradCache)
    assert (module.grad_cache.mini_batch_tokens, module.grad_cache.budget.kept_fraction) == (100, 0.5)
    callback.teardown(trainer, module, "fit")
    assert module.grad_cache is None


def test_a_module_of_another_kind_is_refused():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match="needs a contrastive module"):
        GradCacheCallback().setup(trainer, L.LightningModule(), "fit")


def test_a_strategy_that_is_not_covered_is_refused_by_name():
    class Trainer:
        strategy = FSDPStrategy.__new__(FSDPStrategy)

    with pytest.raises(UserError, match=r"does not run under FSDPStrategy; set trainer\.strategy to ddp"):
        GradCacheCallback().setup(Trainer(), Module(), "fit")


def test_impossible_options_are_refused():
    with pytest.raises(OptionError, match="mini_batch_tokens must be >= 1, got 0"):
        GradCacheCallback(mini_batch_tokens=0)


@pytest.mark.parametrize("kind", ["mistral"])
def test_two_ranks_train_to_the_weights_of_one_with_twice_the_batch(kind, tmp_path):
    """Two gloo processes, GradCache and LoRA, in float64; the schedule, the clipping and the plan are those of one."""
    config = run_config(tmp_path, kind)
    config["trainer"] |= {"precision": "64-true", "gradient_clip_val": 0.05, "max_steps": 2}
    cache = component("GradCacheCallback", mini_batch_tokens=40)
    weights = {}
    for ranks, batch_size in ((1, 16), (2, 8)):
        export = component("ExportModel", output=str(tmp_path / f"m{ranks}"))
        config["trainer"] |= {
            "devices": ranks,
            "strategy": "ddp" if ranks > 1 else "auto",
            "callbacks": [cache, export],
        }
        config["data"]["init_args"]["batch_size"] = batch_size
        path = write_config(tmp_path, config, f"{ranks}.yaml")
        run_command(["main.py", "fit", "--config", path], check=True)
        weights[ranks] = load_file(tmp_path / f"m{ranks}" / "model.safetensors")
    assert len(weights[1]) > 10
    difference = {name: (weights[1][name] - weights[2][name]).abs().max().item() for name in weights[1]}
    assert max(difference.values()) < 1e-10
    assert weights[1][next(iter(weights[1]))].dtype == torch.float64
