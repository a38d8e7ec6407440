"""The memory that a process can still allocate."""

import re
from pathlib import Path

import torch


def free_memory_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that a process can still allocate beyond its peak so far; 0 if unknown.

    On a CPU: the minimum of `MemAvailable` and the free memory of the process's cgroup; `root` contains `proc` and
    `sys`.
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
