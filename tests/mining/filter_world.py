"""A source with planted copies, contaminated records and inconsistent pairs, and a stand-in model for topics."""

import random
import re
from functools import cache

import numpy as np

from embeddings.common.io import text_hash
from embeddings.data import SourceConfig
from embeddings.inference import Encoder
from embeddings.mining.duplicates import Decontaminator, EvaluationTexts
from embeddings.mining.filter import FilterRules, filter_pairs
from tests.data.rows import write_jsonl
from tests.inference.models import tiny_embedder

NUM_CLEAN = 40
EVALUATION = EvaluationTexts(
    ["What is the *evaluated* question, please?", "how long does the longest river of africa flow"],
    ["An evaluated document about mountains and the glaciers on them."],
)
RULES = FilterRules(near_duplicates=0.8, top_k=2, segment_size=16, seed=3)


def words(seed, count=30):
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(10_000)}" for _ in range(count))


def clean_record(row):
    """Query and document of one topic, with all fields of a record."""
    return {
        "query": f"topic {row} question {words(row, 12)}",
        "positive": [f"topic {row} answer {words(1000 + row)}", f"topic {row} more {words(2000 + row)}"][: 1 + row % 2],
        "negatives": [{"text": f"negative {words(3000 + row, 5)}", "level": 1 + row % 4}] * (row % 3),
        "label": row % 5 if row % 2 else None,
        "score": row / 7,
        "id": f"record {row}",
        "instruction": "find it" if row % 4 == 0 else None,
        "other": "a column that nobody asks for",
    }


def planted_records():
    """Records, each with the index in `filter.RULES` (from 1) of the rule that removes it, or 0."""
    records = [(clean_record(row), 0) for row in range(NUM_CLEAN)]
    copy = {**clean_record(3), "query": f"  {clean_record(3)['query']}\n", "negatives": None, "id": "copy"}
    near = {**clean_record(4), "positive": clean_record(4)["positive"][0].replace("answer", "ANSWER") + " more"}
    other_question = {**clean_record(6), "query": f"topic 6 asks {words(77, 12)}", "id": "other question"}
    equal = {"query": "what is the evaluated QUESTION please", "positive": f"topic 1 x {words(5000)}"}
    equal_document = {"query": f"topic 2 {words(5001)}", "positive": [words(5002), EVALUATION.documents[0].upper()]}
    similar = {"query": "Longest river of Africa: how long", "positive": f"topic 8 {words(5003)}"}
    inconsistent = {"query": f"topic 9 {words(5004)}", "positive": f"topic 39 {words(5005)}"}
    planted = [
        (copy, 1),
        (near, 2),
        (other_question, 0),
        (equal, 3),
        (equal_document, 3),
        (similar, 4),
        (inconsistent, 5),
    ]
    generator = random.Random(0)
    for record, reason in planted:
        # After the original record.
        records.insert(generator.randrange(12, len(records) + 1), (record, reason))
    return records


def topic_vectors(self, texts, prompt_name=None, context=None, role=None):
    """A vector for each text, close to those of the same topic; without a topic, close to no other."""
    vectors = np.empty((len(texts), 32), np.float32)
    for row, text in enumerate(texts):
        topic = re.search(r"topic \d+", text)
        base = np.random.default_rng(text_hash(topic[0]) % 2**63 if topic else text_hash(text) % 2**63)
        vectors[row] = base.normal(size=32) + 0.2 * np.random.default_rng(text_hash(text) % 2**63).normal(size=32)
    return vectors


@cache
def topic_encoder():
    return Encoder(tiny_embedder(), precision="float32")


def write_source(folder):
    return SourceConfig("input", str(write_jsonl(folder / "pairs.jsonl", [record for record, _ in planted_records()])))


def run_filter(config, output, task=None, rules=RULES):
    """Filter by all rules, in shards of a few records."""
    return filter_pairs(
        config,
        output,
        rules,
        decontaminator=Decontaminator(EVALUATION, 0.7),
        encoder=topic_encoder(),
        shard_size=8,
        task=task,
        cache_dir=output.parent / "cache",
    )
