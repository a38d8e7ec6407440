import pytest

from embeddings.common import InputError
from embeddings.data import SourceConfig
from embeddings.data.sources import Row
from embeddings.data.store import Facts, convert_rows, layout
from embeddings.data.table import StoredRow


def convert(conversion, rows, **options):
    facts = Facts()
    config = SourceConfig("mine", "a.jsonl", conversion=conversion, **options)
    numbered = [Row(f"a.jsonl:{i}", row) for i, row in enumerate(rows, start=1)]
    return list(convert_rows(config, numbered, facts)), facts


def test_a_record_is_stored_with_levels_and_a_label_code():
    negatives = [{"text": "m", "level": 2}, {"text": "n", "level": 1}]
    rows, facts = convert(
        "pairs",
        [
            {"query": "q", "positive": "p", "label": "x", "negatives": negatives},
            {"query": "r", "positive": ["s", "t"]},
            {"query": "u", "positive": "v", "label": 7},
        ],
    )
    assert rows == [
        StoredRow("q", ("p",), ("n", "m"), (1, 2), 0),
        StoredRow("r", ("s", "t"), (), (), -1),
        StoredRow("u", ("v",), (), (), 1),
    ]
    assert list(facts.labels) == ["x", "7"]


SUSPECTS = {
    "a negative is also a positive": {"query": "q", "positive": ["a", "b"], "negatives": ["c", " b"]},
    "a negative is the query itself": {"query": "q ", "positive": "a", "negatives": ["c", "q"]},
    "a positive is the query itself": {"query": "q", "positive": ["a", "q\n"]},
}
SOUND = {"query": "q", "positive": "a", "negatives": ["b"]}


@pytest.mark.parametrize(("suspicion", "row"), SUSPECTS.items(), ids=SUSPECTS)
def test_a_suspect_row_is_refused_by_its_place_with_the_way_out(suspicion, row):
    with pytest.raises(InputError, match=rf"^a\.jsonl:2: {suspicion}.*suspect_rows: leave_out"):
        convert("pairs", [SOUND, row])


def test_suspect_rows_are_left_out_or_kept_when_asked_and_counted():
    rows = [SOUND, *SUSPECTS.values(), SUSPECTS["a positive is the query itself"]]
    kept, facts = convert("pairs", rows, suspect_rows="keep")
    assert len(kept) == 5
    assert facts.suspects == dict.fromkeys(SUSPECTS, 1) | {"a positive is the query itself": 2}
    sound, facts = convert("pairs", rows, suspect_rows="leave_out")
    assert sound == kept[:1]
    assert facts.suspects.total() == 4
    with pytest.raises(InputError, match="every row is suspect"):
        convert("pairs", rows[1:], suspect_rows="leave_out")


def test_a_record_keeps_its_own_instruction():
    rows, _ = convert("pairs", [{**SOUND, "instruction": "find the rest"}, SOUND])
    assert [row.instruction for row in rows] == ["find the rest", ""]


def test_a_class_with_one_text_is_remembered_with_its_first_row():
    texts = [("one", "x"), ("two", "y"), (" one ", "x"), ("three", "y"), ("only", "z")]
    rows, facts = convert("class_by_example", [{"text": text, "label": label} for text, label in texts])
    assert [row.label for row in rows] == [0, 1, 0, 1, 2]
    assert facts.lone_class == ["x", "a.jsonl:1"]


def test_classes_with_two_texts_leave_no_lone_class():
    rows = [{"text": f"{i}", "label": i % 2} for i in range(4)]
    assert convert("class_by_example", rows)[1].lone_class is None


def test_a_pair_that_people_found_similar_goes_both_ways_and_others_are_left_out():
    rows = [{"sentence1": f"a{s}", "sentence2": f"b{s}", "score": s} for s in (3.99, 4, 5)]
    assert convert("sts", rows)[0] == [
        StoredRow("a4", ("b4",)),
        StoredRow("b4", ("a4",)),
        StoredRow("a5", ("b5",)),
        StoredRow("b5", ("a5",)),
    ]
    assert len(convert("sts", rows, min_score=3.5)[0]) == 6


def test_a_scale_on_which_no_pair_is_similar_is_refused_with_its_highest_score():
    rows = [{"sentence1": "a", "sentence2": "b", "score": score} for score in (0.3, 0.9)]
    with pytest.raises(InputError, match=r"source 'mine': no pair reaches the score 4 \(the highest is 0\.9\)"):
        convert("sts", rows)


def test_a_bad_row_is_named():
    with pytest.raises(InputError, match=r"^a\.jsonl:2: label is null"):
        convert("class_by_label", [{"text": "t", "label": "l"}, {"text": "t", "label": None}])


def test_conversions_of_labelled_texts_share_one_layout():
    assert {layout(name) for name in ("class_by_example", "class_by_label", "binary_by_label")} == {"labelled"}
    assert (layout("pairs"), layout("sts")) == ("records", "scored")
