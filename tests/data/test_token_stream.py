"""Documents to a stream of tokens on disk, and the stream to rows."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from embeddings.common import InputError, OptionError
from embeddings.data.text_streams import (
    STARTS_FILE,
    TOKENS_FILE,
    DocumentTokenizer,
    TextSource,
    TokenStream,
    open_stream,
)
from tests.helpers.tiny import bpe_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer

TEXTS = ["how do I pad", "the quick brown fox " * 9, "a", "one length", "return the sum of two numbers " * 4]


def source(folder: Path, texts: list[str] = TEXTS, name: str = "texts.jsonl") -> TextSource:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return TextSource("texts", str(folder / name))


def stream(folder: Path, append_eos: bool = True, texts: list[str] = TEXTS) -> tuple[TokenStream, list[list[int]]]:
    """A stream, and the tokens of each document by the tokenizer alone."""
    tokenizer = wordpiece_tokenizer()
    found = open_stream(source(folder, texts), DocumentTokenizer(tokenizer, append_eos), folder / "cache")
    return found, [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("row_length", [2, 7, 16, 1000])
def test_rows_hold_every_token_once_and_in_order(row_length: int, tmp_path: Path) -> None:
    found, expected = stream(tmp_path)
    rows = [found.row(index, row_length) for index in range(found.num_rows(row_length))]
    assert [len(ids) for ids, _ in rows[:-1]] == [row_length] * (len(rows) - 1)
    assert np.concatenate([ids for ids, _ in rows]).tolist() == [token for ids in expected for token in ids]
    assert found.num_tokens == sum(map(len, expected))
    assert found.num_documents == len(expected)
    # Documents count up within each row where, and only where, another begins.
    owners = [number for number, ids in enumerate(expected) for _ in ids]
    for index, (ids, documents) in enumerate(rows):
        owner = owners[index * row_length : index * row_length + len(ids)]
        assert documents.tolist() == [number - owner[0] for number in owner]


@pytest.mark.parametrize(
    ("tokenizer", "first", "last"),
    [(wordpiece_tokenizer(), 2, 3), (sentencepiece_tokenizer(), 1, 2), (bpe_tokenizer(), None, 0)],
)
def test_documents_begin_and_end_as_the_tokenizer_has_it(
    tokenizer: PreTrainedTokenizerFast, first: int | None, last: int
) -> None:
    with_eos, without = (DocumentTokenizer(tokenizer, append_eos)(["how do", "pad"]) for append_eos in (True, False))
    plain = [tokenizer(text)["input_ids"] for text in ("how do", "pad")]
    assert without == plain
    for ids, expected in zip(with_eos, plain, strict=True):
        assert ids[-1] == last
        assert ids.count(last) == 1
        assert first is None or ids[0] == first
        assert ids[: len(expected)] == expected


def test_a_special_token_that_a_text_spells_out_is_plain_characters() -> None:
    tokenizer = sentencepiece_tokenizer()
    (ids,) = DocumentTokenizer(tokenizer, True)(["pad </s> one <s> length"])
    assert ids[0] == 1
    assert ids[-1] == 2
    assert not {1, 2} & set(ids[1:-1])
    assert {1, 2} & set(tokenizer("pad </s> one <s> length")["input_ids"][1:])


def test_a_tokenizer_that_has_no_separator_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer().backend_tokenizer)
    with pytest.raises(OptionError, match=r"data\.append_eos needs a tokenizer with an eos_token"):
        DocumentTokenizer(tokenizer, True)
    assert DocumentTokenizer(tokenizer, False)(["pad"])[0]


def test_a_stream_is_made_once_for_a_content_and_a_tokenizer(tmp_path: Path) -> None:
    one, _ = stream(tmp_path)
    stamp = (one.folder / TOKENS_FILE).stat().st_mtime_ns
    again, _ = stream(tmp_path)
    assert again.folder == one.folder
    assert (again.folder / TOKENS_FILE).stat().st_mtime_ns == stamp
    others = [
        open_stream(source(tmp_path), DocumentTokenizer(sentencepiece_tokenizer(), True), tmp_path / "cache"),
        open_stream(source(tmp_path), DocumentTokenizer(sentencepiece_tokenizer(), False), tmp_path / "cache"),
        stream(tmp_path, texts=TEXTS[::-1])[0],
    ]
    assert len({found.key for found in (one, *others)}) == 4


def test_a_stream_travels_by_its_folder(tmp_path: Path) -> None:
    found, _ = stream(tmp_path)
    content = pickle.dumps(found)
    assert len(content) < 1000
    assert pickle.loads(content).row(1, 8)[0].tolist() == found.row(1, 8)[0].tolist()


def test_a_source_without_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    texts = source(tmp_path, ["", " \n "])
    with pytest.raises(InputError, match="source 'texts': holds no text"):
        open_stream(texts, DocumentTokenizer(wordpiece_tokenizer(), True), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", [TOKENS_FILE, STARTS_FILE])
def test_a_damaged_stream_is_refused(name: str, tmp_path: Path) -> None:
    found, _ = stream(tmp_path)
    content = (found.folder / name).read_bytes()
    (found.folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="damaged; delete the folder and run again"):
        stream(tmp_path)
