import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.data import Example, Negative, PlanEntry, SourceConfig, open_source
from embeddings.data.samplers.base import LevelRule
from tests.data.rows import dataset, graded, labelled, pairs, write_jsonl


def test_a_pair_becomes_an_example_with_its_prompts(tmp_path):
    rows = [{"query": "q", "positive": ["p", "r"], "negatives": ["n"], "label": "l"}]
    source = dataset(tmp_path, rows, instruction="find", document_prompt="document: ", in_batch_negatives=False)
    assert len(source) == 1
    assert source[PlanEntry(0, 9)] == Example(
        row=0,
        draw=9,
        source=0,
        query="q",
        positives=("p", "r"),
        negatives=(Negative("n"),),
        label=0,
        query_prompt="Instruct: find\nQuery: ",
        document_prompt="document: ",
        in_batch_negatives=False,
    )


def test_documents_of_a_symmetric_source_carry_the_querys_prompt(tmp_path):
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


def test_a_records_own_instruction_stands_before_the_sources(tmp_path):
    rows = [{**pairs(1)[0], "instruction": "mend"}, pairs(2)[1]]
    source = dataset(tmp_path, rows, instruction=["find", "seek"], symmetric=True)
    for draw in range(20):
        own, other = source[PlanEntry(0, draw)], source[PlanEntry(1, draw)]
        assert own.query_prompt == own.document_prompt == "Instruct: mend\nQuery: "
        assert other.query_prompt in ("Instruct: find\nQuery: ", "Instruct: seek\nQuery: ")


def test_the_template_of_the_text_settings_frames_every_instruction(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{**pairs(1)[0], "instruction": "mend"}, pairs(2)[1]])
    settings = TextSettings(instruction_template="[INST] {instruction} ")
    source = open_source(SourceConfig("a", str(rows), instruction="find"), tmp_path / "cache", settings)
    assert [source[PlanEntry(row, 0)].query_prompt for row in (0, 1)] == ["[INST] mend ", "[INST] find "]


def test_documents_carry_no_prompt_of_an_ordinary_source(tmp_path):
    assert dataset(tmp_path, pairs(1), instruction="find")[PlanEntry(0, 0)].document_prompt == ""


def test_examples_of_a_class_change_with_the_draw_key_alone(tmp_path):
    source = dataset(tmp_path, labelled(20, 20, 20), conversion="class_by_example", num_negatives=3)
    first = [source[PlanEntry(row, 1)] for row in range(60)]
    assert first == [source[PlanEntry(row, 1)] for row in range(60)]
    second = [source[PlanEntry(row, 2)] for row in range(60)]
    assert sum(a.positives != b.positives for a, b in zip(first, second, strict=True)) > 40
    for example in first:
        name = example.query.split()[-1]
        assert example.positives[0].endswith(f" of {name}")
        assert example.positives[0] != example.query
        assert not any(negative.text.endswith(f" of {name}") for negative in example.negatives)
        assert len(example.negatives) == len(example.negative_labels) == 3
        assert example.label not in example.negative_labels


def test_seven_negatives_are_drawn_where_nothing_is_said(tmp_path):
    source = dataset(tmp_path, labelled(9, 9), conversion="class_by_example")
    assert len(source[PlanEntry(0, 0)].negatives) == 7


def test_labels_written_as_numbers_become_their_texts(tmp_path):
    rows = [{"text": f"t{i}", "label": i % 2} for i in range(4)]
    source = dataset(tmp_path, rows, conversion="binary_by_label", label_texts={0: "harmless", "1": "toxic"})
    example = source[PlanEntry(1, 0)]
    assert (example.positives, example.negatives) == (("toxic",), (Negative("harmless"),))
    assert (example.label, example.negative_labels) == (1, (0,))


def test_labels_that_are_words_are_their_own_texts(tmp_path):
    source = dataset(tmp_path, labelled(1, 1, 1), conversion="class_by_label", num_negatives=7)
    example = source[PlanEntry(2, 0)]
    assert example.positives == ("class c",)
    assert {negative.text for negative in example.negatives} == {"class a", "class b"}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (labelled(3), {"conversion": "class_by_example"}, "all rows have the label 'class a'"),
        (labelled(3), {"conversion": "class_by_label"}, "all rows have the label 'class a'"),
        (labelled(3, 1), {"conversion": "class_by_example"}, r"source\.jsonl:2: the class 'class b' has only one text"),
        (labelled(2, 2, 2), {"conversion": "binary_by_label"}, "it has 3 labels, expected two"),
    ],
)
def test_labels_that_do_not_suit_the_conversion_are_refused(tmp_path, rows, options, message):
    with pytest.raises(InputError, match=message):
        dataset(tmp_path, rows, **options)


@pytest.mark.parametrize(
    ("labels", "texts", "message"),
    [
        (("0", "1"), {}, "must give a text to labels that are no words, got '0'"),
        ((True, False), {}, "must give a text to labels that are no words, got 'true'"),
        (("a", "b"), {"a": "x"}, "must give a text to the label 'b', got"),
        (("a", "b"), {"a": "x", "b": "y", "c": "z"}, "names a label that the source does not have, got 'c'"),
        (("a", "b"), {"a": "x", "b": "x"}, "must give each label its own text"),
    ],
)
def test_label_texts_that_do_not_match_the_labels_are_refused(tmp_path, labels, texts, message):
    rows = [{"text": "t", "label": label} for label in labels]
    with pytest.raises(OptionError, match=rf"data\.sources\[source\]\.label_texts {message}"):
        dataset(tmp_path, rows, conversion="binary_by_label", label_texts=texts)


@pytest.mark.parametrize("max_rows", [1, 3, 10, 99, 100, 1000])
def test_max_rows_takes_one_row_of_each_stretch(tmp_path, max_rows):
    source = dataset(tmp_path, pairs(100), max_rows=max_rows)
    found = [int(source[PlanEntry(row, 0)].query.split()[1]) for row in range(len(source))]
    count = min(max_rows, 100)
    assert len(found) == len(set(found)) == count
    for row, index in enumerate(found):
        assert row * 100 // count <= index < (row + 1) * 100 // count


def test_another_seed_takes_other_rows(tmp_path):
    chosen = []
    for seed in (0, 0, 1):
        source = dataset(tmp_path, pairs(100), max_rows=20, seed=seed)
        chosen.append([source[PlanEntry(row, 0)].query for row in range(20)])
    assert chosen[0] == chosen[1] != chosen[2]


def test_positives_come_from_the_whole_source_though_max_rows_leaves_one_query_of_a_class(tmp_path):
    source = dataset(tmp_path, labelled(10, 10), conversion="class_by_example", max_rows=1)
    assert len({source[PlanEntry(0, draw)].positives for draw in range(100)}) == 9


def test_a_class_of_one_text_may_be_left_out_and_still_gives_negatives(tmp_path):
    rows = [{"text": "only", "label": "lone"}, *labelled(3, 2)]
    source = dataset(tmp_path, rows, conversion="class_by_example", single_text_classes="leave_out")
    queries = [source[PlanEntry(row, 0)] for row in range(len(source))]
    assert [example.query for example in queries] == [row["text"] for row in rows[1:]]
    assert all("only" in [negative.text for negative in example.negatives] for example in queries)
    fewer = dataset(tmp_path, rows, conversion="class_by_example", single_text_classes="leave_out", max_rows=4)
    assert len({fewer[PlanEntry(row, 0)].query for row in range(4)} - {"only"}) == 4


def test_a_source_of_classes_of_one_text_has_no_query(tmp_path):
    with pytest.raises(InputError, match="no class has two texts"):
        dataset(tmp_path, labelled(1, 1), conversion="class_by_example", single_text_classes="leave_out")


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_outside_the_source_is_refused(tmp_path, row):
    source = dataset(tmp_path, pairs(10), max_rows=3)
    with pytest.raises(IndexError, match=f"row {row} of 3"):
        source[PlanEntry(row, 0)]


@pytest.mark.parametrize("conversion", ["pairs", "class_by_example", "class_by_label"])
def test_a_source_is_pickled_without_its_data(tmp_path, conversion):
    rows = [{**row, "query": "q", "positive": "p"} for row in labelled(500, 500)]
    source = dataset(tmp_path, rows, conversion=conversion)
    data = pickle.dumps(source)
    assert len(data) < 3000
    assert pickle.loads(data)[PlanEntry(999, 4)] == source[PlanEntry(999, 4)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_levels_of_a_file_decide_which_negatives_a_step_may_use(tmp_path, kind):
    path = tmp_path / f"records.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(graded(3)), path)
    else:
        write_jsonl(path, graded(3))
    source = open_source(SourceConfig("records", str(path)), tmp_path / "cache")
    for row in range(3):
        for level in (1, 2, 3, 4):
            example = source[PlanEntry(row, 9, LevelRule(level))]
            assert example.level == level
            assert example.negatives == (Negative(f"negative {row} of level {level}", level),)
        cumulative = source[PlanEntry(row, 9, LevelRule(3, cumulative=True))]
        assert sorted(negative.level for negative in cumulative.negatives) == [3, 4]
        assert (source[PlanEntry(row, 9)].level, len(source[PlanEntry(row, 9)].negatives)) == (0, 4)


def test_drawn_negatives_and_their_labels_are_of_every_level(tmp_path):
    source = dataset(tmp_path, labelled(3, 4), conversion="class_by_example", num_negatives=2)
    plain, leveled = source[PlanEntry(0, 5)], source[PlanEntry(0, 5, LevelRule(2))]
    assert (leveled.negatives, leveled.negative_labels) == (plain.negatives, plain.negative_labels)
    assert len(plain.negative_labels) == 2


TRIPLETS = [{**pair, "negative": f"n {row}", "score": 1.0, "anchor": None} for row, pair in enumerate(pairs(4))]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_columns_that_look_like_a_field_are_named_in_one_line(form, tmp_path, caplog):
    """sentence-transformers calls a column of one negative `negative`; a cached source says it again."""
    path = tmp_path / f"triplets.{form}"
    if form == "jsonl":
        write_jsonl(path, TRIPLETS)
    else:
        pq.write_table(pa.Table.from_pylist(TRIPLETS), path)
    for _ in range(2):
        caplog.clear()
        open_source(SourceConfig("triplets", str(path)), tmp_path / "cache").warn_of_unused_columns(1)
        (line,) = caplog.messages
        assert line.startswith("source triplets: columns not used: negative, ")
        assert "to use one, map it: columns: {negatives: negative" in line
        assert line.endswith("; a score counts with conversion: sts alone")
        assert ("anchor" in line) == (form == "parquet")  # of a column that is not read nobody knows that it is empty
    mapped = open_source(SourceConfig("triplets", str(path), columns={"negatives": "negative"}), tmp_path / "cache")
    assert mapped[PlanEntry(2, 0)].negatives == (Negative("n 2"),)


def test_of_several_columns_for_one_field_the_first_is_suggested(tmp_path, caplog):
    row = {**pairs(1)[0], "negative_1": "n", "negative_2": "m"}
    dataset(tmp_path, [row]).warn_of_unused_columns(2)
    assert caplog.messages == [
        "source source: columns not used: negative_1, negative_2; to use one, map it: columns: {negatives: negative_1}"
    ]


def test_columns_that_are_used_or_not_asked_for_are_not_named(tmp_path, caplog):
    dataset(tmp_path, [{**pairs(1)[0], "negative": "n", "title": "t"}]).warn_of_unused_columns(0)
    rows = [{"anchor": "q", "positive": "p", "negative": ["n"], "score": None}]
    dataset(tmp_path, rows, columns={"query": "anchor", "negatives": "negative"}).warn_of_unused_columns(7)
    dataset(tmp_path, labelled(3, 3), conversion="class_by_example").warn_of_unused_columns(7)
    dataset(tmp_path, graded(3)).warn_of_unused_columns(7)
    assert caplog.messages == []
