"""Models, checkpoints, configs and data that try to run code or to access paths outside their folder."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from tests.reliability.cases import (
    FILTER,
    FIT,
    Make,
    at,
    both,
    callback,
    chosen,
    content,
    edited,
    pairs,
    put,
    rows,
    run,
)
from tests.reliability.checkpoints import SEARCH, backbone, model
from tests.reliability.index import vectors
from tests.reliability.records import parquet
from tests.reliability.world import Place

CANARY = "canary"
COMMAND = f"touch {CANARY}"
EXPORT = "export --checkpoint last.ckpt --output out"
RESUME = f"{FIT} --ckpt_path last.ckpt"
PYTHON = "!!python/object/apply:os.system [touch canary]"
MODULE = f"open({CANARY!r}, 'w').close()\nclass Thing:\n    def __init__(self, *a, **k): pass\n"


class Payload:
    """Touches the canary when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (COMMAND,)


PICKLE = pickle.dumps(Payload())
# A column whose Arrow extension type asks for unpickling.
EXTENSION = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": PICKLE}
SCHEMA = pa.schema([pa.field("query", pa.string(), metadata=EXTENSION), pa.field("positive", pa.string())])


def saved(value: object) -> Make:
    return lambda place: torch.save(value, place.folder / "last.ckpt")


def safetensors(header: bytes | dict[str, Any], body: bytes = b"") -> bytes:
    """A safetensors file with this header."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + body


def tensor(start: int, stop: int, shape: int = 2) -> dict[str, Any]:
    """A tensor's entry in a safetensors header."""
    return {"dtype": "F32", "shape": [shape], "data_offsets": [start, stop]}


def deep(levels: int = 100_000) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def remote(folder: Path) -> None:
    """Make a model's config refer to code in its folder."""
    edited("config.json", auto_map={"AutoConfig": "canary_module.Thing", "AutoModel": "canary_module.Thing"})(folder)
    (folder / "canary_module.py").write_text(MODULE)


def remote_tokenizer(folder: Path) -> None:
    """Make a tokenizer refer to code in its folder."""
    changes = {"auto_map": {"AutoTokenizer": ["canary_module.Thing", None]}, "tokenizer_class": "Thing"}
    edited("tokenizer_config.json", **changes)(folder)
    (folder / "canary_module.py").write_text(MODULE)


def with_module(make: Make) -> Make:
    """A module in the working folder that touches the canary when it is imported."""
    return both(put("canary_module.py", MODULE), lambda place: place.patch.syspath_prepend(str(place.folder)), make)


def object_array(folder: Path) -> None:
    """Replace a shard of vectors by an array of objects."""
    np.save(folder / "vectors-00000.npy", np.array([Payload()] * 5, dtype=object), allow_pickle=True)


def shards(name: str) -> Make:
    """A run over a model whose index of shards refers to another file."""

    def damage(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        known = json.loads(index.read_text())
        known["weight_map"] = dict.fromkeys(known["weight_map"], name)
        index.write_text(json.dumps(known))
        torch.save(Payload(), folder / "canary.bin")

    return backbone(damage, "sharded")


def linked(name: str) -> Make:
    """A symbolic link to the path of the canary."""

    def make(place: Place) -> None:
        path = place.folder / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(place.folder / CANARY)

    return make


CASES = {
    SEARCH: {
        # Pickles in a model's directory.
        "pickled weights": (model(content("model.safetensors", PICKLE)), "model: cannot be loaded: "),
        "a pickled tokenizer": (model(content("tokenizer.json", PICKLE)), "model: tokenizer cannot be read: "),
        "a pickled config": (model(content("config.json", PICKLE)), "model/config.json: "),
        "weights whose size differs from their shape": (
            model(content("model.safetensors", safetensors({"a": tensor(0, 8, 2**60)}, bytes(8)))),
            "model: cannot be loaded: ",
        ),
        "weights with a deeply nested header": (
            model(content("model.safetensors", safetensors(deep(10_000).encode()))),
            "model: cannot be loaded: ",
        ),
        "a deeply nested config": (model(content("config.json", deep())), "model/config.json: "),
        "a module outside the folder": (
            model(content("modules.json", '[{"type": "x.Pooling", "path": "../elsewhere"}]')),
            "is outside the model's folder",
        ),
        "a module that is a function": (
            model(content("modules.json", '[{"type": "os.system", "path": ""}]')),
            "has the unknown module system",
        ),
        "a pooling that is a function": (
            model(edited("1_Pooling/config.json", name="os.system"), "latent"),
            "is not a valid pooling",
        ),
        "a config of an unknown model type with code": (
            model(both(remote, edited("config.json", model_type="canary"))),
            "model/config.json: ",
        ),
        "an attention from a repository": (
            model(edited("config.json", attn_implementation="evil/kernel", _attn_implementation="evil/kernel")),
            "model/config.json: attn_implementation needs the code of 'evil/kernel'",
        ),
        "adapters of a model in another folder": (
            model(content("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "../elsewhere"}')),
            "model: contains adapters of another model",
        ),
        # Unused files in a model directory.
        "more pickles beside the weights": (
            model(both(*(content(name, PICKLE) for name in ("optimizer.pt", "a.pkl", "training_args.bin", "x.ckpt")))),
            "",
            0,
        ),
        "a config that refers to the code beside it": (model(remote), "", 0),
        "a tokenizer that refers to the code beside it": (model(remote_tokenizer), "", 0),
        "a chat template that calls os.system": (
            model(
                edited(
                    "tokenizer_config.json", chat_template="{{ cycler.__init__.__globals__.os.system('touch canary') }}"
                )
            ),
            "",
            0,
        ),
        "portable code that was changed": (model(content("portable.py", MODULE), "latent"), "", 0),
    },
    EXPORT: {
        "a checkpoint that is a pickle": (put("last.ckpt", PICKLE), "last.ckpt: "),
        "a checkpoint that names an instantiator": (
            saved({"state_dict": {}, "hyper_parameters": {"_instantiator": "os.system", "command": COMMAND}}),
            "last.ckpt: ",
        ),
    },
    RESUME: {"a pickle to resume from": (both(run(), put("last.ckpt", PICKLE)), "last.ckpt: ")},
    FIT: {
        "a tag that calls os.system": (put("config.yaml", f"trainer: {PYTHON}\n"), "config.yaml: not a YAML file"),
        "a module beside the command": (with_module(chosen("data", "canary_module.Thing")), "may not name canary"),
        "a target for Hydra": (at("model.init_args", _target_="os.system", command=COMMAND), "_target_"),
        "code from a repository": (at("model.init_args.backbone", trust_remote_code=True), "trust_remote_code"),
        "an attention from a repository, by config": (
            at("model.init_args.backbone", attn_implementation="evil/kernel"),
            "attn_implementation must be a name",
        ),
        "an environment variable through omegaconf": (
            at("data.init_args", sources=[{"name": "a", "path": "${oc.env:HOME}/pairs.jsonl"}]),
            "${oc.env:HOME}/pairs.jsonl: no such file",
        ),
        "a function as the argument of a callback": (
            callback("lightning.pytorch.callbacks.LambdaCallback", on_fit_start="os.system"),
            "may not name os.system",
        ),
        "a name with terminal control codes": (
            at("data.init_args", sources=[{"name": "a\x1b[2J\x1b]0;title\x07", "path": "gone.jsonl"}] * 2),
            "must have different names",
        ),
        "an index of shards with a path outside the folder": (
            shards("../canary.safetensors"),
            "names the shard '../canary.safetensors'",
        ),
    },
    FILTER + " --config job.yaml": {
        "a tag that calls os.system, for a job": (put("job.yaml", f"columns: {PYTHON}\n"), "job.yaml: not a YAML file"),
        "a class instead of a mapping": (
            with_module(put("job.yaml", "columns: {class_path: canary_module.Thing}\n")),
            "columns",
        ),
    },
    "sweep sweep.yaml --count": {
        "a sweep with a config of another folder": (
            put("sweep.yaml", "configs: [/proc/self/environ]\nparameters: {a: [1]}\n"),
            "/proc/self/environ",
        )
    },
    FILTER: {
        "pickled records": (put("pairs.jsonl", PICKLE), "pairs.jsonl:1: "),
        "a column of pickles": (parquet({"query": [PICKLE], "positive": ["b"]}), "query is bytes, expected text"),
        "an extension type that unpickles": (parquet({"query": ["a"], "positive": ["b"]}, schema=SCHEMA), "", 0),
        "a script beside the records": (both(pairs(), put("pairs.py", MODULE)), "", 0),
        "a link in place of the lock": (
            both(rows("pairs.jsonl", {"query": "a", "positive": "b"}), linked("out.parquet.work/.lock")),
            "out.parquet.work/.lock: ",
            74,
        ),
    },
    FILTER.replace("pairs.jsonl", "hub:data"): {
        "a data set that is a folder with a script": (put("data/data.py", MODULE), "hub:data: cannot be read")
    },
    SEARCH.replace("model model", "model MODEL"): {
        "an id with terminal control codes": (rows("corpus.jsonl", {"_id": "a\x1b]0;x\x07", "text": "b\x1b[2J"}), "", 0)
    },
    "search --model MODEL --corpus vectors fox": {
        "vectors of Python objects": (vectors(object_array), "vectors/vectors-00000.npy: is missing, empty or damaged"),
        "a deeply nested manifest": (vectors(content("manifest.json", deep())), "manifest.json: is empty or damaged"),
    },
}
