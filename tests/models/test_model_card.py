"""The card of a model directory, and its upload to the Hub."""

import json
from pathlib import Path

import pytest
import yaml

from embeddings.cli.main import main
from embeddings.common import InputError, TextSettings
from embeddings.common.own_folder import replaced_folder
from embeddings.inference import Encoder
from embeddings.models import Embedder, MeanPooling, push_to_hub
from embeddings.models.model_card import (
    ImportFacts,
    TrainingFacts,
    add_scores,
    keeps_card,
    own_files,
    stated_licence,
    write_model_card,
)
from embeddings.models.model_files import is_own_card
from tests.helpers.hub_server import OWNER, TOKEN, fake_hub
from tests.helpers.refusals import assert_refused
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual

CONFIG = {
    "seed_everything": 3,
    "trainer": {"precision": "bf16-mixed", "max_epochs": 1, "max_steps": None, "default_root_dir": "/secret/place"},
    "model": {
        "class_path": "embeddings.modules.NVEmbedModule",
        "init_args": {
            "backbone": {"name": "all-MiniLM-L6-v2", "revision": None},
            "initial_model": "/secret/place/stage1",
            "loss": {"class_path": "embeddings.losses.InfoNCE", "init_args": {"temperature": 0.05}},
        },
    },
    "data": {
        "class_path": "embeddings.data.EmbeddingDataModule",
        "init_args": {
            "batch_size": 32,
            "cache_dir": "/secret/place/cache",
            "sources": [
                {"name": "faq", "path": "/secret/place/faq.jsonl", "licence": "CC BY 4.0"},
                {"name": "a|b <script>", "path": "hub:org/pairs", "licence": None},
            ],
        },
    },
}
RECORD = {"commit": "abc+", "world_size": 2, "source_rows": {"faq": 1234}}
FACTS = TrainingFacts(CONFIG, 36, RECORD, [(18, 0.5), (36, 0.625)])
SCORES = [
    {"name": "eval/faq", "kind": "retrieval", "metrics": {"ndcg_at_10": 0.7768, "mrr": 1.0}, "dimensions": None},
    {"name": "[x](evil)", "kind": "sts", "metrics": {"cosine_spearman": 0.5}, "dimensions": 8},
]


def embedder(**text):
    settings = TextSettings(64, 32, **text)
    return Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32), text=settings, trained_widths=(32, 8)).eval()


def card(folder, model, *arguments, scores=None, **options):
    model.save_pretrained(folder)
    if scores is not None:
        (folder / "scores.json").write_text(json.dumps(scores))
    write_model_card(folder, model, *arguments, **options)
    return (folder / "README.md").read_text()


def front_matter(text):
    _, yaml_text, _ = text.split("---\n", 2)
    return yaml.safe_load(yaml_text)


def assert_has(text, *parts):
    assert [part for part in parts if part not in text] == []


def test_the_front_matter_has_the_fields_of_the_hub_and_scores_as_model_index(tmp_path):
    fields = front_matter(card(tmp_path / "model", embedder(), FACTS, licence="apache-2.0", scores=SCORES))
    (index,) = fields.pop("model-index")
    assert fields == {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "sentence-similarity", "feature-extraction"],
        "base_model": "sentence-transformers/all-MiniLM-L6-v2",
        "datasets": ["org/pairs"],
        "license": "apache-2.0",
    }
    assert index["name"] == "model"
    found = {result["dataset"]["name"]: (result["task"]["type"], result["metrics"]) for result in index["results"]}
    faq = [{"type": "ndcg_at_10", "value": 0.7768}, {"type": "mrr", "value": 1.0}]
    assert found["eval/faq"] == ("retrieval", faq)
    assert found["[x](evil)"] == ("sts", [{"type": "cosine_spearman", "value": 0.5}])
    assert front_matter(card(tmp_path / "other", embedder())).keys() == {"library_name", "pipeline_tag", "tags"}


def test_the_card_states_the_training_its_data_and_the_scores(tmp_path):
    text = card(tmp_path / "model", embedder(prompts={"query": "q|`: "}), FACTS, scores=SCORES)
    assert_has(
        text,
        "vectors of 32 dimensions, trained to be truncated to 32, 8",
        "| method | NVEmbedModule |",
        "| loss | InfoNCE |",
        "| optimiser steps | 36 |",
        "| faq | files | 1,234 | CC BY 4.0 |",
        r"| a\|b \<script\> | org/pairs | unknown | unknown |",
        "| eval/faq | retrieval | ndcg\\_at\\_10 | 0.777 | all |",
        r"\[x\](evil)",
        "0.625 after 36 steps",
        "temperature: 0.05",
        "batch_size: 32",
        ".../stage1",
        "| `'query'` | `'q∣’: '` |",
        "## Licence\n\nNot stated.",
    )
    assert [word for word in ("secret", "null", "curves.png") if word in text] == []
    with replaced_folder(tmp_path / "model") as new:
        embedder().save_pretrained(new)
        (new / "curves.png").write_bytes(b"")
        write_model_card(new, embedder(), FACTS)
    assert "(curves.png)" in (tmp_path / "model" / "README.md").read_text()
    # The next model in the folder does not keep the curves of this one.
    assert "curves.png" not in card(tmp_path / "model", embedder(), FACTS)


def test_the_card_of_an_imported_model_states_its_sources(tmp_path):
    bases = ("org/base", "/secret/place/decoder")
    origin = ImportFacts("org/model", "abc|", bases, "LLM2Vec's adapters", None, 1234, 0)
    text = card(tmp_path / "model", embedder(), origin, licence="mit", location=Path("mine"))
    assert front_matter(text)["base_model"] == ["org/model", "org/base"]
    assert front_matter(text)["license"] == "mit"
    assert_has(
        text,
        "\n# mine\n",
        "SentenceTransformer('mine'",
        "| imported from | org/model |",
        r"| revision | abc\| |",
        "| merged into | org/base, .../decoder |",
        "| kind of checkpoint | LLM2Vec's adapters |",
        "| tensors read | 1,234 |",
        "| tensors left out | 0 |",
        "is in `import.json`",
        "## Licence\n\nmit, as the source states.",
    )
    assert [word for word in ("secret", "vectors computed as for", "## Training") if word in text] == []
    local = ImportFacts("/secret/place/model", None, (), "NV-Embed", "nomic-embed-text-v1.5", 1, 2)
    text = card(tmp_path / "local", embedder(), local)
    used_as = "| vectors computed as for | nomic-embed-text-v1.5 |"
    assert_has(text, "| imported from | .../model |", used_as, "## Licence\n\nThe source states none.")
    assert "revision" not in text
    assert "base_model" not in front_matter(text)


def test_the_usage_examples_run(tmp_path, monkeypatch, remote_code):
    monkeypatch.chdir(tmp_path)
    for name, model in (
        ("plain", embedder()),
        ("with_code", embedder(prompts={"query": "q:"})),
        ("contextual", tiny_contextual()),
    ):
        text = card(tmp_path / name, model)
        assert ("trust_remote_code" in text) == ("custom_code" in text) == (name != "plain")
        blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
        assert len(blocks) == 2
        for block in blocks:
            names = {"documents_of_your_corpus": ["the lazy dog"]}
            exec(block, names)
            assert "similarity" in names or names["vectors"].shape == (1, 32)


def test_a_generated_card_is_replaced_with_its_model_and_a_handwritten_card_is_kept(tmp_path):
    model = embedder()
    card(tmp_path / "model", model, FACTS)
    assert is_own_card(tmp_path / "model" / "README.md")
    model.save_pretrained(tmp_path / "model", card=False)
    assert not (tmp_path / "model" / "README.md").exists()
    model.save_pretrained(tmp_path / "model")
    text = (tmp_path / "model" / "README.md").read_text()
    assert f"SentenceTransformer({str(tmp_path / 'model')!r})" in text
    assert "## Training" not in text
    (tmp_path / "model" / "README.md").write_text("mine\n")
    model.save_pretrained(tmp_path / "model")
    assert card(tmp_path / "model", model, FACTS) == "mine\n"
    assert not is_own_card(tmp_path / "model" / "README.md")
    assert keeps_card(tmp_path / "model")
    assert not keeps_card(tmp_path / "nowhere")


def test_the_card_states_its_limits_and_its_licence(tmp_path):
    assert_has(
        card(tmp_path / "model", embedder(), licence="apache-2.0"),
        "- Longer texts are truncated: queries at 64 tokens, documents at 32, prompt and special tokens included. "
        "The backbone has positions for 128.\n",
        "was measured: no other domain, no language, and neither bias nor safety.",
        "## Licence\n\napache-2.0.\n",
    )


def test_the_scores_of_each_width_have_their_entry_in_the_model_index(tmp_path):
    rows = [
        {**SCORES[0], "metrics": {"ndcg_at_10": value}, "dimensions": width} for value, width in ((0.7, 32), (0.6, 8))
    ]
    (index,) = front_matter(card(tmp_path / "model", embedder(), FACTS, scores=rows))["model-index"]
    found = [(result["dataset"].get("config"), result["metrics"][0]["value"]) for result in index["results"]]
    assert found == [("32 dimensions", 0.7), ("8 dimensions", 0.6)]


def test_scores_in_a_model_directory_are_added_to_its_card_at_once_or_later(tmp_path):
    folder = tmp_path / "model"
    model = embedder()
    model.save_pretrained(folder)
    (folder / "scores.json").write_text(json.dumps(SCORES))
    write_model_card(folder, model, FACTS, licence="mit")
    written = (folder / "README.md").read_text()
    assert len(front_matter(written)["model-index"][0]["results"]) == 2
    (folder / "scores.json").unlink()
    write_model_card(folder, model, FACTS, licence="mit")
    assert not add_scores(folder)
    assert "model-index" not in front_matter((folder / "README.md").read_text())
    (folder / "scores.json").write_text(json.dumps(SCORES))
    for _ in range(2):
        assert add_scores(folder)
        later = (folder / "README.md").read_text()
        assert front_matter(later) == front_matter(written)
        assert later == written
    (folder / "README.md").write_text("# mine")
    assert not add_scores(folder)
    assert (folder / "README.md").read_text() == "# mine"


@pytest.mark.parametrize("header", ["license: [", "license: {a: 1}", "- a\n- b"])
def test_an_invalid_header_of_a_card_is_ignored(header, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    assert stated_licence(tmp_path) is None


# huggingface_hub passes a file to httpx2 in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use .content:DeprecationWarning")


@pytest.fixture(scope="module")
def server():
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    """The empty server as the Hub of this process, with a token with write access."""
    for state in (server.repositories, server.uploaded, server.verified, server.calls):
        state.clear()
    server.refusal, server.read_only = None, False
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # Xet, which huggingface_hub uses for uploads if hf_xet is installed, needs a separate storage service.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return server


def written(folder, model=None):
    """A model directory with a card."""
    model = model or embedder()
    model.save_pretrained(folder)
    write_model_card(folder, model, FACTS)
    return folder


def content(folder, repository=None):
    """The files of a folder; in a repository its card loads the repository."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if repository is not None:
        assert files["README.md"].count(repr(str(folder)).encode()) == 2
        files["README.md"] = files["README.md"].replace(repr(str(folder)).encode(), repr(repository).encode())
    return files


def committed(hub, name, revision="main"):
    files = dict(hub.repositories[name].branches[revision])
    del files[".gitattributes"]
    return files


@pytest.mark.parametrize("kind", ["plain", "with code", "contextual"])
def test_every_file_is_uploaded_unchanged_and_weights_by_the_lfs_protocol(kind, hub, tmp_path, capsys):
    models = {"plain": embedder, "with code": lambda: embedder(prompts={"query": "q:"}), "contextual": tiny_contextual}
    folder = written(tmp_path / "model", models[kind]())
    (folder / "scores.json").write_text(json.dumps(SCORES[:1]))
    assert main(["push", str(folder), f"{OWNER}/model", "--private", "--message", "First words"]) == 0
    expected = content(folder, f"{OWNER}/model")
    assert committed(hub, f"{OWNER}/model") == expected
    card = expected["README.md"].decode()
    assert front_matter(card)["model-index"][0]["results"][0]["metrics"][0] == {"type": "ndcg_at_10", "value": 0.7768}
    assert "| eval/faq | retrieval |" in card
    assert bool(list(folder.glob("*.py"))) == (kind != "plain")
    weights = {data for path, data in expected.items() if path.endswith(".safetensors")}
    assert weights
    assert set(hub.uploaded.values()) == weights
    assert sorted(hub.verified) == sorted(hub.uploaded)
    repository = hub.repositories[f"{OWNER}/model"]
    assert repository.private
    assert repository.messages == ["First words"]
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"pushed {len(expected)} files (")
    assert f"{hub.url}/{OWNER}/model" in line


def test_only_the_models_own_files_are_uploaded(hub, tmp_path):
    folder = written(tmp_path / "my 'model', \"größer\"")
    expected = content(folder, f"{OWNER}/model")
    (folder / "LICENSE").write_text("free")
    for name in (".env", ".git/config", "1_Pooling/.hidden", "notes.txt", "data/train.jsonl", "tool.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    assert main(["push", str(folder), "model"]) == 0
    assert committed(hub, f"{OWNER}/model") == {**expected, "LICENSE": b"free"}


def test_symbolic_links_and_incomplete_directories_are_refused(hub, tmp_path, capsys):
    folder = written(tmp_path / "model")
    words = ["push", str(folder), "model"]
    (tmp_path / "secret").write_text("{}")
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    assert_refused(capsys, tmp_path, "LICENSE: is a symbolic link", main, words)
    (folder / "LICENSE").unlink()
    (folder / "model.safetensors").unlink()
    assert_refused(capsys, tmp_path, "is missing, so the model is incomplete", main, words)
    (folder / "config.json").unlink()
    assert_refused(capsys, tmp_path, "is missing, so the model is incomplete", main, words)
    assert hub.calls == []


def test_an_existing_repository_is_refused_and_an_update_deletes_old_model_files(hub, tmp_path, capsys):
    folder = written(tmp_path / "model")
    old_files = ("model-00001-of-00002.safetensors", "3_Dense/config.json")
    with replaced_folder(folder) as new:
        written(new)
        (new / "3_Dense").mkdir()
        for name in old_files:
            (new / name).write_text("{}")
    push_to_hub(folder, "model")
    repository = hub.repositories[f"{OWNER}/model"]
    repository.branches["main"] |= {"token_counts.csv": b"kept", "1_Pooling/notes.txt": b"kept"}
    written(folder)
    words = ["push", str(folder), f"{OWNER}/model"]
    assert_refused(capsys, tmp_path, "; name another, or commit", main, words)
    assert main([*words, "--update", "--message", "Again"]) == 0
    assert committed(hub, f"{OWNER}/model") == {
        **content(folder, f"{OWNER}/model"),
        "token_counts.csv": b"kept",
        "1_Pooling/notes.txt": b"kept",
    }
    assert sorted(repository.deleted) == sorted(old_files)
    assert repository.messages[-1] == "Again"


def test_a_missing_branch_is_created(hub, tmp_path):
    folder = written(tmp_path / "model")
    push_to_hub(folder, "model", revision="v2")
    assert committed(hub, f"{OWNER}/model", "v2") == content(folder, f"{OWNER}/model")
    assert committed(hub, f"{OWNER}/model") == {}
    push_to_hub(folder, "model", revision="v2", update=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token": ""}, "model: the Hub needs a token; set HF_TOKEN, or log in with: hf auth login"),
        ({"token": "hf_wrong"}, "(Invalid credentials in Authorization header); log in with"),
        ({"read_only": True}, "; use a token with write access"),
        ({"name": "another/model"}, "another/model: cannot be uploaded to"),
        ({"name": "a/b/c"}, "a/b/c: cannot be uploaded to"),
        ({"endpoint": "http://127.0.0.1:9"}, "cannot be uploaded to http://127.0.0.1:9 (ConnectError"),
        ({"refusal": 413}, "the disk of the server is full"),
        ({"offline": True}, "offline mode is enabled"),
    ],
)
def test_a_failed_upload_is_reported_in_one_line(change, says, hub, tmp_path, monkeypatch, capsys):
    folder = written(tmp_path / "model")
    if "token" in change:
        monkeypatch.setenv("HF_TOKEN", str(change["token"]))
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    if "endpoint" in change:
        monkeypatch.setenv("HF_ENDPOINT", str(change["endpoint"]))
    if "offline" in change:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.read_only, hub.refusal = bool(change.get("read_only")), change.get("refusal")
    name = str(change.get("name", "model"))
    assert_refused(capsys, tmp_path, says, main, ["push", str(folder), name])
    assert all(set(each.branches["main"]) == {".gitattributes"} for each in hub.repositories.values())


def test_an_encoder_pushes_its_directory_or_its_model_in_memory(hub, tmp_path):
    folder = written(tmp_path / "model")
    Encoder.from_pretrained(str(folder), device="cpu").push_to_hub("of_directory")
    assert committed(hub, f"{OWNER}/of_directory") == content(folder, f"{OWNER}/of_directory")
    Encoder(embedder()).push_to_hub("of_memory", private=True)
    files = committed(hub, f"{OWNER}/of_memory")
    assert files.keys() == content(folder).keys()
    assert f"SentenceTransformer('{OWNER}/of_memory')" in files["README.md"].decode()
    assert hub.repositories[f"{OWNER}/of_memory"].private


def test_a_changed_file_is_not_uploaded_except_the_card(tmp_path):
    folder = written(tmp_path / "model", embedder(prompts={"query": "q:"}))
    whole = sorted(content(folder))
    (folder / "README.md").write_text("mine")
    assert own_files(folder) == whole
    (folder / "portable.py").write_text("changed = 1")
    with pytest.raises(InputError, match=r"portable\.py: is damaged"):
        own_files(folder)
