"""Where the tests of Triton kernels run in Triton's interpreter."""

import os

import pytest
import torch


def require_interpreter() -> None:
    """Skip the test on a machine with a GPU, without triton, or without the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the tests marked gpu run the compiled kernels")
    pytest.importorskip("triton", reason="triton, which CUDA builds of torch contain, is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter needs TRITON_INTERPRET=1 before Python starts")
