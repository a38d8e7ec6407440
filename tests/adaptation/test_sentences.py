"""Sentences and lengths in several scripts."""

import time
import unicodedata

import pytest

from embeddings.adaptation.candidates import docstrings
from embeddings.adaptation.sentences import (
    QUESTION_MARKS,
    is_question,
    letter_share,
    num_words,
    plain,
    sentences,
    without,
)


def texts(text):
    return [text[each.start : each.stop] for each in sentences(text)]


@pytest.mark.parametrize(
    "expected",
    [
        ["It is here.", "Is it?", "It is!"],
        ["He said “Go away.”", "Then he left."],
        ["“Quoted?” he said.", "Last one."],
        ["Dr. Smith and J. Doe of the U.S. Army met at 3.14 p.m. in Rome.", "They ate."],
        ["See Fig. 3 and No. 5 of a.b.c for it.", "It grew to 1985.", "Then it fell."],
        ["Call f(x)! then a != b or x?y=1 here.", "Done."],
        ["Wait, what?!", "Yes..."],
        ["他来了。", "你好吗？", "我很好！"],
        ["今日は雨です。", "「行く？」と聞いた。"],
        ["यह एक वाक्य है।", "यह दूसरा है।"],
        ["هل هذا سؤال؟", "نعم هو كذلك."],
        ["Τι κάνεις;", "Είμαι καλά."],
        ["Это первое предложение, т.е. начало.", "А это второе."],
        ["ይህ ነው።", "እሺ፧"],
        ["the lift was small .", "the drag , however, was not ."],
        ["Use e.g. this, or v. 2.", "Then (really!) go."],
        ["Wait... what?", "Yes!!", "No."],
    ],
)
def test_a_sentence_ends_at_the_terminators_of_its_script(expected):
    for separator in (" ", "  ", "\n"):
        assert texts(separator.join(expected)) == expected
    assert all(each.is_finished for each in sentences(" ".join(expected)))


def test_blocks_end_sentences_and_code_headings_and_tables_have_none():
    text = (
        "# A heading. Not a sentence.\n\nFirst of\ntwo lines. Second\n\n- an item here.\n- another\n  item. More.\n\n"
        "1. Numbered one.\n\n| a. b. | c. |\n\n```python\nx = 1. Y. Z.\n```\nAfter code.\n> quoted text."
    )
    expected = ["First of\ntwo lines.", "Second", "an item here.", "another\n  item.", "More.", "Numbered one."]
    assert texts(text) == [*expected, "After code.", "quoted text."]
    finished = [each.is_finished for each in sentences(text)]
    assert finished == [True, False, *[True] * 6]
    assert texts("") == texts(" \n\n") == texts("---\n***") == []
    assert [each.is_finished for each in sentences("no end at all")] == [False]
    assert texts("Before it.\nname | what. It is\nfirst | One. Two.\nlast | \nAfter it.") == ["Before it.", "After it."]
    # An open fence lasts to the end.
    assert texts("One. Two.\n\n```\nThree. Four.") == ["One.", "Two."]


def test_a_text_without_one_sentence_keeps_the_others_and_no_empty_bullet():
    def rests(text):
        return [without(text, each.start, each.stop) for each in sentences(text)]

    assert rests("One. Two. Three.") == ["Two. Three.", "One. Three.", "One. Two."]
    assert rests("- one here.\n- two here.\n- three.") == [
        "- two here.\n- three.",
        "- one here.\n- three.",
        "- one here.\n- two here.",
    ]
    assert rests("One.\n\nTwo. Three.")[1] == "One.\n\nThree."
    assert rests("他来了。你好吗？") == ["你好吗？", "他来了。"]


UNITS = [
    *("a", ".", "a.", "a. ", "?", "[", "![", "`", "*", "```\n", "\n", " \n", "- ", "// a\n", "/**", '"""', "1. ", "("),
    *("a b ", "<a", "。", "a | "),
]


@pytest.mark.parametrize("unit", UNITS)
def test_long_texts_of_one_pattern_take_no_time(unit):
    text = unit * (50_000 // len(unit))
    start = time.process_time()
    for each in sentences(text)[:3]:
        without(text, each.start, each.stop)
    plain(text)
    is_question(text)
    list(docstrings(f"x = 1\n{text}"))
    assert time.process_time() - start < 5


def test_question_marks_are_those_of_unicode():
    characters = map(chr, range(0x110000))
    marks = {each for each in characters if "QUESTION MARK" in unicodedata.name(each, "")}
    marks = {each for each in marks if unicodedata.category(each) == "Po"}
    # Inverted marks begin a question, and the Armenian one stands inside a word.
    assert len(marks) > 15
    assert marks - set(QUESTION_MARKS) <= {"¿", "\u055e", "\u2047", "\u2049", "\U0001e95f"}
    assert set(QUESTION_MARKS) <= marks
    for text in ("Why?", "为什么？", "لماذا؟", "Τι κάνεις;", "He asked “why?”", "(Why?)", "Why?!"):
        assert is_question(text), text
    for text in ("Because.", "x; y.", "¿no", "int a;", "What? No."):
        assert not is_question(text), text


def test_lengths_count_words_of_each_script():
    assert num_words("Two words") == 2
    assert num_words("东京都是首都") == 3
    assert num_words("ภาษาไทย") == pytest.approx(7 / 4)
    assert num_words("naïve Hello 東京") == 3
    assert letter_share("Plain words, with some punctuation.") == 1
    assert letter_share("他来了。你好吗？") == 1
    assert letter_share("for (i = 0; i < 10; i++)") < 0.5
    assert letter_share("") == 0


def test_markup_is_not_part_of_a_query():
    assert (
        plain("a **bold** [link](http://x.y/z) and `code`,\n<b>x</b>[^1] ![pic](a.png)")
        == "a bold link and code, x pic"
    )
    assert plain("Runs {@code build} at 2 * 3 * 4 and a_b_c") == "Runs build at 2 * 3 * 4 and a_b_c"
    assert plain("half of **two marks") == "half of two marks"
    assert plain('Why not?" she said "so"') == "Why not? she said so"
    assert plain('a "quoted" word') == 'a "quoted" word'
