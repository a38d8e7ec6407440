"""Stand-ins for the data sets of AIR-Bench in their layout: a card that lists the files of each split."""

import json
import random
from pathlib import Path

import datasets
import huggingface_hub.constants

from tests.evaluation.data import write_rows
from tests.evaluation.task_sets import WORDS

# Data sets and their splits in the two versions, as in their cards.
CARDS = {
    "qa_finance_en": {"24.04": {"default": ["test"]}, "24.05": {"default": ["dev", "test"]}},
    "qa_law_en": {"24.04": {"default": ["test"]}, "24.05": {"default": ["dev", "test"]}},
    "qa_law_de": {"24.05": {"default": ["dev", "test"]}},
    "long-doc_arxiv_en": {
        "24.04": {"gpt3": ["test"], "llama2": ["test"], "gemini": ["test"], "llm-survey": ["test"]},
        "24.05": {"gpt3": ["test"], "llama2": ["dev"], "gemini": ["test"], "llm-survey": ["test"]},
    },
}
NUM_DOCUMENTS, NUM_QUERIES = 40, 8


def write_air_bench(root: Path) -> Path:
    """The data sets below `root / "AIR-Bench"`; each has other documents, queries and labels."""
    for repository, versions in CARDS.items():
        configs, labels = [], []
        for version, sets in versions.items():
            files, labelled = [], []
            for dataset, splits in sets.items():
                folder = f"AIR-Bench_{version}/{dataset}"
                name, place = dataset.replace("-", "_"), root / "AIR-Bench" / repository / folder
                draw = random.Random(f"{repository} {dataset}")
                texts = [" ".join(draw.choices(WORDS, k=8)) for _ in range(NUM_DOCUMENTS)]
                write_rows(place / "corpus.jsonl", [{"id": f"doc-{i}", "text": text} for i, text in enumerate(texts)])
                files.append((f"corpus_{name}", f"{folder}/corpus.jsonl"))
                for split in splits:
                    picked = draw.sample(range(NUM_DOCUMENTS), NUM_QUERIES)
                    queries = [" ".join(draw.sample(texts[row].split(), 3)) for row in picked]
                    rows = [{"id": f"q-{i}", "text": text} for i, text in enumerate(queries)]
                    write_rows(place / f"{split}_queries.jsonl", rows)
                    of_split = f"queries_{name}" if version == "24.04" else f"queries_{name}_{split}"
                    files.append((of_split, f"{folder}/{split}_queries.jsonl"))
                    if split == "dev":
                        beside = root / "AIR-Bench" / f"qrels-{repository}-dev" / folder
                        write_rows(beside / "dev_qrels.jsonl", _labels(picked, draw))
                        labelled.append((f"qrels_{name}_dev", f"{folder}/dev_qrels.jsonl"))
            configs.append((version, files))
            if labelled:
                labels.append((version, labelled))
        _write_card(root / "AIR-Bench" / repository, configs)
        if labels:
            _write_card(root / "AIR-Bench" / f"qrels-{repository}-dev", labels)
    return root


def _labels(picked: list[int], draw: random.Random) -> list[dict[str, object]]:
    """The document that each query was drawn from, another relevant one, and a hard negative."""
    rows: list[dict[str, object]] = []
    for query, row in enumerate(picked):
        other, negative = draw.sample([other for other in range(NUM_DOCUMENTS) if other != row], 2)
        for document, grade in ((row, 1), (other, 1), (negative, 0)):
            rows.append({"qid": f"q-{query}", "docid": f"doc-{document}", "relevance": grade})
    return rows


def _write_card(folder: Path, configs: list[tuple[str, list[tuple[str, str]]]]) -> None:
    lines = ["---", "configs:"]
    for version, files in configs:
        lines += [f"  - config_name: AIR-Bench_{version}", "    data_files:"]
        for split, path in files:
            lines += [f"      - split: {split}", f'        path: "{path}"']
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def stand_in(monkeypatch, tmp_path: Path) -> Path:
    """Make `datasets` find the stand-ins, which it does in the working directory, with a temporary cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    world = write_air_bench(tmp_path / "world")
    monkeypatch.chdir(world)
    return world


def read_set(world: Path, repository: str, dataset: str = "default", version: str = "24.05", split: str = "dev"):
    """Read documents, queries and labels, if any, of a stand-in."""
    folder = f"AIR-Bench_{version}/{dataset}"
    lines = (world / "AIR-Bench" / repository / folder / "corpus.jsonl").read_text().splitlines()
    corpus = {row["id"]: row["text"] for row in map(json.loads, lines)}
    lines = (world / "AIR-Bench" / repository / folder / f"{split}_queries.jsonl").read_text().splitlines()
    queries = {row["id"]: row["text"] for row in map(json.loads, lines)}
    labels = world / "AIR-Bench" / f"qrels-{repository}-dev" / folder / f"{split}_qrels.jsonl"
    relevant: dict[str, set[str]] = {}
    for row in map(json.loads, labels.read_text().splitlines() if labels.is_file() else []):
        if row["relevance"] > 0:
            relevant.setdefault(row["qid"], set()).add(row["docid"])
    return corpus, queries, relevant
