"""The wheel: its files, and that it works from an empty folder in an environment without the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import embeddings
from embeddings.cli.parser import CONFIGS, read_recipes
from embeddings.common.errors import DISTRIBUTION

ROOT = Path(__file__).parents[1]
SOURCES = ("embeddings", "lightning_configs", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command without environment variables of the checkout; returns its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EMBED_", "PIP_"))}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout, built from a copy without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist")
    run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=source)
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed command, in an environment with the current libraries but without the checkout."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", "environment", cwd=folder)
    python = folder / "environment" / "bin" / "python"
    (site,) = folder.glob("environment/lib/python*/site-packages")
    # Python ignores `.pth` files in folders that a `.pth` file names, so an editable install is not used.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    return python.with_name("embeddings")


def files_below(folder: Path) -> set[str]:
    """The relative paths of all files in a folder, without compiled ones."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in paths}


def test_the_wheel_contains_exactly_the_files_of_the_package_and_the_configs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    package, configs = files_below(ROOT / "embeddings"), files_below(ROOT / "lightning_configs")
    assert len(package) > 100
    assert len(configs) > 40
    assert "py.typed" in package
    assert files == {f"embeddings/{name}" for name in package} | {f"embeddings/lightning_configs/{n}" for n in configs}


def test_the_name_and_the_version_of_the_distribution(wheel: Path) -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["name"] == DISTRIBUTION
    assert wheel.name.split("-")[:2] == [DISTRIBUTION.replace("-", "_"), embeddings.__version__]


def test_the_help_names_the_command_and_the_folder_of_configs(program: Path, tmp_path: Path) -> None:
    assert run(program, "--version", cwd=tmp_path) == f"embeddings {embeddings.__version__}\n"
    listed = run(program, "--help", cwd=tmp_path)
    assert listed.startswith("usage: embeddings COMMAND")
    (folder,) = (line.partition(": ")[2] for line in listed.splitlines() if line.startswith("configs and recipes: "))
    assert folder.endswith("site-packages/embeddings/lightning_configs")
    assert files_below(Path(folder)) == files_below(CONFIGS)
    assert run(program.with_name("python"), "-m", "embeddings", "--help", cwd=tmp_path) == listed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_configs_recipes_and_sweeps_are_found_from_an_empty_folder(program: Path, tmp_path: Path) -> None:
    recipe = "cde_small_h100x1"
    by_recipe = run(program, "fit", "--recipe", recipe, "--print_config", cwd=tmp_path)
    configs = [word for path in read_recipes()[recipe]["configs"].split() for word in ("--config", path)]
    assert by_recipe == run(program, "fit", *configs, "--print_config", cwd=tmp_path)
    assert yaml.safe_load(by_recipe)["model"]["class_path"] == "embeddings.modules.CDEModule"
    name = "lightning_configs/quickstart.yaml"
    content = yaml.safe_load(run(program, "fit", "--config", name, "--print_config", cwd=tmp_path))
    assert content["trainer"]["default_root_dir"] == "checkpoints/runs"
    lines = run(program, "sweep", "lightning_configs/sweeps/pooling.yaml", "--dry-run", cwd=tmp_path).splitlines()
    assert lines[1].startswith("  checkpoints/sweeps/pooling/quickstart-")
    assert lines[2].startswith("  embeddings fit --config lightning_configs/quickstart.yaml ")
    # A sweep starts its runs as processes, which must also find the package and the configs.
    started = run(program.with_name("python"), "-c", CHILD, cwd=tmp_path)
    assert started.splitlines()[0].startswith("usage: embeddings COMMAND")
    assert list(tmp_path.iterdir()) == []


CHILD = """
import subprocess, sys
from embeddings.cli.sweep import COMMAND
subprocess.run([sys.executable, *COMMAND, "--help"], check=True)
"""
