"""A script that compares sentence-transformers' vectors of model directories with expected ones.

`python -I load_directories.py FOLDER` uses every directory in FOLDER with a `fresh.json`: texts, their expected vectors
as queries and as documents, whether code must be trusted, and an optional context. It prints the maximum difference of
each as JSON. Packages that only this library needs are hidden from it. `datasets` and its requirements stay visible,
because sentence-transformers imports them if they are installed.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

HIDDEN = (
    "embeddings", "tests", "deepspeed", "einops", "faiss", "jsonargparse", "lightning", "lightning_fabric",
    "lightning_utilities", "mteb", "peft", "pytorch_lightning", "torchmetrics",
)  # fmt: skip


class Hiding:
    """A module finder that does not find the hidden packages."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)


def maximum_difference(folder):
    """The maximum difference between a directory's vectors and the expected ones."""
    import torch
    from sentence_transformers import SentenceTransformer

    fresh = json.loads((folder / "fresh.json").read_text())
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=fresh["trust_remote_code"])
    if fresh["context"]:
        model[0].set_context(fresh["context"])
    vectors = [model.encode_query(fresh["texts"]), model.encode_document(fresh["texts"])]
    return float((torch.tensor([array.tolist() for array in vectors]) - torch.tensor(fresh["vectors"])).abs().max())


if __name__ == "__main__":
    sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
    assert [name for name in HIDDEN if find_spec(name)] == []
    directories = sorted(path.parent for path in Path(sys.argv[1]).glob("*/fresh.json"))
    print(json.dumps({folder.name: maximum_difference(folder) for folder in directories}))
