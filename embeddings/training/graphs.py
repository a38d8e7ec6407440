"""Autograd graphs: their leaves, their memory, and how many fit into a budget."""

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
    """The leaves of the graph of `root` that require a gradient, without duplicates."""
    if root.grad_fn is None:
        return [root] if root.requires_grad else []
    return [node.variable for node in _nodes([root]) if hasattr(node, "variable")]


def _nodes(roots: Iterable[Tensor]) -> list[Any]:
    """The nodes of the graphs of some tensors, breadth first, without duplicates."""
    nodes: list[Any] = list(dict.fromkeys(root.grad_fn for root in roots if root.grad_fn is not None))
    seen = set(nodes)
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


class GraphMemory:
    """The memory of graphs that were built inside `measured`; `num_bytes` is set when that context ends."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._storages: Counter[int] | None = None

    @contextmanager
    def measured(self, device: torch.device, parameters: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Measure the graphs built inside; `parameters` returns tensors to exclude, because they exist anyway.

        On a CUDA device this is the increase of the allocator's memory. On other devices it is the size of the distinct
        storages that autograd saves, without the inputs of checkpointed layers. Parameters are excluded; so are
        gathered weights of a sharded layer, which are freed by the end.
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
        """Subtract the cast weights in the graphs of these tensors: under autocast all graphs share them."""
        for node in _nodes(roots):
            if node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable"):
                (cast,) = node._input_metadata
                size = math.prod(cast.shape) * cast.dtype.itemsize
                if self._storages is not None:
                    # Not every cast is saved; a saved one is recognised by its size.
                    if self._storages[size] == 0:
                        continue
                    self._storages[size] -= 1
                self.num_bytes -= size


def free_memory_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that a process can still allocate beyond its peak so far; 0 if unknown.

    On a CUDA device: the driver's free memory plus the allocator's, minus the peak of this process. On other devices:
    the minimum of `MemAvailable` and the free memory of the process's cgroup; `root` contains `proc` and `sys`.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))
    available = re.search(r"^MemAvailable:\s+(\d+)", _text(root / "proc/meminfo"), re.MULTILINE)
    limits = [1024 * int(available[1])] if available else []
    groups = root / "sys/fs/cgroup"
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers in ("", "memory"):
            # Inside a container the group itself is mounted as the root.
            folders = [groups / controllers / path.lstrip("/"), groups / controllers]
            limits += [unused for folder in folders if (unused := _free_in_cgroup(folder)) is not None][:1]
    return max(0, min(limits, default=0))


def _free_in_cgroup(folder: Path) -> int | None:
    """Free bytes of a memory cgroup (version 1 or 2); None if it has no limit."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
        if limit.isdecimal() and used.isdecimal():
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
            return int(limit) - int(used) + (int(cached[1]) if cached else 0)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class GraphBudget:
    """How many mini-batches of each stage keep their graphs; limits and errors as in `GradCache`.

    The memory per token is measured on the first graph of each stage. Call `num_kept` for the stages in the order in
    which they run: a later stage may use what the earlier ones did not. Without a limit no graph is kept.
    """

    def __init__(self, kept_fraction: float | None = None, kept_gib: float | None = None) -> None:
        if kept_fraction is not None and not 0 <= kept_fraction <= 1:
            raise OptionError("kept_fraction", kept_fraction, "must be from 0 to 1", "0.5 keeps half the graphs")
        if kept_gib is not None and not kept_gib >= 0:
            raise OptionError("kept_gib", kept_gib, "must be >= 0", "0 keeps one graph at most")
        self.kept_fraction, self.kept_gib = kept_fraction, kept_gib
        self._bytes_per_token: dict[int, float] = {}

    @property
    def measures(self) -> bool:
        """Whether memory is limited, so that the first graph of each stage must be measured."""
        return self.kept_gib is not None

    def learn(self, stage: int, num_bytes: int, num_tokens: int) -> None:
        """Store the memory per token of one mini-batch's graph."""
        self._bytes_per_token[stage] = max(1.0, num_bytes / num_tokens)

    def num_kept(self, stage_tokens: Sequence[Sequence[int]], kept: Sequence[int] = ()) -> int:
        """The number of mini-batches, from the start of the next stage, that keep their graphs.

        `stage_tokens` are the padded tokens of each mini-batch in each stage, `kept` the results for earlier stages.
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
