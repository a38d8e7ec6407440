"""The growth with the rows: what a measured process used."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.growth import AnonymousMemory

# Maps a file and reads it whole, and fills as many bytes of its own.
PROGRAM = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
    mapped.rfind(b"x")
    own = bytearray(b"1") * len(mapped)
    print(flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_anonymous_memory_excludes_mapped_files(tmp_path):
    size = 100_000_000
    (tmp_path / "data").write_bytes(bytes(size))
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "data")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        memory = AnonymousMemory(process.pid)
        resident = int((Path("/proc") / str(process.pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        while not memory.peak_mb:
            time.sleep(0.01)  # the first sample, before the process ends and frees its memory
        process.stdin.close()
        process.wait()
    memory.join()
    assert resident > 2 * size
    assert size <= memory.peak_mb * 1e6 < 1.3 * size
