"""Paths that cannot be written, full disks, and missing libraries and devices."""

import errno
import os
from pathlib import Path
from typing import Any

from tests.reliability.cases import ENCODE, FILTER, FIT, MINE, Make, at, both, copied, nothing, put, rows, run
from tests.reliability.world import Place

SHOW = "show curves --run run --output out.png"
CONVERT = "convert --source BACKBONE --output out --no-keep-head"
SEARCH = "search --model MODEL --corpus corpus.jsonl fox"
SYNTHESIZE = "synthesize --endpoint http://127.0.0.1:9/v1 --model m --num-examples 2 --max-retries 0 --output out"
corpus = rows("corpus.jsonl", {"text": "a fox"})
pairs = rows("pairs.jsonl", *({"query": f"q {row}", "positive": f"p {row}"} for row in range(6)))
in_the_way = put("out", "mine")
taken = put("out/notes.txt", "mine")


def folder(name: str) -> Make:
    return lambda place: (place.folder / name).mkdir()


def pipe(name: str) -> Make:
    return lambda place: os.mkfifo(place.folder / name)


def variable(name: str, value: str) -> Make:
    return lambda place: place.patch.setenv(name, value)


def missing(library: str) -> Make:
    """Makes a library appear not installed."""
    return lambda place: place.patch.setitem(__import__("sys").modules, library, None)


def failing(number: int) -> Make:
    """Makes the creation of files and folders below the working folder fail with a system error."""

    def make(place: Place) -> None:
        real_open, real_mkdir = os.open, os.mkdir

        def refuse(path: Any) -> None:
            if Path(os.path.abspath(path)).is_relative_to(place.folder) and "cache" not in Path(path).parts:
                raise OSError(number, os.strerror(number), os.fspath(path))

        def open_file(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & os.O_CREAT:
                refuse(path)
            return real_open(path, flags, *arguments, **options)

        def make_folder(path: Any, *arguments: Any, **options: Any) -> None:
            refuse(path)
            real_mkdir(path, *arguments, **options)

        place.patch.setattr(os, "open", open_file)
        place.patch.setattr(os, "mkdir", make_folder)

    return make


FULL, NOT_ALLOWED = failing(errno.ENOSPC), failing(errno.EACCES)
CASES = {
    "search --model MODEL --corpus vectors fox": {
        "a named pipe as vectors": (
            both(
                copied("vectors"),
                lambda place: (place.folder / "vectors/vectors-00000.npy").unlink(),
                pipe("vectors/vectors-00000.npy"),
            ),
            "vectors/vectors-00000.npy: is not a regular file",
        ),
    },
    ENCODE: {
        "a file in place of vectors": (both(corpus, in_the_way), "out: already exists and has no manifest"),
        "a named pipe as a corpus": (pipe("corpus.jsonl"), "corpus.jsonl: is not a regular file"),
        "a full disk for vectors": (both(corpus, FULL), "No space left on device; free space or change permission", 74),
    },
    ENCODE.replace(" out", " out/vectors"): {"an output below a file": (both(corpus, in_the_way), "out")},
    FILTER: {
        "a folder in place of records": (both(pairs, folder("out.parquet")), "out.parquet"),
        "a dangling link": (lambda place: (place.folder / "pairs.jsonl").symlink_to("gone.jsonl"), ": no such file"),
    },
    CONVERT: {"a file in place of a model": (in_the_way, "output leads to out, which is not a folder")},
    FIT: {
        "a named pipe as a config": (pipe("config.yaml"), "config.yaml: is not a regular file"),
        "a device as records": (
            at("data.init_args", sources=[{"name": "a", "path": "/dev/zero"}]),
            "/dev/zero: is not a regular file",
        ),
        "a file in place of runs": (both(run(), put("run", "mine")), "run"),
        "training without a GPU": (at("trainer", accelerator="gpu"), "trainer.accelerator: gpu"),
        "a SLURM job of two tasks, of which one was started": (
            both(run(), variable("SLURM_NTASKS", "2")),
            "Use `--ntasks-per-node=2` instead",
        ),
        "an invalid name of a trusted package": (
            both(run(), variable("EMBED_IMPORTS", "no-package")),
            "EMBED_IMPORTS=no-package is not a comma-separated list of package names",
        ),
        "a folder without write permission for a run": (
            both(run(), NOT_ALLOWED),
            "Permission denied; free space or change permissions",
            74,
        ),
    },
    SYNTHESIZE: {
        "missing openai": (missing("openai"), "openai is not installed; run: pip install -e '.[synthesis]'"),
        "an unreachable endpoint": (nothing, "http://127.0.0.1:9/v1: ", 74),
    },
    MINE: {"missing faiss": (both(pairs, missing("faiss")), "faiss is not installed; run: pip install -e '.[cpu]'")},
    MINE + " --gpu": {"a search without a GPU": (pairs, "gpu needs")},
    SEARCH.replace("MODEL", "organisation/nothing"): {
        "a missing model": (corpus, "organisation/nothing: is neither a directory nor an available Hub model")
    },
}
