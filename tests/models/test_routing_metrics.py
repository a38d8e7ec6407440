"""How evenly experts are used, against numbers by hand."""

import math

import pytest
import torch

from embeddings.models.moe.routing import load_metrics, routing_metrics


def test_the_metrics_of_two_layers() -> None:
    counts = torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0]])
    probabilities = torch.tensor([[4.0, 4.0, 1.0, 1.0], [2.5, 2.5, 2.5, 2.5]])
    found = routing_metrics(counts, probabilities, [1, 3])
    shares = [0.4, 0.4, 0.1, 0.1]
    assert found == pytest.approx(
        {
            "routing/load_entropy_layer_1": 1.0,
            "routing/load_entropy_layer_3": 0.0,
            "routing/probability_entropy_layer_1": -sum(p * math.log(p) for p in shares) / math.log(4),
            "routing/probability_entropy_layer_3": 1.0,
            "routing/highest_load_layer_1": 1.0,
            "routing/highest_load_layer_3": 4.0,
            "routing/idle_experts_layer_1": 0.0,
            "routing/idle_experts_layer_3": 3.0,
            "routing/load_entropy": 0.5,
            "routing/idle_experts": 3.0,
        }
    )


def test_one_expert_is_always_evenly_loaded() -> None:
    found = routing_metrics(torch.tensor([[7]]), torch.tensor([[7.0]]), [1])
    assert found["routing/load_entropy"] == found["routing/probability_entropy_layer_1"] == 1.0


def test_the_load_of_each_layer() -> None:
    load = load_metrics(torch.tensor([[2, 2, 2, 2], [6, 2, 0, 0], [0, 0, 0, 0]]))
    assert load.entropy_Y.tolist() == pytest.approx(
        [1.0, (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4), 0]
    )
    assert load.highest_Y.tolist() == [1.0, 3.0, 0.0]
    assert load.idle_Y.tolist() == [0, 2, 4]
