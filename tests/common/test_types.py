import torch

from embeddings.common import ContrastiveBatch, TokenBatch


def batch_of(texts, masks=None):
    return TokenBatch.from_lists(texts, masks or [[True] * len(text) for text in texts])


def test_padding_puts_every_token_where_its_text_is():
    tokens = batch_of([[5, 6, 7], [8], [9, 10]], [[False, True, True], [True], [True, False]])
    padded = tokens.padded(pad_token_id=1)
    assert padded.input_ids_NL.tolist() == [[5, 6, 7], [8, 1, 1], [9, 10, 1]]
    assert padded.attention_mask_NL.int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert padded.pooling_mask_NL.int().tolist() == [[0, 1, 1], [1, 0, 0], [1, 0, 0]]


def test_a_selection_is_padded_to_its_own_longest_in_the_order_given():
    padded = batch_of([[5, 6, 7], [8], [9, 10]]).padded(torch.tensor([2, 1]))
    assert padded.input_ids_NL.tolist() == [[9, 10], [8, 0]]


def test_empty_texts_and_empty_batches_pad_to_nothing():
    assert batch_of([]).padded().input_ids_NL.shape == (0, 0)
    assert batch_of([[], []]).padded().attention_mask_NL.shape == (2, 0)
    mixed = batch_of([[], [3]]).padded(pad_token_id=7)
    assert mixed.input_ids_NL.tolist() == [[7], [3]]
    assert mixed.pooling_mask_NL.tolist() == [[False], [True]]


def test_counts():
    tokens = batch_of([[1, 2], [3]])
    assert (len(tokens), tokens.num_tokens) == (2, 3)


def test_lengths_stay_on_the_processor_when_tokens_move():
    tokens = batch_of([[1, 2], [3]]).to("meta")
    assert tokens.input_ids_T.device.type == "meta"
    assert tokens.lengths_N.device.type == "cpu"


def test_a_batch_moves_whole():
    number = torch.zeros(1, dtype=torch.int64)
    fields = dict.fromkeys(ContrastiveBatch.__dataclass_fields__, number)
    texts = {"query": batch_of([[1]]), "candidate": batch_of([[2]]), "context": batch_of([[3]])}
    moved = ContrastiveBatch(**{**fields, **texts}).to("meta")
    assert len(moved) == 1
    assert moved.row_B.device.type == moved.candidate.device.type == moved.context.device.type == "meta"
    absent = dict.fromkeys(["context", "surrogate_query_BS", "surrogate_candidate_CS"])
    moved = ContrastiveBatch(**{**fields, **texts, **absent}).to("meta")
    assert moved.query.device.type == "meta"
    assert all(getattr(moved, name) is None for name in absent)
