"""From documents to a file of passages, without repeated paragraphs and near copies, and a list of what is left out."""

import json
import os
import pickle
import posixpath
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote

import numpy as np

from embeddings.adaptation.documents import FoundFile, LeftOut, Read, find_files, read_file
from embeddings.adaptation.markup import Document, Link
from embeddings.adaptation.passages import Passage, Splitter
from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import atomic_path, check_file_manifest, require_regular, scratch_folder, text_hash
from embeddings.common.jobs import discard_on_user_error, finished_manifest, manifest_path, output_file
from embeddings.common.progress import progress_bar
from embeddings.common.text import shorten
from embeddings.data.near_duplicates import NearDuplicates
from embeddings.inference.vector_folder import check_columns

KIND = {"kind": "passages"}
# Near copies are alike but for a word or two in a hundred: more may be what a reader searches for.
DEFAULT_SIMILARITY = 0.9
# A paragraph is boilerplate if it is in this share of the documents, in at least and at most so many.
_REPEATED_SHARE, _LEAST_REPEATED, _MOST_REPEATED = 0.05, 4, 20
# Letters of documents that are split at once.
_BATCH_LETTERS = 1 << 20
# A longer mean word shows that most texts have no spaces between words.
_LONGEST_MEAN_WORD = 12
_NUM_EXAMPLES, _NUM_REPEATED_EXAMPLES = 6, 3
# Causes that are usual in a folder, and therefore only counted.
_USUAL = (
    "empty",
    "hidden file",
    "folder of generated",
    "output of this library",
    "binary",
    "kind of file that is not read",
    "minified",
)


@dataclass
class PassageReport:
    """What became passages and what did not.

    Attributes:
        output: The file of passages.
        log: The file that lists everything that was left out.
        num_files: Files that were found.
        num_documents: Documents with text.
        num_passages: Passages that were written.
        left_out: The number of files, folders and rows that were left out, by cause.
        examples: The first files that could not be read although their kind is one that is read.
        num_examples: The number of such files.
        num_repeated: Occurrences of paragraphs that many documents repeat, without the first.
        repeated: The most frequent of these paragraphs, with their number of documents.
        num_copies: Passages that nearly equal an earlier one.
        tokens: The least, median and largest number of tokens of a passage.
        unknown: The share of the letters that the tokenizer does not know.
    """

    output: Path
    log: Path
    num_files: int = 0
    num_documents: int = 0
    num_passages: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    examples: list[LeftOut] = field(default_factory=list)
    num_examples: int = 0
    num_repeated: int = 0
    repeated: list[tuple[str, int]] = field(default_factory=list)
    num_copies: int = 0
    tokens: tuple[int, int, int] = (0, 0, 0)
    unknown: float = 0.0


def log_path(output: Path) -> Path:
    return output.with_suffix(".log.jsonl")


def write_passages(
    documents: Path,
    output: Path,
    splitter: Splitter,
    *,
    columns: Mapping[str, str] | None = None,
    near_duplicates: float | None = DEFAULT_SIMILARITY,
) -> PassageReport:
    """Write the passages of a folder of documents, or of one file, as JSON lines.

    A line has `_id`, `title`, `text`, `file`, `position` (in the document's text), `document` (the file, or a row's
    id), and `links` to other files as `[[text, file#heading], ...]` if there are any. What is left out is listed in
    `NAME.log.jsonl`. The same documents give the same bytes. The file appears when it is complete.

    Args:
        documents: A folder, which is searched for files, or a file.
        output: The `.jsonl` file to write; one of an earlier run is replaced.
        splitter: Cuts documents into passages.
        columns: Column names of `text`, `title` or `_id` of tables, if they differ.
        near_duplicates: Minimum similarity of near copies, of which the first is retained; None to retain all.

    Returns:
        PassageReport: What was read, left out and written.

    Raises:
        InputError: If there is no text, or `output` is a file that this library did not write.
    """
    if output.suffix != ".jsonl":
        raise OptionError("output", str(output), "must end in .jsonl", "name a file such as passages.jsonl")
    names = check_columns(columns)
    if near_duplicates is not None:
        NearDuplicates(near_duplicates)
    require_own_passages(output)
    own = (output, log_path(output), manifest_path(output))
    files, skipped = find_files(documents, own)
    with (
        discard_on_user_error(output),
        scratch_folder(output) as folder,
        atomic_path(log_path(output)) as listing,
        open(listing, "w", encoding="utf-8") as log,
    ):
        report = PassageReport(output, log_path(output), len(files))
        work = _Work(folder, report, log)
        for each in skipped:
            work.leave_out(each)
        work.read(files, names)
        if report.num_documents:
            work.split(splitter, near_duplicates)
        if not work.token_counts:
            raise _no_text(documents, report)
        is_copy_N = work.copies()
        # A name that is not UTF-8 cannot be written.
        name = os.fsencode(documents).decode("utf-8", "replace")
        fields: dict[str, Any] = {**KIND, "documents": name, "max_tokens": splitter.max_tokens}
        fields |= {"near_duplicates": near_duplicates, "left_out": report.left_out}
        with output_file(output, fields) as temporary:
            work.write(temporary, is_copy_N, {file.name for file in files})
            counts = ("num_documents", "num_passages", "num_repeated", "num_copies")
            fields |= {name: getattr(report, name) for name in counts}
            # A kill before the renaming must not leave the new manifest with the old file.
            output.unlink(missing_ok=True)
    return report


def require_own_passages(output: Path) -> None:
    """Refuse to replace files that `write_passages` did not write, or that were changed since."""
    log, manifest = log_path(output), manifest_path(output)
    require_regular(log)
    if manifest.exists():
        check_file_manifest(manifest, KIND)
    elif log.exists():
        raise InputError(str(log), "already exists and has no manifest", "name a new file")
    finished_manifest(output, KIND)


def _no_text(documents: Path, report: PassageReport) -> InputError:
    causes = ", ".join(f"{count} {cause}" for cause, count in report.left_out.most_common(6))
    if not report.num_files and not causes:
        return InputError(str(documents), "is an empty folder", "give a folder of documents, or a file")
    hint = "give documents such as Markdown, HTML, text, code, JSON lines or CSV"
    if report.num_examples == 1:
        causes = str(report.examples[0])
    return InputError(str(documents), f"contains no text that can be read ({causes or 'only repeated text'})", hint)


class _Work:
    """The steps from files to passages, with what is between them in a temporary folder."""

    def __init__(self, folder: Path, report: PassageReport, log: TextIO) -> None:
        self._report, self._log = report, log
        self._documents, self._passages = folder / "documents", folder / "passages"
        # The hash of each paragraph of each document, and the letters and words of a sample of the texts.
        self._hashes = array("q")
        self._num_letters, self._num_words, self._total_letters = 0, 1, 0
        self._offsets, self.token_counts = array("q"), array("i")
        self._rule: NearDuplicates | None = None
        self._signatures: list[Any] = []

    def leave_out(self, left_out: LeftOut) -> None:
        """List and count what gives no text."""
        about = {"file": left_out.file, "cause": left_out.cause, "detail": left_out.detail}
        self._line(**{name: value for name, value in about.items() if value})
        self._report.left_out[left_out.cause] += left_out.number
        if not left_out.cause.startswith(_USUAL):
            self._report.num_examples += 1
            if len(self._report.examples) < _NUM_EXAMPLES:
                self._report.examples.append(left_out)

    def _line(self, **fields: Any) -> None:
        self._log.write(json.dumps(fields, ensure_ascii=False) + "\n")

    def read(self, files: Sequence[FoundFile], columns: Mapping[str, str]) -> None:
        """Convert all files, and count their paragraphs."""
        total = sum(file.num_bytes for file in files)
        with (
            open(self._documents, "wb") as stored,
            progress_bar(total, "reading documents", "B", unit_scale=True) as bar,
        ):
            for file in files:
                with bar.item(file.num_bytes):
                    for read in read_file(file, columns):
                        if isinstance(read, LeftOut):
                            self.leave_out(read)
                            continue
                        self._hashes.extend(key for key in {*_hashes(read.document)} if key is not None)
                        self._total_letters += len(read.document.text)
                        words = re.findall(r"\w+", read.document.text[:2000])
                        self._num_letters += sum(map(len, words))
                        self._num_words += len(words)
                        pickle.dump(read, stored)
                        self._report.num_documents += 1

    def split(self, splitter: Splitter, near_duplicates: float | None) -> None:
        """Cut the documents into passages, without the paragraphs that many documents repeat."""
        if near_duplicates is not None:
            is_long = self._num_letters > _LONGEST_MEAN_WORD * self._num_words
            self._rule = NearDuplicates(near_duplicates, shingle="character" if is_long else "word")
        hash_U, count_U = np.unique(np.frombuffer(self._hashes, np.int64), return_counts=True)
        limit = max(_LEAST_REPEATED, min(_MOST_REPEATED, _REPEATED_SHARE * self._report.num_documents))
        repeated = dict(zip(hash_U[count_U >= limit].tolist(), count_U[count_U >= limit].tolist(), strict=True))
        # The first document retains a repeated paragraph.
        seen: dict[int, str] = {}
        num_unknown = splitter.counter.num_unknown
        with (
            open(self._passages, "wb") as stored,
            progress_bar(self._total_letters, "cutting passages", "letter", unit_scale=True) as bar,
        ):
            for batch in self._batches():
                documents = [self._without_repeated(read.document, repeated, seen) for read in batch]
                split = splitter.split(documents)
                for read, passages in zip(batch, split, strict=True):
                    for passage in passages:
                        self._offsets.append(stored.tell())
                        self.token_counts.append(passage.num_tokens)
                        pickle.dump((read.file, read.name, passage), stored)
                items = [_item(passage) for passages in split for passage in passages]
                if self._rule is not None and items:
                    self._signatures.append(self._rule.signatures(items))
                bar.update(sum(len(document.text) for document in documents))
        self._report.unknown = (splitter.counter.num_unknown - num_unknown) / self._total_letters
        for key, text in seen.items():
            self._line(cause="repeated paragraph", documents=repeated[key], text=text)
        frequent = sorted(seen, key=lambda key: -repeated[key])[:_NUM_REPEATED_EXAMPLES]
        self._report.repeated = [(seen[key], repeated[key]) for key in frequent]

    def _batches(self) -> Iterator[list[Read]]:
        batch, num_letters = list[Read](), 0
        for read in _stored(self._documents):
            batch.append(read)
            num_letters += len(read.document.text)
            if num_letters >= _BATCH_LETTERS:
                yield batch
                batch, num_letters = [], 0
        if batch:
            yield batch

    def _without_repeated(self, document: Document, repeated: Mapping[int, int], seen: dict[int, str]) -> Document:
        kept = []
        for block, key in zip(document.blocks, _hashes(document), strict=True):
            if key is not None and key in repeated:
                if key in seen:
                    self._report.num_repeated += 1
                    continue
                seen[key] = shorten(document.text[block.start : block.end], 200)
            kept.append(block)
        return document._replace(blocks=kept)

    def copies(self) -> Any:
        if self._rule is None:
            return np.zeros(len(self._offsets), np.bool_)
        with open(self._passages, "rb") as stored:

            def items(rows: Sequence[int]) -> list[tuple[str]]:
                found = []
                for row in rows:
                    stored.seek(self._offsets[row])
                    found.append(_item(pickle.load(stored)[2]))
                return found

            return self._rule.mark_copies(np.concatenate(self._signatures), items)

    def write(self, path: Path, is_copy_N: Any, files: set[str]) -> None:
        """Write the passages that are no copies, with their ids."""
        with open(path, "w", encoding="utf-8") as output:
            for (file, name, passage), is_copy in zip(_stored(self._passages), is_copy_N.tolist(), strict=True):
                if is_copy:
                    beginning = shorten(passage.text, 80)
                    self._line(file=file, cause="near copy", position=passage.position, text=beginning)
                    continue
                record: dict[str, Any] = {"_id": f"p{self._report.num_passages:06d}", "title": passage.title}
                record |= {"text": passage.text, "file": file, "position": passage.position, "document": name}
                targets = _targets(passage.links, file, files)
                record |= {"links": targets} if targets else {}
                output.write(json.dumps(record, ensure_ascii=False) + "\n")
                self._report.num_passages += 1
        self._report.num_copies = int(is_copy_N.sum())
        count_N = np.frombuffer(self.token_counts, np.int32)[~is_copy_N]
        self._report.tokens = (int(count_N.min()), int(np.median(count_N)), int(count_N.max()))


def _hashes(document: Document) -> list[int | None]:
    """The hash of each paragraph but for case and spaces; None for headings, and for a single paragraph."""
    is_several = sum(block.kind != "heading" for block in document.blocks) > 1
    return [
        text_hash(" ".join(document.text[block.start : block.end].casefold().split()))
        if is_several and block.kind != "heading"
        else None
        for block in document.blocks
    ]


def _item(passage: Passage) -> tuple[str]:
    return (f"{passage.title} {passage.text}",)


def _stored(path: Path) -> Iterator[Any]:
    """The objects that were pickled one after another into a file."""
    with open(path, "rb") as file:
        while file.peek(1):
            yield pickle.load(file)


def _targets(links: Sequence[Link], file: str, files: set[str]) -> list[list[str]]:
    """The texts of links to other files of the folder, and their targets as `path#heading`."""
    targets = []
    for text, target in links:
        place, mark, heading = target.partition("#")
        path = unquote(place.partition("?")[0])
        if text and path and not re.match(r"[\w+.-]+:|//", path):
            path = path.lstrip("/") if path.startswith("/") else posixpath.join(posixpath.dirname(file), path)
            path = posixpath.normpath(path)
            if path != file and path in files:
                targets.append([text, f"{path}{mark}{unquote(heading)}" if heading else path])
    return targets
