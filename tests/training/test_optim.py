import pytest
from torch import nn

from embeddings.training.optim import parameter_groups


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
