import pytest
import torch

from embeddings.common import InputError
from embeddings.figures import expert_loads
from embeddings.figures.expert_loads import MOST_EXPERTS, draw_expert_loads
from embeddings.figures.png import pyplot
from embeddings.figures.shades import shades
from embeddings.inference import ExpertLoads

pytest.importorskip("matplotlib")

COUNTS = torch.tensor([[2, 2, 2, 2], [6, 2, 0, 0]])


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The axes of what is drawn, kept from being closed: the page, the heat map, the scale."""
    figures = []
    monkeypatch.setattr(expert_loads, "write_png", lambda figure, output: figures.append(figure))

    def draw(count_YX, subtitle="about it"):
        layers = list(range(1, 2 * len(count_YX), 2))
        draw_expert_loads(ExpertLoads(layers, count_YX, 1), "A title", subtitle, tmp_path / "a.png")
        figures[-1].draw_without_rendering()
        return figures[-1].axes

    yield draw
    for figure in figures:
        pyplot().close(figure)


def texts_of(axis):
    return [text.get_text() for text in axis.texts]


def test_each_cell_has_its_share_and_its_shade_and_each_layer_its_metrics(drawn):
    page, heat, scale = drawn(COUNTS)
    shares = ["25.0%"] * 4 + ["75.0%", "25.0%", "idle", "idle"]
    assert texts_of(heat) == shares
    places = [text.get_position() for text in heat.texts]
    assert places == [(column, row) for row in range(2) for column in range(4)]
    (image,) = heat.images
    assert image.get_array().tolist() == [[0.25] * 4, [0.75, 0.25, 0, 0]]
    assert image.get_clim() == (0.0, 0.75)
    assert image.get_cmap()(0.4) == shades()(0.4)
    assert [heat.texts[place].get_color() for place in (4, 6)] == ["white", expert_loads.GREY]
    assert (heat.get_xlabel(), heat.get_ylabel()) == ("expert", "layer")
    assert [label.get_text() for label in heat.get_yticklabels()] == ["1", "3"]
    entropy = (0.75 * torch.tensor(4 / 3).log() + 0.25 * torch.tensor(4.0).log()) / torch.tensor(4.0).log()
    words = texts_of(page)
    assert words[:2] == ["A title", "about it"]
    assert [words[place] for place in (3, 6, 9)] == ["1.000", "1.00", "0"]
    assert [words[place] for place in (4, 7, 10)] == [f"{float(entropy):.3f}", "3.00", "2"]
    assert [label.get_text() for label in scale.get_xticklabels()] == ["0.0%", "25.0%", "75.0%"]
    assert scale.get_xlabel() == "share of a layer's assignments (even: 25.0%)"


@pytest.mark.parametrize(("num_experts", "even_shade"), [(1, 1.0), (2, 0.5), (8, 0.5)])
def test_an_even_load_has_a_middle_shade(num_experts, even_shade, drawn):
    _, heat, _ = drawn(torch.full((1, num_experts), 5))
    (image,) = heat.images
    assert float(image.norm(1 / num_experts)) == pytest.approx(even_shade)


@pytest.mark.parametrize("num_experts", [1, 8, 32, 33])
def test_no_text_leaves_the_page_or_lies_on_another(num_experts, drawn):
    counts = torch.arange(1, 3 * num_experts + 1).view(3, num_experts)
    counts[1] = 0
    counts[1, 0] = 9
    page, heat, scale = drawn(counts, "a subtitle of many words, " * 12)
    figure = page.figure
    assert len(heat.texts) == (3 * num_experts if num_experts <= 32 else 0)
    texts = [*page.texts, *heat.texts, heat.xaxis.label, heat.yaxis.label, scale.xaxis.label]
    texts += [*heat.get_xticklabels(), *heat.get_yticklabels(), *scale.get_xticklabels()]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert len(boxes) > 15
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
    for place, box in enumerate(boxes):
        assert not any(
            min(box.x1, other.x1) - max(box.x0, other.x0) > 0.5 and min(box.y1, other.y1) - max(box.y0, other.y0) > 0.5
            for other in boxes[:place]
        )


def test_a_layer_without_tokens_is_idle(drawn):
    page, heat, _ = drawn(torch.zeros(1, 3, dtype=torch.int64))
    assert texts_of(heat) == ["idle"] * 3
    assert [texts_of(page)[place] for place in (3, 5, 7)] == ["0.000", "0.00", "3"]


def test_a_png_is_written_and_more_experts_than_have_room_are_refused(tmp_path):
    draw_expert_loads(ExpertLoads([1, 3], COUNTS, 1), "t", "s", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    many = torch.ones(1, MOST_EXPERTS + 1, dtype=torch.int64)
    with pytest.raises(InputError, match="has 4097 experts a layer, and a picture has room for 4096"):
        draw_expert_loads(ExpertLoads([1], many, 1), "t", "s", tmp_path / "b.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
