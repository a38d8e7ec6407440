"""The documents of a corpus with their vectors in one Parquet file, as databases and vector stores read it."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.io import check_disk_space, check_manifest
from embeddings.common.jobs import ArrayTask, discard_on_user_error, finished_manifest, output_file
from embeddings.common.progress import progress_bar
from embeddings.common.text import PromptChoice, TextRole
from embeddings.data.readers import open_reader
from embeddings.inference.encoder import Encoder
from embeddings.inference.vector_folder import VectorFolder, bytes_per_vector, encode_corpus, encoding_fields


class VectorTable(NamedTuple):
    """A Parquet file of vectors: its path, its rows and the width of the vectors."""

    path: Path
    num_documents: int
    embedding_dim: int


def encode_table(
    encoder: Encoder,
    corpus: str | PathLike[str],
    output: str | PathLike[str],
    *,
    prompt_name: PromptChoice = None,
    role: TextRole = "document",
    columns: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    devices: tuple[str, ...] = (),
    tokenizer_workers: int = 0,
    task: ArrayTask | None = None,
) -> VectorTable | None:
    """Encode a corpus file into a Parquet file; None while shards of other tasks are missing.

    Columns: `id`, `title` and `text` as in the corpus, `metadata` (its other fields as a JSON object, or null), and
    `vector`, a fixed-size list of float32. Each shard is a row group, and one is in memory. The vectors are computed by
    `encode_corpus` in the folder `OUTPUT.work`, where a killed call resumes; it may be deleted afterwards. A finished
    file is not written again.

    The arguments are those of `encode_corpus`; `output` is the file to write, with `OUTPUT.manifest.json` beside it.
    """
    target = Path(output)
    work = target.with_name(f"{target.name}.work")
    texts: dict[str, Any] = {"prompt_name": prompt_name, "role": role, "columns": columns, "shard_size": shard_size}
    known = encoding_fields(encoder, corpus, work, **texts)
    fields = {**known[0], "kind": "vector_table"}
    # It has no effect on the rows.
    del fields["shard_size"]
    if finished_manifest(target, fields) is None:
        with discard_on_user_error(work, task=task):
            options: dict[str, Any] = {"devices": devices, "tokenizer_workers": tokenizer_workers, "task": task}
            folder = encode_corpus(encoder, corpus, work, **texts, **options, known=known)
        if folder is None:
            return None
        _write(folder, corpus, columns or {}, target, fields)
    return VectorTable(target, fields["num_documents"], fields["embedding_dim"])


def _write(
    folder: VectorFolder,
    corpus: str | PathLike[str],
    columns: Mapping[str, str],
    target: Path,
    fields: Mapping[str, Any],
) -> None:
    check_manifest(folder.path, {"corpus_sha256": fields["corpus_sha256"]})
    width, rows = folder.embedding_dim, _rows(Path(corpus), columns)
    about = {name: fields[name] for name in ("model_sha256", "precision", "prompt_name", "role")}
    schema = pa.schema(
        [
            *((name, pa.large_string()) for name in ("id", "title", "text", "metadata")),
            ("vector", pa.list_(pa.float32(), width)),
        ],
        {"embeddings": json.dumps(about)},
    )
    check_disk_space(target, folder.num_documents * bytes_per_vector("float32", width))
    # Vectors of a model hardly shrink.
    compression = dict.fromkeys(schema.names[:-1], "zstd") | {"vector.list.element": "none"}
    options: dict[str, Any] = {"compression": compression, "use_dictionary": False}
    with (
        output_file(target, fields) as temporary,
        pq.ParquetWriter(temporary, schema, **options) as writer,
        progress_bar(folder.num_documents, f"writing {target.name}", "document") as bar,
    ):
        for shard, vector_nD in enumerate(folder.shards):
            documents = folder.documents(folder.shards.rows(shard))
            titles, texts, others = zip(*islice(rows, len(documents)), strict=True)
            ids = [document.document_id for document in documents]
            arrays = [
                *(pa.array(column, pa.large_string()) for column in (ids, titles, texts, others)),
                pa.FixedSizeListArray.from_arrays(pa.array(vector_nD.reshape(-1)), width),
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema), row_group_size=len(documents))
            bar.update(len(documents))


def _rows(corpus: Path, columns: Mapping[str, str]) -> Iterator[tuple[str | None, str, str | None]]:
    """The title, the text, and all other fields as JSON, of each row of a corpus that `read_corpus` has checked."""
    text, title, identifier = (columns.get(name, name) for name in ("text", "title", "_id"))
    with open(corpus, "rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    names = pq.read_schema(fspath(corpus)).names if is_parquet else [text, title, identifier]
    for _, fields in open_reader(corpus, names, (text,)):
        used = text, title, "id" if identifier == "_id" and "_id" not in fields else identifier
        unused = {name: value for name, value in fields.items() if name not in used}
        # UTF-8 has no halves of a character, and JSON no NaN.
        content = json.dumps(unused, ensure_ascii=False, default=str).encode("utf-8", "replace")
        values = json.loads(content, parse_constant=lambda _: None)
        others = {name: value for name, value in values.items() if value is not None}
        metadata = json.dumps(others, ensure_ascii=False) if others else None
        yield fields.get(title), fields[text], metadata
