import pytest

from embeddings.figures import run_words as words
from embeddings.figures.run_facts import RunFacts
from embeddings.modules import __all__ as modules
from tests.figures.run_folders import METRICS, write_run


@pytest.fixture
def facts_of(tmp_path):
    made = []

    def make(**changes):
        made.append(write_run(tmp_path / str(len(made)), **changes))
        return RunFacts.read(made[-1])

    return make


def test_the_opening_says_what_was_trained_and_what_came_of_it(facts_of):
    assert words.opening(facts_of()) == (
        "This run trained some/backbone by NV-Embed (Lee et al. 2024, arXiv:2405.17428) on 1,234 records of 2 sources. "
        "It ran to its end at step 20. It took 1 h 5 min. "
        "The training loss went from 3.65 to 2.45, as means of 8 logged values. "
        "The validation nDCG@10 went from 0.250 at step 0 to 0.500 at step 20, after its best, 0.750 at step 10."
    )


def test_each_method_has_its_paper():
    trained = [name for name in modules if name.endswith("Module") and name != "ContrastiveModule"]
    assert len(trained) >= 5
    assert set(words.METHODS) == set(trained)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ({"how": "interrupted", "step": 3, "why": "SIGTERM: asked"}, "It was interrupted at step 3: SIGTERM: asked."),
        ({"how": "interrupted", "step": 3, "why": ""}, "It was interrupted at step 3."),
        ({"how": "failed", "step": 3, "why": "NumericError: nan"}, "It failed at step 3: NumericError: nan."),
        ({"how": "finished"}, "It ran to its end."),
        ({}, "It left no note of its end: it was killed or is still at work; step 20 is the last one known."),
        (None, "It left no note of its end: it was killed or is still at work; step 20 is the last one known."),
    ],
)
def test_each_way_to_end_is_said(end, says, facts_of):
    facts = facts_of(record={"end": end})
    assert words.ending(facts.parts[-1], facts.last_step) == says


def test_scores_are_said_as_they_are(facts_of):
    head = "step,train/loss,val/ndcg_at_10\n0,2.0,\n"
    assert words.opening(facts_of(metrics=head)).endswith("It logged no score.")
    once = words.opening(facts_of(metrics=head + "5,,0.5\n"))
    assert once.endswith("The validation nDCG@10 was 0.500 at step 5, the one time it was taken.")
    rising = words.opening(facts_of(metrics=head + "5,,0.5\n9,,0.6\n"))
    assert rising.endswith("went from 0.500 at step 5 to 0.600 at step 9, its best.")


def test_numbers_that_went_wrong_are_named_and_good_ones_too(facts_of, tmp_path):
    assert words.health(facts_of()) == ["No value that was logged is NaN or infinite, and no step was stopped for one."]
    facts = facts_of(metrics=METRICS + "21,1,nan,,,\n")
    assert words.health(facts) == ["1 value of train/loss NaN or infinite."]
    (tmp_path / "1" / "numeric-error-rank-2.json").write_text('{"step": 3, "rank": 2, "error": "the loss is nan"}')
    assert words.health(RunFacts.read(tmp_path / "1"))[0] == "At step 3 on rank 2: the loss is nan"
    assert words.health(facts_of(metrics=None)) == []


def test_size_batch_length_and_hardware_are_said(facts_of):
    facts = facts_of()
    assert words.size(facts) == "2,000 parameters, 500 of them trained, 1,500 active for each token"
    assert words.batch(facts) == "32 × 2 processes × 4 batches a step = 256 an optimiser step"
    assert words.length(facts) == "2 epochs"
    assert words.hardware(facts) == "2 processes on 4 x Some CPU, each"
    whole = {"total": 5, "active": 5, "trained": 5}
    trainer = {"max_steps": 1, "max_epochs": None, "accumulate_grad_batches": 1}
    plain = facts_of(config={"trainer": trainer}, record={"world_size": 1, "parameters": whole})
    assert words.size(plain) == "5 parameters, all of them trained"
    assert words.batch(plain) == "32"
    assert words.length(plain) == "1 optimiser step"
    assert words.hardware(plain) == "1 process on 4 x Some CPU"


def test_a_run_that_noted_nothing_is_said_to_have(facts_of):
    nothing = dict.fromkeys(("parameters", "world_size", "hardware", "source_rows", "started"))
    facts = facts_of(config={"model": None, "data": None, "trainer": None}, record=nothing)
    assert words.size(facts) == words.batch(facts) == words.moment(facts.record["started"]) == "not noted"
    assert words.length(facts) == "until it is stopped"
    assert words.hardware(facts) == "processes that it did not count on hardware that it did not note"
    assert words.opening(facts).startswith(
        "This run trained a model that the config describes by a method that its config does not name."
    )


def test_a_part_of_a_config_is_one_line():
    loss = {"class_path": "embeddings.losses.InfoNCE", "init_args": {"temperature": 0.05, "a": None, "b": True}}
    assert words.part_of_config(loss) == "InfoNCE (temperature 0.05, b yes)"
    assert words.part_of_config({"class_path": "a.B"}) == "B"
    assert words.part_of_config(["a", 2, {"c": 1e-05}]) == "a, 2, c 1e-05"
    assert len(words.part_of_config("x" * 1000)) == 300


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0.2, "0 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (3930, "1 h 5 min"), (90061, "1 d 1 h")],
)
def test_times_are_said_in_their_two_largest_units(seconds, says):
    assert words.duration(seconds) == says


def test_a_moment_is_said_in_utc():
    assert words.moment("2026-03-01T01:30:00+02:00") == "28 February 2026, 23:30 UTC"
