"""The checkpoint file: content, damage, full disks, kills, and content that is not plain."""

import collections
import enum
import errno
import math
import os
import pathlib
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import nn

from embeddings.common import InputError
from embeddings.common.checkpoint_file import (
    MARK,
    copied,
    inspect_checkpoint,
    peek_checkpoint,
    plain,
    read_checkpoint,
    write_checkpoint,
)
from embeddings.common.io import file_lock
from tests.helpers.disks import fake_disk

DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool]


def write(content, path):
    write_checkpoint(content, path)
    return path


def small():
    return {"step": 3, "state_dict": {"a": torch.arange(3.0), "b": torch.tensor(True)}}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_bit_for_bit(dtype, tmp_path):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    table = raw.view(2, 3)
    content = {"flat": raw, "turned": table.t(), "strided": raw[::2], "scalar": raw[4], "none": table[:, :0]}
    found = read_checkpoint(write(content, tmp_path / "x.ckpt"))
    for name, expected in content.items():
        assert found[name].dtype == dtype
        assert found[name].shape == expected.shape
        assert bits(found[name]) == bits(expected)


def test_plain_values_come_back_with_their_types_and_order(tmp_path):
    values = [None, True, -(2**80), -0.0, 5e-324, math.inf, math.nan, "ü\ud800\x00!", b"\x00\xff"]
    values += [[1, (2, [3, (4,)]), {"a": ()}], {1: "x", "1": "y", -3: {0: []}}, random.Random(3).getstate()]
    values += [collections.OrderedDict([("b", 1), ("a", {2: 3})]), collections.Counter({5: 2, 10: 1})]
    found = read_checkpoint(write({"x": values}, tmp_path / "x.ckpt"))["x"]
    assert repr(found) == repr(values)
    assert list(map(type, found)) == list(map(type, values))


def test_torch_reads_the_file_and_tied_weights_are_stored_once(tmp_path):
    tied = nn.Parameter(torch.randn(100_000))
    path = write({"a": tied, "b": tied, "step": 1}, tmp_path / "x.ckpt")
    found = torch.load(path, weights_only=True)
    assert torch.equal(found["a"], tied)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert path.stat().st_size <= 1.02 * 400_000


def test_partial_files_of_killed_processes_are_removed_and_those_of_living_ones_kept(tmp_path):
    for name in (".x.ckpt.abc123.tmp", ".y.ckpt.abc123.tmp", ".z.ckpt.abc123.tmp"):
        (tmp_path / name).touch()
        (tmp_path / f"{name}.lock").touch()
    with file_lock(tmp_path / ".z.ckpt.abc123.tmp.lock"):
        write(small(), tmp_path / "x.ckpt")
        assert sorted(os.listdir(tmp_path)) == [".z.ckpt.abc123.tmp", ".z.ckpt.abc123.tmp.lock", "x.ckpt"]


@pytest.mark.parametrize(("name", "call"), [("fsync", 1), ("fsync", 2), ("replace", 1)])
def test_after_any_failure_only_a_complete_checkpoint_is_left(name, call, tmp_path, monkeypatch):
    path, real, calls = write({"step": 1}, tmp_path / "x.ckpt"), getattr(os, name), []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        with pytest.raises(OSError, match=r".") as failure:
            write(small(), path)
    assert (failure.value.errno, failure.value.filename) == (errno.ENOSPC, str(path))
    assert read_checkpoint(path)["step"] == (3 if call == 2 else 1)
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_disk_that_becomes_full_within_a_tensor_keeps_the_old_file(tmp_path):
    """A limit on the size of a file fails its writes, as a full disk does."""
    import resource
    import signal

    path = write({"step": 1}, tmp_path / "x.ckpt")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as failure:
            write({"state_dict": {str(index): torch.zeros(20_000) for index in range(4)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert failure.value.filename == str(path)
    assert read_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_nothing_is_written_without_enough_disk_space(tmp_path, monkeypatch):
    path = write({"step": 1}, tmp_path / "x.ckpt")
    fake_disk(monkeypatch, 3999)
    with pytest.raises(OSError, match="bytes are needed and 3,999 available") as failure:
        write({"a": torch.zeros(1000)}, path)
    assert (failure.value.errno, failure.value.filename) == (errno.ENOSPC, str(path))
    assert read_checkpoint(path)["step"] == 1
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_peek_reads_no_tensor(tmp_path):
    content = peek_checkpoint(write(small(), tmp_path / "x.ckpt"))
    assert content["step"] == 3
    assert {name: (x.is_meta, x.dtype) for name, x in content["state_dict"].items()} == {
        "a": (True, torch.float32),
        "b": (True, torch.bool),
    }


def refusal(path):
    lines = []
    for read in (read_checkpoint, inspect_checkpoint):
        with pytest.raises(InputError) as error:
            read(path)
        lines.append(str(error.value))
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"{path}: ")
    assert lines[0].endswith("; use a complete .ckpt file that `fit` wrote")
    assert "\n" not in lines[0]


def test_any_flipped_bit_is_detected(tmp_path):
    path = write(small(), tmp_path / "x.ckpt")
    whole, chance = path.read_bytes(), random.Random(0)
    assert read_checkpoint(path)["step"] == 3
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
        refusal(path)


def test_a_truncated_or_extended_file_is_detected(tmp_path):
    path = write(small(), tmp_path / "x.ckpt")
    whole = path.read_bytes()
    for end in range(0, len(whole), 49):
        path.write_bytes(whole[:end])
        refusal(path)
    path.write_bytes(whole + b"\0")
    refusal(path)


class Payload:
    def __reduce__(self):
        return (open, ("canary", "w"))


def crafted(path, content):
    """A file of `torch.save` with a correct checksum."""
    torch.save(content, path)
    whole = path.read_bytes()[:-2] + (len(MARK) + 32).to_bytes(2, "little")
    path.write_bytes(whole + MARK + xxhash.xxh3_128_hexdigest(whole).encode())


FOREIGN_FILES = {
    "torch.save": lambda p: torch.save({"state_dict": Payload()}, p),
    "checked code": lambda p: crafted(p, {"state_dict": Payload()}),
    "checked class": lambda p: crafted(p, {"path": p}),
    "safetensors": lambda p: save_file({"a": torch.ones(1)}, p),
    "empty": lambda p: p.write_bytes(b""),
    "only the comment": lambda p: p.write_bytes(MARK + xxhash.xxh3_128_hexdigest(b"").encode()),
    "a list": lambda p: crafted(p, [1]),
}


@pytest.mark.parametrize("write_file", FOREIGN_FILES.values(), ids=FOREIGN_FILES)
def test_a_foreign_file_is_refused_in_one_line_and_runs_nothing(write_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.ckpt"
    write_file(path)
    refusal(path)
    assert os.listdir(tmp_path) == ["x.ckpt"]


class Pair(NamedTuple):
    a: int


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1), "numpy.float64"),
        (pathlib.Path("x"), "PosixPath"),
        (Pair(1), "Pair"),
        (Colour.RED, "Colour"),
        (collections.defaultdict(list), "defaultdict"),
        (nn.Linear, "builtins.type"),
        ({(1, 2): 3}, "has a key"),
    ],
)
def test_content_that_is_not_plain_is_refused_with_its_path_and_nothing_is_written(value, kind, tmp_path):
    with pytest.raises(InputError) as refused:
        write({"callbacks": {"Mine": {"scores": [1.0, value]}}}, tmp_path / "x.ckpt")
    line = str(refused.value)
    assert line.startswith("checkpoint[callbacks][Mine][scores][1]: ")
    assert kind in line
    assert "; save only tensors, numbers" in line
    assert os.listdir(tmp_path) == []


def test_a_copy_is_independent_and_tied_weights_stay_one_tensor():
    weight, step = torch.arange(6.0).view(2, 3).T, torch.tensor(1.0)
    content = {"weight": weight, "tied": weight, "step": step}
    found = copied(content)
    weight.zero_()
    step.add_(1)
    assert found["weight"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found["tied"] is found["weight"]
    assert float(found["step"]) == 1.0
    assert plain(content)["weight"].data_ptr() == weight.data_ptr()
