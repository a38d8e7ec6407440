"""Plain texts: sources, token streams, packed rows, training and validation batches."""

import multiprocessing
import pickle
import subprocess
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from embeddings.common import InputError, OptionError
from embeddings.common.types import PackedRows
from embeddings.data import BlendedBatchSampler, TextDataModule
from embeddings.data.documented_functions import HELD_OUT_PACKAGES
from embeddings.data.samplers.base import PlanEntry
from embeddings.data.text_datamodule import (
    STARTS_FILE,
    TOKENS_FILE,
    Documents,
    DocumentTokenizer,
    RowCollator,
    RowMixture,
    TextSource,
    open_stream,
    validation_batches,
)
from tests.data.killed_runs import Ledger, attached, quiet_trainer
from tests.data.rows import write_jsonl, write_rows
from tests.helpers.refusals import refused
from tests.helpers.tiny import bpe_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer

# The ledger only trains.
pytestmark = pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
TOKENIZER = wordpiece_tokenizer()


def documents(tmp_path, **fields):
    return Documents(TextSource("texts", **fields), tmp_path)


def test_every_kind_of_file_yields_its_texts_without_blank_ones_and_is_identified_by_its_bytes(tmp_path):
    rows = [{"id": row, "text": text} for row, text in enumerate(("one fox", "two foxes", " \n", "", "naïve café"))]
    expected = ["one fox", "two foxes", "naïve café"]
    files = [str(write_rows(tmp_path / name, rows)) for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")]
    for path in files:
        assert list(documents(tmp_path, path=path)) == expected
    assert list(documents(tmp_path, path=files)) == expected * 3
    (tmp_path / "d.csv").write_text("id,text\n1,one fox\n2,\n3,two foxes\n")
    assert list(documents(tmp_path, path=str(tmp_path / "d.csv"))) == expected[:2]
    one, two = documents(tmp_path, path=files[0]), documents(tmp_path, path=files[1])
    assert one.identity == documents(tmp_path, path=files[0]).identity != two.identity
    one.require_unchanged()
    Path(files[0]).write_text('{"text": "other"}\n')
    refused(InputError, "changed while it was read", one.require_unchanged)
    for row, says in (
        ({"text": 3}, "2: text is a number, expected text"),
        ({"text": None}, "2: text is null, expected text"),
        ({"body": "x"}, "2: no column 'text' among body"),
    ):
        path = write_jsonl(tmp_path / "bad.jsonl", [{"text": "fine"}, row])
        refused(InputError, f"bad.jsonl:{says}", list, documents(tmp_path, path=str(path)))


def test_half_of_a_character_is_named(tmp_path):
    (tmp_path / "cut.jsonl").write_text('{"text": "fine"}\n{"text": "fox \\ud83d"}\n')
    says = "cut.jsonl:2: text contains half of a character"
    refused(InputError, says, list, documents(tmp_path, path=str(tmp_path / "cut.jsonl")))


def test_packages_and_lists_of_them_yield_source_files_without_importing_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "zoo_text"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'café'\n".encode("latin-1"))
    (package / "broken.py").write_bytes(b"name = '\xff'\n")
    (package / "empty.py").write_text("\n")
    found = documents(tmp_path, packages=["zoo_text", "zoo_text"])
    assert list(found) == ["raise RuntimeError('imported')\n", "# -*- coding: latin-1 -*-\nname = 'café'\n"]
    (package / "empty.py").write_text("x = 1\n")
    assert documents(tmp_path, packages=["zoo_text"]).identity != found.identity
    refused(OptionError, "must be the import names of", documents, tmp_path, packages=["no_such_package_x"])
    packages = {file.package for file in documents(tmp_path, packages=["held_out"])._modules}
    assert packages == set(HELD_OUT_PACKAGES)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "path or packages must be given, got 'neither'"),
        ({"path": "a", "packages": ["b"]}, "path or packages must be given, got 'both'"),
    ],
)
def test_an_invalid_source_is_refused(fields, says):
    refused(OptionError, says, TextSource, "texts", **fields)


TEXTS = ["how do I pad", "the quick brown fox " * 9, "a", "one length", "return the sum of two numbers " * 4]


def source(folder, texts=TEXTS, name="texts.jsonl"):
    return TextSource("texts", str(write_jsonl(folder / name, [{"text": text} for text in texts])))


def stream(folder, append_eos=True, texts=TEXTS):
    """A stream, and the tokens of each document by the tokenizer alone."""
    tokenizer = wordpiece_tokenizer()
    found = open_stream(source(folder, texts), DocumentTokenizer(tokenizer, append_eos), folder / "cache")
    return found, [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("row_length", [2, 7, 16, 1000])
def test_rows_contain_every_token_once_and_in_order(row_length, tmp_path):
    found, expected = stream(tmp_path)
    rows = [found.row(index, row_length) for index in range(found.num_rows(row_length))]
    assert [len(ids) for ids, _ in rows[:-1]] == [row_length] * (len(rows) - 1)
    assert np.concatenate([ids for ids, _ in rows]).tolist() == [token for ids in expected for token in ids]
    assert found.num_tokens == sum(map(len, expected))
    # The document index of a row increases exactly where a new document starts.
    owners = [number for number, ids in enumerate(expected) for _ in ids]
    for index, (ids, documents) in enumerate(rows):
        owner = owners[index * row_length : index * row_length + len(ids)]
        assert documents.tolist() == [number - owner[0] for number in owner]


@pytest.mark.parametrize(
    ("tokenizer", "first", "last"),
    [(wordpiece_tokenizer(), 2, 3), (sentencepiece_tokenizer(), 1, 2), (bpe_tokenizer(), None, 0)],
)
def test_documents_have_the_special_tokens_of_the_tokenizer(tokenizer, first, last):
    with_eos, without = (DocumentTokenizer(tokenizer, append_eos)(["how do", "pad"]) for append_eos in (True, False))
    plain = [tokenizer(text)["input_ids"] for text in ("how do", "pad")]
    assert without == plain
    for ids, expected in zip(with_eos, plain, strict=True):
        assert ids[-1] == last
        assert ids.count(last) == 1
        assert first is None or ids[0] == first
        assert ids[: len(expected)] == expected


def test_a_special_token_in_a_text_is_plain_characters_and_a_separator_is_needed():
    tokenizer = sentencepiece_tokenizer()
    (ids,) = DocumentTokenizer(tokenizer, True)(["pad </s> one <s> length"])
    assert ids[0] == 1
    assert ids[-1] == 2
    assert not {1, 2} & set(ids[1:-1])
    assert {1, 2} & set(tokenizer("pad </s> one <s> length")["input_ids"][1:])
    without = PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer().backend_tokenizer)
    refused(OptionError, r"data\.append_eos needs a tokenizer with an eos_token", DocumentTokenizer, without, True)
    assert DocumentTokenizer(without, False)(["pad"])[0]


def test_a_stream_is_written_once_for_a_content_and_a_tokenizer(tmp_path):
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


def test_a_stream_with_max_rows_has_the_first_documents(tmp_path):
    texts = ["one fox", "two foxes", "naïve café", "a dog"]
    path = str(write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in ("", *texts)]))
    tokenizer = DocumentTokenizer(TOKENIZER, True)
    found = [open_stream(TextSource("texts", path, max_rows=n), tokenizer, tmp_path / "cache") for n in (2, 3, None)]
    expected = [list(chain(*tokenizer(texts)[:count])) for count in (2, 3, 4)]
    assert [stream.row(0, 1000)[0].tolist() for stream in found] == expected
    assert len({stream.key for stream in found}) == 3


def test_a_source_without_text_leaves_nothing_and_a_damaged_stream_is_refused(tmp_path):
    says = "source 'texts': contains no text"
    refused(InputError, says, stream, tmp_path, texts=["", " \n "])
    assert not (tmp_path / "cache").exists()
    for name in (TOKENS_FILE, STARTS_FILE):
        found, _ = stream(tmp_path)
        content = (found.folder / name).read_bytes()
        (found.folder / name).write_bytes(content[: len(content) // 2])
        refused(InputError, "is damaged", stream, tmp_path)
        (found.folder / name).write_bytes(content)


@pytest.fixture
def rows(tmp_path):
    tokenizer = DocumentTokenizer(TOKENIZER, True)
    sources = [source(tmp_path, TEXTS, "a.jsonl"), source(tmp_path, TEXTS[:2], "b.jsonl")]
    return RowMixture([open_stream(one, tokenizer, tmp_path / "cache") for one in sources], 8)


def test_rows_of_all_sources_are_concatenated_and_none_contains_two_sources(rows):
    assert len(rows) == sum(rows.sizes)
    assert min(rows.sizes) > 2
    found = rows.__getitems__([PlanEntry(row, 5) for row in range(len(rows))])
    expected = [stream.row(index, 8) for stream in rows.streams for index in range(stream.num_rows(8))]
    assert [row.ids.tolist() for row in found] == [ids.tolist() for ids, _ in expected]
    assert [row.documents.tolist() for row in found] == [documents.tolist() for _, documents in expected]
    assert [row.entry for row in found] == [PlanEntry(row, 5) for row in range(len(rows))]
    assert len(pickle.loads(pickle.dumps(rows))) == len(rows)


def test_a_batch_is_padded_on_the_right_and_marks_its_special_tokens(rows):
    last = rows.sizes[0] - 1
    collate = RowCollator(TOKENIZER, 8)
    batch = collate(rows.__getitems__([PlanEntry(0, 3), PlanEntry(last, 4), PlanEntry(-1, 0)]))
    assert isinstance(batch, PackedRows)
    count = rows.streams[0].num_tokens % 8
    assert 0 < count < 8
    assert (batch.document_NL >= 0).sum(1).tolist() == [8, count, 0]
    assert (batch.input_ids_NL[batch.document_NL < 0] == TOKENIZER.pad_token_id).all()
    assert batch.draw_N.tolist() == [3, 4, 0]
    assert batch.row_N.tolist() == [0, last, -1]
    special = {TOKENIZER.cls_token_id, TOKENIZER.sep_token_id, TOKENIZER.pad_token_id, TOKENIZER.unk_token_id}
    expected = [[token in special for token in row] for row in batch.input_ids_NL.tolist()]
    assert batch.special_NL.tolist() == expected
    assert 0 < sum(expected[0]) < 8
    # Padding is special also if the tokenizer has no padding token.
    unpadded = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, sep_token="[SEP]")
    assert unpadded.pad_token_id is None
    batch = RowCollator(unpadded, 8)(rows.__getitems__([PlanEntry(-1, 0), PlanEntry(0, 0)]))
    assert batch.special_NL.all(1).tolist() == [True, False]


@pytest.fixture
def options(tmp_path):
    sources = [source(tmp_path, TEXTS * 2, "a.jsonl"), TextSource("other", source(tmp_path, TEXTS, "b.jsonl").path)]
    return {"sources": sources, "row_length": 8, "batch_size": 4, "cache_dir": str(tmp_path / "cache"), "seed": 1}


def content(batch):
    """The tokens of a batch, for the ledger."""
    return batch.input_ids_NL.flatten().tolist()


def test_a_modules_task_is_applied_in_the_workers(options):
    plain = Ledger(content, TOKENIZER)
    quiet_trainer(max_steps=3).fit(plain, TextDataModule(**options))
    for num_workers in (0, 2):
        module = Ledger(lambda batch: batch.tolist(), TOKENIZER)
        module.task = sums
        quiet_trainer(max_steps=3).fit(module, TextDataModule(**options, num_workers=num_workers))
        assert module.rows == [torch.tensor(row).view(4, 8).sum(1).tolist() for row in plain.rows]


def sums(rows):
    return rows.input_ids_NL.sum(1)


def test_a_second_module_gets_the_tokens_of_its_own_tokenizer(options):
    data, tokenizer = TextDataModule(**options), sentencepiece_tokenizer()
    quiet_trainer(max_steps=1).fit(Ledger(content, TOKENIZER), data)
    second, alone = Ledger(content, tokenizer), Ledger(content, tokenizer)
    quiet_trainer(max_steps=3).fit(second, data)
    quiet_trainer(max_steps=3).fit(alone, TextDataModule(**options))
    assert second.rows == alone.rows


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(1, 1), (8, 2), (9, 2), (3, 4), (17, 3)])
def test_validation_rows_are_split_over_ranks_with_equal_numbers_of_batches(num_rows, num_ranks):
    dealt = [validation_batches(num_rows, 2, rank, num_ranks) for rank in range(num_ranks)]
    assert {len(batches) for batches in dealt} == {-(-num_rows // (2 * num_ranks))}
    assert {len(batch) for batches in dealt for batch in batches} == {2}
    rows = [entry.row for batch in chain(*dealt) for entry in batch]
    assert sorted(row for row in rows if row >= 0) == list(range(num_rows))


def test_validation_batches_are_the_same_every_time_and_their_worker_ignores_stop_signals(options):
    assert TextDataModule(**options).val_dataloader() == []
    seen = []
    for num_workers in (0, 1):
        sources = {"validation_sources": options["sources"], "num_workers": num_workers}
        data = attached(TextDataModule(**options, **sources), Ledger(content, TOKENIZER))
        data.setup()
        (loader,) = data.val_dataloader()
        assert len(loader) == -(-len(data.rows) // 4)
        others = multiprocessing.active_children()
        batches = iter(loader)
        first = content(next(batches))
        workers = set(multiprocessing.active_children()) - set(others)
        assert len(workers) == num_workers
        for worker in workers:
            # From a process that is not the parent, as with SLURM or a shell.
            subprocess.run(["sh", "-c", f"kill -TERM {worker.pid}; kill -USR1 {worker.pid}"], check=True)
        seen.append([first, *map(content, batches)])
        assert [content(batch) for batch in loader] == seen[0] == seen[-1]
        assert len(seen[-1]) == len(loader)
        assert set(multiprocessing.active_children()) <= set(others)


def test_options_of_texts_are_checked_at_construction(options):
    refused(OptionError, r"data\.row_length must be >= 2, got 1", TextDataModule, **{**options, "row_length": 1})
    twice = [TextSource("a", "x"), TextSource("a", "y")]
    says = r"data\.validation_sources must have different names"
    refused(OptionError, says, TextDataModule, **options, validation_sources=twice)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"sources": [TextSource("a", "nowhere.jsonl")]}, InputError, "nowhere.jsonl: no such file"),
        ({"validation_sources": [TextSource("b", "nowhere.jsonl")]}, InputError, "nowhere.jsonl: no such file"),
        ({"sources": [TextSource("a", packages=["jsonargprase"])]}, OptionError, "did you mean jsonargparse"),
        ({"sampler": partial(BlendedBatchSampler, steps_per_epoch=0)}, OptionError, "steps_per_epoch"),
    ],
)
def test_a_run_is_refused_before_a_source_is_tokenised(change, error, says, options, tmp_path):
    data, module = TextDataModule(**{**options, **change}), Ledger(content, TOKENIZER)
    refused(error, says, data.check_run, quiet_trainer(), module, data)
    assert not (tmp_path / "cache").exists()
