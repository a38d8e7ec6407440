"""The arguments of objects in the form of a config."""

import copy
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embeddings.common.protocols import KeepsArguments, as_config
from embeddings.losses import InfoNCE, MatryoshkaInfoNCE


class Layer(KeepsArguments, nn.Module):
    def __init__(self, width: int, factory: Any = None, *, names: tuple[str, ...] = ("a",), hook: Any = print) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


@dataclass(frozen=True)
class Settings:
    rate: float = 0.5
    parts: list[str] = field(default_factory=list)
    derived: int = field(default=3, init=False)


def test_a_value_becomes_plain_types_and_class_paths() -> None:
    here = __name__
    layer = Layer(4, partial(torch.optim.SGD, lr=0.1), names=("b", "c"))
    arguments = {
        "width": 4,
        "factory": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "names": ["b", "c"],
    }
    for value, expected in (
        (None, None),
        (Path("/a/b"), "/a/b"),
        ({"a": (1, 2.5, True)}, {"a": [1, 2.5, True]}),
        (Settings, {"class_path": f"{here}.Settings"}),
        (Settings(parts=["x"]), {"rate": 0.5, "parts": ["x"]}),
        (layer, {"class_path": f"{here}.Layer", "init_args": arguments}),
        ([Layer(2)], [{"class_path": f"{here}.Layer", "init_args": {"width": 2, "factory": None, "names": ["a"]}}]),
        (lambda groups: groups, "(function test_a_value_becomes_plain_types_and_class_paths.<locals>.<lambda>)"),
        (torch.zeros(2), "(Tensor in memory)"),
    ):
        assert as_config(value) == expected


def test_options_that_a_class_passes_on_are_its_arguments() -> None:
    made = as_config(MatryoshkaInfoNCE((8, 4), temperature=0.5))
    assert made["class_path"] == "embeddings.losses.MatryoshkaInfoNCE"
    assert made["init_args"] == {"widths": [8, 4], "weights": None, "temperature": 0.5}


def test_a_deep_copy_shares_arguments_that_cannot_be_copied() -> None:
    lock = threading.Lock()
    layer = Layer(2, factory=lock)
    copied = copy.deepcopy(layer)
    assert copied.given_arguments.args == (2,)
    assert copied.given_arguments.kwargs["factory"] is lock
    assert copied.linear.weight is not layer.linear.weight
    assert layer.state_dict().keys() == {"linear.weight", "linear.bias"}
    assert as_config(copy.deepcopy(InfoNCE(0.3)))["init_args"]["temperature"] == 0.3
