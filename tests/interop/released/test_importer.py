"""Importing a checkpoint: family, record, card, licence and usage, and protection against overwriting."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch.nn import functional as F

from embeddings.common import InputError, OptionError
from embeddings.inference import Encoder
from embeddings.interop.released import cde, decoders, import_released, importer
from embeddings.interop.released import nomic as released_nomic
from embeddings.interop.released.importer import load_directory, loader_of, usage_name
from embeddings.interop.released.nomic import load_dense as load
from embeddings.models import Embedder
from embeddings.models.model_files import IMPORT_FILE
from tests.helpers.interrupts import interrupted_at
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer
from tests.interop.released import nomic
from tests.interop.released.nomic import DENSE, MOE, nomic_folder
from tests.interop.released.published import TEXTS, assert_same, describe, encoded, write_checkpoint
from tests.models.contextual_models import tiny_contextual


def record_of(folder):
    return json.loads((folder / IMPORT_FILE).read_text())


def test_the_record_contains_the_commit_and_the_origin_of_every_tensor(tmp_path, monkeypatch):
    folder, state, _ = nomic_folder(tmp_path / "models--who--what" / "snapshots" / "0123abc", MOE)
    monkeypatch.setattr(importer, "resolve_model", lambda *_: folder)
    import_released("who/what", tmp_path / "ours", "main")
    record = record_of(tmp_path / "ours")
    assert (record["source"], record["revision"], record["base"]) == ("who/what", "0123abc", [])
    assert (record["family"], record["left"]) == ("Nomic's encoder with experts", [])
    assert sorted(record["used"]) == sorted(state)
    assert record["used"]["encoder.layers.1.mlp.experts.mlp.w2"] == ["layers.1.mlp.experts.w2"]
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert sorted(name for names in record["used"].values() for name in names) == sorted(ours)
    # A model that replaces an imported one has no record of a published source.
    Embedder.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "ours")
    assert not (tmp_path / "ours" / IMPORT_FILE).exists()


def test_the_source_is_never_written_and_an_interrupted_import_leaves_nothing(tmp_path, monkeypatch):
    folder, _, _ = nomic_folder(tmp_path / "published", MOE)
    with pytest.raises(OptionError, match="output must not be the source"):
        import_released(str(folder), folder)
    with pytest.raises(OptionError, match="revision cannot apply to"):
        import_released(str(folder), tmp_path / "ours", revision="main")
    # The model is written before record and card, and must not appear without them.
    for written in ("write_json", "write_model_card"):
        with monkeypatch.context() as patch:
            patch.setattr(importer, written, interrupted_at(print))
            with pytest.raises(KeyboardInterrupt):
                import_released(str(folder), tmp_path / "ours")
        assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_a_card_names_the_source_and_its_licence_and_copies_nothing(tmp_path):
    folder, state, _ = nomic_folder(tmp_path / "published", MOE)
    (folder / "README.md").write_text("---\ntags: [secret]\nlicense: apache-2.0\n---\n# Secret\nmy own words\n")
    import_released(str(folder), tmp_path / "ours")
    card = (tmp_path / "ours" / "README.md").read_text()
    for part in (
        "apache-2.0, as the source states.",
        "| imported from | .../published |",
        f"| tensors read | {len(state)} |",
        "trust_remote_code=True)",
    ):
        assert part in card
    assert not [word for word in ("ecret", "my own words") if word in card]
    # A generated card is replaced; a user's own card is not.
    (folder / "README.md").unlink()
    import_released(str(folder), tmp_path / "ours")
    assert "The source states none." in (tmp_path / "ours" / "README.md").read_text()
    (tmp_path / "ours" / "README.md").write_text("mine\n")
    import_released(str(folder), tmp_path / "ours")
    assert (tmp_path / "ours" / "README.md").read_text() == "mine\n"


def test_any_error_of_an_architecture_is_a_one_line_error(tmp_path, monkeypatch):
    def load(folder):
        raise AttributeError("no such field")

    folder, _, _ = nomic_folder(tmp_path / "published", DENSE)
    monkeypatch.setattr(released_nomic, "load_dense", load)
    with pytest.raises(InputError, match=r"config\.json: does not describe a valid model: .+; use a complete copy"):
        import_released(str(folder), tmp_path / "ours")


@pytest.mark.parametrize(
    ("config", "is_directory", "load"),
    [
        ({"model_type": "nvembed"}, True, decoders.load_nv_embed),
        (DENSE, False, released_nomic.load_dense),
        (MOE, True, released_nomic.load_moe),
        ({"model_type": "nomic_bert", "hidden_size": 4}, True, load_directory),
        ({"transductive_corpus_size": 512, "embedder": "nomic-ai/nomic-bert-2048"}, True, cde.load),
        ({"model_type": "bert"}, True, load_directory),
    ],
)
def test_the_config_determines_the_family(config, is_directory, load, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_directory:
        (tmp_path / "modules.json").write_text("[]")
    assert loader_of(tmp_path) is load


def test_another_family_and_a_contextual_model_of_this_library_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match="model_type 'bert' is not supported; import"):
        loader_of(tmp_path)
    tiny_contextual().save_pretrained(tmp_path / "ours")
    with pytest.raises(InputError, match="is already a model directory of this library; use it without"):
        load_directory(tmp_path / "ours")


V1_5 = "nomic-embed-text-v1.5"


@pytest.fixture
def wide(monkeypatch):
    """Nomic's formats at the published width."""
    monkeypatch.setattr(nomic, "HIDDEN", 768)
    return nomic


def folder_of(wide, folder, config=nomic.DENSE, layers=1, normalize=False):
    config = config | {"n_embd": 768, "n_layer": layers}
    _, state, tokenizer = wide.nomic_folder(folder, config, layers=layers)
    # A layer norm must have an effect: the mean over a vector's dimensions is not near zero.
    state[f"encoder.layers.{layers - 1}.norm2.bias"] += 0.5
    write_checkpoint(folder, config, state)
    describe(folder, 768, normalize=normalize)
    return folder, state, tokenizer


def used_as_published(state, tokenizer, prompt, width):
    """Mean of the states, layer norm over the full vector, truncation, and unit norm, step by step."""
    rows = []
    for text in TEXTS:
        ids = torch.tensor(tokenizer(prompt + text)["input_ids"])
        inputs = state["embeddings.word_embeddings.weight"][ids] + state["embeddings.token_type_embeddings.weight"][0]
        mean = nomic.encoder_states(state, nomic.DENSE, inputs, layers=1).mean(0)
        spread = mean - mean.sum() / 768
        spread = spread / (spread.square().sum() / 768 + 1e-5).sqrt()
        rows.append(spread[:width] / spread[:width].square().sum().sqrt())
    return torch.stack(rows)


@pytest.mark.usefixtures("remote_code")
def test_version_1_5_gives_the_vectors_of_its_card_at_every_width(wide, tmp_path):
    folder, state, tokenizer = folder_of(wide, tmp_path / V1_5)
    made = import_released(str(folder), tmp_path / "ours")
    assert made.used_as == V1_5
    plain = load(folder).model.eval()
    for width in (768, 64):
        options = {"precision": "float32", "dimensions": width}
        encoder = Encoder.from_pretrained(str(tmp_path / "ours"), device="cpu", **options)
        library = SentenceTransformer(str(tmp_path / "ours"), device="cpu", trust_remote_code=True, truncate_dim=width)
        for role, encode in (("document", library.encode_document), ("query", library.encode_query)):
            expected = used_as_published(state, tokenizer, f"search_{role}: ", width)
            assert_same(torch.from_numpy(encoder.encode(TEXTS, role=role)), expected)
            assert_same(F.normalize(torch.from_numpy(encode(TEXTS)), dim=-1), expected)
            # Without the layer norm the vectors differ, even at the full width.
            lost = torch.from_numpy(Encoder(plain, **options).encode(TEXTS, role=role))
            assert (F.normalize(lost, dim=-1) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("source", "known_as", "name"),
    [
        (f"nomic-ai/{V1_5}", None, V1_5),
        (f"cache/models--nomic-ai--{V1_5}/snapshots/0123abc", None, V1_5),
        ("some/copy", V1_5, V1_5),
        ("some/copy", None, None),
        (f"{V1_5}/finetuned", None, None),
    ],
)
def test_the_name_decides_which_model_it_is(source, known_as, name, wide, tmp_path):
    model = load(folder_of(wide, tmp_path / "published")[0]).model
    assert usage_name(model, source, known_as) == name


def test_a_copy_under_another_name_causes_a_warning(wide, tmp_path, caplog):
    folder, _, _ = folder_of(wide, tmp_path / "copy")
    import_released(str(folder), tmp_path / "ours")
    assert "if it is a copy, add --known-as nomic-embed-text-v1.5" in caplog.text
    assert record_of(tmp_path / "ours")["used_as"] is None
    caplog.clear()
    import_released(str(folder), tmp_path / "ours", known_as=V1_5)
    assert caplog.text == ""
    assert record_of(tmp_path / "ours")["used_as"] == V1_5


def test_a_mismatched_name_is_refused_as_an_option_and_ignored_in_a_path(tmp_path):
    folder, _, _ = nomic_folder(tmp_path / V1_5, DENSE)
    assert usage_name(load(folder).model, str(folder)) is None
    for known_as, rule in (
        (V1_5, "cannot apply to .* which has another backbone or width"),
        ("nomic-embed-text-v9", f"must be one of {V1_5}, nomic-embed-text-v2-moe"),
    ):
        with pytest.raises(OptionError, match=rule):
            import_released(str(folder), tmp_path / "ours", known_as=known_as)
    assert not (tmp_path / "ours").exists()


def test_the_norm_and_the_widths_stay_with_the_directory_and_with_one_imported_from_it(wide, tmp_path):
    import_released(str(folder_of(wide, tmp_path / V1_5)[0]), tmp_path / "ours")
    import_released(str(tmp_path / "ours"), tmp_path / "again")
    for name in ("ours", "again"):
        model = Embedder.from_pretrained(tmp_path / name)
        assert model.trained_widths == (768, 512, 256, 128, 64)
        assert list(model.norm.parameters()) == []
        assert model.normalize
    assert torch.equal(encoded(tmp_path / "ours"), encoded(tmp_path / "again"))


def directory(folder, **settings):
    """A sentence-transformers directory of a BERT with an unused pooler."""
    save_backbone(str(folder), tiny_bert(), wordpiece_tokenizer())
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | {"pooler.dense.bias": torch.zeros(32)}, weights, metadata={"format": "pt"})
    describe(folder, 32, **settings)
    return folder


def test_a_directory_of_sentence_transformers_gives_its_vectors(tmp_path):
    folder = directory(tmp_path / "published", prompts={"query": "question: "})
    made = load_directory(folder)
    assert made.report.left == ["pooler.dense.bias"]
    assert "embeddings.word_embeddings.weight" in made.report.used
    made.model.save_pretrained(tmp_path / "ours")
    expected = SentenceTransformer(str(folder), device="cpu").encode_query(TEXTS)
    assert_same(encoded(tmp_path / "ours", role="query"), torch.from_numpy(expected))


def test_a_folder_without_modules_json_has_mean_pooling_and_unit_norm(tmp_path):
    folder = directory(tmp_path / "published")
    (folder / "modules.json").unlink()
    embedder = load_directory(folder).model
    assert isinstance(embedder, Embedder)
    assert (embedder.normalize, embedder.text.pool_prompt, embedder.text.document_max_length) == (True, True, 128)
