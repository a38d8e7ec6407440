import jsonargparse
import pytest

from embeddings.common import OptionError, TextSettings
from embeddings.data import SourceConfig
from embeddings.data.sources import check_names


class Holder:
    def __init__(self, sources: list[SourceConfig]) -> None:
        self.sources = sources


YAML = """
data:
  sources:
  - name: msmarco
    path: hub:org/msmarco
    split: train
    revision: main
    instruction: [find passages, answer the question]
    max_rows: 500
  - name: files
    path: [a.jsonl, b.parquet]
    columns: {query: question}
    weight: 2
  - name: toxic
    path: $DATA/toxic.jsonl
    conversion: binary_by_label
    label_texts: {0: harmless, 1: toxic}
    in_batch_negatives: false
"""


def test_a_list_of_sources_is_read_from_yaml():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Holder, "data")
    sources = parser.instantiate(parser.parse_string(YAML)).data.sources
    assert [source.name for source in sources] == ["msmarco", "files", "toxic"]
    assert sources[0].is_hub
    assert sources[0].query_prompts(TextSettings()) == (
        "Instruct: find passages\nQuery: ",
        "Instruct: answer the question\nQuery: ",
    )
    assert sources[1].path == ["a.jsonl", "b.parquet"]
    assert sources[1].weight == 2.0
    assert not sources[2].in_batch_negatives


def test_prompts_are_the_instruction_or_the_prefix_or_nothing():
    assert SourceConfig("a", "a").query_prompts(TextSettings()) == ("",)
    assert SourceConfig("a", "a", query_prompt="query: ").query_prompts(TextSettings()) == ("query: ",)
    assert SourceConfig("a", "a", instruction="find").query_prompts(TextSettings()) == ("Instruct: find\nQuery: ",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": " "}, "data.sources.name must not be empty"),
        ({"path": ""}, "path must not be empty"),
        ({"path": []}, "path must not be empty"),
        ({"path": ["a", ""]}, "path must not be empty"),
        ({"path": "hub:"}, "path is no name of a Hub data set"),
        ({"path": "hub:a/b/c"}, "path is no name of a Hub data set"),
        ({"path": ["hub:a/b"]}, "path lists a Hub data set"),
        ({"split": "train"}, "split has no meaning for files"),
        ({"subset": "en"}, "subset has no meaning for files"),
        ({"revision": "main"}, "revision has no meaning for files"),
        ({"columns": {"text": "a"}}, "columns may map only query, positive"),
        ({"conversion": "sts", "columns": {"query": "a"}}, "columns may map only sentence1, sentence2, score"),
        ({"instruction": ""}, "instruction must not be empty"),
        ({"instruction": []}, "instruction must not be empty"),
        ({"instruction": ["a", " "]}, "instruction must not be empty"),
        ({"instruction": "a", "query_prompt": "b"}, "query_prompt excludes instruction"),
        ({"symmetric": True}, "symmetric needs an instruction or a query_prompt"),
        ({"symmetric": True, "instruction": "a", "document_prompt": "d"}, "document_prompt excludes symmetric"),
        ({"weight": 0.0}, "weight must be a finite number > 0"),
        ({"weight": float("nan")}, "weight must be a finite number > 0"),
        ({"weight": float("inf")}, "weight must be a finite number > 0"),
        ({"max_rows": 0}, "max_rows must be >= 1"),
        ({"licence": " "}, "licence must not be empty"),
        ({"num_negatives": 0, "conversion": "class_by_example"}, "num_negatives must be >= 1"),
        ({"num_negatives": 7}, "num_negatives has no effect on conversion pairs"),
        ({"num_negatives": 1, "conversion": "binary_by_label"}, "num_negatives has no effect"),
        ({"single_text_classes": "leave_out"}, "single_text_classes has no effect on conversion pairs"),
        ({"min_score": 4.0}, "min_score has no effect on conversion pairs"),
        ({"min_score": float("nan"), "conversion": "sts"}, "min_score must be finite"),
        ({"label_texts": {"0": "no"}}, "label_texts has no effect on conversion pairs"),
        ({"label_texts": {"0": " "}, "conversion": "binary_by_label"}, "label_texts must not hold an empty text"),
    ],
)
def test_an_impossible_or_idle_option_is_refused_by_name(options, message):
    with pytest.raises(OptionError) as error:
        SourceConfig(**{"name": "mine", "path": "a.jsonl", **options})
    assert message in str(error.value)
    assert str(error.value).startswith("data.sources")
    assert "\n" not in str(error.value)


def test_two_sources_of_one_name_are_refused():
    check_names(["a", "b"])
    with pytest.raises(OptionError, match=r"data\.sources must have different names, got 'a'; rename one"):
        check_names(["a", "b", "a"])
    with pytest.raises(OptionError, match=r"data\.validation_sources must have different names, got 'b'"):
        check_names(["b", "b"], "validation_sources")
