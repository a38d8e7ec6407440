import re
from html import unescape

import numpy as np

from embeddings.data.tokenize import TokenSpan
from embeddings.figures.heat_maps import draw_anchor_tokens, weighted_pieces
from embeddings.inference.inspection import TokenWeights


def weights_of(text, spans, weights, num_prompt=0):
    pooled = np.arange(len(spans)) >= num_prompt
    spans = [TokenSpan(name, start, end, start == end) for name, start, end in spans]
    return TokenWeights(text, spans, np.array(weights, dtype=np.float32), pooled)


WORDS = weights_of(
    "The  foxes run off",
    [("[CLS]", 0, 0), ("the", 0, 3), ("fox", 5, 8), ("##es", 8, 10), ("Ġrun", 10, 14), ("[SEP]", 0, 0)],
    [0.5, 0.1, 0.1, 0.1, 0.05, 0.15],
)


def shown(*texts, tmp_path):
    """The shaded spans and the plain text of a page, and the page itself."""
    draw_anchor_tokens(texts, "a <title>", "a subtitle", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    paragraphs = re.findall(r'<p class="text" dir="auto">(.*?)</p>', page, re.DOTALL)
    spans = [re.findall(r'style="(.*?)" title="(.*?)">(.*?)</span>', text, re.DOTALL) for text in paragraphs]
    return spans, [unescape(re.sub("<.*?>", "", text, flags=re.DOTALL)) for text in paragraphs], page


def test_tokens_are_shaded_as_the_texts_own_letters_and_the_rest_of_the_text_stays(tmp_path):
    (spans,), (text,), page = shown(WORDS, tmp_path=tmp_path)
    assert [(letters, hint.split(" ")[2]) for _, hint, letters in spans] == [
        ("[CLS] 50.0%", "3.00"), ("The", "0.60"), ("fox", "0.60"), ("es", "0.60"), ("run", "0.30"),
        ("[SEP] 15.0%", "0.90"),
    ]  # fmt: skip
    assert text == "[CLS] 50.0%The  foxes run[SEP] 15.0% off …"
    assert "<h1>a &lt;title&gt;</h1>" in page
    assert "share of the weight (of the tokens): first token 50%" in page


def test_the_largest_weight_is_the_darkest_and_a_prompt_has_no_shade(tmp_path):
    prompted = weights_of("q: <a", [("<s>", 0, 0), ("q:", 0, 2), ("▁<a", 2, 5)], [0.0, 0.0, 1.0], num_prompt=2)
    (of_words, of_prompted), (_, text), page = shown(WORDS, prompted, tmp_path=tmp_path)
    assert of_words[0][0] == "background:#b10026;color:#fff"
    expected = [("", "not pooled", "&lt;s&gt; "), (of_prompted[1][0], "weight 1.0000, 1.00 times the mean", "&lt;a")]
    assert of_prompted == expected
    assert text == "<s> q: <a"
    assert page.count("<i style=") > 10


def test_tokens_of_one_character_are_one_piece_of_their_sum_and_their_mean_shade(tmp_path):
    split = weights_of("東a", [("æ", 0, 1), ("Ŀ", 0, 1), ("±", 0, 1), ("a", 1, 2)], [0.1, 0.2, 0.3, 0.4])
    found = [(piece.text, round(piece.weight, 4), piece.num_tokens) for piece in weighted_pieces(split)]
    assert found == [("東", 0.6, 3), ("a", 0.4, 1)]
    (spans,), _, _ = shown(split, tmp_path=tmp_path)
    assert [(letters, hint) for _, hint, letters in spans] == [
        ("東", "weight 0.6000, 0.80 times the mean"), ("a", "weight 0.4000, 1.60 times the mean"),
    ]  # fmt: skip


def test_a_token_of_white_space_is_seen(tmp_path):
    spaced = weights_of("a  \n b", [("a", 0, 1), ("ĠĠ", 1, 3), ("Ċ", 3, 4), ("Ġb", 4, 6)], [0.25, 0.25, 0.25, 0.25])
    (spans,), (text,), _ = shown(spaced, tmp_path=tmp_path)
    assert [letters for *_, letters in spans] == ["a", "  ", "↵\n", "b"]
    assert text == "a  ↵\n b"
