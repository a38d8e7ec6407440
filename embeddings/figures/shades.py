"""One colour scale for all shaded pictures: white for nothing, dark red for the most."""

from typing import Any

from embeddings.figures.png import pyplot

GREY, BLACK, EDGE = "#777777", "#1a1a1a", "#e4dccb"


def shades() -> Any:
    """The colour map, from 0 to 1.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    plt = pyplot()
    from matplotlib.colors import LinearSegmentedColormap

    paler = [plt.get_cmap("YlOrRd")(place / 100) for place in range(0, 86, 5)]
    return LinearSegmentedColormap.from_list("shades", [(1, 1, 1, 1), *paler])


def is_dark(shade: tuple[float, ...]) -> bool:
    """Whether letters on a shade (red, green, blue, from 0 to 1) must be white."""
    return 0.299 * shade[0] + 0.587 * shade[1] + 0.114 * shade[2] < 0.5
