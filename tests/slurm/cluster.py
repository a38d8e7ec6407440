"""A SLURM cluster of one node in a folder, with separate configuration, key, sockets, ports and logs."""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.waiting import wait_for

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")
# A requeued job waits until its last credential expires (two minutes by default), then for the scheduler.
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Job:
    """The fields of a job from `scontrol show job`, and its output."""

    fields: dict[str, str]

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    @property
    def has_ended(self) -> bool:
        return self.state not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"}

    @property
    def restarts(self) -> int:
        return int(self.fields["Restarts"])

    @property
    def exit_code(self) -> str:
        return self.fields["ExitCode"]

    @property
    def output(self) -> str:
        path = Path(self.fields["StdOut"])
        return path.read_text() if path.exists() else ""


class Cluster:
    """A running SLURM; jobs are submitted in `project`, a folder with the checkout's `main.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.project = folder, folder / "project"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        local = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        self.environment = clean | local | {"PYTHONPATH": str(ROOT), "EMBED_IMPORTS": "tests"}

    def ask(self, *words: str) -> str:
        """Run a program of SLURM; returns its output."""
        line = subprocess.run(words, env=self.environment, cwd=self.project, capture_output=True, text=True, timeout=60)
        if line.returncode:
            raise RuntimeError(f"{' '.join(words)}: {line.stderr.strip()}")
        return line.stdout

    def submit(self, *words: str) -> str:
        """Submit a job; returns its number."""
        return self.ask("sbatch", "--parsable", *words).strip()

    def jobs(self, number: str) -> list[Job]:
        """A job, or the tasks of an array."""
        lines = self.ask("scontrol", "show", "job", "--oneliner", number).splitlines()
        return [Job(dict(re.findall(r"(\w+)=(\S+)", line))) for line in lines]

    def ended(self, number: str) -> list[Job]:
        """Wait until the jobs have ended; returns them."""
        wait_for(lambda: all(job.has_ended for job in self.jobs(number)), f"the end of job {number}", 300)
        return self.jobs(number)

    def wait_while_running(self, number: str, happened: Callable[[], bool], what: str) -> None:
        """Wait for an event of a job; if the job ends before, a `RuntimeError` contains its output."""

        def ended_or_happened() -> bool:
            return happened() or self.jobs(number)[0].has_ended

        wait_for(ended_or_happened, what, 300)
        if not happened():
            raise RuntimeError(f"job {number} ended before {what}; its output:\n{self.jobs(number)[0].output}")


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    """A SLURM in an empty folder; its jobs and daemons end with the context."""
    host = socket.gethostname().split(".")[0]
    text = CONFIGURATION.format(host=host, folder=folder, user=getpass.getuser(), ports=free_ports(2))
    # munged requires a folder that all users can read, and a private key.
    folder.chmod(0o755)
    for name in ("state", "spool", "project/checkpoints/slurm"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "project" / "main.py").symlink_to(ROOT / "main.py")
    cluster = Cluster(folder)
    names = ("key-file", "socket", "pid-file", "seed-file", "log-file")
    munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in names]
    with contextlib.ExitStack() as stack:
        stack.enter_context(daemon(cluster, "munged", "--foreground", *munge))
        wait_for((folder / "munge.socket").exists, "munged")
        stack.enter_context(daemon(cluster, "slurmctld", "-D"))
        stack.enter_context(daemon(cluster, "slurmd", "-D"))
        wait_for(lambda: is_idle(cluster), "the node")
        try:
            yield cluster
        finally:
            cluster.ask("scancel", "--user", getpass.getuser())
            wait_for(lambda: is_idle(cluster), "the end of all jobs")


@contextlib.contextmanager
def daemon(cluster: Cluster, name: str, *words: str) -> Iterator[None]:
    """Run a program during the context; it writes to `NAME.log`."""
    with open(cluster.folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            [name, *words], env=cluster.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_idle(cluster: Cluster) -> bool:
    """Whether the node is up and has no jobs."""
    try:
        return cluster.ask("sinfo", "--noheader", "--format=%T").strip() == "idle"
    except RuntimeError:
        return False


def free_ports(count: int) -> list[int]:
    """Unused local ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def missing_programs() -> list[str]:
    """SLURM's programs that are not on PATH."""
    return [name for name in PROGRAMS if shutil.which(name) is None]
