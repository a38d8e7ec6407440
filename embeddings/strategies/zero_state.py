"""What DeepSpeed's ZeRO has cut, put together into the state of a plain module and optimiser, and cut again.

Weights and optimiser live in flat partitions in float32, of which a parameter has a fragment on some ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embeddings.common.distributed import full_shape

Groups = Sequence[Sequence[nn.Parameter]]


@contextmanager
def gathered(parameters: Sequence[nn.Parameter], writer: int | None = None) -> Iterator[None]:
    """Have parameters whole; under stages 1 and 2 they are.

    Args:
        parameters: The parameters, the same on all ranks.
        writer: The rank whose changes count, or None where nothing is changed.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=writer):
        yield


def weights(module: nn.Module, keep: bool) -> dict[str, Tensor | None]:
    """The whole weights and buffers, trained ones in float32.

    Args:
        module: The module that the engine trains.
        keep: Whether this rank wants them; it takes part in the gathers all the same.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, Tensor | None] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        whole = safe_get_full_fp32_param(value) if isinstance(value, nn.Parameter) and value.requires_grad else None
        if whole is None:
            with gathered([value] if isinstance(value, nn.Parameter) else []):
                whole = value.detach().clone()
        found[name] = whole.cpu() if keep else None
    return found


def set_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set weights and buffers, and the partitions in float32 that the optimiser steps on.

    Args:
        module: The module that the engine trains.
        state: What `weights` gave, the same on all ranks.
    """
    from deepspeed.utils import safe_set_full_fp32_param

    for name, value in module.state_dict(keep_vars=True).items():
        whole = state[name].to(value.device)
        with gathered([value] if isinstance(value, nn.Parameter) else [], writer=0), torch.no_grad():
            value.data.copy_(whole) if value.shape == whole.shape else None
        if isinstance(value, nn.Parameter) and value.requires_grad:
            safe_set_full_fp32_param(value, whole.float())


def optimizer_state(optimizer: Any, groups: Groups, keep: bool) -> dict[str, Any]:
    """The whole state, as a plain optimiser over the same groups has it.

    Args:
        optimizer: DeepSpeed's optimiser.
        groups: The parameters of each group, as the plain optimiser was given them.
        keep: As in `weights`.
    """
    state: dict[int, dict[str, Any]] = {}
    names = [name for name, value in _any_state(optimizer).items() if value.ndim]
    single = {name: value for name, value in _any_state(optimizer).items() if not value.ndim}
    for index, parameter in enumerate(parameter for group in groups for parameter in group):
        whole = {name: _whole(optimizer, parameter, name) for name in names}
        values = {name: value.cpu() if keep else None for name, value in whole.items()}
        if values or single:
            state[index] = values | {name: value.clone() for name, value in single.items()}
    return {"state": state, "param_groups": _described(optimizer, groups)}


def set_optimizer_state(optimizer: Any, groups: Groups, state: Mapping[str, Any]) -> None:
    """Set what `optimizer_state` gave, the same on all ranks."""
    for inner, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        inner.update({name: value for name, value in saved.items() if name != "params"})
    parameters = [parameter for group in groups for parameter in group]
    for index, values in state["state"].items():
        for name, value in values.items():
            for partition, fragment, start, size in _fragments(optimizer, parameters[int(index)]):
                own = optimizer.optimizer.state[partition]
                if not value.ndim:
                    own[name] = value.clone()
                    continue
                own.setdefault(name, torch.zeros_like(partition))
                own[name].narrow(0, fragment, size).copy_(value.flatten().narrow(0, start, size))


def _whole(optimizer: Any, parameter: nn.Parameter, name: str) -> Tensor:
    """One entry of a parameter's state, put together from all ranks' fragments."""
    shape = full_shape(parameter)
    whole = torch.zeros(shape.numel(), device=parameter.device)
    for partition, fragment, start, size in _fragments(optimizer, parameter):
        whole.narrow(0, start, size).copy_(optimizer.optimizer.state[partition][name].narrow(0, fragment, size))
    dist.all_reduce(whole)
    return whole.view(shape)


def _any_state(optimizer: Any) -> dict[str, Tensor]:
    """The state of the first partition that has one: the optimiser's names."""
    for state in optimizer.optimizer.state.values():
        if state:
            return dict(state)
    return {}


def _described(optimizer: Any, groups: Groups) -> list[dict[str, Any]]:
    """The groups' options, with the parameters' places."""
    found, start = [], 0
    for inner, group in zip(optimizer.param_groups, groups, strict=True):
        options = {name: value for name, value in inner.items() if name != "params"}
        found.append({**options, "params": list(range(start, start + len(group)))})
        start += len(group)
    return found


def _fragments(optimizer: Any, parameter: Any) -> Iterator[tuple[Tensor, int, int, int]]:
    """Where a parameter lies on this rank: a partition, the place in it, the place in the parameter, and the size."""
    if hasattr(parameter, "ds_id"):
        group, place, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = size * optimizer._get_param_partition_rank(parameter)
        yield optimizer.fp32_partitioned_groups_flat[group], place, start, min(size, parameter.ds_numel - start)
    elif parameter._hp_mapping is not None:
        mapping = parameter._hp_mapping
        partitions = optimizer.single_partition_of_fp32_groups
        own = mapping.get_hp_fragment().untyped_storage().data_ptr()
        partition = next(one for one in partitions if one.untyped_storage().data_ptr() == own)
        address = mapping.hp_fragment_address
        yield partition, address.start, mapping.lp_fragment_address.start, address.numel
