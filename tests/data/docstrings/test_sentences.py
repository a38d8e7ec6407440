import pytest

from embeddings.data.docstrings.extract import MAX_WORDS, MIN_WORDS, first_sentence


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Pad sequences to one length. More follows.", "Pad sequences to one length"),
        ("Pad sequences to one length", "Pad sequences to one length"),
        ("\n    Pad sequences\n    to one length.\n\n    Args:\n        x: y.\n", "Pad sequences to one length"),
        ("Cut text, e.g. at stops, into parts. Then stop.", "Cut text, e.g. at stops, into parts"),
        ("Read the file setup.cfg from disk. Then stop.", "Read the file setup.cfg from disk"),
        ("Scale all values by 0.5 at once. Then stop.", "Scale all values by 0.5 at once"),
        ("Find the roots of x. Consider also y here.", "Find the roots of x"),
        ("Compute what A. Turing wrote down once. Then stop.", "Compute what A. Turing wrote down once"),
        ("Is this graph a tree? True if it is.", "Is this graph a tree"),
        ("Return a :class:`~torch.Tensor` of :func:`numpy.ones` values.", "Return a Tensor of numpy.ones values"),
        ("Draw :meth:`a line <Axes.plot>` in ``red`` and `blue`.", "Draw a line in red and blue"),
        ("Make *all* of the **words** plain again.", "Make all of the words plain again"),
        ("Fit the `line <https://x.org/y>`_ as in [1]_ by hand.", "Fit the line as in by hand"),
        ("Fit the [line](https://x.org/y) once more.", "Fit the line once more"),
        ("Multiply a*b and c*d for us.", "Multiply a*b and c*d for us"),
        ("mean(x, axis=None) -> float\n\nAverage of all the values.", "Average of all the values"),
        ("mean(x,\n\nAverage of all the values.", "Average of all the values"),
        ("Gather the tensors\n:param x: what to gather", None),
        ("Gather all of the tensors\n:param x: what to gather", "Gather all of the tensors"),
        ("Gather all of the tensors\nx: what to gather from them", "Gather all of the tensors"),
        ("Gather all of the tensors\nThis is collective, and slow.", "Gather all of the tensors"),
        (
            "Gather every one of the tensors that lie on the ranks of\nPyTorch so that all have them.",
            "Gather every one of the tensors that lie on the ranks of PyTorch so that all have them",
        ),
        ("Load the state of\n:class:`Optimizer` from disk.", "Load the state of Optimizer from disk"),
        ("+\nFold the long headers at spaces.", "Fold the long headers at spaces"),
    ],
)
def test_the_first_sentence_is_found_and_cleaned(docstring: str, sentence: str | None) -> None:
    assert first_sentence(docstring) == sentence


@pytest.mark.parametrize(
    "docstring",
    [
        "",
        "   \n ",
        "Args:\n    x: the value that is squared here",
        ":param x: the value that is squared here",
        ">>> pad(x) and then some more words",
        "See the base class for details.",
        "Deprecated since version two of this.",
        "Initialize self.  See help(type(self)) for accurate signature.",
        "This method must be overridden by subclasses.",
        "One of the following things:",
        "x = a + b * (c - d) / e ** f",
        "返回 所有 张量 的 平均 值",
    ],
)
def test_what_says_too_little_is_no_query(docstring: str) -> None:
    assert first_sentence(docstring) is None


def test_the_number_of_words_is_bounded_on_both_sides() -> None:
    for count, usable in ((MIN_WORDS - 1, False), (MIN_WORDS, True), (MAX_WORDS, True), (MAX_WORDS + 1, False)):
        assert (first_sentence(" ".join(["word"] * count)) is not None) == usable
