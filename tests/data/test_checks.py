"""Missing negatives and levels, and prompts without room, are refused or counted before training."""

from dataclasses import replace

import pytest

from embeddings.common import InputError, OptionError, TextSettings, instruction_prompt
from embeddings.common.protocols import BatchNeeds
from embeddings.data import SourceConfig
from embeddings.data.checks import (
    check_labels,
    check_levels,
    check_negatives_asked_for,
    check_negatives_found,
    check_prompts,
    warn_of_unnamed_prompts,
    warn_of_unused_columns,
    with_source_prompts,
)
from embeddings.data.tokenize import TextTokenizer
from tests.data.rows import dataset, graded, labelled, pairs
from tests.helpers.refusals import refused
from tests.helpers.tiny import wordpiece_tokenizer

EVERY = (1, 2, 3, 4)


def source(folder, *rows, **options):
    return dataset(folder, [row for part in rows for row in part], **options)


def test_records_without_a_level_are_refused_by_number_or_counted(tmp_path, caplog):
    caplog.set_level("INFO", logger="embeddings")
    whole, partial = source(tmp_path, graded(5), name="whole"), source(tmp_path, graded(2), graded(3, (1, 2, 4)))
    classes = source(tmp_path, labelled(3, 3), name="classes", conversion="class_by_example")
    says = r"source 'source': record 3 has no negative of level 3 \(3 of 5 lack one\); add it, or set .*: coarser"
    refused(InputError, says, check_levels, [whole, partial], EVERY, allow_missing=False)
    # A source with drawn negatives lacks every level.
    says = r"source 'classes': record 1 has no negative of level 4 \(6 of 6"
    refused(InputError, says, check_levels, [whole, classes], EVERY, allow_missing=False)
    caplog.clear()
    check_levels([whole], EVERY, allow_missing=False)
    check_levels([whole, partial], (1, 2, 4), allow_missing=False)
    assert caplog.messages == []
    some = source(tmp_path, graded(2), graded(3, (1, 2, 4)), pairs(4), name="some")
    check_levels([whole, classes, some], EVERY, allow_missing=True)
    assert caplog.messages == [
        "source classes: 6 of 6 records have no negative with a level",
        "source some: 3 of 9 records have no negative of level 3",
        "source some: 4 of 9 records have no negative with a level",
    ]


def test_a_curriculum_over_no_levels_at_all_is_refused(tmp_path):
    plain = source(tmp_path, [record | {"negatives": ["other"]} for record in pairs(4)], name="plain")
    classes = source(tmp_path, labelled(3, 3), name="classes", conversion="class_by_example")
    says = "needs negatives with levels, but no source has any"
    for allow_missing in (False, True):
        refused(OptionError, says, check_levels, [plain, classes], EVERY, allow_missing=allow_missing)


NEEDS = {forced: BatchNeeds(in_batch_negatives=forced) for forced in ("source", "on", "off")}


@pytest.mark.parametrize(
    ("options", "needs", "num_negatives", "message"),
    [
        ({"in_batch_negatives": False}, "source", 0, "num_negatives to 1 or more, or set in_batch_negatives: true"),
        ({}, "off", 0, "num_negatives to 1 or more, or set model.loss.in_batch_negatives: source"),
        ({"in_batch_negatives": False, "conversion": "sts"}, "source", 7, "`mine --conversion sts`.* as pairs, or set"),
        ({"conversion": "sts"}, "off", 7, "mine negatives for it .* model.loss.in_batch_negatives: source"),
        ({"in_batch_negatives": False, "conversion": "class_by_example"}, "source", 0, "num_negatives to 1"),
        ({}, "source", 0, None),
        ({"in_batch_negatives": False}, "on", 0, None),
        ({"in_batch_negatives": False}, "source", 1, None),
        ({"conversion": "sts"}, "source", 0, None),
        ({"in_batch_negatives": False, "conversion": "binary_by_label"}, "source", 1, None),
    ],
)
def test_a_source_that_may_have_no_negative_is_refused_before_it_is_read(options, needs, num_negatives, message):
    sources = [SourceConfig("fine", "fine.jsonl"), SourceConfig("lonely", "lonely.jsonl", **options)][message is None :]
    if message is None:
        check_negatives_asked_for(sources, NEEDS[needs], num_negatives, 8)
        return
    start = r"source '(lonely|fine)': has neither in-batch nor hard negatives, so its loss is 0 and trains nothing; "
    refused(InputError, f"{start}.*{message}", check_negatives_asked_for, sources, NEEDS[needs], num_negatives, 8)


def test_more_negatives_of_a_source_than_those_of_a_query_are_refused():
    classes = SourceConfig("s", "s.jsonl", conversion="class_by_example", num_negatives=15)
    says = r"data.sources\[s\].num_negatives must not exceed data.num_negatives, which is 7, got 15"
    refused(OptionError, says, check_negatives_asked_for, [classes], NEEDS["source"], 7, 8)
    check_negatives_asked_for([classes], NEEDS["source"], 15, 8)


def test_one_query_in_a_batch_or_a_loss_of_hard_negatives_alone_has_no_in_batch_negatives(tmp_path):
    (config,) = [SourceConfig("s", "s.jsonl")]
    says = r"source 's': has neither .*set data.num_negatives to 1 or more, or set a larger data.batch_size"
    refused(InputError, says, check_negatives_asked_for, [config], NEEDS["source"], 0, 1)
    check_negatives_asked_for([config], NEEDS["source"], 1, 1)
    hard = replace(NEEDS["on"], only_hard_negatives=True)
    says = "has no hard negatives, without which its loss is 0; .*, or set a contrastive_weight above 0"
    refused(InputError, says, check_negatives_asked_for, [config], hard, 0, 8)
    refused(InputError, says, check_negatives_found, [source(tmp_path, pairs(3))], hard, 7, 8)


def test_both_directions_without_in_batch_negatives_are_refused():
    both = replace(NEEDS["source"], compares_documents=True)
    alone, shared = SourceConfig("s", "s.jsonl", in_batch_negatives=False), SourceConfig("t", "t.jsonl")
    check_negatives_asked_for([alone, shared], both, 7, 8)
    says = "model.loss.directions has no effect if no source has in-batch negatives, got 'both'; set query_to_document"
    for sources, num_queries in (([alone], 8), ([shared], 1)):
        refused(OptionError, says, check_negatives_asked_for, sources, both, 7, num_queries)


def with_labels(folder, *labels, **options):
    rows = [row | {"label": label} for row, label in zip(pairs(len(labels)), labels, strict=True)]
    return [source(folder, rows, **options)]


@pytest.mark.parametrize("labels", [(1, 1), (True, True), (0, 1, None), ("True", "false"), ("1.0", "0.0"), (-1, 1)])
def test_labels_that_mark_matching_pairs_are_refused_with_a_way_out(labels, tmp_path):
    says = r"source 'source': its labels are .* marked which pairs match; every row is a match; remove rows that do not"
    for needs in NEEDS.values():
        refused(InputError, says, check_labels, with_labels(tmp_path, *labels), needs)
    check_labels(with_labels(tmp_path, *labels, columns={"label": None}), NEEDS["on"])


def test_a_single_label_of_pairs_is_refused_if_it_masks_in_batch_negatives(tmp_path):
    (one,) = with_labels(tmp_path, "a", "a ", None)
    says = "source 'source': all labelled rows have the label 'a', so none is a negative .*; set columns: {label: null}"
    refused(InputError, says, check_labels, [one], NEEDS["source"])
    for needs in (NEEDS["off"], replace(NEEDS["on"], masks_class=False)):
        check_labels([one], needs)


def test_the_share_of_in_batch_negatives_that_classes_mask_is_reported(tmp_path, caplog):
    needs = NEEDS["source"]
    check_labels(with_labels(tmp_path, *"aabb", None, None, None, None, None, None, name="few"), needs)
    expected = "source few: its 2 labels mask about 8% of its in-batch negatives; columns: {label: null} keeps them"
    assert caplog.messages == [expected]
    check_labels(with_labels(tmp_path, *"abcdefghijklmnopqrstuvwxyz", name="many"), needs)
    check_labels([source(tmp_path, labelled(3, 3), name="classes", conversion="class_by_example")], needs)
    assert len(caplog.messages) == 1


def test_the_only_source_must_not_have_one_query_for_all_rows(tmp_path):
    needs, rows = NEEDS["source"], [row | {"query": f"same{' ' * (i % 2)}"} for i, row in enumerate(pairs(9))]
    same = source(tmp_path, rows, name="same")
    says = "source 'same': all rows have the query 'same', so none is a negative of another; map the column"
    refused(InputError, says, check_negatives_found, [same], needs, 7, 8)
    check_negatives_found([same, source(tmp_path, pairs(3))], needs, 7, 8)
    check_negatives_found([same], replace(needs, masks_text=False), 7, 8)
    mined = source(tmp_path, [row | {"negatives": ["n"]} for row in rows], name="mined")
    check_negatives_found([mined], needs, 1, 8)
    refused(InputError, "all rows have the query", check_negatives_found, [mined], needs, 0, 8)


def test_an_unused_class_column_is_not_suggested_as_a_label(tmp_path, caplog):
    row = {**pairs(1)[0], "category": "c", "neg": "n", "pos_scores": [1]}
    warn_of_unused_columns(source(tmp_path, [row], columns={"query": "query"}), 7)
    says = "source source: columns not used: category, neg, pos_scores; to use one, map it: columns: {negatives: neg}"
    assert caplog.messages == [says]


def test_pairs_without_hard_or_in_batch_negatives_are_refused(tmp_path, caplog):
    off, rows = {"in_batch_negatives": False}, [{**pairs(1)[0], "negative": "n"}]
    lonely = source(tmp_path, pairs(3), name="lonely", **off)
    says = "source 'lonely': has neither .*give its records `negatives`, which `mine`"
    refused(InputError, says, check_negatives_found, [lonely], NEEDS["source"], 7, 8)
    triplets = source(tmp_path, rows, name="triplets", columns={"query": "query"}, **off)
    says = r"map them with columns: \{negatives: negative\}, or set in_batch_negatives"
    refused(InputError, says, check_negatives_found, [triplets], NEEDS["source"], 7, 8)
    check_negatives_found([source(tmp_path, rows, name="taken", **off)], NEEDS["source"], 7, 8)
    check_negatives_found([lonely], NEEDS["on"], 7, 8)
    check_negatives_found([source(tmp_path, pairs(3), name="in-batch")], NEEDS["source"], 7, 8)
    classes = source(tmp_path, labelled(3, 3), name="classes", conversion="class_by_example")
    check_negatives_found([classes], NEEDS["off"], 7, 8)
    # Records without negatives are counted.
    caplog.clear()
    some = source(tmp_path, graded(2), pairs(3), [{**pairs(1)[0], "negatives": ["plain"]}], **off)
    check_negatives_found([some], NEEDS["source"], 7, 8)
    assert caplog.messages == [
        "source source: 3 of 6 records have no negative, and without in-batch negatives they train nothing"
    ]


ASK, FIND = instruction_prompt("Answer"), instruction_prompt("Find")


def config(name, **options):
    return SourceConfig(name, "a.jsonl", **options)


ANSWER, SEARCH = {"instruction": "Answer"}, {"instruction": "Find"}
BOTH = {"instruction": ["Answer", "Find"]}
DOCUMENT = {"document_prompt": "d: "}
ROLES = {"query_prompt": "q: ", **DOCUMENT}


@pytest.mark.parametrize(
    ("sources", "given", "expected"),
    [
        # The prompts of one source are stored by name and role; of several, only shared prompts by role.
        ({"a": ANSWER | DOCUMENT}, {}, {"a": ASK, "query": ASK, "document": "d: "}),
        ({"a": ROLES, "b": ROLES}, {}, {"a": "q: ", "b": "q: ", "query": "q: ", "document": "d: "}),
        ({"a": ANSWER, "b": SEARCH}, {}, {"a": ASK, "b": FIND}),
        ({"a": ANSWER, "b": {}}, {}, {"a": ASK}),
        # Of several instructions the first is used.
        ({"a": BOTH, "b": BOTH}, {}, {"a": ASK, "b": ASK, "query": ASK}),
        ({"a": BOTH, "b": ANSWER}, {}, {"a": ASK, "b": ASK}),
        # A symmetric source uses the query prompt for documents.
        ({"a": SEARCH | {"symmetric": True}}, {}, {"a": FIND, "query": FIND, "document": FIND}),
        # An empty prompt is a prompt, and a missing one is not.
        ({"a": {"query_prompt": ""}}, {}, {"a": "", "query": ""}),
        ({"a": {"query_prompt": ""}, "b": {}}, {}, {"a": ""}),
        # Existing prompts take precedence, and a source named like a role adds none.
        ({"a": SEARCH}, {"query": "q: "}, {"a": FIND, "query": "q: "}),
        ({"query": SEARCH, "b": {}}, {}, {}),
        ({"a": {}, "b": {}}, {}, {}),
    ],
)
def test_the_settings_of_a_saved_model_include_the_prompts_of_its_sources(sources, given, expected):
    text = TextSettings(query_max_length=9, prompts=given)
    found = with_source_prompts(text, [config(name, **options) for name, options in sources.items()])
    assert found == replace(text, prompts=expected)


def test_prompts_that_encoding_does_not_use_by_default_are_warned_of(caplog):
    differing = [config("a", **ANSWER), config("b", **SEARCH)]
    passages, plain = config("a", document_prompt="passage: "), config("b")
    for sources, given, has_instructions, expected in (
        (differing, {}, False, ["query prompts"]),
        (differing, {}, True, ["query prompts"]),
        (differing, {"query": ASK}, True, []),
        ([plain], {}, False, []),
        ([plain], {}, True, ["records have instructions"]),
        ([passages], {}, False, []),
        ([passages, plain], {}, False, ["document prompts"]),
        ([passages, plain], {"document": ""}, False, []),
    ):
        caplog.clear()
        text = with_source_prompts(TextSettings(prompts=given), sources)
        warn_of_unnamed_prompts(text, sources, has_instructions)
        assert [part in message for part, message in zip(expected, caplog.messages, strict=True)] == [True] * len(
            expected
        )


@pytest.mark.parametrize(
    ("options", "given", "limit"),
    [
        ({"instruction": ["Find", "f o x " * 4]}, {}, "query_max_length"),
        ({"query_prompt": "f o x " * 4}, {}, "query_max_length"),
        ({"document_prompt": "f o x " * 4}, {}, "document_max_length"),
        ({"query_prompt": "f o x " * 4, "symmetric": True}, {}, "document_max_length"),
        ({}, {"query": "f o x " * 4}, "query_max_length"),
        ({}, {"document": "f o x " * 4}, "document_max_length"),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_before_a_text_is_read(options, given, limit):
    sources = [config("short", query_prompt="q: "), config("long", **options)]
    for changes in ({}, {limit: 14}):
        lengths = {"query_max_length": 64, "document_max_length": 64} | changes
        tokenizer = TextTokenizer(wordpiece_tokenizer(), TextSettings(**lengths, prompts=given))
        if not changes:
            check_prompts(tokenizer, sources)
    refused(OptionError, rf"data\.text\.{limit} must exceed the \d+ tokens of the", check_prompts, tokenizer, sources)
