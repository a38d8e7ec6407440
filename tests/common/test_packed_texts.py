"""A sequence of compressed texts."""

import pytest

from embeddings.common.packed_texts import PackedTexts


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_it_is_the_sequence_of_its_texts(count):
    texts = ["", "a\0b\nc", "ÿ😀", *(f"text {row}" for row in range(count))][:count]
    packed = PackedTexts(texts)
    assert (len(packed), list(packed), packed.to_arrow().to_pylist()) == (count, texts, texts)
    assert [packed[row] for row in range(-count, count)] == texts * 2
    assert packed[::-7] == texts[::-7]
    for position in (count, -count - 1):
        with pytest.raises(IndexError):
            packed[position]
    packed.append("last")
    assert (packed[count], packed[-1], list(packed)) == ("last", "last", [*texts, "last"])


def test_it_takes_less_memory_than_the_characters_of_its_texts():
    texts = [f"{row} the quick brown fox jumps over the lazy dog in sentence {row * row}" for row in range(20_480)]
    assert PackedTexts(texts).nbytes < sum(map(len, texts)) / 2
