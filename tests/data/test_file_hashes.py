import hashlib
import os

import pytest

from embeddings.common import InputError
from embeddings.data import store
from embeddings.data.store import hash_file, remember_hash


@pytest.fixture
def reads(monkeypatch):
    """The files that were read to be hashed."""
    seen, real = [], store.file_sha256
    monkeypatch.setattr(store, "file_sha256", lambda path: (seen.append(path), real(path))[1])
    return seen


def test_a_remembered_file_is_not_read_again_until_it_changes(tmp_path, reads):
    path, memory = tmp_path / "a", tmp_path / "memory"
    path.write_bytes(b"one")
    first = hash_file(path, memory)
    assert first.sha256 == hashlib.sha256(b"one").hexdigest()
    remember_hash(first, memory)
    assert hash_file(path, memory) == first
    assert reads == [path]
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not first.is_current()
    assert hash_file(path, memory).sha256 == hashlib.sha256(b"two").hexdigest()
    assert len(reads) == 2


def test_a_file_that_was_not_remembered_writes_nothing(tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    assert hash_file(tmp_path / "a", tmp_path / "memory").is_current()
    assert os.listdir(tmp_path) == ["a"]


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "memory").write_bytes(b"a file, no folder")
    remember_hash(hash_file(tmp_path / "a", tmp_path / "none"), tmp_path / "memory")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        hash_file(tmp_path / "gone", tmp_path)
