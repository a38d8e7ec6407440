"""Heat maps of expert loads, of latent weights and of zeros, and texts with shaded tokens."""

import re
from html import unescape

import numpy as np
import pytest
import torch

from embeddings.common import InputError
from embeddings.data.tokenize import TokenSpan
from embeddings.figures.drawing import GREY
from embeddings.figures.heat_maps import (
    MAX_EXPERTS,
    MAX_ROWS,
    busiest_latents,
    draw_anchor_tokens,
    draw_expert_loads,
    draw_latent_weights,
    draw_latents_by_text,
    draw_zeros,
    layer_shares,
    spread,
    weighted_pieces,
)
from embeddings.inference import ExpertLoads, LatentWeights, TokenWeights
from embeddings.models.model_files import MatrixZeros
from tests.helpers.shown import check_layout

pytest.importorskip("matplotlib")

COUNTS = torch.tensor([[2, 2, 2, 2], [6, 2, 0, 0]])


@pytest.fixture
def loads_drawn(kept, tmp_path):
    """The axes of expert loads: the heat map and its scale."""

    def draw(count_YX, subtitle="about it"):
        layers = list(range(1, 2 * len(count_YX), 2))
        draw_expert_loads(ExpertLoads(layers, count_YX, 1), "A title", subtitle, tmp_path / "a.png")
        return kept[-1].axes

    return draw


@pytest.fixture
def latents_drawn(kept, tmp_path):
    """The axes of latent weights: a heat map per text, and the scale."""

    def draw(texts, num_columns=3, subtitle="about it"):
        draw_latent_weights(texts, num_columns, "A title", subtitle, tmp_path / "a.png")
        return kept[-1].axes

    return draw


def cells_of(axis):
    return [text.get_text() for text in axis.texts if not hasattr(text, "xycoords")]


def statistics_of(axis):
    """Columns of numbers beside a heat map, each under its name."""
    words = [text.get_text() for text in axis.texts if hasattr(text, "xycoords")]
    size = 1 + len(axis.get_yticklabels())
    return [words[start : start + size] for start in range(0, len(words), size)]


def labels(axis):
    return [[label.get_text() for label in found] for found in (axis.get_xticklabels(), axis.get_yticklabels())]


def test_each_cell_has_its_share_and_its_shade_and_each_layer_its_metrics(loads_drawn):
    heat, scale = loads_drawn(COUNTS)
    assert cells_of(heat) == ["25.0%"] * 4 + ["75.0%", "25.0%", "idle", "idle"]
    (image,) = heat.images
    assert image.get_array().tolist() == [[0.25] * 4, [0.75, 0.25, 0, 0]]
    assert image.get_clim() == (0.0, 0.75)
    assert [heat.texts[place].get_color() for place in (4, 6)] == ["white", GREY]
    assert labels(heat) == [["0", "1", "2", "3"], ["1", "3"]]
    entropy = (0.75 * torch.tensor(4 / 3).log() + 0.25 * torch.tensor(4.0).log()) / torch.tensor(4.0).log()
    assert statistics_of(heat) == [
        ["load\nentropy", "1.000", f"{float(entropy):.3f}"],
        ["busiest\n/ even", "1.00", "3.00"],
        ["idle\nexperts", "0", "2"],
    ]
    assert [label.get_text() for label in scale.get_xticklabels()] == ["0.0%", "25.0%", "75.0%"]
    assert scale.get_xlabel() == "share of a layer's assignments (even: 25.0%)"
    empty, _ = loads_drawn(torch.zeros(1, 3, dtype=torch.int64))
    assert cells_of(empty) == ["idle"] * 3


@pytest.mark.parametrize(("num_experts", "even_shade"), [(1, 1.0), (2, 0.5), (8, 0.5)])
def test_an_even_load_has_a_middle_shade(num_experts, even_shade, loads_drawn):
    heat, _ = loads_drawn(torch.full((1, num_experts), 5))
    assert float(heat.images[0].norm(1 / num_experts)) == pytest.approx(even_shade)


@pytest.mark.parametrize("num_experts", [1, 8, 32, 33])
def test_expert_loads_are_laid_out(num_experts, loads_drawn, kept):
    counts = torch.arange(1, 3 * num_experts + 1).view(3, num_experts)
    counts[1] = 0
    counts[1, 0] = 9
    heat, _ = loads_drawn(counts, "a subtitle of many words, " * 12)
    assert len(cells_of(heat)) == (3 * num_experts if num_experts <= 32 else 0)
    check_layout(kept[-1], 15)


def weights_of(text, rows):
    """A text whose words are its tokens between [CLS] and [SEP]."""
    spans, place = [TokenSpan("[CLS]", 0, 0, True)], 0
    for word in text.split(" "):
        spans.append(TokenSpan(word.lower(), place, place + len(word), False))
        place += len(word) + 1
    spans.append(TokenSpan("[SEP]", 0, 0, True))
    weight_TR = np.resize(np.array(rows, dtype=np.float32), (len(spans), len(rows[0])))
    return LatentWeights(text, spans, weight_TR[None])


ONE = weights_of("A $dog$", [[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]])
TWO = weights_of("fox", [[0.0, 0.0, 0.0, 1.0]])


def test_the_papers_figure_has_a_row_per_text_and_a_column_per_latent_and_head(kept, tmp_path):
    # Two heads, two tokens, three latents: averaged over the tokens by hand.
    first = LatentWeights("good", [], np.array([[[1, 0, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 1]]], dtype=np.float32))
    second = LatentWeights("$bad$", [], np.array([[[0, 0, 1]], [[0.5, 0.25, 0.25]]], dtype=np.float32))
    draw_latents_by_text([first, second], "A title", "about it", tmp_path / "a.png")
    axis = kept[0].axes[0]
    expected = [[0.5, 0.5, 0, 0, 0, 1], [0, 0, 1, 0.5, 0.25, 0.25]]
    np.testing.assert_array_equal(np.asarray(axis.images[0].get_array()), expected)
    assert labels(axis) == [["head 0", "head 1"], ["good", "$bad$"]]


def test_texts_count_equally_for_the_busiest_latents():
    assert busiest_latents([ONE], 4) == [1, 2, 0, 3]
    # A text of three tokens has the same weight as one of four.
    assert busiest_latents([ONE, TWO], 2) == [3, 1]


def test_the_spread_is_the_effective_number_of_latents():
    assert spread(np.array([0.25] * 4, dtype=np.float32)) == pytest.approx(4)
    assert spread(np.array([0.5, 0.0, 0.5], dtype=np.float32)) == pytest.approx(2)
    assert spread(np.array([0.0, 1.0], dtype=np.float32)) == 1


def test_latent_weights_have_a_row_per_token_a_column_per_latent_and_a_mean(latents_drawn):
    one, two, scale = latents_drawn([ONE, TWO])
    assert labels(one) == [["3", "1", "2"], ["[CLS]", "A", "$dog$", "[SEP]", "mean"]]
    assert labels(two) == [["3", "1", "2"], ["[CLS]", "fox", "[SEP]", "mean"]]
    assert (one.get_xlabel(), two.get_xlabel()) == ("A $dog$", "fox")
    rows = np.array(one.images[0].get_array())
    np.testing.assert_allclose(rows[0], [0.0, 0.6, 0.3])
    np.testing.assert_allclose(rows[-1], ONE.weight_TR.mean(0)[[3, 1, 2]])
    assert {axis.images[0].get_clim() for axis in (one, two)} == {(0.0, 1.0)}
    # The weight of the fourth latent, and exp(entropy), row by row; the numbers of the mean last.
    others, spreads = statistics_of(one)
    assert (others[:3], spreads[:3]) == (["others", "10.0%", "25.0%"], ["spread", "2.5", "4.0"])
    assert others[-1] == f"{ONE.weight_TR.mean(0)[0]:.1%}"
    assert scale.get_xlabel() == "share of a token's attention (even: 25.0%)"
    heat, _ = latents_drawn([weights_of("fox", [[0.1] * 10])])
    assert float(heat.images[0].norm(0.1)) == pytest.approx(0.5)


@pytest.mark.parametrize("num_latents", [1, 24, 64])
def test_latent_weights_are_laid_out(num_latents, latents_drawn, kept):
    rng = np.random.default_rng(0)
    texts = [
        weights_of(text, rng.dirichlet(np.ones(512), 4).tolist())
        for text in ("the quick brown averyveryverylongwordindeed fox " * 4, "a 東京 b")
    ]
    latents_drawn(texts, num_latents, "a subtitle of many words, " * 12)
    check_layout(kept[-1], 60)


ZEROS = [
    MatrixZeros(0, "attention.query", 2, 8),
    MatrixZeros(0, "mlp.up", 8, 24),
    MatrixZeros(1, "attention.query", 0, 8),
    MatrixZeros(1, "mlp.down", 24, 24),
]


def test_zeros_have_a_row_per_layer_and_a_column_per_matrix(kept, tmp_path):
    draw_zeros(ZEROS, "A title", "about it", tmp_path / "a.png")
    axis = kept[-1].axes[0]
    shares = np.ma.filled(axis.images[0].get_array(), np.nan)
    np.testing.assert_allclose(shares, [[0.25, 1 / 3, np.nan], [0.0, np.nan, 1.0]])
    assert [label.get_text() for label in axis.get_xticklabels()] == ["attention.query", "mlp.up", "mlp.down"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["0", "1"]
    assert cells_of(axis) == ["25.0%", "33.3%", "0.0%", "100.0%"]
    assert statistics_of(axis) == [["of the\nlayer", "31.2%", "75.0%"]]
    assert layer_shares(ZEROS) == {0: 10 / 32, 1: 24 / 32}


def test_data_too_large_for_a_figure_are_refused(tmp_path):
    experts = ExpertLoads([1], torch.ones(1, MAX_EXPERTS + 1, dtype=torch.int64), 1)
    tokens = weights_of("a " * MAX_ROWS, [[0.5, 0.5]])
    layers = [MatrixZeros(layer, "mlp", 0, 4) for layer in range(MAX_ROWS + 1)]
    place = ("t", "s", tmp_path / "b.png")
    for draw, says in (
        (
            lambda: draw_expert_loads(experts, *place),
            "has 4097 experts per layer, more than the maximum of 4096 for a figure",
        ),
        (lambda: draw_latent_weights([tokens], 3, *place), "TEXT: needs 1004 rows; the maximum for a figure is 1000"),
        (
            lambda: draw_latents_by_text([tokens] * 1001, *place),
            "TEXT: 1001 texts; the maximum for a figure is 1000",
        ),
        (lambda: draw_zeros(layers, *place), "has 1001 layers of 1 matrices"),
    ):
        with pytest.raises(InputError, match=says):
            draw()
    assert list(tmp_path.iterdir()) == []


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
    found = [(piece.text, round(piece.weight, 4), piece.num_tokens) for piece in weighted_pieces(split)]
    assert found == [("東", 0.6, 3), ("a", 0.4, 1)]
    (spans,), _, _ = page_of(split, tmp_path=tmp_path)
    assert [(letters, hint) for _, hint, letters in spans] == [
        ("東", "weight 0.6000, 0.80 times the mean"), ("a", "weight 0.4000, 1.60 times the mean"),
    ]  # fmt: skip


def test_a_token_of_white_space_is_visible(tmp_path):
    spaced = weighted("a  \n b", [("a", 0, 1), ("ĠĠ", 1, 3), ("Ċ", 3, 4), ("Ġb", 4, 6)], [0.25, 0.25, 0.25, 0.25])
    (spans,), (text,), _ = page_of(spaced, tmp_path=tmp_path)
    assert [letters for *_, letters in spans] == ["a", "  ", "↵\n", "b"]
    assert text == "a  ↵\n b"
