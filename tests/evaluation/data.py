"""Tiny evaluation folders."""

import json


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_retrieval(folder):
    """Six documents; queries a and b have relevant documents, d an irrelevant one, and c no judgment."""
    texts = ["quick brown fox", "lazy dog", "pad sequences", "one length", "two numbers", "brown dog"]
    write_rows(
        folder / "corpus.jsonl", [{"_id": f"d{i}", "title": "the", "text": text} for i, text in enumerate(texts)]
    )
    queries = {"a": "brown fox", "c": "no judgment", "b": "numbers", "d": "judged, none relevant"}
    write_rows(folder / "queries.jsonl", [{"_id": name, "text": text} for name, text in queries.items()])
    judgments = [("b", "d4", 1), ("a", "d0", 2), ("a", "d5", 1), ("a", "d1", 0), ("d", "d1", 0)]
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in judgments)]
    (folder / "qrels.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_similarity(folder):
    pairs = [("the fox", "the fox", 5), ("the fox", "a fox", 4.0), ("the fox", "a dog", 2), ("the fox", "lengths", 0)]
    write_rows(folder / "test.jsonl", [{"sentence1": a, "sentence2": b, "score": s, "genre": "x"} for a, b, s in pairs])
    return folder


def write_labelled(folder, with_train):
    """Texts of two labels with different words."""
    rows = [{"text": f"fox jumps over {i}", "label": "animal"} for i in range(6)]
    rows += [{"text": f"pad sequences length {i}", "label": 1} for i in range(6)]
    write_rows(folder / "test.jsonl", rows[::2])
    if with_train:
        write_rows(folder / "train.jsonl", rows[1::2])
    return folder


def write_pair_classification(folder):
    """Four pairs, two of them with the same meaning."""
    pairs = [("the fox", "a fox", 1), ("brown dog", "the brown dog", True), ("pad sequences", "lazy dog", 0)]
    pairs.append(("two numbers", "the quick fox", False))
    write_rows(folder / "test.jsonl", [{"sentence1": a, "sentence2": b, "label": x, "genre": "x"} for a, b, x in pairs])
    return folder


def write_reranking(folder):
    """Two queries that share candidates; the first repeats two candidates."""
    relevant = ["the quick brown fox", "brown dog", "brown dog"]
    rows = [{"query": "brown fox", "positive": relevant, "negatives": ["two numbers", "one length", "two numbers"]}]
    rows.append({"query": "length", "positive": "one length", "negatives": ["lazy dog", "the quick brown fox"]})
    write_rows(folder / "test.jsonl", rows)
    return folder


def write_summarisation(folder):
    """Three texts, the last with equal ratings."""
    texts = [
        (["the fox", "a fox"], ["quick brown fox", "lazy dog", "two numbers"], [3, 2, 1]),
        (["two numbers"], ["one number", "the dog"], [1.5, 4]),
        (["pad sequences"], ["one length", "the dog"], [2, 2]),
    ]
    rows = [{"text": "x", "human_summaries": h, "machine_summaries": m, "relevance": marks} for h, m, marks in texts]
    write_rows(folder / "test.jsonl", rows)
    return folder
