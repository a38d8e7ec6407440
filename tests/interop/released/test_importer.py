import json

import pytest

from embeddings.common import InputError, OptionError
from embeddings.interop.released import import_released
from embeddings.models import Embedder
from embeddings.models.model_files import IMPORT_FILE
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.interop.released.nomic import DENSE, MOE, nomic_folder
from tests.interop.released.published import encoded


def test_a_record_beside_the_model_names_what_every_tensor_came_from(tmp_path):
    folder, state, _ = nomic_folder(tmp_path / "published", MOE)
    import_released(str(folder), tmp_path / "ours")
    record = json.loads((tmp_path / "ours" / IMPORT_FILE).read_text())
    assert (record["source"], record["family"], record["left"]) == (str(folder), "Nomic's encoder with experts", [])
    assert sorted(record["used"]) == sorted(state)
    assert record["used"]["encoder.layers.1.mlp.experts.mlp.w2"] == ["layers.1.mlp.experts.w2"]


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


def test_what_was_imported_can_be_imported_again(tmp_path):
    folder, _, _ = nomic_folder(tmp_path / "published", DENSE)
    import_released(str(folder), tmp_path / "once")
    import_released(str(tmp_path / "once"), tmp_path / "twice")
    assert (encoded(tmp_path / "once") - encoded(tmp_path / "twice")).abs().max() == 0


def test_a_source_is_never_written_to(tmp_path):
    folder, _, _ = nomic_folder(tmp_path / "published", MOE)
    with pytest.raises(OptionError, match="output must not be the source"):
        import_released(str(folder), folder)
    with pytest.raises(OptionError, match="revision cannot apply to"):
        import_released(str(folder), tmp_path / "ours", revision="main")
    with pytest.raises(InputError, match="is no directory"):
        import_released("nowhere/at/all", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]
