"""The tables of the NV-Embed paper, as data: complete, in agreement with each other, honest about sources."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from embeddings.evaluation.instructions import Instructions

CONFIGS = Path(__file__).parents[2] / "lightning_configs"
DATA = CONFIGS / "data"

# Table 12's last column in thousands, typed from the paper a second time.
SAMPLES_K = {
    "arguana": 16, "nli": 270, "paq": 500, "msmarco": 500, "squad": 87, "stackexchange": 80, "nq": 100, "hotpotqa": 170,
    "fever": 140, "fiqa": 5, "bioasq": 2.4, "hover": 17, "nfcorpus": 3.6, "miracl": 2, "mrtydi": 2, "scifact": 0.9,
    "sts12": 1.8, "sts22": 0.3, "stsbenchmark": 2.7,
    "amazon_counterfactual": 6, "amazon_polarity": 20, "amazon_reviews": 40, "banking77": 10, "emotion": 16, "imdb": 24,
    "mtop_intent": 15, "mtop_domain": 15, "massive_intent": 11, "massive_scenario": 11, "toxic_conversations": 50,
    "tweet_sentiment": 27,
    "arxiv_p2p": 50, "arxiv_s2s": 50, "biorxiv_p2p": 15, "biorxiv_s2s": 15, "medrxiv_p2p": 2.3, "medrxiv_s2s": 2.3,
    "reddit_s2s": 50, "reddit_p2p": 40, "stackexchange_s2s": 50, "stackexchange_p2p": 40, "twenty_newsgroups": 1.7,
}  # fmt: skip
NUM_SETS = {"retrieval": 16, "sts": 3, "classification": 12, "clustering": 11}
# §5.2.4: the classification sets of Table 5.
BY_EXAMPLE = {"emotion", "massive_intent", "massive_scenario", "mtop_domain", "mtop_intent"}
NOT_CONFIRMED = {"arguana", "stackexchange", "bioasq"}
# Table 12 prints the instruction of Medrxiv for these four; Table 13 has theirs.
MISPRINTED = {
    "reddit_s2s": "RedditClustering",
    "reddit_p2p": "RedditClusteringP2P",
    "stackexchange_s2s": "StackExchangeClustering",
    "stackexchange_p2p": "StackExchangeClusteringP2P",
}
MACHINE_PATH = re.compile(r"(?<![\w}.)])/(home|work|root|tmp|mnt|data|Users)\b|s3://|gs://|[A-Z]:\\")


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that comes twice, which YAML readers otherwise resolve in silence."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(keys) == len(set(keys)), f"a key comes twice: {keys}"
    return {key: loader.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value, strict=True)}


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read(path: Path) -> dict[str, Any]:
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    assert isinstance(content, dict)
    return content


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, Any]]:
    rows = read(DATA / "nv_embed_tables.yaml")["datasets"]
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows)
    return by_name


@pytest.fixture(scope="module")
def evaluation() -> dict[str, str]:
    return Instructions.read("nv-embed").texts


def sources(stage: int) -> dict[str, dict[str, Any]]:
    config = read(DATA / f"nv_embed_stage{stage}.yaml")
    assert set(config) == {"data"}
    listed = config["data"]["init_args"]["sources"]
    by_name = {source["name"]: source for source in listed}
    assert len(by_name) == len(listed)
    return by_name


def alternates(instruction: str | list[str]) -> list[str]:
    return [instruction] if isinstance(instruction, str) else instruction


def test_table_12_is_complete_and_has_the_printed_sizes(table: dict[str, dict[str, Any]]) -> None:
    assert len(table) == len(SAMPLES_K) == sum(NUM_SETS.values()) == 42
    assert {name: row["num_samples"] for name, row in table.items()} == {
        name: round(1000 * thousands) for name, thousands in SAMPLES_K.items()
    }
    for task, count in NUM_SETS.items():
        assert sum(row["task"] == task for row in table.values()) == count, task


def test_sizes_add_up_to_the_draws_of_the_two_stages(table: dict[str, dict[str, Any]]) -> None:
    synthetic = read(DATA / "nv_embed_tables.yaml")["synthetic"]
    retrieval = sum(row["num_samples"] for row in table.values() if row["task"] == "retrieval")
    everything = sum(row["num_samples"] for row in table.values()) + synthetic["num_samples"]
    assert retrieval == pytest.approx(1.90e6, rel=5e-3)
    assert everything == pytest.approx(2.58e6, rel=5e-3)
    assert sum(synthetic["groups"].values()) == synthetic["num_samples"] == 120_000
    # Batch size 128: stage 1 passes over its data 1.27 times (1.35 without the synthetic share), stage 2 0.89 times.
    assert 20_000 * 128 / (retrieval + 120_000) == pytest.approx(1.27, abs=0.01)
    assert 18_000 * 128 / everything == pytest.approx(0.89, abs=0.01)


def test_every_source_is_confirmed_or_says_that_it_is_not(table: dict[str, dict[str, Any]]) -> None:
    for name, row in table.items():
        source = row["source"]
        assert isinstance(source["confirmed"], bool), name
        assert isinstance(source["named_by_paper"], bool), name
        if source["confirmed"]:
            assert source["repository"], name
            assert source["evidence"], name
        else:
            assert row["remark"], name
    assert {name for name, row in table.items() if not row["source"]["confirmed"]} == NOT_CONFIRMED


def test_every_set_says_how_it_is_labelled_and_since_when_it_is_used(table: dict[str, dict[str, Any]]) -> None:
    for name, row in table.items():
        assert row["instructions"], name
        assert all(text == text.strip() != "" for text in row["instructions"]), name
        labelling = row["labelling"]
        if row["task"] in ("retrieval", "sts"):
            assert labelling == ("sts" if row["task"] == "sts" else "pairs"), name
        else:
            by_example = row["task"] == "clustering" or name in BY_EXAMPLE
            assert (labelling == "class_by_example") == by_example, name
    count = [row["labelling"] for row in table.values()].count
    assert (count("class_by_example"), count("binary_by_label"), count("class_by_label")) == (16, 4, 3)
    added = {name for name, row in table.items() if row["added"] == "S2"}
    assert added == {"hover", "scifact", "nfcorpus", "miracl", "mrtydi"}
    assert all(row["added"] == "S0" for name, row in table.items() if name not in added)


def test_stage_1_trains_on_all_retrieval_sets_and_no_others(table: dict[str, dict[str, Any]]) -> None:
    assert set(sources(1)) == {name for name, row in table.items() if row["task"] == "retrieval"}
    assert not any("in_batch_negatives" in source for source in sources(1).values())


def test_stage_2_trains_on_everything_without_in_batch_negatives(table: dict[str, dict[str, Any]]) -> None:
    stage_2 = sources(2)
    assert set(stage_2) == set(table)
    assert all(source["in_batch_negatives"] is False for source in stage_2.values())
    symmetric = {name for name, source in stage_2.items() if source.get("symmetric")}
    assert symmetric == {name for name, row in table.items() if row["task"] == "sts"}


@pytest.mark.parametrize("stage", [1, 2])
def test_configs_hold_the_sizes_instructions_and_labelling_of_the_table(
    stage: int, table: dict[str, dict[str, Any]]
) -> None:
    compared = 0
    for name, source in sources(stage).items():
        row = table[name]
        assert source["max_rows"] == row["num_samples"], name
        assert alternates(source["instruction"]) == row["instructions"], name
        # A file of mined STS records already holds both directions of each pair.
        expected = "pairs" if row["labelling"] == "sts" else row["labelling"]
        assert source.get("conversion", "pairs") == expected, name
        compared += 1
    assert compared == (16 if stage == 1 else 42)


@pytest.mark.parametrize("stage", [1, 2])
def test_configs_read_from_the_hub_at_a_commit_or_below_the_data_root(
    stage: int, table: dict[str, dict[str, Any]]
) -> None:
    hub = {name: source for name, source in sources(stage).items() if source["path"].startswith("hub:")}
    assert len(hub) == (0 if stage == 1 else 10)
    for name, source in hub.items():
        public = table[name]["source"]
        assert public["confirmed"], name
        assert source["path"] == f"hub:{public['repository']}", name
        assert source.get("subset") == public.get("subset"), name
        assert source["revision"] == public["revision"], name
        assert re.fullmatch(r"[0-9a-f]{40}", source["revision"]), name
        renamed = {field: column for field, column in public["columns"].items() if field != column}
        assert source.get("columns", {}) == renamed, name
    for name, source in sources(stage).items():
        if name not in hub:
            assert source["path"] == f"${{EMBED_TRAIN_DATA}}/nv_embed/{name}.parquet"


@pytest.mark.parametrize("stage", [1, 2])
def test_configs_name_the_public_source_above_each_set(stage: int, table: dict[str, dict[str, Any]]) -> None:
    text = (DATA / f"nv_embed_stage{stage}.yaml").read_text(encoding="utf-8")
    notes = {
        name: (where, said)
        for where, said, name in re.findall(r"# public source: (.+?) \(([a-z ]+)\)\n +- name: (\w+)\n", text)
    }
    assert set(notes) == set(sources(stage))
    for name, (where, said) in notes.items():
        public = table[name]["source"]
        assert where.split(" [")[0] == (public["repository"] or "none found"), name
        assert said == ("confirmed" if public["confirmed"] else "not confirmed"), name


def test_misprinted_instructions_are_replaced_by_those_of_table_13(
    table: dict[str, dict[str, Any]], evaluation: dict[str, str]
) -> None:
    printed = {name: row["printed_instruction"] for name, row in table.items() if "printed_instruction" in row}
    assert set(printed) == set(MISPRINTED)
    for name, task in MISPRINTED.items():
        assert printed[name] == table["medrxiv_p2p"]["instructions"][0]
        assert table[name]["instructions"] == [evaluation[task]]


def test_classification_and_clustering_train_and_evaluate_with_one_instruction(
    table: dict[str, dict[str, Any]], evaluation: dict[str, str]
) -> None:
    compared = 0
    for name, row in table.items():
        if row["task"] in ("classification", "clustering"):
            task = MISPRINTED.get(name, row["paper_name"].replace("-", ""))
            assert row["instructions"] == [evaluation[task]], name
            compared += 1
    assert compared == 23


def test_table_13_covers_the_56_tasks_of_mteb(evaluation: dict[str, str]) -> None:
    reranking = {"AskUbuntuDupQuestions", "MindSmallReranking", "SciDocsRR", "StackOverflowDupQuestions"}
    pairs = {"SprintDuplicateQuestions", "TwitterSemEval2015", "TwitterURLCorpus"}
    classification = {task for task in evaluation if task.endswith("Classification")}
    clustering = {task for task in evaluation if "Clustering" in task}
    groups = [{"STS"}, reranking, pairs, classification, clustering, {"SummEval"}]
    retrieval = set(evaluation).difference(*groups)
    assert [len(group) for group in groups] == [1, 4, 3, 12, 11, 1]
    assert all(group <= set(evaluation) for group in groups)
    assert len(retrieval) == 15
    # One entry stands for the ten tasks of similarity.
    assert len(evaluation) + 9 == 56
    assert evaluation["STS"] == "Retrieve semantically similar text."
    assert all(text == " ".join(text.split()) != "" for text in evaluation.values())


def check_texts(files: list[Path]) -> None:
    """Every config begins with a comment that says what it is, has short lines, and names no place of one machine."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert text.startswith("# "), file.name
        assert not MACHINE_PATH.search(text), file.name
        assert max(map(len, text.splitlines())) <= 120, file.name


def test_no_config_holds_a_path_of_one_machine_or_a_line_too_long() -> None:
    files = sorted(CONFIGS.glob("*/nv_embed_*.yaml"))
    assert len(files) == 7
    check_texts(files)
