"""Vectors in a Parquet file: its columns, its row groups, resuming, and what is refused."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.cli.main import main
from embeddings.common import InputError, jobs
from embeddings.inference import Encoder, VectorFolder, encode_table
from embeddings.inference import vector_folder as module
from tests.helpers.interrupts import interrupted_at
from tests.helpers.refusals import assert_refused, refused
from tests.inference.models import encode_nothing_more, some_texts, tiny_embedder

TEXTS = some_texts(11)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny_embedder(prompts={"document": "d: "}).save_pretrained(folder)
    return Encoder.from_pretrained(str(folder), precision="float32")


def write_passages(path):
    rows = [{"_id": f"p{row}", "title": f"t{row}", "text": text, "position": row} for row, text in enumerate(TEXTS)]
    rows[2] |= {"id": 7, "file": "notes/ü.md", "links": [["a", "b"]], "empty": None}
    del rows[3]["title"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_is_the_row_of_the_corpus_with_its_vector(encoder, tmp_path):
    corpus = write_passages(tmp_path / "passages.jsonl")
    found = encode_table(encoder, corpus, tmp_path / "out.parquet", shard_size=4)
    assert (found.num_documents, found.embedding_dim) == (11, 32)
    file = pq.ParquetFile(found.path)
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [4, 4, 3]
    assert str(file.schema_arrow.field("vector").type) == "fixed_size_list<element: float>[32]"
    rows = file.read().to_pylist()
    assert [(row["id"], row["text"]) for row in rows] == [(f"p{row}", text) for row, text in enumerate(TEXTS)]
    assert [row["title"] for row in rows] == [None if row == 3 else f"t{row}" for row in range(11)]
    metadata = [json.loads(row["metadata"]) for row in rows]
    assert metadata[2] == {"position": 2, "id": 7, "file": "notes/ü.md", "links": [["a", "b"]]}
    assert metadata[4] == {"position": 4}
    encoded = [text if row == 3 else f"t{row} {text}" for row, text in enumerate(TEXTS)]
    expected = encoder.encode(encoded, role="document")
    np.testing.assert_allclose(np.array([row["vector"] for row in rows], np.float32), expected, atol=1e-6)
    about = json.loads(file.schema_arrow.metadata[b"embeddings"])
    assert about["model_sha256"] == json.loads((tmp_path / "out.parquet.manifest.json").read_text())["model_sha256"]


def test_the_corpus_is_hashed_once(encoder, tmp_path, monkeypatch):
    corpus, hashed = write_passages(tmp_path / "passages.jsonl"), []
    monkeypatch.setattr(module, "file_sha256", lambda path: hashed.append(path) or "hash")
    encode_table(encoder, corpus, tmp_path / "out.parquet")
    assert hashed == [corpus]


def test_columns_and_parquet_input_and_missing_fields(encoder, tmp_path):
    corpus = tmp_path / "rows.jsonl"
    corpus.write_text("".join(json.dumps({"id": number, "body": text}) + "\n" for number, text in enumerate(TEXTS)))
    first = encode_table(encoder, corpus, tmp_path / "one.parquet", columns={"text": "body"})
    rows = pq.read_table(first.path).to_pylist()
    assert [(row["id"], row["title"], row["metadata"]) for row in rows[:2]] == [("0", None, None), ("1", None, None)]
    # Our own output is a corpus, whose other columns are kept.
    again = encode_table(encoder, first.path, tmp_path / "two.parquet")
    both = [pq.read_table(each.path) for each in (first, again)]
    assert both[0].select(["id", "text"]) == both[1].select(["id", "text"])
    np.testing.assert_array_equal(*(np.array(table["vector"].to_pylist()) for table in both))
    assert set(json.loads(both[1]["metadata"][0].as_py())) == {"vector"}


def test_metadata_is_json_whatever_the_fields_contain(encoder, tmp_path):
    corpus = tmp_path / "rows.jsonl"
    odd = '{"text": "a", "n": NaN, "list": [1, -Infinity, {"x": NaN}], "half": "\\ud800."}\n{"text": "b", "n": NaN}\n'
    corpus.write_text(odd)
    rows = pq.read_table(encode_table(encoder, corpus, tmp_path / "out.parquet").path).to_pylist()
    assert json.loads(rows[0]["metadata"]) == {"list": [1, None, {"x": None}], "half": "?."}
    assert rows[1]["metadata"] is None


def test_a_killed_call_resumes_and_a_finished_file_is_not_written_again(encoder, tmp_path, monkeypatch):
    corpus, output = write_passages(tmp_path / "passages.jsonl"), tmp_path / "out.parquet"
    write, done = module._write_shard, []

    def write_one(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(write(*arguments))

    monkeypatch.setattr(module, "_write_shard", write_one)
    with pytest.raises(KeyboardInterrupt):
        encode_table(encoder, corpus, output, shard_size=4)
    assert not output.exists()
    monkeypatch.undo()
    counts = []
    encode = module._encode_shard
    monkeypatch.setattr(module, "_encode_shard", lambda *each: counts.append(encode(*each)) or counts[-1])
    for name in ("file_sha256", "write_file_manifest"):
        with monkeypatch.context() as patch:
            patch.setattr(jobs, name, interrupted_at(getattr(jobs, name), 1))
            with pytest.raises(KeyboardInterrupt):
                encode_table(encoder, corpus, output, shard_size=4)
    encode_table(encoder, corpus, output, shard_size=4)
    assert counts == [4, 3]
    before = output.stat().st_mtime_ns
    for path in (tmp_path / "out.parquet.work").iterdir():
        path.unlink()
    (tmp_path / "out.parquet.work").rmdir()
    encode_nothing_more(monkeypatch)
    assert encode_table(encoder, corpus, output).num_documents == 11
    assert output.stat().st_mtime_ns == before
    assert not (tmp_path / "out.parquet.work").exists()


def test_the_command_writes_the_file_and_refuses_what_it_cannot_hold(encoder, tmp_path, capsys):
    corpus, output = write_passages(tmp_path / "passages.jsonl"), tmp_path / "out.parquet"
    line = ["encode", "--model", str(encoder.origin), "--input", str(corpus), "--output", str(output)]
    assert main(line) == 0
    assert "wrote 11 vectors of width 32" in capsys.readouterr().out
    assert VectorFolder.open(tmp_path / "out.parquet.work").num_documents == 11
    assert_refused(capsys, tmp_path, "vector_format must be float32", main, [*line, "--vector-format", "int8"])
    assert_refused(capsys, tmp_path, "context cannot be stored", main, [*line, "--context", str(corpus)])
    other = write_passages(tmp_path / "other.jsonl")
    other.write_text(other.read_text().replace("fox", "cat"))
    line[line.index(str(corpus))] = str(other)
    assert_refused(capsys, tmp_path, "made with another corpus", main, line)
    mine = tmp_path / "mine.parquet"
    mine.write_text("mine")
    refused(InputError, "already exists and has no manifest", encode_table, encoder, corpus, mine)
    assert mine.read_text() == "mine"
