"""Small runs with the real command line."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import lightning.pytorch.callbacks
import yaml
from transformers.trainer_utils import set_seed

from embeddings.cli.fit import run_trainer
from embeddings.common.io import read_metrics
from tests.helpers.tiny import save_backbone, sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer

WORDS = [
    "pad", "sequences", "one", "length", "quick", "brown", "fox", "jumps", "lazy", "dog", "sum", "two", "numbers",
    "return", "question", "passage",
]  # fmt: skip


def component(class_path: str, **init_args: Any) -> dict[str, Any]:
    """A class path with arguments for a config; a callback of Lightning or of this library needs only its name."""
    if "." not in class_path:
        owner = "lightning.pytorch" if hasattr(lightning.pytorch.callbacks, class_path) else "embeddings"
        class_path = f"{owner}.callbacks.{class_path}"
    return {"class_path": class_path, "init_args": init_args}


def write_pairs(path: Path, num_pairs: int = 64, num_negatives: int = 2) -> Path:
    """Training records whose query shares two words with its positive and none with its negatives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for row in range(num_pairs):
            first, second = WORDS[row % len(WORDS)], WORDS[(row // len(WORDS) * 3 + row + 1) % len(WORDS)]
            negatives = [f"{WORDS[(row + 5 + n) % len(WORDS)]} {row + n}" for n in range(num_negatives)]
            record = {"query": f"{first} {second} {row}", "positive": f"the {first} and {second} {row}"}
            file.write(json.dumps(record | {"negatives": negatives}) + "\n")
    return path


def write_retrieval_folder(folder: Path, num_queries: int = 8) -> Path:
    """A retrieval folder over the same words."""
    folder.mkdir(parents=True)
    with (
        open(folder / "corpus.jsonl", "w") as corpus,
        open(folder / "queries.jsonl", "w") as queries,
        open(folder / "qrels.tsv", "w") as qrels,
    ):
        qrels.write("query-id\tcorpus-id\tscore\n")
        for row in range(num_queries):
            first, second = WORDS[row], WORDS[-row - 1]
            corpus.write(json.dumps({"_id": f"d{row}", "title": "", "text": f"the {first} and {second}"}) + "\n")
            queries.write(json.dumps({"_id": f"q{row}", "text": f"{first} {second}"}) + "\n")
            qrels.write(f"q{row}\td{row}\t1\n")
    return folder


def backbone_folder(folder: Path, kind: str = "bert", dropout: float = 0.0) -> str:
    """A tiny backbone with its tokenizer on disk: `bert` (encoder) or `mistral` (decoder)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _backbone_files(kind, dropout).items():
        # A model may have mapped the file that is replaced.
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)
    set_seed(0)
    return str(folder)


@cache
def _backbone_files(kind: str, dropout: float) -> dict[str, bytes]:
    """The content of each file of a tiny backbone; hundreds of runs start from one."""
    with TemporaryDirectory() as folder:
        if kind == "bert":
            save_backbone(folder, tiny_bert(dropout=dropout), wordpiece_tokenizer())
        else:
            save_backbone(folder, tiny_mistral(), sentencepiece_tokenizer())
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def tiny_trainer(folder: Path) -> dict[str, Any]:
    """A trainer of four steps on one CPU that logs each of them to a CSV file."""
    return {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 4,
        "use_distributed_sampler": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": str(folder / "run"),
        "logger": component("lightning.pytorch.loggers.CSVLogger", save_dir=str(folder / "run"), name="tiny"),
        "callbacks": [],
    }


def quiet_trainer(**options: Any) -> lightning.Trainer:
    """A trainer on the CPU that by default shows and writes nothing."""
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(**({"accelerator": "cpu"} | off | options))


def run_config(folder: Path, kind: str = "bert", dropout: float = 0.0, **data: Any) -> dict[str, Any]:
    """A config of a tiny NV-Embed run in `folder`: four steps of eight pairs."""
    lora = {"rank": 4, "alpha": 8, "dropout": dropout} if kind == "mistral" else None
    sources = [{"name": "pairs", "path": str(write_pairs(folder / "pairs.jsonl"))}]
    text = {"query_max_length": 16, "document_max_length": 16}
    usual = {"text": text, "batch_size": 8, "num_negatives": 2, "cache_dir": str(folder / "cache"), "sources": sources}
    return {
        "seed_everything": 0,
        "trainer": tiny_trainer(folder),
        "model": component(
            "embeddings.modules.NVEmbedModule",
            backbone={"name": backbone_folder(folder / "backbone", kind, dropout), "bidirectional": kind == "mistral"},
            pooling=component("embeddings.models.LatentAttentionPooling", num_latents=4, num_heads=2, head_dim=8),
            lora=lora,
            loss=component("embeddings.losses.InfoNCE", temperature=0.1),
            optimizer=component("torch.optim.AdamW", lr=1e-2),
            schedule={"warmup_steps": 1, "decay": "linear"},
        ),
        "data": component("embeddings.data.EmbeddingDataModule", **(usual | data)),
    }


def float16_on_cpu(config: dict[str, Any]) -> dict[str, Any]:
    """The config with `16-mixed` and a loss scaler; Lightning's `precision` option rejects this on a CPU."""
    options = {"precision": "16-mixed", "device": "cpu"}
    plugin = component("lightning.pytorch.plugins.MixedPrecision", **options)
    return config | {"trainer": config["trainer"] | {"plugins": [plugin]}}


def write_config(folder: Path, config: dict[str, Any], name: str = "config.yaml") -> str:
    """Write a config file; returns its path."""
    path = folder / name
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


def fit(folder: Path, config: dict[str, Any], *arguments: str) -> Any:
    """Run `fit` with the real parser; returns the CLI with its trainer, model and data."""
    return run_trainer(["fit", "--config", write_config(folder, config), *arguments])


def logged_rows(folder: Path, column: str) -> list[dict[str, str]]:
    """The rows of all `metrics.csv` files below a folder that have a value in a column."""
    rows = [row for path in sorted(folder.rglob("metrics.csv")) for row in read_metrics(path)]
    return [row for row in rows if row.get(column)]
