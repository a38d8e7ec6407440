"""Which state predicts which token, against loops written out."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from embeddings.common import OptionError
from embeddings.common.types import PackedRows, Prediction
from embeddings.training.language_task import LanguageTask, Masking

MASK, BOS, EOS, PAD = 4, 1, 2, 0
ORDINARY = torch.arange(5, 60)


def packed(num_rows: int = 6, length: int = 40, seed: int = 0) -> PackedRows:
    """Rows of documents `<s> … </s>` of random length; the last row ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    ids_NL = torch.randint(5, 60, (num_rows, length), generator=generator)
    document_NL = torch.zeros_like(ids_NL)
    for row in range(num_rows):
        begins = torch.rand(length, generator=generator) < 0.15
        begins[0] = False
        document_NL[row] = begins.cumsum(0)
        ids_NL[row][begins] = BOS
        ids_NL[row, :-1][begins[1:]] = EOS
    ids_NL[0, 7] = MASK
    ids_NL[-1, -9:], document_NL[-1, -9:] = PAD, -1
    special_NL = (ids_NL == BOS) | (ids_NL == EOS) | (document_NL < 0)
    return PackedRows(ids_NL, document_NL, special_NL, torch.arange(100, 100 + num_rows), torch.arange(num_rows))


def task(objective: Any, separate: bool = False, seed: int = 0, probability: float = 0.5) -> LanguageTask:
    masking = None if objective == "causal" else Masking(probability, 1.0, 0.0)
    return LanguageTask(objective, masking, MASK, ORDINARY, separate, seed)


def pairs(prediction: Prediction) -> list[tuple[int, int]]:
    """(place of the state, label) of each target."""
    return list(zip(prediction.read_P.tolist(), prediction.label_P.tolist(), strict=True))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("objective", ["mlm", "mntp", "causal"])
def test_each_target_is_read_where_the_objective_says(objective: str, separate: bool) -> None:
    rows = packed()
    found = task(objective, separate)(rows)
    ids, documents = rows.input_ids_NL.tolist(), rows.document_NL.tolist()
    expected, length = [], len(ids[0])
    for n in range(len(ids)):
        for i in range(length):
            hidden = int(found.input_ids_NL[n, i]) != ids[n][i]
            if documents[n][i] < 0 or (objective != "causal" and not hidden):
                continue
            if objective == "mlm":
                expected.append((n * length + i, ids[n][i]))
            elif i > 0 and (not separate or documents[n][i] == documents[n][i - 1]):
                # The token at i is predicted from the state at i - 1.
                expected.append((n * length + i - 1, ids[n][i]))
    assert len(expected) > 50
    assert pairs(found) == expected
    assert found.has_padding


@pytest.mark.parametrize("objective", ["mlm", "mntp"])
def test_special_tokens_padding_and_mask_tokens_are_never_hidden(objective: str) -> None:
    rows = packed(60)
    found = task(objective, probability=0.95)(rows)
    hidden_NL = found.input_ids_NL != rows.input_ids_NL
    assert hidden_NL.sum() > 1000
    assert not (hidden_NL & rows.special_NL).any()
    assert not {BOS, EOS, PAD, MASK} & set(found.label_P.tolist())
    # What a next-token predictor has no state for is not hidden either.
    assert bool(hidden_NL[:, 0].any()) is (objective == "mlm")


def test_a_causal_model_reads_what_is_there_and_predicts_separators() -> None:
    rows = packed()
    found = task("causal")(rows)
    assert torch.equal(found.input_ids_NL, rows.input_ids_NL)
    assert {BOS, EOS} <= set(found.label_P.tolist())
    assert len(found) == int((rows.document_NL[:, 1:] >= 0).sum())


def test_targets_follow_from_seed_and_draw_key_and_not_from_the_batch() -> None:
    rows = packed()
    one, again, other = task("mntp")(rows), task("mntp")(rows), task("mntp", seed=1)(rows)
    assert pairs(one) == pairs(again)
    assert pairs(one) != pairs(other)
    parts = (getattr(rows, name)[2:3] for name in rows.__dataclass_fields__)
    last = PackedRows(*parts)
    assert torch.equal(task("mntp")(last).input_ids_NL[0], one.input_ids_NL[2])
    redrawn = replace(rows, draw_N=rows.draw_N + 1000)
    assert pairs(task("mntp")(redrawn)) != pairs(one)


@pytest.mark.parametrize(
    ("probability", "mask_fraction", "random_fraction"), [(0.15, 0.8, 0.1), (0.8, 1.0, 0.0), (0.3, 0.0, 1.0)]
)
def test_tokens_are_hidden_in_the_shares_asked_for(
    probability: float, mask_fraction: float, random_fraction: float
) -> None:
    """20,000 tokens: four standard deviations of each share."""
    ids_NL, zeros_NL = torch.randint(5, 60, (40, 500)), torch.zeros(40, 500, dtype=torch.int64)
    masking = Masking(probability, mask_fraction, random_fraction)
    hide = LanguageTask("mlm", masking, MASK, ORDINARY)
    found = hide(PackedRows(ids_NL, zeros_NL, zeros_NL.bool(), torch.arange(40), torch.arange(40)))
    count, total = len(found), ids_NL.numel()
    assert abs(count / total - probability) < 4 * (probability * (1 - probability) / total) ** 0.5
    hidden_P = found.input_ids_NL.flatten()[found.read_P]
    assert int((found.input_ids_NL != ids_NL).sum()) == int((hidden_P != found.label_P).sum())
    is_mask_P = hidden_P == MASK
    is_changed_P = (hidden_P != found.label_P) & ~is_mask_P
    # A random token is by chance the one that was there.
    for is_found_P, expected in ((is_mask_P, mask_fraction), (is_changed_P, random_fraction * (1 - 1 / len(ORDINARY)))):
        assert abs(float(is_found_P.double().mean()) - expected) <= 4 * (expected * (1 - expected) / count) ** 0.5
    drawn = set(hidden_P[is_changed_P].tolist())
    assert not drawn or (min(drawn), max(drawn)) == (5, 59)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(({"probability": bad}, "probability must be above 0 and below 1") for bad in (0.0, 1.0, -0.1, float("nan"))),
        ({"mask_fraction": 0.9, "random_fraction": 0.2}, r"must be at most 1 together with mask_fraction 0\.9"),
        ({"mask_fraction": -0.1}, "mask_fraction must be 0 to 1"),
    ],
)
def test_impossible_shares_are_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Masking(**options)
