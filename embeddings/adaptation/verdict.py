"""The verdict on a model and what was made of it: scores of each variant on test queries, and a recommendation.

Variants, the simplest first: the starting model, its fusion with BM25 (hybrid), its vectors whitened for the corpus,
each trained model, and each trained model fused with BM25. BM25 alone is shown, and is not a candidate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.adaptation.rankings import (
    Encoded,
    Ranked,
    RetrievalSet,
    Rows,
    SimilaritySet,
    encode_set,
    pair_cosines,
    read_general_sets,
    read_test_sets,
    searched,
)
from embeddings.adaptation.real_queries import REAL
from embeddings.adaptation.weights import MIN_DOCUMENTS, Whitening
from embeddings.common import InputError
from embeddings.common.io import GENERATOR
from embeddings.common.process import logger
from embeddings.common.text import format_table
from embeddings.evaluation import Difference, paired_bootstrap, spearman
from embeddings.evaluation.bootstrap import bootstrap
from embeddings.evaluation.hybrid import TunedWeight, tune_weight
from embeddings.evaluation.runner import CUTOFFS
from embeddings.inference import BM25, Encoder, FusionRule, Precision
from embeddings.inference.bm25 import ANY_LANGUAGE, Tokenize, tokenizer
from embeddings.models.model_files import resolve_model

BM25_ALONE, START, HYBRID, WHITENED, TRAINED = "BM25", "start", "hybrid", "whitened", "trained"
METRICS = ("ndcg_at_10", "recall_at_10", "recall_at_100")
# With fewer queries of people no trained model is recommended: an interval is then wider than a usual gain.
MIN_REAL_QUERIES = 50
# The reason where fewer queries do not decide; the gains are those of E24.
_BY_DEFAULT = (
    "Hybrid search with the starting model is recommended by default, because it gained on seven public sets: "
    f"{MIN_REAL_QUERIES} real queries would decide."
)
# The group of all queries that were made from the documents.
PSEUDO = "made from the documents"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """The means of a variant over queries, and nDCG@10 of variant - start with its interval; None for the start."""

    metrics: dict[str, float]
    difference: Difference | None


@dataclass(frozen=True)
class Group:
    """The scores of all variants on the queries of one kind in one data set."""

    data: str
    kind: str
    num_queries: int
    scores: dict[str, Score]


@dataclass(frozen=True)
class General:
    """The scores of the variants without BM25 on a set of another domain, and variant - start with 95 % intervals."""

    data: str
    metric: str
    num_rows: int
    values: dict[str, float]
    differences: dict[str, Difference]


@dataclass(frozen=True)
class Recommendation:
    """The recommended variant, why, and what each further step buys over it on the real queries.

    Attributes:
        variant: The simplest variant that is not significantly worse than the best one.
        best: The variant with the highest nDCG@10 among the candidates.
        num_real_queries: The number of queries that people wrote, over all data sets.
        gain: nDCG@10 of the recommended variant - start; None for the start.
        steps: nDCG@10 of each later candidate - the recommended one.
        reasons: The decision in sentences.
    """

    variant: str
    best: str
    num_real_queries: int
    gain: Difference | None
    steps: dict[str, Difference]
    reasons: list[str]


@dataclass(frozen=True)
class Verdict:
    """The result of `compare`.

    Attributes:
        models: The directory or Hub id of each model, by its variant.
        rules: How the scores of each model are fused with BM25.
        tuned: How the weight of BM25 was chosen for each model, if it was.
        counts: Documents and queries of each data set.
        groups: Scores by data set and kind of query, all real queries first.
        general: Scores on sets of other domains; empty if none were named.
        recommendation: What to use.
        tests: The data sets.
        ranked: What each variant found, for each data set.
    """

    models: dict[str, str]
    language: str
    rules: dict[str, FusionRule]
    tuned: dict[str, TunedWeight]
    counts: dict[str, dict[str, int]]
    groups: list[Group]
    general: list[General]
    recommendation: Recommendation
    tests: list[RetrievalSet] = field(repr=False)
    ranked: list[dict[str, Ranked]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON types, without the scores of each query."""
        facts: dict[str, Any] = {"models": self.models, "language": self.language, "counts": self.counts}
        facts |= {"fusion": self.rules, "tuned": {label: each.difference for label, each in self.tuned.items()}}
        facts |= {"groups": self.groups, "general": self.general, "recommendation": self.recommendation}
        return {"generator": GENERATOR, "min_real_queries": MIN_REAL_QUERIES, **_plain(facts)}

    def query_rows(self) -> list[dict[str, Any]]:
        """One row per query: its kind, and nDCG@10 and the ids of the ten first documents of each variant."""
        rows = []
        for test, ranked in zip(self.tests, self.ranked, strict=True):
            ids = test.ids_of(each.first_QK for each in ranked.values())
            for row, query in enumerate(test.folder.query_ids):
                places = {name: each.first_QK[row].tolist() for name, each in ranked.items()}
                found = {name: [ids[place] for place in each if place >= 0] for name, each in places.items()}
                scores = {name: round(float(each.metrics["ndcg_at_10"][row]), 6) for name, each in ranked.items()}
                about = {"data": test.name, "_id": query, "text": test.folder.queries[row]}
                about |= {"kind": str(test.kinds[row])}
                rows.append({**about, "ndcg_at_10": scores, "documents": found})
        return rows


def _plain(value: Any) -> Any:
    if isinstance(value, Difference):
        return value._asdict()
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def compare(
    start: str,
    trained: Sequence[str],
    data: Sequence[str | PathLike[str]],
    vectors: Path,
    *,
    general: Sequence[str | PathLike[str]] = (),
    language: str = ANY_LANGUAGE,
    weight: float | None = None,
    validation: str | PathLike[str] | None = None,
    precision: Precision = "auto",
    context_size: int | None = None,
) -> Verdict:
    """Score all variants on the test queries of retrieval folders, and recommend one.

    The scores are those of `evaluate` and `evaluate --hybrid`. A query is one that a person wrote, unless its row in
    `queries.jsonl` has another `kind` than `real`. Only real queries decide; those of several folders count together.

    Args:
        start: The starting model, a directory or Hub id.
        trained: Models trained from it, the simplest first.
        data: Retrieval folders, or folders of them.
        vectors: The folder that keeps the vectors of the documents for a later call.
        general: Folders of retrieval or similarity data of other domains, on which forgetting is measured.
        language: Language of the texts for BM25 (see `bm25.tokenizer`).
        weight: Weight of BM25 in hybrid search by z-scores; None for 0.2.
        validation: A retrieval folder, by whose queries the weight is chosen for each model.
        precision: Precision of matrix products.
        context_size: Number of documents that a contextual model draws as context from each corpus; None for none.

    Raises:
        InputError: If a folder cannot be read; all are read before a model is loaded.
    """
    rule, words_of = FusionRule.of(weight=weight), WordIndexes(tokenizer(language)).of
    tests, others = read_test_sets(data), read_general_sets(general)
    judges = [] if validation is None else [RetrievalSet.read("validation", Path(validation), others=tests)]
    models = _models(start, trained)
    encoded = _encode_all(models, [*tests, *others, *judges], vectors, precision, context_size)
    tuned = {}
    for judge, of_judge in zip(judges, encoded[len(tests) + len(others) :], strict=True):
        for label, one in of_judge.items():
            tuned[label] = tune_weight(rule, judge.folder.qrels, partial(searched(judge, one).fused, words_of(judge)))
    rules = {label: tuned[label].rule if label in tuned else rule for label in models}
    ranked, whitenings = [], [_whitening(test, each) for test, each in zip(tests, encoded, strict=False)]
    for test, each, whitening in zip(tests, encoded, whitenings, strict=False):
        rows = _variant_rows(test, _with_whitened(each, whitening), words_of(test), rules)
        ranked.append({name: Ranked.of(test, row_QK) for name, row_QK in rows.items()})
    groups = [group for test, each in zip(tests, ranked, strict=True) for group in _groups(test, each)]
    # The whitening of the first corpus, with which a whitened model would be written.
    pairs = zip(others, encoded[len(tests) :], strict=False)
    of_general = [_general(other, _with_whitened(each, whitenings[0])) for other, each in pairs]
    counts = {test.name: _counts(test) for test in tests}
    decision = recommend(_real_scores(tests, ranked))
    return Verdict(models, language, rules, tuned, counts, groups, of_general, decision, tests, ranked)


class WordIndexes:
    """The BM25 index of one corpus at a time: folders whose corpora are one file, one after the other, share it."""

    def __init__(self, tokenize: Tokenize) -> None:
        self._tokenize = tokenize
        self._last: tuple[Path, BM25] | None = None

    def of(self, test: RetrievalSet) -> BM25:
        corpus = test.files.corpus
        if self._last is None or not corpus.samefile(self._last[0]):
            self._last = None
            self._last = corpus, BM25(test.folder.documents, self._tokenize)
        return self._last[1]


def rank_queries(
    start: str,
    trained: Sequence[str],
    corpus: Path,
    queries: Mapping[str, str],
    vectors: Path,
    *,
    language: str = ANY_LANGUAGE,
) -> dict[str, Rows]:
    """The rows of the ten first documents of each variant for queries without judgments, such as a log, (Q, 10).

    Args:
        start: The starting model, a directory or Hub id.
        trained: Models trained from it, the simplest first.
        corpus: The corpus file.
        queries: Texts by id.
        vectors: The folder of vectors (see `compare`).
        language: Language of the texts for BM25.
    """
    test, models = RetrievalSet.unlabelled(corpus, queries), _models(start, trained)
    (encoded,) = _encode_all(models, [test], vectors)
    words, rules = BM25(test.folder.documents, tokenizer(language)), dict.fromkeys(models, FusionRule())
    rows = _variant_rows(test, _with_whitened(encoded, _whitening(test, encoded)), words, rules)
    return {name: row_QK[:, : min(CUTOFFS)] for name, row_QK in rows.items()}


def _models(start: str, trained: Sequence[str]) -> dict[str, str]:
    """The models by their variants; an error if one is not there, or is named twice."""
    names = [Path(model).name for model in trained]
    labels = [name if names.count(name) == 1 else model for name, model in zip(names, trained, strict=True)]
    if len(set(labels)) < len(labels):
        raise InputError("--trained", f"{max(labels, key=labels.count)} is named twice", "name each model once")
    variants_of = [TRAINED] if len(trained) == 1 else [f"{TRAINED} {label}" for label in labels]
    models = {START: start, **dict(zip(variants_of, trained, strict=True))}
    for model in models.values():
        resolve_model(model)
    return models


def _encode_all(
    models: Mapping[str, str],
    sets: Sequence[RetrievalSet | SimilaritySet],
    vectors: Path,
    precision: Precision = "auto",
    context_size: int | None = None,
) -> list[dict[str, Encoded]]:
    """Each set as each model encoded it; one model at a time is in memory."""
    encoded: list[dict[str, Encoded]] = [{} for _ in sets]
    for label, model in models.items():
        logger.info("%s: %s", label, model)
        encoder = Encoder.from_pretrained(model, precision=precision, show_progress=True)
        for each, by_label in zip(sets, encoded, strict=True):
            by_label[label] = encode_set(encoder, each, vectors, context_size)
        del encoder
    return encoded


def _whitening(test: RetrievalSet, encoded: Mapping[str, Encoded]) -> Whitening | None:
    start = encoded[START]
    whitening = None if start.compares_lengths else Whitening.of(start.tiles())
    if whitening is None:
        logger.info("%s: not whitened, which needs %d documents and cosines", test.name, MIN_DOCUMENTS)
    return whitening


def _with_whitened(encoded: Mapping[str, Encoded], whitening: Whitening | None) -> dict[str, Encoded]:
    """A set as each model encoded it and, after the start, as the whitened one would."""
    start = encoded[START]
    whitened = {} if whitening is None else {WHITENED: replace(start, whitening=whitening)}
    return {START: start, **whitened, **encoded}


def _variant_rows(
    test: RetrievalSet, encoded: Mapping[str, Encoded], words: BM25, rules: Mapping[str, FusionRule]
) -> dict[str, Rows]:
    """The best 100 documents of each query by each variant, (Q, K)."""
    searches = {label: searched(test, each) for label, each in encoded.items()}
    start, *others = searches
    fused = {label: searches[label].fused(words, [rule])[0] for label, rule in rules.items()}
    rows = {BM25_ALONE: searches[start].words(words), START: searches[start].dense(), HYBRID: fused.pop(start)}
    rows |= {label: searches[label].dense() for label in others}
    return rows | {f"{label} + {HYBRID}": row_QK for label, row_QK in fused.items()}


def _counts(test: RetrievalSet) -> dict[str, int]:
    kinds, counts = np.unique(test.kinds, return_counts=True)
    by_kind = {f"queries: {kind}": int(count) for kind, count in zip(kinds, counts, strict=True)}
    num_relevant = int(np.count_nonzero(test.folder.qrels.relevance_J > 0))
    return {"documents": len(test.folder.documents), "relevant pairs": num_relevant, **by_kind}


def _groups(test: RetrievalSet, ranked: Mapping[str, Ranked]) -> list[Group]:
    """The scores on real queries, on those made from the documents, and on each kind of the latter if several."""
    real_Q = test.is_real_Q
    rows_of = {REAL: real_Q, PSEUDO: ~real_Q}
    kinds = sorted(set(test.kinds[~real_Q].tolist()))
    rows_of |= {kind: test.kinds == kind for kind in kinds if len(kinds) > 1}
    groups = []
    for kind, is_in_Q in rows_of.items():
        if is_in_Q.any():
            scores = {}
            for name, each in ranked.items():
                means = {metric: float(each.metrics[metric][is_in_Q].mean()) for metric in METRICS}
                ndcg_Q, start_Q = (one.metrics["ndcg_at_10"][is_in_Q] for one in (each, ranked[START]))
                scores[name] = Score(means, None if name == START else paired_bootstrap(ndcg_Q, start_Q))
            groups.append(Group(test.name, kind, int(is_in_Q.sum()), scores))
    return groups


def _general(each: RetrievalSet | SimilaritySet, encoded: Mapping[str, Encoded]) -> General:
    """The scores on a set of another domain: nDCG@10, or the rank correlation of cosines with human scores."""
    others = [name for name in encoded if name != START]
    if isinstance(each, RetrievalSet):
        metric, num_rows = "ndcg_at_10", len(each.folder.queries)
        rows = {name: searched(each, one).dense() for name, one in encoded.items()}
        scores = {name: Ranked.of(each, row_QK).metrics[metric] for name, row_QK in rows.items()}
        values = {name: float(score_Q.mean()) for name, score_Q in scores.items()}
        differences = {name: paired_bootstrap(scores[name], scores[START]) for name in others}
    else:
        metric, num_rows = "cosine_spearman", len(each.score_N)
        cosines = {name: pair_cosines(one) for name, one in encoded.items()}
        values = {name: spearman(cosine_N, each.score_N) for name, cosine_N in cosines.items()}
        changes = {name: partial(_change, cosines[name], cosines[START], each.score_N) for name in others}
        differences = {name: bootstrap(change, num_rows) for name, change in changes.items()}
    return General(each.name, metric, num_rows, values, differences)


def _change(cosine_N: Floats, start_N: Floats, human_N: Floats, row_N: Rows) -> float:
    return spearman(cosine_N[row_N], human_N[row_N]) - spearman(start_N[row_N], human_N[row_N])


def _real_scores(tests: Sequence[RetrievalSet], ranked: Sequence[Mapping[str, Ranked]]) -> dict[str, Floats]:
    """nDCG@10 of each variant on the real queries of all sets, if every set with such queries has the variant."""
    pairs = [(test, each) for test, each in zip(tests, ranked, strict=True) if test.is_real_Q.any()]
    first = pairs[0][1] if pairs else ranked[0]
    names = [name for name in first if all(name in each for _, each in pairs)]
    of_pairs = {name: [each[name].metrics["ndcg_at_10"][test.is_real_Q] for test, each in pairs] for name in names}
    return {name: np.concatenate([np.empty(0), *scores]) for name, scores in of_pairs.items()}


def recommend(score_of: Mapping[str, Floats]) -> Recommendation:
    """The simplest variant that is not significantly worse than the best, by the real queries.

    Significantly worse: the two-sided 95 % interval of the paired bootstrap over the queries lies below 0. With fewer
    than 50 real queries the best and the recommended one are not a trained model, and hybrid search takes the place of
    the start unless its nDCG@10 is lower.

    Args:
        score_of: nDCG@10 of each variant for each real query, (Q,) float64 each, the simplest variant first; the
            start's and the hybrid search's are needed.
    """
    num_queries, needs = len(score_of[START]), list(score_of)
    candidates = [name for name in needs if name != BM25_ALONE]
    models = {*candidates} - {START, HYBRID, WHITENED}
    if not num_queries:
        why = "Not measured on your queries: all queries were made from the documents, and such queries judge poorly."
        return Recommendation(HYBRID, HYBRID, 0, None, {}, [why, _BY_DEFAULT])
    reasons = []
    is_few = num_queries < MIN_REAL_QUERIES
    if is_few and models:
        reasons.append(
            f"No trained model can be recommended by {num_queries} real queries: with fewer than {MIN_REAL_QUERIES}, "
            "the interval of a difference is wider than the usual gain of training."
        )
        candidates = [name for name in candidates if name not in models]
    best = max(candidates, key=lambda name: float(score_of[name].mean()))
    behind = {name: paired_bootstrap(score_of[name], score_of[best]) for name in candidates}
    chosen = next(name for name in candidates if behind[name].high >= 0)
    if chosen == START and is_few and score_of[HYBRID].mean() >= score_of[START].mean():
        chosen = HYBRID
        reasons.append(_BY_DEFAULT)
    elif chosen == START and best == START:
        reasons.append("No other variant has a higher nDCG@10 than the starting model, which is kept.")
    elif chosen == START:
        reasons.append(
            f"The starting model is not significantly worse than the best variant, {best} "
            f"({behind[START]}), and is kept."
        )
    else:
        worse = ", ".join(f"{one} {behind[one]}" for one in candidates[: candidates.index(chosen)])
        reasons.append(
            f"{chosen} has the highest nDCG@10 of {num_queries} real queries, and simpler variants are significantly "
            f"worse: {worse}."
            if chosen == best
            else f"{chosen} is the simplest variant that is not significantly worse than the best one by {num_queries} "
            f"real queries, {best}. Significantly worse: {worse}."
        )
    gain = None if chosen == START else paired_bootstrap(score_of[chosen], score_of[START])
    later = needs[needs.index(chosen) + 1 :]
    steps = {name: paired_bootstrap(score_of[name], score_of[chosen]) for name in later}
    return Recommendation(chosen, best, num_queries, gain, steps, reasons)


def format_verdict(verdict: Verdict) -> str:
    """The verdict as text tables: scores by data set, nDCG@10 by kind of query, other domains, the recommendation."""
    parts = []
    mains = list({group.data: group for group in verdict.groups[::-1]}.values())[::-1]
    for group in mains:
        head = (f"{group.data}: {group.num_queries} queries, {group.kind}", "nDCG@10", "recall@10", "recall@100")
        rows: list[tuple[str, ...]] = [(*head, "nDCG@10 - start")]
        for name, score in group.scores.items():
            values = (f"{score.metrics[metric]:.4f}" for metric in METRICS)
            rows.append((name, *values, "" if score.difference is None else marked(score.difference)))
        parts.append(format_table(rows, "<"))
    others = [group for group in verdict.groups if group not in mains]
    if others:
        names = list(dict.fromkeys(name for group in others for name in group.scores))
        table: list[tuple[str, ...]] = [("nDCG@10 by kind of query", "queries", *names)]
        for group in others:
            scores = (group.scores.get(name) for name in names)
            cells = ("" if score is None else f"{score.metrics['ndcg_at_10']:.4f}" for score in scores)
            table.append((f"{group.data}: {group.kind}", str(group.num_queries), *cells))
        parts.append(format_table(table, "<"))
    parts.append(_general_table(verdict.general))
    parts += [f"{label}: {each}" for label, each in verdict.tuned.items()]
    decision = verdict.recommendation
    lines = [f"recommended: {decision.variant}", *decision.reasons]
    lines += [f"{name} - {decision.variant}: {marked(step)}" for name, step in decision.steps.items()]
    parts.append("\n".join(lines))
    note = "* the 95 % interval (paired bootstrap over the queries) excludes 0"
    return "\n\n".join([*parts, note])


def _general_table(general: Sequence[General]) -> str:
    if not general:
        return "forgetting: not measured; name data of other domains with --general"
    names = list(dict.fromkeys(name for each in general for name in each.values))
    rows: list[tuple[str, ...]] = [("other domains", "metric", START, *(f"{name} - start" for name in names[1:]))]
    for each in general:
        cells = (marked(each.differences[name]) if name in each.differences else "" for name in names[1:])
        rows.append((each.data, each.metric, f"{each.values[START]:.4f}", *cells))
    return format_table(rows, "<")


def marked(difference: Difference) -> str:
    return f"{difference}{'*' if difference.is_significant else ''}"
