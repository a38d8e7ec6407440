"""Pairs and held-out sets for the experiments on a pretrained decoder, from public sets in EMBED_DATA.

Three tenths of the topics of MedQuAD, and of the questions of the other sets, are held out for validation and test.
With `tiny`, all texts are invented, and EMBED_DATA is not needed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.workloads import data_folder, read_json_lines
from embeddings.evaluation import Qrels, RetrievalFolder, read_retrieval_folder
from embeddings.evaluation.folders import query_ndcg, spearman
from embeddings.inference import Encoder, search_top_k

# Training pairs come from these sets in equal parts. Each sentence of the last one also has a contradiction.
RETRIEVAL = ("nq_pairs", "squad_sentence_pairs", "medquad_pairs", "codenn_pairs")
SENTENCES = "snli_triplets"
# The sets that models are scored on, with their numbers of queries and documents. The last two are not trained on.
TESTS = {"medquad": (150, 400), "nq": (150, 400), "cranfield": (100, 700), "stack exchange": (150, 500)}
VALIDATION = {"medquad": (60, 200), "nq": (60, 200)}
SIMILARITY, NUM_SIMILARITY = "STS-B", 400
# What precedes the topic in a question of MedQuAD.
_QUESTION = re.compile(
    r"(?i)what is \(are\) |what (?:is|are) the [\w ,()-]+? (?:for|of|to|related to) |what (?:causes|to do for) "
    r"|what research \(or clinical trials\) is being done for |who is at risk for "
    r"|how (?:to (?:diagnose|prevent|find)|many people are affected by) |do you have information about |is |are "
)

Records = list[dict[str, Any]]
Floats = npt.NDArray[np.float64]


def topic(question: str) -> str:
    """The disease that a question of MedQuAD is about."""
    named = question.rstrip("? ").removesuffix(" inherited")
    opening = _QUESTION.match(named)
    return (named[opening.end() :] if opening else named).lower()


def records_of(name: str, tiny: bool) -> Records:
    """The records of a set with a query and a positive each; sentences without a contradiction are left out."""
    if tiny:
        texts = [f"what is word{row} {name}?" for row in range(60)]
        return [{"query": text, "positive": f"{text} it is so", "negatives": [f"no {text}"]} for text in texts]
    folder = data_folder() / name
    rows = read_json_lines(next(folder.glob("train.jsonl*")))
    return [row for row in rows if name != SENTENCES or row["negatives"]]


def split(name: str, tiny: bool) -> tuple[Records, Records, Records]:
    """The records of a set for training, validation and test, without repeated queries and documents.

    Those for training are in random order, those for validation and test by topic.
    """
    rows, seen = [], set[str]()
    for row in records_of(name, tiny):
        if not seen & {row["query"], row["positive"]}:
            rows.append(row)
            seen |= {row["query"], row["positive"]}
    generator = np.random.default_rng(0)
    groups = [topic(row["query"]) if name == "medquad_pairs" else row["query"] for row in rows]
    unique = sorted(set(groups))
    place = dict(zip(unique, (generator.permutation(len(unique)) / len(unique)).tolist(), strict=True))
    place_N = np.array([place[group] for group in groups])
    random_N = generator.permutation(len(rows))
    training = [rows[row] for row in random_N.tolist() if place_N[row] >= 0.3]
    by_topic = np.argsort(place_N, kind="stable").tolist()
    validation = [rows[row] for row in by_topic if 0.2 <= place_N[row] < 0.3]
    return training, validation, [rows[row] for row in by_topic if place_N[row] < 0.2]


def pairs_folder(rows: Records, num_queries: int, num_documents: int) -> RetrievalFolder:
    """The documents of the first rows, and queries of random ones among them; a query may have several documents."""
    rows = rows[:num_documents]
    documents = list(dict.fromkeys(row["positive"] for row in rows))
    every = list(dict.fromkeys(row["query"] for row in rows))
    queries = [every[row] for row in np.random.default_rng(0).permutation(len(every))[:num_queries].tolist()]
    query_row, document_row = ({text: row for row, text in enumerate(texts)} for texts in (queries, documents))
    judged = {
        (query_row[row["query"]], document_row[row["positive"]], 1.0) for row in rows if row["query"] in query_row
    }
    return _folder(queries, documents, sorted(judged))


def sampled(folder: RetrievalFolder, num_queries: int, num_documents: int) -> RetrievalFolder:
    """Random queries of a folder, their relevant documents, and random other ones."""
    generator, qrels = np.random.default_rng(0), folder.qrels
    queries = generator.permutation(len(folder.queries))[:num_queries].tolist()
    kept = [
        (query, document, relevance)
        for query, document, relevance in zip(
            qrels.query_J.tolist(), qrels.document_J.tolist(), qrels.relevance_J.tolist(), strict=True
        )
        if query in set(queries)
    ]
    relevant = sorted({document for _, document, _ in kept})
    others = np.setdiff1d(generator.permutation(len(folder.documents)), relevant)
    generator.shuffle(others)
    documents = [*relevant, *others[: max(0, num_documents - len(relevant))].tolist()]
    query_row, document_row = ({old: row for row, old in enumerate(olds)} for olds in (queries, documents))
    judged = sorted((query_row[query], document_row[document], relevance) for query, document, relevance in kept)
    return _folder([folder.queries[row] for row in queries], [folder.documents[row] for row in documents], judged)


def _folder(queries: list[str], documents: list[str], judged: list[tuple[int, int, float]]) -> RetrievalFolder:
    qrels = Qrels.of(judged, len(queries), len(documents))
    document_ids, query_ids = (list(map(str, range(len(texts)))) for texts in (documents, queries))
    return RetrievalFolder(documents, document_ids, queries, query_ids, qrels)


@dataclass(frozen=True)
class HeldOut:
    """The held-out sets.

    Attributes:
        searched: Collections by name; those for validation have a name that begins so.
        sentences: The pairs of sentences of STS-B.
        similarity_N: The similarity of each pair, (N,) float64.
    """

    searched: dict[str, RetrievalFolder]
    sentences: Sequence[tuple[str, str]]
    similarity_N: Floats

    @classmethod
    def load(cls, tiny: bool) -> "HeldOut":
        """The held-out sets; if tiny, a few invented texts of each."""

        def small(sizes: tuple[int, int]) -> tuple[int, int]:
            return (3, 6) if tiny else sizes

        cranfield = (
            pairs_folder(records_of("cranfield", tiny), 6, 12)
            if tiny
            else read_retrieval_folder(data_folder() / "cranfield")
        )
        searched = {
            "medquad": pairs_folder(split("medquad_pairs", tiny)[2], *small(TESTS["medquad"])),
            "nq": pairs_folder(split("nq_pairs", tiny)[2], *small(TESTS["nq"])),
            "cranfield": sampled(cranfield, *small(TESTS["cranfield"])),
            "stack exchange": pairs_folder(
                _shuffled(records_of("se_answers_pairs", tiny)), *small(TESTS["stack exchange"])
            ),
        }
        for name, sizes in VALIDATION.items():
            searched[f"validation {name}"] = pairs_folder(split(f"{name}_pairs", tiny)[1], *small(sizes))
        if tiny:
            rows = [
                {"sentence1": row["query"], "sentence2": row["positive"], "score": place}
                for place, row in enumerate(records_of(SIMILARITY, tiny)[:4])
            ]
        else:
            rows = _shuffled(read_json_lines(data_folder() / "stsb" / "test.jsonl"))[:NUM_SIMILARITY]
        sentences = [(row["sentence1"], row["sentence2"]) for row in rows]
        return cls(searched, sentences, np.array([row["score"] for row in rows], dtype=np.float64))


def _shuffled(rows: Records) -> Records:
    return [rows[row] for row in np.random.default_rng(0).permutation(len(rows)).tolist()]


def item_scores(encoder: Encoder, held_out: HeldOut) -> dict[str, Floats]:
    """nDCG@10 of each query of each collection, and the cosine of each pair of sentences."""
    scores = {}
    for name, folder in held_out.searched.items():
        query_QD, document_ND = (
            encoder.comparable(vectors)
            for vectors in (encoder.encode_query(folder.queries), encoder.encode_document(folder.documents))
        )
        found = search_top_k(query_QD, document_ND, 10, encoder.device, folder.tie_order_N)
        scores[name] = query_ndcg(found.index_QK, folder.qrels)
    first_ND, second_ND = (
        encoder.comparable(encoder.encode_query([pair[side] for pair in held_out.sentences])) for side in (0, 1)
    )
    scores[SIMILARITY] = (first_ND.astype(np.float64) * second_ND).sum(axis=1)
    return scores


def metrics_of(scores: dict[str, Floats], held_out: HeldOut) -> dict[str, float]:
    """The mean nDCG@10 of each test set and of the validation sets, and Spearman's correlation on the sentences."""
    metrics = {name: float(scores[name].mean()) for name in TESTS}
    metrics["validation"] = float(np.mean([scores[f"validation {name}"].mean() for name in VALIDATION]))
    return {**metrics, SIMILARITY: spearman(scores[SIMILARITY], held_out.similarity_N)}
