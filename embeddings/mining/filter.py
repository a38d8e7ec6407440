"""Filtering: the rules that remove records of a source, in a fixed order, and the file of the remaining records."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from embeddings.common.errors import InputError, OptionError, require_minimum
from embeddings.common.io import SETTINGS, check_manifest, file_lock
from embeddings.common.jobs import (
    ArrayTask,
    ShardedJob,
    discard_on_user_error,
    finished_manifest,
    load_shard,
    output_file,
    save_array,
    write_array,
)
from embeddings.common.progress import progress_bar
from embeddings.common.random import KeyedPermutation, derive_seed
from embeddings.common.text import PromptChoice
from embeddings.data.near_duplicates import NearDuplicates, Shingle, concatenated_ranges
from embeddings.data.records import LabelledText, is_json_lines, write_labelled_texts, write_records
from embeddings.data.sources import SourceConfig
from embeddings.data.store import CachedSource, open_cached, read_languages, read_records
from embeddings.inference.encoder import model_fields
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
from embeddings.mining.pair_index import Int64s
from embeddings.mining.pair_vectors import EncodedTexts, PairVectors, encode_pairs
from embeddings.mining.search import pair_scores

if TYPE_CHECKING:
    from embeddings.inference.encoder import Encoder


SEGMENT_SIZE = 1_000_000
RANKS = "ranks.npy"
# Scores closer than this are equal: float32 sums of one product in two orders differ by less.
TIE = 1e-6
NOT_RANKED = -1

# The scores of a tile stay in the cache of a CPU. A GPU multiplies this many tiles at once.
_QUERY_TILE, _DOCUMENT_TILE, _GPU_TILES = 1024, 1024, 16
_SHARD_PAIRS = 1 << 31


class Segments:
    """The records to compare, in segments of nearly equal size: ranges of a keyed permutation of a group's records."""

    def __init__(
        self, row_N: npt.NDArray[np.uint32], segment_size: int, seed: int, group_N: npt.NDArray[np.uint16] | None = None
    ) -> None:
        self.row_N, self._seed = row_N, seed
        groups = [row_N]
        if group_N is not None:
            order_N = np.argsort(group_N, kind="stable")
            groups = np.split(row_N[order_N], np.flatnonzero(np.diff(group_N[order_N])) + 1)
        # For each segment the rows of its group, and the range of positions in the permuted group.
        self._segments: list[tuple[npt.NDArray[np.uint32], range]] = []
        # The segment and the rows in it of each shard of the work, which takes less than a minute on a CPU.
        self.blocks: list[tuple[int, slice]] = []
        for row_n in filter(len, groups):
            count = -(-len(row_n) // segment_size)
            edges = [number * len(row_n) // count for number in range(count + 1)]
            for positions in map(range, edges[:-1], edges[1:]):
                size = max(_QUERY_TILE, _SHARD_PAIRS // len(positions))
                starts = range(0, len(positions), size)
                self.blocks += [(len(self._segments), slice(start, start + size)) for start in starts]
                self._segments.append((row_n, positions))

    def __len__(self) -> int:
        return len(self._segments)

    def positions(self, shard: int) -> range:
        """The positions of a shard's rows in its permuted group."""
        segment, block = self.blocks[shard]
        return self._segments[segment][1][block]

    def members(self, segment: int) -> Int64s:
        """The rows of a segment, in order, computed without the other segments."""
        row_n, positions = self._segments[segment]
        order = KeyedPermutation(len(row_n), derive_seed(self._seed, "segments"))
        return row_n[np.sort(order(np.array(positions)))].astype(np.int64)


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
    distance: float = TIE,
) -> npt.NDArray[np.int32]:
    """For each pair, the number of documents in its segment that are nearer to its query than its own document.

    A pair is consistent at `top_k` if this number is below `top_k`: ties count in its favour. The documents of a
    segment are the distinct positives of its records, except for positives of the same query text in any record of the
    source. For a record with several positives the nearest counts.

    Args:
        vectors: Unit vectors of the source's queries and documents.
        folder: Working folder.
        is_considered_N: Records to rank, (rows,); None for all. Documents of other records are not compared.
        group_N: The group of each record, (rows,): only records of one group share a segment. None for one group.
        segment_size: Maximum records per segment, at least 2.
        seed: Seed of the assignment of records to segments.
        device: Device of the products.
        task: Shards that this process computes; None for all.
        distance: How much more similar a document must be to count; negative to count less similar ones too.

    Returns:
        (rows,) int32, memory-mapped; `NOT_RANKED` for records that are not considered or compared with no document.

    Source: Nussbaum et al. 2024 (Nomic Embed), arXiv:2402.01613, and Nussbaum and Duderstadt 2025 (Nomic Embed v2),
        arXiv:2502.07972, section 4.2: segments of 1M pairs, kept if the document is among the 2 nearest.
        Differs: segments are random within a source, or within each group of it; ties, several positives, positives of
            the same query elsewhere.
    """
    assert segment_size >= 2
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
        "prompt_names": [manifest["prompt_name"] for manifest in sides],
        "num_rows": num_rows,
        "rows_sha256": hashlib.sha256(row_N.tobytes()).hexdigest(),
        "groups_sha256": None if group_n is None else hashlib.sha256(group_n.tobytes()).hexdigest(),
        "segment_size": segment_size,
        "seed": seed,
        "distance": distance,
    }
    job = ShardedJob(folder, fields, len(segments.blocks), stem="ranks")
    rank = partial(_write_ranks, vectors, segments, torch.device(device), distance)
    job.run(rank, task, take_over=True, rows=segments.positions)
    job.finish(lambda: _join(job, segments, num_rows))
    ranks: npt.NDArray[np.int32] = load_shard(Path(folder) / RANKS, mapped=True)
    return ranks


def _write_ranks(
    vectors: PairVectors, segments: Segments, device: torch.device, distance: float, shard: int, path: Path
) -> None:
    """Write the ranks of a shard's pairs, a block of the rows of a segment, (n,) int32 (see `rank_pairs`)."""
    segment, block = segments.blocks[shard]
    index, row_N = vectors.index, segments.members(segment)
    row_n = row_N[block]
    first_N = index.positive_offsets[row_N]
    entries = concatenated_ranges(first_N, index.positive_offsets[row_N + 1] - first_N)
    document_M = np.unique(index.positive_rows[entries])
    query_nD = vectors.query_shards.take(row_n)
    start_n = index.positive_offsets[row_n]
    length_n = index.positive_offsets[row_n + 1] - start_n
    owner_P = np.repeat(np.arange(len(row_n)), length_n)
    own_row_P = np.asarray(index.positive_rows[concatenated_ranges(start_n, length_n)])
    score_P = pair_scores(query_nD, owner_P, own_row_P, vectors.document_shards)
    own_score_n = torch.from_numpy(np.maximum.reduceat(score_P, np.cumsum(length_n) - length_n))
    # The known positives in the segment, sorted by group and column, so that those of a group in a tile are contiguous.
    known = index.known_positives(row_n)
    column_P = np.minimum(np.searchsorted(document_M, known.row_P), len(document_M) - 1)
    is_in_segment_P = document_M[column_P] == known.row_P
    group_P = known.group_P[is_in_segment_P]
    key_P = group_P * len(document_M) + column_P[is_in_segment_P]
    has_others_n = (np.bincount(group_P) < len(document_M))[known.group_Q]
    count_n = torch.zeros(len(row_n), dtype=torch.int32)
    num_documents = _DOCUMENT_TILE * (1 if device.type == "cpu" else _GPU_TILES)
    firsts = range(0, len(document_M), num_documents)
    for first in progress_bar(None, "ranking documents", "tile", iterable=firsts):
        tile_TD = vectors.document_shards.take(document_M[first : first + num_documents])
        tile_DT = torch.from_numpy(tile_TD).to(device).T
        for start in range(0, len(row_n), _QUERY_TILE):
            chunk = slice(start, start + _QUERY_TILE)
            score_qT = torch.from_numpy(query_nD[chunk]).to(device) @ tile_DT
            is_nearer_qT = score_qT > own_score_n[chunk].to(device)[:, None] + distance
            first_key_q = known.group_Q[chunk] * len(document_M) + first
            start_q, stop_q = np.searchsorted(key_P, first_key_q), np.searchsorted(key_P, first_key_q + len(tile_TD))
            row_K = np.repeat(np.arange(len(first_key_q)), stop_q - start_q)
            column_K = key_P[concatenated_ranges(start_q, stop_q - start_q)] - first_key_q[row_K]
            is_nearer_qT[torch.from_numpy(row_K), torch.from_numpy(column_K)] = False
            count_n[chunk] += is_nearer_qT.sum(dim=1, dtype=torch.int32).cpu()
    save_array(path, np.where(has_others_n, count_n.numpy(), np.int32(NOT_RANKED)))


def _join(job: ShardedJob, segments: Segments, num_rows: int) -> dict[str, int]:
    """Write the ranks of all segments as one array; returns the number of ranked records."""
    rank_N = np.full(num_rows, NOT_RANKED, dtype=np.int32)
    for shard, (segment, block) in enumerate(segments.blocks):
        rank_N[segments.members(segment)[block]] = load_shard(job.path(shard))
    write_array(job.folder / RANKS, rank_N)
    return {"num_ranked": len(segments.row_N)}


# In order of application; a rule does not consider records that an earlier rule removed.
RULES = (
    "copies", "near-copies", "equal to an evaluation text", "similar to an evaluation text", "inconsistent", "easy",
)  # fmt: skip
REASONS, LANGUAGES = "reasons.npy", "languages.npy"
SegmentBy = Literal["source", "language"]


@dataclass(frozen=True)
class FilterRules:
    """The rules for removing records, applied in the order of `RULES`.

    Copies are removed first, so that a record similar to an evaluation text is removed with its near-copies.
    Consistency comes late, so that pairs are not compared with records that are removed anyway.

    Args:
        remove_copies: Whether to remove records with the query and positives of an earlier one. Switch it off if the
            negatives of one pair are spread over several records.
        near_duplicates: Minimum Jaccard similarity of query and positives of near-copies, 0.5 to 1; None for no rule.
        shingle: Unit in which near-copies are compared: sequences of words, or of characters.
        top_k: A pair is consistent if its document is among this many of the segment's documents nearest to its query;
            Nomic uses 2. None for 2 with a model, and no rule without.
        max_margin: Maximum distance of a pair's similarity above that of its query and every other document of the
            segment, for a pair to be kept: the loss of one that is easier is near zero. None for no rule.
        segment_size: Maximum records that are compared with each other for consistency; Nomic uses 1,000,000.
        seed: Seed of the assignment of records to segments.
        segment_by: Whether segments are drawn from all records of the source, or from those of one `language`, a field
            that every record then needs. Nomic draws segments per language.
    """

    remove_copies: bool = True
    near_duplicates: float | None = None
    shingle: Shingle = "word"
    top_k: int | None = None
    max_margin: float | None = None
    segment_size: int = SEGMENT_SIZE
    seed: int = 0
    segment_by: SegmentBy = "source"

    def __post_init__(self) -> None:
        if self.near_duplicates is not None:
            NearDuplicates(self.near_duplicates)
            if not self.remove_copies:
                raise OptionError("remove_copies", False, "excludes near_duplicates", "a copy is a near-copy too")
        require_minimum("top_k", self.top_k, 1, "the paper uses 2", optional=True)
        if self.max_margin is not None and not 0 < self.max_margin <= 2:
            hint = "at 0.3 and temperature 0.05 the loss is near zero"
            raise OptionError("max_margin", self.max_margin, "must be > 0 and <= 2", hint)
        require_minimum("segment_size", self.segment_size, 2, "the paper uses 1000000")


class FilterReport(NamedTuple):
    """The file of the remaining records, the number before, and how many each active rule of `RULES` removed."""

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
    """Write the remaining records of a source, with all fields and in their order, to a Parquet or `.jsonl` file.

    The output is a source again; columns that are not fields of a record are dropped. Beside `OUTPUT` are
    `OUTPUT.manifest.json` and the folder `OUTPUT.work`, which may be deleted when the output is complete. Its
    `reasons.npy` has for each record the number of the rule that removed it, from 1, or 0.

    A killed run resumes at the first missing shard, and the tasks of an array share the shards: the bytes are the same.

    Args:
        config: A source of pairs, or of labelled texts (only the rules on copies and evaluation texts apply to these).
        output: The file to write.
        rules: The rules for removing records.
        decontaminator: The rule on evaluation texts, or None.
        encoder: The model of the consistency rule, or None for no such rule.
        vectors: Folder of the source's vectors, to share them with other jobs; None for one in the work folder.
        encoded: Folders that `encode` wrote with the same model; their vectors are reused.
        query_prompt_name: Prompt of the queries for consistency (see `encode_pairs`).
        document_prompt_name: The same for documents.
        devices: Devices that share the encoding, one process each (see `encode_pairs`).
        shard_size: Records per shard of the rules without vectors.
        task: Shards that this process computes; None for all.
        cache_dir: Folder of converted sources.
    """
    require_minimum("shard_size", shard_size, 1)
    is_json_lines(Path(output))
    prompts: dict[str, Any] = {"query_prompt_name": query_prompt_name, "document_prompt_name": document_prompt_name}
    if encoder is not None and rules.top_k is None:
        rules = replace(rules, top_k=2)
    model_options = (rules.top_k, rules.max_margin, vectors, query_prompt_name, document_prompt_name, devices or None)
    needs_model = any(value is not None for value in model_options) or (encoded or EncodedTexts()) != EncodedTexts()
    if encoder is None and (needs_model or rules.segment_by != "source"):
        rule = "must be set for top_k, max_margin, segment_by, vectors, prompts and devices to take effect"
        raise OptionError("model", None, rule, "name a model directory")
    chosen = _chosen_rules(config, rules, decontaminator)
    source = open_cached(config, cache_dir)
    graded = source.table.has_levels(f"source {config.name!r}")
    fields = _manifest_fields(source, rules, prompts, decontaminator, encoder)
    target = Path(output)
    if (report := _finished(target, fields)) is not None:
        return report
    work = target.with_name(f"{target.name}.work")
    folder = work / "vectors" if vectors is None else Path(vectors)

    with discard_on_user_error(work, folder, task=task):
        ShardedJob(work, fields, num_shards=0)
        by_language = rules.segment_by == "language"
        # Read once; a resumed run uses this file.
        if by_language and not (work / LANGUAGES).exists():
            write_array(work / LANGUAGES, read_languages(config, source))
        language_N = load_shard(work / LANGUAGES) if by_language else None
        reason_N = np.full(len(source.table), KEPT, dtype=np.uint8)

        def remove(is_matched_N: npt.NDArray[np.bool_], reason: int) -> None:
            reason_N[is_matched_N & (reason_N == KEPT)] = reason

        shared: dict[str, Any] = {"shard_size": shard_size, "task": task}
        if rules.remove_copies:
            copies: dict[str, Any] = {"near_duplicates": rules.near_duplicates, "shingle": rules.shingle}
            verdict_N = find_duplicates(source, work / "duplicates", **copies, **shared)
            remove(verdict_N == COPY, 1)
            remove(verdict_N == NEAR_COPY, 2)
        if decontaminator is not None:
            verdict_N = find_contaminated(source, work / "decontamination", decontaminator, **shared)
            remove(verdict_N == EQUAL, 3)
            remove(verdict_N == SIMILAR, 4)
        if encoder is not None and rules.top_k is not None and (reason_N == KEPT).any():
            pairs = encode_pairs(encoder, source, folder, encoded=encoded, devices=devices, task=task, **prompts)
            rank = partial(rank_pairs, pairs, group_N=language_N, device=encoder.device, task=task)
            rank = partial(rank, segment_size=rules.segment_size, seed=rules.seed)
            remove(rank(work / "consistency", is_considered_N=reason_N == KEPT) >= rules.top_k, 5)
            if rules.max_margin is not None and (reason_N == KEPT).any():
                remove(rank(work / "easy", is_considered_N=reason_N == KEPT, distance=-rules.max_margin) == 0, 6)
        counts = np.bincount(reason_N, minlength=len(RULES) + 1).tolist()
        report = FilterReport(target, len(reason_N), {RULES[rule]: counts[rule + 1] for rule in chosen})
        if report.num_kept == 0:
            counted = ", ".join(f"{count} {rule}" for rule, count in report.removed.items() if count)
            raise InputError(str(target), f"no record would remain ({counted})", "loosen a rule, and name a new file")
        with file_lock(work / ".lock"):
            # Another task may have written the file already.
            if _finished(target, fields) is None:
                _write(config, source, reason_N, graded, report, fields, work)
    return report


def _chosen_rules(config: SourceConfig, rules: FilterRules, decontaminator: Decontaminator | None) -> list[int]:
    """Indices in `RULES` of the active rules; an error if there are none, or one does not apply to the source."""
    if config.conversion == "sts":
        hint = "filter pairs or labelled texts"
        raise config.fault("conversion", config.conversion, "has no records to filter", hint)
    if config.conversion != "pairs":
        for name in ("near_duplicates", "top_k", "max_margin"):
            if (value := getattr(rules, name)) is not None:
                raise OptionError(name, value, "compares documents, and labelled texts have none", "leave it out")
    chosen = (
        rules.remove_copies,
        rules.near_duplicates is not None,
        decontaminator is not None,
        decontaminator is not None and decontaminator.bm25_threshold is not None,
        rules.top_k is not None,
        rules.max_margin is not None,
    )
    if not any(chosen):
        raise OptionError("remove_copies", False, "leaves no active rule", "set one, such as near_duplicates")
    return [rule for rule, is_chosen in enumerate(chosen) if is_chosen]


def _manifest_fields(
    source: CachedSource,
    rules: FilterRules,
    prompts: Mapping[str, Any],
    decontaminator: Decontaminator | None,
    encoder: "Encoder | None",
) -> dict[str, Any]:
    return {
        "kind": "filtered pairs",
        SETTINGS: source.settings,
        "source_key": source.key,
        "inputs": source.inputs,
        "num_records": len(source.table),
        "rules": {**asdict(rules), **prompts},
        "evaluation": None if decontaminator is None else decontaminator.fields,
        **({"model_sha256": None, "precision": None} if encoder is None else model_fields(encoder)),
    }


def _finished(output: Path, fields: dict[str, Any]) -> FilterReport | None:
    manifest = finished_manifest(output, fields)
    return None if manifest is None else FilterReport(output, manifest["num_records"], manifest["removed"])


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
    facts = {"removed": report.removed, "num_kept": report.num_kept}
    with output_file(report.output, fields | facts) as temporary:
        if source.classes is None:
            records = (record for _, record in read_records(config, source))
            kept = compress(records, reason_N == KEPT)
            count = write_records(temporary, kept, graded, json_lines, source.table.has_scores)
        else:
            stored = map(source.table.row, np.flatnonzero(reason_N == KEPT).tolist())
            texts = (LabelledText(row.query, source.labels[row.label]) for row in stored)
            count = write_labelled_texts(temporary, texts, json_lines)
        assert count == report.num_kept
