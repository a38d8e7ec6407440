"""Settings that a published directory states: each library must give its vectors, before and after an import."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import (
    BartConfig,
    BartModel,
    GPT2Config,
    GPT2Model,
    RobertaConfig,
    RobertaModel,
)

from embeddings.common import OptionError, TextSettings
from embeddings.evaluation.mteb_library import task_prompt
from embeddings.inference import Encoder
from embeddings.interop.released.importer import import_released
from embeddings.models import Embedder, LatentAttentionPooling, MeanPooling
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.test_directory import edit, written_by_theirs

TEXTS = [
    "how do I pad",
    "the quick brown fox jumps over the lazy dog " * 3 + "how do I pad sequences",
    "z",
    "one length " * 40,
]


def published(folder, backbone=None, max_length=20, **options):
    """A directory that sentence-transformers wrote."""
    written_by_theirs(folder, backbone=backbone, max_length=max_length, **options)
    return folder


def theirs(folder, texts=TEXTS, **options):
    return SentenceTransformer(str(folder), device="cpu", trust_remote_code=True).encode(texts, **options)


def ours(folder, texts=TEXTS, **options):
    return Encoder.from_pretrained(str(folder), precision="float32", device="cpu").encode(texts, **options)


def difference(left, right):
    return float(np.abs(left - right).max())


@pytest.mark.usefixtures("remote_code")
@pytest.mark.parametrize("pooling", [MeanPooling(32), LatentAttentionPooling(32, 4, 2, head_dim=8)])
def test_a_text_loses_its_start_if_the_tokenizer_truncates_on_the_left(tmp_path, pooling):
    right = ours(published(tmp_path / "model"))
    edit(tmp_path / "model" / "tokenizer_config.json", truncation_side="left")
    left = theirs(tmp_path / "model")
    assert difference(left, right) > 1e-2
    assert difference(ours(tmp_path / "model"), left) <= 1e-6
    import_released(str(tmp_path / "model"), tmp_path / "copy")
    assert difference(theirs(tmp_path / "copy"), left) <= 1e-6
    # A directory with our own code, too.
    loaded = Embedder.from_pretrained(tmp_path / "model")
    text = TextSettings(20, 20, prompts={"query": "how: "}, pool_prompt=False)
    Embedder(loaded.backbone, loaded.tokenizer, pooling, text=text).save_pretrained(tmp_path / "own")
    for prompt in ("", "how: "):
        assert difference(theirs(tmp_path / "own", prompt=prompt), ours(tmp_path / "own", prompt=prompt)) <= 1e-6


def roberta():
    return RobertaModel(RobertaConfig(**_small(), max_position_embeddings=34, pad_token_id=1), add_pooling_layer=False)


def gpt2():
    return GPT2Model(GPT2Config(vocab_size=_small()["vocab_size"], n_embd=32, n_layer=2, n_head=2, n_positions=32))


def bart():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    config = BartConfig(vocab_size=_small()["vocab_size"], **sizes, **heads)
    return BartModel(config)


def _small():
    tokenizer = wordpiece_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return {"vocab_size": len(tokenizer), **sizes}


@pytest.mark.parametrize("make", [roberta, gpt2, bart, lambda: tiny_bert(num_positions=32)])
def test_a_stated_length_beyond_the_positions_truncates_to_the_positions(tmp_path, make, caplog):
    torch.manual_seed(0)
    folder = published(tmp_path / "model", make(), max_length=34)
    edit(folder / "tokenizer_config.json", model_max_length=10**6)
    for stated in (40, None):
        edit(folder / "sentence_bert_config.json", max_seq_length=stated)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "embeddings"):
            encoder = Encoder.from_pretrained(str(folder), precision="float32", device="cpu")
        assert (encoder.embedder.text.query_max_length, encoder.embedder.text.document_max_length) == (32, 32)
        assert ("has the length 40, the model has 32 positions" in caplog.text) == (stated == 40)
        found = encoder.encode(TEXTS)
        import_released(str(folder), tmp_path / "copy")
        assert difference(theirs(tmp_path / "copy"), found) <= 1e-5
    edit(folder / "sentence_bert_config.json", max_seq_length=32)
    assert difference(theirs(folder), found) <= 1e-5


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_the_file_of_lengths_may_have_the_name_of_an_early_release(tmp_path, kind):
    folder = published(tmp_path / "model", tiny_bert(num_positions=32), max_length=32)
    (folder / "sentence_bert_config.json").unlink()
    (folder / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 12, "do_lower_case": false}')
    assert Embedder.from_pretrained(folder).text.document_max_length == 12
    assert difference(theirs(folder), ours(folder)) <= 1e-5


@pytest.mark.parametrize("name", ["processor_kwargs", "tokenizer_args"])
def test_the_length_may_be_among_the_tokenizer_s_options(tmp_path, name):
    folder = published(tmp_path / "model", tiny_bert(num_positions=32), max_length=32)
    edit(folder / "sentence_bert_config.json", **{"max_seq_length": 16, name: {"model_max_length": 12}})
    assert Embedder.from_pretrained(folder).text.document_max_length == 12
    assert difference(theirs(folder), ours(folder)) <= 1e-5


PROMPTS = {"query": "how: ", "classification": "sum of: "}


@pytest.mark.usefixtures("remote_code")
@pytest.mark.parametrize("pooling", [MeanPooling(32), LatentAttentionPooling(32, 4, 2, head_dim=8)])
def test_the_default_prompt_precedes_texts_that_are_encoded_without_a_role(tmp_path, pooling):
    folder = published(tmp_path / "model", prompts=PROMPTS, default_prompt_name="classification")
    plain = ours(folder, prompt="")
    expected = theirs(folder)
    assert difference(plain, expected) > 1e-2
    import_released(str(folder), tmp_path / "copy")
    loaded = Embedder.from_pretrained(tmp_path / "copy")
    assert loaded.text.default_prompt_name == "classification"
    text = replace(loaded.text, pool_prompt=False)
    Embedder(loaded.backbone, loaded.tokenizer, pooling, text=text).save_pretrained(tmp_path / "own")
    for name in ("model", "copy", "own"):
        library = SentenceTransformer(str(tmp_path / name), device="cpu", trust_remote_code=True)
        encoder = Encoder.from_pretrained(str(tmp_path / name), precision="float32", device="cpu")
        assert difference(library.encode(TEXTS), encoder.encode(TEXTS)) <= 1e-6
        assert difference(library.encode_query(TEXTS), encoder.encode_query(TEXTS)) <= 1e-6
        assert difference(library.encode_document(TEXTS), encoder.encode_document(TEXTS)) <= 1e-6
        assert name == "own" or difference(library.encode(TEXTS), expected) <= 1e-6
    assert task_prompt(loaded.text, "mine", "STS", None) == "sum of: "
    assert task_prompt(loaded.text, "mine", "Retrieval", "document") == ""
    with pytest.raises(OptionError, match=r"default_prompt_name must name a prompt of the model \(query\), got 'sts'"):
        TextSettings(prompts={"query": "how: "}, default_prompt_name="sts")


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ({"query": "how: ", "passage": "sum: "}, ["'passage' is used only where it is asked for by name", "document"]),
        ({"search_query": "how: ", "document": "sum: "}, ["'search_query' is used only", "not named query"]),
        ({"query": "how: ", "document": "", "corpus": "sum: "}, ["'corpus' is used only"]),
        ({"query": "how: ", "docstrings": "sum: ", "passage": ""}, []),
    ],
)
def test_a_prompt_with_a_synonym_of_a_role_is_reported(tmp_path, caplog, prompts, named):
    folder = published(tmp_path / "model", prompts=prompts)
    with caplog.at_level(logging.WARNING, "embeddings"):
        encoder = Encoder.from_pretrained(str(folder), precision="float32", device="cpu")
    lines = [record.getMessage() for record in caplog.records if record.name == "embeddings"]
    assert len(lines) == bool(named)
    assert all(words in lines[0] for words in named)
    library = SentenceTransformer(str(folder), device="cpu")
    assert difference(library.encode_document(TEXTS), encoder.encode_document(TEXTS)) <= 1e-6
    assert difference(library.encode_query(TEXTS), encoder.encode_query(TEXTS)) <= 1e-6
