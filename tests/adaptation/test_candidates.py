"""The queries that a passage offers, their filters, and the reader of passages."""

import math

import pytest

from embeddings.adaptation.candidates import (
    Candidate,
    Passage,
    WordStatistics,
    docstrings,
    is_code,
    key_of,
    proposals,
    read_passages,
)
from embeddings.common import InputError
from embeddings.inference.bm25 import BM25, word_tokens
from tests.adaptation.world import passage_rows
from tests.data.rows import write_rows
from tests.helpers.refusals import refused

TEXT = "The pump moves cold water. Why does it stop? It stops when the filter of the pump is blocked. Clean it then."


def passage(text=TEXT, title="Manual > Pumps > Filters of pumps", file="a.md", **fields):
    return Passage("p1", title, text, "a.md", file, **fields)


def offered(*arguments, common=(), start=True, **fields):
    return list(proposals(passage(*arguments, **fields), lambda heading: heading in common, start))


def test_sentences_questions_and_headings_become_queries_without_their_text():
    heading, *others = offered()
    assert heading == Candidate("Filters of pumps", "heading", "", TEXT, "p1", "a.md", "Filters of pumps")
    assert heading.positive == TEXT
    assert [(each.query, each.kind) for each in others] == [
        ("The pump moves cold water.", "sentence"),
        ("Why does it stop?", "question"),
        ("It stops when the filter of the pump is blocked.", "sentence"),
        ("Clean it then.", "sentence"),
    ]
    for each in others:
        assert each.query not in each.text
        assert sorted(f"{each.query} {each.text}".split()) == sorted(TEXT.split())
        assert each.positive == f"Manual > Pumps > Filters of pumps {each.text}"


def test_a_heading_is_asked_at_the_start_of_its_section_with_its_parent_if_it_is_vague():
    def headings(**fields):
        return [(each.query, each.kind) for each in offered(**fields) if each.heading]

    assert headings(start=False) == headings(title="") == headings(title=" > ") == []
    assert headings(common={"Filters of pumps"}) == [("Pumps Filters of pumps", "heading")]
    assert headings(title="Manual > Options") == [("Manual Options", "heading")]
    assert headings(title="Pumps > How do I clean it?") == [("How do I clean it?", "question")]


def test_unfinished_and_single_sentences_are_not_removed_from_their_passage():
    assert offered("Only one sentence stands here.", title="") == []
    assert [each.query for each in offered("no end here", title="")] == []
    # The last sentence has no text after it that could answer it.
    assert [each.kind for each in offered("It is a pump. Why does it stop?", title="")] == ["sentence", "sentence"]


PYTHON = '''def area(self, width):
    """Compute the area of a rectangle in metres.

    Args:
        width: A number.
    """
    # Multiply both of the sides here.
    return width * self.height
'''
# fmt: off
RUST = ("use std::fmt;\n\n/// Returns the largest number of the heap.\n/// More.\n"
        "#[inline]\npub fn peek(&self) -> i32 {\n    0\n}")
JAVA = ("/**\n * Sends one message to the queue of a server.\n * @param text the text\n"
        " */\npublic void send(String text) {\n}")
GO = ("// Open reads the named file from the disk.\nfunc Open(name string) {\n"
      "\t// and then some other thing here\n\tx = 1\n}")
# fmt: on


@pytest.mark.parametrize(
    ("code", "query", "gone"),
    [
        (PYTHON, "Compute the area of a rectangle in metres", '"""'),
        (RUST, "Returns the largest number of the heap", "///"),
        (JAVA, "Sends one message to the queue of a server", "/**"),
        (GO, "Open reads the named file from the disk", "Open reads"),
        ('def f(x):\n    """計算長方形的面積。然後返回。"""\n    return x * x\n', "計算長方形的面積。", '"""'),
    ],
    ids=["python", "rust", "java", "go", "chinese"],
)
def test_the_first_sentence_of_a_docstring_asks_for_its_code(code, query, gone):
    ((found, rest),) = docstrings(code)
    assert found == query
    assert gone not in rest
    # Everything else is as it was.
    assert [line for line in rest.splitlines() if line not in code.splitlines()] == []
    lines = {
        line.strip() for line in code.splitlines() if any(each in line for each in ("def ", "fn ", "func ", "void"))
    }
    assert lines <= {line.strip() for line in rest.splitlines()}
    assert [each.kind for each in offered(code, title="module.area", file="a.py")] == ["docstring"]


def test_code_is_recognised_by_its_file_or_its_characters():
    for code in (PYTHON, RUST, JAVA, GO):
        assert is_code(passage(code, file=""))
        assert not is_code(passage(code, file="page.md"))
    assert is_code(passage(TEXT, file="tools/run.py"))
    assert not is_code(passage(TEXT, file=""))
    assert not is_code(passage("他来了。你好吗？我很好！", file="corpus.jsonl#3"))


@pytest.fixture(scope="module")
def statistics():
    rows = passage_rows()
    return rows, WordStatistics([(row["_id"], f"{row['title']} {row['text']}") for row in rows])


def test_scores_of_texts_outside_the_sample_are_those_of_bm25(statistics):
    rows, found = statistics
    texts = [f"{row['title']} {row['text']}" for row in rows]
    score_QN = BM25(texts, word_tokens).scores(texts[:4])
    assert score_QN[0, 0] > 10
    for query in range(4):
        for text in range(10):
            score = found.score(word_tokens(texts[query]), word_tokens(texts[text]))
            assert score == pytest.approx(score_QN[query, text], rel=1e-5)


def test_shares_weigh_words_by_their_rarity(statistics):
    _, found = statistics
    common, rare = found.idf("the"), found.idf("never")
    assert rare == pytest.approx(math.log(1 + 300.5 / 0.5))
    assert found.idf("pump") == rare
    # `the` is a stop word of English, and no token.
    assert common == rare
    near, pump = found.idf("near"), found.idf("pump")
    assert 0 < near < 0.01 < pump
    assert found.share(["near", "pump"], ["near"]) == pytest.approx(near / (near + pump))
    assert found.share([], ["near"]) == 0


def test_a_rank_counts_the_other_passages_that_score_more(statistics):
    rows, found = statistics
    first, second = rows[0], rows[1]
    sentence, _, rest = first["text"].partition(". ")
    good = Candidate(sentence, "sentence", first["title"], rest, first["_id"], "d")
    # A passage of which another one has the words.
    wrong = Candidate(sentence, "sentence", "", second["text"], second["_id"], "d")
    copied = Candidate(sentence, "sentence", "", sentence, "not in the sample", "d")
    assert found.ranks([good, wrong, copied]).tolist()[0] == 0
    assert found.ranks([wrong]).tolist()[0] > 0
    assert found.ranks([copied]).tolist() == [0]


@pytest.mark.parametrize(
    ("query", "text", "fault"),
    [
        ("The old pump lifts clear water.", "rest", None),
        ("The old pump.", "rest", "too short"),
        ("The pump " * 40 + ".", "rest", "too long"),
        ("pump = f(x[0]) + water * {a: 1} now", "rest", "little prose"),
        ("lifts the old pump and clear water.", "rest", "unfinished"),
        (") and lifts the old pump water.", "rest", "unfinished"),
        ("The old pump lifts clear water.", "Clear water lifts.", "little other text"),
        ("The zebra eats grass and flowers today.", "rest", "shares too little with the rest"),
        ("The pump lifts water to a tank.", "rest", "copied from the rest"),
        ("The red valves of a house.", "rest", "repeats the title"),
    ],
)
def test_a_sentence_is_rejected_for_a_reason(statistics, query, text, fault):
    _, found = statistics
    rest = "A pump of this house lifts water to the tank under its roof, as long as the motor and the filter work well."
    text = rest if text == "rest" else text
    candidate = Candidate(query, "sentence", "Red valves house", text, "p1", "d")
    assert found.fault(candidate, passage(f"{query} {text}", title="Red valves house")) == fault


def test_a_heading_that_the_first_sentence_repeats_is_too_easy(statistics):
    _, found = statistics
    rest = (
        "A blocked one stops the flow at once, which the lamp on the front of the case shows in red. Clean the filters."
    )
    easy = Candidate(
        "Filters of pumps", "heading", "", f"Filters of pumps keep dirt away. {rest}", "p1", "d", "Filters"
    )
    good = easy._replace(text=f"Dirt must not reach the wheel. {rest}")
    assert found.fault(easy, passage(easy.text)) == "repeated by the first sentence"
    assert found.fault(good, passage(good.text)) is None
    none = good._replace(query="Quarterly invoices abroad")
    assert found.fault(none, passage(none.text)) == "shares too little with the rest"


def test_equal_queries_have_one_key():
    assert key_of(" What  is IT? ") == key_of("what is it")
    assert key_of("Cafe\u0301.") == key_of("café")
    assert key_of("他来了。") == key_of("他来了")


def test_passages_are_read_from_any_corpus(tmp_path):
    rows = [
        {"_id": "a", "text": "One.", "title": "T", "file": "x.md", "document": "x", "links": [["see", "y.md"]]},
        {"id": 7, "text": "Two.", "title": None},
        {"text": "Three.", "file": "z.md"},
    ]
    read = list(read_passages(write_rows(tmp_path / "p.jsonl", rows)))
    assert read == [
        Passage("a", "T", "One.", "x", "x.md", [("see", "y.md")]),
        Passage("7", "", "Two.", "7", "", []),
        Passage("2", "", "Three.", "z.md", "z.md", []),
    ]
    rows = [{"_id": "a", "text": "One.", "links": [["see", "y.md"]]}]
    assert list(read_passages(write_rows(tmp_path / "p.parquet", rows))) == [
        Passage("a", "", "One.", "a", "", [("see", "y.md")])
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"_id": "a", "text": "x"}, {"_id": "b", "text": "x"}, {"_id": "a", "text": "y"}],
            "rows 1 and 3 have the same id",
        ),
        ([{"_id": "a", "body": "x"}], "field 'text' is missing"),
        ([{"_id": "a", "text": "x", "links": ["y.md"]}], "links is"),
        ([{"_id": "a", "text": "x", "title": 3}], "field 'title' is a number"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, rows, message):
    refused(InputError, message, list, read_passages(write_rows(tmp_path / "p.jsonl", rows)))
