"""Autograd graphs: their leaves, the memory that they hold, and how many fit into a budget."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from embeddings.common import OptionError


def graph_leaves(root: Tensor) -> list[Tensor]:
    """The leaves that require a gradient and that the graph of `root` reaches, each once."""
    if root.grad_fn is None:
        return [root] if root.requires_grad else []
    return [node.variable for node in _nodes([root]) if hasattr(node, "variable")]


def _nodes(roots: Iterable[Tensor]) -> list[Any]:
    """The nodes of the graphs of some tensors, each once."""
    found: list[Any] = list(dict.fromkeys(root.grad_fn for root in roots if root.grad_fn is not None))
    seen = set(found)
    for node in found:
        new = [following for following, _ in node.next_functions if following is not None and following not in seen]
        new = list(dict.fromkeys(new))
        seen.update(new)
        found.extend(new)
    return found


class GraphMemory:
    """Bytes that graphs built while `measured` was active keep alive; `num_bytes` is complete once it is left."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._storages: Counter[int] | None = None

    @contextmanager
    def measured(self, device: torch.device, parameters: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Measure the graphs built inside; `parameters` returns the tensors that exist anyway.

        On a CUDA device it is the memory that the allocator hands out and does not get back. Elsewhere it is the
        storages that autograd saves, each once; the input of a checkpointed layer is not counted there. Parameters are
        left out, and so are gathered weights of a sharded layer, which have been freed by the end.
        """
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            yield
            self.num_bytes += torch.cuda.memory_allocated(device) - before
            return
        saved: dict[int, torch.UntypedStorage] = {}

        def remember(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            yield
        for parameter in parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            saved.pop(local.untyped_storage()._cdata, None)
        self._storages = Counter(storage.nbytes() for storage in saved.values())
        self.num_bytes += sum(storage.nbytes() for storage in saved.values())

    def leave_out_casts(self, roots: Iterable[Tensor]) -> None:
        """Subtract the weights that were cast for these measured tensors: under autocast all graphs share them."""
        for node in _nodes(roots):
            if node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable"):
                (made,) = node._input_metadata
                size = math.prod(made.shape) * made.dtype.itemsize
                if self._storages is not None:
                    # Not every cast is saved; a saved one is known by its size.
                    if self._storages[size] == 0:
                        continue
                    self._storages[size] -= 1
                self.num_bytes -= size


def free_memory_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that a process can still take, beyond what it has needed at most so far; 0 where nothing tells.

    On a CUDA device they are the driver's free memory and the allocator's, without the peak of this process. Elsewhere
    they are `MemAvailable` or what the process's cgroup leaves, whichever is less; `root` has `proc` and `sys`.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))
    numbers = dict(re.findall(r"^(\w+):\s+(\d+)", _text(root / "proc/meminfo"), re.MULTILINE))
    known = [1024 * int(numbers["MemAvailable"])] if "MemAvailable" in numbers else []
    groups = root / "sys/fs/cgroup"
    paths = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    for _, names, path in (found for found in paths if len(found) == 3):
        if names in ("", "memory"):
            # Inside a container the group itself is the root of what is mounted.
            folders = [groups / names / path.lstrip("/"), groups / names]
            known += [left for folder in folders if (left := _left_in_group(folder)) is not None][:1]
    return max(0, min(known, default=0))


def _left_in_group(folder: Path) -> int | None:
    """Bytes that a memory cgroup, of version 2 or 1, leaves; None where it has no limit."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if most.isdecimal() and used.isdecimal():
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
            return int(most) - int(used) + (int(cached[1]) if cached else 0)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class GraphBudget:
    """How many mini-batches of each stage keep their graphs; limits and errors as in `GradCache`.

    The memory that a token needs is learnt from the first graph of each stage. Stages are asked for in the order in
    which they run, and a later stage has what the earlier ones left. Without either limit nothing is kept.
    """

    def __init__(self, kept_fraction: float | None = None, kept_gib: float | None = None) -> None:
        if kept_fraction is not None and not 0 <= kept_fraction <= 1:
            raise OptionError("kept_fraction", kept_fraction, "must be within 0 and 1", "0.5 keeps half the graphs")
        if kept_gib is not None and not kept_gib >= 0:
            raise OptionError("kept_gib", kept_gib, "must be >= 0", "0 keeps no more than one graph")
        self.kept_fraction, self.kept_gib = kept_fraction, kept_gib
        self._bytes_per_token: dict[int, float] = {}

    @property
    def measures(self) -> bool:
        """Whether memory is limited, so that the first graph of each stage has to be measured."""
        return self.kept_gib is not None

    def learn(self, stage: int, num_bytes: int, num_tokens: int) -> None:
        """Remember what the graph of one mini-batch of a stage holds."""
        self._bytes_per_token[stage] = max(1.0, num_bytes / num_tokens)

    def num_kept(self, stage_tokens: Sequence[Sequence[int]], kept: Sequence[int] = ()) -> int:
        """How many mini-batches from the start of the next stage keep their graphs, by what is known of their memory.

        `stage_tokens` are the padded tokens of each mini-batch of all stages, `kept` the numbers of the earlier stages.
        """
        fraction = self.kept_fraction
        if fraction is None:
            fraction = 0.0 if self.kept_gib is None else 1.0
        tokens_left = fraction * sum(tokens for stage in stage_tokens for tokens in stage)
        bytes_left = math.inf if self.kept_gib is None else self.kept_gib * 2**30
        for stage, count in enumerate(kept):
            num_tokens = sum(stage_tokens[stage][:count])
            tokens_left -= num_tokens
            bytes_left -= num_tokens * self._bytes_per_token.get(stage, 1.0)
        limit = min(tokens_left, bytes_left / self._bytes_per_token.get(len(kept), 1.0))
        return sum(tokens <= limit for tokens in accumulate(stage_tokens[len(kept)]))
