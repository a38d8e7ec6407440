import pytest
import yaml

from embeddings.cli.yaml_files import MOST_ALIASED_VALUES, parse_yaml, read_yaml
from embeddings.common import InputError

GOOD = "a: &a {x: 1e-3, y: [no, 07, ~]}\nb:\n  <<: *a\n  x: 2\n'a b': 2020-01-01\n"


def bomb(levels):
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [GOOD, "", "3", "- {a: 1}\n- [b]\n", '{"a": {"b": null}}', "a: 'x'\n", bomb(9)])
def test_what_is_read_is_what_the_safe_loader_reads(text, tmp_path):
    assert parse_yaml(text, "x") == yaml.safe_load(text)
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml", "x") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1,\n", "not a YAML file: expected the node content, but found '<stream end>', line 2; mend the line"),
        ("a: \x07\n", "not a YAML file: unacceptable character #x0007: special characters are not allowed; mend"),
        ("a: 1\n---\nb: 2\n", "not a YAML file: but found another document, line 2"),
        ("a: !!python/object/apply:os.system [true]\n", "not a YAML file: could not determine a constructor"),
        ("a: 1\nb: {c: 1, d: 2}\na: 3\n", "the key 'a' stands twice, in lines 1 and 3; keep one of them"),
        ("b: {c: 1, c: 2}\n", "the key 'c' stands twice, in lines 1 and 1"),
        ('a: "b\\0"\n', "a NUL character, line 1"),
        ('a: 1\nb: "\\ud83d"\n', "half of a character, line 2"),
        ("a: &a [*a]\n", "it is nested too deep, or an alias holds itself"),
        ("[" * 5000, "it is nested too deep"),
        (bomb(30), "its aliases stand for 4,294,967,230 values; write out what they stand for"),
        (
            "a: 1\nb: 2026-13-45\n",
            "not a YAML file: '2026-13-45' is no timestamp (month must be in 1..12), line 2; mend",
        ),
        ("a: !!timestamp x\n", "not a YAML file: 'x' is no timestamp, line 1; mend the line"),
        ("a: !!bool x\n", "not a YAML file: 'x' is no bool, line 1"),
        (
            "a: " + "9" * 5000,
            "is no int (Exceeds the limit (4300 digits) for integer string conversion: value has 5000",
        ),
        ("? [a]\n: 1\n", "not a YAML file: found unhashable key, line 1"),
    ],
)
def test_what_is_no_plain_config_is_one_line(text, says):
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "x.yaml")
    assert str(caught.value).startswith("x.yaml: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_aliases_may_stand_for_as_much_as_a_person_means():
    few = "a: &a [1, 2, 3]\n" + "".join(f"b{n}: *a\n" for n in range(MOST_ALIASED_VALUES // 4))
    assert len(parse_yaml(few, "x")) == MOST_ALIASED_VALUES // 4 + 1
    with pytest.raises(InputError, match="its aliases stand for 10,004 values"):
        parse_yaml(few + "c: *a\n", "x")


@pytest.mark.parametrize(("content", "says"), [(b"a: \xe9\n", "byte 4 is not UTF-8"), (None, "Is a directory")])
def test_a_file_that_cannot_be_read_is_one_line(content, says, tmp_path):
    path = tmp_path / "a.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_yaml(path, "x")
