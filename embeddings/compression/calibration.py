"""Calibration texts, drawn from corpora, training records and text files, and tokenised for the model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from embeddings.common import InputError, OptionError, TextRole, TextSettings, TokenBatch, require_minimum
from embeddings.common.io import check_regular
from embeddings.common.random import numpy_generator
from embeddings.compression.layerwise import LayerwiseModel
from embeddings.data import SourceConfig
from embeddings.data.readers import open_reader
from embeddings.data.records import RECORD_FIELDS
from embeddings.data.sources import HUB_PREFIX, resolve_files
from embeddings.data.store import open_cached
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference.vector_folder import read_corpus
from embeddings.models.backbone import load_tokenizer
from embeddings.models.directory import read_model_directory

ROLES: tuple[TextRole, TextRole] = ("query", "document")
_TEXT_SUFFIX = ".txt"


@dataclass(frozen=True)
class CalibrationOptions:
    """The texts from which the inputs of each layer are computed.

    Args:
        calibration: A text file (`.txt`, one text per line), a corpus file with `text`, or training records with
            `query` and `positive` (files, globs, or `hub:organisation/name`); several as `[FILE, FILE]`. Required by
            `wanda`, `sparsegpt` and `quantize`.
        num_texts: Number of texts to draw; of records, half are queries and half positives.
        max_length: Maximum tokens of a text; the model's limits if left out.
        calibration_seed: Seed of the draw.
    """

    calibration: str | list[str] | None = None
    num_texts: int = 128
    max_length: int | None = None
    calibration_seed: int = 0

    def __post_init__(self) -> None:
        require_minimum("num_texts", self.num_texts, 1, "128 is the default")
        require_minimum("max_length", self.max_length, 4, "leave it out for the model's own", optional=True)


class CalibrationText(NamedTuple):
    role: TextRole
    text: str


def calibration_texts(options: CalibrationOptions) -> list[CalibrationText]:
    """The drawn texts, in file order; they depend only on the options and the content of the files."""
    if not options.calibration:
        rule = "must name texts for the calibration"
        raise OptionError("calibration", options.calibration, rule, "give a corpus, records, or a .txt of lines")
    paths = options.calibration
    if isinstance(paths, str) and paths.startswith(HUB_PREFIX):
        pools = [_pool_of_records(paths)]
    else:
        pools = [_pool_of_file(path) for path in resolve_files(paths)]
    starts = np.cumsum([0, *(pool.size for pool in pools)])
    order = numpy_generator(options.calibration_seed, "calibration", int(starts[-1])).permutation(int(starts[-1]))
    texts: list[CalibrationText] = []
    drawn = order[: options.num_texts]
    for pool, start in zip(pools, starts, strict=False):
        chosen = drawn[(drawn >= start) & (drawn < start + pool.size)] - start
        texts += [text for text in pool.take(sorted(chosen.tolist())) if text.text.strip()]
    if not texts:
        raise InputError(f"--calibration {options.calibration}", "has no texts", "give a file with texts")
    # A record has two texts.
    if len(texts) > options.num_texts:
        kept = numpy_generator(options.calibration_seed, "texts", len(texts)).permutation(len(texts))
        texts = [texts[index] for index in sorted(kept[: options.num_texts].tolist())]
    return texts


class _Pool(NamedTuple):
    """The rows of one source: their number, and a function that returns the texts of rows in ascending order."""

    size: int
    take: Callable[[list[int]], list[CalibrationText]]


def _pool_of_file(path: Path) -> _Pool:
    if path.suffix == _TEXT_SUFFIX:
        check_regular(path)
        try:
            lines = [line for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise InputError(str(path), "is not UTF-8", "save it as UTF-8") from error
        return _Pool(len(lines), lambda rows: [CalibrationText("document", lines[row]) for row in rows])
    row = next(iter(open_reader(path, (*RECORD_FIELDS, "text", "title"), ())), None)
    if row is not None and "query" in row.fields and "text" not in row.fields:
        return _pool_of_records(str(path))

    def take(rows: list[int]) -> list[CalibrationText]:
        """A second pass: a corpus may not fit in memory."""
        wanted = set(rows)
        documents = (document for number, document in enumerate(read_corpus(path)) if number in wanted)
        return [CalibrationText("document", document.text) for document in documents]

    return _Pool(sum(1 for _ in read_corpus(path, show_progress=True)), take)


def _pool_of_records(path: str) -> _Pool:
    table = open_cached(SourceConfig("calibration", path, suspect_rows="keep")).table

    def take(rows: list[int]) -> list[CalibrationText]:
        texts: list[CalibrationText] = []
        for record in table.rows(rows):
            texts += CalibrationText("query", record.query), CalibrationText("document", record.positives[0])
        return texts

    return _Pool(len(table), take)


def tokenise(texts: list[CalibrationText], model: LayerwiseModel, max_length: int | None) -> tuple[TokenBatch, int]:
    """The tokens of the texts, with the model's prompts and length limits, and the id of the padding token."""
    tokenizer = load_tokenizer(model.folder, model.model)
    settings: TextSettings = read_model_directory(model.folder, model.model, tokenizer).text
    if max_length is not None:
        query, document = (min(max_length, settings.max_length(role)) for role in ROLES)
        settings = replace(settings, query_max_length=query, document_max_length=document)
    text_tokenizer = TextTokenizer(tokenizer, settings)
    batches = []
    for role in ROLES:
        of_role = [row.text for row in texts if row.role == role]
        batches += [text_tokenizer(of_role, role)] if of_role else []
    tensors = zip(*((batch.input_ids_T, batch.pooling_mask_T, batch.lengths_N) for batch in batches), strict=True)
    pad_token_id = tokenizer.pad_token_id
    assert isinstance(pad_token_id, int)
    return TokenBatch(*map(torch.cat, tensors)), pad_token_id
