"""Compiled layers under strategies that cut, on two gloo ranks: the gradient of plain layers in a single process."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from embeddings.models import backbone
from tests.helpers.ranks import run_on_two_ranks
from tests.strategies.fits import batches, be_launched, methods, one_update, relative_error, write_models
from tests.strategies.test_gradients import STRATEGIES

METHOD = "nv-embed, whole backbone"
CASES = [("fsdp2", True), ("zero 3", True), ("zero 2", True)]


def updates(folder: Path, rank: int) -> dict[Any, Any]:
    be_launched(rank)
    backbone._COMPILER = {"backend": "aot_eager"}
    make, found = methods(folder)[METHOD], {}
    compiled = partial(make.func, replace(make.args[0], compile=True), **make.keywords)  # type: ignore[attr-defined]
    for strategy, cached in CASES:
        found[strategy, cached] = one_update(compiled, batches(METHOD, rank), STRATEGIES[strategy](), 2, cached)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_two_ranks_have_the_gradient_of_plain_layers(tmp_path: Path) -> None:
    write_models(tmp_path)
    make = methods(tmp_path)[METHOD]
    torch.manual_seed(0)
    start = {name: value.detach().clone() for name, value in make().named_parameters()}
    expected = one_update(make, batches(METHOD, None), "auto", 1, cached=False)
    for of_rank in run_on_two_ranks(partial(updates, tmp_path)):
        assert list(of_rank) == CASES
        for found in of_rank.values():
            assert relative_error(found, expected, start) < 1e-6
