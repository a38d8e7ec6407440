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
    MINE,
    Case,
    Make,
    both,
    copied,
    rows,
    run,
    table,
)
from tests.reliability.texts import conversion, source

GOOD = {"query": "pad sequences", "positive": "the pad"}
SUSPECT = "mend the row, or set suspect_rows: leave_out (or keep)"


def pairs(**fields: object) -> Make:
    """A good record, and one with these fields."""
    return rows("pairs.jsonl", GOOD, {**GOOD, **fields})


def judged(*lines: str) -> Make:
    """The evaluation folder with these judgments."""
    text = "query-id\tcorpus-id\tscore\n" + "".join(f"{line}\n" for line in lines)
    return copied("eval", lambda folder: (folder / "qrels.tsv").write_text(text))


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


def level(value: object) -> Make:
    """A record whose negative has this level."""
    return pairs(negatives=[{"text": "the fox", "level": value}])


TWO = ({"text": "a", "label": "one"}, {"text": "b", "label": "two"}, {"text": "c", "label": "two"})
CASES = [
    *table(
        FILTER,
        {
            "a record without positives": (pairs(positive=[]), "pairs.jsonl:2: positive is an empty list"),
            "a positive that is the query": (
                pairs(positive="pad sequences"),
                f"pairs.jsonl:2: a positive is the query itself; {SUSPECT}",
            ),
            "one of several positives is the query": (
                pairs(positive=["a", "pad sequences "]),
                f"pairs.jsonl:2: a positive is the query itself; {SUSPECT}",
            ),
            "a negative that is the positive": (
                pairs(negatives=["a", "the pad"]),
                f"pairs.jsonl:2: a negative is also a positive; {SUSPECT}",
            ),
            "a negative that is the query": (
                pairs(negatives=["pad sequences"]),
                f"pairs.jsonl:2: a negative is the query itself; {SUSPECT}",
            ),
            "a level of 0": (level(0), "pairs.jsonl:2: negatives[0].level is 0, expected a whole number from 1"),
            "a level of 5": (level(5), "pairs.jsonl:2: negatives[0].level is 5, expected a whole number from 1"),
            "a level in quotes": (level("1"), "pairs.jsonl:2: negatives[0].level is '1', expected a whole number"),
            "a level that is true": (level(True), "pairs.jsonl:2: negatives[0].level is True, expected a whole number"),
            "a negative without its level": (
                pairs(negatives=[{"text": "a"}]),
                "pairs.jsonl:2: negatives[0].level is None",
            ),
            "negatives with and without levels": (
                pairs(negatives=["a", {"text": "b", "level": 1}]),
                "pairs.jsonl:2: negatives[1] is an object, expected text",
            ),
            "levels in one record alone": (
                rows("pairs.jsonl", {**GOOD, "negatives": ["a"]}, {**GOOD, "negatives": [{"text": "b", "level": 1}]}),
                "source 'input': some negatives have a level and others have none",
            ),
        },
    ),
    Case(
        "a negative that is the positive but for spaces",
        pairs(negatives=[" the pad\n"]),
        CLUSTER,
        f"pairs.jsonl:2: a negative is also a positive; {SUSPECT}",
    ),
    Case(
        "records that are all suspect",
        rows("pairs.jsonl", {**GOOD, "negatives": ["the pad"]}),
        FILTER + " --suspect-rows leave_out",
        "source 'input': every row is suspect and left out",
    ),
    *table(
        FIT,
        {
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
            "two classes with one text each, twice": (
                conversion("class_by_example", *TWO[:2], *TWO[:2]),
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
            "texts of labels that are not there": (
                conversion("class_by_label", *TWO, label_texts={"three": "c"}),
                "label_texts",
            ),
            "scores of which none is high": (
                conversion("sts", {"sentence1": "a", "sentence2": "b", "score": 0.9}),
                "source 'pairs': no pair reaches the score 4 (the highest is 0.9)",
            ),
            "fewer records than a batch": (
                both(several(3), run()),
                "data.batch_size must not exceed the 3 training rows",
            ),
            "clusters of another source": (both(several(12), clustered_on(lambda folder: None)), "clusters"),
            "vectors of another source": (
                lambda place: both(
                    several(12),
                    source(surrogate_vectors=str(place.world.path("clusters").with_name("clusters.vectors"))),
                )(place),
                "clusters.vectors",
            ),
        },
    ),
    Case(
        "more clusters than records",
        pairs(),
        CLUSTER.replace("clusters 2", "clusters 3"),
        "num_clusters must not exceed the 2 rows, got 3",
    ),
    Case(
        "fewer documents than negatives",
        pairs(positive="another"),
        MINE,
        "2 different documents, too few for 2 negatives",
    ),
    Case(
        "records without the language to compare in",
        both(several(3)),
        FILTER + " --model MODEL --segment-by language",
        "pairs.jsonl:1: the record has no language",
    ),
    *table(
        ENCODE,
        {
            "an id twice in a corpus": (
                rows("corpus.jsonl", {"_id": "a", "text": "b"}, {"_id": "a", "text": "c"}),
                "corpus.jsonl:2: the id 'a' occurs a second time",
            ),
            "an id twice in a corpus, as number and text": (
                rows("corpus.jsonl", {"_id": 2**33, "text": "b"}, {"_id": str(2**33), "text": "c"}),
                "corpus.jsonl:2: the id '8589934592' occurs a second time",
            ),
            "an id that is the number of a row before": (
                rows("corpus.jsonl", {"text": "b"}, {"_id": "0", "text": "c"}),
                "corpus.jsonl:2: the id '0' occurs a second time",
            ),
            "an id that is null": (
                rows("corpus.jsonl", {"_id": None, "text": "a"}),
                "corpus.jsonl:1: field '_id' is null",
            ),
            "an id that is a fraction": (
                rows("corpus.jsonl", {"_id": 1.5, "text": "a"}),
                "corpus.jsonl:1: field '_id' is a number",
            ),
        },
    ),
    *table(
        EVALUATE,
        {
            "an id twice among queries": (
                copied("eval", lambda d: (d / "queries.jsonl").write_text('{"_id": 1, "text": "a"}\n' * 2)),
                "eval/queries.jsonl:2: the id '1' occurs a second time",
            ),
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
    ),
    Case(
        "judgments of other queries than the records'",
        both(pairs(), judged("q0\td0\t1", "q0\td1\t2")),
        [*MINE.split()[:-2], "--levels", "grades", "--judgments", "eval/qrels.tsv"],
        "eval/qrels.tsv: judges no document for any query of the source",
    ),
]
