"""Send training stop signals at random instants: `python -m tests.reliability.signals [--count 200] [--seed 0]`.

SIGUSR1 and SIGTERM, once or twice, to the process or to its whole group with a worker in it, before training, within a
step, while a checkpoint is written, or on the way out. Each stopped run has asked a stand-in for `scontrol` once to
queue it again, has one checkpoint, said one line and left with 75; one that had taken its last step ends with 0. Each
run that is resumed and reaches its end has the bits of one that was never signalled.
"""

import argparse
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.callbacks.preempted_runs import fake_scontrol
from tests.helpers.runs import component
from tests.reliability.kills import chosen, differences, final_state, killed_config, ledger, run, start

SIGNALS = ([10], [15], [10, 15], [15, 15])
# One checkpoint at the end alone: whatever lies there before was written because of a signal.
KEEP = component("ModelCheckpoint", every_n_train_steps=500, save_last=True, save_on_exception=True)


def signalled(folder: Path, config: dict[str, Any], chance: random.Random, seconds: float) -> str:
    """Train in a child, send it signals after a random time, and check how it ends; returns when they came."""
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
    said, left = output.read_text(), [path.name for path in folder.rglob("last*.ckpt")]
    requeued = len(asked.read_text().splitlines()) - calls
    taken = ledger(folder)
    if (folder / "done").exists():
        # A signal may have met the process on its way out, when nobody listens any more.
        assert code in (0, -signal.SIGUSR1, -signal.SIGTERM), f"exit code {code} at the end: {said[-2000:]}"
        assert requeued == 0
        return "after"
    assert code == 75, f"exit code {code}: {said[-2000:]}"
    assert requeued == 1, f"{requeued} requeues: {said[-2000:]}"
    assert said.count("preempted: ") == 1, said[-2000:]
    assert left == ["last.ckpt"] * bool(taken), f"{left} after {len(taken)} steps: {said[-2000:]}"
    return "during" if len(taken) > steps else "before"


def signal_runs(count: int, seed: int) -> int:
    """Send so many over all methods; returns how many runs ended otherwise than one without signals."""
    os.environ |= {"EMBED_IMPORTS": "tests", "SLURM_JOB_ID": "77"}
    torch.set_num_threads(1)
    chance, sent, runs, wrong, places = random.Random(seed), 0, 0, 0, Counter[str]()
    path = os.environ["PATH"]
    while sent < count:
        method, cached, _ = chosen(runs)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            whole = killed_config(folder / "whole", method, cached, 1, 0.0, KEEP)
            start = time.monotonic()
            run(folder / "whole", whole)
            config = killed_config(folder / "cut", method, cached, 1, 0.05, KEEP)
            fake_scontrol(folder / "cut")
            os.environ["PATH"] = f"{folder / 'cut' / 'bin'}:{path}"
            seconds, mine = time.monotonic() - start, Counter[str]()
            while not mine["after"] and sent < count:
                mine[signalled(folder / "cut", config, chance, seconds)] += 1
                sent += 1
            if not mine["after"]:
                run(folder / "cut", config)
            found = differences(final_state(folder / "cut"), final_state(folder / "whole"))
            found += ["the ledger"] * (ledger(folder / "cut") != ledger(folder / "whole"))
        places, runs, wrong = places + mine, runs + 1, wrong + bool(found)
        print(f"{sent:>4} signals  {method}: {dict(mine)}, {'; '.join(found[:3]) or 'the same bits'}", flush=True)
    print(f"{sent} signals ({dict(places)}) to {runs} runs; {runs - wrong} ended with the same bits, {wrong} did not")
    return wrong


def _listens(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM, or is over."""
    with suppress(FileNotFoundError, ProcessLookupError):
        caught = re.search(r"^SigCgt:\t(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is None or bool(int(caught[1], 16) & 1 << (signal.SIGTERM - 1))
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    raise SystemExit(bool(signal_runs(given.count, given.seed)))
