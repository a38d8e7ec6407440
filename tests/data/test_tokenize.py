"""Pooled tokens against the character offsets of each token, for each family of tokenizers."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from embeddings.common import OptionError, TextSettings
from embeddings.data.tokenize import TextTokenizer
from tests.helpers.refusals import refused
from tests.helpers.tiny import TEXTS, bpe_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer


def roberta_tokenizer():
    """Byte-level BPE with trimmed offsets and a special token on both sides of the text."""
    tokenizer = bpe_tokenizer()
    backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>", "</s>"])
    first, last = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    backend.post_processor = processors.RobertaProcessing(("</s>", last), ("<s>", first), trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", truncation_side="left"
    )


FAMILIES = {
    "wordpiece": wordpiece_tokenizer,
    "bpe": bpe_tokenizer,
    "roberta": roberta_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
}
PROMPTS = [
    "Instruct: Given a question, retrieve passages that answer the question\nQuery: ",
    "search_query: ",
    "query:",
    "東京 ",
    "🙂",
    "naïve café–",
]
# fmt: off
SAMPLES = [
    "how do I pad", "7 sums", "東京の", " leading space", "   three", "", " ", "é", "🙂 smile", "e\u0301tude",
    "привет, мир", "Ünïcödé", "\ttab\nline", "x", "don't", "Query: Query: ", "\u200bzero width",
]
# fmt: on


@pytest.fixture(params=sorted(FAMILIES))
def tokenizer(request):
    return FAMILIES[request.param]()


def make(tokenizer, **settings):
    return TextTokenizer(tokenizer, TextSettings(**settings))


def rows_of(tokens):
    lengths = tokens.lengths_N.tolist()
    ids, masks = tokens.input_ids_T.split(lengths), tokens.pooling_mask_T.split(lengths)
    return [(i.tolist(), m.tolist()) for i, m in zip(ids, masks, strict=True)]


def pooled_ids(tokens):
    return [[token for token, flag in zip(ids, mask, strict=True) if flag] for ids, mask in rows_of(tokens)]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("append_eos", [False, True])
def test_tokens_of_the_text_and_special_tokens_after_it_are_pooled(tokenizer, prompt, append_eos):
    append_eos = append_eos and tokenizer.eos_token is not None
    tokens = make(tokenizer, append_eos=append_eos)(SAMPLES, "query", prompt)
    assert len(tokens) == len(SAMPLES)
    num_pooled = 0
    for text, (ids, mask) in zip(SAMPLES, rows_of(tokens), strict=True):
        plain = tokenizer(prompt + text, return_offsets_mapping=True, return_special_tokens_mask=True)
        text_characters, is_special = range(len(prompt), len(prompt + text)), plain["special_tokens_mask"]
        # A token with an empty (trimmed) span stands for the character before it.
        expected = [
            any(place in text_characters for place in (range(start, end) if start < end else (start - 1,)))
            for start, end in plain["offset_mapping"]
        ]
        for index in range(len(expected) - 1, -1, -1):
            if not is_special[index]:
                break
            expected[index] = True
        expected_ids = list(plain["input_ids"])
        if append_eos and expected_ids[-1] != tokenizer.eos_token_id:
            expected_ids.append(tokenizer.eos_token_id)
            expected.append(True)
        if not any(expected):
            expected[-1] = True
        assert ids == expected_ids
        assert mask == expected
        num_pooled += sum(mask)
    assert num_pooled > 2 * len(SAMPLES)


def test_special_tokens_before_the_text_are_pooled_only_without_a_prompt():
    tokenize = make(wordpiece_tokenizer())
    assert all(rows_of(tokenize(["the fox"], "document"))[0][1])
    mask = rows_of(tokenize(["the fox"], "query", "search_query: "))[0][1]
    assert mask[0] is False
    assert mask[-1] is True
    assert all(rows_of(make(wordpiece_tokenizer(), pool_prompt=True)(["the fox"], "query", "search_query: "))[0][1])


def test_a_prompt_is_given_for_all_texts_or_for_each_or_by_the_settings(tokenizer):
    tokenize = make(tokenizer, prompts={"query": "search_query: "})
    texts = ["the fox", "a dog"]
    by_default, for_all, each = (tokenize(texts, "query", p) for p in (None, "search_query: ", ["search_query: "] * 2))
    assert rows_of(by_default) == rows_of(for_all) == rows_of(each)
    assert rows_of(tokenize(texts, "document")) == rows_of(tokenize(texts, "query", ""))
    mixed = rows_of(tokenize(texts, "query", ["", "search_query: "]))
    assert mixed == [rows_of(tokenize(texts, "query", ""))[0], rows_of(by_default)[1]]
    # Without a prompt, the tokens equal those of the tokenizer itself.
    texts = [text for text in SAMPLES + TEXTS if tokenizer(text)["input_ids"]]
    assert len(texts) >= 18
    assert [ids for ids, _ in rows_of(make(tokenizer)(texts, "document"))] == tokenizer(texts)["input_ids"]
    says = r"data\.text\.query_max_length must exceed the \d+ tokens of the prompt.*got 8"
    refused(OptionError, says, make(tokenizer, query_max_length=8), ["x"], "query", PROMPTS[0])


@pytest.mark.parametrize("length", [8, 9, 12])
@pytest.mark.parametrize("prompt", ["", "q: "])
def test_truncation_keeps_the_special_tokens_and_the_start_or_with_truncation_side_left_the_end(
    tokenizer, length, prompt
):
    text = "the quick brown fox jumps over the lazy dog or 1 2 3 4 5 6"
    tokenize = make(tokenizer, query_max_length=length, append_eos=tokenizer.eos_token is not None)
    ids, mask = rows_of(tokenize([text], "query", prompt))[0]
    assert len(ids) == len(mask) == length
    assert ids[-1] == (tokenizer.eos_token_id if tokenizer.eos_token else tokenizer.sep_token_id)
    assert mask[-1] is True
    whole = tokenizer(prompt + text)["input_ids"]
    is_left = tokenizer.truncation_side == "left"
    assert ids[:-1] == (whole[:1] + whole[1 - length : -1] if is_left else whole[: length - 1])


def test_a_text_without_tokens_still_pools_one_token():
    backend = Backend(models.WordLevel({"[UNK]": 0, "p": 1, "x": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenize = make(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert rows_of(tokenize(["", "x"], "query", "p p ")) == [([1, 1], [False, True]), ([1, 1, 2], [False, False, True])]
    # If the tokenizer adds no special token, an end-of-sequence token.
    tokenizer = bpe_tokenizer()
    for append_eos, texts in ((False, ["", "a"]), (True, [""])):
        found = rows_of(make(tokenizer, append_eos=append_eos)(texts, "document"))
        assert found[0] == ([tokenizer.eos_token_id], [True])


def test_the_tokenizer_given_is_not_changed_and_its_own_settings_do_not_matter():
    tokenizer = wordpiece_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    tokenize = make(tokenizer, query_max_length=5)
    tokenizer("the fox", truncation=True, max_length=3, padding="max_length")
    during = tokenizer.backend_tokenizer.to_str()
    assert tokenize(["the quick brown fox jumps"], "query").num_tokens == 5
    assert tokenizer.backend_tokenizer.to_str() == during != before


@pytest.mark.parametrize("append_eos", [False, True])
def test_spans_have_the_same_tokens_as_the_ids(tokenizer, append_eos):
    append_eos = append_eos and tokenizer.eos_token is not None
    made = make(tokenizer, append_eos=append_eos, document_max_length=10)
    texts, prompt = ["fox", "東", "how do I pad sequences to one length"], "a: "
    ids = [ids for ids, _ in rows_of(made(texts, "document", prompt))]
    spans = made.spans(texts, "document", prompt)
    assert [[tokenizer.convert_tokens_to_ids(span.token) for span in row] for row in spans] == ids
    assert len(ids[2]) == 10
    for text, row in zip(texts[:2], spans, strict=False):
        own = tokenizer(prompt + text, return_offsets_mapping=True)["offset_mapping"]
        assert [(span.start, span.end) for span in row] == own + [(0, 0)] * (len(row) - len(own))
    assert all(span.is_special == (span.end == 0) for row in spans for span in row)


def test_a_suffix_follows_every_text_and_is_pooled():
    tokenizer = FAMILIES["sentencepiece"]()
    make_closed = make(tokenizer, document_max_length=12, query_max_length=64, suffix=" [/INST]", append_eos=True)
    closing = [*tokenizer("a [/INST]")["input_ids"][2:], tokenizer.eos_token_id]
    assert len(closing) > 3
    for ids, mask in rows_of(make_closed(SAMPLES, "document")):
        assert (ids[-len(closing) :], len(ids) <= 12) == (closing, True)
        assert all(mask[-len(closing) :])
    text = "how do I pad"
    ((ids, _),) = rows_of(make_closed([text], "query"))
    assert ids == [*tokenizer(f"{text} [/INST]")["input_ids"], tokenizer.eos_token_id]


def test_special_tokens_before_a_text_can_be_left_out_of_the_pooling(tokenizer):
    plain = make(tokenizer, pool_start=False)
    prompt = "query: "
    bare, prompted = (pooled_ids(plain(["fox 7 sums"], "query", given)) for given in ("", prompt))
    spelt = [tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip() for ids in (bare[0], prompted[0])]
    assert spelt[0] == spelt[1]
    assert len(bare[0]) > 2
    starts = {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None}
    assert not starts & set(bare[0])
    assert pooled_ids(make(tokenizer, pool_start=False, pool_prompt=True)(["fox"], "query")) == [
        ids for ids, _ in rows_of(plain(["fox"], "query"))
    ]


@pytest.mark.parametrize("length", [64, 10])
@pytest.mark.parametrize("prompt", ["", "a: "])
def test_after_colon_pools_the_tokens_after_the_first_colon(tokenizer, prompt, length):
    texts = ["the fox", "sum: the fox: 7", "a:", "東京: の", "a b c d e f g h i j k l: m"]
    colon = tokenizer.convert_tokens_to_ids(":")
    tokenizer.truncation_side = "right"
    made = make(tokenizer, query_max_length=length, pooling_rule="after_colon")
    num_left = 0
    for text, (ids, mask) in zip(texts, rows_of(made(texts, "query", prompt)), strict=True):
        assert ids == tokenizer(prompt + text, truncation=True, max_length=length)["input_ids"]
        seen, expected = colon not in ids, []
        for token in ids:
            expected.append(seen)
            seen = seen or token == colon
        expected[-1] = True
        assert mask == expected
        num_left += expected.count(False)
    assert num_left > 5
    ((_, mask),) = rows_of(make(tokenizer, pooling_rule="after_colon", pool_prompt=True)(["a: b"], "query"))
    assert all(mask)


@pytest.mark.parametrize("length", [64, 40])
@pytest.mark.parametrize("prompt", ["", PROMPTS[0]])
def test_instruction_count_excludes_as_many_tokens_as_the_prompt_has_alone(prompt, length):
    tokenizer = sentencepiece_tokenizer()
    texts = [*SAMPLES, "the quick brown fox jumps over the lazy dog " * 12]
    settings = {"append_eos": True, "query_max_length": length}
    made = make(tokenizer, pooling_rule="instruction_count", **settings)
    counted = rows_of(made(texts, "query", prompt))
    for text, (ids, mask) in zip(texts, counted, strict=True):
        # As in the release: the end-of-sequence token is text.
        assert ids == tokenizer(prompt + text + "</s>", truncation=True, max_length=length)["input_ids"]
        num_left = len(tokenizer.tokenize(prompt)) if prompt else 0
        assert mask == [index >= num_left for index in range(len(ids))]
    assert counted[-1][0][-1] != tokenizer.eos_token_id
    spans = made.spans(texts, "query", prompt)
    assert [[tokenizer.convert_tokens_to_ids(one.token) for one in row] for row in spans] == [ids for ids, _ in counted]
    exact = rows_of(make(tokenizer, **settings)(texts, "query", prompt))
    differs = [text for text, one, other in zip(texts, counted, exact, strict=True) if one != other]
    # Before these texts the last space of the prompt is a separate token, which is pooled; the last text is truncated.
    assert set(differs) >= ({"é", "🙂 smile", texts[-1]} if prompt else {texts[-1]})
    assert not {"how do I pad", "x"} & set(differs)
    # If only the instruction remains, its last token is pooled.
    prompt = PROMPTS[0].rstrip()
    length = len(tokenizer(prompt)["input_ids"]) + 1
    made = make(tokenizer, query_max_length=length, pooling_rule="instruction_count")
    assert [mask for _, mask in rows_of(made([""], "query", prompt))] == [[False] * (length - 2) + [True]]


def test_a_tokenizer_without_offsets_or_a_token_that_is_needed_or_with_a_suffix_like_text_is_refused():
    refused(OptionError, "must be a fast tokenizer", TextTokenizer, object(), TextSettings())
    says = r"data\.text\.append_eos needs a tokenizer with an eos_token"
    refused(OptionError, says, make, wordpiece_tokenizer(), append_eos=True)
    backend = Backend(models.WordLevel({"[UNK]": 0, "x": 1}, unk_token="[UNK]"))
    without_colon = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    says = r"data\.text\.pooling_rule needs a tokenizer with a token ':'"
    refused(OptionError, says, make, without_colon, pooling_rule="after_colon")
    says = r"data\.text\.suffix must start with a separate token"
    refused(OptionError, says, make, wordpiece_tokenizer(), suffix=" end")
    tokenizer = bpe_tokenizer()
    tokenizer.add_tokens(["ahow"])
    refused(OptionError, says, make, tokenizer, suffix="how")
