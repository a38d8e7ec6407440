import numpy as np
import pytest

from embeddings.data.tokenize import TokenSpan
from embeddings.figures.anchor_tokens import draw_anchor_tokens, shaded_pieces, weighted_pieces
from embeddings.inference.inspection import TokenWeights


def weights_of(text, spans, weights, num_prompt=0):
    pooled = np.arange(len(spans)) >= num_prompt
    spans = [TokenSpan(name, start, end, start == end) for name, start, end in spans]
    return TokenWeights(text, spans, np.array(weights, dtype=np.float32), pooled)


WORDS = weights_of(
    "The  foxes run off",
    [("[CLS]", 0, 0), ("the", 0, 3), ("fox", 5, 8), ("##es", 8, 10), ("Ġrun", 10, 14), ("[SEP]", 0, 0)],
    [0.5, 0.1, 0.1, 0.1, 0.05, 0.15],
)


def rounded(pieces):
    return [(piece.text, None if piece.value is None else round(piece.value, 4), piece.is_special) for piece in pieces]


def test_tokens_are_shaded_as_the_texts_own_letters_and_the_rest_of_the_text_stays():
    assert rounded(shaded_pieces(WORDS)) == [
        (" ", None, False), (" [CLS] 50.0% ", 3.0, True), (" ", None, False),
        ("The", 0.6, False), ("  ", None, False), ("fox", 0.6, False), ("es", 0.6, False),
        (" ", None, False), ("run", 0.3, False),
        (" ", None, False), (" [SEP] 15.0% ", 0.9, True), (" ", None, False),
        (" …", None, False),
    ]  # fmt: skip


def test_tokens_of_one_character_are_one_piece_of_their_sum_and_their_mean_shade():
    split = weights_of("東a", [("æ", 0, 1), ("Ŀ", 0, 1), ("±", 0, 1), ("a", 1, 2)], [0.1, 0.2, 0.3, 0.4])
    found = [(piece.text, round(piece.weight, 4), piece.num_tokens) for piece in weighted_pieces(split)]
    assert found == [("東", 0.6, 3), ("a", 0.4, 1)]
    assert rounded(shaded_pieces(split)) == [("東", 0.8, False), ("a", 1.6, False)]


def test_a_prompt_has_no_shade_and_its_special_token_no_percentage():
    prompted = weights_of("q: a", [("<s>", 0, 0), ("q:", 0, 2), ("▁a", 2, 4)], [0.0, 0.0, 1.0], num_prompt=2)
    assert rounded(shaded_pieces(prompted)) == [
        (" ", None, False), ("<s>", None, True), (" ", None, False),
        ("q:", None, False), (" ", None, False), ("a", 1.0, False),
    ]  # fmt: skip


def test_a_token_of_white_space_alone_is_seen():
    spaced = weights_of("a    b", [("a", 0, 1), ("ĠĠĠ", 1, 4), ("Ġb", 4, 6)], [0.25, 0.25, 0.5])
    assert rounded(shaded_pieces(spaced)) == [
        ("a", 0.75, False), ("␣", 0.75, False), (" ", None, False), ("b", 1.5, False),
    ]  # fmt: skip


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    draw_anchor_tokens([WORDS, WORDS], "title", "subtitle", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
