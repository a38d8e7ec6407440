"""A trial runs once: its result is recorded, and later runs reuse it."""

import csv
from argparse import Namespace
from dataclasses import asdict

import numpy as np
import pytest

from benchmarks import docstring_trials, mgh_trials, moe_trials, trials
from benchmarks.docstring_trials import split_by_package
from benchmarks.trials import Trial, difference, run_trials, table
from embeddings.evaluation import Qrels, RetrievalFolder


def logged(trial, work, tiny):
    """Appends a line to the trial's file each time the trial runs."""
    with open(work / f"{trial.variant}-{trial.seed}", "a") as file:
        file.write("ran\n")
    if trial.settings["steps"] == 13:
        raise ValueError("unlucky")
    return {"score": trial.settings["steps"] + trial.seed / 10}


def trial(variant, seed, steps):
    return Trial("E0", variant, seed, {"steps": steps})


def num_runs(work):
    return {path.name: path.read_text().count("ran") for path in work.iterdir()}


def test_a_trial_runs_once_and_another_setting_is_another_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "TRIALS", tmp_path / "trials.csv")
    work = tmp_path / "work"
    work.mkdir()
    chosen = Namespace(tiny=False, workers=2, work=work)
    first = [trial(variant, seed, steps) for variant, steps in (("a", 1), ("b", 2)) for seed in (0, 1)]
    with pytest.raises(ValueError, match="unlucky"):
        run_trials(chosen, [*first, trial("c", 0, 13)], logged)
    scores = run_trials(chosen, first, logged)
    assert {score.variant: score.values("score") for score in scores} == {"a": [1.0, 1.1], "b": [2.0, 2.1]}
    changed = run_trials(chosen, [*first[:3], trial("b", 1, 3)], logged)
    assert changed[1].values("score") == [2.0, 3.1]
    assert num_runs(work) == {"a-0": 1, "a-1": 1, "b-0": 1, "b-1": 2, "c-0": 1}
    assert "1.0500 \u00b10.0707" in table(scores, ["score"])
    assert difference(scores[1], scores[0], "score") == "b over a, score: +1.0000 \u00b10.0000"


def test_a_tiny_run_shows_every_value_and_all_flags_together_once(tmp_path):
    settings = {
        "first": {"steps": 1, "pooling": "mean", "masked": False, "graded": False},
        "more steps": {"steps": 5, "pooling": "mean", "masked": False, "graded": False},
        "no steps": {"steps": 0, "pooling": "mean", "masked": False, "graded": False},
        "masked": {"steps": 2, "pooling": "last", "masked": True, "graded": False},
        "graded": {"steps": 3, "pooling": "mean", "masked": False, "graded": True},
        "both": {"steps": 4, "pooling": "mean", "masked": True, "graded": True},
        "masked, mean": {"steps": 9, "pooling": "mean", "masked": True, "graded": False},
    }
    chosen = Namespace(tiny=True, workers=1, work=tmp_path)
    scores = run_trials(chosen, [Trial("E0", name, 0, values) for name, values in settings.items()], logged)
    found = {score.variant: score.by_seed[0]["score"] for score in scores}
    assert found == {"first": 1, "more steps": 1, "no steps": 0, "masked": 2, "graded": 3, "both": 4, "masked, mean": 2}
    assert num_runs(tmp_path) == {f"{name}-0": 1 for name in ("first", "no steps", "masked", "graded", "both")}


def test_the_keys_of_finished_trials_have_not_changed():
    recipes = (docstring_trials.Recipe(num_steps=30), mgh_trials.Recipe(), moe_trials.Recipe())
    with open(trials.TRIALS, newline="") as file:
        finished = {row["key"] for row in csv.DictReader(file)}
    assert [Trial("E0", "any", 0, asdict(recipe)).key in finished for recipe in recipes] == [True] * 3


def test_each_package_is_a_corpus_with_its_own_queries():
    folder = RetrievalFolder(
        ["A", "B", "C", "D"], ["p.a", "q.b", "p.c", "q.d"], ["x", "y", "z"], ["1", "2", "3"],
        Qrels(np.array([0, 1, 1, 2]), np.array([2, 1, 3, 0]), np.ones(4), 3, 4), 0,
    )  # fmt: skip
    parts = split_by_package(folder)
    assert {name: (part.documents, part.queries) for name, part in parts.items()} == {
        "p": (["A", "C"], ["x", "z"]),
        "q": (["B", "D"], ["y"]),
    }
    assert parts["p"].qrels.query_J.tolist() == [0, 1]
    assert parts["p"].qrels.document_J.tolist() == [1, 0]
    assert parts["q"].qrels.document_J.tolist() == [0, 1]
