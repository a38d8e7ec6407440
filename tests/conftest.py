"""All tests run offline, on one thread, and without the user's settings."""

import functools
import gc
import importlib.metadata
import itertools
import os
import re
import signal
import sys
from collections.abc import Iterator

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", EMBED_IMPORTS="tests")
# The tests' own servers are not asked through a proxy.
os.environ["no_proxy"] = "127.0.0.1"

from pathlib import Path

import pytest


def _fsync(descriptor: int) -> None:
    """Skip the sync: tests kill processes, but not the machine."""
    os.fstat(descriptor)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests. pytest-xdist's controller runs none: its workers wait until it is ready."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    # Imports leave no garbage worth the three seconds that its collection takes; collected after them, below.
    gc.disable()
    # It reads the metadata of all installed packages, which takes half a second.
    importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)
    import torch

    from embeddings.callbacks import run_record
    from tests.helpers.processes import spawn_by_server

    # Threads slow down tiny matrix products; child processes get the limit from OMP_NUM_THREADS.
    torch.set_num_threads(1)
    # Without a device torch would queue each seed for it, with the text of the stack, which takes milliseconds.
    for devices in (torch.cuda, torch.mtia, torch.xpu):
        if not devices.is_available():
            devices.manual_seed_all = lambda seed: None  # type: ignore[assignment]
    # Otherwise processes that multiprocessing spawns import pytest's main module first.
    vars(sys.modules["__main__"]).update(__spec__=None)
    vars(sys.modules["__main__"]).pop("__file__", None)
    spawn_by_server()
    os.fsync = _fsync
    # Lightning 2.6 calls functions that jsonargparse 4.49 renamed.
    config.addinivalue_line("filterwarnings", "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
    # Each run calls it, but the clone does not change.
    run_record.git_commit = functools.cache(run_record.git_commit)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests more time: compiling takes minutes on a loaded machine."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server after all imports and before the first test."""
    gc.enable()
    if session.items and not session.config.option.collectonly:
        from tests.helpers.processes import start_server

        gc.collect()
        # Excludes a million objects of libraries from later garbage collections.
        gc.freeze()
        start_server()


_counter = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder. pytest's fixture is slow: it lists all earlier folders to find a free number."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}{next(_counter)}"
    folder.mkdir(0o700)
    return folder


@pytest.fixture(autouse=True)
def _isolated_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    monkeypatch.setenv("EMBED_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    for name in ("RANK", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        # Lightning sets them when it starts ranks; monkeypatch restores them after the test.
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    # A shell starts background jobs with Ctrl-C ignored, and Lightning ignores it after the first Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    # Lightning warns in every later run of this process if a process group is left.
    if torch.distributed.group.WORLD is not None:  # tests replace `is_initialized`
        torch.distributed.destroy_process_group()


@pytest.fixture
def embed_data() -> Path:
    """The folder of real data sets; without it the test is skipped."""
    folder = Path(os.environ.get("EMBED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real data sets: set EMBED_DATA to their folder")
    return folder


@pytest.fixture
def remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unload code that sentence-transformers loads from model directories after the test."""
    import transformers.dynamic_module_utils

    def names() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in names():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in names():
        del sys.modules[name]
