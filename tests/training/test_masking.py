import pytest
import torch
from torch import Tensor

from embeddings.common import OptionError
from embeddings.training.language_task import Masking, mask_tokens

MASK, ORDINARY = 4, torch.arange(5, 105)


def masked(masking: Masking, num_rows: int = 40, length: int = 500, may_mask: Tensor | None = None, key: int = 0):
    ids_NL = torch.randint(5, 105, (num_rows, length), generator=torch.Generator().manual_seed(1))
    may_mask_NL = torch.ones_like(ids_NL, dtype=torch.bool) if may_mask is None else may_mask
    key_N = torch.arange(key, key + num_rows)
    return ids_NL, *mask_tokens(ids_NL, may_mask_NL, key_N, masking, MASK, ORDINARY)


@pytest.mark.parametrize(
    ("probability", "mask_fraction", "random_fraction"), [(0.15, 0.8, 0.1), (0.8, 1.0, 0.0), (0.3, 0.0, 1.0)]
)
def test_tokens_are_hidden_in_the_shares_asked_for(
    probability: float, mask_fraction: float, random_fraction: float
) -> None:
    """20,000 tokens: four standard deviations of each share."""
    ids_NL, masked_NL, chosen_NL = masked(Masking(probability, mask_fraction, random_fraction))
    count, total = int(chosen_NL.sum()), chosen_NL.numel()
    assert abs(count / total - probability) < 4 * (probability * (1 - probability) / total) ** 0.5
    assert torch.equal(masked_NL[~chosen_NL], ids_NL[~chosen_NL])
    is_mask = masked_NL[chosen_NL] == MASK
    changed = (masked_NL[chosen_NL] != ids_NL[chosen_NL]) & ~is_mask
    # A random token is by chance the one that was there.
    for found, expected in ((is_mask, mask_fraction), (changed, random_fraction * (1 - 1 / len(ORDINARY)))):
        assert abs(float(found.double().mean()) - expected) <= 4 * (expected * (1 - expected) / count) ** 0.5
    drawn = masked_NL[chosen_NL][changed]
    assert drawn.numel() == 0 or (int(drawn.min()) == 5 and int(drawn.max()) == 104)


def test_what_may_not_be_hidden_stays() -> None:
    may_mask_NL = torch.rand(40, 500, generator=torch.Generator().manual_seed(2)) < 0.5
    ids_NL, masked_NL, chosen_NL = masked(Masking(0.9, 0.8, 0.1), may_mask=may_mask_NL)
    assert not (chosen_NL & ~may_mask_NL).any()
    assert torch.equal(masked_NL[~may_mask_NL], ids_NL[~may_mask_NL])
    assert chosen_NL.sum() > 0.8 * may_mask_NL.sum()


def test_a_rows_choices_follow_from_its_key_alone() -> None:
    """Row 3 of keys 0 … 39 is row 0 of keys 3 …, and other keys choose otherwise."""
    _, first, _ = masked(Masking(0.5, 1.0, 0.0))
    _, again, _ = masked(Masking(0.5, 1.0, 0.0))
    assert torch.equal(first, again)
    ids_NL = torch.full((1, 500), 7)
    may_NL = torch.ones_like(ids_NL, dtype=torch.bool)
    alone, beside, other = (
        mask_tokens(
            ids_NL.expand(len(keys), -1), may_NL.expand(len(keys), -1), torch.tensor(keys), Masking(), 4, ORDINARY
        )
        for keys in ([3], [1, 3], [5])
    )
    assert torch.equal(alone[0][0], beside[0][1])
    assert not torch.equal(alone[0][0], beside[0][0])
    assert not torch.equal(alone[0], other[0])


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, float("nan")])
def test_a_probability_that_hides_nothing_or_all_is_refused(probability: float) -> None:
    with pytest.raises(OptionError, match=r"model\.masking\.probability must be above 0 and below 1"):
        Masking(probability)


def test_shares_that_exceed_the_whole_are_refused() -> None:
    with pytest.raises(OptionError, match="must be at most 1 together with mask_fraction 0"):
        Masking(mask_fraction=0.9, random_fraction=0.2)
    with pytest.raises(OptionError, match="mask_fraction must be 0 to 1"):
        Masking(mask_fraction=-0.1)
