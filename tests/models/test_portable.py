import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import PreTrainedTokenizerBase

from embeddings.common import TextSettings, instruction_prompt
from embeddings.common.text import PoolingRule
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference import Encoder
from embeddings.models import Embedder, LatentAttentionPooling, MeanPooling, Pooling, make_bidirectional
from embeddings.models.poolings import POOLINGS
from embeddings.models.portable import TextTransformer
from tests.helpers.tiny import bpe_tokenizer, sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.reading import carried_code, read

QUERY = instruction_prompt("Given a question, retrieve passages that answer the question")
TEXTS = ["how do I pad sequences", "the quick brown fox " * 14, "7 jumps", "東京 café", "", " two numbers", "z"]
TOKENIZERS = [wordpiece_tokenizer, bpe_tokenizer, sentencepiece_tokenizer]


pytestmark = pytest.mark.usefixtures("travelling_code")


def decoder(pooling: Pooling, tokenizer: PreTrainedTokenizerBase, **text: object) -> Embedder:
    backbone = tiny_mistral()
    make_bidirectional(backbone)
    settings = TextSettings(query_max_length=64, document_max_length=32, prompts={"query": QUERY}, **text)  # type: ignore[arg-type]
    return Embedder(backbone, tokenizer, pooling, text=settings).eval()


def latent(seed: int = 0) -> LatentAttentionPooling:
    torch.manual_seed(seed)
    return LatentAttentionPooling(32, num_latents=6, num_heads=4, head_dim=8)


@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
def test_sentence_transformers_gives_equal_vectors_of_prompted_latent_attention(
    tmp_path: Path, make_tokenizer: object, append_eos: bool
) -> None:
    tokenizer = make_tokenizer()  # type: ignore[operator]
    append_eos = append_eos and tokenizer.eos_token_id is not None
    embedder = decoder(latent(), tokenizer, append_eos=append_eos)
    embedder.save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    with torch.no_grad():
        queries = embedder(read(tokenizer, TEXTS, QUERY, 64, append_eos))
        documents = embedder(read(tokenizer, TEXTS, "", 32, append_eos))
    assert len(torch.unique(queries, dim=0)) > 3
    assert (torch.from_numpy(theirs.encode_query(TEXTS)) - queries).abs().max() <= 1e-5
    assert (torch.from_numpy(theirs.encode_document(TEXTS)) - documents).abs().max() <= 1e-5


@pytest.mark.parametrize("name", sorted(POOLINGS))
def test_sentence_transformers_gives_equal_vectors_of_every_pooling(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    tokenizer = sentencepiece_tokenizer()
    pooling = latent() if name == "latent_attention" else POOLINGS[name](32)
    embedder = decoder(pooling, tokenizer)
    embedder.head = nn.Linear(32, 12)
    embedder.save_pretrained(tmp_path / "model")
    portable = (tmp_path / "model" / "portable.py").exists()
    assert portable == (name not in ("cls", "last_token"))
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=portable)
    texts = [text for text in TEXTS if text]
    with torch.no_grad():
        ours = embedder(read(tokenizer, texts, QUERY, 64))
    vectors = torch.from_numpy(theirs.encode_query(texts))
    assert vectors.shape == (len(texts), 12)
    assert (vectors - ours).abs().max() <= 1e-5


def test_sentence_transformers_own_prompt_length_would_be_wrong(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    embedder = decoder(MeanPooling(32), tokenizer, pool_prompt=True)
    embedder.save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    theirs.set_pooling_include_prompt(False)
    with torch.no_grad():
        ours = embedder(read(tokenizer, ["the lazy dog"], QUERY, 64))
    assert (torch.from_numpy(theirs.encode_query(["the lazy dog"])) - ours).abs().max() > 1e-3


def test_sentence_transformers_loads_plain_models_without_any_code(tmp_path: Path) -> None:
    tokenizer = wordpiece_tokenizer()
    embedder = Embedder(tiny_bert(), tokenizer, MeanPooling(32), text=TextSettings(document_max_length=16)).eval()
    embedder.save_pretrained(tmp_path / "model")
    assert not list((tmp_path / "model").rglob("*.py"))
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert theirs.max_seq_length == 16
    with torch.no_grad():
        ours = embedder(read(tokenizer, TEXTS, "", 16))
    assert (torch.from_numpy(theirs.encode_document(TEXTS)) - ours).abs().max() <= 1e-5


def test_a_model_saved_by_sentence_transformers_itself_loads_in_both_again(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    embedder = decoder(latent(), tokenizer)
    embedder.save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    assert theirs.get_embedding_dimension() == 32
    theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    ours = Embedder.from_pretrained(tmp_path / "again")
    assert ours.text == embedder.text
    expected = torch.from_numpy(theirs.encode_query(TEXTS))
    assert (torch.from_numpy(again.encode_query(TEXTS)) - expected).abs().max() <= 1e-5
    with torch.no_grad():
        assert (ours(read(ours.tokenizer, TEXTS, QUERY, 64)) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("pool_prompt", [False, True])
@pytest.mark.parametrize("prompt", ["", QUERY, "q:", "naïve café – "])
@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
def test_travelling_tokenisation_equals_a_loop_over_offsets(
    make_tokenizer: object, prompt: str, pool_prompt: bool
) -> None:
    tokenizer = make_tokenizer()  # type: ignore[operator]
    module = TextTransformer(tiny_mistral(), tokenizer, 64, 40, append_eos=False, pool_prompt=pool_prompt)
    texts = [text for text in TEXTS if prompt + text]
    features = module.preprocess(texts, prompt=prompt, task="query")
    expected = read(tokenizer, texts, prompt, 64, pool_prompt=pool_prompt)
    assert torch.equal(features["input_ids"], expected.input_ids_NL)
    assert torch.equal(features["attention_mask"].bool(), expected.attention_mask_NL)
    assert torch.equal(features["pooling_mask"], expected.pooling_mask_NL)


@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("pool_prompt", [False, True])
@pytest.mark.parametrize("prompt", ["", QUERY, "naïve café – "])
@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
def test_travelling_tokenisation_is_the_trainings(
    make_tokenizer: object, prompt: str, pool_prompt: bool, append_eos: bool
) -> None:
    tokenizer = make_tokenizer()  # type: ignore[operator]
    append_eos = append_eos and tokenizer.eos_token_id is not None
    module = TextTransformer(tiny_mistral(), tokenizer, 40, 30, append_eos=append_eos, pool_prompt=pool_prompt)
    settings = TextSettings(query_max_length=40, document_max_length=30, append_eos=append_eos, pool_prompt=pool_prompt)
    features = module.preprocess(TEXTS, prompt=prompt, task="query")
    trained = TextTokenizer(tokenizer, settings)(TEXTS, "query", prompt).padded(pad_token_id=tokenizer.pad_token_id)
    assert torch.equal(features["input_ids"], trained.input_ids_NL)
    assert torch.equal(features["attention_mask"].bool(), trained.attention_mask_NL)
    assert torch.equal(features["pooling_mask"], trained.pooling_mask_NL)


@pytest.mark.parametrize("rule", ["exact", "after_colon", "instruction_count"])
@pytest.mark.parametrize("prompt", ["", QUERY, "naïve café – "])
@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
def test_a_released_pooling_rule_travels_along(make_tokenizer: object, prompt: str, rule: PoolingRule) -> None:
    tokenizer = make_tokenizer()  # type: ignore[operator]
    append_eos, texts = tokenizer.eos_token_id is not None, [*TEXTS, "sum: the fox: 7", "a:"]
    module = TextTransformer(tiny_mistral(), tokenizer, 40, 30, append_eos, pool_prompt=False, pooling_rule=rule)
    settings = TextSettings(40, 30, append_eos=append_eos, pooling_rule=rule)
    features = module.preprocess(texts, prompt=prompt, task="query")
    trained = TextTokenizer(tokenizer, settings)(texts, "query", prompt).padded(pad_token_id=tokenizer.pad_token_id)
    assert torch.equal(features["input_ids"], trained.input_ids_NL)
    assert torch.equal(features["pooling_mask"], trained.pooling_mask_NL)
    # Where truncation leaves the instruction alone, its last token is pooled.
    cut = TextTransformer(tiny_mistral(), tokenizer, 4, 4, append_eos, pool_prompt=False, pooling_rule=rule)
    assert cut.preprocess(["x"], prompt=QUERY, task="query")["pooling_mask"].any(1).all()


def test_a_released_pooling_rule_is_kept_by_both_who_save_a_directory(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    embedder = decoder(MeanPooling(32), tokenizer, append_eos=True, pooling_rule="instruction_count")
    embedder.save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    texts = [text for text in TEXTS if text]
    for folder in ("model", "again"):
        ours = Embedder.from_pretrained(tmp_path / folder)
        assert ours.text == embedder.text
        vectors = Encoder(ours, precision="float32").encode(texts, role="query")
        assert abs(theirs.encode_query(texts) - vectors).max() <= 1e-5
    exact = decoder(MeanPooling(32), tokenizer, append_eos=True)
    assert abs(Encoder(exact, precision="float32").encode(texts, role="query") - vectors).max() > 1e-3


@pytest.mark.parametrize("prompt", ["", "[INST] ", QUERY])
def test_what_follows_every_text_and_the_special_tokens_before_it_travel_along(prompt: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    module = TextTransformer(tiny_mistral(), tokenizer, 40, 30, True, False, suffix=" [/INST]", pool_start=False)
    settings = TextSettings(40, 30, append_eos=True, suffix=" [/INST]", pool_start=False)
    features = module.preprocess(TEXTS, prompt=prompt, task="query")
    trained = TextTokenizer(tokenizer, settings)(TEXTS, "query", prompt).padded(pad_token_id=tokenizer.pad_token_id)
    assert torch.equal(features["input_ids"], trained.input_ids_NL)
    assert torch.equal(features["pooling_mask"], trained.pooling_mask_NL)
    assert not features["pooling_mask"][:, 0].any()


def test_a_truncated_text_keeps_its_end_token_and_an_empty_one_gets_it() -> None:
    tokenizer = bpe_tokenizer()
    module = TextTransformer(tiny_mistral(), tokenizer, 8, 6, append_eos=True, pool_prompt=False)
    features = module.preprocess(["the quick brown fox jumps over the lazy dog", ""])
    assert features["attention_mask"].sum(1).tolist() == [6, 1]
    assert features["input_ids"][0, -1] == features["input_ids"][1, 0] == tokenizer.eos_token_id
    assert features["pooling_mask"].sum(1).tolist() == [6, 1]


CARRIED = {
    "mean": {"poolings", "portable", "pooling"},
    "weighted_mean": {"poolings", "portable", "pooling"},
    "self_attention": {"poolings", "portable", "pooling"},
    "latent_attention": {"poolings", "portable", "pooling", "latent_attention"},
    "anchor_token": {
        *("poolings", "portable", "pooling", "anchor_token", "anchor_weights", "anchor_kernels", "attention_capture")
    },
}


@pytest.mark.parametrize("name", sorted(CARRIED))
def test_a_directory_carries_the_code_of_its_own_pooling_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "anchor_fused.py").write_text(
        '"""This file travels inside model directories: an older one."""'
    )
    (tmp_path / "model" / "my_own.py").write_text("")
    pooling = latent() if name == "latent_attention" else POOLINGS[name](32)
    decoder(pooling, sentencepiece_tokenizer()).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "my_own.py").unlink()
    assert carried_code(tmp_path / "model") == CARRIED[name]
    for file in CARRIED[name] - {"poolings"}:
        carried = (tmp_path / "model" / f"{file}.py").read_bytes()
        assert carried == Path("embeddings/models", f"{file}.py").read_bytes()


def test_the_modules_are_named_for_sentence_transformers(tmp_path: Path) -> None:
    decoder(latent(), bpe_tokenizer()).save_pretrained(tmp_path / "model")
    kinds = [entry["type"] for entry in json.loads((tmp_path / "model" / "modules.json").read_text())]
    assert kinds == ["portable.TextTransformer", "portable.MaskedPooling", "sentence_transformers.models.Normalize"]
