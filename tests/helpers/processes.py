"""A fork server for tests: starts Python commands in milliseconds, with all imports already done.

conftest calls `start_server` after collection. It forks the server from pytest before the first test: torch, Lightning
and the library are loaded, and no test has changed any state. Each job is a fork of the server in a separate session
and process group. A job is killed when its client closes or dies, and all jobs when pytest ends.

    done = run_command(["main.py", "fit", "--config", path])         # exit code, stdout, stderr
    with Command(["main.py", "fit", "--config", path]) as process:   # as subprocess.Popen
        process.send_signal(signal.SIGTERM)

Lightning's launcher and multiprocessing's `spawn` also use the server inside such a command. Tests that need a new
interpreter (imports, environment variables that libraries read when they load, `-I`) need a real `subprocess.run`.
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

# Modules that commands need; the server imports them at its first job.
LOADED = (
    "embeddings.cli.fit",
    "embeddings.modules",
    "embeddings.callbacks",
    "embeddings.data",
    "embeddings.models",
    "embeddings.strategies",
    "lightning.pytorch.cli",
    "lightning.pytorch.strategies.launchers.subprocess_script",
    # Imported by functions, so that each process would load them again.
    "attrs",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "omegaconf",
    "pandas",
    "transformers.models.bert.modeling_bert",
    "transformers.models.mistral.modeling_mistral",
)
_NUMBER = struct.Struct("i")
_server: list[Any] = []  # the path of its socket, and a file descriptor that keeps it running


class Command(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` of a Python command line as a job of the server; a leading interpreter path is dropped.

    If `function`, a module-level function, is set, `words` are its arguments. The options are `env`, `cwd`, `stdin`,
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
        streams = [ends[index] if ends[index] >= 0 else number for number, index in enumerate((0, 3, 5))]
        with open(os.memfd_create("job"), "wb") as file:
            pickle.dump(job, file)
            file.flush()
            self._connection, path = socket.socket(socket.AF_UNIX), start_server()
            try:
                self._connection.connect(path)
                # A process that multiprocessing spawned may outlive its client.
                kind = b"spawned" if self._function is _run_spawned else b"job"
                socket.send_fds(self._connection, [kind], [file.fileno(), *streams, *passed])
                (self.pid,) = _NUMBER.unpack(self._connection.recv(_NUMBER.size))
            except (OSError, struct.error) as error:
                self._connection.close()
                log = Path(path).with_name("error.txt")
                message = log.read_text() if log.exists() else "no error was written"
                raise RuntimeError(f"the fork server has ended: {message}") from error
        self._child_created = True
        self._close_pipe_fds(*ends)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._connection.setblocking(not wait_flags)
        try:
            status = self._connection.recv(_NUMBER.size)
        except BlockingIOError:
            return 0, 0
        self._connection.close()
        return self.pid, _NUMBER.unpack(status)[0] if status else int(signal.SIGKILL)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        # Called by `poll`, `send_signal` and the destructor, which may run after all modules are unloaded.
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
    """Run a Python command line; returns exit code, stdout and stderr like `subprocess.run`.

    With `check`, an exit code other than 0 raises an `AssertionError` with the command's stderr.
    """
    with Command(words, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            # The server kills the job when its client closes.
            process.kill()
    if check:
        assert process.returncode == 0, stderr[-6000:]
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def spawn_by_server() -> None:
    """Make multiprocessing's `spawn` fork from the server, which takes 0.1 s instead of 5 s."""
    spawned: dict[int, Command] = {}
    start, poll = multiprocessing.util.spawnv_passfds, popen_fork.Popen.poll

    def spawnv_passfds(path: Any, words: Sequence[Any], passed: Sequence[int]) -> int:
        match = re.search(r"spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)", os.fsdecode(words[-2]))
        if match is None:
            return start(path, words, passed)
        command = Command(list(map(int, match.groups())), function=_run_spawned, pass_fds=passed)
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


def _run_spawned(tracker: int, pipe: int) -> None:
    sys.argv = ["-c", "--multiprocessing-fork"]
    multiprocessing.spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker)


def start_server() -> str:
    """Fork the server if it is not running; returns the path of its socket."""
    if _server:
        return _server[0]
    folder = tempfile.mkdtemp(prefix="fork-server-")
    _server.append(f"{folder}/socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_server[0])
    listener.listen(64)
    # The server ends at end-of-file: when the last process with the write end has ended.
    lifeline, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns about other threads; the server needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        # Its parent exits at once, so that the server is not a child of pytest.
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
    _server.append(str(write_end))
    return _server[0]


def _serve(listener: socket.socket, lifeline: int) -> None:
    """Fork a job per connection and send its exit status to the client; end at end-of-file of `lifeline`."""
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    # Close all other descriptors, such as pipes that pytest's parent waits for.
    kept = sorted((listener.fileno(), lifeline))
    for before, after in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, after)
    # pytest's handlers write to such a descriptor, which may be a socket of a job by then.
    for logger in logging.root.manager.loggerDict.values():
        for handler in list(getattr(logger, "handlers", ())):
            if type(handler).__module__.startswith("_pytest."):
                logger.removeHandler(handler)
    gc.freeze()
    is_loaded = False
    jobs: dict[int, tuple[int, socket.socket]] = {}  # descriptor of the process → (process id, client)
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
                # The client has closed; the exit of the job is handled next.
                _kill(clients[number])
        if listener in ready:
            if not is_loaded:
                for name in LOADED:
                    with warnings.catch_warnings():
                        # As in a job, where warnings of a library's import are not errors either.
                        warnings.simplefilter("ignore")
                        module = importlib.import_module(name)
                    # The library's packages load their names lazily.
                    for part in module.__all__ if name.count(".") == 1 and name.startswith("embeddings.") else ():
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
                _run_job(descriptors)
            for number in descriptors:
                os.close(number)
            with contextlib.suppress(OSError):
                client.sendall(_NUMBER.pack(pid))
            jobs[os.pidfd_open(pid)] = pid, client
            if kind == b"spawned":
                spawned.add(pid)


def _kill(pid: int) -> None:
    """Kill a job and its process group."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def _run_job(descriptors: list[int]) -> NoReturn:
    """Reset what pytest changed in this process, run the function of the job, and exit."""
    code = 1
    try:
        os.setsid()
        # Move the descriptors away first; then each gets its number in the client.
        content, *others = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 512) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        with open(content, "rb") as file:
            file.seek(0)
            # The module of the function may need the environment, so it is unpickled later.
            environment, folder, passed, job = pickle.load(file)
        for number, descriptor in zip((0, 1, 2, *passed), others, strict=True):
            os.dup2(descriptor, number, inheritable=number < 3)
            os.close(descriptor)
        _reset_process(environment, folder)
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


def _reset_process(environment: dict[str, str], folder: str) -> None:
    """Undo pytest's changes to this process: streams, signals, warnings, log handlers and exit functions."""
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
            # torch's handler has no stream and would close a new one; dill's always writes to sys.stderr.
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
    # Values that Lightning and the library read at import.
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.strategies.launchers import subprocess_script

    from embeddings.strategies import ranks

    rank_zero_only.rank = int(environment.get("RANK", environment.get("LOCAL_RANK", 0)))
    ranks._parent = os.getppid()
    subprocess_script.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Command})


def _run(*words: str) -> int:
    """Run a Python command line in this process; returns its exit code."""
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
            assert not words[0].startswith("-"), f"Python options are not supported: {words}"
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
