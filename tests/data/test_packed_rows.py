import pickle
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from embeddings.common.types import PackedRows
from embeddings.data.samplers.base import PlanEntry
from embeddings.data.text_datamodule import RowCollator, RowMixture
from embeddings.data.text_streams import DocumentTokenizer, open_stream
from tests.data.test_token_stream import TEXTS, source
from tests.helpers.tiny import wordpiece_tokenizer

TOKENIZER = wordpiece_tokenizer()


@pytest.fixture
def rows(tmp_path: Path) -> RowMixture:
    tokenizer = DocumentTokenizer(TOKENIZER, True)
    sources = [source(tmp_path, TEXTS, "a.jsonl"), source(tmp_path, TEXTS[:2], "b.jsonl")]
    return RowMixture([open_stream(one, tokenizer, tmp_path / "cache") for one in sources], 8)


def test_the_rows_of_all_sources_follow_each_other_and_none_is_of_two(rows: RowMixture) -> None:
    assert len(rows) == sum(rows.sizes)
    assert min(rows.sizes) > 2
    found = [rows[PlanEntry(row, 5)] for row in range(len(rows))]
    expected = [stream.row(index, 8) for stream in rows.streams for index in range(stream.num_rows(8))]
    assert [row.ids.tolist() for row in found] == [ids.tolist() for ids, _ in expected]
    assert [row.documents.tolist() for row in found] == [documents.tolist() for _, documents in expected]
    assert {row.draw for row in found} == {5}
    assert [row.row for row in found] == list(range(len(rows)))
    assert len(pickle.loads(pickle.dumps(rows))) == len(rows)


def test_a_batch_is_padded_on_the_right_and_knows_its_special_tokens(rows: RowMixture) -> None:
    last = rows.sizes[0] - 1
    collate = RowCollator(TOKENIZER, 8)
    batch = collate([rows[PlanEntry(0, 3)], rows[PlanEntry(last, 4)], rows[PlanEntry(-1, 0)]])
    assert isinstance(batch, PackedRows)
    count = len(rows[PlanEntry(last, 0)].ids)
    assert 0 < count < 8
    assert (batch.document_NL >= 0).sum(1).tolist() == [8, count, 0]
    assert (batch.input_ids_NL[batch.document_NL < 0] == TOKENIZER.pad_token_id).all()
    assert batch.draw_N.tolist() == [3, 4, 0]
    assert batch.row_N.tolist() == [0, last, -1]
    special = {TOKENIZER.cls_token_id, TOKENIZER.sep_token_id, TOKENIZER.pad_token_id, TOKENIZER.unk_token_id}
    expected = [[token in special for token in row] for row in batch.input_ids_NL.tolist()]
    assert batch.special_NL.tolist() == expected
    assert 0 < sum(expected[0]) < 8


def test_a_task_makes_of_the_rows_what_it_will(rows: RowMixture) -> None:
    collate = RowCollator(TOKENIZER, 8, task=lambda packed: packed.input_ids_NL.sum())
    entries = [rows[PlanEntry(row, 0)] for row in range(3)]
    assert torch.equal(collate(entries), RowCollator(TOKENIZER, 8)(entries).input_ids_NL.sum())


def test_padding_is_special_where_the_tokenizer_has_no_token_for_it(rows: RowMixture) -> None:
    unpadded = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, sep_token="[SEP]")
    assert unpadded.pad_token_id is None
    batch = RowCollator(unpadded, 8)([rows[PlanEntry(-1, 0)], rows[PlanEntry(0, 0)]])
    assert batch.special_NL[0].all()
    assert not batch.special_NL[1].all()
