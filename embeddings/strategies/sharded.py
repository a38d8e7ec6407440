"""FSDP2 and DeepSpeed's ZeRO for Lightning: sharded weights, gradients and optimiser state, for GradCache too."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from embeddings.common import (
    ContextualStep,
    ContrastiveBatch,
    ContrastiveStep,
    LossOutput,
    NumericError,
    OptionError,
    Representations,
    TokenBatch,
)
from embeddings.common.checkpoint_file import (
    Place,
    add_own_path,
    aside_of,
    empty_on_cpu,
    plain,
    read_folder,
    write_folder,
)
from embeddings.common.distributed import full_shape
from embeddings.common.io import check_disk_space, file_hash
from embeddings.strategies.ranks import TIMEOUT
from embeddings.training.gradcache import GradCache, GradCacheModule
from embeddings.training.strategy import TrainingStrategy, full_parameters, make_contiguous, sharded_like

_WRITER = "use embeddings.Trainer, or add embeddings.callbacks.DurableCheckpointIO"


class FSDP2Strategy(TrainingStrategy, ModelParallelStrategy):
    """Shards weights, gradients and optimiser state over all ranks; a layer is gathered only while it is computed.

    The gradient equals DDP's; under `bf16-mixed` the layers' matrices are gathered in bfloat16. A checkpoint is a
    folder on a shared file system, to which each rank writes its parts. Any number of ranks and any strategy can
    resume it.

    Args:
        process_group_backend: "nccl", "gloo" …; None for the device's default.
        timeout: Maximum time that a rank waits for the others in a collective before the run ends.
    """

    is_sharded = equal_mini_batches = True
    lightning_restore_optimizer = Strategy.lightning_restore_optimizer
    # Collectives of an asynchronous write, which must not mix with those of training.
    _writers: dist.ProcessGroup | None = None

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta = TIMEOUT) -> None:
        options: dict[str, Any] = {"process_group_backend": process_group_backend, "timeout": timeout}
        super().__init__(tensor_parallel_size=1, **options)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()

    def full_weights(self) -> AbstractContextManager[None]:
        assert self.model is not None
        return full_parameters(self.model, keep=self.is_global_zero)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return self.model.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        state = sharded_like(dict(checkpoint["state_dict"]), self.model.state_dict())
        self.model.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(_sharded_optimizer_state(optimizer, state))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder: each rank its parts of the sharded tensors, rank 0 everything else."""
        writer: Any = self.checkpoint_io
        if not hasattr(writer, "written"):
            raise OptionError("plugins", type(writer).__name__, "cannot write sharded weights", _WRITER)
        if "://" in str(filepath):
            raise OptionError("dirpath", str(filepath), "must be on a disk of all ranks", "name a local folder")
        writer.wait()
        path = Path(self.broadcast(filepath))
        add_own_path(checkpoint, path)
        shards: dict[str, Tensor] = {}

        def separate(tensor: Tensor, place: Place) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor.detach().cpu().clone() if writer.asynchronous else tensor.detach()
            shards["/".join(place)] = tensor.detach()
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        content = plain(checkpoint, separate, kinds=(Tensor, nn.Parameter, DTensor))
        check_disk_space(path, sum(tensor.numel() * tensor.itemsize for tensor in shards.values()))
        parts = path / self.broadcast(f"parts-{uuid4().hex}")
        if self.is_global_zero and path.is_file():
            os.replace(path, aside_of(path))
        self.barrier()
        storage = HuggingFaceStorageWriter(str(parts), save_distributed=True)
        if not writer.asynchronous:
            save(shards, storage_writer=storage)
            self._complete(path, parts, content)
            return
        if self._writers is None:
            self._writers = dist.new_group(timeout=TIMEOUT, backend="gloo")
        future: Any = async_save(shards, storage_writer=storage, process_group=self._writers)

        def complete() -> None:
            future.result()
            self._complete(path, parts, content)

        writer.start(complete)

    def _complete(self, path: Path, parts: Path, content: Any) -> None:
        """Hash the parts, and let rank 0 complete the folder."""
        mine = {file.name: file_hash(file) for file in sorted(parts.iterdir())[self.global_rank :: self.world_size]}
        hashes: list[Any] = [None] * self.world_size
        dist.all_gather_object(hashes, mine, self._writers)
        writer: Any = self.checkpoint_io
        writer.written.add(os.path.abspath(path))
        if self.is_global_zero:
            all_hashes = {name: value for of_rank in hashes for name, value in of_rank.items()}
            write_folder(path, parts, content, all_hashes)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The content of a checkpoint; each rank reads its parts of a folder's sharded tensors."""
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            return self.checkpoint_io.load_checkpoint(path)
        folder = read_folder(path)
        folder.check(self.global_rank, self.world_size)
        assert self.model is not None
        weights: dict[str, Tensor] = self.model.state_dict()
        parameters = [
            [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in self.optimizers
        ]

        def like(tensor: Tensor, place: Place) -> Tensor:
            weight = weights.get(place[1]) if place[0] == "state_dict" else None
            if place[0] == "optimizer_states":
                weight = parameters[int(place[1])][int(place[3])].detach()
            if isinstance(weight, DTensor) and weight.shape == tensor.shape:
                return torch.empty_like(weight, dtype=tensor.dtype)
            return empty_on_cpu(tensor, place)

        return folder.load(like, is_alone=False)


def _sharded_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> StateDict:
    """Shard each tensor of a full state like its parameter, if it has the parameter's shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state_of_parameter = {}
    for index, values in state["state"].items():
        parameter = parameters[int(index)]
        like = {name: parameter for name, value in values.items() if getattr(value, "shape", None) == parameter.shape}
        state_of_parameter[int(index)] = sharded_like(values, like)
    return {**state, "state": state_of_parameter}


class ZeroStrategy(TrainingStrategy, DeepSpeedStrategy):
    """Shards the optimiser state over all ranks (stage 1), then also gradients (stage 2), then also weights (stage 3).

    The gradient equals DDP's. A checkpoint is one file with full tensors, which must fit in rank 0's memory. Any
    strategy can resume it, on any number of ranks.

    Args:
        stage: ZeRO stage, 1 to 3.
        offload_optimizer: Whether to keep the optimiser state in CPU memory.
        offload_parameters: Whether to keep weights that are not in use in CPU memory; stage 3 only.
        process_group_backend: "nccl", "gloo" …; None for the device's default.
        timeout: Maximum time that a rank waits for the others in a collective before the run ends.
    """

    checks_gradients = True
    # Under bf16-mixed and 16-mixed the engine's optimiser has a float32 copy of the weights.
    keeps_float32_weights = True
    # Rank 0 writes one file, as in Lightning's base class.
    save_checkpoint, load_checkpoint = Strategy.save_checkpoint, Strategy.load_checkpoint
    lightning_restore_optimizer = Strategy.lightning_restore_optimizer
    # DeepSpeed's count of backwards would ignore that Lightning also steps after the last batch of an epoch.
    handles_gradient_accumulation = False

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        options: dict[str, Any] = {"process_group_backend": process_group_backend, "timeout": timeout}
        options |= {"offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
        super().__init__(stage=stage, **options)
        self.is_sharded = stage == 3
        # From stage 2 on every backward averages its gradients; in stage 1 only the last backward does, for all.
        self.equal_mini_batches = stage >= 2
        # DeepSpeed 0.19, stage 1: weights that only earlier backwards reached get a gradient from invalid memory.
        self.supports_context_stage = stage != 1
        # DeepSpeed uses it only to log throughput. Otherwise Lightning reads it from the loader, which is not ready.
        assert isinstance(self.config, dict)
        self.config["train_micro_batch_size_per_gpu"] = 1

    def setup(self, trainer: L.Trainer) -> None:
        assert self.model is not None
        make_contiguous(self.model)
        super().setup(trainer)

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Do nothing: the boundary of `backward` decides what the engine sends."""
        return nullcontext()

    def full_weights(self) -> AbstractContextManager[None]:
        assert self.lightning_module is not None
        return gathered_parameters(list(self.lightning_module.parameters()))

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Optimizer | None, *args: Any) -> Any:
        # DeepSpeed removes the parameters from the groups.
        assert optimizer is not None
        self._groups: Groups = [list(group["params"]) for group in optimizer.param_groups]
        return super()._setup_model_and_optimizer(model, optimizer, *args)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return dict(full_state_dict(self.lightning_module, keep=self.is_global_zero))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        set_full_state_dict(self.lightning_module, checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        zero = self.deepspeed_engine.optimizer
        return full_optimizer_state(zero, self._groups, keep=self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        (state,) = checkpoint["optimizer_states"]
        set_full_optimizer_state(self.deepspeed_engine.optimizer, self._groups, state)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """GradCache calls the engine's forward for each mini-batch; otherwise it is around the whole step."""
        module: Any = self.lightning_module
        if not isinstance(module, GradCacheModule) or module.grad_cache is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The backward of a step's loss; Lightning already divided it by the number of accumulated batches."""
        assert self.lightning_module is not None
        is_last = not self.lightning_module.trainer.fit_loop._should_accumulate()
        self.deepspeed_engine.set_gradient_accumulation_boundary(is_last)
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        """The engine's step; a `NumericError` on all ranks if a gradient is not finite (float16 skips the update)."""
        assert self.lightning_module is not None
        step, engine = self.lightning_module.global_step, self.deepspeed_engine
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if engine.optimizer.overflow and not engine.fp16_enabled():
            raise NumericError(f"gradient is NaN or infinite at step {step}: no update was made")
        return output

    def gradcache_step(
        self, engine: GradCache, step: ContrastiveStep, batch: ContrastiveBatch, scale: float
    ) -> LossOutput:
        """GradCache's step without the last backward; each mini-batch's forward goes through DeepSpeed's engine."""
        zero = self.deepspeed_engine

        def backward(loss: Tensor) -> None:
            self._count_backward()
            zero.set_gradient_accumulation_boundary(False)
            zero.backward(loss, scale_wrt_gas=False)

        wrapped = _ThroughEngine(zero, step)
        output = engine.forward_backward(wrapped, batch, backward, scale=scale, syncs_each=self.equal_mini_batches)
        self._count_backward()
        return output

    def _count_backward(self) -> None:
        """Make stage 3 add the next backward's gradient to the current one, even without a forward in between."""
        clear = getattr(self.deepspeed_engine.optimizer, "clear_backward_seen_flag", None)
        if clear is not None:
            clear()


class _ThroughEngine(nn.Module):
    """A contrastive step whose forwards go through DeepSpeed's engine."""

    def __init__(self, engine: nn.Module, module: Any) -> None:
        super().__init__()
        self.engine, self.module = engine, module
        self.trains_context = isinstance(module, ContextualStep) and module.trains_context
        self.shared_casts = module.shared_casts

    def embed_context(self, tokens: TokenBatch) -> Tensor:
        vector_MH: Tensor = self.engine(tokens, is_context=True)[0]
        return vector_MH

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        return Representations(*self.engine(tokens, context))

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        output: LossOutput = self.module.loss_from_representations(query, candidate, batch)
        return output


# DeepSpeed stores weights and optimiser state in flat float32 partitions; each rank has fragments of some parameters.
# The functions below assemble the fragments to the state of a plain module and optimiser, and distribute it again.
Groups = Sequence[Sequence[nn.Parameter]]


@contextmanager
def gathered_parameters(parameters: Sequence[nn.Parameter], writer: int | None = None) -> Iterator[None]:
    """A context with full parameters (stages 1 and 2 never shard them); it keeps the changes of rank `writer`."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=writer):
        yield


def full_state_dict(module: nn.Module, keep: bool) -> dict[str, Tensor | None]:
    """The full weights and buffers, trained ones in float32; all values are None if `keep` is false."""
    from deepspeed.utils import safe_get_full_fp32_param

    state: dict[str, Tensor | None] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        full = safe_get_full_fp32_param(value) if isinstance(value, nn.Parameter) and value.requires_grad else None
        if full is None:
            with gathered_parameters([value] if isinstance(value, nn.Parameter) else []):
                full = value.detach().clone()
        state[name] = full.cpu() if keep else None
    return state


def set_full_state_dict(module: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Load full weights, equal on all ranks, into the module and the optimiser's float32 partitions.

    Raises a `RuntimeError`, like torch, for tensors of another shape and, if `strict`, for other names.
    """
    own = module.state_dict(keep_vars=True)
    wrong = own.keys() ^ state.keys() if strict else set()
    for name in own.keys() & state.keys():
        # Weights of a frozen base are not in a checkpoint: they are the module's own, which stage 3 leaves empty.
        if state[name].shape not in (full_shape(own[name]), own[name].shape):
            wrong.add(name)
    if wrong:
        what = f"missing, unexpected or of another shape: {', '.join(sorted(wrong))}"
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: {what}")
    from deepspeed.utils import safe_set_full_fp32_param

    for name, value in own.items():
        if name not in state:
            continue
        full = state[name].to(value.device)
        with gathered_parameters([value] if isinstance(value, nn.Parameter) else [], writer=0), torch.no_grad():
            if value.shape == full.shape:
                value.data.copy_(full)
        if isinstance(value, nn.Parameter) and value.requires_grad:
            safe_set_full_fp32_param(value, full.float())


def full_optimizer_state(optimizer: Any, groups: Groups, keep: bool) -> dict[str, Any]:
    """The full state of DeepSpeed's optimiser, in the format of a plain one; tensors are None if `keep` is false."""
    state: dict[int, dict[str, Any]] = {}
    # All partitions with a state have the same names.
    any_state: dict[str, Tensor] = next((dict(values) for values in optimizer.optimizer.state.values() if values), {})
    names = [name for name, value in any_state.items() if value.ndim]
    scalars = {name: value for name, value in any_state.items() if not value.ndim}
    for index, parameter in enumerate(parameter for group in groups for parameter in group):
        full = {name: _full_entry(optimizer, parameter, name) for name in names}
        values = {name: value.cpu() if keep else None for name, value in full.items()}
        if values or scalars:
            state[index] = values | {name: value.clone() for name, value in scalars.items()}
    index_of_parameter, param_groups = count(), []
    for inner, group in zip(optimizer.param_groups, groups, strict=True):
        options = {name: value for name, value in inner.items() if name != "params"}
        param_groups.append({**options, "params": [next(index_of_parameter) for _ in group]})
    return {"state": state, "param_groups": param_groups}


def set_full_optimizer_state(optimizer: Any, groups: Groups, state: Mapping[str, Any]) -> None:
    """Load the state of whole parameters into the fragments that this rank holds."""
    for inner, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        inner.update({name: value for name, value in saved.items() if name != "params"})
    parameters = [parameter for group in groups for parameter in group]
    for index, values in state["state"].items():
        for name, value in values.items():
            for partition, fragment, start, size in _fragments(optimizer, parameters[int(index)]):
                partition_state = optimizer.optimizer.state[partition]
                if not value.ndim:
                    partition_state[name] = value.clone()
                    continue
                partition_state.setdefault(name, torch.zeros_like(partition))
                partition_state[name].narrow(0, fragment, size).copy_(value.flatten().narrow(0, start, size))


def _full_entry(optimizer: Any, parameter: nn.Parameter, name: str) -> Tensor:
    shape = full_shape(parameter)
    full = torch.zeros(shape.numel(), device=parameter.device)
    for partition, fragment, start, size in _fragments(optimizer, parameter):
        full.narrow(0, start, size).copy_(optimizer.optimizer.state[partition][name].narrow(0, fragment, size))
    dist.all_reduce(full)
    return full.view(shape)


def _fragments(optimizer: Any, parameter: Any) -> Iterator[tuple[Tensor, int, int, int]]:
    """A parameter's fragments on this rank: partition, offset in it, offset in the parameter, and size."""
    if hasattr(parameter, "ds_id"):
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        # The last ranks have only padding if a parameter has few values.
        start = min(size * optimizer._get_param_partition_rank(parameter), parameter.ds_numel)
        yield optimizer.fp32_partitioned_groups_flat[group], offset, start, min(size, parameter.ds_numel - start)
    elif parameter._hp_mapping is not None:
        mapping = parameter._hp_mapping
        partitions = optimizer.single_partition_of_fp32_groups
        pointer = mapping.get_hp_fragment().untyped_storage().data_ptr()
        partition = next(one for one in partitions if one.untyped_storage().data_ptr() == pointer)
        address = mapping.hp_fragment_address
        yield partition, address.start, mapping.lp_fragment_address.start, address.numel
