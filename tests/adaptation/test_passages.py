"""Passages: their limits, where they are cut and what they contain, by laws over scripts and by hand."""

import re
from itertools import pairwise, product

import pytest

from embeddings.adaptation.markup import read_code, read_markdown, read_python, read_text
from embeddings.adaptation.passages import Splitter, TokenCounter, best_cuts, line_starts, sentence_starts
from embeddings.common import TextSettings
from embeddings.common.errors import OptionError
from tests.helpers.refusals import refused
from tests.helpers.tiny import bpe_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer

TOKENIZERS = {"wordpiece": wordpiece_tokenizer, "bpe": bpe_tokenizer, "sentencepiece": sentencepiece_tokenizer}
ENGLISH = " ".join(
    f"The fox number {n} jumps over the lazy dog, and returns the sum of two numbers." for n in range(60)
)
CHINESE = "".join(f"第{n}个文档由向量建立。查询用同一个模型编码？" for n in range(60))
THAI = "ดัชนีสร้างจากเวกเตอร์ของเอกสารทั้งหมด" * 40
ARABIC = " ".join(f"يتم بناء الفهرس {n} من متجهات المستندات. هل يتم ترميز الاستعلام؟" for n in range(40))
HINDI = " ".join(f"सूचकांक {n} दस्तावेज़ों के सदिशों से बनता है।" for n in range(40))
WITHOUT_SENTENCES = " ".join(f"word{n}" for n in range(900))
WITHOUT_SPACES = "x" * 5000 + "é" * 3000
TEXTS = [ENGLISH, CHINESE, THAI, ARABIC, HINDI, WITHOUT_SENTENCES, WITHOUT_SPACES, ENGLISH.replace(". ", ".\n\n")]


def counter(name="bpe", **settings):
    return TokenCounter(TOKENIZERS[name](), TextSettings(**settings))


def split(document, name="bpe", max_tokens=64, **settings):
    (passages,) = Splitter(counter(name, **settings), max_tokens).split([document])
    return passages


@pytest.mark.parametrize(("name", "number"), [*product(TOKENIZERS, range(len(TEXTS)))])
def test_every_letter_is_in_one_passage_within_the_limit(name, number):
    text = TEXTS[number]
    counted = counter(name, prompts={"document": "doc: "}, append_eos=name == "bpe")
    passages = Splitter(counted, 64).split([read_text(text)])[0]
    # To this tokenizer a word of unknown letters is one token.
    is_unknown = name == "wordpiece" and number in (2, 6)
    assert len(passages) > (1 if is_unknown else 5)
    lengths = counted.lengths([passage.text for passage in passages])
    assert max(lengths) <= 64
    assert lengths == [passage.num_tokens for passage in passages]
    assert all(text.startswith(passage.text, passage.position) for passage in passages)
    assert "".join("".join(passage.text for passage in passages).split()) == "".join(text.split())
    # Passages of one section are of similar length.
    assert min(lengths) > 16 or is_unknown


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, ARABIC, HINDI])
def test_passages_begin_with_a_sentence(text):
    starts = {0, *(start for start, _ in sentence_starts(text))}
    passages = split(read_text(text), max_tokens=256)
    assert len(passages) > 5
    assert {passage.position for passage in passages} <= starts


def test_a_text_without_sentences_is_cut_between_words():
    passages = split(read_text(WITHOUT_SENTENCES))
    assert [word for passage in passages for word in passage.text.split()] == WITHOUT_SENTENCES.split()


def test_no_passage_begins_with_a_combining_mark():
    starts = [passage.text[0] for passage in split(read_text(THAI))]
    assert len(starts) > 5
    assert not [letter for letter in starts if letter in "\u0e31\u0e34\u0e35\u0e36\u0e37\u0e38\u0e39\u0e47\u0e48\u0e49"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One. Two! Three? Four", ["One. ", "Two! ", "Three? ", "Four"]),
        ("1. First item.\n2. Second item.", ["1. First item.\n", "2. Second item."]),
        ("我们走。你好吗？“好。”他说", ["我们走。", "你好吗？", "“好。”他说"]),
    ],
)
def test_a_sentence_begins_with_its_number(text, parts):
    cuts = [0, *(start for start, _ in sentence_starts(text)), len(text)]
    assert [text[first:last] for first, last in pairwise(cuts)] == parts


def test_lines_begin_after_line_ends_and_blank_lines():
    text = "a\n  b\n\n\n    c\n"
    assert [(text[start:], cost < 1) for start, cost in line_starts(text)] == [
        ("  b\n\n\n    c\n", False),
        ("    c\n", True),
    ]


def brute_force(sizes, costs, room):
    """The cheapest cuts among all."""
    ways = []
    for chosen in product((False, True), repeat=len(sizes) - 1):
        cuts = [0, *(n for n, is_cut in enumerate(chosen, 1) if is_cut), len(sizes)]
        totals = [sum(sizes[a:b]) for a, b in pairwise(cuts)]
        if all(total <= room or b - a == 1 for total, (a, b) in zip(totals, pairwise(cuts), strict=True)):
            cost = sum(1 + (max(0, room - total) / room) ** 2 for total in totals) + sum(costs[n] for n in cuts[1:-1])
            ways.append(cost)
    return min(ways)


@pytest.mark.parametrize("seed", range(8))
def test_cuts_are_the_best_of_all(seed):
    sizes = [(7 * seed + 13 * n) % 29 + 1 for n in range(9)]
    costs = [((seed + n) % 4) * 0.3 for n in range(9)]
    cuts = best_cuts(sizes, costs, 40)
    totals = [sum(sizes[a:b]) for a, b in pairwise(cuts)]
    assert cuts[0] == 0
    assert cuts[-1] == 9
    cost = sum(1 + (max(0, 40 - total) / 40) ** 2 for total in totals) + sum(costs[n] for n in cuts[1:-1])
    assert cost == pytest.approx(brute_force(sizes, costs, 40))
    assert best_cuts([100, 5], [0, 0], 40) == [0, 1, 2]


MARKDOWN = """# Guide
Short introduction.

## First
{long}

## Second
### Tiny
one

### Small
two

## Third
{long}
"""


def test_sections_have_their_trail_and_tiny_neighbours_share_a_passage():
    long = "The quick fox jumps over the lazy dog. " * 4
    passages = split(read_markdown(MARKDOWN.format(long=long)), "wordpiece", 128)
    assert [(passage.title, passage.text) for passage in passages] == [
        ("Guide", "Short introduction."),
        ("Guide > First", long.strip()),
        ("Guide > Second", "Tiny\n\none\n\nSmall\n\ntwo"),
        ("Guide > Third", long.strip()),
    ]


def test_paragraphs_are_cut_between_where_possible():
    paragraph = "The quick fox jumps over the lazy dog. " * 3
    passages = split(read_text("\n\n".join([paragraph.strip()] * 6)), "wordpiece", 80)
    assert len(passages) > 1
    assert {re.sub(r"\s+", " ", passage.text).removeprefix(paragraph) for passage in passages} <= {
        "",
        paragraph.strip(),
    }


def test_code_is_cut_at_lines_and_loses_its_common_indentation():
    body = "\n".join(f"        total = total + value_{n}" for n in range(40))
    source = f"class Sum:\n    def run(self):\n{body}\n        return total\n"
    passages = split(read_python(source, "pkg/sums.py"), "wordpiece", 96)
    assert {passage.title for passage in passages} == {"pkg.sums.Sum.run"}
    assert len(passages) > 3
    assert passages[0].text.startswith("class Sum:\n    def run(self):\n        total")
    assert passages[1].text.startswith("total = ")
    assert "\ntotal = " in passages[1].text
    assert source.startswith(passages[1].text.partition("\n")[0], passages[1].position)
    lines = [line.strip() for passage in passages for line in passage.text.split("\n")]
    assert lines == [line.strip() for line in source.strip().split("\n")]


def test_a_long_title_keeps_its_last_headings():
    headings = [f"part {n} of the lazy dog" for n in range(20)]
    text = "\n\n".join(f"{'#' * min(n + 1, 6)} {heading}" for n, heading in enumerate(headings[:6])) + "\n\nfox"
    (passage,) = split(read_markdown(text), "wordpiece", 64)
    assert passage.title.endswith(headings[5])
    assert passage.title in " > ".join(headings[:6])
    assert passage.num_tokens <= 64
    (passage,) = split(read_markdown(f"# {'the fox jumps ' * 50}\n\nover"), "wordpiece", 64)
    assert passage.text == "over"
    assert passage.title.startswith("the fox jumps the fox")
    assert 10 < passage.num_tokens <= 64


def test_links_belong_to_the_passage_of_their_text():
    long = "The quick fox jumps over the lazy dog. " * 8
    passages = split(read_markdown(f"{long}[near](a.md). {long}[far](b.md)."), "wordpiece", 96)
    assert [passage.links for passage in passages if passage.links] == [(("near", "a.md"),), (("far", "b.md"),)]


@pytest.mark.parametrize("letter", [".", " ", "\n", "。", "a ", "}\n\n"])
def test_long_runs_take_linear_time(letter):
    (passages,) = Splitter(counter("wordpiece"), 64).split([read_text(f"fox {letter * 50_000} dog.")])
    assert passages[0].text.startswith("fox")
    assert read_code(letter * 50_000, "a.c").text


def test_blocks_without_letters_are_left_out():
    assert split(read_text("* * *\n\n=====\n\n。。")) == []


def test_the_default_limit_is_the_model_s_and_at_most_256():
    assert Splitter(counter(document_max_length=512)).max_tokens == 256
    assert Splitter(counter(document_max_length=100)).max_tokens == 100
    assert Splitter(counter(document_max_length=512), 512).max_tokens == 512


def test_a_limit_outside_the_model_s_is_refused():
    refused(OptionError, "max_tokens must be from 32 to 512", Splitter, counter(), 600)


def test_a_prompt_that_leaves_no_room_is_refused():
    counted = counter(prompts={"document": "the fox jumps over " * 8})
    refused(OptionError, "must leave room beside the", Splitter, counted, 32)
