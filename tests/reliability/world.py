"""Valid tiny files and models from which malformed inputs are made; each is built at its first use."""

import shlex
import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

from embeddings.cli.main import main
from embeddings.common import TextSettings
from embeddings.models import Embedder, LatentAttentionPooling, MeanPooling
from tests.helpers.runs import component, run_config, write_pairs, write_retrieval_folder
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.moe import tiny_moe

NUM_PAIRS = 12


class World:
    """Valid files in one folder, which must not change. A name in capitals in a command line refers to one of them."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.root = root

    def path(self, name: str) -> Path:
        """The file or folder with this name, built if it does not exist."""
        target = self.root / name
        if not target.exists():
            _BUILDERS[name](self, target)
        return target

    def words(self, line: str) -> list[str]:
        """Split a command line, and replace names in capitals by paths."""
        words = shlex.split(line)
        return [
            str(self.path(word.lower())) if word.isupper() and word.lower() in _BUILDERS else word for word in words
        ]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of a tiny run over `pairs.jsonl` that writes only to the working folder."""
        scratch = Path(tempfile.mkdtemp(dir=self.root))
        config = run_config(scratch)
        config["model"]["init_args"]["backbone"]["name"] = str(self.path("backbone"))
        config["trainer"] |= {"max_steps": 1, "default_root_dir": "run"}
        config["trainer"]["logger"]["init_args"]["save_dir"] = "run"
        sources = [{"name": "pairs", "path": "pairs.jsonl"}]
        config["data"]["init_args"] |= {"cache_dir": "cache", "sources": sources, "batch_size": 4}
        config["model"]["init_args"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
        shutil.rmtree(scratch)
        return config


class Place:
    """The working folder of a case and its command."""

    def __init__(self, folder: Path, world: World, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.world, self.patch = folder, world, patch

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file, and create its parent folders."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def copy(self, name: str, to: str = "") -> Path:
        """Copy a file or folder of the world, by default with the same name."""
        source, target = self.world.path(name), self.folder / (to or name)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
        return target

    def config(self, *changes: Callable[[dict[str, Any]], object], name: str = "config.yaml") -> Path:
        """Write the config of a run with some changes, and its pairs if there are none."""
        content = deepcopy(self.world.config)
        for change in changes:
            change(content)
        if not (self.folder / "pairs.jsonl").exists():
            write_pairs(self.folder / "pairs.jsonl", NUM_PAIRS)
        return self.write(name, yaml.safe_dump(content))


def _model(path: Path, backbone: Any, pooling: Any) -> None:
    text = TextSettings(32, 32, prompts={"query": "search_query: "}, pool_prompt=True)
    Embedder(backbone, wordpiece_tokenizer(), pooling, text=text).save_pretrained(path)


def _run(world: World, line: str) -> None:
    assert main(world.words(line)) == 0


def _job(world: World, path: Path, options: str) -> None:
    """The output of a command over the valid pairs."""
    command, _, options = options.partition(" ")
    _run(world, f"{command} --model MODEL --input PAIRS.JSONL --output {path} --precision float32 {options}")


def _run_folder(world: World, path: Path) -> None:
    """The files of a run of two steps, with its checkpoint."""
    path.mkdir()
    place = Place(path, world, pytest.MonkeyPatch())

    def two_steps(config: dict[str, Any]) -> None:
        keep = component("ModelCheckpoint", save_last=True, every_n_train_steps=2)
        config["trainer"] |= {"max_steps": 2, "default_root_dir": str(path / "run"), "callbacks": [keep]}
        config["trainer"]["logger"]["init_args"]["save_dir"] = str(path / "run")
        config["data"]["init_args"]["cache_dir"] = str(path / "cache")
        config["data"]["init_args"]["sources"][0]["path"] = str(path / "pairs.jsonl")

    _run(world, f"fit --config {place.config(two_steps)}")


def _encoded(world: World, path: Path) -> None:
    corpus = world.path("eval") / "corpus.jsonl"
    _run(world, f"encode --model MODEL --input {corpus} --output {path} --precision float32 --shard-size 5")


def _indexed(world: World, path: Path) -> None:
    shutil.copytree(world.path("vectors"), path)
    _run(world, f"index --vectors {path} --num-lists 2")


def _logged(world: World, path: Path) -> None:
    """The log folder of the run, without checkpoints."""
    (metrics,) = world.path("run").rglob("metrics.csv")
    shutil.copytree(metrics.parent, path, ignore=shutil.ignore_patterns("checkpoints"))


def _checkpoint(world: World, path: Path) -> None:
    (checkpoint,) = world.path("run").rglob("last.ckpt")
    shutil.copyfile(checkpoint, path)


def _saved(path: Path, shard_size: str = "50GB") -> None:
    """A backbone's folder with weight files of at most this size."""
    tiny_bert().save_pretrained(path, max_shard_size=shard_size)
    wordpiece_tokenizer().save_pretrained(path)


_BUILDERS: dict[str, Callable[[World, Path], object]] = {
    "pairs.jsonl": lambda world, path: write_pairs(path, NUM_PAIRS),
    "eval": lambda world, path: write_retrieval_folder(path),
    "backbone": lambda world, path: _saved(path),
    "sharded": lambda world, path: _saved(path, "60KB"),
    "model": lambda world, path: _model(path, tiny_bert(), MeanPooling(32)),
    "latent": lambda world, path: _model(path, tiny_bert(), LatentAttentionPooling(32, 4, 2, 8)),
    "sparse": lambda world, path: _model(path, tiny_moe(), MeanPooling(32)),
    "contextual": lambda world, path: tiny_contextual().save_pretrained(path),
    "vectors": _encoded,
    "clusters": lambda world, path: _job(world, path, "cluster --cluster-size 4 --num-iterations 3"),
    "mined": lambda world, path: _job(world, path / "mined.parquet", "mine --num-negatives 2 --margin null"),
    "indexed": _indexed,
    "run": _run_folder,
    "logged": _logged,
    "last.ckpt": _checkpoint,
}
