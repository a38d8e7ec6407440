"""Where the tokens of some texts go: the experts' shares of each sparse layer, as a heat map."""

import textwrap
from pathlib import Path
from typing import Any

from embeddings.common import InputError
from embeddings.figures.page import draw_scale, write
from embeddings.figures.png import pyplot, write_png
from embeddings.figures.shades import BLACK, EDGE, GREY, is_dark, shades
from embeddings.inference.inspection import ExpertLoads
from embeddings.models.moe.routing import load_metrics

# With more experts the cells are narrow and hold no numbers.
MOST_NUMBERED = 32
# matplotlib draws no picture of 65,536 dots' width.
MOST_EXPERTS = 4096

# In points, 72 to the inch.
_ROW, _LEFT, _RIGHT = 28.0, 64.0, 14.0
_STATISTIC = 54.0
_TITLE, _SUBTITLE, _HEADER, _FOOTER = 20.0, 14.0, 30.0, 92.0
_MARGIN = 22.0
_LEAST_WIDTH = 660.0
_STATISTICS = ("load\nentropy", "busiest\n/ even", "idle\nexperts")


def draw_expert_loads(loads: ExpertLoads, title: str, subtitle: str, output: Path) -> None:
    """Draw a row a sparse layer and a column an expert, the darker a cell the more of the layer's tokens it has.

    Beside each row stand its entropy (1: all experts loaded alike), the busiest expert's tokens over an even share, and
    how many experts have none.

    Args:
        loads: The loads.
        title: The line above all.
        subtitle: What else is to be known, wrapped over lines.
        output: The PNG file to write.

    Raises:
        InputError: If the layers have more experts than a picture has room for.
        MissingExtraError: If matplotlib is not installed.
    """
    num_layers, num_experts = loads.count_YX.shape
    if num_experts > MOST_EXPERTS:
        what = f"has {num_experts} experts a layer, and a picture has room for {MOST_EXPERTS}"
        raise InputError("the model", what, "draw one with fewer")
    plt = pyplot()
    cell = 46.0 if num_experts <= 16 else 33.0 if num_experts <= MOST_NUMBERED else max(2.0, 640.0 / num_experts)
    width = max(_LEAST_WIDTH, _LEFT + num_experts * cell + 3 * _STATISTIC + _RIGHT)
    notes = textwrap.wrap(subtitle, int((width - 2 * _MARGIN) / 4.6))
    top = _MARGIN + _TITLE + len(notes) * _SUBTITLE + _HEADER
    height = top + num_layers * _ROW + _FOOTER
    figure = plt.figure(figsize=(width / 72, height / 72), facecolor="white")
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    page.set_axis_off()
    write(page, _MARGIN, _MARGIN + 8, title, size=12, weight="bold", color=BLACK)
    for line, note in enumerate(notes, start=1):
        write(page, _MARGIN, _MARGIN + 10 + line * _SUBTITLE, note, size=9, color=GREY)
    share_YX = loads.share_YX
    place = (_LEFT / width, 1 - (top + num_layers * _ROW) / height)
    axis = figure.add_axes((*place, num_experts * cell / width, num_layers * _ROW / height))
    # An even share has a middle shade; an emptier picture than that would look as if something stood out.
    colours, most = shades(), min(1.0, max(float(share_YX.max()), 2 / num_experts))
    image = axis.imshow(share_YX.numpy(), cmap=colours, vmin=0.0, vmax=most, aspect="auto", interpolation="nearest")
    _name_axes(axis, loads.layers, num_experts)
    if num_experts <= MOST_NUMBERED:
        size = 8.5 if num_experts <= 16 else 7.0
        for row, counts in enumerate(loads.count_YX.tolist()):
            for column, count in enumerate(counts):
                share = float(share_YX[row, column])
                colour = "white" if is_dark(colours(share / most)) else BLACK if count else GREY
                text = f"{share:.1%}" if count else "idle"
                axis.text(column, row, text, size=size, ha="center", va="center", color=colour)
    load, right = load_metrics(loads.count_YX), _LEFT + num_experts * cell
    columns = (
        [f"{value:.3f}" for value in load.entropy_Y.tolist()],
        [f"{value:.2f}" for value in load.highest_Y.tolist()],
        [f"{value}" for value in load.idle_Y.tolist()],
    )
    for column, (name, values) in enumerate(zip(_STATISTICS, columns, strict=True)):
        middle = right + (column + 0.5) * _STATISTIC + 4
        page.text(middle, top - 6, name, size=8.5, color=GREY, ha="center", va="bottom", linespacing=1.1)
        for row, value in enumerate(values):
            page.text(middle, top + (row + 0.5) * _ROW, value, size=9, color=BLACK, ha="center", va="center")
    draw_scale(figure, image, _LEFT, (width, height), "share of a layer's assignments", 1 / num_experts)
    write_png(figure, output)


def _name_axes(axis: Any, layers: list[int], num_experts: int) -> None:
    step = 1 if num_experts <= MOST_NUMBERED else max(1, 2 ** ((num_experts - 1).bit_length() - 4))
    axis.set_xticks(ticks := range(0, num_experts, step), labels=[str(tick) for tick in ticks])
    axis.set_yticks(range(len(layers)), labels=[str(layer) for layer in layers])
    axis.tick_params(labelsize=8.5, colors=BLACK, length=0 if step == 1 else 2)
    axis.set_xlabel("expert", size=9, color=BLACK)
    axis.set_ylabel("layer", size=9, color=BLACK)
    edges = [place - 0.5 for place in range(1, num_experts)] if num_experts <= 64 else []
    axis.set_xticks(edges, minor=True)
    axis.set_yticks([place - 0.5 for place in range(1, len(layers))], minor=True)
    axis.grid(which="minor", color=EDGE, linewidth=0.8)
    axis.tick_params(which="minor", length=0)
    for spine in axis.spines.values():
        spine.set(color=EDGE, linewidth=0.8)
