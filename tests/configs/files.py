"""Helpers that read the library's configs, instantiate them, and run small versions of them."""

import re
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from embeddings.cli.fit import run_trainer
from embeddings.cli.parser import read_yaml
from embeddings.data.sources import SourceConfig
from tests.helpers.runs import write_config

CONFIGS = Path(__file__).parents[2] / "lightning_configs"
_MACHINE_PATH = re.compile(r"(?<![\w}.)])/(home|work|root|tmp|mnt|data|Users)\b|s3://|gs://|[A-Z]:\\")


def read(name: str | Path) -> dict[str, Any]:
    """The content of a config, a path or its name below `lightning_configs` without the suffix."""
    path = name if isinstance(name, Path) else CONFIGS / f"{name}.yaml"
    content = read_yaml(path, str(path))
    assert isinstance(content, dict)
    return content


def init_args(name: str, section: str) -> dict[str, Any]:
    """The arguments of the config's model or data."""
    arguments = read(name)[section]["init_args"]
    assert isinstance(arguments, dict)
    return arguments


def sources(name: str) -> dict[str, SourceConfig]:
    """The sources of a data config by name; names are unique."""
    listed = [SourceConfig(**fields) for fields in init_args(f"data/{name}", "data")["sources"]]
    by_name = {source.name: source for source in listed}
    assert len(by_name) == len(listed)
    return by_name


def flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a config by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in content.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def method(name: str) -> dict[str, Any]:
    """The leaves of a method's config; those of the module lack `model.init_args.`."""
    return {key.removeprefix("model.init_args."): value for key, value in flat(read(f"methods/{name}")).items()}


def build(base: type, content: dict[str, Any], section: str = "model") -> Any:
    """The object that a config's section configures."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(base, section)
    return parser.instantiate_classes(parser.parse_object({section: content}))[section]


def small_run(folder: Path, files: list[str | Path], small: dict[str, Any], *options: str) -> Any:
    """Train with unchanged config files, followed by one that makes the run small; returns the CLI."""
    trainer = {
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs"}},
    }
    path = write_config(folder, small | {"trainer": trainer | small.get("trainer", {})}, "small.yaml")
    return run_trainer(["fit", *(f"--config={file}" for file in (*files, path)), *options])


def check_texts(files: list[Path]) -> None:
    """Check that configs start with a comment, have short lines, and contain no path of one machine."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert text.startswith("# "), file.name
        assert not _MACHINE_PATH.search(text), file.name
        assert max(map(len, text.splitlines())) <= 150, file.name
