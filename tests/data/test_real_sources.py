"""The conversions on published data sets, where they lie on this machine."""

import os
from pathlib import Path

import pytest

from embeddings.data import PlanEntry, SourceConfig, open_source

ROOT = Path(os.environ.get("EMBED_DATA") or Path(__file__).parents[3] / "shared" / "data")
CASES = [
    ("nq_pairs", {}, 2990),
    ("snli_triplets", {"instruction": ["one", "two"], "suspect_rows": "leave_out"}, 6693),
    ("banking77", {"conversion": "class_by_example"}, 10003),
    ("clinc150", {"conversion": "class_by_label"}, 15100),
    ("stsb", {"conversion": "sts", "instruction": "similar", "symmetric": True}, None),
]


@pytest.mark.skipif(not (ROOT / "banking77").is_dir(), reason=f"no data sets in {ROOT}; set EMBED_DATA")
@pytest.mark.parametrize(("name", "options", "num_rows"), CASES, ids=[case[0] for case in CASES])
def test_a_published_data_set_becomes_examples(tmp_path, name, options, num_rows):
    source = open_source(SourceConfig(name, str(ROOT / name / "train.jsonl.gz"), **options), tmp_path)
    if num_rows is not None:
        assert len(source) == num_rows
    for row in range(0, len(source), max(1, len(source) // 200)):
        example = source[PlanEntry(row, row)]
        assert example.query.strip()
        assert all(text.strip() for text in example.positives)
        if options.get("conversion", "pairs").startswith("class"):
            assert len(example.negatives) == len(example.negative_labels) == 7
            assert example.label not in example.negative_labels
            assert example.query.strip() != example.positives[0].strip()
        if options.get("symmetric"):
            assert example.document_prompt == example.query_prompt == "Instruct: similar\nQuery: "
