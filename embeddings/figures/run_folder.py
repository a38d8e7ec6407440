"""What the folder of a run says of it: its config, its record, and the folders of the processes it is made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from embeddings.common import InputError

_FIX = "give the folder of a run of fit, such as checkpoints/runs/NAME/version_0"


def read_run_config(run: Path) -> dict[str, Any]:
    """The merged config of a run.

    Raises:
        InputError: If there is none, or it is damaged.
    """
    return _read(run / "config.yaml", yaml.safe_load)


def read_run_record(run: Path) -> dict[str, Any]:
    """What `run.json` says of a run (see `RunRecord`).

    Raises:
        InputError: If there is none, or it is damaged.
    """
    return _read(run / "run.json", json.loads)


def _read(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(str(path), "no such file", _FIX)
    try:
        found = parse(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(str(path), "is damaged", _FIX)
    return found


def run_parts(run: Path) -> list[Path]:
    """The folders of the processes that a run is made of, the earliest first: it may have gone on from another one's
    checkpoint, whose folder then is a `version_N` beside its own.

    Paths are compared by their last parts, so that runs may have been moved. A folder without a config is one part.

    Raises:
        InputError: If a config is damaged.
    """
    before = _part_before(run)
    return [run] if before is None else [*run_parts(before), run]


def _part_before(run: Path) -> Path | None:
    """The last folder before a run's own whose process wrote to the place of the checkpoint that it went on from."""
    number, checkpoint = _number(run), _checkpoint(run)
    if number is None or checkpoint is None:
        return None
    beside = {found: path for path in run.absolute().parent.glob("version_*") if (found := _number(path)) is not None}
    for found in sorted((found for found in beside if found < number), reverse=True):
        if (beside[found] / "config.yaml").is_file() and _wrote(beside[found], checkpoint):
            return run.parent / beside[found].name
    return None


def _wrote(part: Path, checkpoint: Path) -> bool:
    """Whether a part's process may have written a checkpoint: into its own folder, where its config says, or, having
    none of its own, where it went on from one itself.
    """
    own = (part.parent.name, part.name)
    if own in zip(checkpoint.parts, checkpoint.parts[1:], strict=False):
        return True
    callbacks = (read_run_config(part).get("trainer") or {}).get("callbacks") or []
    arguments = [callback.get("init_args") or {} for callback in callbacks if isinstance(callback, dict)]
    places = [Path(str(argument["dirpath"])) for argument in arguments if argument.get("dirpath")]
    earlier = _checkpoint(part)
    if earlier is not None and not any(part.rglob("*.ckpt")):
        places.append(earlier.parent)
    return checkpoint.parent in places


def _checkpoint(run: Path) -> Path | None:
    """The checkpoint that a folder's first process resumed from: later ones resumed from its own."""
    path = read_run_config(run).get("ckpt_path") if (run / "config.yaml").is_file() else None
    earlier = read_run_record(run).get("earlier") if (run / "run.json").is_file() else None
    if isinstance(earlier, list) and earlier and isinstance(earlier[0], dict):
        path = earlier[0].get("resumed_from")
    return Path(str(path)) if path else None


def _number(run: Path) -> int | None:
    digits = run.absolute().name.removeprefix("version_")
    return int(digits) if digits.isdecimal() else None
