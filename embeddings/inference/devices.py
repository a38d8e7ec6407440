"""Several devices: one process on each, which computes whole shards."""

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from embeddings.common.errors import OptionError
from embeddings.common.worker_processes import spread
from embeddings.inference.encoder import Encoder

Item = TypeVar("Item")
Result = TypeVar("Result")

_FIX = "give a number of devices, or names as cuda:0,cuda:1"


def parse_devices(devices: int | str) -> tuple[str, ...]:
    """The names of devices.

    Args:
        devices: How many GPUs, or parts of the processor where there is no GPU; or names with commas between. A name
            that comes twice is for two processes.

    Raises:
        OptionError: If there is no such device, or not all are of one kind.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if isinstance(devices, int):
        if devices < 1 or 0 < num_gpus < devices:
            rule = f"must be from 1 to the {num_gpus} GPUs there are" if num_gpus else "must be >= 1"
            raise OptionError("devices", devices, rule, _FIX)
        return tuple(f"cuda:{number}" if num_gpus else "cpu" for number in range(devices))
    names = tuple(name.strip() for name in devices.split(","))
    known = {"cpu", "cuda", *(f"cuda:{number}" for number in range(num_gpus))} - ({"cuda"} if not num_gpus else set())
    for name in names:
        if name not in known:
            rule = f"must name devices of this machine ({', '.join(sorted(known))})"
            raise OptionError("devices", devices, rule, _FIX)
    if len({torch.device(name).type for name in names}) > 1:
        raise OptionError("devices", devices, "must all be of one kind", "vectors would be rounded in two ways")
    return names


def on_devices(
    encoder: Encoder, devices: Sequence[str], work: Callable[[Encoder, Item], Result], items: Iterable[Item]
) -> Generator[Result, None, None]:
    """Have each item worked on by one of several devices; with fewer than two, here.

    Each process reads the model itself and computes in the encoder's precision, with an even share of this process's
    threads. The encoder's own model makes room for theirs: it lies in the processor's memory until the results are read
    to their end or closed, and can encode nothing meanwhile.

    Args:
        encoder: The model.
        devices: A name for each process (see `parse_devices`).
        work: What is done with an item; it, items and results are pickled.
        items: What there is to do.

    Returns:
        The results, in the order in which they are done.

    Raises:
        OptionError: If the encoder was not read from a model directory, so that no other process can read it.
        WorkerError: If a process died (see `spread`).
    """
    if len(devices) < 2:
        return (work(encoder, item) for item in items)
    if encoder.origin is None:
        raise OptionError("devices", ",".join(devices), "needs a model that was read from a directory", "save it first")
    precision = str(encoder.dtype).removeprefix("torch.")
    options = {
        # Weights that are all of another format decide themselves.
        "precision": precision if precision in ("float32", "bfloat16", "int8") else "auto",
        "dimensions": encoder.dimensions,
    }
    num_threads = max(1, torch.get_num_threads() // len(devices))
    makers = {
        f"device {number}, {name}": partial(_make, work, num_threads, encoder.origin, {**options, "device": name})
        for number, name in enumerate(devices)
    }
    return _aside(encoder, spread(makers, items))


def _aside(encoder: Encoder, results: Generator[Result, None, None]) -> Generator[Result, None, None]:
    """The results, while the encoder's model lies in the processor's memory."""
    device = encoder.embedder.device
    encoder.embedder.to("cpu")
    try:
        yield from results
    finally:
        encoder.embedder.to(device)


def _make(
    work: Callable[[Encoder, Item], Result], num_threads: int, model: str, options: dict[str, Any]
) -> Callable[[Item], Result]:
    """In a process of its own: the work, with the model on its device."""
    torch.set_num_threads(num_threads)
    # Its own lock is a semaphore of the system, which a process that is killed would leave behind.
    tqdm.set_lock(RLock())
    return partial(work, Encoder.from_pretrained(model, **options))
