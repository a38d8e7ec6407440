"""Examples of each conversion, level and mixture, against cases written by hand."""

import pickle
from collections import Counter
from itertools import zip_longest

import numpy as np
import pytest

from embeddings.common import TextSettings, UserError
from embeddings.data import Example, Mixture, Negative, PlanEntry, SourceConfig, open_source
from embeddings.data.checks import warn_of_unused_columns
from embeddings.data.dataset import ClassExamples, LabelTexts, positions_of_level
from embeddings.data.samplers.base import LevelRule
from embeddings.data.store import ClassIndex, StoredRow, Table, write_class_index, write_table
from tests.data.rows import dataset, graded, labelled, pairs, write_rows
from tests.helpers.refusals import refused


def test_a_pair_becomes_an_example_with_its_prompts(tmp_path):
    rows = [{"query": "q", "positive": ["p", "r"], "negatives": ["n"], "label": "l"}]
    source = dataset(tmp_path, rows, instruction="find", document_prompt="document: ", in_batch_negatives=False)
    assert len(source) == 1
    prompts = {"query_prompt": "Instruct: find\nQuery: ", "document_prompt": "document: "}
    expected = Example(0, 9, 0, "q", ("p", "r"), (Negative("n"),), label=0, **prompts, in_batch_negatives=False)
    assert source[PlanEntry(0, 9)] == expected


def test_documents_of_a_symmetric_source_have_the_prompt_of_the_query(tmp_path):
    rows = [{"sentence1": "a", "sentence2": "b", "score": 5.0}]
    source = dataset(tmp_path, rows, conversion="sts", instruction=["one", "two", "three"], symmetric=True)
    prompts = set()
    for draw in range(60):
        for row, texts in enumerate((("a", ("b",)), ("b", ("a",)))):
            example = source[PlanEntry(row, draw)]
            assert (example.query, example.positives) == texts
            assert example.document_prompt == example.query_prompt
            assert example == source[PlanEntry(row, draw)]
            prompts.add(example.query_prompt)
    assert prompts == {f"Instruct: {name}\nQuery: " for name in ("one", "two", "three")}


def test_the_instruction_of_a_record_replaces_that_of_the_source_in_the_template(tmp_path):
    rows = [{**pairs(1)[0], "instruction": "repair"}, pairs(2)[1]]
    source = dataset(tmp_path, rows, instruction=["find", "seek"], symmetric=True)
    for draw in range(20):
        own, other = source[PlanEntry(0, draw)], source[PlanEntry(1, draw)]
        assert own.query_prompt == own.document_prompt == "Instruct: repair\nQuery: "
        assert other.query_prompt in ("Instruct: find\nQuery: ", "Instruct: seek\nQuery: ")
    settings = TextSettings(instruction_template="[INST] {instruction} ")
    framed = open_source(SourceConfig("a", source.config.path, instruction="find"), tmp_path / "cache", settings)
    assert [framed[PlanEntry(row, 0)].query_prompt for row in (0, 1)] == ["[INST] repair ", "[INST] find "]
    assert {framed[PlanEntry(row, 0)].document_prompt for row in (0, 1)} == {None}


def test_examples_of_a_class_change_with_the_draw_key_alone_and_are_of_every_level(tmp_path):
    source = dataset(tmp_path, labelled(20, 20, 20), conversion="class_by_example", num_negatives=3)
    first, again, second = ([source[PlanEntry(row, draw)] for row in range(60)] for draw in (1, 1, 2))
    assert first == again
    assert sum(a.positives != b.positives for a, b in zip(first, second, strict=True)) > 40
    assert {len(example.negatives) for example in first} == {3}
    leveled = source[PlanEntry(0, 1, LevelRule(2))]
    assert (leveled.negatives, leveled.negative_labels) == (first[0].negatives, first[0].negative_labels)


def test_labels_written_as_numbers_become_their_texts(tmp_path):
    rows = [{"text": f"t{i}", "label": i % 2} for i in range(4)]
    source = dataset(tmp_path, rows, conversion="binary_by_label", label_texts={0: "harmless", "1": "toxic"})
    example = source[PlanEntry(1, 0)]
    assert (example.positives, example.negatives) == (("toxic",), (Negative("harmless"),))
    assert (example.label, example.negative_labels) == (1, (0,))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (labelled(3), {"conversion": "class_by_example"}, "all rows have the label 'class a'"),
        (labelled(3), {"conversion": "class_by_label"}, "all rows have the label 'class a'"),
        (labelled(3, 1), {"conversion": "class_by_example"}, r"source\.jsonl:2: the class 'class b' has only one text"),
        (labelled(2, 2, 2), {}, "it has 3 labels, expected two"),
        (labelled(1, 1), {"conversion": "class_by_example", "single_text_classes": "leave_out"}, "no class has two"),
        (("0", "1"), {}, "must give a text to labels that are not words, got '0'"),
        ((True, False), {}, "must give a text to labels that are not words, got 'true'"),
        (("a", "b"), {"label_texts": {"a": "x"}}, "must give a text to the label 'b', got"),
        (("a", "b"), {"label_texts": {"a": "x", "b": "y", "c": "z"}}, "a label that the source does not have, got 'c'"),
        (("a", "b"), {"label_texts": {"a": "x", "b": "x"}}, "must give each label a different text"),
    ],
)
def test_labels_and_their_texts_that_do_not_suit_the_conversion_are_refused(tmp_path, rows, options, message):
    rows = [row if isinstance(row, dict) else {"text": "t", "label": row} for row in rows]
    refused(UserError, message, dataset, tmp_path, rows, **{"conversion": "binary_by_label", **options})


@pytest.mark.parametrize("max_rows", [1, 3, 10, 99, 100, 1000])
def test_max_rows_takes_one_row_of_each_section(tmp_path, max_rows):
    source = dataset(tmp_path, pairs(100), max_rows=max_rows)
    found = [int(source[PlanEntry(row, 0)].query.split()[1]) for row in range(len(source))]
    count = min(max_rows, 100)
    assert len(found) == len(set(found)) == count
    for row, index in enumerate(found):
        assert row * 100 // count <= index < (row + 1) * 100 // count
    for row in (-1, count):
        refused(IndexError, f"row {row} of {count}", source.__getitem__, PlanEntry(row, 0))
    # Positives come from the whole source even if one query of a class is used.
    classes = dataset(tmp_path, labelled(10, 10), conversion="class_by_example", max_rows=1)
    assert len({classes[PlanEntry(0, draw)].positives for draw in range(100)}) == 9


def test_a_class_of_one_text_may_be_left_out_and_still_gives_negatives(tmp_path):
    rows = [{"text": "only", "label": "lone"}, *labelled(3, 2)]
    source = dataset(tmp_path, rows, conversion="class_by_example", single_text_classes="leave_out")
    queries = [source[PlanEntry(row, 0)] for row in range(len(source))]
    assert [example.query for example in queries] == [row["text"] for row in rows[1:]]
    assert all("only" in [negative.text for negative in example.negatives] for example in queries)
    fewer = dataset(tmp_path, rows, conversion="class_by_example", single_text_classes="leave_out", max_rows=4)
    assert len({fewer[PlanEntry(row, 0)].query for row in range(4)} - {"only"}) == 4


@pytest.mark.parametrize("conversion", ["pairs", "class_by_example", "class_by_label"])
def test_a_source_is_pickled_without_its_data(tmp_path, conversion):
    rows = [{**row, "query": "q", "positive": "p"} for row in labelled(500, 500)]
    source = dataset(tmp_path, rows, conversion=conversion)
    data = pickle.dumps(source)
    assert len(data) < 3000
    assert pickle.loads(data)[PlanEntry(999, 4)] == source[PlanEntry(999, 4)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_levels_of_a_file_decide_which_negatives_a_step_may_use(tmp_path, kind):
    path = write_rows(tmp_path / f"records.{kind}", graded(3))
    source = open_source(SourceConfig("records", str(path)), tmp_path / "cache")
    for row in range(3):
        for level in (1, 2, 3, 4):
            example = source[PlanEntry(row, 9, LevelRule(level))]
            assert example.level == level
            assert example.negatives == (Negative(f"negative {row} of level {level}", level),)
        cumulative = source[PlanEntry(row, 9, LevelRule(3, cumulative=True))]
        assert sorted(negative.level for negative in cumulative.negatives) == [3, 4]
        assert (source[PlanEntry(row, 9)].level, len(source[PlanEntry(row, 9)].negatives)) == (0, 4)


ANSWERED = [{**pair, "question": f"n {row}", "score": 1.0, "anchor": None} for row, pair in enumerate(pairs(4))]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_columns_that_look_like_a_field_are_named_in_one_line(form, tmp_path, caplog):
    """A column with the name of the field takes precedence; opening a cached source warns again."""
    path = write_rows(tmp_path / f"pairs.{form}", ANSWERED)
    for _ in range(2):
        caplog.clear()
        warn_of_unused_columns(open_source(SourceConfig("pairs", str(path)), tmp_path / "cache"), 1)
        (line,) = caplog.messages
        assert line.startswith("source pairs: columns not used: ")
        assert "question" in line
        assert "to use one, map it: columns: {query: " in line
        assert line.endswith("; a score is used only with conversion: sts")
        # An unread Parquet column is not known to be empty.
        assert ("anchor" in line) == (form == "parquet")
    mapped = open_source(SourceConfig("pairs", str(path), columns={"query": "question"}), tmp_path / "cache")
    assert mapped[PlanEntry(2, 0)].query == "n 2"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_columns_of_other_libraries_become_examples_and_are_logged_once(form, tmp_path, caplog):
    rows = [{"anchor": f"q{i}", "positive": f"p{i}", "negative_1": f"n{i}", "negative_2": f"m{i}"} for i in range(3)]
    caplog.set_level("INFO")
    path = write_rows(tmp_path / f"st.{form}", rows)
    for told in (1, 0):
        caplog.clear()
        source = open_source(SourceConfig("st", str(path)), tmp_path / "cache")
        warn_of_unused_columns(source, 2)
        says = "source st: columns used: anchor as query, negative_1 as negatives, negative_2 as negatives"
        assert caplog.messages.count(says) == told
        assert "not used" not in caplog.text
    example = source[PlanEntry(1, 0)]
    assert (example.query, example.positives, [one.text for one in example.negatives]) == ("q1", ("p1",), ["n1", "m1"])


def test_of_several_columns_for_one_field_the_first_is_suggested_and_used_ones_are_not_named(tmp_path, caplog):
    row = {**pairs(1)[0], "negatives": ["o"], "negative_1": "n", "negative_2": "m"}
    warn_of_unused_columns(dataset(tmp_path, [row]), 2)
    says = (
        "source source: columns not used: negative_1, negative_2; to use one, map it: columns: {negatives: negative_1}"
    )
    assert caplog.messages == [says]
    warn_of_unused_columns(dataset(tmp_path, [{**pairs(1)[0], "negative": "n", "title": "t"}]), 0)
    rows = [{"anchor": "q", "positive": "p", "negative": ["n"], "score": None}]
    warn_of_unused_columns(dataset(tmp_path, rows, columns={"query": "anchor", "negatives": "negative"}), 7)
    warn_of_unused_columns(dataset(tmp_path, labelled(3, 3), conversion="class_by_example"), 7)
    assert caplog.messages == [says]


def class_examples(folder, texts_by_class, num_negatives):
    """The rule, and its rows as a list; the classes alternate."""
    turns = zip_longest(*([StoredRow(one, label=label) for one in texts] for label, texts in enumerate(texts_by_class)))
    rows = [row for turn in turns for row in turn if row is not None]
    write_table(folder, rows)
    write_class_index(folder, np.array([row.label for row in rows], dtype=np.int32), len(texts_by_class))
    return ClassExamples(Table(folder), ClassIndex(folder), num_negatives), rows


@pytest.mark.parametrize("num_negatives", [1, 7, 100])
def test_class_examples_are_among_those_that_a_loop_allows(tmp_path, num_negatives):
    texts = [[f"{label} {i}" for i in range(size)] for label, size in enumerate((2, 9, 5))]
    rule, rows = class_examples(tmp_path, texts, num_negatives)
    for index, stored in enumerate(rows):
        same = {row.query for row in rows if row.label == stored.label and row.query != stored.query}
        other = {row.query: row.label for row in rows if row.label != stored.label}
        for draw in range(20):
            found = rule(stored, index, draw)
            assert len(found.positives) == 1
            assert found.positives[0] in same
            negatives = [negative.text for negative in found.negatives]
            assert len(set(negatives)) == len(negatives) == min(num_negatives, len(other))
            assert list(found.negative_labels) == [other[text] for text in negatives]
            assert {negative.level for negative in found.negatives} == {0}


def test_class_examples_are_drawn_by_the_key_and_evenly(tmp_path):
    rule, rows = class_examples(tmp_path, [[f"a{i}" for i in range(5)], [f"b{i}" for i in range(6)]], 2)
    assert rule(rows[0], 0, draw=1) == rule(rows[0], 0, draw=1)
    drawn = [rule(rows[0], 0, draw) for draw in range(3000)]
    positives = Counter(found.positives[0] for found in drawn)
    negatives = Counter(negative.text for found in drawn for negative in found.negatives)
    assert set(positives) == {"a1", "a2", "a3", "a4"}
    assert set(negatives) == {f"b{i}" for i in range(6)}
    # Five standard deviations of a binomial count.
    assert all(abs(count - 750) < 5 * (3000 * 0.25 * 0.75) ** 0.5 for count in positives.values())
    assert all(abs(count - 1000) < 5 * (3000 * 2 / 6 * 4 / 6) ** 0.5 for count in negatives.values())


def test_no_positive_is_the_query_and_no_negative_repeats_a_text_even_where_rows_repeat_them(tmp_path):
    rule, rows = class_examples(tmp_path, [["same"] * 50 + [" same "] * 50 + ["different"], ["b"]], 1)
    index = next(i for i, row in enumerate(rows) if row.query == "same")
    for draw in range(50):
        assert rule(rows[index], index, draw).positives == ("different",)
    rule, rows = class_examples(tmp_path, [["x", "y"], ["x", "y", "z", "z", "z", "w"]], 4)
    index = next(i for i, row in enumerate(rows) if row.query == "x" and row.label == 0)
    for draw in range(50):
        found = rule(rows[index], index, draw)
        assert found.positives == ("y",)
        assert sorted(negative.text for negative in found.negatives) == ["w", "z"]
        assert found.negative_labels == (1, 1)


@pytest.mark.parametrize(("num_texts", "num_negatives"), [(2, 7), (5, 3), (5, 4), (20, 7)])
def test_label_texts_are_that_of_the_row_and_distinct_others(num_texts, num_negatives):
    texts = [f"label {code}" for code in range(num_texts)]
    rule = LabelTexts(texts, num_negatives)
    for label in range(num_texts):
        seen = set()
        for draw in range(60):
            found = rule(StoredRow("q", label=label), 0, draw)
            assert found == rule(StoredRow("q", label=label), 0, draw)
            assert found.positives == (texts[label],)
            assert len(set(found.negative_labels)) == len(found.negatives) == min(num_negatives, num_texts - 1)
            assert [texts[code] for code in found.negative_labels] == [negative.text for negative in found.negatives]
            seen.update(found.negative_labels)
        assert seen == set(range(num_texts)) - {label}


ALL = tuple(Negative(f"{level}{name}", level) for level in (1, 2, 3, 4) for name in "ab")


def texts(negatives, level, cumulative=False, draw=0):
    return [negatives[position].text for position in positions_of_level(negatives, LevelRule(level, cumulative), draw)]


def test_the_nearest_coarser_level_replaces_a_missing_one_and_never_a_finer_one():
    for levels, expected in (
        ((1, 4), [["1"], ["4"], ["4"], ["4"]]),
        ((2, 3), [["2"], ["2"], ["3"], []]),
        ((4,), [["4"], ["4"], ["4"], ["4"]]),
        ((1,), [["1"], [], [], []]),
        ((), [[], [], [], []]),
    ):
        negatives = tuple(Negative(str(level), level) for level in levels)
        assert [texts(negatives, level) for level in (1, 2, 3, 4)] == expected


def test_a_level_allows_its_negatives_in_order_and_a_cumulative_one_also_the_coarser_ones_at_random():
    for level in (1, 2, 3, 4):
        assert texts(ALL, level) == [f"{level}a", f"{level}b"]
        found = texts(ALL, level, cumulative=True)
        assert sorted(found) == [f"{coarser}{name}" for coarser in range(level, 5) for name in "ab"]
    assert texts(ALL, 2, cumulative=True, draw=5) == texts(ALL, 2, cumulative=True, draw=5)
    first = Counter(texts(ALL, 2, cumulative=True, draw=draw)[0] for draw in range(1200))
    assert len(first) == 6
    # Five standard deviations of a binomial count.
    assert all(abs(count - 200) < 5 * (1200 * 1 / 6 * 5 / 6) ** 0.5 for count in first.values())
    # Negatives without levels belong to every level.
    for cumulative in (False, True):
        assert sorted(texts((Negative("a"), Negative("b")), 3, cumulative)) == ["a", "b"]


@pytest.fixture
def mixture(tmp_path):
    first, last = dataset(tmp_path, pairs(3), name="one", weight=2.0), dataset(tmp_path, pairs(1, "x "), name="three")
    classes = {"name": "two", "conversion": "class_by_example", "in_batch_negatives": False}
    return Mixture([first, dataset(tmp_path, labelled(4, 4), **classes), last])


def test_rows_of_all_sources_are_concatenated_and_examples_equal_those_of_their_source(mixture):
    assert len(mixture) == 12
    assert mixture.sizes == (3, 8, 1)
    for row in range(12):
        source = 0 if row < 3 else 1 if row < 11 else 2
        example, local = mixture[PlanEntry(row, 7)], mixture.sources[source][PlanEntry(row - (0, 3, 11)[source], 7)]
        assert (example.row, example.draw, example.source) == (row, 7, source)
        assert (example.query, example.positives, example.negatives) == (local.query, local.positives, local.negatives)
        assert example.in_batch_negatives == (source != 1)
    refused(IndexError, "row 12 of 12", mixture.__getitem__, PlanEntry(12, 0))


def test_a_batch_is_its_entries_one_by_one_in_their_order(mixture):
    entries = [PlanEntry(row, 100 + place) for place, row in enumerate((11, 3, 0, 10, 3, 2, 0, 7))]
    assert mixture.__getitems__(entries) == [mixture[entry] for entry in entries]
