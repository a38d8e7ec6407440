"""The files of a docstring corpus: training records, two evaluation folders, and the manifest that ends the job."""

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from embeddings.common.errors import InputError, OptionError
from embeddings.common.fileio import atomic_path, check_manifest, file_sha256, write_manifest, write_text
from embeddings.data.docstrings.namespace import namespace_negatives
from embeddings.data.docstrings.split import DocstringSplit, EvaluationSet

KIND = "docstring_corpus"


def finished_manifest(output: Path, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of `output` if it was made from these inputs and all its files are still as they were written."""
    try:
        check_manifest(output, inputs)
    except InputError:
        return None
    manifest: dict[str, Any] = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    intact = all(
        (output / name).is_file() and file_sha256(output / name) == digest for name, digest in manifest["files"].items()
    )
    return manifest if intact else None


def check_output(output: Path) -> None:
    """Check that `output` may be written: absent, empty, or an earlier docstring corpus.

    Raises:
        OptionError: If it is a file, or a folder with anything else in it.
    """
    if output.exists() and not output.is_dir():
        raise OptionError("output", str(output), "must be a folder", "name a folder that need not exist yet")
    if output.is_dir() and any(output.iterdir()):
        try:
            check_manifest(output, {"kind": KIND})
        except (InputError, ValueError):
            raise OptionError(
                "output", str(output), "must be new, empty or an earlier docstring corpus", "name another folder"
            ) from None


def write_corpus(output: Path, split: DocstringSplit, fields: Mapping[str, Any], seed: int = 0) -> None:
    """Write a whole corpus to `output`, in place of an earlier one.

    The files are written to a folder beside it, which takes its name when all of them are on disk: whatever ends the
    job before that leaves `output` as it was.

    Args:
        output: Folder of the corpus.
        split: What to write.
        fields: The manifest's fields, to which the hashes of all files are added.
        seed: Seed of the hard negatives' draws.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent) as temporary:
        folder = Path(temporary, "new")
        _write_train(folder / "train.jsonl.gz", split, seed)
        for name in ("validation", "in_domain", "held_out"):
            _write_evaluation(folder / "eval" / name, getattr(split, name))
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        hashes = {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
        write_manifest(folder, {**fields, "files": hashes})
        if output.exists():
            os.replace(output, Path(temporary, "old"))
        os.replace(folder, output)


def _write_train(path: Path, split: DocstringSplit, seed: int) -> None:
    with (
        atomic_path(path) as temporary,
        open(temporary, "wb") as file,
        # No name and no time in the header: the same records make the same bytes.
        gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as zipped,
    ):
        for function, negatives in zip(split.train, namespace_negatives(split.train, seed), strict=True):
            record = {
                "id": function.id,
                "query": function.query,
                "positive": function.document,
                "negatives": [{"text": negative.text, "level": negative.level} for negative in negatives],
                "package": function.package,
                "module": function.module,
            }
            zipped.write(_line(record).encode())


def _write_evaluation(folder: Path, evaluation: EvaluationSet) -> None:
    """One folder in the layout of BEIR; a query has the id of the one function that answers it."""
    _write_lines(
        folder / "corpus.jsonl",
        (
            {
                "_id": function.id,
                "title": "",
                "text": function.document,
                "package": function.package,
                "module": function.module,
            }
            for function in evaluation.documents
        ),
    )
    _write_lines(
        folder / "queries.jsonl", ({"_id": function.id, "text": function.query} for function in evaluation.queries)
    )
    rows = [f"{function.id}\t{function.id}\t1\n" for function in evaluation.queries]
    write_text(folder / "qrels.tsv", "query-id\tcorpus-id\tscore\n" + "".join(rows))


def _write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    write_text(path, "".join(_line(record) for record in records))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
