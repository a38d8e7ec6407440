"""Pages of expert loads and latent weights, and texts with shaded tokens."""

import re
from html import unescape

import numpy as np
import pytest
import torch

from embeddings.data.tokenize import TokenSpan
from embeddings.figures.heat_maps import (
    busiest_latents,
    draw_anchor_tokens,
    expert_map,
    latent_maps,
    text_map,
    write_heat_maps,
)
from embeddings.inference import ExpertLoads, LatentWeights, TokenWeights

COUNTS = torch.tensor([[2, 2, 2, 2], [6, 2, 0, 0]])


def cells_of(page):
    """The text and the colours of the shaded cells of each row."""
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    return [[cell[::-1] for cell in re.findall(r'<td style="(.*?)">(.*?)</td>', row)] for row in rows[1:]]


def test_each_layer_has_its_shares_and_its_metrics():
    heat_map = expert_map(ExpertLoads([1, 3], COUNTS, 1))
    assert (list(heat_map.rows), list(heat_map.columns)) == ([1, 3], [0, 1, 2, 3])
    assert heat_map.share_NC.tolist() == [[0.25] * 4, [0.75, 0.25, 0, 0]]
    entropy = (0.75 * torch.tensor(4 / 3).log() + 0.25 * torch.tensor(4.0).log()) / torch.tensor(4.0).log()
    expected = {"entropy": ["1.000", f"{float(entropy):.3f}"], "busiest/even": ["1.00", "3.00"], "idle": ["0", "2"]}
    assert heat_map.statistics == expected
    assert expert_map(ExpertLoads([0], torch.zeros(1, 3, dtype=torch.int64), 1)).share_NC.tolist() == [[0.0] * 3]


@pytest.mark.parametrize(("num_experts", "even_shade"), [(1, "#b10026"), (2, "#feb24c"), (8, "#feb24c")])
def test_an_even_load_has_at_most_the_middle_shade(num_experts, even_shade, tmp_path):
    loads = ExpertLoads([1], torch.full((1, num_experts), 5), 1)
    write_heat_maps([expert_map(loads)], 1 / num_experts, "a <title>", "about it", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    ((text, style), *others) = cells_of(page)[0]
    assert text == f"{1 / num_experts:.1%}"
    assert f"background:{even_shade};" in style
    assert len(others) == num_experts - 1
    assert "<h1>a &lt;title&gt;</h1>" in page
    assert f"an even share is {1 / num_experts:.1%}" in page


def weights_of(text, rows):
    """A text whose words are its tokens between [CLS] and [SEP]."""
    spans, place = [TokenSpan("[CLS]", 0, 0, True)], 0
    for word in text.split(" "):
        spans.append(TokenSpan(word.lower(), place, place + len(word), False))
        place += len(word) + 1
    spans.append(TokenSpan("[SEP]", 0, 0, True))
    weight_TR = np.resize(np.array(rows, dtype=np.float32), (len(spans), len(rows[0])))
    return LatentWeights(text, spans, weight_TR)


ONE = weights_of("A <dog>", [[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]])
TWO = weights_of("mean", [[0.0, 0.0, 0.0, 1.0]])


def test_texts_count_equally_for_the_busiest_latents():
    assert busiest_latents([ONE], 4) == [1, 2, 0, 3]
    # A text of three tokens has the same weight as one of four.
    assert busiest_latents([ONE, TWO], 2) == [3, 1]


def test_latent_weights_have_a_row_per_token_a_column_per_latent_and_a_mean(tmp_path):
    one, two = latent_maps([ONE, TWO], 3)
    assert (one.caption, list(one.rows)) == ("A <dog>", ["[CLS]", "A", "<dog>", "[SEP]", "mean"])
    assert (two.caption, list(two.rows)) == ("mean", ["[CLS]", "mean", "[SEP]", "mean"])
    assert one.columns == two.columns == [3, 1, 2]
    np.testing.assert_allclose(one.share_NC[0], [0.0, 0.6, 0.3])
    np.testing.assert_allclose(one.share_NC[-1], ONE.weight_TR.mean(0)[[3, 1, 2]])
    # The weight of the fourth latent, and exp(entropy), row by row; the numbers of the mean last.
    assert one.statistics["others"][:2] == ["10.0%", "25.0%"]
    assert one.statistics["spread"][:2] == ["2.5", "4.0"]
    assert one.statistics["others"][-1] == f"{ONE.weight_TR.mean(0)[0]:.1%}"
    write_heat_maps([one, two], 0.25, "t", "s", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.count("<table>") == 2
    assert page.count('<tr class="mean">') == 2
    assert "&lt;dog&gt;</th>" in page
    # One scale: the weight of 1 in the second text is darkest.
    assert {text for row in cells_of(page) for text, style in row if "#b10026" in style} == {"100.0%"}


def test_a_text_has_one_row_with_the_mean_of_its_tokens():
    first = LatentWeights("good", [], np.array([[0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=np.float32))
    second = LatentWeights("bad", [], np.array([[0.25, 0.125, 0.625]], dtype=np.float32))
    heat_map = text_map([first, second], 3)
    assert (list(heat_map.rows), heat_map.columns) == (["good", "bad"], [2, 0, 1])
    np.testing.assert_array_equal(heat_map.share_NC, [[0.5, 0.25, 0.25], [0.625, 0.25, 0.125]])


def weighted(text, spans, weights, num_prompt=0):
    pooled = np.arange(len(spans)) >= num_prompt
    spans = [TokenSpan(name, start, end, start == end) for name, start, end in spans]
    return TokenWeights(text, spans, np.array(weights, dtype=np.float32), pooled)


ANCHORED = weighted(
    "The  foxes run off",
    [("[CLS]", 0, 0), ("the", 0, 3), ("fox", 5, 8), ("##es", 8, 10), ("Ġrun", 10, 14), ("[SEP]", 0, 0)],
    [0.5, 0.1, 0.1, 0.1, 0.05, 0.15],
)


def page_of(*texts, tmp_path):
    """The shaded spans and the plain text of a page, and the page itself."""
    draw_anchor_tokens(texts, "a <title>", "a subtitle", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    paragraphs = re.findall(r'<p class="text" dir="auto">(.*?)</p>', page, re.DOTALL)
    spans = [re.findall(r'style="(.*?)" title="(.*?)">(.*?)</span>', text, re.DOTALL) for text in paragraphs]
    return spans, [unescape(re.sub("<.*?>", "", text, flags=re.DOTALL)) for text in paragraphs], page


def test_tokens_are_shaded_within_the_complete_text(tmp_path):
    (spans,), (text,), page = page_of(ANCHORED, tmp_path=tmp_path)
    assert [(letters, hint.split(" ")[2]) for _, hint, letters in spans] == [
        ("[CLS] 50.0%", "3.00"), ("The", "0.60"), ("fox", "0.60"), ("es", "0.60"), ("run", "0.30"),
        ("[SEP] 15.0%", "0.90"),
    ]  # fmt: skip
    assert text == "[CLS] 50.0%The  foxes run[SEP] 15.0% off …"
    assert "<h1>a &lt;title&gt;</h1>" in page
    assert "share of the weight (of the tokens): first token 50%" in page


def test_the_largest_weight_is_darkest_and_a_prompt_is_not_shaded(tmp_path):
    prompted = weighted("q: <a", [("<s>", 0, 0), ("q:", 0, 2), ("▁<a", 2, 5)], [0.0, 0.0, 1.0], num_prompt=2)
    (of_words, of_prompted), (_, text), page = page_of(ANCHORED, prompted, tmp_path=tmp_path)
    assert of_words[0][0] == "background:#b10026;color:#fff"
    expected = [("", "not pooled", "&lt;s&gt; "), (of_prompted[1][0], "weight 1.0000, 1.00 times the mean", "&lt;a")]
    assert of_prompted == expected
    assert text == "<s> q: <a"
    assert page.count("<i style=") > 10


def test_tokens_of_one_character_are_merged(tmp_path):
    split = weighted("東a", [("æ", 0, 1), ("Ŀ", 0, 1), ("±", 0, 1), ("a", 1, 2)], [0.1, 0.2, 0.3, 0.4])
    (spans,), _, _ = page_of(split, tmp_path=tmp_path)
    assert [(letters, hint) for _, hint, letters in spans] == [
        ("東", "weight 0.6000, 0.80 times the mean"), ("a", "weight 0.4000, 1.60 times the mean"),
    ]  # fmt: skip
