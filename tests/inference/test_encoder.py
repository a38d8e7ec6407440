"""Vectors come back in order, whatever happens between."""

import numpy as np
import pytest
import torch

from embeddings.common import NumericError, OptionError
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference import encoder as encoder_module
from embeddings.inference import encoder as text_preparation
from embeddings.inference.encoder import Encoder
from tests.inference.models import some_texts, tiny_embedder
from tests.models.contextual_models import tiny_contextual


def one_by_one(embedder, texts, role="document", prompt=""):
    """The reference: every text alone, without mini-batches, sorting or padding."""
    tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)
    with torch.no_grad():
        rows = [embedder(tokenizer([text], role, prompt).padded(None, embedder.pad_token_id))[0] for text in texts]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("count", [1, 2, 37])
@pytest.mark.parametrize("mini_batch_tokens", [1, 50, 100_000])
def test_vectors_equal_those_of_each_text_alone(count, mini_batch_tokens):
    embedder, texts = tiny_embedder(), some_texts(count)
    vectors = Encoder(embedder, precision="float32", mini_batch_tokens=mini_batch_tokens).encode(texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (count, 32)
    np.testing.assert_allclose(vectors, one_by_one(embedder, texts), rtol=0, atol=1e-6)


@pytest.mark.parametrize("block", [1, 5, 37, 100])
def test_the_order_holds_over_several_blocks(block, monkeypatch):
    monkeypatch.setattr(text_preparation, "TEXTS_PER_BLOCK", block)
    embedder, texts = tiny_embedder(), some_texts(37)
    vectors = Encoder(embedder, precision="float32").encode(texts)
    np.testing.assert_allclose(vectors, one_by_one(embedder, texts), rtol=0, atol=1e-6)


def test_no_texts_give_no_rows_of_the_right_width():
    vectors = Encoder(tiny_embedder()).encode([])
    assert vectors.shape == (0, 32)
    assert vectors.dtype == np.float32


def test_empty_texts_have_finite_vectors():
    vectors = Encoder(tiny_embedder()).encode(["", " ", "a"])
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)


def test_a_text_that_occurs_twice_is_computed_once():
    embedder, texts = tiny_embedder(), some_texts(5)
    seen = []
    embedder.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0].input_ids_NL)))
    repeated = [texts[row] for row in (0, 1, 0, 2, 2, 3, 4, 0)]
    vectors = Encoder(embedder, precision="float32").encode(repeated)
    assert sum(seen) == 5
    np.testing.assert_allclose(vectors, one_by_one(embedder, repeated), rtol=0, atol=1e-6)


def test_encoding_twice_gives_the_same_bits():
    encoder, texts = Encoder(tiny_embedder(dropout=0.5)), some_texts(20)
    first = encoder.encode(texts)
    encoder.encode(some_texts(7, seed=1))
    np.testing.assert_array_equal(first, encoder.encode(texts))


def test_the_mode_of_every_module_is_left_as_found():
    embedder = tiny_embedder(dropout=0.5)
    embedder.train()
    embedder.backbone.encoder.layer[0].eval()
    before = [module.training for module in embedder.modules()]
    assert True in before
    assert False in before
    vectors = Encoder(embedder, precision="float32").encode(some_texts(3))
    assert [module.training for module in embedder.modules()] == before
    np.testing.assert_allclose(vectors, one_by_one(embedder.eval(), some_texts(3)), rtol=0, atol=1e-6)


def test_the_mode_is_restored_after_an_error():
    embedder = tiny_embedder()
    embedder.train()
    embedder.backbone.embeddings.word_embeddings.weight.data.fill_(float("nan"))
    with pytest.raises(NumericError, match="3 of 3 vectors are not finite, the first of text '0 "):
        Encoder(embedder).encode(some_texts(3))
    assert embedder.training


def test_no_gradient_is_kept_and_training_goes_on_afterwards():
    embedder, texts = tiny_embedder(), some_texts(3)
    Encoder(embedder).encode(texts)
    tokens = TextTokenizer(embedder.tokenizer, embedder.text)(texts, "document", "").padded(None, embedder.pad_token_id)
    embedder(tokens).sum().backward()
    assert embedder.backbone.embeddings.word_embeddings.weight.grad is not None


def test_bfloat16_stays_near_float32():
    embedder, texts = tiny_embedder(), some_texts(20)
    exact = Encoder(embedder, precision="float32").encode(texts)
    low = Encoder(embedder, precision="bfloat16").encode(texts)
    assert low.dtype == np.float32
    assert not np.array_equal(exact, low)
    assert (exact * low).sum(axis=1).min() > 0.999


def test_float32_holds_inside_an_outer_autocast():
    embedder, texts = tiny_embedder(), some_texts(5)
    encoder = Encoder(embedder, precision="float32")
    with torch.autocast("cpu", torch.bfloat16):
        inside = encoder.encode(texts)
    np.testing.assert_array_equal(inside, encoder.encode(texts))


def test_the_prompt_is_the_roles_unless_one_is_named():
    embedder = tiny_embedder(prompts={"query": "search_query: ", "task": "the dog "}, pool_prompt=True)
    encoder, texts = Encoder(embedder, precision="float32"), ["a b c", "fox"]
    expected = {
        ("query", None): "search_query: ",
        ("document", None): "",
        ("document", "task"): "the dog ",
        ("query", "task"): "the dog ",
    }
    for (role, name), prompt in expected.items():
        vectors = encoder.encode(texts, name, role=role)
        np.testing.assert_allclose(vectors, one_by_one(embedder, texts, role, prompt), rtol=0, atol=1e-6)


def test_a_prompt_that_is_given_itself_takes_the_place_of_the_models():
    embedder = tiny_embedder(prompts={"document": "the dog "}, pool_prompt=True)
    encoder, texts = Encoder(embedder, precision="float32"), some_texts(3)
    for prompt in ("", "search_query: "):
        vectors = encoder.encode(texts, prompt=prompt)
        np.testing.assert_allclose(vectors, one_by_one(embedder, texts, prompt=prompt), rtol=0, atol=1e-6)
        assert not np.allclose(vectors, encoder.encode(texts))


def test_the_query_prompt_brings_the_query_length():
    embedder = tiny_embedder(prompts={"query": "a "}, query_max_length=8)
    encoder, text = Encoder(embedder, precision="float32"), "fox " * 30
    by_prompt = encoder.encode([text], "query")
    np.testing.assert_array_equal(by_prompt, encoder.encode([text], role="query"))
    assert not np.allclose(by_prompt, encoder.encode([text], "query", role="document"))


def test_an_unknown_prompt_is_refused_with_the_known_ones():
    encoder = Encoder(tiny_embedder(prompts={"query": "a ", "task": "b "}))
    with pytest.raises(OptionError, match=r"prompt_name must name a prompt of the model \(query, task\), got 'nope'"):
        encoder.encode(["a"], "nope")


def test_context_is_refused_by_a_model_that_takes_none():
    with pytest.raises(OptionError, match="context must be left out: this model takes none, got 'list'"):
        Encoder(tiny_embedder()).encode(["a"], context=["b"])


def contextual_one_by_one(embedder, texts, documents):
    """The reference: every text and every context document alone."""
    tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)
    pad = embedder.pad_token_id
    with torch.no_grad():
        read = [tokenizer([text], "document", "").padded(None, pad) for text in documents]
        context = torch.cat([embedder.embed_context(tokens) for tokens in read]) if documents else None
        rows = [embedder(tokenizer([text], "document", "").padded(None, pad), context)[0] for text in texts]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("documents", [[], ["lazy dog"], ["a fox", "lazy dog", "a fox", "two numbers", "one length"]])
@pytest.mark.parametrize("mini_batch_tokens", [1, 120, 100_000])
def test_every_text_is_encoded_behind_the_context(documents, mini_batch_tokens):
    embedder, texts = tiny_contextual(), some_texts(13)
    encoder = Encoder(embedder, precision="float32", mini_batch_tokens=mini_batch_tokens)
    vectors = encoder.encode(texts, context=documents or None)
    np.testing.assert_allclose(vectors, contextual_one_by_one(embedder, texts, documents), rtol=0, atol=1e-5)


def test_context_and_soft_prompt_count_in_the_token_budget():
    embedder = tiny_contextual(num_context=20, num_soft_prompts=4)
    shapes = []
    embedder.backbone.encoder.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape[:2]))
    Encoder(embedder, precision="float32", mini_batch_tokens=150).encode(some_texts(13))
    assert max(rows * length for rows, length in shapes) <= 150
    assert len(shapes) > 3


@pytest.mark.parametrize("documents", [["a"] * 6, []])
def test_a_context_of_another_size_is_refused(documents):
    with pytest.raises(OptionError, match=f"context must hold from 1 to the model's 5 .* got '{len(documents)} doc"):
        Encoder(tiny_contextual()).encode(["a"], context=documents)


def test_one_text_in_place_of_context_documents_is_refused():
    with pytest.raises(OptionError, match="context must be a list of texts"):
        Encoder(tiny_contextual(num_context=50)).encode(["a"], context="a text")


def test_a_saved_contextual_model_is_loaded_as_one(tmp_path):
    tiny_contextual().save_pretrained(tmp_path / "model")
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), device="cpu", precision="float32")
    assert encoder.num_context == 5
    assert Encoder(tiny_embedder()).num_context == 0
    first, second = encoder.encode(["fox"], context=["lazy dog"]), encoder.encode(["fox"])
    assert np.abs(first - second).max() > 1e-4


def test_one_text_in_place_of_a_list_is_refused():
    with pytest.raises(OptionError, match="texts must be a list of texts"):
        Encoder(tiny_embedder()).encode("a text")


@pytest.mark.parametrize("value", [0, -5])
def test_an_impossible_token_budget_is_refused(value):
    with pytest.raises(OptionError, match="mini_batch_tokens must be >= 1"):
        Encoder(tiny_embedder(), mini_batch_tokens=value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_in_half_precision_encodes_in_float32(dtype, tmp_path):
    embedder, texts = tiny_embedder(), some_texts(4)
    embedder.to(dtype).save_pretrained(tmp_path / "model")
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), device="cpu", precision="float32")
    assert encoder.dtype == torch.float32
    assert {weight.dtype for weight in encoder.embedder.parameters()} == {torch.float32}
    np.testing.assert_allclose(encoder.encode(texts), one_by_one(encoder.embedder, texts), rtol=0, atol=1e-6)


def test_bfloat16_weights_are_used_as_they_are():
    embedder, texts = tiny_embedder(), some_texts(8)
    exact = Encoder(embedder, precision="float32").encode(texts)
    low = Encoder(embedder.to(torch.bfloat16)).encode(texts)
    assert (exact * low).sum(axis=1).min() > 0.999


def test_progress_counts_every_token_and_ends_at_its_total(monkeypatch, capsys):
    monkeypatch.setattr(text_preparation, "TEXTS_PER_BLOCK", 5)
    monkeypatch.setattr(encoder_module, "_PROGRESS_DELAY_SECONDS", 0.0)
    bars = []

    class Spy(encoder_module.tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            bars.append(self)

    monkeypatch.setattr(encoder_module, "tqdm", Spy)
    embedder, texts = tiny_embedder(), some_texts(12)
    Encoder(embedder, show_progress=True).encode(texts)
    num_tokens = TextTokenizer(embedder.tokenizer, embedder.text)(texts, "document", "").num_tokens
    assert [(bar.n, bar.total) for bar in bars] == [(num_tokens, num_tokens)]
    assert "encode document" in capsys.readouterr().err


def test_nothing_is_drawn_unless_progress_is_asked_for(capsys):
    Encoder(tiny_embedder()).encode(some_texts(3))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("normalize", [True, False])
def test_dimensions_cut_vectors_and_bring_unit_ones_back_to_unit_length(normalize):
    embedder, texts = tiny_embedder(normalize=normalize), some_texts(9)
    whole = Encoder(embedder, precision="float32").encode(texts)
    encoder = Encoder(embedder, precision="float32", dimensions=8)
    cut = encoder.encode(texts)
    assert encoder.embedding_dim == encoder.with_mini_batch_tokens(64).embedding_dim == 8
    expected = whole[:, :8]
    if normalize:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, rtol=0, atol=1e-6)
    assert encoder.encode([]).shape == (0, 8)


def test_a_cut_contextual_model_still_reads_its_context_whole():
    model, texts = tiny_contextual(), some_texts(5)
    whole, cut = (Encoder(model, precision="float32", dimensions=dimensions) for dimensions in (None, 8))
    context = texts[:2]
    expected = whole.encode(texts, context=context)[:, :8]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(cut.encode(texts, context=context), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dimensions", [0, 33])
def test_dimensions_that_the_vectors_have_not_are_refused(dimensions):
    with pytest.raises(OptionError, match=rf"dimensions must be from 1 to the 32 .*, got {dimensions}; leave it out"):
        Encoder(tiny_embedder(), dimensions=dimensions)
