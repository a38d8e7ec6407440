"""Processes for tests, forked in milliseconds from one that has imported what the tests import.

`start_server`, which conftest calls once the tests are collected, forks the server from pytest before the first test
runs: it has torch, Lightning and the library loaded, and the state of no test. Each job is a fork of the server, in a
session and process group of its own. A job whose client has closed or died is killed, and so are all when pytest ends.

    ended = run_command(["main.py", "fit", "--config", path])        # exit code, stdout, stderr
    with Command(["main.py", "fit", "--config", path]) as process:   # as subprocess.Popen
        process.send_signal(signal.SIGTERM)

Lightning's launcher starts the other ranks of such a command in the same way, and multiprocessing what it spawns. What
only a new interpreter can show (imports, the environment that libraries read when they load, `-I`) needs a real
`subprocess.run`.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import logging
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import random
import re
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import popen_fork
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

# What commands need; imported by the server, when it gets its first job, where the tests have not done so.
LOADED = (
    "embeddings.cli.fit",
    "embeddings.modules",
    "embeddings.callbacks",
    "embeddings.data",
    "embeddings.models",
    "embeddings.strategies",
    "lightning.pytorch.cli",
    "lightning.pytorch.strategies.launchers.subprocess_script",
    "transformers.models.bert.modeling_bert",
    "transformers.models.mistral.modeling_mistral",
)
_NUMBER = struct.Struct("i")
_server: list[Any] = []  # the path of its socket, and a descriptor that keeps it running


class Command(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` of a Python command line (a Python before it is dropped) as a job of the server.

    With `function`, of a module's top level, `words` are its arguments. The options are `env`, `cwd`, `stdin`,
    `stdout`, `stderr`, `text` and `pass_fds`.
    """

    def __init__(self, words: Sequence[Any], *, function: Callable[..., object] | None = None, **options: Any) -> None:
        self._function = function
        super().__init__(words, **options)

    def _execute_child(self, words: Any, *options: Any) -> None:
        passed, folder, environment, ends = list(options[3]), options[4], options[5], options[9:15]
        if self._function is None:
            words = [os.fsdecode(word) for word in words]
            words = words[1:] if words[0] == sys.executable else words
        function = pickle.dumps((self._function or _run, words))
        environment = dict(os.environ if environment is None else environment)
        job = (environment, os.path.abspath(folder or "."), passed, function)
        streams = [ends[place] if ends[place] >= 0 else number for number, place in enumerate((0, 3, 5))]
        with open(os.memfd_create("job"), "wb") as file:
            pickle.dump(job, file)
            file.flush()
            self._connection, path = socket.socket(socket.AF_UNIX), start_server()
            try:
                self._connection.connect(path)
                # A process that multiprocessing spawned outlives its parent.
                kind = b"spawned" if self._function is _be_spawned else b"job"
                socket.send_fds(self._connection, [kind], [file.fileno(), *streams, *passed])
                (self.pid,) = _NUMBER.unpack(self._connection.recv(_NUMBER.size))
            except (OSError, struct.error) as error:
                self._connection.close()
                found = Path(path).with_name("error.txt")
                said = found.read_text() if found.exists() else "it ended without a word"
                raise RuntimeError(f"the server of processes is no more: {said}") from error
        self._child_created = True
        self._close_pipe_fds(*ends)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._connection.setblocking(not wait_flags)
        try:
            found = self._connection.recv(_NUMBER.size)
        except BlockingIOError:
            return 0, 0
        self._connection.close()
        return self.pid, _NUMBER.unpack(found)[0] if found else int(signal.SIGKILL)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        # Asked by `poll`, `send_signal` and the destructor, of which the last may come after all modules have gone.
        if self.returncode is None and self._child_created and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run_command(
    words: Sequence[Any],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 280,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Exit code, stdout and stderr of a Python command line, as `subprocess.run` gives them.

    With `check` another exit code than 0 is an `AssertionError` with what the command said.
    """
    with Command(words, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            # The server kills a job without its client.
            process.kill()
    if check:
        assert process.returncode == 0, stderr[-6000:]
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def spawn_by_server() -> None:
    """Have multiprocessing's `spawn` fork the server too, which takes a tenth of a second and not five."""
    spawned: dict[int, Command] = {}
    start, poll = multiprocessing.util.spawnv_passfds, popen_fork.Popen.poll

    def spawnv_passfds(path: Any, words: Sequence[Any], passed: Sequence[int]) -> int:
        found = re.search(r"spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)", os.fsdecode(words[-2]))
        if found is None:
            return start(path, words, passed)
        command = Command(list(map(int, found.groups())), function=_be_spawned, pass_fds=passed)
        spawned[command.pid] = command
        return command.pid

    def poll_spawned(popen: Any, flag: int = os.WNOHANG) -> int | None:
        command = spawned.get(popen.pid)
        if command is None:
            return poll(popen, flag)
        popen.returncode = command.poll() if flag else command.wait()
        return popen.returncode

    multiprocessing.util.spawnv_passfds = spawnv_passfds
    popen_fork.Popen.poll = poll_spawned


def _be_spawned(tracker: int, pipe: int) -> None:
    sys.argv = ["-c", "--multiprocessing-fork"]
    multiprocessing.spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker)


def start_server() -> str:
    """Fork the server where there is none yet; returns the path of its socket."""
    if _server:
        return _server[0]
    folder = tempfile.mkdtemp(prefix="fork-server-")
    _server.append(f"{folder}/socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_server[0])
    listener.listen(64)
    # Read by the server, written by nobody: it ends with the last process that holds the other end.
    lifeline, kept = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads; xdist's own waits for its controller, and none is needed in the server.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        # Its own parent ends at once, so that it is no child of pytest's.
        if os.fork():
            os._exit(0)
        try:
            os.setsid()
            _serve(listener, lifeline)
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:
            Path(folder, "error.txt").write_text(traceback.format_exc())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(lifeline)
    listener.close()
    _server.append(str(kept))
    return _server[0]


def _serve(listener: socket.socket, lifeline: int) -> None:
    """Fork a job for each connection and tell its client the exit status; end when nobody holds the lifeline's end."""
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    # All else, pipes among it that pytest's own parent waits to see closed.
    kept = sorted((listener.fileno(), lifeline))
    for before, after in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, after)
    gc.freeze()
    is_loaded = False
    jobs: dict[int, tuple[int, socket.socket]] = {}  # a descriptor of the job → its number, its client
    spawned: set[int] = set()
    while True:
        clients = {client.fileno(): pid for pid, client in jobs.values() if pid not in spawned}
        ready, _, _ = select.select([listener, lifeline, *jobs, *clients], [], [])
        if lifeline in ready:
            for pid, _ in jobs.values():
                _kill(pid)
            return
        for number in ready:
            if number in jobs:
                pid, client = jobs.pop(number)
                spawned.discard(pid)
                os.close(number)
                status = os.waitpid(pid, 0)[1]
                with client, contextlib.suppress(OSError):
                    client.sendall(_NUMBER.pack(status))
            elif number in clients:
                # The client has gone; the job's end comes next.
                _kill(clients[number])
        if listener in ready:
            if not is_loaded:
                for name in LOADED:
                    module = importlib.import_module(name)
                    # The library's packages load their parts when they are first asked for.
                    for part in getattr(module, "__all__", ()):
                        with contextlib.suppress(ImportError):
                            getattr(module, part)
                gc.freeze()
                is_loaded = True
            client, _ = listener.accept()
            kind, descriptors, _, _ = socket.recv_fds(client, 16, 64)
            pid = os.fork()
            if not pid:
                for other in (listener, client, *(of for _, of in jobs.values())):
                    other.close()
                for number in (lifeline, *jobs):
                    os.close(number)
                _work(descriptors)
            for number in descriptors:
                os.close(number)
            with contextlib.suppress(OSError):
                client.sendall(_NUMBER.pack(pid))
            jobs[os.pidfd_open(pid)] = pid, client
            if kind == b"spawned":
                spawned.add(pid)


def _kill(pid: int) -> None:
    """End a job and what it has started in its group."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def _work(descriptors: list[int]) -> NoReturn:
    """Be a job: what pytest has changed in this process is as in a new one, then the function is called."""
    code = 1
    try:
        os.setsid()
        # Out of the way first: each gets the number that it has in the client.
        content, *others = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 512) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        with open(content, "rb") as file:
            file.seek(0)
            # The function's own module may need the environment.
            environment, folder, passed, job = pickle.load(file)
        for number, descriptor in zip((0, 1, 2, *passed), others, strict=True):
            os.dup2(descriptor, number, inheritable=number < 3)
            os.close(descriptor)
        _begin(environment, folder)
        function, words = pickle.loads(job)
        code = function(*words) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        with contextlib.suppress(ValueError):  # the job may have closed its stderr
            traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _begin(environment: dict[str, str], folder: str) -> None:
    """Undo what pytest has done to this process: streams, signals, warnings, log handlers, what is left for the end."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *range(32, 34)}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    importlib.reload(warnings)
    logging.root.handlers.clear()
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            # torch's has none, and would close the one it is given; dill's always writes to sys.stderr.
            if vars(handler).get("stream") is not None and not isinstance(handler, logging.FileHandler):
                handler.stream = sys.stderr
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)
    random.seed()
    torch.manual_seed(torch.default_generator.initial_seed())
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    # What Lightning and the library read when they are imported.
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.strategies.launchers import subprocess_script

    from embeddings.strategies import ranks

    rank_zero_only.rank = int(environment.get("RANK", environment.get("LOCAL_RANK", 0)))
    ranks._parent = os.getppid()
    subprocess_script.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Command})


def _run(*words: str) -> int:
    """Run a Python command line as this process's own; returns its exit code."""
    try:
        if words[0] == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(main))
        elif words[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            assert not words[0].startswith("-"), f"options of Python are not known here: {words}"
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
