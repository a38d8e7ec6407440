"""Golden records for refactoring: checks that methods, jobs, samplers and commands compute exactly the same as before.

    python -m tests.golden record FOLDER     before a change, 5 minutes; also stores inputs, models and checkpoints
    python -m tests.golden compare FOLDER    after it; prints each value that differs, with exit code 1 if any does
    python -m tests.golden compare FOLDER --only 'loss/*' 'commands'

The losses are those of ten steps of each method, plain and under GradCache, on one and two ranks, in hexadecimal.
Corpus jobs run on the docstrings of the installed packages. A comparison also resumes the recorded checkpoints and
encodes with the recorded model directories, so files from before a change must load after it. Records are valid for one
machine and one set of packages: floats differ between CPU types, and the corpus between environments.
"""

import argparse
import contextlib
import csv
import fnmatch
import gzip
import hashlib
import importlib
import io
import json
import os
import pkgutil
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

import embeddings
from embeddings.cli.main import main
from tests.helpers.processes import run_command
from tests.helpers.runs import component, run_config
from tests.modules.cde_runs import cde_config
from tests.modules.mgh_runs import mgh_config
from tests.modules.moe_modules import moe_config

ROOT = Path(__file__).parents[1]
Values = dict[str, Any]
Case = Callable[[Path, Path], Values]  # (the record's folder, a folder to write to) → values by name

CONFIGS = {"nv_embed": run_config, "mgh": mgh_config, "moe": moe_config, "cde": cde_config}
CACHE = component("GradCacheCallback", mini_batch_tokens=64)
KEEP = component("ModelCheckpoint", every_n_train_steps=5, save_top_k=-1)
NUM_RECORDS = 600
MODEL = "all-MiniLM-L6-v2"
SOURCE = {"name": "docstrings", "path": "IN/records.jsonl"}
SAMPLERS: dict[str, Values] = {
    "blended": component("embeddings.data.BlendedBatchSampler", steps_per_epoch=20),
    "homogeneous": component("embeddings.data.HomogeneousBatchSampler"),
    "curriculum": component(
        "embeddings.data.CurriculumBatchSampler",
        inner={"class_path": "embeddings.data.BlendedBatchSampler"},
        missing_level="coarser",
    ),
    "clustered": component("embeddings.data.ClusteredBatchSampler", clusters={"docstrings": "IN/clusters"}),
}
JOBS = {
    "mine": f"mine --model {MODEL} --input IN/records.jsonl --output OUT/mined.parquet",
    "mine_levels": f"mine --model {MODEL} --input IN/records.jsonl --output OUT/levels.parquet --levels quantiles "
    "--index ivf",
    "filter": f"filter --model {MODEL} --input IN/records.jsonl --output OUT/kept.parquet --near_duplicates 0.8 "
    "--decontaminate IN/docstrings/eval/validation",
    "cluster": f"cluster --model {MODEL} --input IN/records.jsonl --output OUT/clusters --cluster_size 32",
    "encode": f"encode --model {MODEL} --input IN/corpus.jsonl --output OUT/vectors",
    "encode_int8": f"encode --model {MODEL} --input IN/corpus.jsonl --output OUT/vectors --vector_format int8 "
    "--precision float32",
    "evaluate": f"evaluate --model {MODEL} --data IN/docstrings/eval/validation --output OUT/scores.json",
}


def digest(path: Path) -> str:
    """SHA-256 of a file; of the rows of a Parquet file, whose bytes contain the version of the library."""
    if path.suffix == ".parquet":
        rows = pyarrow.parquet.read_table(path).to_pylist()
        return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(words: Iterable[str], inputs: Path, output: Path) -> None:
    """Run one command line, with IN and OUT replaced, in a separate process."""
    line = [word.replace("IN/", f"{inputs}/").replace("OUT/", f"{output}/") for word in words]
    run_command([ROOT / "main.py", *line], timeout=1200, check=True)


# Inputs, written once by `record` and read by every comparison.


def write_inputs(folder: Path) -> None:
    """Write the docstring corpus, its first records, and the configs and backbones of the tiny runs."""
    run(["prepare", "docstrings", "--output", "IN/docstrings"], folder, folder)
    with gzip.open(folder / "docstrings" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [line for line, _ in zip(file, range(NUM_RECORDS), strict=False)]
    (folder / "records.jsonl").write_text("".join(lines), encoding="utf-8")
    texts = [{"_id": str(row), "text": json.loads(line)["positive"]} for row, line in enumerate(lines)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    run(JOBS["cluster"].split(), folder, folder)
    for method, config_of in CONFIGS.items():
        home = folder / method
        home.mkdir()
        config = config_of(home)
        config["trainer"] |= {"max_steps": 10, "default_root_dir": "OUT/run"}
        del config["trainer"]["logger"]
        config["data"]["init_args"] |= {"cache_dir": "OUT/cache", "num_workers": 0}
        (home / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


# The values of each case.


def losses(method: str, cached: bool, ranks: int, inputs: Path, output: Path) -> Values:
    """Ten steps' losses, and the exported weights' SHA-256."""
    config = yaml.safe_load((inputs / method / "config.yaml").read_text().replace("OUT/", f"{output}/"))
    export = component("ExportModel", output=str(output / "model"))
    config["trainer"]["callbacks"] = [*([CACHE] if cached else []), KEEP, export]
    if ranks > 1:
        config["trainer"] |= {"devices": ranks, "strategy": "ddp_find_unused_parameters_true"}
        config["data"]["init_args"]["batch_size"] = 4
    (output / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run(["fit", "--config", "OUT/config.yaml"], inputs, output)
    return trained(output)


def resumed(method: str, inputs: Path, output: Path) -> Values:
    """Steps six to ten of the recorded run, from the checkpoint that `record` wrote."""
    shutil.copytree(inputs / "written" / method, output, dirs_exist_ok=True)
    shutil.rmtree(output / "model")
    text = (output / "config.yaml").read_text(encoding="utf-8")
    moved = re.sub(r"(?m)^(.*: )\S*/written/" + method, lambda match: match[1] + str(output), text)
    (output / "config.yaml").write_text(moved, encoding="utf-8")
    (checkpoint,) = output.rglob("*step=5.ckpt")
    run(["fit", "--config", "OUT/config.yaml", "--ckpt_path", str(checkpoint)], inputs, output)
    return trained(output, first_step=5)


def trained(output: Path, first_step: int = 0) -> Values:
    """The logged losses and the digest of the exported weights."""
    path = max(output.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    losses_of = {int(row["step"]): float(row["train/loss"]).hex() for row in rows}
    assert list(losses_of) == list(range(first_step, 10)), f"losses of steps {list(losses_of)}"
    return {"losses": list(losses_of.values()), "weights": digest(output / "model" / "model.safetensors")}


def vectors_of_written(method: str, inputs: Path, output: Path) -> Values:
    """Vectors of the model directory that `record` wrote."""
    words = ["encode", "--input", "IN/corpus.jsonl", "--output", "OUT/vectors", "--precision", "float32"]
    words += ["--context", "IN/corpus.jsonl"] if method == "cde" else []
    run([*words, "--model", str(inputs / "written" / method / "model")], inputs, output)
    return digests(output)


def job(name: str, inputs: Path, output: Path) -> Values:
    """The output of a corpus job without its manifests, which contain times and versions."""
    run(JOBS[name].split(), inputs, output)
    if name == "evaluate":
        return {
            row["name"]: [row["metrics"], row["counts"]] for row in json.loads((output / "scores.json").read_text())
        }
    return digests(output)


def digests(output: Path) -> Values:
    """SHA-256 of every array, table and list of documents below a folder."""
    files = [p for p in sorted(output.rglob("*")) if p.suffix in {".npy", ".parquet", ".jsonl"} and p.is_file()]
    kept = [p for p in files if not any(part.endswith((".work", ".vectors")) for part in p.relative_to(output).parts)]
    assert kept, f"nothing in {output}"
    return {str(p.relative_to(output)): digest(p) for p in kept}


def corpus(inputs: Path, output: Path) -> Values:
    """A new docstring corpus."""
    run(["prepare", "docstrings", "--output", "OUT/docstrings"], inputs, output)
    return digests(output)


def plan(name: str, inputs: Path, output: Path) -> Values:
    """The rows, draws and levels of two epochs."""
    sampler = json.loads(json.dumps(SAMPLERS[name]).replace("IN/", f"{inputs}/"))
    config = yaml.safe_load((inputs / "nv_embed" / "config.yaml").read_text().replace("OUT/", f"{output}/"))
    config["data"]["init_args"] |= {"sampler": sampler, "sources": [{**SOURCE, "path": str(inputs / "records.jsonl")}]}
    config["data"]["init_args"]["num_negatives"] = 0
    config["trainer"]["callbacks"] = [component("tests.golden.PlanRecorder", path="OUT/plan")]
    config["trainer"] |= {"max_steps": 8}
    text = yaml.safe_dump(config).replace("OUT/", f"{output}/")
    (output / "config.yaml").write_text(text, encoding="utf-8")
    run(["fit", "--config", "OUT/config.yaml"], inputs, output)
    lines = (output / "plan").read_text().splitlines()
    return {"batches": len(lines), "plan": hashlib.sha256("\n".join(lines).encode()).hexdigest()}


class PlanRecorder(Callback):
    """Writes the first two epochs of the run's batch plan to a file, one batch per line."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the plan from the run's own sampler, then reset it to the first epoch."""
        sampler: Any = trainer.train_dataloader.batch_sampler  # type: ignore[union-attr]
        with open(self.path, "w", encoding="utf-8") as file:
            for epoch in (1, 0):
                sampler.set_epoch(epoch)
                file.writelines(json.dumps([list(entry) for entry in batch]) + "\n" for batch in sampler)


def public_names(inputs: Path, output: Path) -> Values:
    """The `__all__` of every package."""
    packages = [info.name for info in pkgutil.walk_packages(embeddings.__path__, "embeddings.") if info.ispkg]
    return {name: sorted(getattr(importlib.import_module(name), "__all__", ())) for name in sorted(packages)}


def commands(inputs: Path, output: Path) -> Values:
    """The commands, and the options of each."""
    names = re.findall(r"(?m)^  ([a-z][a-z-]*(?: [a-z][a-z-]*)?)  ", help_of())
    assert len(names) > 15, names
    return {name: sorted(set(re.findall(r"--[a-z][\w.+-]*", help_of(*name.split())))) for name in names}


def help_of(*command: str) -> str:
    """The output of `--help`."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return text.getvalue()


def cases(recording: bool) -> dict[str, Case]:
    """Every case by name; resuming recorded checkpoints is only part of a comparison."""
    found: dict[str, Case] = {"names": public_names, "commands": commands, "prepare": corpus}
    for name in JOBS:
        found[f"job/{name}"] = partial(job, name)
    for name in SAMPLERS:
        found[f"plan/{name}"] = partial(plan, name)
    for method in CONFIGS:
        for cached in (False, True):
            for ranks in (1, 2):
                name = f"loss/{method}/{'gradcache' if cached else 'plain'}/{ranks}"
                found[name] = partial(losses, method, cached, ranks)
        found[f"written/{method}/vectors"] = partial(vectors_of_written, method)
        if not recording:
            found[f"written/{method}/resumed"] = partial(resumed, method)
    return found


def values_of(case: Case, inputs: Path, output: Path) -> Values:
    """One case's values, or its error under "failed"."""
    output.mkdir(parents=True, exist_ok=True)
    try:
        # In the format of the record: lists instead of tuples, strings as keys.
        return dict(json.loads(json.dumps(case(inputs, output))))
    except Exception:
        return {"failed": traceback.format_exc()[-2000:]}


def differences(found: Any, expected: Any, path: str) -> list[str]:
    """The paths at which two records differ, with both values."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = sorted({*found, *expected})
        return [line for key in keys for line in differences(found.get(key), expected.get(key), f"{path}: {key}")]
    if found == expected:
        return []
    if isinstance(found, list) and isinstance(expected, list) and not path.startswith("loss"):
        return [f"{path}: gone {sorted({*expected} - {*found})}, new {sorted({*found} - {*expected})}"]
    return [f"{path}: {found} was {expected}"]


def record(folder: Path) -> int:
    """Write inputs, the outputs of the methods, and every case's values."""
    folder.mkdir(parents=True)
    write_inputs(folder)
    values = {}
    for name, case in cases(recording=True).items():
        kind, *rest = name.split("/")
        written = kind == "loss" and rest[1:] == ["plain", "1"]
        with tempfile.TemporaryDirectory() as output:
            values[name] = values_of(case, folder, folder / "written" / rest[0] if written else Path(output))
        print(name, values[name].get("failed", "recorded"), flush=True)
    (folder / "golden.json").write_text(json.dumps(values, indent=1))
    return int(any("failed" in value for value in values.values()))


def compare(folder: Path, only: list[str]) -> int:
    """Run every case again; returns 1 if a value differs."""
    expected = json.loads((folder / "golden.json").read_text())
    for method in CONFIGS:
        whole = expected[f"loss/{method}/plain/1"]
        expected[f"written/{method}/resumed"] = whole | {"losses": whole["losses"][5:]}
    chosen = {name: case for name, case in cases(False).items() if any(fnmatch.fnmatch(name, p) for p in only)}
    assert chosen, f"no case matches {only}"
    lines = []
    for name, case in chosen.items():
        with tempfile.TemporaryDirectory() as output:
            found = values_of(case, folder, Path(output))
        new = differences(found, expected[name], name)
        print(f"{name}: {'equal' if not new else 'DIFFERS'}", *new, sep="\n    ", flush=True)
        lines += new
    print(f"{len(chosen)} cases, {len(lines)} differences")
    return int(bool(lines))


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", EMBED_IMPORTS="tests")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=["*"], help="names of cases, with * for any")
    options = parser.parse_args()
    where = options.folder.resolve()
    raise SystemExit(record(where) if options.what == "record" else compare(where, options.only))
