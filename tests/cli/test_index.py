"""`index`, and the searches that it serves, as commands."""

import pytest

from embeddings.cli.main import main
from embeddings.inference.encoder import Encoder
from tests.cli.test_interactive import Typed
from tests.helpers.runs import write_retrieval_folder
from tests.inference.models import tiny_embedder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, a corpus file and its encoded folder without an index."""
    folder = tmp_path_factory.mktemp("index")
    tiny_embedder().save_pretrained(folder / "model")
    corpus = write_retrieval_folder(folder / "eval") / "corpus.jsonl"
    model, vectors = str(folder / "model"), str(folder / "vectors")
    assert main(["encode", "--model", model, "--input", str(corpus), "--output", vectors, *FLOAT32]) == 0
    return model, str(corpus), vectors


FLOAT32 = ["--precision", "float32"]


def lines_of(capsys, *line):
    assert main(list(line)) == 0
    return capsys.readouterr().out.splitlines()


def error_of(capsys, *line):
    capsys.readouterr()
    assert main(list(line)) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_an_index_gives_the_hits_of_the_exact_search(world, capsys):
    model, _, vectors = world
    search = ["search", "--model", model, "--corpus", vectors, *FLOAT32]
    assert "there is no index of these vectors; make it with the command index" in error_of(
        capsys, *search, "--index", "ivf", "fox"
    )
    (said,) = lines_of(capsys, "index", "--vectors", vectors, "--num-lists", "2")
    assert said == f"wrote {vectors}/ivf.faiss: 8 vectors in 2 lists, 2 searched for a query; recall@10 1.000"
    exact = lines_of(capsys, *search, "fox")
    assert len(exact) == 10
    assert lines_of(capsys, *search, "--index", "ivf", "fox") == exact
    lines_of(capsys, "index", "--vectors", vectors, "--num-lists", "2", "--num-probes", "1")
    few = lines_of(capsys, *search, "--index", "ivf", "--top_k", "8", "fox")
    assert 2 <= len(few) < 16


@pytest.mark.parametrize("place", [1, 2], ids=["file", "folder"])
def test_queries_are_read_line_by_line_with_one_model_in_memory(place, world, capsys, monkeypatch):
    model, search = world[0], ["search", "--model", world[0], "--corpus", world[place], *FLOAT32, "--top_k", "2"]
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


def test_ctrl_c_ends_it_with_code_130(world, capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    (model, _, vectors), typed = world, Typed("")
    typed.buffer.readline = interrupted
    monkeypatch.setattr("sys.stdin", typed)
    assert main(["search", "--model", model, "--corpus", vectors, "--interactive"]) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: interrupted")


def test_a_terminal_needs_no_option(world, capsys, monkeypatch):
    model, _, vectors = world
    monkeypatch.setattr("sys.stdin", Typed("fox\n", is_terminal=True))
    assert len(lines_of(capsys, "search", "--model", model, "--corpus", vectors, "--top_k", "2")) == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "query must be given, got None; write it last, or read queries with --interactive"),
        (["--interactive", "fox"], "interactive must be left out where a query is given"),
        (["--index", "ivf", "fox"], "index needs an encoded folder, got 'ivf'"),
        (["--index", "hnsw", "fox"], "index"),
    ],
)
def test_a_search_that_cannot_be_is_one_line(options, says, world, capsys, monkeypatch):
    model, corpus, _ = world
    monkeypatch.setattr("sys.stdin", Typed("fox\n"))
    assert says in error_of(capsys, "search", "--model", model, "--corpus", corpus, *options)


def test_an_index_of_what_is_no_folder_of_vectors_is_refused(world, capsys, tmp_path):
    assert "no manifest lies beside this output" in error_of(capsys, "index", "--vectors", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
