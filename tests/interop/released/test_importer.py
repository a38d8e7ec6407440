import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForMaskedLM

from embeddings.common import InputError, OptionError
from embeddings.interop.released import import_released, importer, nomic
from embeddings.models import Embedder
from embeddings.models.model_files import IMPORT_FILE
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer
from tests.interop.released.nomic import DENSE, HIDDEN, MOE, nomic_folder
from tests.interop.released.published import describe, encoded, write_checkpoint


def test_a_record_beside_the_model_names_what_every_tensor_came_from(tmp_path):
    folder, state, _ = nomic_folder(tmp_path / "published", MOE)
    import_released(str(folder), tmp_path / "ours")
    record = json.loads((tmp_path / "ours" / IMPORT_FILE).read_text())
    assert (record["source"], record["family"], record["left"]) == (str(folder), "Nomic's encoder with experts", [])
    assert sorted(record["used"]) == sorted(state)
    assert record["used"]["encoder.layers.1.mlp.experts.mlp.w2"] == ["layers.1.mlp.experts.w2"]


def test_the_record_names_our_tensors_and_the_commit_that_was_read(tmp_path, monkeypatch):
    folder = tmp_path / "models--who--what" / "snapshots" / "0123abc"
    model = BertForMaskedLM(tiny_bert().config)
    save_backbone(str(folder), model, wordpiece_tokenizer())
    describe(folder, 32)
    monkeypatch.setattr(importer, "resolve_model", lambda *_: folder)
    import_released("who/what", tmp_path / "ours", "main")
    record = json.loads((tmp_path / "ours" / IMPORT_FILE).read_text())
    assert (record["source"], record["revision"], record["base"]) == ("who/what", "0123abc", [])
    name = "embeddings.word_embeddings.weight"
    assert record["used"][f"bert.{name}"] == [name]
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert sorted(name for names in record["used"].values() for name in names) == sorted(ours)


def test_an_earlier_model_is_replaced_with_its_record(tmp_path):
    folder, _, _ = nomic_folder(tmp_path / "published", MOE)
    import_released(str(folder), tmp_path / "ours")
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    first = encoded(tmp_path / "ours")
    other, _, _ = nomic_folder(tmp_path / "other", DENSE)
    import_released(str(other), tmp_path / "ours")
    assert not (tmp_path / "ours" / "rotary_moe.py").exists()
    assert (encoded(tmp_path / "ours") - first).abs().max() > 1e-2
    assert (tmp_path / "ours" / "notes.txt").read_text() == "mine"
    # A model that is written over an imported one has no published source.
    embedder = Embedder.from_pretrained(tmp_path / "ours")
    Embedder(tiny_bert(), wordpiece_tokenizer(), embedder.pooling).save_pretrained(tmp_path / "ours")
    assert not (tmp_path / "ours" / IMPORT_FILE).exists()


def test_a_card_names_the_source_and_its_licence_and_copies_nothing(tmp_path):
    folder, state, _ = nomic_folder(tmp_path / "published", MOE)
    (folder / "README.md").write_text("---\ntags: [secret]\nlicense: apache-2.0\n---\n# Secret\nmy own words\n")
    import_released(str(folder), tmp_path / "ours")
    card = (tmp_path / "ours" / "README.md").read_text()
    for part in (
        "# ours\n",
        "license: apache-2.0\n",
        "apache-2.0, as the source states.",
        "| imported from | .../published |",
        "| kind of checkpoint | Nomic's encoder with experts |",
        f"| tensors read | {len(state)} |",
        "| `'query'` | `'search_query: '` |",
        "SentenceTransformer('ours', trust_remote_code=True)",
    ):
        assert part in card
    assert str(tmp_path) not in card
    assert not [word for word in ("ecret", "my own words") if word in card]
    # A card of ours makes way for the next one, one by hand stays.
    (folder / "README.md").unlink()
    import_released(str(folder), tmp_path / "ours")
    assert "The source states none." in (tmp_path / "ours" / "README.md").read_text()
    (tmp_path / "ours" / "README.md").write_text("mine\n")
    import_released(str(folder), tmp_path / "ours")
    assert (tmp_path / "ours" / "README.md").read_text() == "mine\n"


def test_a_language_model_has_a_record_and_no_card(tmp_path):
    config = DENSE | {"architectures": ["NomicBertForPreTraining"]}
    folder, state, _ = nomic_folder(tmp_path / "published", config, prefix="bert.")
    head = {"cls.predictions.transform.dense.weight": torch.zeros(HIDDEN, HIDDEN)}
    head |= {f"cls.predictions.transform.layer_norm.{kind}": torch.ones(HIDDEN) for kind in ("weight", "bias")}
    write_checkpoint(folder, config, state | head)
    import_released(str(folder), tmp_path / "ours")
    assert (tmp_path / "ours" / IMPORT_FILE).is_file()
    assert not (tmp_path / "ours" / "README.md").exists()


@pytest.mark.parametrize("is_first", [True, False])
def test_at_every_moment_the_directory_is_whole_or_not_there(is_first, tmp_path, monkeypatch):
    """What a kill would leave is what lies there before and after each step of the file system."""
    folder, _, _ = nomic_folder(tmp_path / "published", MOE)
    target = tmp_path / "ours"
    if not is_first:
        import_released(str(folder), target)
    first = sorted(path.name for path in target.iterdir()) if target.exists() else None
    replace, seen = os.replace, []

    def names():
        return sorted(path.name for path in target.iterdir()) if target.exists() else None

    def watched(source, destination):
        seen.append(names())
        replace(source, destination)
        seen.append(names())

    monkeypatch.setattr(os, "replace", watched)
    import_released(str(folder), target)
    assert {IMPORT_FILE, "README.md", "modules.json", "model.safetensors"} <= set(names())
    assert len(seen) > 2
    # In between an earlier model is whole beside its place.
    assert all(found in (None, first, names()) for found in seen)
    assert seen[-1] == names()


def test_a_kill_before_the_record_is_written_leaves_nothing_new(tmp_path, monkeypatch):
    folder, _, _ = nomic_folder(tmp_path / "published", MOE)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importer, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        import_released(str(folder), tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_what_was_imported_can_be_imported_again(tmp_path):
    folder, _, _ = nomic_folder(tmp_path / "published", DENSE)
    import_released(str(folder), tmp_path / "once")
    import_released(str(tmp_path / "once"), tmp_path / "twice")
    assert (encoded(tmp_path / "once") - encoded(tmp_path / "twice")).abs().max() == 0


@pytest.mark.parametrize("error", [KeyError("None"), IndexError("no row"), AttributeError("no such field")])
def test_whatever_a_config_meets_in_an_architecture_is_one_line(error, tmp_path, monkeypatch):
    def load(folder, assumed):
        raise error

    folder, _, _ = nomic_folder(tmp_path / "published", DENSE)
    monkeypatch.setattr(nomic, "load_dense", load)
    with pytest.raises(InputError, match=r"config\.json: makes no model: .+; take a whole copy"):
        import_released(str(folder), tmp_path / "ours")


def test_a_source_is_never_written_to(tmp_path):
    folder, _, _ = nomic_folder(tmp_path / "published", MOE)
    with pytest.raises(OptionError, match="output must not be the source"):
        import_released(str(folder), folder)
    with pytest.raises(OptionError, match="revision cannot apply to"):
        import_released(str(folder), tmp_path / "ours", revision="main")
    with pytest.raises(InputError, match="is no directory"):
        import_released("nowhere/at/all", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]
