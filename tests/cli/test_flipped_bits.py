"""One flipped bit in any file that a command wrote, except a card, is refused by whatever reads the file back."""

import os
import random
import shutil
from pathlib import Path

import pytest

from embeddings.cli.main import main
from embeddings.common import InputError
from embeddings.data import SourceConfig
from embeddings.data.samplers.clustered import ClusterFolder
from embeddings.data.store import CachedSource, open_cached
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.inference import VectorFolder
from embeddings.mining import VectorIndex
from embeddings.mining.pair_index import PairIndex
from embeddings.models import load_embedder
from tests.helpers.runs import write_pairs
from tests.inference.models import some_texts, write_corpus
from tests.models.contextual_models import tiny_contextual


@pytest.fixture(scope="module")
def world(tmp_path_factory, model):
    """A folder with an output of each command; the tests repair what they damage."""
    folder = tmp_path_factory.mktemp("world")
    before = Path.cwd()
    os.chdir(folder)
    write_pairs(folder / "pairs.jsonl", 24)
    write_corpus(folder / "corpus.jsonl", some_texts(11))
    tiny_contextual().save_pretrained("contextual")
    encode = ["encode", "--input", "corpus.jsonl", "--shard_size", "4", "--precision", "float32"]
    assert main([*encode, "--model", model, "--output", "vectors"]) == 0
    assert main([*encode, "--model", "contextual", "--output", "contextual_vectors", "--context", "corpus.jsonl"]) == 0
    assert main(["index", "--vectors", "vectors", "--num_lists", "2"]) == 0
    cluster = ["cluster", "--input", "pairs.jsonl", "--output", "clusters", "--model", model, "--vectors", "pairs"]
    assert main([*cluster, "--num_clusters", "3", "--num_iterations", "2", "--negatives"]) == 0
    shutil.copytree(open_cached(SourceConfig("a", "pairs.jsonl"), "cache").folder, "converted")
    os.chdir(before)
    return folder


def read_vectors(folder):
    opened = VectorFolder.open(folder)
    opened.documents(range(opened.num_documents))
    return list(opened.tiles()), opened.context()


def read_pairs(folder):
    source = open_cached(SourceConfig("a", "pairs.jsonl"), "cache")
    return SurrogateVectors(folder, source.key), PairIndex(folder / "index", source)


# The card is the user's to change; the row numbers are for other programs.
NOT_READ = ("README.md", "cluster_ids.npy")
READERS = {
    "model": load_embedder,
    "contextual": load_embedder,
    "vectors": lambda folder: (read_vectors(folder), VectorIndex.open(VectorFolder.open(folder))),
    "contextual_vectors": read_vectors,
    "clusters": ClusterFolder,
    "pairs": read_pairs,
    "converted": lambda folder: CachedSource(folder),
}


def flips(path):
    """A file with one bit flipped: near its start, at its end, and at a random place."""
    whole = path.read_bytes()
    places = {min(9, len(whole) - 1), len(whole) - 2, random.Random(len(whole)).randrange(len(whole))}
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        yield place
    path.write_bytes(whole)


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_in_any_file_is_refused_by_its_reader(name, world, model, monkeypatch):
    monkeypatch.chdir(world)
    folder = Path(model) if name == "model" else world / name
    READERS[name](folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in NOT_READ]
    assert len(files) >= 2
    accepted = []
    for path in files:
        for place in flips(path):
            try:
                READERS[name](folder)
                accepted.append(f"{path.relative_to(folder)}:{place}")
            except InputError:
                continue
    assert accepted == []
    READERS[name](folder)
