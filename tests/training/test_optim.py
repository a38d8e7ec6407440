from functools import partial

import pytest
import torch
from torch import nn

from embeddings.training.optim import parameter_groups, state_per_weight


def test_vectors_are_not_decayed():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    matrices, vectors = parameter_groups(model)
    assert [p.shape for p in matrices["params"]] == [(4, 3)]
    assert "weight_decay" not in matrices
    assert vectors["weight_decay"] == 0.0
    assert len(vectors["params"]) == 3


def test_frozen_parameters_are_left_out():
    model = nn.Linear(3, 4, bias=False)
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is trainable"):
        parameter_groups(model)


@pytest.mark.parametrize(
    ("kind", "options", "kept"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.AdamW, {}, 2),
        (torch.optim.Adam, {"amsgrad": True}, 3),
        (torch.optim.Adafactor, {}, 0.03),
        (torch.optim.LBFGS, {}, 0),
        (torch.optim.SparseAdam, {}, 0),
    ],
)
def test_what_an_optimiser_keeps_is_tried(kind, options, kept):
    assert state_per_weight(partial(kind, lr=0.1, **options)) == kept
