import pytest
import torch

from embeddings.mining.search import largest_of_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 16, 47, 160, 1000, 1003])
@pytest.mark.parametrize("top_k", [1, 4, 30])
def test_the_largest_values_and_their_places(dtype, width, top_k):
    # bfloat16 makes many of them equal.
    score_QT = torch.randn(20, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    top_k = min(top_k, width)
    values, places = map(torch.as_tensor, largest_of_rows(score_QT, top_k))
    assert torch.equal(values.sort(descending=True).values, score_QT.float().sort(descending=True).values[:, :top_k])
    assert torch.equal(score_QT.float().gather(1, places), values)
    assert all(len(set(row)) == top_k for row in places.tolist())


@pytest.mark.parametrize("order", ["rising", "falling", "equal", "one column", "the rest"])
def test_wherever_the_largest_lie(order):
    width, top_k = 16 * 40 + 7, 9
    score_T = torch.arange(float(width))
    if order == "falling":
        score_T = score_T.flip(0)
    elif order == "equal":
        score_T = torch.zeros(width)
    elif order == "one column":
        score_T[3 : 16 * 40 : 40] += 1000
    elif order == "the rest":
        score_T[-7:] += 1000
    values, places = largest_of_rows(score_T[None], top_k)
    assert sorted(values[0].tolist()) == score_T.sort().values[-top_k:].tolist()
    assert score_T[torch.as_tensor(places[0])].tolist() == values[0].tolist()
    assert len(set(places[0].tolist())) == top_k
