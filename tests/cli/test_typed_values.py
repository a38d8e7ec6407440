"""What is refused of a value's type before torch is loaded: only what the parser refuses, and in its words."""

import copy
import random
from collections.abc import Iterator

import pytest
import yaml

from embeddings.cli.fit import check_arguments
from embeddings.cli.fit_line import check_fit_line
from embeddings.cli.source_types import Argument
from embeddings.cli.typed_values import complaint_of
from embeddings.common import UserError
from tests.cli.test_fit_line import CONFIGS, FILES

VALUES = (
    "hot", "a: b", "${x}", "", "3", "1e-4", "1e5", "1.5", "true", "null", "~", "2024-01-01", "12:30", "[1, 2]", "[",
    "@", 0, 1, -1, 1.0, 1.5, float("nan"), True, False, None, [], [1], ["a"], [None], [["a"]], {}, {"a": 1},
)  # fmt: skip
QUICKSTART = ["--config", str(CONFIGS / "quickstart.yaml")]


def places(tree, at=()) -> Iterator[tuple]:
    """Where each value of a config is."""
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*at, key)
        yield from places(inner, (*at, key))


def replaced(tree, place, value):
    found = copy.deepcopy(tree)
    owner = found
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    return found


def lines(path, folder) -> Iterator[list[str]]:
    """`fit` with a config of ours, each of its values replaced by each of `VALUES`; some are options too."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    first = [] if "class_path" in tree.get("model", {}) else QUICKSTART
    for number, place in enumerate(places(tree)):
        for kind, value in enumerate(VALUES):
            name = folder / f"{path.parent.name}_{path.stem}_{number}_{kind}.yaml"
            yield lambda name=name, place=place, value=value: [
                "fit", *first, "--config", written(name, replaced(tree, place, value))
            ]  # fmt: skip
            if isinstance(value, str | int | float) and all(isinstance(key, str) for key in place):
                option = f"--{'.'.join(place)}={value}"
                yield lambda option=option: ["fit", *first, "--config", str(path), option]


def written(path, tree):
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return str(path)


def verdict(check, line) -> str:
    """What a check says of a line of arguments, empty where it takes it."""
    try:
        check(line)
    except UserError as error:
        return str(error)
    return ""


def compare(makers, most) -> tuple[int, int]:
    """How many lines are refused early and are let through, and how many of the former differ by word alone.

    Every line that is refused early is refused by the parser.
    """
    refused = differing = 0
    for maker in makers:
        line = maker()
        quick = verdict(check_fit_line, line)
        if quick and refused < most:
            slow = verdict(check_arguments, line)
            assert slow, (line, quick)
            refused += 1
            differing += quick != slow
    return refused, differing


def test_what_is_refused_early_of_the_quickstart_the_parser_refuses(tmp_path):
    makers = list(lines(CONFIGS / "quickstart.yaml", tmp_path))
    random.Random(0).shuffle(makers)
    assert len(makers) >= 2000
    refused, differing = compare(makers[:120], 10)
    assert refused == 10
    assert differing <= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_is_refused_early_of_all_configs_the_parser_refuses(tmp_path):
    makers = [maker for path in FILES for maker in lines(path, tmp_path)]
    random.Random(1).shuffle(makers)
    assert len(makers) >= 30_000
    refused, differing = compare(makers[:6000], 1000)
    assert refused >= 500
    assert differing <= refused // 20


def complaint(hint, value, is_text=False, default=None):
    return complaint_of("trainer.x", Argument(hint, default), value, is_text)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, "hot"),
        (int, 1.5),
        (int, True),
        (bool, 2),
        (float, "hot"),
        (float, [1.0]),
        (str, 3),
        (str, ["a"]),
        (int | None, "hot"),
        (list[int], 3),
        (list[int], "list.txt"),
        (list[int], [1, "a"]),
        (dict[str, int], {"a": "b"}),
        (dict[str, int], 3),
    ],
)
def test_a_value_of_another_type_is_complained_of(hint, value):
    said = complaint(hint, value)
    assert said.startswith('Parser key "trainer.x"')
    assert "Expected a" in said


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (None, "hot"),
        (int, 3),
        (int, None),
        (int, "3"),
        (float, 3),
        (float, "1e-4"),
        (str, "hot"),
        (int, "${x}"),
        (int, ""),
        (int, {"a": 1}),
        (list[int], [1, None]),
        (dict[str, str], {"a.b": 3}),
        (dict[str, str], {0: "a", 1: 3}),
        (str | list[str], ["a"]),
        (int, "["),
    ],
)
def test_of_what_is_right_or_not_certain_nothing_is_said(hint, value):
    assert complaint(hint, value) == ""


def test_text_is_read_as_an_options_value():
    assert complaint(str, "3", is_text=True) == complaint(int, "3", is_text=True) == ""
    assert complaint(list[int], "[1, 2]", is_text=True) == complaint(int, "null", is_text=True) == ""
    assert "Got value: 1.5" in complaint(int, "1.5", is_text=True)
    assert "Got value: 1000.0" in complaint(int, "1e3", is_text=True)


def test_a_default_of_another_type_is_taken():
    assert complaint(int, "auto", default="auto") == ""
    assert complaint(int, "many", default="auto")
