"""A model directory goes to the Hub whole, with its card and nothing else; what stops it is one line."""

import json

import pytest
import yaml

from embeddings.cli.main import main
from embeddings.inference import Encoder
from embeddings.models import push_to_hub
from embeddings.models.model_card import own_files, write_model_card
from tests.helpers.hub_server import OWNER, TOKEN, stood_in_hub
from tests.helpers.refusals import assert_refused
from tests.models.contextual_models import tiny_contextual
from tests.models.test_model_card import FACTS, SCORES, embedder

# huggingface_hub hands a file to httpx2 as it was handed to requests.
pytestmark = pytest.mark.filterwarnings("ignore:Use .content:DeprecationWarning")


@pytest.fixture(scope="module")
def server():
    with stood_in_hub() as hub:
        yield hub


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    """The server, empty, as the Hub of this process, with a token that may write."""
    for state in (server.repositories, server.uploaded, server.verified, server.calls):
        state.clear()
    server.refusal, server.read_only = None, False
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # Xet, by which huggingface_hub uploads where hf_xet is installed, needs a storage service of its own.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return server


def written(folder, model=None):
    """A model directory with a card."""
    model = model or embedder()
    model.save_pretrained(folder)
    write_model_card(folder, model, FACTS)
    return folder


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def committed(hub, name, revision="main"):
    files = dict(hub.repositories[name].branches[revision])
    del files[".gitattributes"]
    return files


@pytest.mark.parametrize("kind", ["plain", "with code", "contextual"])
def test_every_file_arrives_with_its_bytes_and_weights_by_the_lfs_protocol(kind, hub, tmp_path, capsys):
    models = {"plain": embedder, "with code": lambda: embedder(prompts={"query": "q:"}), "contextual": tiny_contextual}
    folder = written(tmp_path / "model", models[kind]())
    assert main(["push", str(folder), f"{OWNER}/model", "--private", "true", "--message", "First words"]) == 0
    expected = content(folder)
    assert committed(hub, f"{OWNER}/model") == expected
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


def test_nothing_but_the_models_own_files_goes_up(hub, tmp_path, capsys):
    folder = written(tmp_path / "model")
    expected = content(folder)
    (folder / "LICENSE").write_text("free")
    for name in (".env", ".git/config", "1_Pooling/.hidden", "notes.txt", "data/train.jsonl", "tool.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    assert main(["push", str(folder), "model"]) == 0
    assert committed(hub, f"{OWNER}/model") == {**expected, "LICENSE": b"free"}
    assert capsys.readouterr().out.splitlines()[-1].endswith(": data, notes.txt, tool.py")


def test_a_link_and_half_a_directory_are_refused(hub, tmp_path, capsys):
    folder = written(tmp_path / "model")
    words = ["push", str(folder), "model"]
    (tmp_path / "secret").write_text("{}")
    (folder / "vocab.json").symlink_to(tmp_path / "secret")
    assert_refused(capsys, tmp_path, "vocab.json: is a link", main, words)
    (folder / "vocab.json").unlink()
    (folder / "model.safetensors").unlink()
    assert_refused(capsys, tmp_path, "is missing, so the model is incomplete", main, words)
    (folder / "config.json").unlink()
    assert_refused(capsys, tmp_path, "has no config.json", main, words)
    assert hub.calls == []


def test_a_taken_name_is_refused_and_an_update_replaces_what_the_model_no_longer_has(hub, tmp_path, capsys):
    folder = written(tmp_path / "model")
    push_to_hub(folder, "model")
    repository = hub.repositories[f"{OWNER}/model"]
    files = repository.branches["main"]
    files |= {"model-00001-of-00002.safetensors": b"old", "3_Dense/config.json": b"{}", "picture.png": b"kept"}
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    words = ["push", str(folder), f"{OWNER}/model"]
    assert_refused(capsys, tmp_path, f"{OWNER}/model: exists already; name another, or commit", main, words)
    assert main([*words, "--update", "true", "--message", "Again"]) == 0
    assert committed(hub, f"{OWNER}/model") == {**content(folder), "picture.png": b"kept"}
    assert sorted(repository.deleted) == ["3_Dense/config.json", "model-00001-of-00002.safetensors"]
    assert repository.messages[-1] == "Again"


def test_a_branch_is_made_where_it_is_missing(hub, tmp_path):
    folder = written(tmp_path / "model")
    push_to_hub(folder, "model", revision="v2")
    assert committed(hub, f"{OWNER}/model", "v2") == content(folder)
    assert committed(hub, f"{OWNER}/model") == {}
    push_to_hub(folder, "model", revision="v2", update=True)


def test_the_scores_beside_a_model_are_in_the_card_that_goes_up(hub, tmp_path):
    folder = written(tmp_path / "model")
    (folder / "scores.json").write_text(json.dumps(SCORES[:1]))
    push_to_hub(folder, "model")
    files = committed(hub, f"{OWNER}/model")
    assert json.loads(files["scores.json"]) == SCORES[:1]
    card = files["README.md"].decode()
    (index,) = yaml.safe_load(card.split("---\n")[1])["model-index"]
    assert index["results"][0]["metrics"][0] == {"type": "ndcg_at_10", "value": 0.7768}
    assert "| eval/faq | retrieval |" in card


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token": ""}, "model: the Hub wants a token; set HF_TOKEN, or log in with: hf auth login"),
        ({"token": "hf_wrong"}, "model: the Hub does not accept the token (401); log in with"),
        ({"read_only": True}, "model: the token may not write there (403); take a token with write access"),
        ({"name": "another/model"}, "another/model: the token may not write there (403)"),
        ({"name": "a/b/c"}, "a/b/c: is no name of a repository; write OWNER/NAME"),
        ({"name": "a b"}, "a b: is no name of a repository"),
        ({"endpoint": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached (ConnectError); check the network"),
        ({"refusal": 413}, "the disk of the server is full; try again; the repository was made and is empty"),
        ({"offline": True}, "model: cannot be reached while HF_HUB_OFFLINE is set; unset it"),
    ],
)
def test_what_the_hub_refuses_is_one_line(change, says, hub, tmp_path, monkeypatch, capsys):
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


def test_an_encoder_pushes_its_directory_or_itself(hub, tmp_path):
    folder = written(tmp_path / "model")
    Encoder.from_pretrained(str(folder), device="cpu").push_to_hub("of_directory")
    assert committed(hub, f"{OWNER}/of_directory") == content(folder)
    Encoder(embedder()).push_to_hub("of_memory", private=True)
    files = committed(hub, f"{OWNER}/of_memory")
    assert files.keys() == content(folder).keys()
    assert "SentenceTransformer('of_memory')" in files["README.md"].decode()
    assert hub.repositories[f"{OWNER}/of_memory"].private


def test_all_that_a_directory_is_written_with_counts_as_its_own(tmp_path):
    folder = written(tmp_path / "model", embedder(prompts={"query": "q:"}))
    for name in ("onnx/model.onnx", "openvino/openvino_model.xml", "adapter/adapter_config.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
    for name in ("curves.png", "import.json", "training_run.json", "model.safetensors.index.json"):
        (folder / name).write_text('{"weight_map": {"a": "model.safetensors"}}')
    paths, left_out = own_files(folder)
    assert sorted(paths) == sorted(content(folder))
    assert left_out == []
