"""Configs, data and folders of vectors that try to have code run, or something else than their own place written."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.reliability.cases import EVALUATE, FILTER, FIT, Make, both, cases, copied, put, rows, run
from tests.reliability.checkpoints import SEARCH, content
from tests.reliability.config import at, callback, chosen
from tests.reliability.hostile import CANARY, COMMAND, MODULE, PICKLE, Payload, deep
from tests.reliability.index import vectors
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


def linked(name: str) -> Make:
    """A link that leads to the canary's place."""

    def make(place: Place) -> None:
        path = place.folder / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(place.folder / CANARY)

    return make


CASES = cases(
    {
        FIT: {
            # Configs.
            "a tag that calls": (put("config.yaml", f"trainer: {PYTHON}\n"), "config.yaml: not a YAML file"),
            "a tag that names a function": (
                put("config.yaml", "a: !!python/name:os.system\n"),
                "config.yaml: not a YAML file",
            ),
            "os.system for an optimiser": (chosen(OPTIMIZER, "os.system", command=COMMAND), "may not name os.system"),
            "subprocess.Popen for a callback": (
                callback("subprocess.Popen", args=COMMAND, shell=True),
                "may not name subprocess.Popen",
            ),
            "another module through one of ours": (
                chosen(OPTIMIZER, "embeddings.callbacks.run_record.subprocess.Popen", args=COMMAND),
                "may not name",
            ),
            "a module beside the command": (
                with_module(chosen("data", "canary_module.Thing")),
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
            "an index of shards that leads outside": (
                shards("../canary.safetensors"),
                "names the shard '../canary.safetensors'",
            ),
        },
        FILTER + " --config job.yaml": {
            "a tag that calls, for a job": (put("job.yaml", f"columns: {PYTHON}\n"), "job.yaml: not a YAML file"),
            "a module for a mapping": (
                with_module(put("job.yaml", "columns: {class_path: canary_module.Thing}\n")),
                "columns",
            ),
        },
        "sweep sweep.yaml --count": {
            "a config of a sweep that leads elsewhere": (
                put("sweep.yaml", "configs: [/proc/self/environ]\nparameters: {a: [1]}\n"),
                "/proc/self/environ",
            ),
        },
        "sweep sweep.yaml --dry-run": {
            "os.system in a sweep": (
                both(
                    run(),
                    put(
                        "sweep.yaml",
                        f"configs: [config.yaml]\nparameters: {{{OPTIMIZER}: [{{class_path: os.system}}]}}\n",
                    ),
                ),
                "may not name os.system",
            ),
        },
        FILTER: {
            # Data.
            "a pickle for records": (put("pairs.jsonl", PICKLE), "pairs.jsonl:1: "),
            "a tar archive with a way out": (put("pairs.jsonl", tar_of("../../canary")), "pairs.jsonl:1: "),
            "a column of pickles": (pickled_column, "pairs.jsonl:1: query is bytes, expected text"),
            "records nested deep": (put("pairs.jsonl", deep()), "pairs.jsonl:1: the JSON is nested too deep"),
            "a column that asks to be unpickled": (extension_column, "", 0),
            "a script beside the records": (
                both(rows("pairs.jsonl", {"query": "a", "positive": "b"}), put("pairs.py", MODULE)),
                "",
                0,
            ),
            "a link for a lock": (
                both(rows("pairs.jsonl", {"query": "a", "positive": "b"}), linked("out.parquet.work/.lock")),
                "out.parquet.work/.lock: ",
                74,
            ),
        },
        FILTER.replace("pairs.jsonl", "hub:data"): {
            "a data set that is a folder with a script": (put("data/data.py", MODULE), "hub:data: cannot be read"),
        },
        SEARCH.replace("model model", "model MODEL"): {
            "an id that a terminal obeys": (rows("corpus.jsonl", {"_id": "a\x1b]0;x\x07", "text": "b\x1b[2J"}), "", 0),
        },
        "search --model MODEL --corpus vectors fox": {
            # Vectors and folders of work.
            "vectors that are objects": (
                vectors(object_array),
                "vectors/vectors-00000.npy: is missing, empty or damaged",
            ),
            "a manifest nested deep": (
                vectors(content("manifest.json", deep())),
                "vectors/manifest.json: is empty or damaged",
            ),
        },
        EVALUATE: {
            # Links in place of what is written.
            "a link where scores are to lie": (both(copied("eval", lambda folder: None), linked("scores.json")), "", 0),
        },
    }
)
