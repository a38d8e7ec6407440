"""What the README and the pages say can be done: links lead somewhere, commands parse, files are there, code runs."""

import json
import re
import shutil
from contextlib import suppress
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name

import pytest

from embeddings.cli import main as command_line
from embeddings.cli.fit import Checked, CheckingCLI, TrainerCLI, run_trainer
from embeddings.cli.plan import OPTIONS, PlanCLI
from embeddings.data import EmbeddingDataModule
from tests.docs.pages import (
    LINK,
    MARK,
    PAGES,
    ROOT,
    anchors,
    blocks,
    command_of,
    commands,
    hooks,
    name_of,
    prose,
    shell_lines_of,
    without_variables,
)
from tests.docs.test_tutorials import TUTORIALS
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer

GENERATED = {"cli.md", "api/index.md", *(f"api/{package}.md" for package in hooks.packages())}
COMMANDS = commands()
# Of the pages whose blocks test_tutorials and test_extending run, the recipes alone are left.
RUN = {"docs/extending.md", *(f"docs/{name}.md" for name in TUTORIALS)}
TRAINING = [(page, words) for page, words in COMMANDS if words[0] in ("fit", "plan")]
FIT = [(page, words) for page, words in TRAINING if page not in RUN or words[1] == "--recipe"]
OTHERS = [(page, words) for page, words in COMMANDS if words[0] not in ("fit", "plan")]


def test_the_pages_are_found():
    assert len(PAGES) > 12
    assert len(FIT) > 5
    assert len({words[0] for _, words in OTHERS}) > 10


def test_the_readme_is_a_door():
    assert len((ROOT / "README.md").read_bytes()) <= 9000
    # The first screen has the two commands for a fresh clone, each in its own block.
    first = [shell_lines_of(block) for block in blocks(ROOT / "README.md")[:2]]
    assert first == [[["make", "quickstart"]], [["make", "test"]]]
    assert (ROOT / "README.md").read_text("utf-8").index("make test") < 1500
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text("utf-8")


def target_of(page, link):
    """The file that a link leads to, and the anchor; generated pages of the site are files of their own."""
    name, _, anchor = link.partition("#")
    if not name:
        return page, anchor
    place = (page.parent / name).resolve()
    if place.is_relative_to(ROOT / "docs"):
        inner = place.relative_to(ROOT / "docs").as_posix()
        if inner in hooks.ROOT_PAGES:
            return ROOT / hooks.ROOT_PAGES[inner], anchor
        if inner in GENERATED:
            return None, anchor
    return place, anchor


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_and_anchor_leads_somewhere(page):
    links = [link for link in LINK.findall(prose(page)) if not re.match(r"\w+:", link)]
    lost = []
    for link in links:
        place, anchor = target_of(page, link)
        is_there = place is None or (place.exists() and (not anchor or anchor in anchors(place)))
        lost += [] if is_there else [link]
    assert lost == []
    if page.name == "README.md":
        assert len(links) > 10


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = set(re.findall(r": ([\w/.-]+\.md)$", text, re.MULTILINE))
    written = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert listed == written | set(hooks.ROOT_PAGES) | {"cli.md"}


def write_configs(folder):
    """The configs of the pages: blocks whose title is the name of a file."""
    named = {
        title[1]: block.text
        for page in PAGES
        for block in blocks(page)
        if (title := re.fullmatch(r'yaml title="(.+)"', block.info))
    }
    for name, text in named.items():
        (folder / name).write_text(text, encoding="utf-8")
    return named


@pytest.mark.parametrize(("page", "words"), FIT, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_a_training_command_parses(page, words, tmp_path, monkeypatch):
    assert "mine.yaml" in write_configs(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = {word.partition("=")[0].lstrip("-") for word in words if word.startswith("--")}
    if words[:2] == ["plan", "--recipe"]:
        assert words[2] in {row["recipe"] for row in hooks.read_rows(hooks.RECIPES)}
        assert {name.replace("-", "_") for name in names} <= {"recipe", *OPTIONS}
    elif words[:2] == ["fit", "--recipe"] and len(words) == 3:  # the lines of recipes are parsed in tests/configs
        assert words[2] in {row["recipe"] for row in hooks.read_rows(hooks.RECIPES)} | {"NAME"}
    elif any(re.fullmatch("[A-Z_]+", word) for word in words):  # a pattern in prose, whose options alone are real
        known = " ".join(row[0] for row in hooks.option_rows(hooks.fit_parser())) + " model. data. trainer.callbacks"
        assert [name for name in names if name.replace("_", "-") not in known and name not in known] == []
    elif names and not {"help", "model.help", "data.sources.help"} & names:
        with suppress(Checked):
            run_trainer(["fit", *words[1:]], PlanCLI if words[0] == "plan" else CheckingCLI)


@pytest.mark.parametrize(
    ("page", "words"), OTHERS, ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60]
)
def test_a_command_parses(page, words, monkeypatch, capsys):
    called = []

    def load(command):
        return wraps(resolve_name(command.target))(lambda **arguments: called.append(arguments))

    monkeypatch.setattr(command_line.Command, "load", load)
    if words in (["--help"], ["--version"]):
        assert command_line.main(words) == 0
    else:
        pair = " ".join(words[:2])
        number = 2 if pair in command_line.COMMANDS else 1
        command_line.run_command(" ".join(words[:number]), words[number:])
        assert len(called) == 1


def test_programs_and_modules_that_blocks_name_are_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    seen = set()
    for page in PAGES:
        lines = [words for block in blocks(page) for words in shell_lines_of(block)]
        lines += [code.split() for code in re.findall(r"`((?:make|[A-Z_=0-9 ]*python -m) [^`…]+)`", prose(page))]
        for words in map(without_variables, lines):
            if words[:1] == ["make"] and words[1:]:
                assert words[1] in targets, f"{name_of(page)}: {words}"
                seen.add("make")
            elif words[:3] == ["python", "-m", "pytest"]:
                assert [word for word in words[3:] if "/" in word and not (ROOT / word).exists()] == []
                seen.add("pytest")
            elif words[:2] == ["python", "-m"] and words[2].partition(".")[0] in ("benchmarks", "tests"):
                path = ROOT.joinpath(*words[2].split("."))
                assert words[2].endswith("NAME") or path.with_suffix(".py").is_file(), f"{name_of(page)}: {words[2]}"
                seen.add("module")
    assert seen == {"make", "pytest", "module"}


def test_a_line_that_was_not_run_says_so():
    """Programs that nobody has here stand in blocks whose title says that they were not run."""
    lines = [(block, words) for page in PAGES for block in blocks(page) for words in shell_lines_of(block)]
    others = [(block, words[0]) for block, words in lines if command_of(words) is None]
    assert sum(block.is_marked for block, _ in others) >= 4
    unmarked = {program for block, program in others if not block.is_marked}
    assert unmarked <= {"make", "pip", "python", "gzip", "mkdir", ".ci/run", "."}
    titles = [block.info for page in PAGES for block in blocks(page) if "not run" in block.info.lower()]
    assert [title for title in titles if not title.startswith(MARK)] == []


FOLDERS = "lightning_configs|embeddings|examples|tests|benchmarks|docs|tools"
PACKAGES = "|".join(sorted(path.parent.name for path in (ROOT / "embeddings").glob("*/__init__.py")))
GROUPS = "methods|scales|data|jobs|one_gpu|sweeps|slurm"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_is_named_is_there(page):
    text = page.read_text("utf-8")
    named = set(re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w", text))
    named |= {f"lightning_configs/{path}" for path in re.findall(rf"`((?:{GROUPS})/\w+\.(?:yaml|sbatch))`", text)}
    lost = [path for path in named if not re.search("[A-Z]{4}", path) and not (ROOT / path).exists()]
    modules = re.findall(rf"`((?:{PACKAGES})(?:/\w+)+)(?:\.py)?`", text) if page.name == "architecture.md" else []
    places = [ROOT / "embeddings" / module for module in modules]
    lost += [str(place) for place in places if not (place.is_dir() or place.with_suffix(".py").is_file())]
    assert lost == []


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_python_of_the_readme_trains_and_searches_and_that_of_the_pages_serves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = save_backbone(str(tmp_path / "backbone"), tiny_bert(num_positions=512), wordpiece_tokenizer())
    pairs = [{"query": f"how do I pad {number}", "positive": f"pad the fox {number}"} for number in range(64)]
    articles = [{"_id": str(number), "title": "fox", "text": f"the lazy dog {number}"} for number in range(5)]
    for name, rows in (("train.jsonl", pairs), ("articles.jsonl", articles)):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    codes = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert len(codes) == 1
    code = codes[0].replace('"all-MiniLM-L6-v2"', repr(tiny)).replace("Trainer(", 'Trainer(accelerator="cpu", ')
    assert code.count(tiny) == 1
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] in codes[0]
    # Those with a title are run in test_stores.
    serving = [block.text for block in blocks(ROOT / "docs" / "serving.md") if block.info == "python"]
    assert len(serving) == 3
    for text in serving:
        exec(compile(text, "docs/serving.md", "exec"), {})
    assert len(re.findall(r"^-?\d\.\d{3} \d ", capsys.readouterr().out, re.MULTILINE)) == 3 + 3
    shutil.rmtree("checkpoints")
    (rows,) = (block.text for block in blocks(ROOT / "docs" / "getting-started.md") if block.language == "python")
    found: dict[str, EmbeddingDataModule] = {}
    exec(compile(rows, "docs/getting-started.md", "exec"), found)
    found["data"].setup()
    assert found["data"].sizes == (1,)


def test_the_python_of_the_readme_trains_as_own_pairs_does(tmp_path, monkeypatch):
    """The same optimiser, schedule, temperature, precision, epochs, batches and texts."""
    monkeypatch.chdir(tmp_path)
    tiny = save_backbone(str(tmp_path / "backbone"), tiny_bert(num_positions=512), wordpiece_tokenizer())
    Path("train.jsonl").write_text('{"query": "a fox", "positive": "the fox"}\n' * 2, encoding="utf-8")
    fits = []

    def fit(trainer, model, datamodule=None, **options):
        fits.append((trainer, model, datamodule))
        raise InterruptedError

    monkeypatch.setattr("embeddings.cli.trainer.Trainer.fit", fit)
    monkeypatch.setattr(TrainerCLI, "run_command", lambda run: fit(run.trainer, run.model, run.datamodule))
    (code,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    assert len([line for line in code.splitlines() if line]) <= 13
    with pytest.raises(InterruptedError):
        exec(compile(code.replace("all-MiniLM-L6-v2", tiny), "README.md", "exec"), {})
    options = ["--model.backbone.name", tiny, "--data.sources", "[{name: support, path: train.jsonl}]"]
    with pytest.raises(InterruptedError):
        run_trainer(["fit", "--config", str(ROOT / "lightning_configs" / "own_pairs.yaml"), *options])
    script, config = (
        {
            "optimizer": model.optimizer_config(),
            "schedule": model._schedule,
            "loss": (model.loss.temperature, model.loss.in_batch_negatives, model.loss.similarity),
            "pooling": type(model.embedder.pooling),
            "trainer": (trainer.precision, trainer.max_epochs, trainer.gradient_clip_val, trainer.max_steps),
            "batch": (trainer.accumulate_grad_batches, data.batch_size, data.num_negatives, data.text),
        }
        for trainer, model, data in fits
    )
    assert script == config
    assert config["loss"][0] == 0.05


def test_the_figures_of_the_readme_are_those_of_the_files():
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    recipes = {row["recipe"]: row for row in hooks.read_rows(hooks.RECIPES)}
    for name in ("quickstart", "mgh_docstrings", "moe_docstrings"):
        assert re.search(rf"{recipes[name]['value']}[^|]*`{name}`", text), name
    newest = hooks.newest(hooks.read_rows(hooks.RESULTS))
    step = newest["P1 GradCache step over the step with every graph kept"]
    value, low, high = (hooks.rounded(float(step[key])) for key in ("value", "low", "high"))
    assert f"takes {value} ({low} to {high}) times as long as the same step" in text
    cached, plain = (
        float(newest[f"P4 growth of peak memory from 256 to 8192 pairs, {kind}"]["value"])
        for kind in ("cached", "plain")
    )
    assert f"grows by {cached:.0f} MiB, that of the plain step by {plain:,.0f} MiB" in text
    clustered, random = (hooks.trial_values("E1", f"bi-encoder, {kind}") for kind in ("clustered", "random"))
    assert f"clustered batches {hooks.gain(clustered, random, 'held-out packages', 3)} on held-out packages" in text
