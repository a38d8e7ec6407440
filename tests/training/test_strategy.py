"""The properties of each strategy, and FSDP2 on one rank; gradients on two ranks are in `tests/strategies`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from embeddings.models.bidirectional import layers
from embeddings.strategies import FSDP2Strategy
from embeddings.training.strategy import (
    TrainingStrategy,
    full_parameters,
    shard,
    sharded_like,
    training_strategy,
)
from tests.helpers.tiny import tiny_bert
from tests.models.moe import padded_ids, tiny_moe
from tests.strategies.cpu_zero import CpuZero


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def tied() -> nn.Module:
    """Two linear layers with a shared weight, and nested lists of modules."""
    module = nn.Module()
    module.first, module.second = nn.Linear(3, 3), nn.Linear(3, 3)
    module.second.weight = module.first.weight
    module.outer = nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(3, 2)]))])
    return module


def test_each_layer_and_the_other_weights_form_a_group(mesh: DeviceMesh) -> None:
    bert = tiny_bert()
    ids_NL, expected = torch.arange(5, 11).view(2, 3), tiny_bert()(torch.arange(5, 11).view(2, 3)).last_hidden_state
    shard(bert, mesh)
    module = tied()
    assert list(layers(module)) == [module.outer[0]]
    groups = [part for part in bert.modules() if isinstance(part, FSDPModule)]
    assert groups == [bert, *bert.encoder.layer]
    assert all(isinstance(parameter, DTensor) for parameter in bert.parameters())
    torch.testing.assert_close(bert(ids_NL).last_hidden_state, expected)


def test_entry_methods_use_full_weights(mesh: DeviceMesh) -> None:
    class Doubled(nn.Linear):
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight @ x * 2

    module = Doubled(2, 2, bias=False)
    weight = module.weight.detach().clone()
    shard(module, mesh, ("twice",))
    torch.testing.assert_close(module.twice(torch.eye(2)), weight * 2)


@pytest.mark.parametrize("keep", [True, False])
def test_full_parameters_replace_sharded_ones_and_stay_tied(keep: bool, mesh: DeviceMesh) -> None:
    module = tied()
    module.outer[0][0][0].weight.data = module.outer[0][0][0].weight.data.T.contiguous().T
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    shard(module, mesh)
    before = dict(module.named_parameters())
    with full_parameters(module, keep):
        state = module.state_dict()
        assert all(isinstance(value, DTensor) != keep for value in state.values())
        if keep:
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            assert module.first.weight is module.second.weight
    assert dict(module.named_parameters()) == before


def test_a_full_state_is_sharded_again(mesh: DeviceMesh) -> None:
    module = tied()
    shard(module, mesh)
    state = module.state_dict()
    whole = {name: value.full_tensor() for name, value in state.items()}
    again = sharded_like(whole, state)
    assert all(torch.equal(again[name].full_tensor(), value) for name, value in whole.items())
    assert sharded_like(state, state) == state


def test_matrices_are_gathered_in_the_autocast_dtype_but_norms_and_routers_in_float32(mesh: DeviceMesh) -> None:
    model, (ids_NL, mask_NL) = tiny_moe(), padded_ids()
    plain = tiny_moe()
    shard(model, mesh, product_dtype=torch.bfloat16)
    dtypes: dict[str, torch.dtype] = {}

    def remember(part: nn.Module, *_: object) -> None:
        dtypes.update(
            {type(part).__name__.removeprefix("FSDP"): value.dtype for value in part.parameters(recurse=False)}
        )

    for layer in layers(model):
        for part in layer.modules():
            part.register_forward_hook(remember)
    with torch.autocast("cpu", torch.bfloat16):
        states = [made(input_ids=ids_NL, attention_mask=mask_NL.long()).last_hidden_state for made in (model, plain)]
    half, full = torch.bfloat16, torch.float32
    assert dtypes == {"Linear": half, "Experts": half, "LayerNorm": full, "Router": full}
    # The experts' shared bias is rounded with their matrices; without experts the values are equal.
    torch.testing.assert_close(*states, rtol=0.02, atol=0.02)
    bert = tiny_bert()
    shard(bert, mesh, product_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        states = [made(ids_NL, mask_NL.long()).last_hidden_state for made in (bert, tiny_bert())]
    assert torch.equal(*states)
    assert {parameter.dtype for parameter in bert.parameters()} == {full}


@pytest.mark.parametrize(
    ("strategy", "is_sharded", "single_file", "gradcache", "context_stage", "equal_mini_batches"),
    [
        (SingleDeviceStrategy("cpu"), False, True, True, True, False),
        (DDPStrategy(), False, True, True, True, False),
        (FSDP2Strategy(), True, True, True, True, True),
        (CpuZero(stage=1), False, True, True, False, False),
        (CpuZero(stage=2), False, True, True, True, True),
        (CpuZero(stage=3), True, True, True, True, True),
        (ModelParallelStrategy(), True, False, False, True, False),
        (FSDPStrategy.__new__(FSDPStrategy), False, False, False, True, False),
        (DeepSpeedStrategy.__new__(DeepSpeedStrategy), False, False, False, True, False),
    ],
    ids=[
        *("one device", "ddp", "fsdp2", "zero 1", "zero 2", "zero 3"),
        *("lightning's fsdp2", "lightning's fsdp", "lightning's zero"),
    ],
)
def test_the_properties_of_each_strategy(
    strategy: Any, is_sharded: bool, single_file: bool, gradcache: bool, context_stage: bool, equal_mini_batches: bool
) -> None:
    properties = training_strategy(strategy)
    assert (properties is strategy) == isinstance(strategy, TrainingStrategy)
    assert (properties.is_sharded, properties.single_file_checkpoints) == (is_sharded, single_file)
    assert (properties.supports_gradcache, properties.supports_context_stage) == (gradcache, context_stage)
    assert properties.equal_mini_batches == equal_mini_batches
    if properties is not strategy:
        with properties.full_weights() as value:
            assert value is None
