import torch

from embeddings.common.random import derive_seed, fork_rng, numpy_generator


def test_a_seed_is_the_same_number_on_every_machine():
    assert derive_seed(0, "step", 1, 2) == 6917871978523944128


def test_streams_of_one_seed_differ():
    seeds = {derive_seed(seed, stream, n) for seed in range(3) for stream in ("a", "b") for n in range(50)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parts_do_not_run_together():
    assert derive_seed(0, "a", 11) != derive_seed(0, "a1", 1)


def test_generators_repeat():
    assert numpy_generator(1, "x").integers(1 << 60) == numpy_generator(1, "x").integers(1 << 60)


def test_fork_rng_leaves_the_state_as_it_was():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with fork_rng(torch.device("cpu")):
        torch.rand(100)
    assert torch.equal(torch.rand(2), expected)
