"""Configs, data and folders of vectors that try to have code run, or something else than their own place written."""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.reliability.cases import ENCODE, EVALUATE, FILTER, FIT, MINE, Case, Make, both, copied, put, rows, run, table
from tests.reliability.checkpoints import SEARCH, content
from tests.reliability.config import at, callback, chosen
from tests.reliability.hostile import CANARY, COMMAND, MODULE, PICKLE, Payload, deep
from tests.reliability.index import mined, vectors
from tests.reliability.world import Place

PYTHON = "!!python/object/apply:os.system [touch canary]"
OPTIMIZER = "model.init_args.optimizer"
CONVERT = "convert --source BACKBONE --output out --keep-head false"


def tar_of(name: str) -> bytes:
    """A tar archive with a member that leads out of its folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        member = tarfile.TarInfo(name)
        member.size = len(PICKLE)
        file.addfile(member, io.BytesIO(PICKLE))
    return buffer.getvalue()


def zip_of(name: str) -> bytes:
    """A zip archive with a member that leads out of its folder."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, PICKLE)
    return buffer.getvalue()


def with_module(make: Make) -> Make:
    """A module beside the command, which importing it would run."""
    return both(put("canary_module.py", MODULE), lambda place: place.patch.syspath_prepend(str(place.folder)), make)


def object_array(folder: Path) -> None:
    """Turn a shard of vectors into an array of objects."""
    np.save(folder / "vectors-00000.npy", np.array([Payload()] * 5, dtype=object), allow_pickle=True)


def pickled_column(place: Place) -> None:
    """A Parquet column of pickles, as bytes."""
    pq.write_table(pa.table({"query": [PICKLE], "positive": ["b"]}), place.folder / "pairs.jsonl")


def extension_column(place: Place) -> None:
    """A Parquet column whose type says that Python is to unpickle it."""
    names = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": PICKLE}
    schema = pa.schema([pa.field("query", pa.string(), metadata=names), pa.field("positive", pa.string())])
    pq.write_table(pa.table({"query": ["a"], "positive": ["b"]}, schema=schema), place.folder / "pairs.jsonl")


def shards(name: str) -> Make:
    """A run over a model whose index of shards sends elsewhere."""

    def damage(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        known = json.loads(index.read_text())
        known["weight_map"] = dict.fromkeys(known["weight_map"], name)
        index.write_text(json.dumps(known))
        torch.save(Payload(), folder / "canary.bin")

    change: Callable[[dict[str, Any]], object]
    change = lambda config: config["model"]["init_args"]["backbone"].update(name="model")  # noqa: E731
    return both(copied("sharded", damage, "model"), run(change))


def named(name: str) -> Make:
    """A file of records whose name a terminal would obey."""
    return put(name, '{"query": 3}\n')


def linked(name: str) -> Make:
    """A link that leads to the canary's place."""

    def make(place: Place) -> None:
        path = place.folder / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(place.folder / CANARY)

    return make


CASES = [
    # Configs.
    *table(
        FIT,
        {
            "a tag that calls": (put("config.yaml", f"trainer: {PYTHON}\n"), "config.yaml: not a YAML file"),
            "a tag that makes an object": (
                put("config.yaml", "trainer: !!python/object:subprocess.Popen {args: touch canary}\n"),
                "config.yaml: not a YAML file",
            ),
            "a tag that names a function": (
                put("config.yaml", "a: !!python/name:os.system\n"),
                "config.yaml: not a YAML file",
            ),
            "os.system for an optimiser": (chosen(OPTIMIZER, "os.system", command=COMMAND), "may not name os.system"),
            "subprocess.Popen for a callback": (
                callback("subprocess.Popen", args=COMMAND, shell=True),
                "may not name subprocess.Popen",
            ),
            "eval for a loss": (
                chosen("model.init_args.loss", "builtins.eval", source="1"),
                "may not name builtins.eval",
            ),
            "another module through one of ours": (
                chosen(OPTIMIZER, "embeddings.callbacks.run_record.subprocess.Popen", args=COMMAND),
                "may not name",
            ),
            "another module through torch's": (
                chosen(OPTIMIZER, "torch.optim.optimizer.os.system", command=COMMAND),
                "has no attribute 'os'",
            ),
            "a module beside the command": (
                with_module(chosen("data", "canary_module.Thing")),
                "may not name canary_module.Thing",
            ),
            "a module for a logger": (
                with_module(chosen("trainer.logger", "canary_module.Thing")),
                "may not name canary_module.Thing",
            ),
            "a target of hydra's": (at("model.init_args", _target_="os.system", command=COMMAND), "_target_"),
            "code from a repository": (at("model.init_args.backbone", trust_remote_code=True), "trust_remote_code"),
            "an attention from a repository, by config": (
                at("model.init_args.backbone", attn_implementation="evil/kernel"),
                "attn_implementation must be a name",
            ),
            "an environment variable through omegaconf": (
                at("data.init_args", sources=[{"name": "a", "path": "${oc.env:HOME}/pairs.jsonl"}]),
                "${oc.env:HOME}/pairs.jsonl: no such file",
            ),
            "a callable for a callback": (
                callback("lightning.pytorch.callbacks.LambdaCallback", on_fit_start="os.system"),
                "may not name os.system",
            ),
            "a name that a terminal obeys": (
                at("data.init_args", sources=[{"name": "a\x1b[2J\x1b]0;title\x07", "path": "gone.jsonl"}] * 2),
                "must have different names",
            ),
        },
    ),
    *table(
        f"{FILTER} --config job.yaml",
        {
            "a tag that calls, for a job": (put("job.yaml", f"columns: {PYTHON}\n"), "job.yaml: not a YAML file"),
            "a module for a mapping": (
                with_module(put("job.yaml", "columns: {class_path: canary_module.Thing}\n")),
                "columns",
            ),
        },
    ),
    *table(
        "sweep sweep.yaml --count true",
        {
            "a tag that calls, for a sweep": (put("sweep.yaml", f"recipe: {PYTHON}\n"), "sweep.yaml: not a YAML file"),
            "a config of a sweep that leads elsewhere": (
                put("sweep.yaml", "configs: [/proc/self/environ]\nparameters: {a: [1]}\n"),
                "/proc/self/environ",
            ),
        },
    ),
    Case(
        "os.system in a sweep",
        both(
            run(),
            put("sweep.yaml", f"configs: [config.yaml]\nparameters: {{{OPTIMIZER}: [{{class_path: os.system}}]}}\n"),
        ),
        "sweep sweep.yaml --dry-run true",
        "may not name os.system",
    ),
    # Data.
    *table(
        FILTER,
        {
            "a pickle for records": (put("pairs.jsonl", PICKLE), "pairs.jsonl:1: "),
            "a tar archive with a way out": (put("pairs.jsonl", tar_of("../../canary")), "pairs.jsonl:1: "),
            "a zip archive with a way out": (
                put("pairs.jsonl", zip_of("../../canary")),
                "pairs.jsonl:1: the file is a zip archive",
            ),
            "a column of pickles": (pickled_column, "pairs.jsonl:1: query is bytes, expected text"),
            "records nested deep": (put("pairs.jsonl", deep()), "pairs.jsonl:1: the JSON is nested too deep"),
        },
    ),
    Case("a column that asks to be unpickled", extension_column, FILTER, "", 0),
    Case(
        "a script beside the records",
        both(rows("pairs.jsonl", {"query": "a", "positive": "b"}), put("pairs.py", MODULE)),
        FILTER,
        "",
        0,
    ),
    Case(
        "a data set that is a folder with a script",
        put("data/data.py", MODULE),
        FILTER.replace("pairs.jsonl", "hub:data"),
        "hub:data: cannot be read",
    ),
    Case(
        "a name of a file that a terminal obeys",
        named("a\x1b[31m\nerror: all is well.jsonl"),
        [*FILTER.split()[:2], "a*.jsonl", *FILTER.split()[3:]],
        r"a\x1b[31m error: all is well.jsonl:1",
    ),
    Case(
        "an id that a terminal obeys",
        rows("corpus.jsonl", {"_id": "a\x1b]0;x\x07", "text": "b\x1b[2J"}),
        SEARCH.replace("model model", "model MODEL"),
        "",
        0,
    ),
    # Vectors and folders of work.
    Case(
        "vectors that are objects",
        vectors(object_array),
        "search --model MODEL --corpus vectors fox",
        "vectors/vectors-00000.npy: is missing, empty or damaged",
    ),
    Case(
        "a manifest nested deep",
        vectors(content("manifest.json", deep())),
        "search --model MODEL --corpus vectors fox",
        "vectors/manifest.json: is empty or damaged",
    ),
    Case(
        "vectors to mine from that are objects",
        mined("documents", object_array),
        f"{MINE} --vectors vectors --precision float32",
        "vectors/documents/vectors-00000.npy: is missing, empty or damaged",
    ),
    Case(
        "an index of shards that leads outside",
        shards("../canary.safetensors"),
        FIT,
        "names the shard '../canary.safetensors'",
    ),
    Case("an index of shards that names a pickle", shards("canary.bin"), FIT, "names the shard 'canary.bin'"),
    # Links in place of what is written.
    Case(
        "a link where scores are to lie",
        both(copied("eval", lambda folder: None), linked("scores.json")),
        EVALUATE,
        "",
        0,
    ),
    Case(
        "links where a model is to lie",
        both(linked("out/config.json"), linked("out/model.safetensors")),
        CONVERT,
        "",
        0,
    ),
    Case(
        "a link for a lock",
        both(rows("pairs.jsonl", {"query": "a", "positive": "b"}), linked("out.parquet.work/.lock")),
        FILTER,
        "out.parquet.work/.lock: ",
        74,
    ),
    Case(
        "a link for the manifest of a folder",
        both(rows("corpus.jsonl", {"text": "a"}), linked("out/manifest.json")),
        ENCODE,
        "out: something else lies there already",
    ),
]
