"""How the vectors of some documents move between contexts, on a plane: CDE's Fig. 15."""

from collections.abc import Sequence
from pathlib import Path

from embeddings.figures.glyphs import drawable, installed_fonts, shortened
from embeddings.figures.page import write_heading
from embeddings.figures.png import pyplot, write_png
from embeddings.figures.projection import Plane
from embeddings.figures.shades import BLACK
from embeddings.inference.inspection import ContextualShift

# As many colours, and as many kinds of dots, can be told apart.
MOST_DOCUMENTS = 20
MOST_CORPORA = 6
_MARKERS = ("o", "^", "s", "v", "P", "X")
_NAME_COLUMNS = 48


def draw_contextual_shift(
    shift: ContextualShift, names: Sequence[str], corpora: Sequence[str], title: str, subtitle: str, output: Path
) -> None:
    """Draw documents' vectors in several contexts, a colour a document; a cross is the one without a context.

    The plane is the one in which the vectors in contexts differ most.

    Args:
        shift: The vectors.
        names: What each document is called, as many as there are.
        corpora: The corpus of each context, as many as there are: each corpus has a shape.
        title: The line above all.
        subtitle: What else is to be known, wrapped over lines.
        output: The PNG file to write.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    Source: Morris and Rush 2024 (CDE), arXiv:2410.02525, §10.5, Fig. 15: randomly drawn documents of one corpus
        (TREC-Covid), PCA of their vectors, a colour a document and a dot a context. Differs: the crosses, and a shape
        for each corpus that contexts are drawn from.
    """
    kinds = list(dict.fromkeys(corpora))
    assert len(names) <= MOST_DOCUMENTS
    assert len(kinds) <= MOST_CORPORA
    plt = pyplot()
    from matplotlib.lines import Line2D

    fonts = installed_fonts()
    num_contexts, num_documents, size = shift.vector_CND.shape
    plane = Plane.of(shift.vector_CND.reshape(-1, size))
    point_CN2 = plane.points(shift.vector_CND.reshape(-1, size)).reshape(num_contexts, num_documents, 2)
    alone_N2 = plane.points(shift.alone_ND)
    figure, axis = plt.subplots(figsize=(9, 6.5 + 0.1 * (num_documents + len(kinds) + 2)), layout="constrained")
    handles = []
    for document, name in enumerate(names):
        colour = plt.get_cmap("tab20")((2 * document) % 20 + (document >= 10))
        for kind, marker in zip(kinds, _MARKERS, strict=False):
            own = [context for context, corpus in enumerate(corpora) if corpus == kind]
            axis.scatter(*point_CN2[own, document].T, s=26, marker=marker, color=colour, alpha=0.75, linewidths=0)
        axis.scatter(*alone_N2[document], s=70, marker="x", color=[colour], linewidths=2)
        short = shortened(drawable(name, fonts.known), _NAME_COLUMNS)
        handles.append(Line2D([], [], color=colour, marker="o", linestyle="", label=short))
    kinds_shown = [shortened(drawable(kind, fonts.known), _NAME_COLUMNS) for kind in kinds]
    shapes = [
        Line2D([], [], color=BLACK, marker=marker, linestyle="", label=f"contexts of {shown}")
        for shown, marker in zip(kinds_shown, _MARKERS, strict=False)
    ]
    shapes.append(Line2D([], [], color=BLACK, marker="x", linestyle="", label="no context"))
    plane.name_axes(axis)
    write_heading(figure, axis, title, subtitle, 110)
    legend = figure.legend(handles=[*handles, *shapes], loc="outside lower left", frameon=False, ncols=2, fontsize=8.5)
    for text in legend.get_texts():
        text.set(parse_math=False, family=fonts.of_headings)
    write_png(figure, output)
