"""A finished file is known by its manifest, and work of no use leaves nothing behind."""

import pytest

from embeddings.common import InputError
from embeddings.common.fileio import file_sha256, write_manifest_file
from embeddings.mining.outputs import finished_manifest, manifest_path, nothing_left_of


def test_the_manifest_lies_beside_the_file(tmp_path):
    assert manifest_path(tmp_path / "kept.parquet") == tmp_path / "kept.manifest.json"


def test_a_file_is_finished_where_its_manifest_and_content_fit(tmp_path):
    output, fields = tmp_path / "a.parquet", {"seed": 1, "rules": {"top_k": 2}}
    write_manifest_file(manifest_path(output), fields)
    assert finished_manifest(output, fields) is None
    output.write_text("content")
    write_manifest_file(manifest_path(output), {**fields, "output_sha256": file_sha256(output), "count": 3})
    assert finished_manifest(output, fields)["count"] == 3
    with pytest.raises(InputError, match=r"a\.manifest\.json: field 'seed' is 1, expected 2"):
        finished_manifest(output, {**fields, "seed": 2})
    output.write_text("other content")
    with pytest.raises(InputError, match="is not the file that its manifest describes; delete it"):
        finished_manifest(output, fields)
    manifest_path(output).unlink()
    with pytest.raises(InputError, match="something else lies there already; name a new file"):
        finished_manifest(output, fields)


@pytest.mark.parametrize("error", [InputError("where", "what", "fix"), KeyboardInterrupt(), RuntimeError()])
def test_folders_go_again_where_a_person_was_wrong_and_stay_otherwise(error, tmp_path):
    old, new = tmp_path / "old", tmp_path / "parent" / "new"
    old.mkdir()
    (old / "earlier shard").write_text("x")

    def work():
        (old / "shard").write_text("x")
        new.mkdir(parents=True)
        (new / "shard").write_text("x")
        raise error

    with pytest.raises(type(error)), nothing_left_of(old, new):
        work()
    assert (old / "shard").exists()
    assert new.exists() == new.parent.exists() == (not isinstance(error, InputError))


def test_a_folder_that_was_empty_is_emptied_again(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()

    def work():
        (folder / "work" / "shards").mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        raise InputError("where", "what", "fix")

    with pytest.raises(InputError), nothing_left_of(folder):
        work()
    assert list(tmp_path.rglob("*")) == [folder]


def test_folders_stay_where_all_went_well(tmp_path):
    with nothing_left_of(tmp_path / "new"):
        (tmp_path / "new").mkdir()
    assert (tmp_path / "new").is_dir()
