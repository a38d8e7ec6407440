import sys

import pytest

from embeddings.common import InputError
from embeddings.common.errors import MissingExtraError
from embeddings.figures.png import check_output, pyplot, write_png

pytest.importorskip("matplotlib")


def test_an_output_may_be_new_or_an_old_file(tmp_path):
    (tmp_path / "old.png").write_bytes(b"old")
    for name in ("old.png", "new.png", "new/folder/new.png"):
        check_output(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]


@pytest.mark.parametrize(("name", "what"), [("", "is a directory"), ("file/a/b.png", "leads through .*file, which")])
def test_an_output_that_cannot_be_is_refused(name, what, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=what):
        check_output(tmp_path / name)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed; run: pip install -e '\.\[quickstart\]'"):
        check_output(tmp_path / "a.png")


def test_a_figure_is_written_whole_and_let_go(tmp_path):
    plt = pyplot()
    before = plt.get_fignums()
    write_png(plt.figure(figsize=(1, 1)), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OSError, match="Is a directory"):
        write_png(plt.figure(figsize=(1, 1)), tmp_path)
    assert plt.get_fignums() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
