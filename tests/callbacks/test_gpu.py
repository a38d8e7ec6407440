"""What a run sets on a CUDA GPU: the trainer says that it has one, and torch's functions are real."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from embeddings.callbacks import GPUTraining, RunRecord, gpu
from embeddings.callbacks.gpu import set_allocator
from embeddings.models import BackboneConfig, MeanPooling, unpadded
from embeddings.models.compilation import COMPILED_ROWS
from embeddings.modules import NVEmbedModule
from tests.helpers.runs import fit, run_config
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    """No variable of the user, and torch's settings restored."""
    before = torch.get_float32_matmul_precision(), torch._C._accelerator_getAllocatorSettings()
    for name in gpu._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_float32_matmul_precision(before[0])
    torch._C._accelerator_setAllocatorSettings(before[1])


def trainer_of(device="cuda", precision="bf16-mixed", steps=10**6):
    strategy = SingleDeviceStrategy(device=torch.device(device))
    return SimpleNamespace(
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        max_epochs=None,
        accumulate_grad_batches=1,
        is_global_zero=True,
        callbacks=[],
        datamodule=None,
    )


def module_with(dropout, folder):
    name = save_backbone(str(folder), tiny_bert(dropout=dropout), wordpiece_tokenizer())
    return NVEmbedModule(BackboneConfig(name, unpadded=True), MeanPooling)


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [("cuda", "bf16-mixed", "high"), ("cuda", "32-true", "highest"), ("cpu", "bf16-mixed", "highest")],
)
def test_tf32_is_allowed_under_mixed_precision_on_a_gpu_until_the_run_ends(device, precision, expected):
    callback = GPUTraining()
    for end in (callback.teardown, callback.on_exception):
        callback.setup(trainer_of(device, precision), None, "fit")
        assert torch.get_float32_matmul_precision() == expected
        assert callback.settings.get("float32_products", "highest") == expected
        end(None, None, None)
        assert torch.get_float32_matmul_precision() == "highest"
    torch.set_float32_matmul_precision("medium")
    callback.setup(trainer_of(device, precision), None, "fit")
    callback.teardown(None, None, "fit")
    assert torch.get_float32_matmul_precision() == "medium"


def test_segments_grow_unless_the_user_sets_the_allocator(monkeypatch):
    assert set_allocator() == "expandable_segments:True" == torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings("")
    for name in gpu._ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "max_split_size_mb:64")
        assert set_allocator() == "max_split_size_mb:64"
        assert torch._C._accelerator_getAllocatorSettings() == ""
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("dropout", "says"), [(0.1, True), (0.0, False)])
def test_a_run_says_that_attention_dropout_is_off(dropout, says, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(unpadded, "_has_kernel", lambda device, width: True)
    monkeypatch.setattr(gpu, "compile_automatic", lambda module: None)
    module, callback, trainer = module_with(dropout, tmp_path), GPUTraining(), trainer_of()
    callback.setup(trainer, module, "fit")
    with caplog.at_level("INFO"):
        callback.on_fit_start(trainer, module)
    lines = [record.getMessage() for record in caplog.records]
    expected = "attention dropout is 0, not 0.1, in texts without padding; backbone.unpadded: false restores it"
    assert lines == ([expected] if says else [])
    assert ("attention_dropout" in callback.settings) is says


@pytest.mark.parametrize(("rows", "compiles"), [(COMPILED_ROWS, True), (COMPILED_ROWS - 1, False), (-1, True)])
def test_the_layers_of_long_runs_are_compiled(rows, compiles, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(gpu, "compile_automatic", compiled.append)
    module, callback, trainer = module_with(0.0, tmp_path), GPUTraining(), trainer_of(steps=rows)
    trainer.max_epochs = -1 if rows < 0 else None
    callback.setup(trainer, module, "fit")
    callback.on_fit_start(trainer, module)
    assert compiled == [module] * compiles


def test_the_settings_are_in_the_record_and_on_a_cpu_nothing_is(tmp_path, monkeypatch):
    cli = fit(tmp_path, run_config(tmp_path))
    (callback,) = (each for each in cli.trainer.callbacks if isinstance(each, GPUTraining))
    record = RunRecord.of(cli.trainer)
    path = record.log_dir / "run.json"
    assert callback.settings == {}
    assert "gpu" not in json.loads(path.read_text())
    callback.settings = {"allocator": "a"}
    callback.on_train_batch_end(cli.trainer, cli.model)
    assert json.loads(path.read_text())["gpu"] == {"allocator": "a"}


@pytest.mark.parametrize(("wait", "device", "says"), [(0.5, "cuda", True), (0.2, "cuda", False), (0.5, "cpu", False)])
def test_a_run_on_a_gpu_says_once_that_it_waits_for_batches(wait, device, says, monkeypatch, caplog):
    """The share is of the steps after the first ten; a checkpoint after one of them does not count."""
    callback, trainer, now = GPUTraining(), trainer_of(device), [0.0]
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: now[0])
    callback.setup(trainer, None, "fit")
    callback.settings = {}
    for step in range(100):
        now[0] += 30 if step in (0, 20) else 1 - wait if step < 10 else wait
        callback.on_train_batch_start(trainer, None)
        now[0] += wait if step < 10 else 1 - wait
        callback.on_train_batch_end(trainer, None)
    expected = "training waits for batches for 50% of the time; raise data.num_workers"
    assert caplog.messages == [expected] * says
