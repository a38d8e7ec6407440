"""Rows that contradict themselves, each other, or what else they are used with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.reliability.cases import (
    CLUSTER,
    ENCODE,
    EVALUATE,
    FILTER,
    FIT,
    GOOD,
    MINE,
    Make,
    both,
    cases,
    copied,
    judged,
    pairs,
    rows,
    run,
)
from tests.reliability.texts import conversion, source

REFUSE = "--suspect-rows refuse"
SUSPECT = "mend them, or set suspect_rows: leave_out (or keep)"


def several(count: int, **fields: object) -> Make:
    """So many records that differ in their texts."""
    return rows("pairs.jsonl", *({"query": f"q {row}", "positive": f"p {row}", **fields} for row in range(count)))


def curriculum(config: dict[str, Any]) -> None:
    """Train on the levels of negatives."""
    config["data"]["init_args"]["sampler"] = {"class_path": "embeddings.data.CurriculumBatchSampler"}
    config["data"]["init_args"]["batch_size"] = 2
    config["trainer"]["max_steps"] = 4


def clustered(config: dict[str, Any]) -> None:
    """Train on clusters."""
    arguments = {"clusters": {"pairs": "clusters"}}
    sampler = {"class_path": "embeddings.data.ClusteredBatchSampler", "init_args": arguments}
    config["data"]["init_args"]["sampler"] = sampler


def clustered_on(damage: Callable[[Path], object]) -> Make:
    """A run on a damaged copy of the clusters of the world's pairs."""
    return both(copied("clusters", damage), run(clustered))


TWO = ({"text": "a", "label": "one"}, {"text": "b", "label": "two"}, {"text": "c", "label": "two"})
CASES = cases(
    {
        FILTER: {
            "a record without positives": (pairs(positive=[]), "pairs.jsonl:2: positive is an empty list"),
            "a level of 5": (
                pairs(negatives=[{"text": "the fox", "level": 5}]),
                "pairs.jsonl:2: negatives[0].level is 5, expected a whole number from 1",
            ),
            "a negative without its level": (
                pairs(negatives=[{"text": "a"}]),
                "pairs.jsonl:2: negatives[0].level is None",
            ),
            "levels in one record alone": (
                rows("pairs.jsonl", {**GOOD, "negatives": ["a"]}, {**GOOD, "negatives": [{"text": "b", "level": 1}]}),
                "source 'input': some negatives have a level and others have none",
            ),
        },
        f"{FILTER} {REFUSE}": {
            "a positive that is the query": (
                pairs(positive="pad sequences"),
                f"1 row contradicts itself: pairs.jsonl:2 (a positive is the query itself); {SUSPECT}",
            ),
            "a negative that is the positive": (
                pairs(negatives=["a", "the pad"]),
                f"1 row contradicts itself: pairs.jsonl:2 (a negative is also a positive); {SUSPECT}",
            ),
        },
        f"{CLUSTER} {REFUSE}": {
            "a negative that is the positive but for spaces": (
                pairs(negatives=[" the pad\n"]),
                f"pairs.jsonl:2 (a negative is also a positive); {SUSPECT}",
            ),
        },
        FIT: {
            "a curriculum without levels": (
                both(several(8, negatives=["a", "b"]), run(curriculum)),
                "data.sampler needs negatives with levels",
            ),
            "one class": (
                conversion("class_by_label", {"text": "a", "label": "x"}, {"text": "b", "label": "x"}),
                "source 'pairs': all rows have the label 'x'",
            ),
            "a class with one example": (
                conversion("class_by_example", *TWO),
                "pairs.jsonl:1: the class 'one' has only one text",
            ),
            "three classes for a yes or no": (
                conversion("binary_by_label", *TWO, {"text": "d", "label": "three"}),
                "source 'pairs': it has 3 labels, expected two",
            ),
            "labels that are numbers without a text": (
                conversion("class_by_label", {"text": "a", "label": 1}, {"text": "b", "label": 2}),
                "label",
            ),
            "scores of which none is high": (
                conversion("sts", {"sentence1": "a", "sentence2": "b", "score": 0.9}),
                "source 'pairs': no pair reaches the score 4 (the highest is 0.9)",
            ),
            "fewer records than a batch": (
                both(several(3), run()),
                "data.batch_size must not exceed the 3 training rows",
            ),
            "clusters that are not there": (run(clustered), "clusters/manifest.json: no manifest"),
            "clusters of another source": (both(several(12), clustered_on(lambda folder: None)), "clusters"),
            "vectors of another source": (
                lambda place: both(
                    several(12),
                    source(surrogate_vectors=str(place.world.path("clusters").with_name("clusters.vectors"))),
                )(place),
                "clusters.vectors",
            ),
        },
        CLUSTER.replace("clusters 2", "clusters 3"): {
            "more clusters than records": (pairs(), "num_clusters must not exceed the 2 rows, got 3"),
        },
        MINE: {
            "fewer documents than negatives": (
                pairs(positive="another"),
                "2 different documents, too few for 2 negatives",
            ),
        },
        ENCODE: {
            "an id twice in a corpus": (
                rows("corpus.jsonl", {"_id": "a", "text": "b"}, {"_id": "a", "text": "c"}),
                "corpus.jsonl:2: the id 'a' occurs a second time",
            ),
            "an id that is null": (
                rows("corpus.jsonl", {"_id": None, "text": "a"}),
                "corpus.jsonl:1: field '_id' is null",
            ),
        },
        EVALUATE: {
            "a judgment of no query": (
                judged("q0\td0\t1", "q99\td0\t1"),
                "eval/qrels.tsv:3: no query has the id 'q99'",
            ),
            "a judgment of no document": (judged("q0\td99\t1"), "eval/qrels.tsv:2: no document has the id 'd99'"),
            "a pair judged twice in two ways": (
                judged("q0\td0\t1", "q0\td0\t0"),
                "eval/qrels.tsv:3: 'q0' and 'd0' were judged 1 above, here 0",
            ),
        },
        (
            *MINE.split()[:-2],
            "--levels",
            "grades",
            "--judgments",
            "eval/qrels.tsv",
        ): {
            "judgments of other queries than the records'": (
                both(pairs(), judged("q0\td0\t1", "q0\td1\t2")),
                "eval/qrels.tsv: judges no document for any query of the source",
            ),
        },
    }
)
