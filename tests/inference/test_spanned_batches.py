import pytest

from embeddings.common import OptionError
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference.inspection import spanned_batches
from tests.inference.models import some_texts, tiny_embedder


@pytest.mark.parametrize("mini_batch_tokens", [1, 30, 4096])
def test_each_text_is_once_in_a_mini_batch_beside_its_tokens(mini_batch_tokens):
    embedder, texts = tiny_embedder(prompts={"document": "a dog "}), some_texts(7)
    tokens = TextTokenizer(embedder.tokenizer, embedder.text)(texts, "document", "a dog ")
    found = {}
    batches = list(spanned_batches(embedder, texts, None, "document", mini_batch_tokens))
    for batch in batches:
        assert batch.ids_nL.numel() <= mini_batch_tokens or len(batch.texts) == 1
        for one, ids_L, attention_L, pooled_L in zip(
            batch.texts, batch.ids_nL, batch.attention_nL, batch.pooled_nL, strict=True
        ):
            assert one.row not in found
            length = len(one.spans)
            assert attention_L.tolist() == [place < length for place in range(len(attention_L))]
            assert not pooled_L[length:].any()
            found[one.row] = (one.text, [span.token for span in one.spans], ids_L[:length])
    assert sorted(found) == list(range(7))
    for row, (text, names, ids_T) in found.items():
        assert text == f"a dog {texts[row]}"
        assert embedder.tokenizer.convert_ids_to_tokens(ids_T.tolist()) == names
        assert len(names) == int(tokens.lengths_N[row]) > 2
    assert len(batches) == {1: 7, 4096: 1}.get(mini_batch_tokens, len(batches))


def test_a_prompt_that_the_model_lacks_is_refused():
    with pytest.raises(OptionError, match="prompt"):
        next(spanned_batches(tiny_embedder(), ["a"], "none", "document", 64))
