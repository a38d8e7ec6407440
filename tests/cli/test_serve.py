import json

import pytest

from embeddings.cli.main import main
from embeddings.models import BackboneConfig, Embedder, MeanPooling, load_backbone
from tests.helpers.runs import backbone_folder, write_retrieval_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    backbone, tokenizer = load_backbone(BackboneConfig(backbone_folder(folder / "backbone")))
    Embedder(backbone, tokenizer, MeanPooling(32)).save_pretrained(folder / "model")
    return str(folder / "model")


def test_a_corpus_file_and_its_encoded_folder_give_the_same_hits(model, tmp_path, capsys):
    corpus = str(write_retrieval_folder(tmp_path / "eval") / "corpus.jsonl")
    assert main(["encode", "--model", model, "--input", corpus, "--output", str(tmp_path / "vectors")]) == 0
    assert "wrote 8 vectors of width 32" in capsys.readouterr().out
    found = []
    for place in (corpus, str(tmp_path / "vectors")):
        assert (
            main(["search", "--model", model, "--corpus", place, "--top_k", "3", "--precision", "float32", "fox"]) == 0
        )
        found.append([line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")])
    assert len(found[0]) == 3
    assert [line.split()[1] for line in found[0]] == [line.split()[1] for line in found[1]]


def test_scores_are_printed_and_written(model, tmp_path, capsys):
    one, two = write_retrieval_folder(tmp_path / "a" / "one"), write_retrieval_folder(tmp_path / "two")
    output = tmp_path / "scores.json"
    assert main(["evaluate", "--model", model, "--data", f"[{one}, {two}]", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    scores = json.loads(output.read_text())
    assert [score["name"] for score in scores] == ["one", "two"]
    assert f"{scores[0]['metrics']['ndcg_at_10']:.4f}" in printed


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["search", "--model", "MODEL", "--corpus", "no.jsonl", "words"], "no.jsonl"),
        (["search", "--model", "MODEL", "--corpus", "bad.jsonl", "words"], "bad.jsonl:2"),
        (["search", "--model", "MODEL", "--corpus", "good.jsonl", "--top_k", "0", "words"], "top_k"),
        (["search", "--model", "no_model_here", "--corpus", "good.jsonl", "words"], "no_model_here"),
        (["encode", "--model", "MODEL", "--input", "empty.jsonl", "--output", "out"], "empty.jsonl"),
        (["evaluate", "--model", "MODEL", "--data", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, says, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main([model if word == "MODEL" else word for word in argv]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert says in line
    assert sorted(tmp_path.rglob("*")) == before
