import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from embeddings.common.freed_memory import keep_freed_memory
print({call})
for _ in range(10):
    torch.ones(10, 2**20).neg().sum()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(10, 2**20).neg().sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: str, **environment: str) -> tuple[bool, int]:
    """What the call gave, and page faults of 20 rounds of two tensors of 40 MiB, 20,480 pages, that are freed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    code = FAULTS.format(call=call)
    run = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    said, count = run.stdout.split()
    return said == "True", int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_not_asked_for_again() -> None:
    kept, few = faults("keep_freed_memory()")
    assert kept
    # At most three times all pages of a round, where it takes a while to find a place for both.
    assert few < 3 * 20480
    assert faults("False")[1] >= 20 * 20480


def test_the_environment_goes_before() -> None:
    assert not faults("keep_freed_memory()", MALLOC_ARENA_MAX="2")[0]
    assert not faults("keep_freed_memory()", GLIBC_TUNABLES="glibc.malloc.arena_max=2")[0]
