from dataclasses import dataclass
from typing import Any, Literal, Optional

import pytest

from embeddings.cli.errors import ConfigError
from embeddings.cli.given import (
    Signature,
    check_names,
    check_nulls,
    config_paths,
    given_in_order,
    given_mappings,
    signature_of,
    takes_null,
    unfolded,
    unfolded_once,
)
from embeddings.common import InputError


@dataclass(frozen=True)
class Wood:
    name: str
    rings: int | None = None


class Shed:
    def __init__(self, planks: list[Wood], door: Wood | None = None, height: float = 2.0, roof: str = None) -> None:  # noqa: RUF013
        pass


class Anything:
    def __init__(self, width: int = 1, **others: Any) -> None:
        pass


SHED = Signature("build", {"shed": Shed, "other": Any})
CHOSEN = {"class_path": f"{__name__}.Shed"}


def test_config_paths_are_found_in_every_spelling():
    line = ["fit", "--config", "a", "-c", "b", "--config=c", "--x", "d", "-ce", "-c=f", "--config"]
    assert config_paths(line) == ["a", "b", "c", "e", "f"]


def test_a_config_that_is_named_in_one_word_is_read(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {}\n")
    for words in (["-c", f"{tmp_path}/a.yaml"], [f"-c{tmp_path}/a.yaml"], [f"-c={tmp_path}/a.yaml"]):
        assert [given.content for given in given_in_order(["fit", *words])] == [{"model": {}}]


@pytest.mark.parametrize(
    ("hint", "has_null"),
    [
        (int, False),
        (int | None, True),
        (Optional[int], True),  # noqa: UP045
        (int | float, False),
        (list[int | None], False),
        (Literal["a", "b"], False),
        (Literal["a", None], True),
        (Any, True),
        (object, True),
    ],
)
def test_null_is_a_value_of_the_types_that_say_so(hint, has_null):
    assert takes_null(hint) == has_null


def test_a_default_of_null_makes_a_type_nullable():
    types = signature_of(Shed).types
    assert list(types) == ["planks", "door", "height", "roof"]
    assert [takes_null(hint) for hint in types.values()] == [False, True, False, True]
    assert not signature_of(Shed).is_open
    assert signature_of(Anything) == Signature("Anything", {"width": int}, is_open=True)


def test_what_has_no_signature_is_left_to_the_parser():
    def unknown(value: "Nowhere") -> None:  # noqa: F821
        pass

    assert signature_of(unknown) is None


@pytest.mark.parametrize(
    ("shed", "says"),
    [
        ({"height": None}, "shed.height: expected float, got null; "),
        ({"planks": None}, r"shed.planks: expected list\[Wood\], got null; "),
        ({"planks": [{"name": "oak"}, {"name": None}]}, "shed.planks.name: expected str, got null; "),
        ({"door": {"name": None}}, "shed.door.name: expected str, got null; "),
    ],
)
@pytest.mark.parametrize("as_class", [False, True])
def test_null_is_refused_by_the_option_wherever_it_stands(shed, says, as_class):
    given = CHOSEN | {"init_args": shed} if as_class else shed
    with pytest.raises(ConfigError, match=f"^{says}"):
        check_nulls({"shed": given}, SHED)
    with pytest.raises(ConfigError, match=f"^run.{says}"):
        check_nulls({"shed": given, "other": None}, SHED, "run")


def test_null_is_taken_where_a_type_has_it():
    shed = {"planks": [{"name": "oak", "rings": None}], "door": None, "roof": None}
    check_nulls(
        {"shed": CHOSEN | {"init_args": shed}, "other": {"class_path": "no.such", "init_args": {"x": None}}}, SHED
    )
    check_nulls({"shed": None}, Signature("build", {"shed": Any}))
    with pytest.raises(ConfigError):
        check_nulls({"shed": None}, SHED)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shet": {}}, "Option 'shet' is not accepted by build; did you mean shed? --help lists the options"),
        ({"shed": {"dor": {}}}, "shed: Option 'dor' is not accepted by Shed; did you mean door? --help"),
        ({"shed": CHOSEN | {"init_args": {"dor": {}}}}, "shed: Option 'dor' is not accepted by Shed"),
        ({"shed": {"init_args": {"door": {"x": {}}}}}, "shed.door: Option 'x' is not accepted by Wood; --help"),
        (
            {"shed": {"planks+": [{"name": "oak", "ring": {}}]}},
            "shed.planks: Option 'ring' is not accepted by Wood; did",
        ),
    ],
)
def test_an_unknown_name_over_nothing_is_refused_with_the_one_most_like_it(given, says):
    with pytest.raises(ConfigError) as raised:
        check_names(given, {"shed": CHOSEN}, SHED)
    assert str(raised.value).startswith(says)


def test_the_class_that_was_chosen_before_says_which_names_there_are():
    mappings = {"other": {"init_args": {"dor": {}}}}
    check_names(mappings, {}, SHED)
    with pytest.raises(ConfigError, match="other: Option 'dor' is not accepted by Shed"):
        check_names(mappings, {"other": CHOSEN}, SHED)
    with pytest.raises(ConfigError, match="other: Option 'dor' is not accepted by Shed"):
        check_names({"other": {"class_path": "Shed", "init_args": {"dor": {}}}}, {"other": CHOSEN}, SHED)
    check_names({"other": {"class_path": f"{__name__}.Anything", "init_args": {"dor": {}}}}, {"other": CHOSEN}, SHED)


def test_known_names_may_stand_over_nothing():
    check_names({"shed": {}, "other": {}}, {}, SHED)
    check_names({"shed": CHOSEN | {"init_args": {}, "dict_kwargs": {}}}, {}, SHED)
    check_names({"shed": {"planks": [{}], "door": {}, "height": {}}}, {}, SHED)


def test_mappings_come_from_files_from_texts_and_from_options(tmp_path):
    (tmp_path / "a.yaml").write_text("a.b: {}\na: {c: [{d.e: 1}]}\n")
    (tmp_path / "list.yaml").write_text("[1]\n")
    argv = ["--config", str(tmp_path / "a.yaml"), '--config={"f": {}}']
    argv += ["--x.y={z: {}}", "--v", "{w: 1}", "--text", "{only a brace", "--plain", "3"]
    assert list(given_mappings(argv)) == [
        {"a": {"b": {}, "c": [{"d": {"e": 1}}]}},
        {"f": {}},
        {"x": {"y": {"z": {}}}},
        {"v": {"w": 1}},
    ]
    assert list(given_mappings([])) == []
    with pytest.raises(InputError, match=r"list\.yaml: holds no options"):
        list(given_mappings(["--config", str(tmp_path / "list.yaml")]))


def test_a_line_is_read_from_left_to_right_until_its_options_end(tmp_path):
    (tmp_path / "a.yaml").write_text("a.b: 1\n")
    path = str(tmp_path / "a.yaml")
    argv = ["fit", "--x.y", "-1", "-c", path, "--list=[{z: 1}]", "--bare", "--two words", "--", "--after"]
    found = [(given.words, given.mapping) for given in given_in_order(argv)]
    assert found == [
        (("--x.y", "-1"), {"x": {"y": "-1"}}),
        (("-c", path), {"a": {"b": 1}}),
        (("--list=[{z: 1}]",), {"list": [{"z": 1}]}),
        (("--bare",), {"bare": ""}),
    ]


def test_the_module_of_a_class_that_a_config_may_not_name_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "foreign.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    given = {"shed": {"class_path": "foreign.Shed", "init_args": {"dor": {}}}}
    check_names(given, given, Signature("build", {"shed": dict}))
    check_nulls(given, Signature("build", {"shed": dict}))


def test_keys_of_several_parts_are_mappings_and_those_that_begin_alike_are_one():
    given = {"a.b.c": 1, "a.b.d": {"x.y": 2}, "a": {"e": 3}, 4: [{"f.g": 5}]}
    assert unfolded(given) == {"a": {"b": {"c": 1, "d": {"x": {"y": 2}}}, "e": 3}, "4": [{"f": {"g": 5}}]}
    assert unfolded_once(given) == {"a": {"b.c": 1, "b.d": {"x.y": 2}, "e": 3}, "4": [{"f.g": 5}]}


def test_the_text_of_an_option_is_kept():
    assert [given.text for given in given_in_order(["--a=[1]", "--b", "x=y", "--c"])] == ["[1]", "x=y", ""]


def test_a_config_that_another_names_stands_at_the_place_of_its_name(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text("x: 1\nconfig: sub/b.yaml\ny: 1\n")
    (tmp_path / "sub" / "b.yaml").write_text("config: ../c.yaml\ny: 2\n")
    (tmp_path / "c.yaml").write_text("x: 3\n")
    argv = ["--config", str(tmp_path / "a.yaml")]
    assert [given.mapping for given in given_in_order(argv)] == [{"x": 1}, {"x": 3}, {"y": 2}, {"y": 1}]
    (tmp_path / "c.yaml").write_text("a: {}\nb.x: {}\n")
    (tmp_path / "sub" / "b.yaml").write_text("config: ../c.yaml\na: 2\nb: {y: 1}\n")
    assert len(list(given_in_order(argv))) == 4
    (tmp_path / "sub" / "b.yaml").write_text("config: ../c.yaml\na: {y: 1}\n")
    with pytest.raises(InputError, match=r"sub/b\.yaml: gives a beside .*c\.yaml, which it names and whose a would"):
        list(given_in_order(argv))
    (tmp_path / "sub" / "b.yaml").write_text("config: ../c.yaml\n")
    (tmp_path / "c.yaml").write_text("config: a.yaml\n")
    with pytest.raises(InputError, match=r"a\.yaml: names itself"):
        list(given_in_order(argv))


def test_a_config_that_another_names_is_looked_into_for_unknown_names_over_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("config: b.yaml\n")
    (tmp_path / "b.yaml").write_text("shet: {}\n")
    (given,) = given_mappings(["--config", str(tmp_path / "a.yaml")])
    with pytest.raises(ConfigError, match="Option 'shet' is not accepted by build; did you mean shed"):
        check_names(given, {}, SHED)
