"""The linear classifier tells apart what can be told apart, the same way each time."""

import numpy as np
import pytest

from embeddings.evaluation.classification import logistic_regression_scores
from embeddings.inference.vectors import unit_rows


def three_classes(count, spread, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    return unit_rows((np.eye(3)[labels] + spread * generator.normal(size=(count, 3))).astype(np.float32)), labels


def test_classes_far_apart_are_all_found():
    train_ND, train = three_classes(60, 0.05, seed=0)
    test_ND, test = three_classes(30, 0.05, seed=1)
    scores = logistic_regression_scores(train_ND, train.astype(str), test_ND, test.astype(str))
    assert scores == {"accuracy": 1.0, "f1_macro": 1.0}


def test_scores_repeat_and_equal_a_count_by_hand():
    train_ND, train = three_classes(60, 0.8, seed=0)
    test_ND, test = three_classes(50, 0.8, seed=1)
    scores = logistic_regression_scores(train_ND, train.astype(str), test_ND, test.astype(str))
    assert scores == logistic_regression_scores(train_ND, train.astype(str), test_ND, test.astype(str))
    assert 1 / 3 < scores["accuracy"] < 1
    assert scores["accuracy"] * 50 == pytest.approx(round(scores["accuracy"] * 50))


def test_a_label_that_training_never_saw_is_an_error_and_no_failure():
    train_ND, train = three_classes(60, 0.05, seed=0)
    scores = logistic_regression_scores(train_ND, train.astype(str), train_ND[:2], ["new", str(train[1])])
    assert scores["accuracy"] == 0.5
