"""Filtering: which records of a source stay, by rules in a stated order, and the file of those that do.

One rule is consistency: how many documents of its segment a query finds nearer than its own.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import SETTINGS, atomic_path, check_manifest, file_lock, file_sha256, write_file_manifest
from embeddings.common.jobs import (
    ArrayTask,
    ShardedJob,
    discard_on_user_error,
    finished_manifest,
    load_shard,
    manifest_path,
    require_shard_size,
    save_array,
    write_array,
)
from embeddings.common.random import KeyedPermutation, derive_seed
from embeddings.common.text import PromptChoice
from embeddings.data.near_duplicates import NearDuplicates, Shingle
from embeddings.data.records import LabelledText, has_levels, is_json_lines, write_labelled_texts, write_records
from embeddings.data.sources import SourceConfig
from embeddings.data.store import CachedSource, open_cached, read_languages, read_records
from embeddings.inference.encoder import embedder_sha256
from embeddings.inference.vectors import VectorShards
from embeddings.mining.duplicates import (
    COPY,
    EQUAL,
    KEPT,
    NEAR_COPY,
    SHARD_ROWS,
    SIMILAR,
    Decontaminator,
    find_contaminated,
    find_duplicates,
)
from embeddings.mining.pair_index import concatenated_ranges
from embeddings.mining.pair_vectors import EncodedTexts, PairVectors, encode_pairs

if TYPE_CHECKING:
    from embeddings.inference.encoder import Encoder


SEGMENT_SIZE = 1_000_000
RANKS = "ranks.npy"
# Scores nearer than this are equal: float32 sums of one product in two orders differ by less.
TIE = 1e-6
NOT_RANKED = -1

_QUERY_TILE, _DOCUMENT_TILE = 2048, 16384
_Int64s = npt.NDArray[np.int64]


class Segments:
    """The records to be compared, in segments of nearly one size, none of which holds two groups.

    A segment holds what a keyed permutation of a group's records puts side by side, so that neighbours in the file,
    which are often of one page or one user, hardly ever share one.
    """

    def __init__(
        self, row_N: npt.NDArray[np.uint32], segment_size: int, seed: int, group_N: npt.NDArray[np.uint16] | None = None
    ) -> None:
        self.row_N, self._seed = row_N, seed
        parts = [row_N]
        if group_N is not None:
            order_N = np.argsort(group_N, kind="stable")
            parts = np.split(row_N[order_N], np.flatnonzero(np.diff(group_N[order_N])) + 1)
        # Of each segment its group's rows, its number among the group's segments, and how many these are.
        self._segments: list[tuple[npt.NDArray[np.uint32], int, int]] = []
        for row_n in parts:
            count = -(-len(row_n) // segment_size)
            self._segments += [(row_n, number, count) for number in range(count)]

    def __len__(self) -> int:
        return len(self._segments)

    def members(self, segment: int) -> _Int64s:
        """The rows of a segment, in order, found without those of the others."""
        row_n, number, count = self._segments[segment]
        total = len(row_n)
        start, stop = number * total // count, (number + 1) * total // count
        order = KeyedPermutation(total, derive_seed(self._seed, "segments"))
        positions: _Int64s = np.sort(order(np.arange(start, stop, dtype=np.int64)))
        return row_n[positions].astype(np.int64)


def rank_pairs(
    vectors: PairVectors,
    folder: str | os.PathLike[str],
    *,
    is_considered_N: npt.NDArray[np.bool_] | None = None,
    group_N: npt.NDArray[np.uint16] | None = None,
    segment_size: int = SEGMENT_SIZE,
    seed: int = 0,
    device: str | torch.device = "cpu",
    task: ArrayTask | None = None,
) -> npt.NDArray[np.int32]:
    """For each pair, how many documents of its segment lie nearer to its query than its own document does.

    A pair is consistent at `top_k` where this number is below `top_k`: ties count in its favour. The documents of a
    segment are the different positives of its records; what any record of the source names as a positive of the same
    query text is no rival. Of a record with several positives the nearest counts. All documents are compared, none is
    approximated. The segments are the job's shards.

    Args:
        vectors: Unit vectors of the source's queries and documents.
        folder: The folder to work in.
        is_considered_N: Which records take part, (rows,); None for all. The others are nobody's rivals.
        group_N: The group of each record, (rows,): only records of one group share a segment. None for one group.
        segment_size: Maximum records of a segment, at least 2.
        seed: Seed of what records share a segment.
        device: Where vectors are multiplied.
        task: Which segments are this process's; None for all.

    Returns:
        (rows,) int32, memory-mapped; `NOT_RANKED` where a record takes no part.

    Precision: products in float32; scores within `TIE` are equal.
    Memory: 8 bytes a record of the source, and 4 * D bytes a record of one segment: 1.5 GB for 1M records of D = 384.
    Raises:
        InputError: If the folder holds something else, or was made with other options, or a vector is not of unit
            length.

    Source: Nussbaum et al. 2024 (Nomic Embed), arXiv:2402.01613, and Nussbaum and Duderstadt 2025 (Nomic Embed v2),
        arXiv:2502.07972, section 4.2: segments of 1M pairs, kept if the document is among the 2 nearest.
        Differs: segments are random within a source, or within each group of it; ties, several positives, positives of
            the same query elsewhere.
    """
    require_segment_size(segment_size)
    num_rows = vectors.index.num_queries
    is_considered_N = np.ones(num_rows, dtype=np.bool_) if is_considered_N is None else is_considered_N
    row_N = np.flatnonzero(is_considered_N).astype(np.uint32)
    group_n = None if group_N is None else group_N[row_N]
    segments = Segments(row_N, segment_size, seed, group_n)
    sides = [check_manifest(shards.folder, {}) for shards in (vectors.query_shards, vectors.document_shards)]
    fields = {
        "kind": "consistency",
        **vectors.index.key,
        "model_sha256": sides[1]["model_sha256"],
        "precision": sides[1]["precision"],
        "prompt_names": [made["prompt_name"] for made in sides],
        "num_rows": num_rows,
        "rows_sha256": hashlib.sha256(row_N.tobytes()).hexdigest(),
        "groups_sha256": None if group_n is None else hashlib.sha256(group_n.tobytes()).hexdigest(),
        "segment_size": segment_size,
        "seed": seed,
    }
    job = ShardedJob(folder, fields, len(segments), stem="segment")
    job.run(partial(_write_ranks, vectors, segments, torch.device(device)), task, take_over=True)
    job.finish(lambda: _join(job, segments, num_rows))
    ranks: npt.NDArray[np.int32] = load_shard(Path(folder) / RANKS, mapped=True)
    return ranks


def require_segment_size(segment_size: int) -> None:
    """Refuse segments of fewer than 2 records, in which no record has a rival."""
    if segment_size < 2:
        raise OptionError("segment_size", segment_size, "must be >= 2", "the paper uses 1000000")


def segment_ranks(vectors: PairVectors, row_N: _Int64s, device: torch.device) -> npt.NDArray[np.int32]:
    """The ranks of the pairs in the rows of a segment, (n,) int32 (see `rank_pairs`)."""
    index = vectors.index
    start_N, stop_N = index.positive_offsets[row_N], index.positive_offsets[row_N + 1]
    entry_E = concatenated_ranges(start_N, stop_N)
    document_M, column_E = np.unique(index.positive_rows[entry_E], return_inverse=True)
    owner_E = np.repeat(np.arange(len(row_N)), stop_N - start_N)
    query_ND = torch.from_numpy(vectors.query_shards.take(row_N))
    own_N = torch.full((len(row_N),), -torch.inf)
    # By document, so that each tile of documents finds its own entries side by side.
    order_E = np.argsort(column_E, kind="stable")
    owner_E, column_E = owner_E[order_E], column_E[order_E]
    for start, tile_TD in _tiles(vectors.document_shards, document_M):
        first, last = np.searchsorted(column_E, [start, start + len(tile_TD)])
        for part in range(first, last, _QUERY_TILE):
            owner_e = torch.from_numpy(owner_E[part : min(part + _QUERY_TILE, last)])
            column_e = torch.from_numpy(column_E[part : min(part + _QUERY_TILE, last)] - start)
            score_e = (query_ND[owner_e] * tile_TD[column_e]).sum(dim=1)
            own_N.scatter_reduce_(0, owner_e, score_e, "amax")
    # The known positives among the segment's documents, ascending by group and column: a group's in a tile are a range.
    known = index.known_positives(row_N)
    column_P = np.minimum(np.searchsorted(document_M, known.row_P), len(document_M) - 1)
    is_here_P = document_M[column_P] == known.row_P
    key_P = known.group_P[is_here_P] * len(document_M) + column_P[is_here_P]
    count_N = torch.zeros(len(row_N), dtype=torch.int32)
    for first, tile_TD in _tiles(vectors.document_shards, document_M):
        tile_DT = tile_TD.to(device).T
        for start in range(0, len(row_N), _QUERY_TILE):
            part_N = slice(start, start + _QUERY_TILE)
            is_nearer_NT = query_ND[part_N].to(device) @ tile_DT > own_N[part_N].to(device)[:, None] + TIE
            least_n = known.group_Q[part_N] * len(document_M) + first
            start_n, stop_n = np.searchsorted(key_P, least_n), np.searchsorted(key_P, least_n + len(tile_TD))
            row_K = np.repeat(np.arange(len(least_n)), stop_n - start_n)
            column_K = key_P[concatenated_ranges(start_n, stop_n)] - least_n[row_K]
            is_nearer_NT[torch.from_numpy(row_K), torch.from_numpy(column_K)] = False
            count_N[part_N] += is_nearer_NT.sum(dim=1, dtype=torch.int32).cpu()
    ranks: npt.NDArray[np.int32] = count_N.numpy()
    return ranks


def _tiles(shards: VectorShards, row_M: _Int64s) -> Iterator[tuple[int, Tensor]]:
    """The vectors of some rows, a tile at a time, each with the place of its first row."""
    for start in range(0, len(row_M), _DOCUMENT_TILE):
        yield start, torch.from_numpy(shards.take(row_M[start : start + _DOCUMENT_TILE]))


def _write_ranks(vectors: PairVectors, segments: Segments, device: torch.device, segment: int, path: Path) -> None:
    save_array(path, segment_ranks(vectors, segments.members(segment), device))


def _join(job: ShardedJob, segments: Segments, num_rows: int) -> dict[str, int]:
    """Write the ranks of all segments as one array; returns how many records were ranked."""
    rank_N = np.full(num_rows, NOT_RANKED, dtype=np.int32)
    for segment in range(job.num_shards):
        rank_N[segments.members(segment)] = load_shard(job.path(segment))
    write_array(job.folder / RANKS, rank_N)
    return {"num_ranked": len(segments.row_N)}


# In the order in which they are applied: what one rule takes out, the rules after it do not see.
RULES = ("copies", "near-copies", "equal to an evaluation text", "similar to an evaluation text", "inconsistent")
REASONS, LANGUAGES = "reasons.npy", "languages.npy"
SegmentBy = Literal["source", "language"]


@dataclass(frozen=True)
class FilterRules:
    """Which records are to go. The rules are applied in the order of `RULES`.

    Copies go first, so that what resembles an evaluation text takes its near-copies along; consistency comes last, so
    that nobody's rival is a record that goes anyway.

    Args:
        remove_copies: Whether a record with the query and positives of an earlier one goes. Not what you want where
            the negatives of one pair are spread over several records.
        near_duplicates: Minimum Jaccard similarity of query and positives of a near-copy, 0.5 to 1; None for no rule.
        shingle: What near-copies are compared by: runs of words, or of characters.
        top_k: A pair is consistent if its document is among this many of the segment's documents nearest to its query;
            Nomic uses 2. None for 2 where a model is given, else for no rule.
        segment_size: Maximum records that are compared with each other for consistency; Nomic uses 1,000,000.
        seed: Seed of which records share a segment.
        segment_by: Whether all records of the source may share a segment, or only those of one `language`, a field that
            every record then needs. Nomic cuts segments per language.

    Raises:
        OptionError: If a value is impossible or cannot take effect.
    """

    remove_copies: bool = True
    near_duplicates: float | None = None
    shingle: Shingle = "word"
    top_k: int | None = None
    segment_size: int = SEGMENT_SIZE
    seed: int = 0
    segment_by: SegmentBy = "source"

    def __post_init__(self) -> None:
        if self.near_duplicates is not None:
            NearDuplicates(self.near_duplicates)
            if not self.remove_copies:
                raise OptionError("remove_copies", False, "excludes near_duplicates", "a copy is a near-copy too")
        if self.top_k is not None and self.top_k < 1:
            raise OptionError("top_k", self.top_k, "must be >= 1", "the paper uses 2")
        require_segment_size(self.segment_size)


class FilterReport(NamedTuple):
    """What filtering did.

    Attributes:
        output: The file of the records that stayed.
        num_records: Records before.
        removed: Records that each rule took out, by its name in `RULES`, for the rules that were asked for.
    """

    output: Path
    num_records: int
    removed: dict[str, int]

    @property
    def num_kept(self) -> int:
        return self.num_records - sum(self.removed.values())


def filter_pairs(
    config: SourceConfig,
    output: str | os.PathLike[str],
    rules: FilterRules,
    *,
    decontaminator: Decontaminator | None = None,
    encoder: "Encoder | None" = None,
    vectors: str | os.PathLike[str] | None = None,
    encoded: EncodedTexts | None = None,
    query_prompt_name: PromptChoice = None,
    document_prompt_name: PromptChoice = None,
    devices: Sequence[str] = (),
    shard_size: int = SHARD_ROWS,
    task: ArrayTask | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> FilterReport:
    """Write the records of a source that stay, with all their fields and in their order, to a Parquet or `.jsonl` file.

    The file is a source again; columns that are no field of a record are left behind. Beside `NAME.parquet` are
    `NAME.manifest.json` and the folder `NAME.parquet.work`, which may be deleted once the file is there. Its
    `reasons.npy` holds for each record the number of the rule that took it out, from 1, and 0 for none.

    A killed run resumes at the first missing shard, and the tasks of an array share the shards: the bytes are the same.

    Args:
        config: A source of pairs, or of labelled texts, for which there are the rules on copies and evaluation texts.
        output: The file to write.
        rules: Which records go.
        decontaminator: What the model is to be evaluated on, or None for no such rule.
        encoder: The model that judges consistency, or None for no such rule.
        vectors: Folder of the source's vectors, to share them with other jobs; None for one in the work folder.
        encoded: Folders that `encode` wrote with the same model: a text found there keeps that vector.
        query_prompt_name: Prompt of the queries that are judged for consistency (see `encode_pairs`).
        document_prompt_name: The same for documents.
        devices: Devices that share the encoding, each with a process of its own (see `encode_pairs`).
        shard_size: Records of a shard of the rules that need no vectors.
        task: Which shards are this process's; None for all.
        cache_dir: Folder of converted sources.

    Memory: 2 bytes a record, 2 for its language, and what each rule needs in turn (`find_duplicates`, `rank_pairs`).
    Raises:
        OptionError: If an option is impossible or cannot take effect, or no rule is asked for.
        InputError: If the source cannot be used, something else lies at `output`, or no record stays.
    """
    require_shard_size(shard_size)
    is_json_lines(Path(output))
    prompts: dict[str, Any] = {"query_prompt_name": query_prompt_name, "document_prompt_name": document_prompt_name}
    if encoder is not None and rules.top_k is None:
        rules = replace(rules, top_k=2)
    needing = (rules.top_k, vectors, query_prompt_name, document_prompt_name, devices or None)
    is_given = any(value is not None for value in needing) or (encoded or EncodedTexts()) != EncodedTexts()
    if encoder is None and (is_given or rules.segment_by != "source"):
        rule = "must be given for top_k, segment_by, vectors, prompts and devices to take effect"
        raise OptionError("model", None, rule, "name a model directory")
    chosen = _chosen_rules(config, rules, decontaminator)
    source = open_cached(config, cache_dir)
    graded = has_levels(source.table, f"source {config.name!r}")
    fields = _manifest_fields(source, rules, prompts, decontaminator, encoder)
    target = Path(output)
    if (report := _finished(target, fields)) is not None:
        return report
    work = target.with_name(f"{target.name}.work")
    folder = work / "vectors" if vectors is None else Path(vectors)

    def ranks(is_considered_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        """The ranks of some records; vectors are made only if a record is left to judge."""
        assert encoder is not None
        return rank_pairs(
            encode_pairs(encoder, source, folder, encoded=encoded, devices=devices, task=task, **prompts),
            work / "consistency",
            is_considered_N=is_considered_N,
            group_N=language_N,
            segment_size=rules.segment_size,
            seed=rules.seed,
            device=encoder.device,
            task=task,
        )

    with discard_on_user_error(work, folder):
        ShardedJob(work, fields, num_shards=0)
        by_language = rules.segment_by == "language"
        # Read once; a run that resumes finds them.
        if by_language and not (work / LANGUAGES).exists():
            write_array(work / LANGUAGES, read_languages(config, source))
        language_N = load_shard(work / LANGUAGES) if by_language else None
        reason_N = filter_reasons(source, work, rules, decontaminator, ranks, shard_size, task)
        counts = np.bincount(reason_N, minlength=len(RULES) + 1).tolist()
        report = FilterReport(target, len(reason_N), {RULES[rule]: counts[rule + 1] for rule in chosen})
        if report.num_kept == 0:
            counted = ", ".join(f"{count} {rule}" for rule, count in report.removed.items() if count)
            raise InputError(str(target), f"no record would stay ({counted})", "loosen a rule, and name a new file")
        with file_lock(work / ".lock"):
            # Another task may have been here first.
            if _finished(target, fields) is None:
                _write(config, source, reason_N, graded, report, fields, work)
    return report


def filter_reasons(
    source: CachedSource,
    work: Path,
    rules: FilterRules,
    decontaminator: Decontaminator | None,
    ranks: Callable[[npt.NDArray[np.bool_]], npt.NDArray[np.int32]],
    shard_size: int,
    task: ArrayTask | None,
) -> npt.NDArray[np.uint8]:
    """The rule that removes each record, by its place in `RULES` from 1, and 0 where it stays, (rows,) uint8.

    `ranks` gives the ranks of the records that the earlier rules leave.
    """
    reason_N = np.full(len(source.table), KEPT, dtype=np.uint8)

    def remove(is_found_N: npt.NDArray[np.bool_], reason: int) -> None:
        reason_N[is_found_N & (reason_N == KEPT)] = reason

    if rules.remove_copies:
        found_N = find_duplicates(
            source,
            work / "duplicates",
            near_duplicates=rules.near_duplicates,
            shingle=rules.shingle,
            shard_size=shard_size,
            task=task,
        )
        remove(found_N == COPY, 1)
        remove(found_N == NEAR_COPY, 2)
    if decontaminator is not None:
        found_N = find_contaminated(source, work / "decontamination", decontaminator, shard_size=shard_size, task=task)
        remove(found_N == EQUAL, 3)
        remove(found_N == SIMILAR, 4)
    if rules.top_k is not None and (reason_N == KEPT).any():
        remove(ranks(reason_N == KEPT) >= rules.top_k, 5)
    return reason_N


def _chosen_rules(config: SourceConfig, rules: FilterRules, decontaminator: Decontaminator | None) -> list[int]:
    """The rules that are asked for, by their place in `RULES`; refuses none, and those that suit no such source."""
    if config.conversion == "sts":
        hint = "filter pairs or labelled texts"
        raise config.fault("conversion", config.conversion, "holds no records to keep", hint)
    if config.conversion != "pairs":
        for name in ("near_duplicates", "top_k"):
            if (value := getattr(rules, name)) is not None:
                raise OptionError(name, value, "compares documents, which labelled texts do not have", "leave it out")
    chosen = (
        rules.remove_copies,
        rules.near_duplicates is not None,
        decontaminator is not None,
        decontaminator is not None and decontaminator.bm25_threshold is not None,
        rules.top_k is not None,
    )
    if not any(chosen):
        raise OptionError("remove_copies", False, "leaves no rule to filter by", "ask for one, such as near_duplicates")
    return [rule for rule, is_chosen in enumerate(chosen) if is_chosen]


def _manifest_fields(
    source: CachedSource,
    rules: FilterRules,
    prompts: Mapping[str, Any],
    decontaminator: Decontaminator | None,
    encoder: "Encoder | None",
) -> dict[str, Any]:
    # Files of older versions do not name these options, and are as good.
    unsaid = [("segment_by", "source"), *((name, None) for name in prompts)]
    chosen = {name: value for name, value in {**asdict(rules), **prompts}.items() if (name, value) not in unsaid}
    return {
        "kind": "filtered pairs",
        SETTINGS: source.settings,
        "source_key": source.folder.name,
        "inputs": source.inputs,
        "num_records": len(source.table),
        "rules": chosen,
        "evaluation": None if decontaminator is None else decontaminator.fields,
        "model_sha256": None if encoder is None else embedder_sha256(encoder),
        "precision": None if encoder is None else str(encoder.dtype).removeprefix("torch."),
    }


def _finished(output: Path, fields: dict[str, Any]) -> FilterReport | None:
    """The report of a file that is there already, or None if there is none."""
    found = finished_manifest(output, fields)
    return None if found is None else FilterReport(output, found["num_records"], found["removed"])


def _write(
    config: SourceConfig,
    source: CachedSource,
    reason_N: npt.NDArray[np.uint8],
    graded: bool,
    report: FilterReport,
    fields: dict[str, Any],
    work: Path,
) -> None:
    write_array(work / REASONS, reason_N)
    json_lines = is_json_lines(report.output)
    with atomic_path(report.output) as temporary:
        if source.classes is None:
            records = (record for _, record in read_records(config, source))
            kept = compress(records, reason_N == KEPT)
            count = write_records(temporary, kept, graded, json_lines, source.table.has_scores)
        else:
            stored = map(source.table.row, np.flatnonzero(reason_N == KEPT).tolist())
            texts = (LabelledText(row.query, source.labels[row.label]) for row in stored)
            count = write_labelled_texts(temporary, texts, json_lines)
        assert count == report.num_kept
        facts = {"removed": report.removed, "num_kept": count, "output_sha256": file_sha256(temporary)}
        # The file comes last: where it is, its manifest is too.
        write_file_manifest(manifest_path(report.output), {**fields, **facts})
