import json
from typing import get_args

import numpy as np
import pytest

from embeddings.cli.main import main
from embeddings.cli.retrieval import FormatName
from embeddings.inference import Encoder
from embeddings.inference.vectors import VECTOR_FORMATS
from embeddings.models import Embedder
from tests.cli.test_search import Typed
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import write_retrieval_folder
from tests.models.contextual_models import tiny_contextual

ENCODE = ["encode", "--model", "MODEL", "--input", "good.jsonl", "--output", "out"]


def test_a_corpus_file_and_its_encoded_folder_give_the_same_hits(model, tmp_path, capsys):
    corpus = str(write_retrieval_folder(tmp_path / "eval") / "corpus.jsonl")
    encode = ["encode", "--model", model, "--input", corpus, "--output", str(tmp_path / "vectors"), "--devices", "cpu"]
    assert main(encode) == 0
    assert "wrote 8 vectors of width 32" in capsys.readouterr().out
    found = []
    for place in (corpus, str(tmp_path / "vectors")):
        search = ["search", "--model", model, "--corpus", place, "--top_k", "3", "--precision", "float32", "fox"]
        assert main(search) == 0
        found.append([line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")])
    assert len(found[0]) == 3
    assert [line.split()[1] for line in found[0]] == [line.split()[1] for line in found[1]]


def test_the_formats_to_choose_from_are_those_of_the_library():
    assert get_args(FormatName) == VECTOR_FORMATS


@pytest.mark.parametrize(("vector_format", "num_bytes"), [("float16", 64), ("int8", 36), ("binary", 4)])
def test_a_corpus_is_encoded_and_searched_in_a_smaller_format(
    vector_format, num_bytes, model, tmp_path, capsys, monkeypatch
):
    corpus, vectors = str(write_retrieval_folder(tmp_path / "eval") / "corpus.jsonl"), str(tmp_path / "vectors")
    encode = ["encode", "--model", model, "--input", corpus, "--output", vectors, "--precision", "float32"]
    assert main([*encode, "--vector-format", vector_format]) == 0
    assert f"{vectors}: {vector_format}, {num_bytes} bytes each" in capsys.readouterr().out
    assert json.loads((tmp_path / "vectors" / "manifest.json").read_text())["vector_format"] == vector_format
    search = ["search", "--model", model, "--corpus", vectors, "--precision", "float32", "--top_k", "8"]
    assert main([*search, "fox"]) == 0
    found = capsys.readouterr().out
    assert len(found.splitlines()) == 16
    monkeypatch.setattr("sys.stdin", Typed("fox\n"))
    assert main([*search, "--interactive"]) == 0
    assert capsys.readouterr().out.startswith(found)
    assert main([*encode]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"field 'vector_format' is '{vector_format}', expected 'float32'" in last
    code = main([*search, "--rescore-multiplier", "2", "fox"])
    assert code == (0 if vector_format == "binary" else 2)
    if vector_format != "float16":
        for line in (["index", "--vectors", vectors], [*search, "--index", "ivf", "fox"]):
            assert main(line) == 2
            assert f"holds {vector_format} vectors, and an index" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_model_encodes_and_searches_at_fewer_dimensions(model, tmp_path, capsys):
    corpus = str(write_retrieval_folder(tmp_path / "eval") / "corpus.jsonl")
    vectors, cut = str(tmp_path / "vectors"), ["--dimensions", "8", "--precision", "float32"]
    assert main(["encode", "--model", model, "--input", corpus, "--output", vectors, *cut]) == 0
    assert "wrote 8 vectors of width 8" in capsys.readouterr().out
    assert np.load(tmp_path / "vectors" / "vectors-00000.npy").shape == (8, 8)
    found = []
    for place in (corpus, vectors):
        assert main(["search", "--model", model, "--corpus", place, *cut, "fox"]) == 0
        found.append([line.split()[1] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")])
    assert len(found[0]) == 5
    assert found[0] == found[1]
    line = ["search", "--model", model, "--corpus", vectors, "fox"]
    assert_refused(capsys, tmp_path, "field 'embedding_dim' is 8", main, line)


def test_scores_say_their_widths_and_others_than_the_trained_ones_are_warned_of(model, tmp_path, capsys, caplog):
    folder, output = write_retrieval_folder(tmp_path / "eval"), tmp_path / "scores.json"
    embedder = Embedder.from_pretrained(model)
    embedder.trained_widths = (32, 8)
    embedder.save_pretrained(tmp_path / "trained")
    line = ["evaluate", "--data", str(folder), "--output", str(output), "--precision", "float32"]

    def scores(model, *options):
        caplog.clear()
        assert main([*line, "--model", str(model), *options]) == 0
        rows = json.loads(output.read_text())
        return [(row["dimensions"], row["metrics"]) for row in rows], {str(row["trained_widths"]) for row in rows}

    whole, trained = scores(tmp_path / "trained")
    assert (whole[0][0], trained) == (32, {"[32, 8]"})
    cut, _ = scores(tmp_path / "trained", "--dimensions", "8")
    assert "--dimensions" not in caplog.text
    both, _ = scores(tmp_path / "trained", "--dimensions", "[32, 8]")
    assert "--dimensions" not in caplog.text
    assert [width for width, _ in both] == [32, 8]
    assert [metrics["ndcg_at_10"] for _, metrics in both] == [whole[0][1]["ndcg_at_10"], cut[0][1]["ndcg_at_10"]]
    scores(tmp_path / "trained", "--dimensions", "[8, 5]")
    assert "--dimensions 5: the model was trained at 32, 8; scores may suffer" in caplog.text
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert scores(model, "--dimensions", "5")[1] == {"[]"}
    assert "--dimensions 5: the model does not say that it was trained so" in caplog.text
    caplog.clear()
    assert main(["search", "--model", model, "--corpus", str(folder / "corpus.jsonl"), "--dimensions", "5", "fox"]) == 0
    assert "--dimensions 5" in caplog.text
    capsys.readouterr()


@pytest.fixture(scope="module")
def contextual(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contextual") / "model"
    tiny_contextual().save_pretrained(folder)
    return str(folder)


def test_a_context_is_chosen_by_encode_and_kept_for_search(contextual, tmp_path, capsys, monkeypatch):
    corpus, vectors = str(write_retrieval_folder(tmp_path / "eval") / "corpus.jsonl"), str(tmp_path / "vectors")
    encode = ["encode", "--model", contextual, "--input", corpus, "--output", vectors, "--precision", "float32"]
    assert main([*encode, "--context", corpus, "--context-size", "3", "--context_seed", "1"]) == 0
    manifest = json.loads((tmp_path / "vectors" / "manifest.json").read_text())
    assert (manifest["context"]["num_documents"], manifest["context"]["seed"]) == (3, 1)
    assert len(manifest["context_document_ids"]) == 3
    capsys.readouterr()
    found = []
    own = ["--corpus", vectors]
    given = ["--context", vectors, "--context-size", "3", "--context-seed", "1"]
    for place in (own, [*own, *given], ["--corpus", corpus, *given], ["--corpus", corpus]):
        assert main(["search", "--model", contextual, *place, "--precision", "float32", "fox"]) == 0
        found.append([line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")])
    assert found[0] == found[1] == found[2]
    assert found[0] != found[3]
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode_context", lambda *_: pytest.fail("encoded again"))
        assert main(["search", "--model", contextual, *own, *given, "--precision", "float32", "fox"]) == 0
    other = ["search", "--model", contextual, *own, "--context", corpus, "--context-size", "3", "fox"]
    for says in ("was encoded with 3 documents of seed 1", "asked for is 3 documents of seed 0"):
        assert_refused(capsys, tmp_path, says, main, other)
    assert_refused(capsys, tmp_path, "field 'context.", main, [*encode, "--context", corpus, "--context-size", "2"])


def test_a_contextual_model_without_a_context_is_told_in_one_line(contextual, model, tmp_path, caplog, capsys):
    folder = write_retrieval_folder(tmp_path / "eval")
    corpus, vectors = str(folder / "corpus.jsonl"), str(tmp_path / "vectors")
    search = ["search", "--corpus", corpus, "fox", "--model"]
    encode = ["encode", "--input", corpus, "--output", vectors, "--model"]
    evaluate = ["evaluate", "--data", str(folder), "--model"]

    def lines(*command):
        caplog.clear()
        assert main([*command, "--precision", "float32"]) == 0
        return [line for line in caplog.messages if "contextual" in line]

    says = "the model is contextual, and without %s it reads texts with no context"
    for command, option in ((search, "--context"), (evaluate, "--context-size")):
        assert lines(*command, contextual) == [says % option]
        assert lines(*command, model) == []
    assert lines(*search, contextual, "--context", corpus) == []
    assert lines(*evaluate, contextual, "--context-size", "2") == []
    assert lines(*encode, contextual, "--context", corpus) == []
    assert lines("search", "--corpus", vectors, "fox", "--model", contextual) == []
    assert lines(*encode[:4], f"{vectors}-alone", "--model", contextual) == [says % "--context"]


def test_scores_are_printed_and_written_and_each_folder_gives_its_context(contextual, tmp_path, capsys):
    one, two = write_retrieval_folder(tmp_path / "a" / "one"), write_retrieval_folder(tmp_path / "two")
    output = tmp_path / "scores.json"
    line = ["evaluate", "--model", contextual, "--data", f"[{one}, {two}]", "--output", str(output)]
    assert main([*line, "--context-size", "4"]) == 0
    scores = json.loads(output.read_text())
    assert [(score["name"], score["counts"]["num_context"]) for score in scores] == [("one", 4), ("two", 4)]
    assert f"{scores[0]['metrics']['ndcg_at_10']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["encode", "--input", "good.jsonl", "--output", "out", "--context", "good.jsonl", "--context-size", "6"],
            "context_size must be from 1 to the model's 5 context documents, got 6",
        ),
        (["search", "--corpus", "good.jsonl", "--context-size", "2", "fox"], "context_size needs a corpus"),
    ],
)
def test_a_bad_context_is_one_line_and_exit_code_2(argv, says, contextual, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    assert_refused(capsys, tmp_path, says, main, [argv[0], "--model", contextual, *argv[1:]])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["search", "--model", "MODEL", "--corpus", "good.jsonl", "--context", "good.jsonl", "x"],
            "this model takes none",
        ),
        (["search", "--model", "no_model_here", "--corpus", "good.jsonl", "--top_k", "0", "words"], "top_k must be"),
        (["evaluate", "--model", "no_model_here", "--data", "nowhere", "--output", "."], "--output .: is a directory"),
        (
            [*ENCODE, "--vector-format", "binary", "--dimensions", "20"],
            "a multiple of 8, these have 20, got 'binary'; take",
        ),
        ([*ENCODE, "--vector-format", "int4"], "vector_format"),
        ([*ENCODE, "--tokenizer-workers", "-1"], "tokenizer_workers must be >= 0, got -1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, says, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    assert_refused(capsys, tmp_path, says, main, [model if word == "MODEL" else word for word in argv])
