"""Batches against a batch written by hand, and edge cases."""

from dataclasses import replace

import torch

from embeddings.common import TextSettings
from embeddings.common.io import text_hash
from embeddings.common.random import derive_seed
from embeddings.data.records import Example, Negative
from embeddings.data.tokenize import ContrastiveCollator, TextTokenizer
from tests.helpers.tiny import wordpiece_tokenizer

TOKENIZER = wordpiece_tokenizer()


def make(num_negatives, **settings):
    return ContrastiveCollator(TextTokenizer(TOKENIZER, TextSettings(**settings)), num_negatives)


def examples():
    positives, negatives = ("sum of two", "two numbers", "return"), (Negative("jumps"),)
    labelled = Example(99, 2, 3, "sum", positives, negatives, label=5, negative_labels=(6,))
    return [
        Example(10, 1, 0, "fox", ("the fox",), (Negative("a dog", 1), Negative("lazy dog", 2), Negative("how", 3))),
        replace(labelled, query_prompt="search_query: ", document_prompt="search_document: ", in_batch_negatives=False),
        Example(row=7, draw=3, source=1, query="pad", positives=("sequences", "sequences one"), label=2),
    ]


def test_in_context_examples_of_the_same_source_are_put_before_a_query():
    texts = [("fox", "the fox"), ("sum", "two"), ("dog", "lazy dog"), ("pad", "one")]
    batch = [
        Example(row=row, draw=row, source=row % 2, query=query, positives=(document,), query_prompt="find ")
        for row, (query, document) in enumerate(texts)
    ]
    collate = ContrastiveCollator(TextTokenizer(TOKENIZER, TextSettings(query_max_length=64)), 0, None, 1)
    plain = make(0, query_max_length=64)
    counts, pairs = set(), {0: 2, 1: 3, 2: 0, 3: 1}
    for draw in range(20):
        drawn = [replace(example, draw=derive_seed(draw, example.row)) for example in batch]
        assert torch.equal(collate(drawn).query.input_ids_T, collate(drawn).query.input_ids_T)
        for row, text in enumerate(texts_of(collate(drawn).query)):
            count = derive_seed(drawn[row].draw, "num_in_context") % 2
            other = batch[pairs[row]]
            solved = f"find {other.query}\nResponse: {other.positives[0]}\n\n" * count
            expected = plain.tokenizer([drawn[row].query], "query", f"{solved}find ")
            assert text == texts_of(expected)[0]
            counts.add(count)
        # Only the query is pooled.
        assert texts_of(collate(drawn).query, pooled_only=True) == texts_of(plain(drawn).query, pooled_only=True)
        assert torch.equal(collate(drawn).candidate.input_ids_T, plain(drawn).candidate.input_ids_T)
    assert counts == {0, 1}


def test_in_context_examples_leave_half_of_the_length_to_the_query():
    documents = [f"{row} {'lazy dog ' * 5}" for row in range(12)]
    batch = [
        Example(row, row, 0, f"fox {'the ' * row}", (document,), query_prompt="find ")
        for row, document in enumerate(documents)
    ]
    collate = ContrastiveCollator(TextTokenizer(TOKENIZER, TextSettings(query_max_length=64)), 0, None, 50)
    lengths = []
    for place, prompt in enumerate(collate._with_examples(batch, ["find "] * 12, documents)):
        assert collate.tokenizer.num_tokens(prompt) <= 32
        assert prompt.endswith("find ")
        assert batch[place].query not in prompt.split("\n")[0] or place == 0
        lengths.append(prompt.count("Response:"))
    assert max(lengths) == 1


def test_an_in_context_example_does_not_contain_a_positive_of_the_query():
    texts = [("fox", ("the dog", "return")), ("sum", (" the dog",)), ("pad", ("two numbers",)), ("quick", ("return",))]
    collate = ContrastiveCollator(TextTokenizer(TOKENIZER, TextSettings(query_max_length=128)), 0, None, 3)
    shown = set()
    for draw in range(40):
        batch = [Example(row, derive_seed(draw, row), 0, *pair) for row, pair in enumerate(texts)]
        for (query, positives), text in zip(texts, texts_of(collate(batch).query), strict=True):
            assert not any(positive.strip() in text for positive in positives)
            shown |= {(query, other) for other, _ in texts if f"{other} response" in text}
    assert len(shown) == 4 * 3 - 2
    assert shown.isdisjoint([("fox", "sum"), ("fox", "quick")])


def texts_of(tokens, pooled_only=False):
    lengths = tokens.lengths_N.tolist()
    pairs = zip(tokens.input_ids_T.split(lengths), tokens.pooling_mask_T.split(lengths), strict=True)
    kept = [ids[mask] if pooled_only else ids for ids, mask in pairs]
    return [TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in kept]


def test_every_field_of_a_batch_equals_one_written_by_hand():
    batch = make(2)(examples())
    second, third = (e.positives[derive_seed(e.draw, "positive") % len(e.positives)] for e in examples()[1:])
    candidates = ["the fox", second, third, "a dog", "lazy dog", "jumps"]
    assert texts_of(batch.query, pooled_only=True) == ["fox", "sum", "pad"]
    assert texts_of(batch.candidate, pooled_only=True) == candidates
    assert texts_of(batch.query)[1] == "search _ query : sum"
    assert texts_of(batch.candidate)[5] == "search _ document : jumps"
    assert batch.positive_index_B.tolist() == [0, 1, 2]
    assert batch.owner_C.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.query_hash_B.tolist() == [text_hash(text) for text in ("fox", "sum", "pad")]
    assert batch.candidate_hash_C.tolist() == [text_hash(text) for text in candidates]
    assert batch.known_positive_hash_BP.tolist() == [
        [text_hash("the fox")] * 3,
        [text_hash(text) for text in ("sum of two", "two numbers", "return")],
        [text_hash(text) for text in ("sequences", "sequences one", "sequences")],
    ]
    assert batch.source_B.tolist() == [0, 3, 1]
    assert batch.query_label_B.tolist() == [-1, 5, 2]
    assert batch.candidate_label_C.tolist() == [-1, 5, 2, -1, -1, 6]
    assert batch.in_batch_B.tolist() == [True, False, True]
    assert batch.row_B.tolist() == [10, 99, 7]
    assert len(batch) == 3
    assert batch.negative_level == 0
    batch = make(1)([replace(example, level=3) for example in examples()])
    assert (batch.negative_level, batch.to("cpu").negative_level) == (3, 3)


def test_an_empty_prompt_replaces_that_of_the_settings_and_a_missing_one_does_not():
    collate = make(0, prompts={"query": "search query ", "document": "passage "})
    for prompt, query, document in ((None, "search query fox", "passage dog"), ("", "fox", "dog")):
        batch = collate([Example(0, 0, 0, "fox", ("dog",), query_prompt=prompt, document_prompt=prompt)])
        assert (texts_of(batch.query), texts_of(batch.candidate)) == ([query], [document])


def test_the_draw_key_alone_chooses_the_positive_and_every_one_is_chosen():
    positives = ("the fox", "a dog", "lazy dog")
    drawn = [Example(row=0, draw=draw, source=0, query="q", positives=positives) for draw in range(60)]
    together = make(0)(drawn).candidate_hash_C.tolist()
    apart = [make(0)([example]).candidate_hash_C.item() for example in drawn[:5]]
    assert together[:5] == apart
    assert {text_hash(text) for text in positives} == set(together)
