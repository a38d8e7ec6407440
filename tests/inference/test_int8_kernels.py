import os
import platform

import pytest
import torch
from torch import nn

from embeddings.inference.precision import QuantisedInput
from tests.helpers.processes import run_command

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="int8 is for x86 processors")

OVERFLOW = """
import torch
from embeddings.inference import precision as module
module.has_int8_products = lambda: {has_products}
layer = torch.nn.Linear(64, 8)
with torch.inference_mode():
    layer.weight.fill_(0.5)[::2] *= -1
    product = module.linear_product(layer, layer, module.QuantisedInput())
    input_NI = torch.full((40, 64), 3.0)
    print((product(input_NI) - layer(input_NI)).abs().max().item())
"""


@pytest.mark.parametrize(("has_products", "is_right"), [(False, True), (True, False)])
def test_without_products_of_8_bits_pairs_of_the_largest_numbers_do_not_overflow(has_products, is_right) -> None:
    """oneDNN told to do as on a processor without them: 7 bits are right there, and 8 are not."""
    code, environment = OVERFLOW.format(has_products=has_products), {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = run_command(["-c", code], env=environment, check=True)
    assert (float(run.stdout) < 1e-3) is is_right


@torch.no_grad()
def test_another_tensor_or_another_module_is_quantised_anew() -> None:
    inputs, owners = QuantisedInput(), (nn.Identity(), nn.Identity())
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    found = inputs.of(owners[0], first)
    assert inputs.of(owners[0], first) is found
    assert inputs.of(owners[1], first) is not found
    assert not torch.equal(inputs.of(owners[1], second)[0], found[0])
    first.neg_()
    assert torch.equal(inputs.of(owners[1], first)[0].int(), 2 * (inputs.steps + 1) - found[0].int())
