"""The library from Python: its top-level names, and the example that trains, exports and searches."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import embeddings
from embeddings import Encoder
from examples.train import main
from tests.helpers.runs import write_pairs, write_retrieval_folder


def test_the_public_names_load_on_first_use() -> None:
    code = (
        "import sys, embeddings; assert 'torch' not in sys.modules; embeddings.InfoNCE; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    functions = [name for name in embeddings.__all__ if not isinstance(getattr(embeddings, name), type)]
    assert functions == ["source_from_rows"]
    assert callable(embeddings.source_from_rows)
    with pytest.raises(AttributeError, match="module 'embeddings' has no attribute 'Encode'"):
        embeddings.Encode  # noqa: B018


# Lightning's advice to a script, whose author may not want the log.
@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed", "ignore:.*does not have many workers")
def test_the_example_trains_exports_and_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl.gz").write_bytes(gzip.compress(pairs.read_bytes()))
    write_retrieval_folder(tmp_path / "data" / "eval" / "validation")
    main(str(tmp_path / "data"), str(tmp_path / "model"), steps=2, batch_size=8)
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert lines[0].endswith("Shortest path in a graph.")
    assert [line[:5] for line in lines] == sorted((line[:5] for line in lines), reverse=True)
    # Mean pooling needs no code of its own: any server that reads sentence-transformers directories takes it.
    assert not list((tmp_path / "model").glob("*.py"))
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    ours = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32", device="cpu")
    texts = ["how do I pad", "a graph"]
    assert np.abs(theirs.encode_query(texts) - ours.encode_query(texts)).max() <= 1e-5
    scores = ours.similarity(ours.encode_query(texts), ours.encode_document(texts))
    assert (
        np.abs(theirs.similarity(theirs.encode_query(texts), theirs.encode_document(texts)).numpy() - scores).max()
        <= 1e-5
    )
