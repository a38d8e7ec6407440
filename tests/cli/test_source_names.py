import importlib
import inspect
import re
from pathlib import Path

import pytest

from embeddings.cli.fit_line import TRAINER
from embeddings.cli.source_names import body_of, defined_at, parameters_in_source, public_names

CONFIGS = Path(__file__).parents[2] / "lightning_configs"
DATACLASS = "from dataclasses import dataclass, field\n"
OURS = ("callbacks", "data", "losses", "models", "modules")


def loaded(class_path):
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def class_paths():
    """Every class that a config of ours names, and every public class of the packages that configs name."""
    texts = [path.read_text() for path in CONFIGS.rglob("*.yaml")]
    found = {path for text in texts for path in re.findall(r"class_path: ([\w.]+\.[A-Z]\w*)", text)}
    for package in (f"embeddings.{name}" for name in OURS):
        names = importlib.import_module(package).__all__
        found |= {f"{package}.{name}" for name in names if inspect.isclass(loaded(f"{package}.{name}"))}
    return sorted(found | {TRAINER, "lightning.pytorch.callbacks.EarlyStopping", "torch.optim.SGD"})


def test_the_source_tells_what_the_class_does():
    told = {path: parameters_in_source(path) for path in class_paths()}
    told = {path: names for path, names in told.items() if names is not None}
    assert len(told) >= 30
    assert {"embeddings.modules.NVEmbedModule", "embeddings.data.EmbeddingDataModule", TRAINER} <= told.keys()
    assert "torch.optim.AdamW" in told
    for path, names in told.items():
        assert names == tuple(inspect.signature(loaded(path)).parameters), path


@pytest.mark.parametrize(
    "text",
    [
        "class A: ...",
        "class A(B):\n    x: int",
        "class A:\n    def __init__(self, a, **others): ...",
        "class A:\n    def __init__(self, a, *others): ...",
        "class A(metaclass=M):\n    def __init__(self, a): ...",
        "@record\nclass A:\n    def __init__(self, a): ...",
        "@dataclass\nclass A:\n    x: int",
        f"{DATACLASS}@dataclass(init=False)\nclass A:\n    x: int",
        f"{DATACLASS}@dataclass\nclass A(B):\n    x: int",
        f"{DATACLASS}@dataclass\n@record\nclass A:\n    x: int",
        f"{DATACLASS}@dataclass\nclass A:\n    x: ClassVar[int]",
        f"{DATACLASS}@dataclass\nclass A:\n    x: int = field(init=False)",
        f"{DATACLASS}@dataclass\nclass A:\n    x: int\n    def __init__(self, a): ...",
        "class A:\n    def __new__(cls, b): ...\n    def __init__(self, a): ...",
        "class A:\n    def __init__(self, a): ...\nA = wrapped(A)",
        "class A:\n    @overload\n    def __init__(self, a): ...\n    def __init__(self, a, b): ...",
        "from .other import A",
        "def A(a): ...",
        "class A: (",
        "from things.thing import A",
    ],
)
def test_what_the_source_does_not_tell_is_none(text, tmp_path, monkeypatch):
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "__init__.py").touch()
    (tmp_path / "things" / "thing.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    defined_at.cache_clear()
    body_of.cache_clear()
    assert parameters_in_source("things.thing.A") is None


@pytest.mark.parametrize(
    "path",
    ["A", "", "no_such_package.A", "embeddings.nothing.A", "embeddings.models.Nothing", "embeddings./tmp.A", "...A"],
)
def test_a_path_that_leads_nowhere_is_none(path):
    assert parameters_in_source(path) is None


def test_names_of_all_kinds_are_told(tmp_path, monkeypatch):
    (tmp_path / "kinds").mkdir()
    (tmp_path / "kinds" / "__init__.py").write_text("if TYPE_CHECKING:\n    from kinds.one import B as A\n")
    (tmp_path / "kinds" / "one.py").write_text("class B:\n    def __init__(self, a, /, b, *, c=1): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert parameters_in_source("kinds.A") == ("a", "b", "c")
    (tmp_path / "kinds" / "two.py").write_text(
        f"{DATACLASS}@dataclass(frozen=True)\nclass C:\n    x: int\n    y: A = 1\n"
    )
    assert parameters_in_source("kinds.two.C") == ("x", "y")


def test_the_names_that_a_package_offers_are_those_of_its_list():
    packages = [f"embeddings.{name}" for name in OURS]
    assert {package: public_names(package) for package in packages} == {
        package: tuple(importlib.import_module(package).__all__) for package in packages
    }
    assert public_names("embeddings.data.datamodule") is None
    assert public_names("embeddings.nothing") is None
