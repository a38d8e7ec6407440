import pytest

from embeddings.common import OptionError, TextSettings, instruction_prompt


def test_the_instruction_prompt_is_the_templates_text():
    assert instruction_prompt("Find it") == "Instruct: Find it\nQuery: "


def test_settings_survive_plain_types():
    settings = TextSettings(query_max_length=64, prompts={"query": "q: "}, append_eos=True)
    assert TextSettings.from_dict(settings.to_dict()) == settings


def test_each_role_has_its_length():
    settings = TextSettings(query_max_length=8, document_max_length=16)
    assert (settings.max_length("query"), settings.max_length("document")) == (8, 16)


def test_a_length_without_room_for_text_is_refused():
    with pytest.raises(OptionError, match=r"document_max_length must be >= 4, got 2"):
        TextSettings(document_max_length=2)


def test_a_prompt_is_named_or_the_roles_or_none():
    settings = TextSettings(prompts={"query": "q: ", "task": "t: "})
    assert settings.prompt("task", "query") == "t: "
    assert (settings.prompt(None, "query"), settings.prompt(None, "document")) == ("q: ", "")
    with pytest.raises(OptionError, match=r"^prompt_name must name a prompt of the model \(query, task\), got 'tsk'"):
        settings.prompt("tsk", "query")
