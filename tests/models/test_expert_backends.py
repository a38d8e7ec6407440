import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from embeddings.common import MissingExtraError, OptionError
from embeddings.models.moe.experts import grouped_experts, loop_experts
from embeddings.models.moe.routing import set_expert_backend
from tests.models.moe import make_experts, make_router, random_tokens


def test_a_back_end_is_set_for_all_experts_of_a_model() -> None:
    model = nn.Sequential(make_experts(), nn.Sequential(make_experts()))
    set_expert_backend(model, "loop")
    assert model[0].backend is model[1][0].backend is loop_experts
    set_expert_backend(model, "grouped_mm")
    assert model[0].backend is model[1][0].backend is grouped_experts


def test_an_unknown_back_end_is_refused() -> None:
    with pytest.raises(OptionError, match="expert_backend must be grouped_mm, loop or megablocks, got 'triton'"):
        set_expert_backend(nn.Sequential(), "triton")  # type: ignore[arg-type]


def test_megablocks_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megablocks", None)
    with pytest.raises(
        MissingExtraError, match=r"megablocks.* is not installed; run: pip install -e '.\[megablocks\]'"
    ):
        set_expert_backend(make_experts(), "megablocks")


def stand_in(available: bool = True) -> ModuleType:
    """megablocks' grouped product as its source describes it: contiguous matrices, sizes on the processor."""

    def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
        assert b.is_contiguous()
        assert batch_sizes.dtype == torch.int64
        parts = a.split(batch_sizes.tolist())
        return torch.cat([part @ (matrix.T if trans_b else matrix) for part, matrix in zip(parts, b, strict=True)])

    util = ModuleType("megablocks.grouped_gemm_util")
    util.ops = ModuleType("ops")  # type: ignore[attr-defined]
    util.ops.gmm = gmm
    util.grouped_gemm_is_available = lambda: available  # type: ignore[attr-defined]
    return util


def install(monkeypatch: pytest.MonkeyPatch, util: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "megablocks", ModuleType("megablocks"))
    monkeypatch.setitem(sys.modules, "megablocks.grouped_gemm_util", util)


def test_a_grouped_product_of_megablocks_kind_gives_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, stand_in())
    experts, tokens = make_experts().bfloat16(), random_tokens(40, torch.bfloat16)
    routing = make_router()(tokens.float())
    expected = experts(tokens, routing)
    set_expert_backend(experts, "megablocks")
    torch.testing.assert_close(experts(tokens, routing), expected)
    with pytest.raises(OptionError, match="computes in bfloat16 alone, got 'megablocks in torch"):
        experts.float()(tokens.float(), routing)


def test_a_megablocks_without_its_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, stand_in(available=False))
    with pytest.raises(OptionError, match="lacks its grouped product"):
        set_expert_backend(make_experts(), "megablocks")
