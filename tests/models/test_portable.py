"""The code in a model directory: with it sentence-transformers computes equal vectors, also with a context."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import PreTrainedTokenizerFast

from embeddings.common import TextSettings, instruction_prompt
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference import Encoder
from embeddings.models import (
    ContextualEmbedder,
    Embedder,
    MeanPooling,
    load_embedder,
    make_bidirectional,
)
from embeddings.models.directory import ContextForm
from embeddings.models.poolings import POOLINGS
from embeddings.models.portable import TextTransformer
from tests.helpers.tiny import bpe_tokenizer, sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.moe import tiny_moe
from tests.models.reading import carried_code, tokenised

QUERY = instruction_prompt("Given a question, retrieve passages that answer the question")
TEXTS = ["how do I pad sequences", "the quick brown fox " * 14, "7 jumps", "東京 café", "", " two numbers", "z"]
TOKENIZERS = [wordpiece_tokenizer, bpe_tokenizer, sentencepiece_tokenizer]


pytestmark = pytest.mark.usefixtures("remote_code")


def decoder(pooling, tokenizer, **text):
    backbone = tiny_mistral()
    make_bidirectional(backbone)
    settings = TextSettings(query_max_length=64, document_max_length=32, prompts={"query": QUERY}, **text)
    return Embedder(backbone, tokenizer, pooling, text=settings).eval()


# Options that make a pooling small, or differ from its defaults.
OPTIONS = {
    "latent_attention": {"num_latents": 6, "num_heads": 4, "head_dim": 8},
    "anchor_token": {"layers": (-1, 0), "per_head": True, "include_first": False},
}


def pooling_of(name):
    torch.manual_seed(0)
    return POOLINGS[name](32, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", sorted(POOLINGS))
def test_sentence_transformers_computes_equal_vectors_with_every_pooling(tmp_path, name):
    tokenizer, pooling = sentencepiece_tokenizer(), pooling_of(name)
    embedder = decoder(pooling, tokenizer)
    embedder.head = nn.Linear(32, 12)
    embedder.save_pretrained(tmp_path / "model")
    portable = (tmp_path / "model" / "portable.py").exists()
    assert portable == (name not in ("cls", "last_token"))
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=portable)
    texts = [text for text in TEXTS if text]
    again, tokens = Embedder.from_pretrained(tmp_path / "model"), tokenised(tokenizer, texts, QUERY, 64)
    with torch.no_grad():
        ours = embedder(tokens)
        assert torch.equal(again(tokens), ours)
    assert again.text == replace(embedder.text, pool_prompt=not portable)
    assert again.pooling.arguments() == pooling.arguments()
    assert not any(module.training for module in again.modules())
    vectors = torch.from_numpy(theirs.encode_query(texts))
    assert vectors.shape == (len(texts), 12)
    assert (vectors - ours).abs().max() <= 1e-5


def flagged_tokenizer():
    """A tokenizer whose special tokens are set from flags whenever it is loaded, as in Llama."""
    options = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    backend = sentencepiece_tokenizer().backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, add_bos_token=True, add_eos_token=False, **options)


@pytest.mark.parametrize("pooling", ["last_token", "mean", "weighted_mean", "cls"])
@pytest.mark.parametrize("make_tokenizer", [bpe_tokenizer, sentencepiece_tokenizer, flagged_tokenizer])
def test_a_decoder_with_append_eos_needs_no_code(tmp_path, make_tokenizer, pooling):
    tokenizer = make_tokenizer()
    ids = tokenizer("the dog")["input_ids"]
    embedder = decoder(POOLINGS[pooling](32), tokenizer, append_eos=True, pooling_rule="prompt_length")
    embedder.save_pretrained(tmp_path / "model")
    assert tokenizer("the dog")["input_ids"] == ids
    assert not list((tmp_path / "model").glob("*.py"))
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    texts = [text for text in TEXTS if text]
    encoder = Encoder(embedder, precision="float32")
    again = Encoder(Embedder.from_pretrained(tmp_path / "model"), precision="float32")
    for role, vectors in (("query", theirs.encode_query(texts)), ("document", theirs.encode_document(texts))):
        ours = encoder.encode(texts, role=role)
        assert len(np.unique(ours.round(4), axis=0)) > (1 if pooling == "cls" else 4)
        assert abs(vectors - ours).max() <= 1e-5
        assert abs(again.encode(texts, role=role) - ours).max() <= 1e-6
    # The token is also at the end of a truncated text.
    assert theirs.preprocess(["the quick brown fox " * 14])["input_ids"][0, [-1]].tolist() == [tokenizer.eos_token_id]
    plain = decoder(POOLINGS[pooling](32), tokenizer, pooling_rule="prompt_length")
    assert abs(Encoder(plain, precision="float32").encode(texts) - encoder.encode(texts)).max() > 1e-4


@pytest.mark.parametrize("pooling", ["mean", "weighted_mean"])
@pytest.mark.parametrize("make_tokenizer", [*TOKENIZERS, flagged_tokenizer])
def test_a_mean_without_the_prompt_needs_no_code_with_the_rule_prompt_length(tmp_path, make_tokenizer, pooling):
    tokenizer = make_tokenizer()
    embedder = decoder(POOLINGS[pooling](32), tokenizer, pooling_rule="prompt_length")
    embedder.save_pretrained(tmp_path / "model")
    assert not list((tmp_path / "model").glob("*.py"))
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    # sentence-transformers returns the zero vector if no token is left after the prompt's length ("z", "").
    texts = TEXTS[:4]
    ours = Encoder(embedder, precision="float32").encode(texts, role="query")
    again = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32", device="cpu")
    assert abs(theirs.encode_query(texts) - ours).max() <= 1e-5
    assert abs(again.encode(texts, role="query") - ours).max() <= 1e-6
    # If words are split at spaces, the rule `exact` gives the same result.
    exact = Encoder(decoder(POOLINGS[pooling](32), tokenizer), precision="float32").encode(texts, role="query")
    assert (abs(exact - ours).max() <= 1e-6) == (make_tokenizer is wordpiece_tokenizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32)),
        lambda: Embedder(tiny_bert(), wordpiece_tokenizer(), pooling_of("latent_attention")),
        lambda: tiny_contextual("modernbert"),
    ],
)
def test_loading_reports_no_missing_or_unused_weights(tmp_path, make, capfd, caplog):
    make().save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    shown = "".join(capfd.readouterr()) + caplog.text
    assert [word for word in ("MISSING", "LOAD REPORT", "pooler") if word in shown] == []
    assert not [name for name, _ in theirs.named_parameters() if "pooler" in name]


@pytest.mark.parametrize(
    ("pooling", "text"),
    [
        (MeanPooling(32), {"append_eos": True, "pooling_rule": "instruction_count"}),
        (pooling_of("latent_attention"), {}),
    ],
)
def test_a_model_that_sentence_transformers_saves_again_loads_in_both(tmp_path, pooling, text):
    embedder, texts = decoder(pooling, sentencepiece_tokenizer(), **text), [text for text in TEXTS if text]
    embedder.save_pretrained(tmp_path / "model")
    expected = Encoder(embedder, precision="float32").encode(texts, role="query")
    for folder in ("model", "again"):
        theirs = SentenceTransformer(str(tmp_path / folder), device="cpu", trust_remote_code=True)
        ours = Embedder.from_pretrained(tmp_path / folder)
        assert ours.text == embedder.text
        assert theirs.get_embedding_dimension() == 32
        for vectors in (theirs.encode_query(texts), Encoder(ours, precision="float32").encode(texts, role="query")):
            assert abs(vectors - expected).max() <= 1e-5
        theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    if text:
        exact = decoder(pooling, sentencepiece_tokenizer(), append_eos=True)
        assert abs(Encoder(exact, precision="float32").encode(texts, role="query") - expected).max() > 1e-3


RULES = [{"pooling_rule": rule} for rule in ("exact", "prompt_length", "after_colon", "instruction_count")]
SETTINGS = [*product(TOKENIZERS, [{}, {"pool_prompt": True}, *RULES])]
SETTINGS.append((sentencepiece_tokenizer, {"suffix": " [/INST]", "pool_start": False}))


@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("prompt", ["", QUERY, "q:", "[INST] ", "naïve café – "])
@pytest.mark.parametrize(("make_tokenizer", "options"), SETTINGS)
def test_the_code_of_a_directory_tokenises_as_training_does(make_tokenizer, prompt, options, append_eos):
    tokenizer = make_tokenizer()
    append_eos = append_eos and tokenizer.eos_token_id is not None
    settings = TextSettings(40, 30, append_eos=append_eos, **options)
    arguments = {"append_eos": append_eos, "pool_prompt": False, **options}
    module, texts = TextTransformer(tiny_mistral(), tokenizer, 40, 30, **arguments), [*TEXTS, "sum: the fox: 7", "a:"]
    features = module.preprocess(texts, prompt=prompt, task="query")
    expected = TextTokenizer(tokenizer, settings)(texts, "query", prompt).padded(pad_token_id=tokenizer.pad_token_id)
    assert torch.equal(features["input_ids"], expected.input_ids_NL)
    assert torch.equal(features["attention_mask"].bool(), expected.attention_mask_NL)
    assert torch.equal(features["pooling_mask"], expected.pooling_mask_NL)
    # If truncation leaves only the instruction, its last token is pooled.
    length = 12 if module.suffix else 4
    short = TextTransformer(tiny_mistral(), tokenizer, length, length, **arguments)
    assert short.preprocess(["x"], prompt=QUERY, task="query")["pooling_mask"].any(1).all()


ALWAYS = {"poolings", "portable", "pooling"}
CARRIED = {
    **dict.fromkeys(("mean", "weighted_mean"), ALWAYS),
    **dict.fromkeys(("latent_attention", "self_attention"), ALWAYS | {"latent_attention"}),
    "anchor_token": ALWAYS | {"anchor_token", "anchor_kernels", "attention_capture"},
}


@pytest.mark.parametrize("name", sorted(CARRIED))
def test_a_directory_contains_only_the_code_of_its_own_pooling(name, tmp_path):
    own = tmp_path / "model" / "my_own.py"
    decoder(pooling_of(min(CARRIED)), sentencepiece_tokenizer()).save_pretrained(tmp_path / "model")
    own.write_text("")
    decoder(pooling_of(name), sentencepiece_tokenizer()).save_pretrained(tmp_path / "model")
    own.unlink()
    assert carried_code(tmp_path / "model") == CARRIED[name]
    for file in CARRIED[name] - {"poolings"}:
        carried = (tmp_path / "model" / f"{file}.py").read_bytes()
        assert carried == Path("embeddings/models", f"{file}.py").read_bytes()


SEARCH_QUERY, SEARCH_DOCUMENT = "search_query: ", "search_document: "
SEARCH = {"prompts": {"query": SEARCH_QUERY, "document": SEARCH_DOCUMENT}}
TEXTS_CONTEXTUAL = ["how do I pad sequences", "the quick brown fox " * 14, "7 jumps", "", " two numbers", "z"]
CORPUS = ["the lazy dog", "return the sum of two numbers", "a b c d", "one length"]
BARE = {"num_soft_prompts": 0, "residual_projection": False, "normalize": False, "context_dropout": 0.25}
RELEASED = {"form": ContextForm(adds_pooled=False, has_positions=True, pools_prompt=True)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("bert", {}), ("modernbert", {}), ("nomic", RELEASED), ("bert", {"context_max_length": 4}), ("decoder", BARE)],
)
@torch.no_grad()
def test_sentence_transformers_computes_equal_vectors_with_and_without_a_context(tmp_path, kind, options):
    settings = TextSettings(query_max_length=64, document_max_length=32, **SEARCH)
    ours = tiny_contextual(kind, text=settings, **options)
    ours.save_pretrained(tmp_path / "model")
    roles = ((SEARCH_QUERY, 64), (SEARCH_DOCUMENT, 32))
    queries, documents = (tokenised(ours.tokenizer, TEXTS_CONTEXTUAL, prompt, length) for prompt, length in roles)
    corpus_tokens = tokenised(ours.tokenizer, CORPUS, SEARCH_DOCUMENT, 32)
    context = ours.embed_context(corpus_tokens)
    for folder in ("model", "again"):
        theirs = SentenceTransformer(str(tmp_path / folder), device="cpu", trust_remote_code=True)
        seen = []
        for texts, vectors in ((None, None), (CORPUS, context), (None, None)):
            theirs[0].set_context(texts, prompt=SEARCH_DOCUMENT)
            for encode, tokens in ((theirs.encode_query, queries), (theirs.encode_document, documents)):
                expected = ours(tokens, vectors)
                assert (torch.from_numpy(encode(TEXTS_CONTEXTUAL)) - expected).abs().max() <= 1e-5
                seen.append(expected)
        assert (seen[0] - seen[2]).abs().max() > 1e-4
        assert torch.equal(seen[0], seen[4])
        theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    again = load_embedder(tmp_path / "again")
    assert isinstance(again, ContextualEmbedder)
    assert (again.text, again.normalize) == (settings, ours.normalize)
    assert (again.num_context, again.slots.dropout_fraction) == (5, ours.slots.dropout_fraction)
    assert not any(module.training for module in again.modules())
    assert (again(queries, again.embed_context(corpus_tokens)) - ours(queries, context)).abs().max() <= 1e-5
    if options:
        other = tiny_contextual(kind, text=settings)
        assert (other(queries, other.embed_context(corpus_tokens)) - ours(queries, context)).abs().max() > 1e-4


def test_a_context_has_the_prompt_of_documents_in_every_call(tmp_path):
    tiny_contextual(text=TextSettings(**SEARCH)).save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    theirs = SentenceTransformer(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    encoder = Encoder.from_pretrained(str(tmp_path / "again"), precision="float32", device="cpu")
    context = theirs[0].embed_context(CORPUS)
    assert abs(context.numpy() - encoder.encode_context(CORPUS)).max() <= 1e-5
    for role, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        expected = encoder.encode(TEXTS_CONTEXTUAL, role=role, context=CORPUS)
        theirs[0].set_context(None)
        assert abs(encode(TEXTS_CONTEXTUAL) - expected).max() > 1e-4
        for vectors in (context, context.numpy()):
            assert abs(encode(TEXTS_CONTEXTUAL, dataset_embeddings=vectors) - expected).max() <= 1e-5
        theirs[0].set_context(CORPUS)
        assert abs(encode(TEXTS_CONTEXTUAL) - expected).max() <= 1e-5
        theirs[0].set_context(CORPUS, prompt="")
        assert abs(encode(TEXTS_CONTEXTUAL) - expected).max() > 1e-4
        # The argument of a call overrides the context that was set.
        assert abs(encode(TEXTS_CONTEXTUAL, dataset_embeddings=context) - expected).max() <= 1e-5


def test_vectors_that_are_not_a_context_are_refused(tmp_path):
    tiny_contextual().save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    with pytest.raises(ValueError, match=r"must be the result of model\[0\].embed_context\(documents\)"):
        theirs.encode(TEXTS_CONTEXTUAL, dataset_embeddings=theirs.encode(CORPUS))
    for texts in ([], "text"):
        with pytest.raises(ValueError, match="a list of at least one document"):
            theirs[0].embed_context(texts)


@pytest.mark.parametrize("sparse", ["both", "first", "second"])
@torch.no_grad()
def test_a_backbone_with_code_in_the_directory_needs_trust_remote_code(tmp_path, sparse):
    first = tiny_bert() if sparse == "second" else tiny_moe()
    second = tiny_bert(1) if sparse == "first" else tiny_moe(seed=1)
    ours = ContextualEmbedder(first, second, wordpiece_tokenizer(), num_context=3, num_soft_prompts=2).eval()
    ours.save_pretrained(tmp_path / "model")
    context = ours.embed_context(tokenised(ours.tokenizer, CORPUS[:3]))
    expected = ours(tokenised(ours.tokenizer, TEXTS_CONTEXTUAL), context)
    for folder in ("model", "again"):
        assert (tmp_path / folder / "rotary_moe.py").is_file()
        assert not list((tmp_path / folder / "0_Context").glob("*.py"))
        theirs = SentenceTransformer(str(tmp_path / folder), device="cpu", trust_remote_code=True)
        theirs[0].set_context(CORPUS[:3])
        assert (torch.from_numpy(theirs.encode(TEXTS_CONTEXTUAL)) - expected).abs().max() <= 1e-5
        theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(tmp_path / "model"), device="cpu")
