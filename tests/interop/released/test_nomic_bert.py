import json

import pytest

from embeddings.common import InputError
from embeddings.evaluation.mteb_library import load_mteb
from embeddings.interop.released.checkpoint import ReleasedConfig
from embeddings.interop.released.nomic import PROMPTS, encoder_fields, encoder_names
from tests.helpers.tiny import wordpiece_tokenizer
from tests.interop.released.nomic import DENSE


def fields(folder, **changed):
    (folder / "config.json").write_text(json.dumps(DENSE | changed))
    return encoder_fields(ReleasedConfig(folder / "config.json"), wordpiece_tokenizer())


def test_the_vocabulary_is_padded_as_the_published_model_pads_it(tmp_path):
    assert fields(tmp_path)["vocab_size"] == 384
    assert fields(tmp_path, vocab_size=384)["vocab_size"] == 384
    assert fields(tmp_path, vocab_size=385)["vocab_size"] == 448


def test_positions_are_those_that_it_was_published_for(tmp_path):
    plain = fields(tmp_path, n_positions=8192)
    assert plain["max_position_embeddings"] == 8192
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000.0}
    scaled = fields(tmp_path, n_positions=8192, rotary_scaling_factor=2)
    assert scaled["max_position_embeddings"] == 2048
    assert scaled["rope_parameters"] == plain["rope_parameters"]
    with pytest.raises(InputError, match="has rotary_scaling_factor 'two', expected a number"):
        fields(tmp_path, rotary_scaling_factor="two")


def test_the_prompts_are_those_that_mteb_runs_these_models_with():
    load_mteb()
    from mteb.models.model_implementations.cde_models import cde_model_prompts
    from mteb.models.model_implementations.nomic_models import model_prompts

    assert (len(model_prompts), model_prompts["STS"]) == (9, "classification: ")
    assert model_prompts.items() <= PROMPTS.items()
    assert cde_model_prompts.items() <= PROMPTS.items()
    assert {name: PROMPTS[name] for name in PROMPTS.keys() - model_prompts.keys()} == {
        "classification": "classification: ",
        "clustering": "clustering: ",
    }


def test_one_published_matrix_is_three_of_ours():
    places = encoder_names("bert.")
    found = [places[f"layers.{{n}}.self_attn.{name}_proj.{{kind}}"] for name in "qkv"]
    assert {place.name for place in found} == {"bert.encoder.layers.{n}.attn.Wqkv.{kind}"}
    assert [(place.part, place.parts) for place in found] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("num_heads", [5, 32])
def test_heads_that_cannot_be_rotated_are_one_line(num_heads, tmp_path):
    with pytest.raises(InputError, match=f"n_head {num_heads}, which make no heads that can be rotated in halves"):
        fields(tmp_path, n_head=num_heads)
