"""Send training stop signals at random times: `python -m tests.reliability.signals [--count 200] [--seed 0]`.

SIGUSR1 and SIGTERM are sent once or twice, to the process or to its group with a worker, before training, during a
step, while a checkpoint is written, or at exit. Each stopped run must call a stand-in for `scontrol` once to requeue
it, write one checkpoint, print one line and exit with 75; after its last step it exits with 0. Each resumed run must
end exactly like a run without signals.
"""

import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.callbacks.preempted_runs import fake_scontrol
from tests.helpers.runs import component
from tests.reliability.kills import interrupt_runs, ledger, run, start

PATH = os.environ["PATH"]
SIGNALS = ([10], [15], [10, 15], [15, 15])
# Writes a checkpoint only at the end; an earlier one was written because of a signal.
KEEP = component("ModelCheckpoint", every_n_train_steps=500, save_last=True, save_on_exception=True)


def signalled(folder: Path, config: dict[str, Any], chance: random.Random, seconds: float) -> str:
    """Train in a child, send signals after a random time, and check its exit; returns when they arrived."""
    asked, output = folder / "asked.txt", folder / "output.txt"
    output.unlink(missing_ok=True)
    calls, steps = len(asked.read_text().splitlines()), len(ledger(folder))
    process = start(folder, config)
    while process.poll() is None and not _listens(process.pid):
        time.sleep(0.005)
    time.sleep(chance.uniform(0, seconds))
    send = chance.choice([os.kill, os.killpg])
    for number in chance.choice(SIGNALS):
        with suppress(ProcessLookupError):
            send(process.pid, number)
    code = process.wait()
    text, checkpoints = output.read_text(), [path.name for path in folder.rglob("last*.ckpt")]
    requeued = len(asked.read_text().splitlines()) - calls
    taken = ledger(folder)
    if (folder / "done").exists():
        # A signal may arrive at exit, after the handlers are removed.
        assert code in (0, -signal.SIGUSR1, -signal.SIGTERM), f"exit code {code} at the end: {text[-2000:]}"
        assert requeued == 0
        return "after"
    assert code == 75, f"exit code {code}: {text[-2000:]}"
    assert requeued == 1, f"{requeued} requeues: {text[-2000:]}"
    assert text.count("preempted: ") == 1, text[-2000:]
    assert checkpoints == ["last.ckpt"] * bool(taken), f"{checkpoints} after {len(taken)} steps: {text[-2000:]}"
    return "during" if len(taken) > steps else "before"


def send_signals(
    folder: Path, config: dict[str, Any], chance: random.Random, seconds: float, maximum: int
) -> Counter[str]:
    """Train one run of about `seconds` with at most `maximum` signals; returns their number by time of arrival."""
    fake_scontrol(folder)
    os.environ |= {"SLURM_JOB_ID": "77", "PATH": f"{folder / 'bin'}:{PATH}"}
    places = Counter[str]()
    while not places["after"] and places.total() < maximum:
        places[signalled(folder, config, chance, seconds)] += 1
    if not places["after"]:
        run(folder, config)
    return places


def _listens(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM, or has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        caught = re.search(r"^SigCgt:\t(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is None or bool(int(caught[1], 16) & 1 << (signal.SIGTERM - 1))
    return True


if __name__ == "__main__":
    raise SystemExit(bool(interrupt_runs(__doc__, 200, send_signals, KEEP, [1])))
