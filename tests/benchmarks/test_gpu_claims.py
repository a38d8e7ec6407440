"""Each GPU claim has a value, a limit and a peer, and its code runs on a CPU; no test depends on times."""

import os
import re
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import CLAIMS, MINUTES, offers, report, run_group, run_here_or_in_a_process
from benchmarks.gpu_claims import GROUPS
from benchmarks.harness import RESULTS

TINY = Namespace(tiny=True, threads=1, pairs=1)
QUICK = ("loss", "search", "kmeans", "checkpoint")


def test_every_claim_is_in_one_group_and_all_fit_into_the_time():
    assert sorted(key for group in GROUPS.values() for key in group.claims) == sorted(CLAIMS)
    assert list(CLAIMS) == [f"G{number}" for number in range(1, 14)]
    assert sum(group.seconds for group in GROUPS.values()) <= 60 * MINUTES
    assert all(claim.limit and claim.peer and re.match("[<>]=", claim.target) for claim in CLAIMS.values())


def test_the_targets_are_those_of_the_list_of_claims():
    """If the list of claims exists, each target's number is in its row."""
    path = Path(os.environ.get("EMBED_DATA", "../shared/data")).parent / "BENCHMARKS.md"
    if not path.is_file():
        pytest.skip("the list of claims is missing")
    rows = dict(re.findall(r"^\| (G\d+) \| (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows.keys() >= CLAIMS.keys()
    # A row may write a number in thousands or millions, such as 14k or 1.2M.
    for key in ("G1", "G2", "G3", "G5", "G9", "G10", "G11", "G12"):
        number = float(CLAIMS[key].target[2:])
        spellings = {f"{number:g}", f"{number / 1e3:g}k", f"{number / 1e6:g}M"}
        assert any(re.search(rf"\b{re.escape(text)}\b", rows[key]) for text in spellings), (key, spellings)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in GROUPS]
)
def test_a_group_runs_at_a_tiny_size_and_writes_no_row(name, capsys):
    before = RESULTS.read_bytes()
    run_group(name, TINY)
    assert RESULTS.read_bytes() == before
    printed = capsys.readouterr().out
    for key in GROUPS[name].claims:
        assert f"{key} {CLAIMS[key].what}, " in printed
        assert f"{key} limit of it: {CLAIMS[key].limit}, " in printed
        # For these claims the value itself is a comparison with the peer.
        assert CLAIMS[key].peer in printed or key in ("G2", "G7", "G13")


def takes_too_long(name, chosen):
    """Replaces a group in a child process."""
    time.sleep(60)


def test_a_group_that_takes_too_long_loses_only_its_remaining_rows(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "run_group", takes_too_long)
    assert not run_here_or_in_a_process("loss", Namespace(tiny=False, threads=2, pairs=1), 0.05)
    assert "loss: out of time; its rows so far are kept" in capsys.readouterr().out


def test_a_group_that_fails_does_not_end_the_others(monkeypatch, capsys):
    def broken(bench):
        raise RuntimeError("broken")

    monkeypatch.setitem(GROUPS, "loss", GROUPS["loss"]._replace(run=broken))
    assert not run_here_or_in_a_process("loss", TINY, 60)
    assert "RuntimeError: broken" in capsys.readouterr().err


def run(monkeypatch, *arguments):
    """Run the command as on a machine without a GPU; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    monkeypatch.setattr(gpu, "offers", lambda: dict.fromkeys(offers(), ""))
    return gpu.main()


def test_the_check_says_what_is_skipped_without_each_part(monkeypatch, capsys):
    assert run(monkeypatch, "--check") == 0
    output = capsys.readouterr().out
    assert all(f"{name}: none" in output for name in offers())
    assert "without deepspeed skipped: G13" in output
    assert report(dict.fromkeys(offers(), "yes")) == [f"{name}: yes" for name in offers()]


def test_a_machine_without_a_gpu_is_refused_in_a_line(monkeypatch, capsys):
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err == "error: needs a CUDA GPU with bfloat16; --tiny runs on a CPU\n"
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--only", "G5,G99")
    assert "no such claim: G99; there are G1 to G13" in capsys.readouterr().err
