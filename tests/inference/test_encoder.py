"""Vectors equal those of each text alone, in input order; hashes identify models."""

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tokenizers import normalizers, processors
from torch import nn

from embeddings.common import InputError, NumericError, OptionError, TextSettings
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference import encoder as encoder_module
from embeddings.inference.encoder import Encoder, embedder_sha256, text_blocks
from embeddings.models import Embedder, LoraSettings, MeanPooling, add_lora, make_bidirectional
from embeddings.models.directory import ContextForm
from tests.helpers.casts import Casts
from tests.helpers.refusals import refused
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_mistral
from tests.inference.models import some_texts, tiny_embedder
from tests.models.contextual_models import tiny_contextual, tiny_nomic
from tests.models.moe import tiny_moe


def one_by_one(embedder, texts, role="document", prompt="", documents=()):
    """The reference: every text and context document alone, without mini-batches, sorting or padding."""
    tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)

    def tokens(text):
        return tokenizer([text], role, prompt).padded(None, embedder.pad_token_id)

    with torch.no_grad():
        context = [torch.cat([embedder.embed_context(tokens(text)) for text in documents])] if documents else []
        return torch.stack([embedder(tokens(text), *context)[0] for text in texts]).numpy()


@pytest.mark.parametrize(
    ("count", "mini_batch_tokens", "block"),
    [(1, 1, 8), (37, 1, 100), (37, 50, 5), (37, 100_000, 37)],
)
def test_vectors_equal_those_of_each_text_alone(count, mini_batch_tokens, block, monkeypatch):
    monkeypatch.setattr(encoder_module, "TEXTS_PER_BLOCK", block)
    embedder, texts = tiny_embedder(), [*some_texts(count), "", " "]
    vectors = Encoder(embedder, precision="float32", mini_batch_tokens=mini_batch_tokens).encode(texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (count + 2, 32)
    np.testing.assert_allclose(vectors, one_by_one(embedder, texts), rtol=0, atol=1e-6)
    encoder = Encoder(embedder, precision="float32", mini_batch_tokens=mini_batch_tokens)
    np.testing.assert_array_equal(encoder.encode(np.array(texts)), vectors)


def test_a_text_that_occurs_twice_is_computed_once():
    embedder, texts = tiny_embedder(), some_texts(5)
    seen = []
    embedder.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    repeated = [texts[row] for row in (0, 1, 0, 2, 2, 3, 4, 0)]
    vectors = Encoder(embedder, precision="float32").encode(repeated)
    assert sum(seen) == 5
    np.testing.assert_allclose(vectors, one_by_one(embedder, repeated), rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_threads_encode_at_once_each_with_its_own_length(precision, tmp_path, monkeypatch):
    tiny_embedder(query_max_length=4).save_pretrained(tmp_path)
    encoder, texts = Encoder.from_pretrained(str(tmp_path), device="cpu", precision=precision), some_texts(3)
    roles = ("query", "document") * 2
    expected = [encoder.encode(texts, role=role) for role in roles]
    prompts = TextTokenizer._prompts

    def slow_prompts(self, *arguments):
        found = prompts(self, *arguments)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(TextTokenizer, "_prompts", slow_prompts)
    encoder.embedder.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda role: encoder.encode(texts, role=role), roles))
    np.testing.assert_array_equal(found, expected)


def test_blocks_have_the_rows_of_encode_and_leave_the_modes_of_their_caller(monkeypatch):
    monkeypatch.setattr(encoder_module, "TEXTS_PER_BLOCK", 4)
    embedder, texts = tiny_embedder(dropout=0.5).train(), some_texts(13)
    # Repeats within a block, across blocks, and alone in the last one.
    texts = [*texts[:3], *texts[:9], texts[1], texts[1], *texts[8:], *texts[:5]]
    encoder, blocks = Encoder(embedder, precision="bfloat16"), []
    for block in encoder.encode_blocks(texts):
        blocks.append(block)
        assert embedder.training
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        # Another call between two blocks does not change the following ones.
        encoder.encode(texts[5:7])
    assert max(map(len, blocks)) == 4
    np.testing.assert_array_equal(np.concatenate(blocks), encoder.encode(texts))
    assert list(encoder.encode_blocks([])) == []


def test_a_model_in_training_encodes_the_same_bits_twice_and_keeps_its_modes_even_after_an_error():
    embedder, texts = tiny_embedder(dropout=0.5), some_texts(20)
    embedder.train()
    embedder.backbone.encoder.layer[0].eval()
    modes = [module.training for module in embedder.modules()]
    assert len(set(modes)) == 2
    encoder = Encoder(embedder, precision="float32")
    first = encoder.encode(texts)
    encoder.encode(some_texts(7, seed=1))
    np.testing.assert_array_equal(first, encoder.encode(texts))
    assert [module.training for module in embedder.modules()] == modes
    # The model can be trained afterwards.
    tokens = TextTokenizer(embedder.tokenizer, embedder.text)(texts, "document", "").padded(None, embedder.pad_token_id)
    embedder(tokens).sum().backward()
    assert embedder.backbone.embeddings.word_embeddings.weight.grad is not None
    embedder.backbone.embeddings.word_embeddings.weight.data.fill_(float("nan"))
    refused(NumericError, "3 of 3 vectors are not finite, the first of text '0 ", encoder.encode, some_texts(3))
    assert [module.training for module in embedder.modules()] == modes
    encoder.origin = "a/model"
    says = r"a/model: the weight backbone\.embeddings\.word_embeddings\.weight is not finite"
    refused(InputError, says, encoder.encode, some_texts(3))


def test_float32_holds_inside_an_outer_autocast_and_bfloat16_stays_near_it():
    embedder, texts = tiny_embedder(), some_texts(20)
    encoder = Encoder(embedder, precision="float32")
    exact, low = encoder.encode(texts), Encoder(embedder, precision="bfloat16").encode(texts)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(encoder.encode(texts), exact)
    assert low.dtype == np.float32
    assert not np.array_equal(exact, low)
    assert (exact * low).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("make", [tiny_embedder, lambda: around(tiny_moe())])
def test_all_mini_batches_share_the_weights_that_autocast_casts(make):
    embedder = make()
    encoder = Encoder(embedder, precision="bfloat16", mini_batch_tokens=8)
    with Casts(embedder) as casts:
        encoder.encode(some_texts(20))
    assert len(casts.count) > 5
    assert {*casts.count.values()} == {1}


@pytest.mark.parametrize("make", [tiny_embedder, lambda: around(tiny_moe())])
def test_weights_get_gradients_after_a_call_inside_their_autocast(make):
    embedder = make()
    tokens = TextTokenizer(embedder.tokenizer, embedder.text)(some_texts(3), "document").padded(None, 0)
    gradients = []
    for calls in (False, True):
        embedder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if calls:
                Encoder(embedder, precision="bfloat16").encode(some_texts(3))
            embedder(tokens)[:, 0].sum().backward()
        gradients.append({name: weight.grad for name, weight in embedder.named_parameters()})
    assert sum(gradient is not None for gradient in gradients[0].values()) > 10
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "prompt", "role"),
    [
        ({"role": "query"}, "search_query: ", "query"),
        ({"prompt_name": "query", "role": "document"}, "search_query: ", "document"),
        ({}, "a dog ", "document"),
        ({"prompt_name": "task"}, "the dog ", "document"),
        ({"prompt": ""}, "", "document"),
        ({"prompt": "jumps "}, "jumps ", "document"),
    ],
)
def test_prompt_and_length_are_the_roles_unless_a_prompt_is_named_or_given(options, prompt, role):
    prompts = {"query": "search_query: ", "document": "a dog ", "task": "the dog "}
    embedder, texts = tiny_embedder(prompts=prompts, pool_prompt=True), ["a b c", "fox", "lazy " * 40]
    vectors = Encoder(embedder, precision="float32").encode(texts, **options)
    np.testing.assert_allclose(vectors, one_by_one(embedder, texts, role, prompt), rtol=0, atol=1e-6)


def test_impossible_texts_prompts_and_contexts_are_refused():
    plain, contextual = Encoder(tiny_embedder(prompts={"query": "a ", "task": "b "})), Encoder(tiny_contextual())
    refused(OptionError, r"prompt_name must name a prompt of the model \(query, task\)", plain.encode, ["a"], "nope")
    refused(OptionError, "texts must be a list of texts", plain.encode, "a text")
    refused(OptionError, "context must be left out: the model is not contextual", plain.encode, ["a"], context=["b"])
    for documents in (["a"] * 6, []):
        with pytest.raises(OptionError, match=f"context must have from 1 to the model's 5 .* '{len(documents)} doc"):
            contextual.encode(["a"], context=documents)
    with pytest.raises(OptionError, match="must be a list of texts"):
        Encoder(tiny_contextual(num_context=50)).encode(["a"], context="a text")
    refused(OptionError, "mini_batch_tokens must be >= 1, got 0", Encoder, tiny_embedder(), mini_batch_tokens=0)


@pytest.mark.parametrize("documents", [[], ["lazy dog"], ["a fox", "lazy dog", "a fox", "two numbers", "one length"]])
@pytest.mark.parametrize("mini_batch_tokens", [1, 120])
def test_every_text_is_encoded_with_the_context(documents, mini_batch_tokens):
    embedder, texts = tiny_contextual(), some_texts(13)
    encoder = Encoder(embedder, precision="float32", mini_batch_tokens=mini_batch_tokens)
    vectors = encoder.encode(texts, context=documents or None)
    np.testing.assert_allclose(vectors, one_by_one(embedder, texts, documents=documents), rtol=0, atol=1e-5)


def test_context_and_soft_prompt_count_in_the_token_budget():
    embedder = tiny_contextual(num_context=20, num_soft_prompts=4)
    shapes = []
    embedder.backbone.encoder.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape[:2]))
    Encoder(embedder, precision="float32", mini_batch_tokens=150).encode(some_texts(13))
    assert max(rows * length for rows, length in shapes) <= 150
    assert len(shapes) > 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_in_half_precision_encodes_in_float32(dtype, tmp_path):
    embedder, texts = tiny_embedder(), some_texts(4)
    embedder.to(dtype).save_pretrained(tmp_path / "model")
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), device="cpu", precision="float32")
    assert encoder.dtype == torch.float32
    assert {weight.dtype for weight in encoder.embedder.parameters()} == {torch.float32}
    np.testing.assert_allclose(encoder.encode(texts), one_by_one(encoder.embedder, texts), rtol=0, atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_dimensions_truncate_vectors_and_normalise_unit_vectors_again(normalize):
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


@pytest.mark.parametrize("texts", [[], some_texts(13), some_texts(7) + some_texts(7)[::-1]])
@pytest.mark.parametrize(("role", "prompt"), [("document", ""), ("query", "the ")])
def test_texts_tokenised_by_another_process_have_the_same_vectors(texts, role, prompt, monkeypatch):
    monkeypatch.setattr(encoder_module, "TEXTS_PER_BLOCK", 5)
    encoder = Encoder(tiny_embedder(prompts={"query": "the "}), precision="float32")
    expected = encoder.encode(texts, role=role)
    tokenizer = pickle.loads(pickle.dumps(TextTokenizer(encoder.embedder.tokenizer, encoder.embedder.text)))
    tokens = pickle.loads(pickle.dumps([tokenizer(block, role, prompt) for block in text_blocks(texts)]))
    assert len(tokens) == -(-len(set(texts)) // 5)
    monkeypatch.setattr(TextTokenizer, "__call__", lambda *_: pytest.fail("tokenised again"))
    np.testing.assert_array_equal(encoder.encode(texts, role=role, tokenised=tokens), expected)


def digest(embedder: Embedder) -> str:
    return embedder_sha256(Encoder(embedder))


def around(backbone: nn.Module, **config: object) -> Embedder:
    """A model of the backbone with another config and the same weights."""
    backbone = copy.deepcopy(backbone)
    for name, value in config.items():
        assert getattr(backbone.config, name) != value
        setattr(backbone.config, name, value)
    return Embedder(backbone, tiny_embedder().tokenizer, MeanPooling(32), text=TextSettings(32, 32)).eval()


def test_saving_and_loading_a_model_keeps_its_hash(tmp_path):
    for name, model in (("plain", tiny_embedder()), ("sparse", around(tiny_moe())), ("contextual", tiny_contextual())):
        model.save_pretrained(tmp_path / name)
        again = Encoder.from_pretrained(str(tmp_path / name), precision="float32")
        first = embedder_sha256(again)
        again.embedder.save_pretrained(tmp_path / f"{name} again")
        assert embedder_sha256(Encoder.from_pretrained(str(tmp_path / f"{name} again"), precision="float32")) == first
        again.encode(["the quick brown fox", "a"])
        assert embedder_sha256(again) == first


def test_the_hash_follows_weights_and_settings_and_nothing_else(tmp_path):
    for make, others in (
        (tiny_embedder, [{"normalize": False}, {"document_max_length": 32}]),
        (tiny_contextual, [{"num_context": 4}]),
    ):
        base = digest(make())
        assert embedder_sha256(Encoder(make(), precision="float32")) == base
        assert base not in {digest(make(**options)) for options in others}
        changed = make()
        next(getattr(changed, "first_stage", changed).parameters()).data[0, 0] += 1e-3
        assert digest(changed) != base
    tiny_embedder().to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half, full = (Encoder.from_pretrained(str(tmp_path / "half"), precision=name) for name in ("bfloat16", "float32"))
    assert [encoder.embedder.backbone.dtype for encoder in (half, full)] == [torch.bfloat16, torch.float32]
    # Rounded weights have another hash, in any dtype.
    assert embedder_sha256(half) == embedder_sha256(full) != digest(tiny_embedder())


def masked(bidirectional):
    backbone = tiny_mistral()
    if bidirectional:
        make_bidirectional(backbone)
    return Embedder(backbone, sentencepiece_tokenizer(), MeanPooling(32)).eval()


def adapted(alpha):
    torch.manual_seed(0)
    return around(add_lora(tiny_mistral(), LoraSettings(rank=2, alpha=alpha)))


def formed(**form):
    model = tiny_contextual("nomic", form=ContextForm(**form))
    model.load_state_dict(tiny_contextual("nomic").state_dict())
    return model


ROPE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("make", "others"),
    [
        (lambda *change: masked(*change or [False]), [True]),
        (lambda *change: adapted(*change or [2]), [4]),
        (lambda **change: around(tiny_mistral(), **change), [{"sliding_window": 8}, {"num_attention_heads": 2}]),
        (lambda **change: around(tiny_nomic(), **change), [{"rope_parameters": ROPE}]),
        (lambda **change: around(tiny_moe(), **change), [{"experts_per_token": 1}]),
        (formed, [{"adds_pooled": False}, {"has_positions": True}, {"pools_prompt": True}]),
    ],
)
def test_the_hash_depends_on_config_fields_that_change_vectors(make, others):
    models = [make(**other) if isinstance(other, dict) else make(other) for other in others]
    assert digest(make()) == digest(make())
    assert len({digest(make()), *map(digest, models)}) == 1 + len(others)


def test_the_hash_depends_on_the_tokenizer_pipeline_and_not_on_its_last_call():
    digests = {digest(tiny_embedder())}
    for change in (
        {"normalizer": normalizers.BertNormalizer(lowercase=False)},
        {"post_processor": processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])},
    ):
        embedder = tiny_embedder()
        embedder.tokenizer = copy.deepcopy(embedder.tokenizer)
        for name, value in change.items():
            setattr(embedder.tokenizer.backend_tokenizer, name, value)
        digests.add(digest(embedder))
    assert len(digests) == 3
    embedder = tiny_embedder()
    embedder.tokenizer = copy.deepcopy(embedder.tokenizer)
    embedder.tokenizer(["a", "the quick brown fox"], padding=True, truncation=True, max_length=3)
    assert digest(embedder) in digests
