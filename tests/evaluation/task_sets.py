"""Small data sets with scores between 0 and 1, as evaluation folders and as tasks of mteb in memory."""

import random
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from mteb import TaskMetadata
from mteb.abstasks import AbsTaskPairClassification, AbsTaskRetrieval, AbsTaskSummarization

from tests.evaluation.data import write_rows

TOPICS = {
    "sea": ["boat", "harbour", "sail", "storm", "wave", "anchor", "captain", "island"],
    "kitchen": ["oven", "knife", "bread", "salt", "recipe", "butter", "pan", "dinner"],
    "court": ["judge", "trial", "lawyer", "verdict", "appeal", "witness", "prison", "law"],
}
WORDS = [word for words in TOPICS.values() for word in words]


def write_sets(root: Path) -> Path:
    """One folder of each kind below `root`: search, pairs, topics (classification) and groups (clustering)."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=8)) for _ in range(24)]
    write_rows(
        root / "search" / "corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": t} for i, t in enumerate(texts)]
    )
    queries = [" ".join(draw.sample(text.split(), 2)) for text in texts[:12]]
    write_rows(root / "search" / "queries.jsonl", [{"_id": f"q{i}", "text": text} for i, text in enumerate(queries)])
    rows = [f"q{i}\td{i}\t2\nq{i}\td{i + 12}\t1" for i in range(12)]
    (root / "search" / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n")
    pairs = []
    for text in texts:
        kept = draw.randint(0, 6)
        other = [*text.split()[:kept], *draw.choices(WORDS, k=8 - kept)]
        pairs.append({"sentence1": text, "sentence2": " ".join(other), "score": kept + draw.random()})
    write_rows(root / "pairs" / "test.jsonl", pairs)
    labelled = [{"text": topic_text(topic, draw), "label": topic} for _ in range(16) for topic in TOPICS]
    write_rows(root / "topics" / "train.jsonl", labelled[:24])
    write_rows(root / "topics" / "test.jsonl", labelled[24:])
    write_rows(root / "groups" / "test.jsonl", labelled)
    return root


def topic_text(topic: str, draw: random.Random) -> str:
    """Two words of a topic and four random words."""
    return " ".join([*draw.choices(TOPICS[topic], k=2), *draw.choices(WORDS, k=4)])


def other_tasks() -> list[Any]:
    """Pair classification, reranking and summarisation."""
    draw = random.Random(1)
    texts = [topic_text(topic, draw) for _ in range(8) for topic in TOPICS]
    labels = [int(draw.random() < 0.5) for _ in texts]
    others = [
        draw.choice(texts) if label == 0 else " ".join(text.split()[::2])
        for text, label in zip(texts, labels, strict=True)
    ]
    pairs = Dataset.from_dict({"sentence1": texts, "sentence2": others, "labels": labels})
    ranked = {f"q{i}": [f"d{(i * 5 + j) % 24}" for j in range(6)] for i in range(6)}
    rerank = {
        "corpus": Dataset.from_dict({"id": [f"d{i}" for i in range(24)], "title": ["the"] * 24, "text": texts}),
        "queries": Dataset.from_dict(
            {"id": list(ranked), "text": [" ".join(draw.choices(WORDS, k=3)) for _ in ranked]}
        ),
        "relevant_docs": {query: {documents[1]: 1, documents[4]: 1} for query, documents in ranked.items()},
        "top_ranked": ranked,
    }
    summaries = Dataset.from_dict(
        {
            "text": texts[:4],
            "human_summaries": [texts[i : i + 2] for i in range(4)],
            "machine_summaries": [texts[i + 4 : i + 9] for i in range(4)],
            "relevance": [[draw.random() for _ in range(5)] for _ in range(4)],
        }
    )
    return [
        memory_task("Pairs", "PairClassification", "max_ap", AbsTaskPairClassification, DatasetDict(test=pairs)),
        memory_task("Reranked", "Reranking", "map_at_10", AbsTaskRetrieval, {"default": {"test": rerank}}),
        memory_task("Summaries", "Summarization", "cosine_spearman", AbsTaskSummarization, DatasetDict(test=summaries)),
    ]


def write_other_sets(root: Path, tasks: list[Any]) -> Path:
    """The data of `other_tasks` in folders below `root`, with the names of the tasks."""
    pairs, reranked, summaries = tasks
    for task in tasks:
        task.load_data()
    rows = [{"label" if name == "labels" else name: row[name] for name in row} for row in pairs.dataset["test"]]
    write_rows(root / "Pairs" / "test.jsonl", rows)
    split = reranked.dataset["default"]["test"]
    texts = {row["id"]: f"{row['title']} {row['text']}" for row in split["corpus"]}
    rows = []
    for query in split["queries"]:
        relevant = split["relevant_docs"][query["id"]]
        others = [texts[name] for name in split["top_ranked"][query["id"]] if name not in relevant]
        rows.append({"query": query["text"], "positive": [texts[name] for name in relevant], "negatives": others})
    write_rows(root / "Reranked" / "test.jsonl", rows)
    write_rows(root / "Summaries" / "test.jsonl", list(summaries.dataset["test"]))
    return root


def memory_task(name: str, kind: str, main_score: str, base: Any, dataset: Any) -> Any:
    metadata = TaskMetadata(
        name=name,
        dataset={"path": name, "revision": "1"},
        description="Words.",
        type=kind,
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )

    def load_data(self: Any, **options: Any) -> None:
        self.dataset, self.data_loaded = dataset, True

    scale = {"min_score": 0, "max_score": 1}
    return type(name, (base,), {"metadata": metadata, "load_data": load_data, **scale})()
