"""A model directory on the Hugging Face Hub: which of its files go there, and what stops them."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

from embeddings.common import InputError
from embeddings.common.text import one_line
from embeddings.models.embedder import Embedder
from embeddings.models.model_card import add_scores, write_model_card
from embeddings.models.model_files import is_model_file, is_model_path, weight_files

# Files beside the model's own that go with it.
_COMPANIONS = ("README.md", "training_run.json", "LICENSE*", "LICENCE*", "NOTICE*")
_MAIN = "main"


@dataclass(frozen=True)
class PushedModel:
    """What a push has done: the repository `OWNER/NAME`, its page, and the commit with its files and their bytes.

    `left_out` are the entries of the directory that are no files of the model, and stayed.
    """

    name: str
    url: str
    commit: str
    files: tuple[str, ...]
    num_bytes: int
    left_out: tuple[str, ...]


def push_to_hub(
    folder: str | os.PathLike[str],
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload the model",
    update: bool = False,
    token: str | None = None,
) -> PushedModel:
    """Upload a model directory with its card to the Hub, in one commit.

    The files of the model go up, with `README.md`, `scores.json` and the licence; anything else in the directory stays.
    A card that this library wrote shows the scores of `scores.json` before it goes up.

    Args:
        folder: The directory.
        name: The repository, `OWNER/NAME`; `NAME` alone is one of the token's owner.
        private: Whether a new repository is private.
        revision: The branch to commit to, made where it is missing; None for `main`.
        message: First line of the commit.
        update: Whether a repository of this name may exist. Its model files that the directory lacks are deleted.
        token: A token with write access; None for `HF_TOKEN`, or for what `hf auth login` stored.

    Raises:
        InputError: If the directory holds no complete model or a link, or the Hub refuses it.
    """
    folder = Path(folder).expanduser()
    paths, left_out = own_files(folder)
    token = token or get_token()
    if token is None:
        raise InputError(name, "the Hub wants a token", "set HF_TOKEN, or log in with: hf auth login")
    add_scores(folder)
    # An HF_ENDPOINT that was set after huggingface_hub was imported counts too.
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    is_new = False
    try:
        page = api.create_repo(name, private=private, exist_ok=update)
        is_new = not update
        repository = page.repo_id
        if revision not in (None, _MAIN):
            api.create_branch(repository, branch=str(revision), exist_ok=True)
        operations: list[Any] = [CommitOperationAdd(path, folder / path) for path in paths]
        if update:
            there = api.list_repo_files(repository, revision=revision)
            stale = [path for path in there if path not in paths and is_model_path(PurePosixPath(path))]
            operations += [CommitOperationDelete(path) for path in stale]
        commit = api.create_commit(repository, operations, commit_message=message, revision=revision)
    except Exception as error:
        told = _told(error, api.endpoint)
        if told is None:
            raise
        what, fix = told
        is_empty = "; the repository was made and is empty, so use --update next time" if is_new else ""
        raise InputError(name, what, fix + is_empty) from error
    num_bytes = sum((folder / path).stat().st_size for path in paths)
    return PushedModel(repository, str(page), commit.oid, tuple(paths), num_bytes, tuple(left_out))


def push_embedder(embedder: Embedder, name: str, **options: Any) -> PushedModel:
    """Upload a model that lies in no directory, with a card of its use alone; `options` as in `push_to_hub`."""
    with TemporaryDirectory() as place:
        folder = Path(place, "model")
        embedder.save_pretrained(folder)
        write_model_card(folder, embedder, name=name)
        return push_to_hub(folder, name, **options)


def own_files(folder: Path) -> tuple[list[str], list[str]]:
    """The paths of a model directory's own files, and its entries that are none; hidden ones are in neither."""
    if not (folder / "config.json").is_file():
        fix = "give one that training, export or import wrote"
        raise InputError(str(folder), "is no model directory, it has no config.json", fix)
    for file in weight_files(folder):
        if not file.is_file():
            raise InputError(str(file), "is missing, so the model is incomplete", "export it again")
    paths, left_out = [], []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if not (is_model_file(entry) or any(entry.match(pattern) for pattern in _COMPANIONS)):
            left_out.append(entry.name)
            continue
        for path in sorted(entry.rglob("*")) if entry.is_dir() else [entry]:
            if path.is_symlink() or entry.is_symlink():
                what = "is a link, and what it leads to may not be the model's"
                raise InputError(str(path), what, "put the file itself there")
            if path.is_file() and not path.name.startswith("."):
                paths.append(path.relative_to(folder).as_posix())
    return paths, left_out


def _told(error: BaseException, endpoint: str) -> tuple[str, str] | None:
    """What is wrong and how to mend it, for an error of the Hub or of the way to it; None for any other."""
    if isinstance(error, HFValidationError):
        return "is no name of a repository", "write OWNER/NAME with letters, digits, -, _ and ."
    if isinstance(error, OfflineModeIsEnabled):
        return "cannot be reached while HF_HUB_OFFLINE is set", "unset it"
    status = getattr(getattr(error, "response", None), "status_code", None)
    answers = {
        401: ("the Hub does not accept the token (401)", "log in with: hf auth login"),
        403: ("the token may not write there (403)", "take a token with write access to that owner"),
        404: ("is not there, or the token may not see it (404)", "check the name"),
        409: ("exists already", "name another, or commit to it with --update"),
    }
    if status in answers:
        return answers[status]
    if status is not None:
        said = getattr(error, "server_message", None) or str(error)
        return f"the Hub answered {status}: {one_line(said, 160)}", "try again"
    # Errors of a connection; huggingface_hub 1 raises httpx's, and 2 those of httpx2.
    if type(error).__module__.startswith("httpx") or isinstance(error, ConnectionError):
        return f"{endpoint} cannot be reached ({type(error).__name__})", "check the network and HF_ENDPOINT"
    if isinstance(error, ValueError) and "README.md" in str(error):
        return one_line(str(error), 200), "correct the card's header"
    return None if error.__cause__ is None else _told(error.__cause__, endpoint)
