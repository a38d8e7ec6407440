"""Output files, pages and line styles of all figures."""

from pathlib import Path

import pytest

from embeddings.figures.drawing import (
    MAX_NAME_LENGTH,
    line_label,
    pyplot,
    run_names,
    write_heading,
    write_png,
)

pytest.importorskip("matplotlib")


def test_a_figure_is_written_atomically_and_closed(tmp_path):
    plt = pyplot()
    before = plt.get_fignums()
    write_png(plt.figure(figsize=(1, 1)), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OSError, match="Is a directory"):
        write_png(plt.figure(figsize=(1, 1)), tmp_path)
    assert plt.get_fignums() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_runs_of_one_name_have_their_paths_as_names():
    runs = [Path("a/x/version_0"), Path("b/x/version_0"), Path("b/x/version_1")]
    assert run_names(runs) == ["a/x/version_0", "b/x/version_0", "x/version_1"]


def test_a_label_is_escaped_visible_and_short():
    assert line_label("$x$") == r"\$x\$"
    assert line_label("_hidden") == " _hidden"
    long = line_label("begin" + "x" * MAX_NAME_LENGTH + "end")
    assert len(long) == MAX_NAME_LENGTH
    assert long.startswith("…")
    assert long.endswith("end")


def test_a_character_without_a_font_needs_no_warning(recwarn, tmp_path):
    figure, axis = pyplot().subplots()
    write_heading(figure, axis, "$\\a{$\ufdd0", "about 東", 40)
    assert figure.get_suptitle() == "$\\a{$\ufdd0"
    write_png(figure, tmp_path / "a.png")
    assert [warning for warning in recwarn if "Glyph" in str(warning.message)] == []
