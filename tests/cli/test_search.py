"""`search`, one query or line by line, and the index that it may use."""

import io
import shlex

import pytest

from embeddings.cli.main import main
from embeddings.cli.retrieval import answer_lines, is_terminal
from embeddings.common import InputError
from embeddings.inference.encoder import Encoder
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
    assert "no manifest lies beside this output" in error_of(capsys, "index", "--vectors", f"{vectors}/none")
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


@pytest.mark.parametrize("size", [1, 2**30])
def test_a_large_corpus_file_names_the_command_that_encodes_it_once(size, world, capsys, monkeypatch):
    monkeypatch.setattr("embeddings.cli.retrieval.LARGE_CORPUS_BYTES", size)
    model, corpus, vectors = world
    capsys.readouterr()
    for place in (corpus, vectors):
        assert main(["search", "--model", model, "--corpus", place, *FLOAT32, "fox"]) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if "encode it once" in line]
        if size > 1 or place == vectors:
            assert said == []
            continue
        (line,) = said
        words = shlex.split(line.rpartition(": python main.py ")[2])
        assert words[-2:] == FLOAT32
        assert main(words) == 0
        assert main(["search", "--model", model, "--corpus", f"{corpus}.vectors", *FLOAT32, "fox"]) == 0


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


class Typed(io.TextIOWrapper):
    """Standard input, of a person where `is_terminal` is set."""

    def __init__(self, text, is_terminal=False):
        super().__init__(io.BytesIO(text if isinstance(text, bytes) else text.encode()), encoding="utf-8")
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


def answers(monkeypatch, stream):
    found = []
    monkeypatch.setattr("sys.stdin", stream)
    answer_lines(found.append)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("quick fox\n  lazy dog  \nlast", ["quick fox", "lazy dog", "last"]),
        ("one\n\ntwo\n", ["one"]),
        ("one\n \t\ntwo\n", ["one"]),
        (None, []),
    ],
)
def test_lines_are_answered_until_the_end_or_an_empty_one(text, expected, monkeypatch, capsys):
    assert answers(monkeypatch, None if text is None else Typed(text)) == expected
    written = capsys.readouterr()
    assert [float(line.removesuffix(" ms")) >= 0 for line in written.out.splitlines()] == [True] * len(expected)
    assert written.err == ""


def test_queries_before_a_line_of_another_encoding_are_answered_and_its_own_number_is_named(monkeypatch):
    found = []
    monkeypatch.setattr("sys.stdin", Typed(b"good one\ncaf\xc3\xa9\nbad \xff\n"))
    with pytest.raises(InputError, match=r"^standard input:3: is not valid UTF-8; write it as UTF-8$"):
        answer_lines(found.append)
    assert found == ["good one", "café"]


def test_a_line_is_answered_before_the_next_is_read(monkeypatch):
    events, typed = [], Typed("one\ntwo\n")
    read = typed.buffer.readline
    typed.buffer.readline = lambda: (events.append("read"), read())[1]
    monkeypatch.setattr("sys.stdin", typed)
    answer_lines(events.append)
    assert events == ["read", "one", "read", "two", "read"]


def test_a_person_is_shown_where_to_type(monkeypatch, capsys):
    assert answers(monkeypatch, Typed("one\n", is_terminal=True)) == ["one"]
    assert capsys.readouterr().err == "query> query> "
    assert is_terminal()
    monkeypatch.setattr("sys.stdin", None)
    assert not is_terminal()
