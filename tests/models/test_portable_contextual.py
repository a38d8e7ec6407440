from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from embeddings.common import TextSettings
from embeddings.inference import Encoder
from embeddings.models import ContextualEmbedder
from embeddings.models.directory import ContextForm
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.moe import tiny_moe
from tests.models.reading import read

QUERY, DOCUMENT = "search_query: ", "search_document: "
TEXTS = ["how do I pad sequences", "the quick brown fox " * 14, "7 jumps", "", " two numbers", "z"]
CORPUS = ["the lazy dog", "return the sum of two numbers", "a b c d", "one length"]


pytestmark = pytest.mark.usefixtures("travelling_code")


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@torch.no_grad()
def test_sentence_transformers_gives_equal_vectors_with_and_without_a_context(tmp_path: Path, kind: str) -> None:
    settings = TextSettings(query_max_length=64, document_max_length=32, prompts={"query": QUERY, "document": DOCUMENT})
    ours = tiny_contextual(kind, text=settings)
    ours.save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    queries, documents = (
        read(ours.tokenizer, TEXTS, prompt, length) for prompt, length in ((QUERY, 64), (DOCUMENT, 32))
    )
    context = ours.embed_context(read(ours.tokenizer, CORPUS, DOCUMENT, 32))
    seen = []
    for texts, vectors in ((None, None), (CORPUS, context), (None, None)):
        theirs[0].set_context(texts, prompt=DOCUMENT)
        for encode, tokens in ((theirs.encode_query, queries), (theirs.encode_document, documents)):
            expected = ours(tokens, vectors)
            assert (torch.from_numpy(encode(TEXTS)) - expected).abs().max() <= 1e-5
            seen.append(expected)
    assert (seen[0] - seen[2]).abs().max() > 1e-4
    assert torch.equal(seen[0], seen[4])


def test_sentence_transformers_reads_a_released_form_as_the_model_does(tmp_path: Path) -> None:
    form = ContextForm(adds_pooled=False, has_positions=True, pools_prompt=True)
    text = TextSettings(prompts={"query": "q: ", "document": "d: "})
    embedder = tiny_contextual("nomic", form=form, text=text)
    embedder.save_pretrained(tmp_path)
    again = ContextualEmbedder.from_pretrained(tmp_path)
    theirs = SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    theirs[0].set_context(CORPUS)
    vectors = torch.from_numpy(theirs.encode_query(TEXTS))
    with torch.no_grad():
        for model in (embedder, again):
            context = model.embed_context(read(model.tokenizer, CORPUS, "d: "))
            ours = model(read(model.tokenizer, TEXTS, "q: "), context)
            assert (vectors - ours).abs().max() <= 1e-5
    plain = tiny_contextual("nomic", text=text)
    with torch.no_grad():
        other = plain(read(plain.tokenizer, TEXTS, "q: "), plain.embed_context(read(plain.tokenizer, CORPUS, "d: ")))
    assert (vectors - other).abs().max() > 1e-2


@pytest.mark.parametrize("folder", ["model", "again"])
def test_a_context_has_the_documents_prompt_however_it_is_given(tmp_path: Path, folder: str) -> None:
    settings = TextSettings(prompts={"query": QUERY, "document": DOCUMENT})
    tiny_contextual(text=settings).save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    if folder == "again":
        theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
        theirs = SentenceTransformer(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    encoder = Encoder.from_pretrained(str(tmp_path / folder), precision="float32", device="cpu")
    context = theirs[0].embed_context(CORPUS)
    assert abs(context.numpy() - encoder.encode_context(CORPUS)).max() <= 1e-5
    for role, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        expected = encoder.encode(TEXTS, role=role, context=CORPUS)
        theirs[0].set_context(None)
        assert abs(encode(TEXTS) - expected).max() > 1e-4
        for given in (context, context.numpy()):
            assert abs(encode(TEXTS, dataset_embeddings=given) - expected).max() <= 1e-5
        theirs[0].set_context(CORPUS)
        assert abs(encode(TEXTS) - expected).max() <= 1e-5
        theirs[0].set_context(CORPUS, prompt="")
        assert abs(encode(TEXTS) - expected).max() > 1e-4
        # What is given to a call counts before what was set.
        assert abs(encode(TEXTS, dataset_embeddings=context) - expected).max() <= 1e-5


def test_vectors_that_are_no_context_are_refused(tmp_path: Path) -> None:
    tiny_contextual().save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    with pytest.raises(ValueError, match=r"must be what model\[0\].embed_context\(documents\) gives"):
        theirs.encode(TEXTS, dataset_embeddings=theirs.encode(CORPUS))
    with pytest.raises(ValueError, match="context must be at most 5 vectors of width 32"):
        theirs.encode(TEXTS, dataset_embeddings=torch.zeros(6, 32))
    with pytest.raises(ValueError, match="at least one document"):
        theirs[0].embed_context([])


@torch.no_grad()
def test_sentence_transformers_reads_as_much_of_a_context_document_as_the_model(tmp_path: Path) -> None:
    ours = tiny_contextual(context_max_length=4)
    ours.save_pretrained(tmp_path / "model")
    vectors = [ours.embed_context(read(ours.tokenizer, CORPUS))]
    for folder in ("model", "again"):
        theirs = SentenceTransformer(str(tmp_path / folder), device="cpu", trust_remote_code=True)
        theirs[0].set_context(CORPUS)
        vectors.append(theirs[0].context_MH)
        theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    torch.testing.assert_close(vectors[1], vectors[0])
    torch.testing.assert_close(vectors[2], vectors[0])
    assert (tiny_contextual().embed_context(read(ours.tokenizer, CORPUS)) - vectors[0]).abs().max() > 1e-4


@torch.no_grad()
def test_a_model_saved_by_sentence_transformers_itself_loads_in_both_again(tmp_path: Path) -> None:
    ours = tiny_contextual()
    ours.save_pretrained(tmp_path / "model")
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    assert theirs.get_embedding_dimension() == 32
    with pytest.raises(ValueError, match="at most 5 context documents, got 6"):
        theirs[0].set_context(["a"] * 6)
    theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    again = ContextualEmbedder.from_pretrained(tmp_path / "again")
    tokens, documents = read(ours.tokenizer, TEXTS), read(ours.tokenizer, CORPUS)
    assert (again.embed_context(documents) - ours.embed_context(documents)).abs().max() <= 1e-5
    assert (again(tokens) - ours(tokens)).abs().max() <= 1e-5
    third = SentenceTransformer(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    texts = [text for text in TEXTS if text]
    assert abs(third.encode(texts) - theirs.encode(texts)).max() <= 1e-5


@pytest.mark.parametrize("sparse", ["both", "first", "second"])
@torch.no_grad()
def test_a_backbone_that_travels_as_code_loads_where_code_is_trusted(tmp_path: Path, sparse: str) -> None:
    first = tiny_bert() if sparse == "second" else tiny_moe()
    second = tiny_bert(1) if sparse == "first" else tiny_moe(seed=1)
    ours = ContextualEmbedder(first, second, wordpiece_tokenizer(), num_context=3, num_soft_prompts=2).eval()
    ours.save_pretrained(tmp_path / "model")
    expected = ours(read(ours.tokenizer, TEXTS), ours.embed_context(read(ours.tokenizer, CORPUS[:3])))
    for folder in ("model", "again"):
        assert (tmp_path / folder / "rotary_moe.py").is_file()
        assert not list((tmp_path / folder / "0_Context").glob("*.py"))
        theirs = SentenceTransformer(str(tmp_path / folder), device="cpu", trust_remote_code=True)
        theirs[0].set_context(CORPUS[:3])
        assert (torch.from_numpy(theirs.encode(TEXTS)) - expected).abs().max() <= 1e-5
        theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(tmp_path / "model"), device="cpu")
