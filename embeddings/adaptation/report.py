"""The report of a comparison: one HTML page with the verdict, its intervals, and the queries that changed most."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embeddings.adaptation.rankings import REAL, Ranked, RetrievalSet, relevant_passages, seen_passages
from embeddings.adaptation.verdict import (
    BM25_ALONE,
    HYBRID,
    METRICS,
    MIN_REAL_QUERIES,
    START,
    WHITENED,
    General,
    Group,
    Verdict,
    marked,
    model_of,
)
from embeddings.common.errors import program
from embeddings.common.text import shorten
from embeddings.evaluation import Difference
from embeddings.figures.drawing import write_page
from embeddings.models.model_card import plain, table

# Queries that gained most, and as many that lost most.
NUM_CHANGED = 20
_NUM_PASSAGES = 3
_PASSAGE_LENGTH = 300
# Width of the plotted part of a chart, and the height of a row, in pixels.
_WIDTH, _ROW = 240, 26
_GAIN, _LOSS, _UNSURE = "#1b7837", "#b2182b", "#777777"


def write_verdict_page(verdict: Verdict, output: Path, pictures: Sequence[Mapping[str, str]] = ()) -> None:
    """Write a self-contained HTML page on a verdict, without scripts or fonts.

    Args:
        verdict: The verdict.
        output: The file to write.
        pictures: Further pictures, such as learning curves: `data`, a PNG in base64, and a `caption`.
    """
    decision, after = verdict.recommendation, compared_variant(verdict)
    gained, lost = changed_queries(verdict, after)
    counts = [[name, *(f"{count:,} {what}" for what, count in each.items())] for name, each in verdict.counts.items()]
    write_page(
        output,
        "verdict.html",
        recommended=decision.variant,
        gain="" if decision.gain is None else marked(decision.gain),
        reasons=decision.reasons,
        steps=[[name, marked(step)] for name, step in decision.steps.items()],
        next_steps=next_steps(verdict),
        models=list(verdict.models.items()),
        charts=[_chart(group) for group in verdict.groups],
        general=[_general(each) for each in verdict.general],
        counts=counts,
        after=after,
        changed=[("gained most", gained), ("lost most", lost)],
        pictures=list(pictures),
        settings={"BM25's language": verdict.language, "fusion": verdict.rule.fusion, "weight": verdict.rule.weight},
    )


def card_section(verdict: Verdict) -> str:
    """The verdict as Markdown, for the card of a model (see `model_card.add_section`)."""
    decision, parts = verdict.recommendation, []
    parts.append(f"Recommended: {plain(decision.variant)}. {plain(' '.join(decision.reasons))}")
    for group in verdict.groups:
        rows = [
            [plain(name), *(f"{score.metrics[metric]:.3f}" for metric in METRICS), _interval(score.difference)]
            for name, score in group.scores.items()
        ]
        head = ("variant", "nDCG@10", "recall@10", "recall@100", "nDCG@10 - start, 95 %")
        queries = "queries of people" if group.kind == REAL else f"queries, {group.kind}"
        parts += [f"{plain(group.data)}: {group.num_queries:,} {plain(queries)}", table(head, rows)]
    for each in verdict.general:
        rows = [
            [plain(name), f"{value:.3f}", _interval(each.differences.get(name))] for name, value in each.values.items()
        ]
        parts.append(f"Forgetting on {plain(each.data)}, {each.num_rows:,} rows")
        parts.append(table(("variant", plain(each.metric), "variant - start, 95 %"), rows))
    if not verdict.general:
        parts.append("Forgetting was not measured.")
    return "\n\n".join(parts)


def _interval(difference: Difference | None) -> str:
    return "" if difference is None else marked(difference).replace("*", "\\*")


def compared_variant(verdict: Verdict) -> str:
    """The variant whose queries are compared with the start's: the recommended one, or the best other candidate."""
    if verdict.recommendation.variant != START:
        return verdict.recommendation.variant
    others = [name for name in verdict.ranked[0] if name not in (BM25_ALONE, START)]
    return max(others, key=lambda name: float(_all_scores(verdict, name).mean()))


def _all_scores(verdict: Verdict, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.concatenate([each[name].metrics["ndcg_at_10"] for each in verdict.ranked if name in each])


def changed_queries(verdict: Verdict, after: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The twenty queries that gained most from the start to a variant, and the twenty that lost most.

    Only real queries if there are any.
    """
    has_real = any(test.is_real_Q.any() for test in verdict.tests)
    found: list[tuple[float, RetrievalSet, Mapping[str, Ranked], int]] = []
    for test, ranked in zip(verdict.tests, verdict.ranked, strict=True):
        if after in ranked:
            change_Q = ranked[after].metrics["ndcg_at_10"] - ranked[START].metrics["ndcg_at_10"]
            rows = np.flatnonzero(test.is_real_Q) if has_real else np.arange(len(change_Q))
            order = rows[np.argsort(change_Q[rows], kind="stable")]
            # More of each set cannot be among the first of all sets.
            ends = {*order[:NUM_CHANGED].tolist(), *order[-NUM_CHANGED:].tolist()}
            found += [(float(change_Q[row]), test, ranked, row) for row in sorted(ends)]
    gains = sorted((each for each in found if each[0] > 0), key=lambda each: -each[0])
    losses = sorted((each for each in found if each[0] < 0), key=lambda each: each[0])
    gained, lost = ([_query(*each, after) for each in some[:NUM_CHANGED]] for some in (gains, losses))
    return gained, lost


def _query(change: float, test: RetrievalSet, ranked: Mapping[str, Ranked], row: int, after: str) -> dict[str, Any]:
    about: dict[str, Any] = {"text": test.folder.queries[row], "data": test.name, "kind": str(test.kinds[row])}
    for when, name in (("before", START), ("after", after)):
        passages = seen_passages(test, row, ranked[name], _NUM_PASSAGES)
        texts = [{**each, "text": shorten(each["text"], _PASSAGE_LENGTH) or "(empty)"} for each in passages]
        about[when] = {"score": f"{ranked[name].metrics['ndcg_at_10'][row]:.2f}", "passages": texts}
    shown = {passage["id"] for when in ("before", "after") for passage in about[when]["passages"]}
    missed = [passage for passage in relevant_passages(test, row) if passage["id"] not in shown]
    about["missed"] = [{**each, "text": shorten(each["text"], _PASSAGE_LENGTH) or "(empty)"} for each in missed[:1]]
    return {**about, "change": f"{change:+.2f}"}


def _chart(group: Group) -> dict[str, Any]:
    """The intervals of a group's variants as coordinates of an SVG picture."""
    differences = {name: score.difference for name, score in group.scores.items()}
    bounds = [abs(bound) for each in differences.values() if each is not None for bound in (each.low, each.high)]
    widest = max([*bounds, 0.01])
    rows = []
    for number, (name, score) in enumerate(group.scores.items()):
        values = [f"{score.metrics[metric]:.3f}" for metric in METRICS]
        row: dict[str, Any] = {"name": name, "values": values, "y": _ROW * number + _ROW // 2, "text": ""}
        difference = differences[name]
        if difference is not None:
            places = (_place(each, widest) for each in (difference.low, difference.mean, difference.high))
            low, mean, high = places
            row |= {"low": low, "mean": mean, "high": high, "colour": _colour(difference), "text": marked(difference)}
        rows.append(row)
    title = f"{group.data}: {group.num_queries:,} queries, {'written by people' if group.kind == REAL else group.kind}"
    ends = ((-widest, "start"), (0.0, "middle"), (widest, "end"))
    ticks = [(_place(each, widest), f"{each:+.3f}" if each else "0", anchor) for each, anchor in ends]
    return {"title": title, "rows": rows, "ticks": ticks, "width": _WIDTH, "height": _ROW * len(rows), "row": _ROW}


def _place(value: float, widest: float) -> str:
    return f"{(0.5 + 0.47 * value / widest) * _WIDTH:.1f}"


def _colour(difference: Difference) -> str:
    if not difference.is_significant:
        return _UNSURE
    return _GAIN if difference.mean > 0 else _LOSS


def _general(each: General) -> dict[str, Any]:
    rows = [
        [name, f"{value:.4f}", marked(each.differences[name]) if name in each.differences else ""]
        for name, value in each.values.items()
    ]
    return {"title": f"{each.data}: {each.metric}, {each.num_rows:,} rows", "rows": rows}


class NextStep(NamedTuple):
    """Something to do after a verdict, and the commands for it."""

    sentence: str
    commands: tuple[str, ...] = ()


def next_steps(verdict: Verdict) -> list[NextStep]:
    """What to do after a verdict."""
    decision, command = verdict.recommendation, program()
    variant, steps = decision.variant, []
    if decision.num_real_queries < MIN_REAL_QUERIES:
        steps.append(
            NextStep(
                f"Collect at least {MIN_REAL_QUERIES} queries that people wrote, mark their relevant passages, and "
                f"compare again. There are {decision.num_real_queries}."
            )
        )
    model = model_of(verdict, variant)
    encode = f"{command} encode --model {model} --input CORPUS --output VECTORS"
    if variant == WHITENED:
        whiten = f"{command} whiten --model {model} --vectors VECTORS --output DIRECTORY"
        steps.append(NextStep("Write the whitened model, and use it.", (encode, whiten)))
    else:
        steps.append(NextStep(f"Use the model {model}."))
    if variant.endswith(HYBRID):
        search = f"{command} search --hybrid --model {model} --corpus VECTORS QUERY"
        lines = encode, f"{command} index --hybrid --vectors VECTORS", search
        steps.append(NextStep("Search by vectors and BM25.", lines))
    if not verdict.general:
        prepare = f"{command} prepare docstrings --output data/docstrings"
        sentence = (
            "Forgetting was not measured. Name data of other domains with --general. On every machine there is "
            "data/docstrings/eval, which this command makes from the installed packages:"
        )
        steps.append(NextStep(sentence, (prepare,)))
    trained = variant.removesuffix(f" + {HYBRID}")
    losses = [each for each in verdict.general if trained in each.differences and each.differences[trained].high < 0]
    for each in losses:
        start = verdict.models[START]
        line = f"{command} interpolate --start {start} --trained {model} --share 0.25 --output DIRECTORY"
        sentence = (
            f"{trained} is worse on {each.data} ({each.differences[trained]}). If you search such texts too, try a "
            "place nearer to the start."
        )
        steps.append(NextStep(sentence, (line,) if trained in verdict.models else ()))
    return steps
