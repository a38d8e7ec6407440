import collections
import enum
import json
import math
import pathlib
import random
import struct
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from embeddings.common import InputError
from embeddings.common.plain_content import MOST_LEVELS, pack, unpack


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


def test_not_a_number_comes_back():
    found = round_trip([math.nan, {"x": (math.nan,)}])
    assert math.isnan(found[0])
    assert math.isnan(found[1]["x"][0])
    assert struct.pack(">d", found[0]) == struct.pack(">d", math.nan)


def test_tensors_are_named_by_their_path():
    one, two = torch.ones(2), torch.zeros(())
    packed = pack({"state_dict": {"a.weight": one}, "optimizer_states": [{"state": {0: {"step": two}}}]})
    assert list(packed.tensors) == ["state_dict/a.weight", "optimizer_states/0/state/0/step"]
    assert packed.tensors["state_dict/a.weight"].data_ptr() == one.data_ptr()


def test_paths_that_read_alike_keep_their_tensors_apart():
    content = {"a": {"b": torch.tensor(1), 1: torch.tensor(2), "1": torch.tensor(3)}, "a/b": torch.tensor(4)}
    content["__metadata__"] = torch.tensor(5)
    found = round_trip(content)
    assert [int(x) for x in (*found["a"].values(), found["a/b"], found["__metadata__"])] == [1, 2, 3, 4, 5]


def test_tied_weights_are_one_tensor_and_other_views_are_their_own():
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


def test_random_states_come_back():
    states = {
        "torch": torch.random.get_rng_state(),
        "python": random.Random(1).getstate(),
        "numpy": np.random.RandomState(2).get_state(),
    }
    found = round_trip(states)
    assert torch.equal(found["torch"], states["torch"])
    assert found["python"] == states["python"]
    again = np.random.RandomState()
    again.set_state(found["numpy"])
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
def test_what_is_not_plain_is_refused_by_its_place(value, kind):
    with pytest.raises(InputError) as refusal:
        pack({"callbacks": {"Mine": {"scores": [1.0, value]}}})
    line = str(refusal.value)
    assert line.startswith("checkpoint[callbacks][Mine][scores][1]: is a ")
    assert kind in line
    assert "no plain type; keep tensors, numbers" in line


def test_keys_other_tensors_and_depth_are_refused_by_their_place():
    with pytest.raises(InputError, match=r"checkpoint\[a\]: has the key \(1, 2\)"):
        pack({"a": {(1, 2): 3}})
    for tensor in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(InputError, match=r"checkpoint\[a\]\[0\]: is a tensor that is not dense"):
            pack({"a": [tensor]})
    deep: list = []
    for _ in range(MOST_LEVELS - 1):
        deep = [deep]
    assert round_trip({"a": deep}) == {"a": deep}
    with pytest.raises(InputError, match="nested more than 100 levels deep"):
        pack({"a": [[deep]]})
    deep.append(deep)
    with pytest.raises(InputError, match="nested more than 100 levels deep"):
        pack(deep)


@pytest.mark.parametrize("tree", [{"!tensor": "no"}, {"!no": 1}, {"!dict": [[[], 1]]}, {"!dict": 3}, {"!bytes": "a"}])
def test_a_tree_that_nobody_made_is_a_value_error(tree):
    with pytest.raises(ValueError, match=r"."):
        unpack(type(pack(0))(tree, {}))


def test_a_copy_is_apart_and_its_memory_is_used_again():
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
