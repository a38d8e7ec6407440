import torch

from embeddings.common.packed_rows import PackedRows, Prediction, positions_in_document

DOCUMENT_NL = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, -1, -1]])


def test_positions_count_within_each_document_and_begin_anew_in_each_row() -> None:
    expected = []
    for row in DOCUMENT_NL.tolist():
        seen: dict[int, int] = {}
        for document in row:
            expected.append(seen.get(document, 0))
            seen[document] = seen.get(document, 0) + 1
    assert positions_in_document(DOCUMENT_NL).flatten().tolist() == expected


def test_lengths_are_rows_and_targets() -> None:
    number_N = torch.arange(2)
    rows = PackedRows(DOCUMENT_NL, DOCUMENT_NL, DOCUMENT_NL < 0, number_N, number_N)
    assert len(rows) == 2
    assert torch.equal(rows.to("cpu").row_N, number_N)
    read_P = torch.tensor([1, 2, 3])
    moved = Prediction(DOCUMENT_NL, DOCUMENT_NL, read_P, read_P + 1, True, number_N).to("cpu")
    assert len(moved) == 3
    assert moved.has_padding is True
    assert torch.equal(moved.label_P, read_P + 1)
    assert torch.equal(moved.row_N, number_N)
