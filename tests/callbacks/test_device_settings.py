"""Settings of a GPU by name: the precision of float32 products and the allocator's segments."""

import os

import pytest
import torch

from embeddings.callbacks import DeviceSettings
from embeddings.common import OptionError
from tests.helpers.runs import component, fit, run_config

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")


def test_a_run_has_the_precision_asked_for_and_gives_it_back(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [component("DeviceSettings", float32_products="high", expandable_segments=True)]
    fit(tmp_path, config)
    assert seen == ["high", "highest"]
    with pytest.raises(OptionError, match="float32_products must be highest or high, got 'tf32'"):
        DeviceSettings("tf32")


@pytest.mark.parametrize(
    ("grows", "given", "expected"),
    [
        (True, ("", ""), ("expandable_segments:True", "")),
        (True, ("", "max_split_size_mb:64"), ("", "max_split_size_mb:64,expandable_segments:True")),
        (True, ("expandable_segments:False", ""), ("expandable_segments:False", "")),
        (False, ("", ""), ("", "")),
    ],
)
def test_segments_grow_unless_the_environment_says_otherwise(grows, given, expected, monkeypatch):
    for name, value in zip(NAMES, given, strict=True):
        monkeypatch.setenv(name, value)
    settings = DeviceSettings(expandable_segments=grows)
    settings.setup(None, None, "fit")
    settings.teardown(None, None, "fit")
    assert tuple(os.environ[name] for name in NAMES) == expected
