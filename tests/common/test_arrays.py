import io

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.common.arrays import load_array


def content():
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6, dtype=np.float32).reshape(2, 3))
    return buffer.getvalue()


def of_shape(shape):
    """The same content under a header that says another shape."""
    spare = " " * (len(shape) - len("(2, 3)"))
    return content().replace(f"(2, 3), }}{spare}".encode(), f"{shape}, }}".encode())


def archive():
    buffer = io.BytesIO()
    np.savez(buffer, one=np.ones(2))
    return buffer.getvalue()


class Payload:
    def __reduce__(self):
        return open, ("canary", "w")


def test_an_array_is_read_whole_or_mapped(tmp_path):
    (tmp_path / "a.npy").write_bytes(content())
    assert load_array(tmp_path / "a.npy", "x").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert isinstance(load_array(tmp_path / "a.npy", "x", mapped=True), np.memmap)
    np.savez(tmp_path / "a.npz", one=np.ones(2))
    with load_array(tmp_path / "a.npz", "x") as archive:
        assert archive["one"].tolist() == [1, 1]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        content()[:-5],
        content()[:20],
        content().replace(b"(2, 3)", b"(2, 3*"),
        content().replace(b"'<f4'", b"'<q9'"),
        content().replace(b"}", b" "),
        content().replace(b"(2, 3)", b"(-2,3)"),
        of_shape("(10000000, 300)"),
        of_shape("(9999999999, 9999)"),
        archive(),
    ],
)
def test_what_is_no_array_is_one_line(data, mapped, tmp_path):
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.npy: is missing, empty or damaged; make it again$"):
        load_array(tmp_path / "a.npy", "make it again", mapped)


def test_a_file_that_is_not_there_and_one_of_objects_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "a.npy", np.array([Payload()], dtype=object), allow_pickle=True)
    for name in ("a.npy", "gone.npy"):
        with pytest.raises(InputError, match=rf"{name}: is missing, empty or damaged"):
            load_array(tmp_path / name, "x")
    assert not (tmp_path / "canary").exists()


def test_an_array_is_no_archive(tmp_path):
    (tmp_path / "a.npz").write_bytes(content())
    with pytest.raises(InputError, match=r"a\.npz: is missing, empty or damaged"):
        load_array(tmp_path / "a.npz", "x")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError()])
def test_what_is_no_fault_of_the_file_is_raised_as_it_is(error, tmp_path, monkeypatch):
    (tmp_path / "a.npy").write_bytes(content())
    load = np.load

    def fail(path, mmap_mode, **options):
        if mmap_mode is None:
            raise error
        return load(path, mmap_mode, **options)

    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(type(error)) as raised:
        load_array(tmp_path / "a.npy", "x")
    assert raised.value is error
