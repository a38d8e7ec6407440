"""Every recipe trains a stand-in on a few rows of each kind of its sources, and is scored."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from embeddings.cli.main import main
from embeddings.cli.parser import read_recipes
from embeddings.common.io import read_metrics
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from embeddings.models import BackboneConfig, load_backbone
from tests.configs.files import CONFIGS, read
from tests.data.cluster_folders import write_clusters
from tests.data.rows import write_rows
from tests.data.surrogates import write_surrogates
from tests.helpers.runs import WORDS, write_retrieval_folder

RECIPES = read_recipes()
NUM_ROWS = 24
# The other recipes need 90 seconds in total; `test_runs` has the phases of each method.
QUICK = ("mgh_docstrings", "mntp_mistral_h100x1")


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBED_TRAIN_DATA", "data")


def rows_of(source: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows in the format of a source: all fields of its conversion, in its columns."""
    columns, found = source.get("columns", {}), []
    labels = list(source.get("label_texts", {})) or ["first", "second"]
    for row in range(NUM_ROWS):
        first, second = WORDS[row % len(WORDS)], WORDS[(row * 3 + 1) % len(WORDS)]
        query, positive = f"{first} {second} {row}", f"the {first} and {second} {row}"
        conversion = source.get("conversion", "pairs")
        if conversion == "pairs":
            negatives = [{"text": f"{WORDS[(row + n) % 16]} {n} {row}", "level": n % 4 + 1} for n in range(12)]
            fields: dict[str, Any] = {"query": query, "positive": positive, "negatives": negatives}
        elif conversion == "sts":
            fields = {"sentence1": query, "sentence2": positive, "score": 5.0}
        else:
            fields = {"text": query, "label": labels[row % len(labels)]}
        found.append({columns.get(name, name): value for name, value in fields.items()})
    return found


def write_source(source: dict[str, Any], is_text: bool) -> dict[str, Any]:
    """Write a source's files below `data`; returns the source with files in place of the Hub or packages."""
    if source.get("packages"):
        return source | {"packages": ["jsonargparse"]}
    paths = source["path"] if isinstance(source["path"], list) else [source["path"]]
    if paths[0].startswith("hub:"):
        paths = [f"data/{source['name']}.jsonl"]
        source = {name: value for name, value in source.items() if name not in ("subset", "split", "revision")}
    local = [path.replace("${EMBED_TRAIN_DATA}", "data").replace("$EMBED_TRAIN_DATA", "data") for path in paths]
    column = source.get("column", "text")
    rows = [{column: f"{row['query']} {row['positive']}"} for row in rows_of({})] if is_text else rows_of(source)
    for number, path in enumerate(local):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_rows(Path(path), rows[number :: len(local)])
    return source | {"path": local if isinstance(source["path"], list) else local[0]}


def kinds(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first source of each conversion, and the last one; parsing forty sources is slow."""
    chosen = {source.get("conversion", "pairs"): source for source in reversed(sources)}
    return [*chosen.values(), *(sources[-1:] if sources[-1] not in chosen.values() else [])]


def write_data(recipe: str) -> None:
    """Write a recipe's sources, clusters, surrogate vectors, evaluation folders and short data configs.

    A file below the working folder's `lightning_configs` replaces the library's file of that name.
    """
    for path in RECIPES[recipe]["configs"].split():
        content = read(CONFIGS.parent / path)
        data = content.get("data", {}).get("init_args", {})
        is_text = content.get("data", {}).get("class_path", "").endswith("TextDataModule")
        for key in ("sources", "sources+", "validation_sources"):
            if key in data:
                data[key] = [write_source(source, is_text) for source in kinds(data[key])]
        clusters = data.get("sampler", {}).get("init_args", {}).get("clusters")
        for source in data.get("sources", ()) if clusters is not None else ():
            cached = open_cached(SourceConfig(source["name"], source["path"]))
            folder = clusters[source["name"]] if isinstance(clusters, dict) else f"{clusters}/{source['name']}"
            ids = [row % 3 for row in range(NUM_ROWS)]
            write_clusters(Path(folder.replace("${EMBED_TRAIN_DATA}", "data")), ids, 3, cached.key)
            if vectors := source.get("surrogate_vectors"):
                write_surrogates(Path(vectors.replace("${EMBED_TRAIN_DATA}", "data")), cached, negatives=True)
        for callback in content.get("trainer", {}).get("callbacks", ()):
            folder = callback.get("init_args", {}).get("folder")
            if folder is not None:
                Path(folder).parent.mkdir(parents=True)
                write_retrieval_folder(Path(folder))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(yaml.safe_dump(content), encoding="utf-8")


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES]
)
def test_a_recipe_trains_on_a_stand_in_and_is_scored(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(recipe)
    assert main(["fit", "--recipe", recipe, "--limit-data", "20", "--stand-in", "tiny"]) == 0
    said = capsys.readouterr()
    assert "changed trainer.max_steps: " in said.err
    is_clustered = recipe.startswith("cde")
    assert ("all rows, because their clusters" if is_clustered else "limited to 20 rows each") in said.err
    (metrics,) = Path("checkpoints/runs").rglob("metrics.csv")
    losses = [float(row["train/loss"]) for row in read_metrics(metrics) if row.get("train/loss")]
    assert len(losses) >= 2
    scores = [row["val/ndcg_at_10"] for row in read_metrics(metrics) if row.get("val/ndcg_at_10")]
    assert bool(scores) == (recipe.endswith("docstrings") or recipe == "quickstart")
    assert all(0 < loss < 100 for loss in losses)
    written = [line.removeprefix("model: ") for line in said.out.splitlines() if line.startswith("model: ")]
    assert len(written) == 1
    assert written[0].startswith("checkpoints/stand_in/")
    if not (Path(written[0]) / "modules.json").is_file():
        load_backbone(BackboneConfig(written[0]))
        return
    folder = write_retrieval_folder(Path("validation"))
    output = Path(written[0]) / "scores.json"
    assert main(["evaluate", "--model", written[0], "--data", str(folder), "--output", str(output)]) == 0
    assert 0 <= json.loads(output.read_text())[0]["metrics"]["ndcg_at_10"] <= 1
