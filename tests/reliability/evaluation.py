"""Evaluation data that nothing can be scored on."""

from collections.abc import Callable
from pathlib import Path

from tests.reliability.cases import EVALUATE, FILTER, Make, both, cases, copied, judged, put, rows


def damaged(change: Callable[[Path], object]) -> Make:
    """The evaluation folder, damaged."""
    return copied("eval", change)


def tested(*values: object) -> Make:
    """A folder with these rows to test on."""
    return rows("eval/test.jsonl", *values)


def pair(score: object) -> dict[str, object]:
    """Two sentences with a score."""
    return {"sentence1": "a", "sentence2": "b", "score": score}


LABELLED = ({"text": "a", "label": "one"}, {"text": "b", "label": "two"})
GOOD = copied("eval", lambda folder: None)
CASES = cases(
    {
        EVALUATE: {
            "empty judgments": (
                damaged(lambda folder: (folder / "qrels.tsv").write_text("")),
                "eval/qrels.tsv: holds no judgment",
            ),
            "judgments of which none is relevant": (
                judged("q0\td0\t0", "q1\td1\t-1"),
                "eval/qrels.tsv: no document is relevant to any query",
            ),
            "a judgment that is NaN": (
                judged("q0\td0\tnan"),
                "eval/qrels.tsv:2: the score must be a number, got 'nan'",
            ),
            "judgments with a column too many": (
                judged("q0\t0\td0\t1\t1"),
                "eval/qrels.tsv:2: has 5 columns",
            ),
            "a judgment of a very long id": (
                judged(f"q0\t{'d' * 5000}\t1"),
                "eval/qrels.tsv:2: no document has the id 'ddd",
            ),
            "no judgments": (damaged(lambda folder: (folder / "qrels.tsv").unlink()), "eval: qrels.tsv is missing"),
            "no queries": (
                damaged(lambda folder: (folder / "queries.jsonl").unlink()),
                "eval: queries.jsonl is missing",
            ),
            "a corpus twice": (
                both(GOOD, put("eval/corpus.jsonl.gz", b"")),
                "eval: corpus.jsonl and corpus.jsonl.gz are both there",
            ),
            "queries without an id": (
                damaged(lambda folder: (folder / "queries.jsonl").write_text('{"text": "a"}\n')),
                "eval/queries.jsonl:1: field '_id' is missing",
            ),
            "scores of pairs that are all the same": (tested(pair(1), pair(1)), "eval/test.jsonl: every score is 1.0"),
            "a score of a pair that is NaN": (
                tested(pair(1), pair(float("nan"))),
                "eval/test.jsonl:2: score is nan, expected a finite number",
            ),
            "pairs that end in labels": (
                tested(pair(1), LABELLED[0]),
                "eval/test.jsonl:2: field 'sentence1': no column",
            ),
            "one class to cluster by": (
                tested(LABELLED[0], {**LABELLED[1], "label": "one"}),
                "eval/test.jsonl: every label is 'one'; two different labels are needed",
            ),
            "one class to train a classifier on": (
                both(tested(*LABELLED), rows("eval/train.jsonl", LABELLED[0])),
                "eval/train.jsonl: every label is 'one'",
            ),
            "rows that are neither pairs nor labels": (
                tested({"question": "a"}),
                "eval/test.jsonl:1: is a row of no known kind (found: question)",
            ),
            "a folder without data": (lambda place: (place.folder / "eval").mkdir(), "eval: holds no evaluation data"),
            "a folder that is not there": (put("a", ""), "eval: holds no evaluation data"),
        },
        EVALUATE.replace(" eval ", " [] "): {
            "no folder": (put("a", ""), "--data: names no folder"),
        },
        EVALUATE + " --prompt-name passage": {
            "a prompt that the model has not": (
                GOOD,
                "prompt_name must name a prompt of the model (query), got 'passage'",
            ),
        },
        EVALUATE + " --dimensions 33": {
            "more dimensions than vectors have": (
                GOOD,
                "dimensions must be from 1 to the 32 that the model's vectors have, got 33",
            ),
        },
        EVALUATE + " --context-size 2": {
            "a context for a model that takes none": (GOOD, "context must be left out: this model takes none"),
        },
        FILTER + " --decontaminate gone": {
            "evaluation texts to leave out that are not there": (
                rows("pairs.jsonl", {"query": "a", "positive": "b"}),
                "gone: holds no evaluation data",
            ),
        },
    }
)
