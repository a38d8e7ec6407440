"""The command `queries`: queries for the passages of one's own documents, split into training and evaluation."""

import heapq
import posixpath
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import regex

from embeddings.adaptation.candidates import (
    KINDS,
    MAX_RANK,
    TRAIL,
    Candidate,
    Passage,
    WordStatistics,
    key_of,
    proposals,
    read_passages,
)
from embeddings.adaptation.model_queries import KIND as MODEL_KIND
from embeddings.adaptation.model_queries import QueryModel, written_queries
from embeddings.adaptation.real_queries import REAL, Judgements, QueryLog, read_log
from embeddings.adaptation.sentences import num_words, plain
from embeddings.common.errors import InputError, OptionError, refuse_given, require_minimum, shown
from embeddings.common.io import file_sha256, folder_hashes, write_json, write_json_lines
from embeddings.common.jobs import manifest_path
from embeddings.common.own_folder import replaced_folder, require_replaceable
from embeddings.common.random import derive_seed
from embeddings.data.docstrings import finished_manifest, write_retrieval_folder
from embeddings.data.near_duplicates import NearDuplicates
from embeddings.data.store import StoredRow
from embeddings.inference.bm25 import word_tokens
from embeddings.mining.duplicates import KEPT, Decontaminator, EvaluationTexts

KIND = "queries"
# Increase it whenever the same passages produce different queries, so that an older output is not reused.
RECIPE = 7
# Training pairs: with the queries that documents offer, and with those that a language model wrote.
PAIRS, MODEL_PAIRS = "pairs.jsonl", "pairs-model.jsonl"
# Fewer passages are too few to train on.
MIN_PASSAGES = 200
# So many real queries are trained on alone, which gains more than among what documents offer (E24).
ENOUGH_REAL = 200
# From so many judged queries on some are trained on by default: more than `ENOUGH_REAL`, and as many are left.
MANY_REAL = 500
HELD_OUT_SHARE = 0.2
# Passages whose words are counted, which also compete for each query; passages that are asked for the pseudo test.
_SAMPLE, _MAX_HELD_OUT = 20_000, 4_000
# Links that are remembered, and queries of the pseudo test.
_MAX_LINKS, _MAX_TEST = 500_000, 500
# The Jaccard similarity of near-copies among queries, and the share of an evaluation query's BM25 weight that makes a
# training query similar to it.
_NEAR_COPY, _RESEMBLES = 0.8, 0.8
_HALF = 2.0**63


@dataclass(frozen=True)
class QuerySettings:
    """What is held out, and how many queries are made.

    Args:
        held_out_share: Share of the documents that are held out; default 0.2, or 0 if real queries have judgements.
        hold_out_judged: Whether the documents with relevant passages of real queries are held out too.
        training_share: Share of the judged real queries that are trained on. Queries about one document are on one
            side, those of a single document perhaps on both; passages that answer the others are not trained on, unless
            `hold_out_judged` is off. Default: two thirds of what is not for validation (0.5) if 500 queries are judged,
            else 0.
        validation_share: Share of the judged real queries that are for validation; the rest is the test.
        per_passage: Maximum sentences, and maximum docstrings, of a passage that become queries.
        max_passages: Maximum passages that are asked for training queries; a random sample of this size.
        seed: Seed of the random choices.
    """

    held_out_share: float | None = None
    hold_out_judged: bool = True
    training_share: float | None = None
    validation_share: float = 0.25
    per_passage: int = 3
    max_passages: int = 50_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("held_out_share", "training_share", "validation_share"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise OptionError(name, value, "must be >= 0 and < 1", "0.2 is usual")
        if (self.training_share or 0) + self.validation_share >= 1:
            rule = f"must be below 1 - validation_share, {1 - self.validation_share:g}: the rest is the test"
            raise OptionError("training_share", self.training_share, rule, "0.5 is usual")
        require_minimum("per_passage", self.per_passage, 1)
        require_minimum("max_passages", self.max_passages, 1)


@dataclass
class QueriesReport:
    """What was written: see `summary.json`.

    Attributes:
        counts: Passages, documents, training pairs of each file and queries of each evaluation folder.
        kinds: For each kind of query how many were proposed, kept for training or the pseudo test, and rejected by
            reason.
        notes: Lines for the user.
        reused: Whether an earlier run with the same inputs wrote the folder.
    """

    counts: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reused: bool = False

    def count(self, kind: str, place: str, number: int = 1) -> None:
        self._kind(kind)[place] += number

    def reject(self, kind: str, reason: str) -> None:
        rejected = self._kind(kind)["rejected"]
        rejected[reason] = rejected.get(reason, 0) + 1

    def _kind(self, kind: str) -> dict[str, Any]:
        return self.kinds.setdefault(kind, {"proposed": 0, "training": 0, "pseudo_test": 0, "rejected": {}})


def make_queries(
    passages: Path,
    output: Path,
    *,
    log: Path | None = None,
    columns: Mapping[str, str] | None = None,
    evaluation: EvaluationTexts | None = None,
    settings: QuerySettings | None = None,
    model: QueryModel | None = None,
) -> QueriesReport:
    """Write training pairs and evaluation folders for passages; the same inputs and seed give the same bytes.

    With a language model its answers are inputs too. They are saved in `OUTPUT.work`, so no request is sent twice.

    Whole documents are held out before anything else. The folder has `pairs.jsonl` (queries that the documents offer by
    themselves, and real ones by `training_share`; these alone from 200 on), `pairs-model.jsonl` (queries of
    the language model), `evaluation/` and `validation/` (real queries with judgements), `evaluation-pseudo/` (queries
    of the held-out documents, whose passages there lack the query), `unjudged.jsonl` (real queries without judgements)
    and `summary.json`; a part without content is absent.

    Args:
        passages: The file of passages (see `read_passages`).
        output: The folder to write: new, empty, or written by this function.
        log: Real queries (see `read_log`).
        columns: Columns of the log with other names.
        evaluation: More evaluation texts, which no training query may resemble.
        settings: What is held out, and how many queries are made.
        model: A language model that writes more training queries.
    """
    settings = settings or QuerySettings()
    require_replaceable(output, {"kind": KIND})
    if log is None:
        given = {"query_columns": columns, "training_share": settings.training_share}
        refuse_given(given | {"hold_out_judged": None if settings.hold_out_judged else False}, "needs --queries")
    inputs: dict[str, Any] = {
        "kind": KIND,
        "recipe": RECIPE,
        "passages_sha256": file_sha256(passages) if passages.is_file() else None,
        "log": None if log is None else content_of(log),
        "columns": dict(columns or {}),
        "evaluation": None if evaluation is None else evaluation.sha256(),
        "settings": asdict(settings),
        "model": None if model is None else model.fields,
    }
    if output.exists() and (manifest := finished_manifest(output, inputs)) is not None:
        return QueriesReport(**manifest["report"], reused=True)
    model = None if model is None else model.found()
    real = QueryLog([], []) if log is None else read_log(log, columns)
    survey = _Survey(passages, real, settings)
    if log is not None:
        survey.find_judged(log)
    survey.split()
    report, candidates = survey.report, _collect(survey)
    if model is not None and survey.num_training >= MIN_PASSAGES:
        candidates += _written(survey, candidates, model, output)
    training, test = _select(survey, candidates)
    training = [*_asked(survey), *training]
    texts = [*(real.queries[row] for rows in survey.real.values() for row in rows), *(each.query for each in test)]
    training = _decontaminated(survey, training, texts, evaluation)
    if len({each.query for each in training if each.kind == REAL}) >= ENOUGH_REAL:
        is_kept = [each.kind in (REAL, MODEL_KIND) for each in training]
        training = survey.filtered(training, is_kept, "the real queries are enough")
    for place, kept in (("training", training), ("pseudo_test", test)):
        for each in kept:
            report.count(each.kind, place)
    pairs = {
        PAIRS: [each for each in training if each.kind != MODEL_KIND],
        MODEL_PAIRS: [each for each in training if each.kind == MODEL_KIND],
    }
    report.counts |= {"pairs": len(pairs[PAIRS]), "model_pairs": len(pairs[MODEL_PAIRS])}
    report.counts |= {"pseudo_test_queries": len(test)}
    report.counts |= {f"{name}_queries": len(rows) for name, rows in survey.real.items()}
    report.counts |= {"training_queries": len(survey.trained)}
    unjudged = [] if real.labels else real.queries
    if not (training or test or unjudged or any(survey.real.values())):
        what = f"its {survey.num_passages} passages offer no queries ({_reasons(report)})"
        raise InputError(str(passages), what, "give --queries, or documents with sentences and headings")
    if not training and survey.num_training >= MIN_PASSAGES:
        report.notes.append(f"nothing to train on: the passages offer no queries ({_reasons(report)})")
    content = {name: value for name, value in asdict(report).items() if name != "reused"}
    with replaced_folder(output, {**inputs, "report": content}) as new:
        write_json(new / "summary.json", {**content, "settings": asdict(settings)})
        for name, candidates in pairs.items():
            rows = ({"query": each.query, "positive": each.positive, "kind": each.kind, "passage": each.passage,
                     "document": each.document} for each in candidates)  # fmt: skip
            if candidates:
                write_json_lines(new / name, rows)
        if unjudged:
            texts_of = ({"_id": f"q{row:06d}", "text": text} for row, text in enumerate(unjudged))
            write_json_lines(new / "unjudged.jsonl", texts_of)
        _write_real(new, survey)
        if test:
            _write_pseudo(new / "evaluation-pseudo", passages, test)
    return report


def content_of(path: Path) -> Any:
    """The hash of a file, or of each file of a folder."""
    return folder_hashes(path, "**/*") if path.is_dir() else file_sha256(path) if path.is_file() else None


def _reasons(report: QueriesReport) -> str:
    total = sum((Counter(kind["rejected"]) for kind in report.kinds.values()), Counter[str]())
    return ", ".join(f"{count} {reason}" for reason, count in total.most_common(3)) or "no sentences, no headings"


class _Survey:
    """What is learned in the first pass over the passages: counts, judgements, links, and a sample of their words.

    Then `split` says which documents are held out, and which real queries are for training, validation and test.
    """

    def __init__(self, path: Path, log: QueryLog, settings: QuerySettings) -> None:
        self.path, self.log, self.settings, self.report = path, log, settings, QueriesReport()
        self.num_passages = 0
        self.judgements = Judgements(log)
        # Passages by the file or heading that a link leads to: link text, document of the link, file as it is written.
        self.links: dict[str, list[tuple[str, str, str]]] = {}
        documents, headings, parts, files = array("Q"), array("q"), array("q"), array("q")
        sample, seen = list[tuple[int, int, str, str]](), set[tuple[str, str, bool]]()
        section = None
        for passage in read_passages(path):
            documents.append(self.hash_of(passage.document))
            self.judgements.add(passage)
            if (passage.document, passage.title) != section:
                section = passage.document, passage.title
                headings.append(hash(heading_of(passage.title)))
            parts.extend({hash(part.strip()) for part in passage.title.split(TRAIL)})
            files.append(hash(passage.file))
            self._add_links(passage, seen)
            item = (-self.hash_of(passage.id), -self.num_passages, passage.id, f"{passage.title} {passage.text}")
            (heapq.heappush if len(sample) < _SAMPLE else heapq.heappushpop)(sample, item)
            self.num_passages += 1
        self.document_N = np.frombuffer(documents, np.uint64)
        self._common, self._shared = _repeated(headings), _repeated(parts)
        targets = sorted({file for found in self.links.values() for *_, file in found})
        is_file_F = np.isin(np.array([*map(hash, targets)], np.int64), np.frombuffer(files, np.int64))
        self.files = {*compress(targets, is_file_F)}
        self.words = WordStatistics([(identifier, text) for *_, identifier, text in sorted(sample, reverse=True)])

    def hash_of(self, name: str) -> int:
        """A random number below 2^63 for a document or passage."""
        return derive_seed(self.settings.seed, "queries", name)

    def is_common(self, heading: str) -> bool:
        return hash(heading) in self._common

    def is_shared(self, heading: str) -> bool:
        return hash(heading) in self._shared

    def _add_links(self, passage: Passage, seen: set[tuple[str, str, bool]]) -> None:
        for text, target in passage.links:
            text = plain(text)
            if ":" in target or not target or num_words(text) < KINDS["anchor"].least_words or len(seen) >= _MAX_LINKS:
                continue
            file, _, fragment = target.partition("#")
            relative = passage.file
            if file:
                relative = posixpath.normpath(posixpath.join(posixpath.dirname(passage.file), file))
            key = key_of(text), target, relative == passage.file
            if file and key not in seen:
                seen.add(key)
                for name in {file, relative} - {passage.file}:
                    self.links.setdefault(f"{name}#{fragment}", []).append((text, passage.document, file))

    def find_judged(self, name: Path) -> None:
        """Find the judged answers of the log in the passages, and note which queries are of no use."""
        if not self.log.labels:
            useless = "no row is judged; fill in relevant with true or false"
            if not self.log.num_unjudged:
                useless = "the queries name no passages, so they only serve for the file of labels"
            self.report.notes.append(f"{name}: {useless}")
            return
        self.judgements.find_answers(self.path)
        if not self.judgements.documents:
            example = next((label.name or label.answer for label in self.log.labels if label.grade > 0), "")
            what = f"no query names a relevant passage of {self.path} (such as {example[:60]!r})"
            raise InputError(str(name), what, "write the id of a passage, the name of its document, or an answer")
        num_queries = len({label.query for label in self.log.labels if label.grade > 0})
        if lost := num_queries - len(self.judgements.documents):
            self.report.notes.append(f"{lost} of {num_queries} real queries name no passage, and are left out")
        for shared in sorted(self.judgements.shared)[:1]:
            what = "is the id of rows in several files, which are all judged: name their passages"
            self.report.notes.append(f"{shown(shared)} {what}")

    def split(self) -> None:
        """Hold out documents, and divide the real queries."""
        settings, notes, documents = self.settings, self.report.notes, self.judgements.documents
        is_real = bool(self.log.labels)
        share = settings.held_out_share
        if share == 0 and not is_real:
            rule = "must be > 0 without judged queries: there would be no test"
            raise OptionError("held_out_share", share, rule, "give judgements by --queries, or leave it out")
        share = (0.0 if is_real else HELD_OUT_SHARE) if share is None else share
        document_D = np.unique(self.document_N)
        # At least one document is on each side.
        num_held_out = min(max(round(share * len(document_D)), 1), len(document_D) - 1) if share else 0
        self._limit = int(document_D[num_held_out - 1]) if num_held_out else -1
        # Queries about one document are on one side, but for that at the boundary.
        rows = sorted(sorted(documents), key=lambda row: derive_seed(settings.seed, "training", min(documents[row])))
        share = settings.training_share
        if share is None:
            share = 0.0 if len(rows) < MANY_REAL else (1 - settings.validation_share) * 2 / 3
        num_trained = round(share * len(rows))
        self.trained = sorted(rows[:num_trained])
        rows = sorted(rows[num_trained:], key=lambda row: derive_seed(settings.seed, "validation", str(row)))
        num_validation = round(settings.validation_share * len(documents))
        self.real = {"evaluation": sorted(rows[num_validation:]), "validation": sorted(rows[:num_validation])}
        judged = set[str]().union(*(documents[row] for row in rows))
        self._judged = judged if settings.hold_out_judged else set[str]()
        hash_J = np.array(sorted(map(self.hash_of, self._judged)), np.uint64)
        is_held_D = (np.arange(len(document_D)) < num_held_out) | np.isin(document_D, hash_J)
        self.num_held_out = int(np.isin(self.document_N, document_D[is_held_D]).sum())
        self.num_training = self.num_passages - self.num_held_out
        self.report.counts = {
            "passages": self.num_passages,
            "documents": len(document_D),
            "held_out_documents": int(is_held_D.sum()),
            "held_out_passages": self.num_held_out,
        }
        if self.num_training < MIN_PASSAGES:
            rest = f"{self.num_training} of {self.num_passages} passages are not held out"
            judged_too = " (--hold-out-judged false trains on those that answer real queries)" if self._judged else ""
            notes.append(f"{rest}, too few to train on: {MIN_PASSAGES} are needed{judged_too}; no pairs are written")
            # Nothing is trained, so that all but the validation is a test.
            self.real["evaluation"], self.trained = sorted([*self.real["evaluation"], *self.trained]), []
        if not num_held_out and not self._judged and not is_real:
            notes.append("there is one document: nothing can be held out, and there is no test")

    def is_held_out(self, document: str) -> bool:
        return self.hash_of(document) <= self._limit or document in self._judged

    def filtered(self, candidates: list[Candidate], is_kept: Sequence[bool], reason: str) -> list[Candidate]:
        """The candidates that are kept; the others are counted."""
        for each in compress(candidates, (not kept for kept in is_kept)):
            self.report.reject(each.kind, reason)
        return list(compress(candidates, is_kept))


def _repeated(hashes: "array[int]") -> set[int]:
    value, count = np.unique(np.frombuffer(hashes, np.int64), return_counts=True)
    return set(value[count > 1].tolist())


def heading_of(title: str) -> str:
    return title.rpartition(TRAIL)[2].strip()


def slug_of(title: str) -> str:
    """The name of the last heading in links: as on GitHub, lower-case words with hyphens, without punctuation."""
    slug: str = regex.sub(r"[^\w\p{M}-]", "", "-".join(heading_of(title).lower().split()))
    return slug


def _collect(survey: _Survey) -> list[Candidate]:
    """The candidates of a second pass over the passages that no rule on a single one rejects, each for one passage."""
    settings, report = survey.settings, survey.report
    is_trained = survey.num_training >= MIN_PASSAGES
    share = {
        False: settings.max_passages / max(1, survey.num_training) if is_trained else 0.0,
        True: _MAX_HELD_OUT / max(1, survey.num_held_out),
    }
    found, section, targets = list[Candidate](), None, set[str]()
    # The passage of each query by its hash, empty if there are several; also of queries that are not used.
    owner: dict[int, str] = {}
    for passage in read_passages(survey.path, "making queries of"):
        is_start, section = (passage.document, passage.title) != section, (passage.document, passage.title)
        is_held_out = survey.is_held_out(passage.document)
        offered = _linked(passage, is_start, survey, targets)
        if derive_seed(settings.seed, "sample", passage.id) < share[is_held_out] * _HALF:
            offered += proposals(passage, survey.is_common, is_start)
        elif not share[is_held_out]:
            continue
        for each in offered:
            key = hash(key_of(each.query))
            owner[key] = "" if owner.get(key, passage.id) != passage.id else passage.id
        kept = Counter[str]()
        for each in sorted(offered, key=lambda each: derive_seed(settings.seed, each.kind, each.query)):
            if each.kind in ("sentence", "docstring") and kept[each.kind] == settings.per_passage:
                continue
            report.count(each.kind, "proposed")
            if reason := survey.words.fault(each, passage):
                report.reject(each.kind, reason)
            else:
                kept[each.kind] += 1
                found.append(each)
    is_alone = [bool(owner[hash(key_of(each.query))]) for each in found]
    return survey.filtered(found, is_alone, "several passages have it")


def _written(survey: _Survey, offered: list[Candidate], model: QueryModel, output: Path) -> list[Candidate]:
    """The candidates of a language model for passages that are not held out."""
    examples = [each for each in offered if not survey.is_held_out(each.document)]
    found, causes, note = written_queries(
        survey.path, output, model, examples, survey.is_held_out, survey.words, survey.settings.seed
    )
    survey.report.notes.append(note)
    survey.report.count(MODEL_KIND, "proposed", len(found) + len(causes))
    for cause in causes:
        survey.report.reject(MODEL_KIND, cause)
    count = Counter(key_of(each.query) for each in found)
    return survey.filtered(found, [count[key_of(each.query)] == 1 for each in found], "several passages have it")


def _asked(survey: _Survey) -> list[Candidate]:
    """The real queries for training with each of their relevant passages that is not held out."""
    queries_of: dict[str, list[str]] = {}
    for row in survey.trained:
        for name, grade in survey.judgements.grades[row].items():
            if grade > 0:
                queries_of.setdefault(name, []).append(survey.log.queries[row])
    found = list[Candidate]()
    for passage in read_passages(survey.path, "finding real queries of") if queries_of else ():
        for query in queries_of.get(passage.id, ()):
            found.append(passage.candidate(query, REAL))
            survey.report.count(REAL, "proposed")
    is_free = [not survey.is_held_out(each.document) for each in found]
    return survey.filtered(found, is_free, "its passage is held out")


def _linked(passage: Passage, is_start: bool, survey: _Survey, targets: set[str]) -> list[Candidate]:
    """The texts of links that lead to a passage: the first of its file or of the section that the link names."""
    slug = slug_of(passage.title)
    found = list[Candidate]()
    for name in (f"{passage.file}#", f"{passage.file}#{slug}" if is_start and slug else ""):
        if name in survey.links and name not in targets:
            targets.add(name)
            for text, source, file in survey.links[name]:
                # A file of the written name is meant before one of this name in the folder of the link.
                is_other = file != passage.file and file in survey.files
                if not is_other and survey.is_held_out(source) == survey.is_held_out(passage.document):
                    repeats = survey.words.share(word_tokens(text), word_tokens(passage.title)) > 0.7
                    heading = heading_of(passage.title) if repeats else ""
                    found.append(passage.candidate(text, "anchor", heading=heading))
    return found


def _select(survey: _Survey, candidates: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """The candidates for training and for the pseudo test, after the rules that compare them with each other."""
    is_held_out = {each.document: survey.is_held_out(each.document) for each in candidates}
    # Of two near-copies the one that is held out comes first, and is kept.
    candidates.sort(key=lambda each: not is_held_out[each.document])
    rule = NearDuplicates(_NEAR_COPY, shingle="character")
    is_copy_C = rule.copies([each.query.casefold() for each in candidates])
    candidates = survey.filtered(candidates, (~is_copy_C).tolist(), "near-copy of another query")
    is_found_C = survey.words.ranks(candidates) < MAX_RANK
    found = survey.filtered(candidates, is_found_C.tolist(), "not found by the rest of its passage")
    # Other passages with the heading, and those with the link, would answer the query too.
    test = [each for each in found if is_held_out[each.document] and each.kind != "anchor"]
    test = [each for each in test if not each.heading or not survey.is_shared(each.heading)]
    training = [each for each in found if not is_held_out[each.document]]
    return training, _drawn(test, survey.settings.seed)


def _drawn(test: list[Candidate], seed: int) -> list[Candidate]:
    """At most one random query a passage, in turn of each kind, the rarest kinds first."""
    by_kind = {kind: [each for each in test if each.kind == kind] for kind in KINDS}
    queues = sorted((queue for queue in by_kind.values() if queue), key=len)
    for queue in queues:
        queue.sort(key=lambda each: derive_seed(seed, "test", each.query), reverse=True)
    drawn, passages = list[Candidate](), set[str]()
    while any(queues) and len(drawn) < _MAX_TEST:
        for queue in filter(None, queues):
            while queue and (each := queue.pop()):
                if each.passage not in passages:
                    passages.add(each.passage)
                    drawn.append(each)
                    break
    return drawn[:_MAX_TEST]


def _decontaminated(
    survey: _Survey, training: list[Candidate], queries: list[str], more: EvaluationTexts | None
) -> list[Candidate]:
    """The training queries that resemble no evaluation query, of the test or of other evaluation folders."""
    texts = EvaluationTexts([*queries, *(more.queries if more else [])], more.documents if more else [])
    if not training or not any(texts):
        return training
    rule = Decontaminator(texts, _RESEMBLES)
    reason_C = rule.reasons([StoredRow(each.query, (each.positive,)) for each in training])
    return survey.filtered(training, (reason_C == KEPT).tolist(), "resembles an evaluation query")


def _write_real(new: Path, survey: _Survey) -> None:
    """Write the folders of real queries; both have the same corpus."""
    passages, corpus = survey.path, None
    for name, rows in survey.real.items():
        if rows:
            # The output of `passages` is a corpus, whose vectors are then needed only once.
            if corpus is None and passages.suffix == ".jsonl" and manifest_path(passages).exists():
                corpus = passages
            copied = read_passages(passages, "copying")
            documents = ({"_id": each.id, "title": each.title, "text": each.text} for each in copied)
            queries = ({"_id": f"q{row:06d}", "text": survey.log.queries[row], "kind": REAL} for row in rows)
            grades = survey.judgements.grades
            qrels = ((f"q{row:06d}", each, grade) for row in rows for each, grade in grades[row].items())
            write_retrieval_folder(new / name, corpus or documents, queries, qrels)
            corpus = new / name / "corpus.jsonl"


def _write_pseudo(folder: Path, passages: Path, test: Sequence[Candidate]) -> None:
    """Write the queries of held-out documents, and all passages; those of the queries lack the query's text."""
    without_query = {each.passage: each for each in test}
    shown = ((each.id, without_query.get(each.id, each)) for each in read_passages(passages, "writing the test of"))
    documents = ({"_id": name, "title": each.title, "text": each.text} for name, each in shown)
    queries = ({"_id": f"q{row:06d}", "text": each.query, "kind": each.kind, "passage": each.passage}
               for row, each in enumerate(test))  # fmt: skip
    qrels = ((f"q{row:06d}", each.passage, 1.0) for row, each in enumerate(test))
    write_retrieval_folder(folder, documents, queries, qrels)
