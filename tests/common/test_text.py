import pytest

from embeddings.common import OptionError, TextSettings, instruction_prompt
from embeddings.common.text import choose_prompt, one_line, shorten


def test_a_template_must_contain_the_instruction_once():
    assert instruction_prompt("Find it") == "Instruct: Find it\nQuery: "
    settings = TextSettings(instruction_template="[INST] {instruction}: ")
    assert settings.instruction_prompt("Find {it}") == "[INST] Find {it}: "
    for template in ("no place", "{instruction} {instruction}"):
        with pytest.raises(OptionError, match=r"instruction_template must contain \{instruction\} once"):
            TextSettings(instruction_template=template)


def test_settings_that_are_not_set_are_those_of_the_model():
    plain, imported = TextSettings(), TextSettings(pooling_rule="after_colon", append_eos=True, prompts={"query": "q"})
    assert "pooling_rule" not in plain.to_dict()
    assert TextSettings(**imported.to_dict()) == imported
    assert (plain.following(imported), plain.following(plain)) == (imported, plain)
    own = TextSettings(pooling_rule="exact", append_eos=False, prompts={"sts": "s"}, query_max_length=512)
    assert own.given == {"pooling_rule", "append_eos", "prompts", "query_max_length"}
    longer = TextSettings(64, 64, pool_prompt=True, pooling_rule="after_colon", append_eos=True, prompts={"query": "q"})
    followed = own.following(longer)
    prompts = {"query": "q", "sts": "s"}
    assert followed == TextSettings(512, 64, prompts, append_eos=False, pool_prompt=True, pooling_rule="exact")
    assert followed.differences(longer) == [
        "query_max_length: 64 -> 512",
        "append_eos: True -> False",
        "pooling_rule: 'after_colon' -> 'exact'",
        "prompts.sts: None -> 's'",
    ]
    assert longer.differences(longer) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"pooling_rule": "by_guess"},
            "must be one of exact, prompt_length, after_colon, instruction_count, got 'by_guess'",
        ),
        ({"pooling_rule": "after_colon", "suffix": " end"}, "does not support suffix or pool_start: false"),
        ({"pooling_rule": "instruction_count", "pool_start": False}, "does not support suffix or pool_start: false"),
    ],
)
def test_a_pooling_rule_that_cannot_apply_is_refused(settings, says):
    with pytest.raises(OptionError) as error:
        TextSettings(**settings)
    assert f"data.text.pooling_rule {says}" in str(error.value)


def test_defaults_that_are_not_part_of_a_models_hash_are_omitted():
    names = {"query_max_length", "document_max_length", "prompts", "append_eos", "pool_prompt", "suffix", "pool_start"}
    assert set(TextSettings().to_dict()) == names
    changed = TextSettings(
        8, 16, prompts={"query": "q: "}, pooling_rule="exact", instruction_template="{instruction}: "
    )
    assert (changed.max_length("query"), changed.max_length("document")) == (8, 16)
    assert set(changed.to_dict()) == names | {"pooling_rule", "instruction_template"}
    assert TextSettings(**changed.to_dict()) == changed


def test_a_prompt_is_chosen_by_name_or_by_role():
    settings = TextSettings(prompts={"query": "q: ", "task": "t: "})
    assert settings.prompt("task", "query") == "t: "
    assert (settings.prompt(None, "query"), settings.prompt(None, "document")) == ("q: ", "")
    with pytest.raises(OptionError, match=r"^prompt_name must name a prompt of the model \(query, task\), got 'tsk'"):
        settings.prompt("tsk", "query")


def test_a_prompt_as_text_replaces_a_named_one():
    settings = TextSettings(prompts={"query": "q: "})
    assert settings.prompt({"text": "query: "}, "query") == "query: "
    assert settings.prompt({"text": ""}, "query") == ""
    with pytest.raises(OptionError, match=r"^prompt may contain \{instruction\} only for the queries"):
        settings.prompt({"text": "Instruct: {instruction}"}, "query")
    assert choose_prompt("query_prompt", "name", None) == "name"
    assert choose_prompt("query_prompt", None, "query: ") == {"text": "query: "}
    with pytest.raises(OptionError, match="query_prompt excludes query_prompt_name"):
        choose_prompt("query_prompt", "name", "query: ")


def test_control_characters_are_escaped():
    assert one_line("a\x1b[31m\r\n\x07b\u202e \ud800é") == r"a\x1b[31m \x07b\u202e \ud800é"


@pytest.mark.parametrize("limit", [50, 51, 220])
def test_a_long_message_is_truncated_in_the_middle(limit):
    line = one_line("start\n  " + "x" * 1000 + "\nend", limit)
    assert len(line) == limit
    assert line.startswith("start xxx")
    assert line.endswith("xxx end")
    before, after = line.split("...")
    assert 1.9 < len(after) / len(before) < 2.2


def test_a_text_is_shortened_to_one_line():
    assert shorten("a  b\nc", 5) == "a b c"
    assert shorten("abcdef", 4) == "abc…"
    assert shorten(" ", 4) == ""
