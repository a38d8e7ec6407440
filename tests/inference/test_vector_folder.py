"""A corpus is validated, and encoded by one or more processes with the same bytes, also after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embeddings.common import InputError, OptionError
from embeddings.inference import vector_folder
from embeddings.inference.context import choose_context
from embeddings.inference.encoder import Encoder
from embeddings.inference.search import CorpusSearch
from embeddings.inference.vector_folder import (
    VECTOR_FORMATS,
    Document,
    VectorFolder,
    encode_corpus,
    on_devices,
    parse_devices,
    read_corpus,
    stored_rows,
)
from tests.helpers.interrupts import interrupted_at
from tests.helpers.manifests import rewrite_manifest
from tests.helpers.refusals import refused
from tests.inference.models import counted_encodings, on_encode, some_texts, tiny_embedder, write_corpus
from tests.models.contextual_models import tiny_contextual


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", some_texts(11))


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_embedder(prompts={"query": "the ", "other": "a dog "}), precision="float32")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("shard_size", "shards"), [(4, [4, 4, 3]), (11, [11]), (100, [11]), (1, [1] * 11)])
def test_shards_contain_the_vectors_and_documents_in_order(shard_size, shards, corpus, encoder, tmp_path):
    folder = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=shard_size)
    assert [len(vectors) for vectors in folder.shards] == shards
    assert (folder.num_documents, folder.embedding_dim, folder.shards.num_shards) == (11, 32, len(shards))
    expected = encoder.encode(some_texts(11))
    np.testing.assert_allclose(np.concatenate(list(folder.shards)), expected, rtol=0, atol=1e-6)
    assert [document.text for document in folder.documents([10, 0, 5, 0])] == [some_texts(11)[i] for i in (10, 0, 5, 0)]
    assert [document.document_id for document in folder.documents(range(11))] == [f"d{row}" for row in range(11)]


def test_documents_of_any_characters_are_stored_as_json_writes_them(encoder, tmp_path):
    rows = [{"_id": 'a "b"\\', "text": 'the "dog"\n\t\\ é \u2028 \U0001f600'}, {"_id": "d2", "text": "the cat"}]
    folder = encode_corpus(encoder, write(tmp_path / "odd.jsonl", rows), tmp_path / "out")
    assert [document._asdict() for document in folder.documents([0, 1])] == [
        {"document_id": row["_id"], "text": row["text"]} for row in rows
    ]
    stored = (tmp_path / "out" / "documents-00000.jsonl").read_text("utf-8")
    assert stored == "".join(f"{json.dumps(row)}\n" for row in rows)


@contextmanager
def killed_at(shard, monkeypatch):
    """Interrupt an encoding before it writes a shard."""
    with monkeypatch.context() as patch:
        patch.setattr(vector_folder, "_write_shard", interrupted_at(vector_folder._write_shard, shard + 1))
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("vector_format", VECTOR_FORMATS)
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_run_resumes_with_the_same_bytes_in_every_format(
    vector_format, killed, corpus, encoder, tmp_path, monkeypatch
):
    exact = np.concatenate(list(encode_corpus(encoder, corpus, tmp_path / "exact", shard_size=4).shards))
    options = {"shard_size": 4, "vector_format": vector_format}
    folder = encode_corpus(encoder, corpus, tmp_path / "whole", **options)
    stored = [folder.shards.stored(shard) for shard in range(folder.shards.num_shards)]
    assert np.concatenate(stored).tobytes() == stored_rows(exact, vector_format, "here").tobytes()
    assert VectorFolder.open(folder.path) == folder
    with killed_at(killed, monkeypatch):
        encode_corpus(encoder, corpus, tmp_path / "resumed", **options)
    refused(InputError, "'complete' is False", VectorFolder.open, tmp_path / "resumed")
    counts = counted_encodings(monkeypatch)
    encode_corpus(encoder, corpus, tmp_path / "resumed", **options)
    # The call with one empty text checks the prompt.
    assert counts == [1, *[4, 4, 3][killed:]]
    # A finished folder is not changed.
    encode_corpus(encoder, corpus, tmp_path / "resumed", **options)
    assert counts[-1] == 1
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")


def test_a_run_resumed_with_another_budget_keeps_the_mini_batches_of_the_first(corpus, encoder, tmp_path, monkeypatch):
    small, large, seen = encoder.with_mini_batch_tokens(40), encoder.with_mini_batch_tokens(4000), []
    encode_corpus(small, corpus, tmp_path / "whole", shard_size=4)
    with killed_at(1, monkeypatch):
        encode_corpus(small, corpus, tmp_path / "resumed", shard_size=4)
    on_encode(monkeypatch, lambda used, texts, _: seen.append(used.mini_batch_tokens) if any(texts) else None)
    for resumed in (large, large):
        encode_corpus(resumed, corpus, tmp_path / "resumed", shard_size=4)
        assert content(tmp_path / "resumed") == content(tmp_path / "whole")
    assert seen == [40] * 2
    assert large.mini_batch_tokens == 4000


def test_a_kill_between_documents_and_vectors_leaves_the_shard_incomplete(corpus, encoder, tmp_path, monkeypatch):
    encode_corpus(encoder, corpus, tmp_path / "whole", shard_size=4)

    def full(*_):
        raise OSError("disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(vector_folder, "save_array", full)
        with pytest.raises(OSError, match="disk"):
            encode_corpus(encoder, corpus, tmp_path / "resumed", shard_size=4)
    assert sorted(content(tmp_path / "resumed")) == ["documents-00000.jsonl", "manifest.json"]
    encode_corpus(encoder, corpus, tmp_path / "resumed", shard_size=4)
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")


@pytest.mark.parametrize(("free", "name"), [(1000, "out"), (3000, "vectors-00002.npy")])
def test_a_full_disk_is_found_first_and_the_file_named(free, name, corpus, encoder, tmp_path, monkeypatch):
    left = iter([free, 4000, 4000, 100])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**9, free=next(left)))
    with pytest.raises(
        OSError, match=r"No space left on device: [\d,]+ bytes are needed and [\d,]+ available"
    ) as error:
        encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4)
    assert Path(error.value.filename).name == name
    monkeypatch.undo()
    encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4)
    assert content(tmp_path / "out") == content(encode_corpus(encoder, corpus, tmp_path / "new", shard_size=4).path)


def test_the_room_for_texts_is_counted_in_bytes(encoder, tmp_path, monkeypatch):
    needed = []
    monkeypatch.setattr(vector_folder, "check_disk_space", lambda _, num_bytes: needed.append(num_bytes))
    for letter in "aあ":
        corpus = write_corpus(tmp_path / f"{letter}.jsonl", [letter * 100])
        encode_corpus(encoder, corpus, tmp_path / letter)
    assert needed[2] - needed[0] == 200


def test_another_corpus_model_or_option_is_refused_by_name(corpus, encoder, tmp_path):
    encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4)
    before = content(tmp_path / "out")
    other = Encoder(tiny_embedder(), precision="float32")
    for used, options, message in (
        (encoder, {"shard_size": 5}, "field 'shard_size' is 4, expected 5"),
        (encoder, {"shard_size": 4, "prompt_name": "other"}, "field 'prompt_name' is None, expected 'other'"),
        (other, {"shard_size": 4}, "field 'model_sha256' differs"),
    ):
        refused(InputError, message, encode_corpus, used, corpus, tmp_path / "out", **options)
    corpus.write_text(corpus.read_text().replace("d10", "d99"))
    refused(InputError, "field 'corpus_sha256' differs", encode_corpus, encoder, corpus, tmp_path / "out", shard_size=4)
    assert content(tmp_path / "out") == before


def test_a_bad_corpus_or_option_writes_nothing(corpus, encoder, tmp_path):
    refused(OptionError, "shard_size must be >= 1", encode_corpus, encoder, corpus, tmp_path / "out", shard_size=0)
    refused(OptionError, "prompt_name must name", encode_corpus, encoder, corpus, tmp_path / "out", prompt_name="nope")
    corpus.write_text(corpus.read_text() + '{"_id": "cut')
    refused(InputError, r"corpus\.jsonl:12: ", encode_corpus, encoder, corpus, tmp_path / "out", shard_size=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "not finite"), (np.inf, "not finite"), (0, "zero")])
def test_a_zero_or_non_finite_vector_is_named_and_not_ranked(value, kind, corpus, encoder, tmp_path):
    encode_corpus(encoder, corpus, tmp_path / "out", shard_size=10)
    path = tmp_path / "out" / "vectors-00001.npy"
    vectors = np.load(path)
    vectors[0] = value
    np.save(path, vectors)
    rewrite_manifest(path.with_name("manifest.json"))
    refused(InputError, rf"vectors-00001\.npy:0: .* {kind}", CorpusSearch(encoder, tmp_path / "out").search, ["fox"])


def test_the_default_shard_is_small_where_encoding_is_slow_and_a_folder_keeps_its_own(corpus, encoder, tmp_path):
    assert encode_corpus(encoder, corpus, tmp_path / "out").shard_size == 1024
    encode_corpus(encoder, corpus, tmp_path / "small", shard_size=4)
    before = content(tmp_path / "small")
    assert encode_corpus(encoder, corpus, tmp_path / "small").shard_size == 4
    assert content(tmp_path / "small") == before


def test_a_text_whose_vector_is_zero_is_named_by_its_row(corpus, encoder, tmp_path, monkeypatch):
    def zeros(_, texts, *arguments, **options):
        return np.zeros((len(texts), encoder.embedding_dim), np.float32)

    monkeypatch.setattr(type(encoder), "encode", zeros)
    with pytest.raises(InputError, match=r"corpus\.jsonl:1: the vector is zero; check its text and the model"):
        encode_corpus(encoder, corpus, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "documents-00001.jsonl:1: is not a document; delete the folder"),
        (None, "documents-00001.jsonl: is missing or damaged"),
    ],
)
def test_damaged_documents_are_named_in_one_line(content, message, corpus, encoder, tmp_path):
    folder = encode_corpus(encoder, corpus, tmp_path / "out", shard_size=4)
    path = tmp_path / "out" / "documents-00001.jsonl"
    path.unlink() if content is None else path.write_bytes(content)
    rewrite_manifest(path.with_name("manifest.json"))
    assert folder.documents([0])[0].document_id == "d0"
    for look in (lambda: folder.documents([0, 4]), lambda: CorpusSearch(encoder, tmp_path / "out").search(["a"], 11)):
        refused(InputError, message, look)


@pytest.fixture(scope="module")
def contextual():
    return Encoder(tiny_contextual(), precision="float32")


def test_a_folder_stores_its_context_and_queries_use_it(contextual, corpus, tmp_path):
    context = choose_context(contextual, corpus, 3, seed=2)
    folder = encode_corpus(contextual, corpus, tmp_path / "out", shard_size=4, context=context)
    expected = contextual.encode(some_texts(11), context=context)
    np.testing.assert_allclose(np.concatenate(list(folder.shards)), expected, rtol=0, atol=1e-6)
    kept = folder.context()
    assert (kept.document_ids, kept.summary()) == (context.document_ids, context.summary())
    np.testing.assert_array_equal(kept.vector_MH, context.vector_MH)
    (hits,) = CorpusSearch(contextual, tmp_path / "out").search(["quick fox"], 11)
    query = contextual.encode(["quick fox"], role="query", context=context)[0]
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(expected @ query)[::-1], atol=1e-5)
    null = contextual.encode(["quick fox"], role="query")[0]
    assert np.abs(np.sort(expected @ null) - np.sort(expected @ query)).max() > 1e-4
    for place in (corpus, tmp_path / "out"):
        (again,) = CorpusSearch(contextual, place, context=context).search(["quick fox"], 11)
        assert [hit.document_id for hit in again] == [hit.document_id for hit in hits]
        np.testing.assert_allclose([hit.score for hit in again], [hit.score for hit in hits], atol=1e-6)


def test_another_context_is_refused_and_nothing_changes(contextual, corpus, tmp_path):
    context, other = (choose_context(contextual, corpus, 3, seed) for seed in (0, 1))
    for name, stored, requested in (("with", context, other), ("without", None, other), ("with", context, None)):
        encode_corpus(contextual, corpus, tmp_path / name, context=stored)
        before = content(tmp_path / name)
        with pytest.raises(InputError, match=r"field 'context(\.seed)?' is"):
            encode_corpus(contextual, corpus, tmp_path / name, context=requested)
        assert content(tmp_path / name) == before
    for name, message in (
        ("without", "was encoded without a context, but the requested context is 3 documents"),
        ("with", r"with 3 documents of seed 0 .* requested context is 3 documents of seed 1"),
    ):
        refused(InputError, message, CorpusSearch, contextual, tmp_path / name, context=other)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("rows", "documents"),
    [
        ([{"_id": "a", "title": "Title", "text": "body"}], [("a", "Title body")]),
        ([{"_id": "b", "title": "", "text": "body"}], [("b", "body")]),
        (
            [{"_id": "c", "title": "Title", "text": ""}, {"_id": "e", "title": None, "text": "x"}],
            [("c", "Title"), ("e", "x")],
        ),
        ([{"_id": "d", "text": "tëxt", "metadata": {"url": 1}}, {"_id": 7, "text": ""}], [("d", "tëxt"), ("7", "")]),
        # Rows without ids are numbered from 0, and `id` is used if there is no `_id`.
        ([{"text": "x"}, {"text": "y"}], [("0", "x"), ("1", "y")]),
        ([{"id": "a", "text": "x"}, {"id": 7, "text": "y"}], [("a", "x"), ("7", "y")]),
        ([{"_id": "a", "id": "x", "text": "x"}, {"_id": "b", "id": "x", "text": "y"}], [("a", "x"), ("b", "y")]),
    ],
)
def test_a_row_has_an_id_and_title_and_text_joined_by_a_space(rows, documents, tmp_path):
    assert list(read_corpus(write(tmp_path / "corpus.jsonl", rows))) == documents
    table = pa.Table.from_pylist([{key: value and str(value) for key, value in row.items()} for row in rows])
    pq.write_table(table, tmp_path / "corpus.parquet")
    assert list(read_corpus(tmp_path / "corpus.parquet")) == documents


def test_columns_may_have_other_names(tmp_path):
    rows = [{"id": "a", "query": "x", "title": "T"}, {"id": "b", "query": "y", "text": "no", "heading": None}]
    path = write(tmp_path / "corpus.jsonl", rows)
    found = list(read_corpus(path, {"text": "query", "_id": "id", "title": "heading"}))
    assert found == [Document("a", "x"), Document("b", "y")]
    both = write(tmp_path / "both.jsonl", [{"id": "the text", "key": "k"}])
    assert list(read_corpus(both, {"text": "id"})) == [Document("0", "the text")]
    refused(InputError, r"corpus\.jsonl:1: field 'answer' is", lambda: list(read_corpus(path, {"text": "answer"})))
    for name in ("_id", "title"):
        columns = {"text": "query", name: "other"}
        refused(
            InputError, r"corpus\.jsonl: no row has the column 'other'", lambda c=columns: list(read_corpus(path, c))
        )
    with pytest.raises(OptionError, match="columns must map _id, title or text to a column, got 'query'"):
        list(read_corpus(path, {"query": "text"}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"_id": "b"}, r"field 'text' is missing \(found: _id\)"),
        ({"_id": "b", "text": None}, "field 'text' is null, expected text; give it a text, or leave the row out"),
        ({"_id": "a", "text": "x"}, "the id 'a' occurs a second time"),
        ({"id": "a", "text": "x"}, "the id 'a' occurs a second time"),
        ({"_id": "", "text": "x"}, "field '_id' is empty"),
        ({"_id": True, "text": "x"}, "field '_id' is true or false, expected text"),
        ({"_id": "b", "text": "\ud800"}, "field 'text' contains a lone surrogate"),
    ],
)
def test_a_bad_row_is_named(row, message, tmp_path):
    path = write(tmp_path / "corpus.jsonl", [{"_id": "a", "text": "x"}, row])
    refused(InputError, rf"corpus\.jsonl:2: {message}", lambda: list(read_corpus(path)))


def test_ids_with_equal_hashes_are_compared_as_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(vector_folder, "hash", lambda _: 1, raising=False)
    path = write(tmp_path / "corpus.jsonl", [{"_id": name, "text": "x"} for name in "abc"])
    assert [document.document_id for document in read_corpus(path)] == ["a", "b", "c"]
    write(path, [{"_id": name, "text": "x"} for name in "abcb"])
    refused(InputError, r"corpus\.jsonl:4: the id 'b' occurs a second time", lambda: list(read_corpus(path)))


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("devices", "num_gpus", "found"),
    [
        (1, 0, ("cpu",)),
        ("cpu, cpu", 0, ("cpu", "cpu")),
        (2, 4, ("cuda:0", "cuda:1")),
        ("cuda:3,cuda:1", 4, ("cuda:3", "cuda:1")),
        (0, 0, r"devices must be devices of this machine \(cpu\), got 0; give a number"),
        *((name, 4, "devices must be devices of this machine") for name in ("cpu,", "tpu", "cuda:4", 5)),
        ("cpu,cuda:0", 4, "devices must all be of one type"),
    ],
)
def test_devices_are_counted_or_named_and_missing_ones_are_refused(devices, num_gpus, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    if isinstance(found, tuple):
        assert parse_devices(devices) == found
    else:
        refused(OptionError, found, parse_devices, devices)


def test_a_model_without_a_directory_cannot_be_used_on_several_devices():
    with pytest.raises(OptionError, match="devices needs a model that was read from a directory"):
        on_devices(Encoder(tiny_embedder()), ("cpu", "cpu"), print, [])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices") / "model"
    tiny_embedder(prompts={"document": "a dog "}).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def encoded(model, corpus, output, **options):
    encoder = Encoder.from_pretrained(model, device="cpu", precision="float32", dimensions=20)
    context = choose_context(encoder, corpus) if encoder.num_context else None
    encode_corpus(encoder, corpus, output, shard_size=4, context=context, **options)
    return content(output)


@pytest.mark.slow
@pytest.mark.parametrize(("is_contextual", "vector_format"), [(False, "float32"), (False, "int8"), (True, "float32")])
def test_two_devices_and_a_tokeniser_write_the_bytes_of_one_process(
    is_contextual, vector_format, model, tmp_path, one_thread
):
    corpus, options = write_corpus(tmp_path / "corpus.jsonl", some_texts(40)), {"vector_format": vector_format}
    if is_contextual:
        model = str(tmp_path / "contextual")
        tiny_contextual().save_pretrained(model)
    whole = encoded(model, corpus, tmp_path / "whole", **options)
    assert len([name for name in whole if name.startswith("vectors")]) == 10
    found = encoded(model, corpus, tmp_path / "shared", devices=("cpu", "cpu"), tokenizer_workers=1, **options)
    assert found == whole
    for name in ("vectors-00002.npy", "vectors-00007.npy"):
        (tmp_path / "shared" / name).unlink()
    rewrite_manifest(tmp_path / "shared" / "manifest.json", complete=False)
    assert encoded(model, corpus, tmp_path / "shared", tokenizer_workers=2, **options) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "number", "code", "message"),
    [
        (
            "group",
            signal.SIGINT,
            130,
            "interrupted; finished files and shards are kept, and the same command continues after them",
        ),
        ("worker", signal.SIGKILL, 70, "a worker process was ended by a signal (SIGKILL); finished results are kept"),
    ],
)
def test_an_interrupted_run_resumes(target, number, code, message, model, tmp_path, one_thread):
    corpus, output = write_corpus(tmp_path / "corpus.jsonl", some_texts(800)), tmp_path / "out"
    line = ["encode", "--model", model, "--input", str(corpus), "--output", str(output), "--precision", "float32"]
    line += ["--dimensions", "20", "--shard_size", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "main.py", *line, "--devices", "2"],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not list(output.glob("vectors-*.npy")):
        assert process.poll() is None
        time.sleep(0.02)
    if target == "group":
        # Like Ctrl-C in a terminal.
        os.killpg(process.pid, number)
    else:
        os.kill(worker_of(process.pid), number)
    errors = process.communicate()[1].decode().strip().splitlines()
    assert not [line for line in errors if "Traceback" in line], "\n".join(errors)
    assert process.returncode == code
    assert errors[-1].startswith("error: ")
    assert message in errors[-1]
    left = content(output)
    assert 0 < len([name for name in left if name.startswith("vectors")]) < 200
    assert not [name for name in left if name.startswith(".")] or target == "worker"
    whole = encoded(model, corpus, tmp_path / "whole")
    resumed = encoded(model, corpus, output)
    assert {name: resumed[name] for name in whole} == whole


def worker_of(process):
    """A worker process that a process started for a device."""
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("no worker")
