import torch

from embeddings.training.gradcache import RandomState


def test_a_replayed_state_draws_the_same_and_leaves_no_trace() -> None:
    torch.manual_seed(0)
    state = RandomState.capture(torch.device("cpu"))
    first, second = torch.rand(4), torch.rand(4)
    with state.replayed():
        assert torch.equal(torch.rand(4), first)
    torch.manual_seed(0)
    torch.rand(8)
    expected = torch.rand(4)
    torch.manual_seed(0)
    torch.rand(8)
    with state.replayed():
        torch.rand(100)
    assert torch.equal(torch.rand(4), expected)
    assert not torch.equal(first, second)


def test_an_error_inside_restores_the_state_outside() -> None:
    state = RandomState.capture(torch.device("cpu"))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    try:
        with state.replayed():
            torch.rand(3)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), before)
