"""The report of a comparison: one HTML page with the verdict, its intervals, and the queries that changed most."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from embeddings.adaptation.rankings import Ranked, RetrievalSet
from embeddings.adaptation.real_queries import REAL
from embeddings.adaptation.verdict import BM25_ALONE, METRICS, START, Group, Verdict, marked
from embeddings.common.io import steps_made
from embeddings.common.text import shorten
from embeddings.figures.drawing import write_page
from embeddings.figures.run_facts import LOSS, Curve

# Queries that gained most, and as many that lost most.
NUM_CHANGED = 20
_NUM_PASSAGES = 3
_PASSAGE_LENGTH = 300
# Width of the plotted part of a chart, the height of a row, and the size of the learning curve, in pixels.
_WIDTH, _ROW = 150, 26
_CURVE_WIDTH, _CURVE_HEIGHT = 560, 140
_GAIN, _LOSS, _UNSURE = "#1b7837", "#b2182b", "#777777"


def write_verdict_page(verdict: Verdict, output: Path, losses: Curve = ([], [])) -> None:
    """Write a self-contained HTML page on a verdict, without scripts or fonts.

    `losses` are the steps at which the training loss was logged, and its values.
    """
    after = compared_variant(verdict)
    changed = [*zip(("gained most", "lost most"), changed_queries(verdict, after), strict=True)]
    charts = [_chart(group) for group in verdict.groups]
    shown = {"verdict": verdict, "marked": marked, "charts": charts, "after": after, "changed": changed}
    write_page(output, "verdict.html", **shown, curve=_curve(*losses))


def _curve(steps: list[int], losses: list[float]) -> dict[str, Any] | None:
    """The points of a learning curve in an SVG picture; None for fewer than two."""
    if len(steps) < 2:
        return None
    step_N, loss_N = np.array(steps, float), np.array(losses, float)
    x_N = 10 + (_CURVE_WIDTH - 20) * (step_N - step_N[0]) / (step_N[-1] - step_N[0])
    y_N = 10 + (_CURVE_HEIGHT - 20) * (loss_N.max() - loss_N) / max(float(np.ptp(loss_N)), 1e-9)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(x_N, y_N, strict=True))
    first, last = (steps_made(LOSS, step) for step in (steps[0], steps[-1]))
    ends = f"steps {first} to {last}, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    return {"points": points, "ends": ends, "label": LOSS, "width": _CURVE_WIDTH, "height": _CURVE_HEIGHT}


def compared_variant(verdict: Verdict) -> str:
    """The variant whose queries are compared with the start's: the recommended one, or the best other candidate."""
    if verdict.recommendation.variant != START:
        return verdict.recommendation.variant

    def mean(name: str) -> float:
        scores = [each[name].metrics["ndcg_at_10"] for each in verdict.ranked if name in each]
        return float(np.concatenate(scores).mean())

    return max((name for name in verdict.ranked[0] if name not in (BM25_ALONE, START)), key=mean)


def changed_queries(verdict: Verdict, after: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The twenty queries that gained most from the start to a variant, and the twenty that lost most.

    Only real queries if there are any.
    """
    found: list[tuple[float, RetrievalSet, Mapping[str, Ranked], int]] = []
    has_real = any(test.is_real_Q.any() for test in verdict.tests)
    for test, ranked in zip(verdict.tests, verdict.ranked, strict=True):
        if after in ranked:
            change_Q = ranked[after].metrics["ndcg_at_10"] - ranked[START].metrics["ndcg_at_10"]
            rows = np.flatnonzero(test.is_real_Q | (not has_real))
            found += [(float(change_Q[row]), test, ranked, row) for row in rows.tolist()]
    found.sort(key=lambda each: each[0])
    gains = [each for each in found[::-1] if each[0] > 0][:NUM_CHANGED]
    losses = [each for each in found if each[0] < 0][:NUM_CHANGED]
    return [_query(*each, after) for each in gains], [_query(*each, after) for each in losses]


def _query(change: float, test: RetrievalSet, ranked: Mapping[str, Ranked], row: int, after: str) -> dict[str, Any]:
    qrels, folder = test.folder.qrels, test.folder
    judged_J = qrels.query_J == row
    grade_of = dict(zip(qrels.document_J[judged_J].tolist(), qrels.relevance_J[judged_J].tolist(), strict=True))

    def shown(place: int) -> dict[str, Any]:
        text = shorten(folder.documents[place], _PASSAGE_LENGTH) or "(empty)"
        return {"id": folder.document_ids[place], "text": text, "relevant": grade_of.get(place, 0) > 0}

    about: dict[str, Any] = {"text": folder.queries[row], "data": test.name, "kind": str(test.kinds[row])}
    seen = set[int]()
    for when, name in (("before", START), ("after", after)):
        found = [place for place in ranked[name].first_QK[row, :_NUM_PASSAGES].tolist() if place >= 0]
        score = f"{ranked[name].metrics['ndcg_at_10'][row]:.2f}"
        about[when] = {"score": score, "passages": [shown(place) for place in found]}
        seen.update(found)
    missed = [place for place, grade in grade_of.items() if grade > 0 and place not in seen]
    best = sorted(missed, key=lambda place: -grade_of[place])[:1]
    return {**about, "missed": [shown(place) for place in best], "change": f"{change:+.2f}"}


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
            row |= {name: _place(value, widest) for name, value in difference._asdict().items()}
            colour = _UNSURE if not difference.is_significant else _GAIN if difference.mean > 0 else _LOSS
            row |= {"colour": colour, "text": marked(difference)}
        rows.append(row)
    title = f"{group.data}: {group.num_queries:,} queries, {'written by people' if group.kind == REAL else group.kind}"
    ends = ((-widest, "start"), (0.0, "middle"), (widest, "end"))
    ticks = [(_place(each, widest), f"{each:+.3f}" if each else "0", anchor) for each, anchor in ends]
    return {"title": title, "rows": rows, "ticks": ticks, "width": _WIDTH, "height": _ROW * len(rows), "row": _ROW}


def _place(value: float, widest: float) -> str:
    return f"{(0.5 + 0.47 * value / widest) * _WIDTH:.1f}"
