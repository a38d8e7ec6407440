import errno
import json
import os
import stat

import pytest

from embeddings.common import InputError
from embeddings.common.fileio import (
    atomic_path,
    check_manifest,
    check_room,
    file_sha256,
    installed_versions,
    text_hash,
    write_json,
    write_manifest,
    write_text,
)
from tests.helpers.disks import fake_disk


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path):
    target = tmp_path / "value.json"
    write_text(target, "old")

    def fail_half_way():
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail_half_way()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]


def test_the_file_appears_only_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "value.txt"
    with atomic_path(target) as temporary:
        temporary.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"


def test_the_bytes_reach_the_disk_before_the_name_changes(tmp_path, monkeypatch):
    order = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b)))
    write_text(tmp_path / "x", "text")
    assert order == ["fsync", "rename", "fsync"]


def test_the_mode_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_text(tmp_path / "x", "text")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_json_keeps_letters_of_every_script(tmp_path):
    write_json(tmp_path / "x.json", {"text": "東京 é"})
    assert "東京" in (tmp_path / "x.json").read_text(encoding="utf-8")


def test_file_sha256_is_the_standard_digest(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert file_sha256(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_text_hash_is_stable_and_ignores_outer_white_space():
    assert text_hash(" abc\n") == text_hash("abc") == 6455300059550759896
    assert text_hash("abc") != text_hash("Abc")
    assert -(2**63) <= text_hash("\ud800 lone surrogate") < 2**63


def test_a_manifest_mismatch_names_the_field_and_both_values(tmp_path):
    write_manifest(tmp_path, {"model": "a", "rows": 3})
    check_manifest(tmp_path, {"model": "a"})
    with pytest.raises(InputError, match="field 'rows' is 3, expected 4"):
        check_manifest(tmp_path, {"model": "a", "rows": 4})
    assert json.loads((tmp_path / "manifest.json").read_text())["versions"]["torch"]


def test_long_values_are_shown_by_their_beginning(tmp_path):
    write_manifest(tmp_path, {"sha256": "a" * 64})
    with pytest.raises(InputError, match=r"field 'sha256' is 'a{46}…, expected 'b{46}…; make") as caught:
        check_manifest(tmp_path, {"sha256": "b" * 64})
    assert len(str(caught.value).removeprefix(str(tmp_path))) < 200


def test_a_field_that_is_not_there_or_no_whole_number_is_refused(tmp_path):
    write_manifest(tmp_path, {"rows": 3, "name": "a", "none": 0, "flag": True})
    fields = check_manifest(tmp_path, {})
    assert (fields.whole("rows"), fields.whole("none"), fields.get("gone")) == (3, 0, None)
    with pytest.raises(InputError, match=r"manifest\.json: has no field 'gone'; make the output again"):
        fields["gone"]
    for name, least in (("name", 0), ("none", 1), ("flag", 0)):
        with pytest.raises(InputError, match=rf"field '{name}' is .*, expected a whole number >= {least}"):
            fields.whole(name, least)


def test_a_missing_manifest_is_refused(tmp_path):
    with pytest.raises(InputError, match="no manifest"):
        check_manifest(tmp_path, {})


@pytest.mark.parametrize("content", [b"", b"{", b'{"kind": "a', b"[1]", b"null", b"\xff\xfe"])
def test_a_damaged_manifest_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match=r"manifest\.json: is empty or damaged; make the output again"):
        check_manifest(tmp_path, {})


def test_versions_name_python_and_torch():
    assert {"python", "torch", "transformers"} <= set(installed_versions())


def test_room_is_asked_of_the_disk_that_a_place_is_to_be_on(tmp_path, monkeypatch):
    asked = fake_disk(monkeypatch, free=100)
    place = tmp_path / "not" / "yet" / "there"
    check_room(place, 100)
    check_room(place, 150, spare_bytes=50)
    with pytest.raises(OSError, match="No space left on device: 1,101 bytes are needed and 100 available") as failure:
        check_room(place, 1101, spare_bytes=1000)
    assert (failure.value.errno, failure.value.filename) == (errno.ENOSPC, str(place))
    monkeypatch.chdir(tmp_path)
    check_room("folder/file", 1)
    check_room(tmp_path, 1)
    assert asked == [tmp_path] * 5
    fake_disk(monkeypatch, free=0, total=0)
    check_room(place, 10**12)
