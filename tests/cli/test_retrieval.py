"""`search`, `index`, `encode` and `evaluate`: results for files, folders and typed lines, contexts, widths, scores."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from embeddings.cli.main import main
from embeddings.inference import CorpusSearch, Encoder, HybridSearch
from embeddings.models import Embedder
from tests.evaluation.data import write_retrieval, write_similarity
from tests.evaluation.task_sets import write_sets
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import write_retrieval_folder
from tests.inference.models import tiny_embedder
from tests.models.contextual_models import tiny_contextual


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, a corpus file and its encoded folder without an index."""
    folder = tmp_path_factory.mktemp("index")
    tiny_embedder().save_pretrained(folder / "model")
    corpus = write_retrieval_folder(folder / "eval") / "corpus.jsonl"
    model, vectors = str(folder / "model"), str(folder / "vectors")
    encode = ["encode", "--model", model, "--input", str(corpus), "--output", vectors, "--devices", "cpu"]
    assert main([*encode, *FLOAT32]) == 0
    return model, str(corpus), vectors


FLOAT32 = ["--precision", "float32"]


def lines_of(capsys, *line):
    assert main(list(line)) == 0
    return capsys.readouterr().out.splitlines()


def error_of(capsys, *line):
    capsys.readouterr()
    assert main(list(line)) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_an_index_returns_the_hits_of_exact_search(world, capsys):
    model, _, vectors = world
    search = ["search", "--model", model, "--corpus", vectors, *FLOAT32]
    assert "this output has no manifest" in error_of(capsys, "index", "--vectors", f"{vectors}/none")
    said = error_of(capsys, *search, "--index", "ivf", "fox")
    assert "there is no index of these vectors; make it with the command index" in said
    (said,) = lines_of(capsys, "index", "--vectors", vectors, "--num-lists", "2")
    assert said == f"wrote {vectors}/ivf.faiss: 8 vectors in 2 lists, 2 searched for a query; recall@10 1.000"
    exact = lines_of(capsys, *search, "fox")
    assert len(exact) == 10
    assert lines_of(capsys, *search, "--index", "ivf", "fox") == exact
    lines_of(capsys, "index", "--vectors", vectors, "--num-lists", "2", "--num-probes", "1")
    few = lines_of(capsys, *search, "--index", "ivf", "--top_k", "8", "fox")
    assert 2 <= len(few) < 16


def test_queries_are_read_line_by_line_with_one_model_in_memory(world, capsys, monkeypatch):
    model, _, vectors = world
    search = ["search", "--model", model, "--corpus", vectors, *FLOAT32, "--top_k", "2"]
    expected = [lines_of(capsys, *search, query) for query in ("fox", "lazy dog")]
    loaded, load = [], Encoder.from_pretrained.__func__

    def counting(kind, *arguments, **options):
        loaded.append(arguments)
        return load(kind, *arguments, **options)

    monkeypatch.setattr(Encoder, "from_pretrained", classmethod(counting))
    monkeypatch.setattr("sys.stdin", Typed("fox\nlazy dog\n\nnever\n"))
    found = lines_of(capsys, *search, "--interactive")
    assert loaded == [(model,)]
    assert [line for line in found if not line.endswith(" ms")] == expected[0] + expected[1]
    assert len([line for line in found if line.endswith(" ms")]) == 2


def test_a_terminal_shows_a_prompt_and_invalid_utf8_is_refused(world, capsys, monkeypatch):
    line = ["search", "--model", world[0], "--corpus", world[2], "--top_k", "2"]
    monkeypatch.setattr("sys.stdin", Typed("fox\n", is_terminal=True))
    assert len(lines_of(capsys, *line)) == 5
    monkeypatch.setattr("sys.stdin", Typed(b"\xff\n"))
    assert "query must be given, got None; write it last, or read queries with --interactive" in error_of(capsys, *line)
    assert "standard input: is not valid UTF-8" in error_of(capsys, *line, "--interactive")


class Typed(io.TextIOWrapper):
    """Standard input; a terminal if `is_terminal` is set."""

    def __init__(self, text, is_terminal=False):
        super().__init__(io.BytesIO(text if isinstance(text, bytes) else text.encode()), encoding="utf-8")
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


ENCODE = ["encode", "--model", "MODEL", "--input", "good.jsonl", "--output", "out"]


@pytest.mark.parametrize(("vector_format", "num_bytes"), [("float16", 64), ("int8", 36), ("binary", 4)])
def test_a_corpus_is_encoded_and_searched_in_a_smaller_format(vector_format, num_bytes, model, tmp_path, capsys):
    corpus, vectors = str(write_retrieval_folder(tmp_path / "eval") / "corpus.jsonl"), str(tmp_path / "vectors")
    encode = ["encode", "--model", model, "--input", corpus, "--output", vectors, "--precision", "float32"]
    assert main([*encode, "--vector-format", vector_format]) == 0
    assert f"{vectors}: {vector_format}, {num_bytes} bytes each" in capsys.readouterr().out
    assert json.loads((tmp_path / "vectors" / "manifest.json").read_text())["vector_format"] == vector_format
    search = ["search", "--model", model, "--corpus", vectors, "--precision", "float32", "--top_k", "8"]
    assert main([*search, "fox"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 16
    assert main([*encode]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"field 'vector_format' is '{vector_format}', expected 'float32'" in last
    code = main([*search, "--rescore-multiplier", "2", "fox"])
    assert code == (0 if vector_format == "binary" else 2)
    if vector_format != "float16":
        for line in (["index", "--vectors", vectors], [*search, "--index", "ivf", "fox"]):
            assert main(line) == 2
            assert f"has {vector_format} vectors, but an index" in capsys.readouterr().err.strip().splitlines()[-1]


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
    tune = ["--hybrid", "--hybrid-weight", "tune", "--model", model, "--data", str(tmp_path / "eval")]
    assert main(["index", "--vectors", vectors, *tune]) == 0


def test_scores_contain_their_widths_and_untrained_widths_are_warned_of(model, tmp_path, caplog):
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
    assert "--dimensions 5: the model was trained at 32, 8; scores may be lower" in caplog.text
    assert scores(model, "--dimensions", "5")[1] == {"[]"}
    assert "--dimensions 5: the model lists no trained widths" in caplog.text


@pytest.fixture(scope="module")
def contextual(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contextual") / "model"
    tiny_contextual().save_pretrained(folder)
    return str(folder)


def test_encode_draws_a_context_and_search_reuses_it(contextual, tmp_path, capsys):
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


def test_a_contextual_model_without_a_context_gets_a_warning(contextual, model, tmp_path, caplog):
    folder = write_retrieval_folder(tmp_path / "eval")
    corpus = str(folder / "corpus.jsonl")
    search = ["search", "--corpus", corpus, "fox", "--model"]
    encode = ["encode", "--input", corpus, "--output", str(tmp_path / "vectors"), "--model"]
    evaluate = ["evaluate", "--data", str(folder), "--model"]

    def lines(*command):
        caplog.clear()
        assert main([*command, "--precision", "float32"]) == 0
        return [line for line in caplog.messages if line.startswith("the model is contextual")]

    says = "the model is contextual; without %s it encodes texts without context"
    for command, option in ((search, "--context"), (evaluate, "--context-size"), (encode, "--context")):
        assert lines(*command, contextual) == [says % option]
    assert lines(*search, model) == []
    assert lines(*search, contextual, "--context", corpus) == []
    assert lines(*evaluate, contextual, "--context-size", "2") == []


def test_scores_are_printed_and_written_and_each_folder_gives_its_context(contextual, tmp_path, capsys):
    one, two = write_retrieval_folder(tmp_path / "a" / "one"), write_retrieval_folder(tmp_path / "two")
    output = tmp_path / "scores.json"
    line = ["evaluate", "--model", contextual, "--data", f"[{one}, {two}]", "--output", str(output)]
    assert main([*line, "--context-size", "4"]) == 0
    scores = json.loads(output.read_text())
    assert [(score["name"], score["counts"]["num_context"]) for score in scores] == [("one", 4), ("two", 4)]
    assert f"{scores[0]['metrics']['ndcg_at_10']:.4f}" in capsys.readouterr().out


# Most mistakes are reported before the model is loaded.
SEARCH = ["search", "--model", "no_model_here", "--corpus", "good.jsonl", "x"]
EVALUATE = ["evaluate", "--model", "no_model_here", "--output", "out"]
MISTAKES = [
    ([*SEARCH, "--model", "MODEL", "--context", "good.jsonl"], "is not contextual"),
    ([*SEARCH, "--model", "MODEL", "--context-size", "2"], "needs a corpus to draw"),
    ([*SEARCH, "--model", "MODEL", "--context-seed", "2"], "context_seed needs a corpus to draw"),
    ([*SEARCH, "--top_k", "0"], "top_k must be"),
    ([*SEARCH, "--interactive"], "interactive has no effect with a query"),
    ([*SEARCH, "--index", "ivf"], "index needs an encoded folder"),
    ([*SEARCH, "--hybrid-weight", "0.5"], "hybrid_weight needs --hybrid, got 0.5"),
    ([*SEARCH, "--hybrid", "--language", "klingon"], "language must be any, none or a language that PyStemmer stems"),
    ([*ENCODE, "--tokenizer-workers", "-1"], "tokenizer_workers must be >= 0, got -1"),
    (EVALUATE, "data or tasks must be given, got 'neither'"),
    ([*EVALUATE, "--data", "sets", "--tasks", "SciFact"], "data or tasks must be given, got 'both'"),
    ([*EVALUATE, "--data", "sets", "--num-tasks", "2"], "num_tasks has no effect without --tasks"),
    ([*EVALUATE, "--data", "sets", "--instructions", "mgh"], "instructions has no effect without --tasks"),
    ([*EVALUATE, "--data", "nowhere", "--output", "."], "--output .: is a directory"),
    ([*EVALUATE, "--tasks", "SciFact", "--output", "good.jsonl"], "is a file; give a folder"),
    ([*EVALUATE, "--tasks", "SciFact", "--output", "null"], "output must be the folder for the tasks' results"),
    ([*EVALUATE, "--tasks", "SciFact", "--hybrid"], "hybrid needs the folders of --data"),
    ([*EVALUATE, "--data", "sets", "--hybrid", "--fusion", "rrf", "--hybrid-weight", "0"], "hybrid_weight has no"),
    ([*EVALUATE, "--model", "MODEL", "--data", "similarity", "--hybrid"], "has sts data, not retrieval data"),
    (["index", "--vectors", "none", "--language", "german"], "language needs --hybrid"),
    (["index", "--vectors", "none", "--hybrid", "--seed", "1"], "seed has no effect on a BM25 index"),
]


@pytest.mark.parametrize(("argv", "says"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_a_mistake_is_reported_in_one_line_with_exit_code_2(argv, says, model, tmp_path, capfd):
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "sets").mkdir()
    write_similarity(tmp_path / "similarity")
    assert_refused(capfd, tmp_path, says, main, [model if word == "MODEL" else word for word in argv])


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The sets of every kind of task."""
    folder = tmp_path_factory.mktemp("tasks")
    write_sets(folder)
    return folder


def line(model, output, *options):
    return ["evaluate", "--model", model, "--output", str(output), *FLOAT32, *options]


def test_tasks_are_scored_shared_and_resumed(model, sets, tmp_path, capsys, monkeypatch):
    tasks = ["--tasks", f"[{sets}/pairs, {sets}/topics]"]
    share = ["--task-index", "0", "--num-tasks", "2"]
    assert main(line(model, tmp_path / "out", *tasks, *share)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "this process's tasks are done, 1 others are missing"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    assert main(line(model, tmp_path / "out", *tasks)) == 0
    table = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in table] == ["task", "pairs", "topics", "mean", "mean", "mean"]
    assert len([*(tmp_path / "out").glob("results/*/*/scores.csv")]) == 1
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("encoded again"))
    assert main(line(model, tmp_path / "out", *tasks)) == 0
    assert capsys.readouterr().out.splitlines() == table


def test_hybrid_search_is_the_same_for_a_file_a_folder_and_python(model, tmp_path, capsys):
    corpus, vectors = str(write_retrieval_folder(tmp_path / "eval") / "corpus.jsonl"), str(tmp_path / "vectors")
    encode = ["encode", "--model", model, "--input", corpus, "--output", vectors, *FLOAT32]
    lines_of(capsys, *encode)
    search = ["search", "--model", model, *FLOAT32, "--top_k", "4", "--hybrid"]
    query = "the fox and one lazy dog"
    said = error_of(capsys, *search, "--corpus", vectors, query)
    assert "there is no BM25 index of these vectors; make it with" in said
    assert f"index --hybrid --vectors {vectors}" in said
    (said,) = lines_of(capsys, "index", "--vectors", vectors, "--hybrid")
    assert said.startswith(f"wrote {vectors}/words: 8 documents, ")
    assert said.endswith(" different words (language: any)")
    # The finished folder is not changed.
    lines_of(capsys, *encode)
    python = HybridSearch(CorpusSearch(Encoder.from_pretrained(model, precision="float32"), vectors))
    expected = [f"{hit.score:.3f}  {hit.document_id}" for hit in python.search([query], 4)[0]]
    for place in (vectors, corpus):
        assert lines_of(capsys, *search, "--corpus", place, query)[::2] == expected
    dense = lines_of(capsys, *search[:-1], "--corpus", vectors, query)[::2]
    assert [line.split()[1] for line in dense] != [line.split()[1] for line in expected]
    whole = lines_of(capsys, *search, "--corpus", vectors, "--hybrid-weight", "0", query)[::2]
    assert [line.split()[1] for line in whole] == [line.split()[1] for line in dense]
    lines_of(capsys, "index", "--vectors", vectors, "--num-lists", "2")
    found = lines_of(capsys, *search, "--corpus", vectors, "--index", "ivf", query)
    assert found == lines_of(capsys, *search, "--corpus", vectors, "--fusion", "minmax", query)
    said = error_of(capsys, *search, "--corpus", vectors, "--index", "ivf", "--fusion", "zscore", query)
    assert "fusion needs the scores of all documents, which an index" in said
    said = error_of(capsys, *search, "--corpus", vectors, "--language", "german", query)
    assert "field 'language' is 'any', expected 'german'" in said


def test_evaluate_prints_and_writes_three_scores_and_the_interval(model, tmp_path, capsys):
    folder, output = write_retrieval(tmp_path / "eval"), tmp_path / "scores.json"
    line = ["evaluate", "--model", model, "--data", str(folder), "--output", str(output), *FLOAT32]
    lines_of(capsys, *line)
    (dense,) = json.loads(output.read_text())
    table = lines_of(capsys, *line, "--hybrid", "--hybrid-weight", "0.3", "--language", "none")
    (row,) = json.loads(output.read_text())
    assert {name: row[name] for name in dense if name != "seconds"} == {
        name: value for name, value in dense.items() if name != "seconds"
    }
    hybrid = row["hybrid"]
    assert (hybrid["fusion"], hybrid["weight"], hybrid["language"]) == ("zscore", 0.3, "none")
    assert hybrid["bm25"]["ndcg_at_10"] != pytest.approx(row["metrics"]["ndcg_at_10"])
    gain = hybrid["metrics"]["ndcg_at_10"] - row["metrics"]["ndcg_at_10"]
    assert hybrid["difference"]["mean"] == pytest.approx(gain)
    shown = [f"{scores['ndcg_at_10']:.4f}" for scores in (hybrid["bm25"], row["metrics"], hybrid["metrics"])]
    assert table[1].split()[:4] == ["eval", *shown]
    assert table[2].startswith("ndcg_at_10; fusion zscore, weight 0.3 of BM25, language none; ")


def test_an_index_stores_the_weight_of_its_searches(world, capsys):
    model, corpus, vectors = world
    data, index = str(Path(corpus).parent), ["index", "--vectors", vectors, "--hybrid"]

    def search(*options):
        line = ["search", "--model", model, "--corpus", vectors, *FLOAT32, "--hybrid", *options, "quick fox"]
        return lines_of(capsys, *line)

    lines_of(capsys, *index, "--hybrid-weight", "1")
    stored = search()
    assert stored == search("--hybrid-weight", "1")
    lines_of(capsys, *index)
    assert search() == search("--hybrid-weight", "0.2")
    assert search() != stored
    said, _ = lines_of(capsys, *index, "--hybrid-weight", "tune", "--model", model, "--data", data)
    weight = json.loads(Path(vectors, "words", "manifest.json").read_text())["weight"]
    assert said.startswith(f"weight {weight:g} of BM25, chosen on ")
    evaluate = ["evaluate", "--model", model, "--data", data, *FLOAT32, "--hybrid", "--hybrid-weight", "tune"]
    assert lines_of(capsys, *evaluate)[-1].endswith(said)
    message = error_of(capsys, "search", "--model", model, "--corpus", vectors, "--hybrid", *evaluate[-2:], "fox")
    assert "hybrid_weight needs queries with judgments" in message
    assert "needs --model and --data" in error_of(capsys, *index, "--hybrid-weight", "tune")
    other = str(write_retrieval(Path(vectors).parent / "other"))
    tune = [*index, "--hybrid-weight", "tune", "--model", model, "--data", other]
    assert "has other documents than" in error_of(capsys, *tune)
