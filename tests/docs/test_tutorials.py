"""The commands of the pages, read from the pages: run one after the other on small stand-ins."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

from embeddings.cli.main import main
from embeddings.cli.parser import read_recipes
from embeddings.common import TextSettings
from embeddings.data.docstrings import prepare_docstrings
from embeddings.models import Embedder, MeanPooling
from tests.docs.pages import ROOT, blocks
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer

DOCS = ROOT / "docs"
METHODS = ("nv-embed", "mgh", "moe", "cde")
TUTORIALS = [*(f"methods/{name}" for name in METHODS), "mining", "evaluation", "released-models"]
# Of the methods' pages one runs by default.
SLOW = ("methods/cde", "methods/mgh", "methods/moe")
# What comes after a page's configs: fewer steps of fewer and shorter texts.
SMALL_TEXT = {"query_max_length": 48, "document_max_length": 24}
SMALL_RUN = {
    "trainer": {"max_steps": 4, "enable_progress_bar": False},
    "model": {"init_args": {"schedule": {"warmup_steps": 1}}},
    "data": {"init_args": {"batch_size": 4, "text": SMALL_TEXT}},
}
COUNTS = {"validation": 10, "in_domain": 10, "held_out": 16}
SMALL_BY_PAGE = {
    "methods/cde": {"model": {"init_args": {"first_stage_training": {"word_steps": 2}}}},
    # The callback of the config logs the routing at every tenth step.
    "methods/moe": {"trainer": {"max_steps": 10}},
}
# By a stand-in with random weights all texts are alike, so that the margin leaves no negative.
ADDED = {"fit": ["--config", "small.yaml", "--config", "small_here.yaml"], "mine": ["--margin", "null"]}


def commands_in(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def words_of(command: str) -> list[str] | None:
    """The arguments of `main`, or None for a command of the shell."""
    words = shlex.split(os.path.expandvars(command))
    return words[2:] if words[:2] == ["python", "main.py"] else None


@pytest.fixture
def small_world(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder with the configs, a stand-in for all-MiniLM-L6-v2, and a `prepare` that reads small packages."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "lightning_configs", tmp_path / "lightning_configs")
    # The page on experts trains at the first 384 dimensions.
    size = 384 if page == "methods/moe" else 32
    text = TextSettings(query_max_length=128, document_max_length=128)
    stand_in = Embedder(tiny_bert(hidden_size=size), wordpiece_tokenizer(), MeanPooling(size), text=text)
    stand_in.save_pretrained("all-MiniLM-L6-v2")
    sizes = {f"{split}_documents": count for split, count in COUNTS.items()}
    sizes |= {f"{split}_queries": count // 2 for split, count in COUNTS.items()}
    small = partial(prepare_docstrings, packages=["click"], held_out_packages=["packaging"], sizes=sizes)
    monkeypatch.setattr("embeddings.cli.quickstart.prepare_docstrings", small)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in TUTORIALS]
)
@pytest.mark.usefixtures("small_world")
def test_a_tutorial_runs_from_an_empty_folder(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("small.yaml").write_text(yaml.safe_dump(SMALL_RUN))
    Path("small_here.yaml").write_text(yaml.safe_dump(SMALL_BY_PAGE.get(page, {"trainer": {}})))
    names = []
    for block in blocks(DOCS / f"{page}.md"):
        if title := re.fullmatch(r'yaml title="(.+)"', block.info):
            Path(title[1]).write_text(block.text)
        for command in commands_in(block.text) if block.info == "bash" else []:
            words = words_of(command)
            if words is None:
                subprocess.run(["bash", "-c", command], check=True)
                continue
            names.append(words[0])
            capsys.readouterr()
            assert main([*words, *ADDED.get(words[0], [])]) == 0, f"{command}\n{capsys.readouterr().err}"
            if words[0] == "evaluate":
                assert "ndcg_at_10" in capsys.readouterr().out
    assert names
    assert not page.startswith("methods/") or {"prepare", "fit", "evaluate", "show"} <= set(names)


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_page_names_objects_and_recipes_that_are_there(name: str) -> None:
    text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    found = re.findall(r"`(embeddings/[\w/]+)\.py`: ((?:`\w+`(?:, )?)+)", text)
    objects = [(module, each) for module, listed in found for each in re.findall(r"`(\w+)`", listed)]
    for module, each in objects:
        assert hasattr(importlib.import_module(module.replace("/", ".")), each), f"{module}: {each}"
    assert len(objects) >= 9
    recipes = set(re.findall(r"`(\w+_h100x\d+)`", text))
    assert len(recipes) >= 4
    assert recipes <= set(read_recipes())
