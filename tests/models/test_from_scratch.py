from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast

from embeddings.common import OptionError
from embeddings.models.language_model import FromScratch, new_model
from tests.helpers.tiny import bpe_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def make(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, **fields: Any) -> Any:
    settings = {**SMALL, "num_key_value_heads": 2, **fields.pop("settings", {})}
    scratch = FromScratch(folder(tmp_path, tokenizer), settings=settings, **fields)
    torch.manual_seed(3)
    return new_model(scratch, AutoModelForCausalLM)


@pytest.mark.parametrize(
    ("tokenizer", "pad"), [(wordpiece_tokenizer(), 0), (sentencepiece_tokenizer(), None), (bpe_tokenizer(), None)]
)
def test_the_tokenizer_decides_vocabulary_and_special_tokens(
    tokenizer: PreTrainedTokenizerFast, pad: int | None, tmp_path: Path
) -> None:
    """A pad token that is the separator too would never be trained, so it is not the config's."""
    model, loaded = make(tmp_path, tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    assert rows % 64 == 0
    assert max(tokenizer.get_vocab().values()) < rows <= len(tokenizer) + 64
    assert model.config.pad_token_id == pad
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    assert model.config.eos_token_id == eos
    model(torch.tensor([[5, eos, 6, 7]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[eos].abs().max() > 0
    assert loaded.padding_side == "right"


def test_settings_and_seed_decide_the_model(tmp_path: Path) -> None:
    one, _ = make(tmp_path, wordpiece_tokenizer(), settings={"tie_word_embeddings": True})
    two, _ = make(tmp_path, wordpiece_tokenizer(), settings={"tie_word_embeddings": True})
    assert len(one.model.layers) == 2
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not one.training


def test_a_new_decoder_may_see_both_ways_and_an_encoder_does(tmp_path: Path) -> None:
    model, _ = make(tmp_path, wordpiece_tokenizer(), bidirectional=True)
    assert model.config.is_causal is False
    scratch = FromScratch(folder(tmp_path, wordpiece_tokenizer()), "bert", dict(SMALL))
    encoder, _ = new_model(scratch, AutoModelForMaskedLM)
    assert type(encoder).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "mistrall"}, "model_type is no architecture that transformers knows"),
        ({"settings": {"hiden_size": 3}}, "is no setting of mistral, got 'hiden_size'; did you mean hidden_size?"),
        ({"settings": {"vocab_size": 3}}, "is no setting of mistral"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says.replace("?", r"\?")):
        FromScratch("nowhere", **fields)


@pytest.mark.parametrize("settings", [{"hidden_size": 33}, {"hidden_act": "nope"}, {"num_hidden_layers": "two"}])
def test_settings_that_make_no_model_are_one_line(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="make no model") as caught:
        make(tmp_path, wordpiece_tokenizer(), model_type="llama", settings=settings)
    assert "\n" not in str(caught.value)


def test_the_settings_are_read_from_arguments() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--scratch", type=FromScratch)
    given = parser.parse_object({"scratch": {"tokenizer": "x", "settings": {"sliding_window": None, **SMALL}}})
    scratch = parser.instantiate(given).scratch
    assert scratch == FromScratch("x", settings={"sliding_window": None, **SMALL})
