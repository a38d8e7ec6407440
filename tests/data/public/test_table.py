"""The table of public data sets: complete for every recipe, and consistent with the data set cards."""

import re
from collections import Counter

from embeddings.cli.configs import read_recipes
from embeddings.common import OptionError
from embeddings.data.public import KINDS, PublicTable
from tests.helpers.refusals import refused

TABLE = PublicTable.read()
# The columns of each data set as its card lists them, typed from the cards a second time.
CARDS = {
    "nomic-ai/nomic-embed-unsupervised-data": "query document dataset shard",
    "cfli/bge-full-data": "query pos neg category type prompt pos_scores neg_scores",
    "cfli/bge-e5data": "query pos neg category type prompt pos_scores neg_scores",
    "sentence-transformers/quora-duplicates": "anchor positive",
    "sentence-transformers/trivia-qa": "query answer",
    "intfloat/multilingual_cc_news": "title maintext url date_publish",
    "castorini/mr-tydi": "query_id query positive_passages negative_passages",
}


STAGES = {"nv-embed": 2, "mgh": 1, "moe": 2, "cde": 2}


def test_every_source_of_every_data_config_is_in_the_table_and_no_other():
    wanted = {key for stage in TABLE.stages for key in stage.wanted()}
    assert Counter(stage.recipe for stage in TABLE.stages) == STAGES
    assert len(wanted) == 42 + 14 + 39 + 22 + 4
    assert {source.key for source in TABLE.sources if source.collection is None} == wanted
    assert {source.key for source in TABLE.sources} == wanted
    recipes = read_recipes()
    assert all(re.fullmatch(r"\w+/\w+", key) for key in wanted)
    for stage in TABLE.stages:
        assert f"lightning_configs/data/{stage.config}.yaml" in recipes[stage.run]["configs"].split()


def test_few_sources_cannot_be_fetched_and_these_have_a_reason():
    left_out = {source.key: source.why_left_out for source in TABLE.sources if source.why_left_out}
    own = {key for key in left_out if TABLE.place_of(key, None).why_left_out}
    assert {key for key in own if TABLE.place_of(key, None).kind is None} == {
        *("nv_embed/bioasq", "nv_embed/hover", "nv_embed/reddit_s2s", "nv_embed/stackexchange_s2s")
    }
    assert own - {key for key in own if TABLE.place_of(key, None).kind is None} == {
        *("nv_embed/arguana", "nv_embed/stackexchange"),
        *("moe_finetune/miracl_id", "moe_finetune/miracl_ja", "moe_finetune/miracl_ko"),
    }
    for source in TABLE.sources:
        assert source.evidence or not source.confirmed, source.key


def test_columns_are_those_of_the_cards():
    compared = 0
    for source in TABLE.sources:
        if source.repository in CARDS:
            names = [one for names in source.columns.values() for one in ([names] if isinstance(names, str) else names)]
            assert set(names) <= set(CARDS[source.repository].split()), source.key
            compared += 1
    assert compared > 70


def test_the_columns_fit_the_kind():
    needed = {
        "pairs": {"query", "positive"},
        "first_line": {"text"},
        "labelled": {"text", "label"},
        "first_label": {"text", "label"},
        "scored": {"sentence1", "sentence2", "score"},
        "beir": set(),
    }
    for source in TABLE.sources:
        if source.kind is None:
            assert source.note, source.key
            continue
        extra = {"negatives"} if source.kind == "pairs" else set()
        assert needed[source.kind] <= set(source.columns) <= needed[source.kind] | extra, source.key
        assert isinstance(source.columns.get("label", ""), str), source.key
    keys = [(source.key, source.collection) for source in TABLE.sources]
    assert len(set(keys)) == len(keys)


def test_a_kind_writes_what_the_data_config_reads():
    """A file of labelled texts for a conversion by class, records or scored pairs for the others."""
    read_as = {"pairs": {"pairs", "beir", "first_line", "scored"}}
    labelled = {"labelled", "first_label"}
    compared = 0
    for stage in TABLE.stages:
        for key, config in stage.wanted().items():
            place = TABLE.place_of(key, None)
            if place.kind:
                assert place.kind in read_as.get(config.conversion, labelled), key
                assert config.columns == {}, key
                compared += 1
    assert compared == 14 + 38 + 14 + 39 + 22 + 4
    assert set(KINDS) == {source.kind for source in TABLE.sources if source.kind}


def test_an_unknown_stage_is_refused_and_a_collection_replaces_the_sources_that_it_contains():
    assert [stage.stage for stage in TABLE.stages_of("moe", None)] == ["pretrain", "finetune"]
    refused(OptionError, "stage must be 1 or 2, got '3'", TABLE.stages_of, "nv-embed", "3")
    refused(OptionError, "has no effect on mgh, which has one stage", TABLE.stages_of, "mgh", "1")
    assert TABLE.place_of("nv_embed/fever", "bge-full-data").split == "fever"
    assert TABLE.place_of("nv_embed/fever", None).repository == "mteb/fever"
    assert TABLE.place_of("nv_embed/scifact", "bge-full-data").repository == "mteb/scifact"
    assert TABLE.collections(["nv_embed/fever", "mgh/fever"]) == ["bge-full-data"]
    assert TABLE.collections(["mgh/fever"]) == []
