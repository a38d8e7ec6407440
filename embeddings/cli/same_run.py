"""Whether a checkpoint is of the run that is to go on: what is trained, on what, and by which seed."""

from collections.abc import Mapping
from typing import Any

from embeddings.common.errors import shown

_PARTS = ("seed_everything", "model", "data")
# How something is computed or called, where and for how long: with another value it is the same run. Ends of paths.
_FREE = frozenset(
    {
        "attn_implementation",
        "batch_size",
        "cache_dir",
        "compile",
        "expert_backend",
        "gradient_checkpointing",
        "licence",
        "num_workers",
        "schedule.total_steps",
        "tile_logits",
        "tile_size",
    }
)


def first_difference(saved: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """The first setting that makes a checkpoint one of another run, in words, or None.

    What the checkpoint's run was given as model, data and seed must be given now; nothing is asked of a setting that
    it does not have. Left free are the trainer's settings, what says how or how long to compute (number of workers,
    size of a tile, the schedule's length …), a source's licence, and the batch size of a rank: what must be the same is
    that of all ranks together, which the checkpoint's plan holds.

    Args:
        saved: The config of the checkpoint's run, as plain types.
        given: That of the run to go on.
    """
    draws_seed = given.get("seed_everything") is True
    parts = [name for name in _PARTS if name in saved and not (draws_seed and name == "seed_everything")]
    return _first("", {name: saved[name] for name in parts}, given)


def _is_free(path: str) -> bool:
    return any(path.endswith(f".{end}") for end in _FREE)


def _first(path: str, saved: Any, given: Any) -> str | None:
    if isinstance(saved, Mapping) and isinstance(given, Mapping):
        named = [(f"{path}.{name}", saved[name], given.get(name)) for name in saved]
        pairs = [(name.lstrip("."), *both) for name, *both in named if not _is_free(name)]
    elif isinstance(saved, list) and isinstance(given, list) and len(saved) == len(given):
        pairs = [(f"{path}[{place}]", *both) for place, both in enumerate(zip(saved, given, strict=True))]
    else:
        return None if saved == given else f"{path} is {shown(saved)} there and {shown(given)} here"
    found = (_first(name, before, now) for name, before, now in pairs)
    return next((difference for difference in found if difference is not None), None)
