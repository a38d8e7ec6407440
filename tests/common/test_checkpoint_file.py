"""The checkpoint file format, and packing content into it."""

import collections
import enum
import errno
import json
import math
import os
import pathlib
import random
import struct
from typing import NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import nn

from embeddings.common import InputError, checkpoint_file
from embeddings.common.checkpoint_file import (
    MAX_LEVELS,
    inspect_checkpoint,
    pack,
    peek_checkpoint,
    read_checkpoint,
    unpack,
    write_checkpoint,
)
from embeddings.common.io import file_lock
from tests.helpers.disks import fake_disk

DTYPES = list(checkpoint_file._DTYPES.values())
STAGES = ["write", "header", "sync", "verify", "rename", "sync folder", "done"]


def write(content, path):
    write_checkpoint(pack(content), path)
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


def test_safetensors_can_load_the_tensors(tmp_path):
    tied = torch.arange(3.0)
    path = write({"state_dict": {"a": tied, "b": tied}, "c": torch.ones((), dtype=torch.float64)}, tmp_path / "x.ckpt")
    found = load_file(path)
    assert found["state_dict/a"].tolist() == [0.0, 1.0, 2.0]
    assert sorted(found) == ["c", "state_dict/a"]
    assert write({}, tmp_path / "y.ckpt").stat().st_size % 8 == 0


def test_equal_contents_give_equal_files_not_much_larger_than_their_tensors(tmp_path):
    content = {"weight": torch.randn(100_000), "step": 1}
    paths = [write(content, tmp_path / name) for name in ("a.ckpt", "b.ckpt")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].stat().st_size <= 1.02 * 400_000


def test_the_stages_are_in_order_and_the_rename_follows_verification(tmp_path, monkeypatch):
    path, seen = write({"step": 1}, tmp_path / "x.ckpt"), []
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (seen.append(f"({read_checkpoint(old)})"), rename(old, new)))
    write_checkpoint(pack({"step": 2}), path, lambda stage: seen.append(f"{stage} {read_checkpoint(path)['step']}"))
    expected = [f"{stage} {1 if place < 5 else 2}" for place, stage in enumerate(STAGES)]
    assert seen == [*expected[:5], "({'step': 2})", *expected[5:]]


def test_a_write_that_fails_verification_keeps_the_old_file(tmp_path, monkeypatch):
    path, real = write({"step": 1}, tmp_path / "x.ckpt"), os.write

    def flips(handle, content):
        return real(handle, bytes(content[:-1]) + bytes([content[-1] ^ 1]) if len(content) == 12 else content)

    monkeypatch.setattr(os, "write", flips)
    with pytest.raises(OSError, match="the disk returned different bytes than were written") as failure:
        write(small(), path)
    assert (failure.value.errno, failure.value.filename) == (errno.EIO, str(path))
    assert read_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_partial_files_of_killed_processes_are_removed_and_those_of_living_ones_kept(tmp_path):
    for name in (".x.ckpt.abc123.tmp", ".y.ckpt.abc123.tmp", ".z.ckpt.abc123.tmp"):
        (tmp_path / name).touch()
        (tmp_path / f"{name}.lock").touch()
    with file_lock(tmp_path / ".z.ckpt.abc123.tmp.lock"):
        write(small(), tmp_path / "x.ckpt")
        assert sorted(os.listdir(tmp_path)) == [".z.ckpt.abc123.tmp", ".z.ckpt.abc123.tmp.lock", "x.ckpt"]


class Failing:
    """A function of `os` that fails at one of its calls."""

    def __init__(self, name, call, code, monkeypatch):
        self.real, self.left, self.code = getattr(os, name), call, code
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments):
        self.left -= 1
        if self.left == 0:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*arguments)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize(("name", "calls"), [("write", 3), ("fsync", 2), ("replace", 1), ("open", 1)])
def test_after_any_failure_only_a_complete_checkpoint_is_left(name, calls, code, tmp_path, monkeypatch):
    path = write({"step": 1}, tmp_path / "x.ckpt")
    for call in range(1, calls + 1):
        with monkeypatch.context() as patch:
            failing = Failing(name, call, code, patch)
            with pytest.raises(OSError, match=r".") as failure:
                write(small(), path)
            assert failing.left == 0
        assert (failure.value.errno, failure.value.filename) == (code, str(path))
        has_space = code in (errno.EROFS, errno.EIO)
        assert ("bytes are needed and " in failure.value.strerror) is not has_space
        after_rename = (name, call) == ("fsync", 2)
        assert read_checkpoint(path)["step"] == (3 if after_rename else 1)
        assert os.listdir(tmp_path) == ["x.ckpt"]


def test_nothing_is_written_without_enough_disk_space(tmp_path, monkeypatch):
    path = write({"step": 1}, tmp_path / "x.ckpt")
    size = write(small(), tmp_path / "small.ckpt").stat().st_size
    stages = []
    for free in (size - 1, size):
        fake_disk(monkeypatch, free)
        if free == size:
            write_checkpoint(pack(small()), path, stages.append)
            continue
        with pytest.raises(OSError, match=f"{size:,} bytes are needed and {free:,} available") as failure:
            write_checkpoint(pack(small()), path, stages.append)
        assert (failure.value.errno, failure.value.filename, stages) == (errno.ENOSPC, str(path), [])
        assert read_checkpoint(path)["step"] == 1
    assert stages[0] == "write"
    assert sorted(os.listdir(tmp_path)) == ["small.ckpt", "x.ckpt"]


def test_a_peek_checks_only_the_header(tmp_path):
    path = write(small(), tmp_path / "x.ckpt")
    whole = bytearray(path.read_bytes())
    whole[-2] ^= 4  # of a tensor
    path.write_bytes(whole)
    content = peek_checkpoint(path)
    assert content["step"] == 3
    expected = {"a": (0, torch.float32), "b": (0, torch.bool)}
    assert {name: (x.numel(), x.dtype) for name, x in content["state_dict"].items()} == expected
    whole[whole.index(b"state_dict")] ^= 4
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"use a complete \.ckpt file"):
        peek_checkpoint(path)


def refusal(path):
    lines = []
    for read in (read_checkpoint, inspect_checkpoint):
        with pytest.raises(InputError) as error:
            read(path)
        lines.append(str(error.value))
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"{path}: ")
    assert lines[0].endswith("; use a complete .ckpt file that `fit` wrote")
    return lines[0]


def test_any_flipped_bit_is_detected(tmp_path):
    path = write(small(), tmp_path / "x.ckpt")
    whole, chance = path.read_bytes(), random.Random(0)
    assert read_checkpoint(path)["step"] == 3
    for place in range(len(whole)):
        for bit in chance.sample(range(8), 2):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            refusal(path)


def test_a_truncated_or_extended_file_is_detected(tmp_path):
    path = write(small(), tmp_path / "x.ckpt")
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        refusal(path)
    path.write_bytes(whole + b"\0")
    refusal(path)


def test_damage_is_named_by_tensor_and_bytes(tmp_path):
    path = write(small(), tmp_path / "x.ckpt")
    whole = bytearray(path.read_bytes())
    whole[-2] ^= 4  # the last byte is the boolean's
    path.write_bytes(whole)
    assert f"is damaged in state_dict/a, bytes {len(whole) - 13:,} to {len(whole) - 1:,};" in refusal(path)


@pytest.mark.parametrize(("old", "new"), [(b"[2,3]", b"[3,2]"), (b'"F32"', b'"I32"'), (b'"b":{', b'"c":{')])
def test_a_header_that_describes_the_same_bytes_differently_is_detected(old, new, tmp_path):
    path = write({"b": torch.ones(2, 3)}, tmp_path / "x.ckpt")
    whole = path.read_bytes()
    assert whole.count(old) == 1
    path.write_bytes(whole.replace(old, new))
    refusal(path)


class Payload:
    def __reduce__(self):
        return (open, ("canary", "w"))


def crafted(path, tree, **metadata):
    """A file with this content and correct checksums."""
    content = json.dumps({"tree": tree, "xxh3_64": {}})
    whole = {"format": "embeddings checkpoint", "version": "1", "content": content, **metadata}
    header = json.dumps(
        {"__metadata__": {"xxh3_64": xxhash.xxh3_64_hexdigest(whole["content"].encode()), **whole}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


PICKLE = "is a pickle, which could run code when loaded"
NOT_A_CHECKPOINT = "is not a complete checkpoint of this library"
DEEP = '{"tree":' + '{"!tuple":[' * 3000 + "]}" * 3000 + ',"xxh3_64":{}}'
FOREIGN_FILES = {
    "torch.save": (lambda p: torch.save({"state_dict": Payload()}, p), PICKLE),
    "torch.save, old": (lambda p: torch.save({"x": Payload()}, p, _use_new_zipfile_serialization=False), PICKLE),
    "other weights": (lambda p: save_file({"a": torch.ones(1)}, p), NOT_A_CHECKPOINT),
    "other format": (
        lambda p: save_file({"a": torch.ones(1)}, p, metadata={"format": "pt"}),
        "has format 'pt', expected 'embeddings checkpoint'",
    ),
    "future version": (lambda p: crafted(p, {}, version="2"), "has format version 2, expected 1"),
    "huge header": (lambda p: p.write_bytes(struct.pack("<Q", 2**40) + b"{}"), NOT_A_CHECKPOINT),
    "empty": (lambda p: p.write_bytes(b""), NOT_A_CHECKPOINT),
    "a list": (lambda p: crafted(p, [1]), "contains a list, not a dict"),
    "no content": (lambda p: crafted(p, {}, content="[]"), NOT_A_CHECKPOINT),
    "deep": (lambda p: crafted(p, {}, content="[" * 100_000), NOT_A_CHECKPOINT),
    "deep in tags": (lambda p: crafted(p, {}, content=DEEP), NOT_A_CHECKPOINT),
    "unknown tag": (lambda p: crafted(p, {"a": {"!instance": "os.system"}}), NOT_A_CHECKPOINT),
    "missing tensor": (lambda p: crafted(p, {"a": {"!tensor": "b"}}), NOT_A_CHECKPOINT),
}


@pytest.mark.parametrize(("write_file", "says"), FOREIGN_FILES.values(), ids=FOREIGN_FILES)
def test_a_foreign_file_is_refused_in_one_line_and_runs_nothing(write_file, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.ckpt"
    write_file(path)
    line = refusal(path)
    assert says in line
    assert "\n" not in line
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_content_that_the_file_cannot_store_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"checkpoint, tensor x/0: has the dtype torch\.complex128"):
        write({"x": [torch.zeros(1, dtype=torch.complex128)]}, tmp_path / "x.ckpt")
    monkeypatch.setattr(checkpoint_file, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(InputError, match="outside tensors, maximum 1,000; store large values as tensors"):
        write({"x": ["word"] * 1000}, tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []


def round_trip(content):
    packed = pack(content)
    return unpack(type(packed)(json.loads(json.dumps(packed.tree, allow_nan=False)), packed.tensors))


PLAIN = [
    None,
    True,
    0,
    -(2**80),
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "ü\ud800\x00!",
    b"\x00\xff",
    [],
    (),
    {},
    [1, (2, [3, (4,)]), {"a": ()}],
    {"b": 1, "a": 2},
    {1: "x", "1": "y", -3: {0: []}},
    {"!tensor": "not one", "!": 1},
    collections.OrderedDict([("b", 1), ("a", {2: 3})]),
    collections.Counter({5: 2, 10: 1}),
    random.Random(3).getstate(),
]


@pytest.mark.parametrize("value", PLAIN, ids=[repr(value)[:30] for value in PLAIN])
def test_plain_values_come_back_with_their_types_and_order(value):
    found = round_trip({"x": value})["x"]
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_tensors_with_equal_joined_paths_stay_separate():
    content = {"a": {"b": torch.tensor(1), 1: torch.tensor(2), "1": torch.tensor(3)}, "a/b": torch.tensor(4)}
    content["__metadata__"] = torch.tensor(5)
    found = round_trip(content)
    assert [int(x) for x in (*found["a"].values(), found["a/b"], found["__metadata__"])] == [1, 2, 3, 4, 5]


def test_tied_weights_are_one_tensor_and_other_views_are_separate():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

    tied = Tied().state_dict()
    assert list(pack(tied).tensors) == ["first.weight"]
    found = round_trip(tied)
    assert found["first.weight"] is found["second.weight"]
    memory = torch.arange(4.0)
    views = {"whole": memory, "half": memory[:2], "turned": memory.view(2, 2).T, "shaped": memory.view(2, 2)}
    assert len(pack(views).tensors) == 4
    assert len(pack({"a": torch.empty(0), "b": torch.empty(0)}).tensors) == 2


def test_the_random_state_of_numpy_is_restored():
    again = np.random.RandomState()
    again.set_state(round_trip({"numpy": np.random.RandomState(2).get_state()})["numpy"])
    assert again.random() == np.random.RandomState(2).random()


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
        (torch.float32, "torch.dtype"),
        (torch.device("cpu"), "torch.device"),
        (torch.Size([1]), "torch.Size"),
        ({1}, "set"),
        (collections.defaultdict(list), "defaultdict"),
        (nn.Linear, "builtins.type"),
        (np.array(["text"]), "numpy.ndarray"),
        (1j, "complex"),
    ],
)
def test_a_type_that_is_not_plain_is_refused_with_its_path(value, kind):
    with pytest.raises(InputError) as refusal:
        pack({"callbacks": {"Mine": {"scores": [1.0, value]}}})
    line = str(refusal.value)
    assert line.startswith("checkpoint[callbacks][Mine][scores][1]: is a ")
    assert kind in line
    assert "not a plain type; save only tensors, numbers" in line


def test_keys_other_tensors_and_depth_are_refused_with_their_path():
    with pytest.raises(InputError, match=r"checkpoint\[a\]: has the key \(1, 2\)"):
        pack({"a": {(1, 2): 3}})
    for tensor in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(InputError, match=r"checkpoint\[a\]\[0\]: is a tensor that is not dense"):
            pack({"a": [tensor]})
    deep: list = []
    for _ in range(MAX_LEVELS - 1):
        deep = [deep]
    assert round_trip({"a": deep}) == {"a": deep}
    with pytest.raises(InputError, match="nested more than 100 levels deep"):
        pack({"a": [[deep]]})
    deep.append(deep)
    with pytest.raises(InputError, match="nested more than 100 levels deep"):
        pack(deep)


def test_a_copy_is_independent_and_its_memory_is_reused():
    weight, step = torch.arange(6.0).view(2, 3).T, torch.tensor(1.0)
    packed = pack({"weight": weight, "tied": weight, "step": step})
    copy = packed.copied()
    weight.zero_()
    step.add_(1)
    found = unpack(copy)
    assert found["weight"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found["tied"] is found["weight"]
    assert float(found["step"]) == 1.0
    addresses = {name: tensor.data_ptr() for name, tensor in copy.tensors.items()}
    again = packed.copied(copy)
    assert {name: tensor.data_ptr() for name, tensor in again.tensors.items()} == addresses
    assert again.tensors["weight"].sum() == 0
    for other in (torch.ones(3), torch.ones(3, 2, dtype=torch.float64)):
        assert torch.equal(pack({"weight": other}).copied(copy).tensors["weight"], other)
