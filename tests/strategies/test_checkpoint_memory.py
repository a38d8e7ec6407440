"""Checkpoints of sharded weights need one rank's share of memory, and other numbers of ranks resume them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from embeddings.callbacks import DurableCheckpointIO
from embeddings.common.checkpoint_file import read_checkpoint
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, MeanPooling
from embeddings.modules import NVEmbedModule
from embeddings.strategies import FSDP2Strategy
from embeddings.training.optim import Schedule
from tests.helpers.contrastive import batch_of, random_records
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import quiet_trainer
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer
from tests.strategies.fits import be_launched

MIB = 2**20


def megabytes(field: str) -> float:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


@contextmanager
def growth(found: dict[str, float], name: str) -> Iterator[None]:
    """The growth of this process's memory inside, at its peak, in MiB."""
    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    yield
    found[name] = megabytes("VmHWM") - before


class Measured(FSDP2Strategy):
    """Measures the memory of each checkpoint that is read or written."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        with growth(self.found, "written"):
            super().save_checkpoint(*arguments, **options)

    def load_checkpoint(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        with growth(self.found, "read"):
            return super().load_checkpoint(*arguments, **options)


def module_of(folder: Path) -> NVEmbedModule:
    return NVEmbedModule(
        BackboneConfig(str(folder / "backbone")),
        MeanPooling,
        loss=InfoNCE(temperature=0.1),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        schedule=Schedule(warmup_steps=0, decay="constant"),
        seed=0,
    )


def trained(folder: Path, rank: int, steps: int, start: Path | None, output: Path | None, asynchronous: bool) -> Any:
    """The weights after some steps, this rank's share of the state in MiB, and the memory of each checkpoint."""
    torch.manual_seed(0)
    strategy, module = Measured(), module_of(folder).train()
    options: dict[str, Any] = {"devices": dist.get_world_size(), "strategy": strategy, "max_steps": steps}
    trainer: L.Trainer = quiet_trainer(**options, plugins=[DurableCheckpointIO(asynchronous)])
    data = [batch_of(random_records(4, 1, seed=rank))]
    trainer.fit(module, DataLoader(data * 2, batch_size=None), ckpt_path=start)
    if output is not None:
        trainer.save_checkpoint(output)
        trainer.strategy.teardown()
    weights = dict(module.named_parameters())
    local = sum(weight.to_local().numel() for weight in weights.values() if isinstance(weight, DTensor))
    full = {name: weight.full_tensor().detach().clone() for name, weight in weights.items()}
    # The weight and AdamW's two moments of each parameter, in float32.
    return full, 3 * 4 * local / MIB, strategy.found


def cases(folder: Path, steps: tuple[int, ...], start: str | None, rank: int) -> dict[str, Any]:
    be_launched(rank)
    found: dict[str, Any] = {}
    for number in steps:
        path = None if start is None else folder / f"{start}.ckpt"
        for asynchronous in (False, True):
            output = folder / f"{dist.get_world_size()} {number} {asynchronous}.ckpt" if start is None else None
            found[f"{number} {asynchronous}"] = trained(folder, rank, number, path, output, asynchronous)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_each_rank_writes_and_reads_its_share_and_other_numbers_of_ranks_resume(num_ranks: int, tmp_path: Path) -> None:
    model = tiny_bert(hidden_size=1536)
    save_backbone(str(tmp_path / "backbone"), model, wordpiece_tokenizer())
    whole = 3 * 4 * sum(weight.numel() for weight in model.parameters()) / MIB
    assert whole > 300
    written = run_on_ranks(partial(cases, tmp_path, (2, 4), None), num_ranks)
    resumed = run_on_ranks(partial(cases, tmp_path, (4,), f"{num_ranks} 2 True"), num_ranks)
    for of_rank in (*written, *resumed):
        for weights, share, growths in of_rank.values():
            assert 0.9 * whole / num_ranks <= share <= 1.05 * whole / num_ranks
            assert weights
            # Writing copies the share into the file's bytes, and for a writer in a thread. Reading maps the file.
            assert all(size <= 2.3 * share for size in growths.values())
    # Bit for bit, the same on all ranks, whether or not training went on while the checkpoint was written.
    expected = written[0]["4 False"][0]
    for of_rank in (*written, *resumed):
        found = of_rank["4 True"][0]
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    # Half as many ranks, and one process, read the same weights.
    fewer = run_on_ranks(partial(cases, tmp_path, (4,), f"{num_ranks} 4 True"), num_ranks // 2 or 1)
    alone = read_checkpoint(tmp_path / f"{num_ranks} 4 True.ckpt")["state_dict"]
    for name, value in expected.items():
        assert torch.equal(fewer[0]["4 False"][0][name], value)
        assert torch.equal(alone[name], value)
