import pytest

from embeddings.interop.released.importer import stated_licence


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model\n", "apache-2.0"),
        ("---\ntags:\n- x\nmodel-index:\n- results:\n  - type: a\nlicense: 'CC-BY-NC-4.0'\n---\n", "cc-by-nc-4.0"),
        ("\ufeff---\r\nlicense: mit\r\n---\r\n", "mit"),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        ("# A model\n---\nlicense: mit\n---\n", None),
        ("---\nmodel-index:\n  license: mit\n---\n", None),
        ("---\nlicense:\n- mit\n- apache-2.0\n---\n", None),
        ("---\nlicense: mit\nlicense: apache-2.0\n---\n", None),
        ("---\nlicense: see <b>this</b> page\n---\n", None),
        ("---\nlicense: mit\n", None),
        ("", None),
    ],
)
def test_the_licence_is_that_of_the_front_matter_alone(card, licence, tmp_path):
    (tmp_path / "README.md").write_bytes(card.encode())
    assert stated_licence(tmp_path) == licence


def test_a_card_that_is_not_there_or_no_text_states_none(tmp_path):
    assert stated_licence(tmp_path) is None
    (tmp_path / "README.md").write_bytes(b"\xff\x00" * 99)
    assert stated_licence(tmp_path) is None
