import inspect
from pathlib import Path
from types import NoneType
from typing import Literal, get_args

import pytest

from embeddings.cli.fit_line import TRAINER
from embeddings.cli.given import signature_of
from embeddings.cli.source_names import body_of, defined_at, parameters_in_source
from embeddings.cli.source_types import Argument, argument_in_source
from tests.cli.test_source_names import class_paths, loaded


def members(hint):
    parts = [member for member in get_args(hint) if member is not NoneType]
    return [NoneType, *parts] if NoneType in get_args(hint) else parts or [hint]


def test_the_source_tells_the_types_that_the_class_has():
    told = records = 0
    for path in [*class_paths(), "embeddings.data.SourceConfig", "embeddings.models.BackboneConfig"]:
        signature = signature_of(loaded(path))
        for name in parameters_in_source(path) or ():
            argument = argument_in_source(path, name)
            default = inspect.signature(loaded(path)).parameters[name].default
            if argument.hint is not None:
                assert argument.hint | None == signature.types[name] | None, (path, name)
                assert (NoneType in get_args(argument.hint)) == (NoneType in get_args(signature.types[name]))
                assert argument.default is None or argument.default == default, (path, name)
                told += 1
            for record in filter(None, (argument.record, argument.records)):
                kinds = [kind for kind in members(signature.types[name]) if kind is not NoneType]
                expected = [list[loaded(record)]] if argument.records else [loaded(record)]
                assert kinds in (expected, [loaded(record)]), (path, name)
                records += 1
    assert told >= 200
    assert records >= 15


def test_the_trainer_and_a_source_are_told():
    assert argument_in_source(TRAINER, "max_steps") == Argument(int, -1)
    assert argument_in_source(TRAINER, "max_epochs") == Argument(int | None)
    assert argument_in_source(TRAINER, "callbacks") == argument_in_source(TRAINER, "nothing") == Argument()
    assert argument_in_source("embeddings.data.EmbeddingDataModule", "sources").records.endswith(".SourceConfig")
    assert argument_in_source("embeddings.data.EmbeddingDataModule", "text").record.endswith(".TextSettings")
    assert argument_in_source("embeddings.data.SourceConfig", "columns") == Argument(dict[str, str])
    assert argument_in_source("embeddings.data.SourceConfig", "weight") == Argument(float, 1.0)


HEAD = """
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, Union
if TYPE_CHECKING:
    Late = int
Choice = Literal["a", 1]
Other: Any = Union[Choice, None]
float = Wrapped
Twice = int
Twice = str
SIZE = 3
class Plain:
    x: int
@dataclass(frozen=True)
class Record:
    x: int = 3
@dataclass(init=False)
class Half:
    x: int = 3
"""
TOLD = {
    "a: int": Argument(int),
    "a: int = None": Argument(int | None),
    "*, a: bool = True": Argument(bool, True),
    "b=1, /, a: int = -1": Argument(int, -1),
    "a: Optional[str] = 'x'": Argument(str | None, "x"),
    "a: Union[int, str, None] = ()": Argument(int | str | None),
    "a: str | Path": Argument(str | Path),
    "a: Choice": Argument(Literal["a", 1]),
    "a: Other": Argument(Literal["a", 1] | None),
    "a: list[int] | dict[str, int | None]": Argument(list[int] | dict[str, int | None]),
    "a: Record": Argument(record="things.thing.Record"),
    "a: Record | None = Record()": Argument(record="things.thing.Record"),
    "a: list[Record]": Argument(records="things.thing.Record"),
}
NOT_TOLD = (
    "a", "a=3", "a: 'int'", "a: Any", "a: Late", "a: Twice", "a: float", "a: Nothing", "a: Plain", "a: Half",
    "a: int | Plain", "a: int = SIZE", "a: list[Plain]", "a: dict[str, Record]", "a: Record | Half", "a: Record | int",
    "a: list[list[Record]]", "a: tuple[int, ...]", "a: Literal[SIZE]", "a: things.Record", "a: list[int, str]",
    "a: list[Path]",
)  # fmt: skip


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What the source tells of `a` in a class with these arguments."""

    def tell(taken):
        (tmp_path / "things" / "thing.py").write_text(f"{HEAD}\nclass A:\n    def __init__(self, {taken}): ...\n")
        return argument_in_source("things.thing.A", "a")

    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("embeddings.cli.source_types.READ", ("things",))
    forget()
    yield tell
    forget()


def forget():
    for function in (argument_in_source, defined_at, body_of):
        function.cache_clear()


@pytest.mark.parametrize("taken", TOLD)
def test_plain_types_choices_and_records_are_told(taken, told):
    assert told(taken) == TOLD[taken]


@pytest.mark.parametrize("taken", NOT_TOLD)
def test_of_other_types_nothing_is_told(taken, told):
    assert told(taken) == Argument()


@pytest.mark.parametrize("path", ["A", "", "no_such_package.A", "embeddings.nothing.A", "embeddings.common.json_lines"])
def test_of_what_is_no_class_nothing_is_told(path):
    assert argument_in_source(path, "a") == Argument()
