"""Mining of hard negatives for the records of a source by one or several teachers; the output has training records."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embeddings.common.errors import InputError, OptionError, refuse_given, require, require_minimum
from embeddings.common.io import SETTINGS, check_manifest, file_lock, file_sha256
from embeddings.common.jobs import (
    ArrayTask,
    ShardedJob,
    discard_on_user_error,
    finished_manifest,
    load_shard,
    manifest_path,
    output_file,
    save_array,
    shard_rows,
)
from embeddings.common.process import logger, quiet_libraries, quiet_transformers
from embeddings.common.progress import progress_bar
from embeddings.common.text import PromptChoice, one_line
from embeddings.data.records import NUM_LEVELS, Record, is_json_lines, table_writer
from embeddings.data.sources import SourceConfig
from embeddings.data.store import CachedSource, Table, open_cached, read_records
from embeddings.inference.encoder import model_fields, module_sha256
from embeddings.inference.vector_folder import SHARD_SIZE
from embeddings.mining.faiss_library import faiss_version, load_faiss
from embeddings.mining.ivf import build_ivf
from embeddings.mining.mined_shards import (
    ByLevel,
    ShardMiner,
    add_levels,
    output_schema,
    read_shard,
    shard_counts,
    with_mined,
    write_shard,
)
from embeddings.mining.negatives import DocumentQrels, LevelRules, NegativeRules
from embeddings.mining.pair_index import PairIndex, index_pairs
from embeddings.mining.pair_vectors import EncodedTexts, PairVectors, encode_pairs
from embeddings.mining.search import DocumentSearch, ExactSearch, Floats, require_gpu

if TYPE_CHECKING:
    from embeddings.inference.encoder import Encoder


BATCH_PAIRS = 32
# Each block of queries searches nearly all inverted lists, whose number grows with the documents. Of many records this
# many shards are mined together, one for each million of records.
MAX_SHARDS_TOGETHER, _ROWS_PER_SHARD_TOGETHER = 8, 1 << 20
# Model classes with a head for scores; for others the library would initialise a head at random.
_SCORING = ("ForSequenceClassification", "ForCausalLM")


class Reranker:
    """A cross-encoder of sentence-transformers, which scores pairs of a query and a text.

    Scores are those of `CrossEncoder.predict`, after the model's activation: logits, or their sigmoid.

    Args:
        model: A directory or Hub id, as for `CrossEncoder`.
        device: Device of the model; None for the GPU if there is one.
    """

    def __init__(self, model: str, device: str | None = None) -> None:
        with quiet_libraries():
            library = require("sentence_transformers", "rerank")
        self.name = model
        try:
            with quiet_libraries(), quiet_transformers():
                self.model: Any = library.CrossEncoder(model, device=device)
        except (OSError, ValueError, RuntimeError) as error:
            what = f"cannot be loaded as a cross-encoder ({one_line(str(error), 120)})"
            raise InputError(model, what, "check the name and the network, or use a directory") from error
        head = next(iter(self.model.config.architectures or ()), "an unknown class")
        if len(self.model) == 1 and not head.endswith(_SCORING):
            rule = f"must be a cross-encoder, and the weights of {head} have no head for scores"
            raise OptionError("reranker", model, rule, "name one, such as cross-encoder/ms-marco-MiniLM-L6-v2")
        if self.model.num_labels != 1:
            rule = f"must return one score per pair, not {self.model.num_labels}"
            raise OptionError("reranker", model, rule, "name a model for ranking")

    @cached_property
    def fields(self) -> dict[str, Any]:
        settings = {"activation": repr(self.model.activation_fn), "max_length": self.model.max_seq_length}
        return {
            "model_sha256": module_sha256(self.model, self.model.tokenizer, settings),
            "precision": str(self.model.dtype).removeprefix("torch."),
            "batch_pairs": BATCH_PAIRS,
        }

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Floats:
        """The scores of P pairs of a query and a text, (P,) float32; an `InputError` if one is not finite."""
        with progress_bar(-(-len(pairs) // BATCH_PAIRS), "scoring pairs", "batch") as bar:

            def count(*_: object) -> None:
                bar.update()

            counting = self.model.register_forward_hook(count)
            try:
                # All pairs in one call, which sorts them by length.
                scores = self.model.predict(list(pairs), batch_size=BATCH_PAIRS, show_progress_bar=False)
            finally:
                counting.remove()
        score_P: Floats = np.asarray(scores, np.float32)
        if not np.isfinite(score_P).all():
            query, text = pairs[int(np.flatnonzero(~np.isfinite(score_P))[0])]
            what = f"the score of {query[:40]!r} with {text[:40]!r} is not finite"
            raise InputError(self.name, what, "check the weights and the dtype of the model")
        return score_P


def score_shard(reranker: Reranker, table: Table, shard_size: int, mined: ShardedJob, shard: int, path: Path) -> None:
    """Write the scores of a shard's texts: for each row its positives, then its mined negatives."""
    rows = table.rows(shard_rows(shard, shard_size, len(table)))
    negatives = read_shard(mined.path(shard))["negatives"].to_pylist()
    pairs = [
        (row.query, text)
        for row, mined_texts in zip(rows, negatives, strict=True)
        for text in chain(row.positives, (item if isinstance(item, str) else item["text"] for item in mined_texts))
    ]
    save_array(path, reranker.scores(pairs))


def read_scores(path: Path, records: Sequence[Record], mined: pa.Table) -> pa.Array:
    counts = [len(record.positives) for record in records]
    offsets = np.cumsum([0, *np.add(counts, pc.list_value_length(mined["negatives"]).to_pylist())])
    score_P = load_shard(path)
    if score_P.dtype != np.float32 or score_P.shape != (offsets[-1],):
        raise InputError(str(path), "does not have the expected content", "delete its folder and run again")
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(score_P))


IndexKind = Literal["exact", "ivf"]


@dataclass(frozen=True)
class Teachers:
    """The models that score candidates, and the prompts of their texts.

    Args:
        models: Names for `load`, each once.
        load: Function that returns the encoder of a name. One encoder is in memory at a time.
        query_prompt_name: Prompt of the queries (see `encode_pairs`).
        document_prompt_name: Prompt of the documents.
        encoded: Existing vectors of each model, in their order; may be empty.
        reranker: A cross-encoder that scores each query with its positives and its negatives, once these are chosen.
    """

    models: Sequence[str]
    load: "Callable[[str], Encoder]"
    query_prompt_name: PromptChoice = None
    document_prompt_name: PromptChoice = None
    encoded: Sequence[EncodedTexts] = ()
    reranker: Reranker | None = None

    def __post_init__(self) -> None:
        if not self.models or len(set(self.models)) < len(self.models):
            raise OptionError("model", list(self.models), "must name one or several different models", "correct it")
        assert len(self.encoded) in (0, len(self.models))
        object.__setattr__(self, "load", lru_cache(maxsize=1)(self.load))

    def encode(self, source: CachedSource, index: PairIndex, folder: Path, **options: Any) -> list[PairVectors]:
        """The vectors of all texts by each model, in its folder; for `options` see `encode_pairs`."""
        return [
            encode_pairs(
                self.load(model),
                source,
                folder if len(self.models) == 1 else folder / f"teacher-{number}",
                index=index,
                query_prompt_name=self.query_prompt_name,
                document_prompt_name=self.document_prompt_name,
                encoded=self.encoded[number] if self.encoded else None,
                **options,
            )
            for number, model in enumerate(self.models)
        ]


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search for the nearest documents.

    Args:
        index: `exact` compares every query with every document; `ivf` only with the documents of the nearest lists.
        num_probes: Lists that `ivf` searches per query; None for 32, or all if there are fewer.
        num_lists: Number of lists of `ivf`, or None for a default by the number of documents (see `build_ivf`).
        gpu: Whether to search on the first GPU; `ivf` needs faiss's build for GPUs (the extra `gpu`).
        gpu_memory_gib: GPU memory for the exact search, in GiB; None for 16. Larger corpora are streamed.
    """

    index: IndexKind = "exact"
    num_probes: int | None = None
    num_lists: int | None = None
    gpu: bool = False
    gpu_memory_gib: float | None = None

    def __post_init__(self) -> None:
        if self.index == "exact":
            refuse_given({"num_probes": self.num_probes, "num_lists": self.num_lists}, "needs --index ivf")
        if self.index == "ivf" or not self.gpu:
            refuse_given({"gpu_memory_gib": self.gpu_memory_gib}, "needs --gpu and --index exact")

    def check(self) -> None:
        load_faiss(self.gpu and self.index == "ivf")
        if self.gpu:
            require_gpu()

    def over(self, vectors: PairVectors, folder: Path, seed: int, task: ArrayTask | None) -> DocumentSearch:
        shards = vectors.document_shards
        if self.index == "exact":
            return ExactSearch(shards, "cuda" if self.gpu else "cpu", self.gpu_memory_gib)
        lists = {"num_probes": self.num_probes, "num_lists": self.num_lists}
        return build_ivf(shards, folder, **lists, seed=seed, gpu=self.gpu, task=task)


class MiningReport(NamedTuple):
    """The result of mining; `removed` counts the candidates of each rule, `by_level` is filled by `add_levels`."""

    output: Path
    num_queries: int
    num_documents: int
    num_candidates: int
    removed: dict[str, int]
    num_left: int
    num_negatives: int
    num_short: int
    num_empty: int
    num_replaced: int
    by_level: ByLevel | None = None


def mine_negatives(
    config: SourceConfig,
    output: str | os.PathLike[str],
    teachers: Teachers,
    rules: NegativeRules,
    *,
    search: SearchOptions | None = None,
    levels: LevelRules | None = None,
    corpus: str | os.PathLike[str] | None = None,
    vectors: str | os.PathLike[str] | None = None,
    devices: Sequence[str] = (),
    shard_size: int = SHARD_SIZE,
    task: ArrayTask | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> MiningReport | None:
    """Write the records of a source with mined negatives, in their order, to a Parquet or `.jsonl` file.

    The output is a source again: the fields of the records with new `negatives` (hardest first; with `levels` objects
    of `text` and `level`), `negative_scores` and `positive_scores` (means over the teachers), and a reranker's `scores`
    of positives, then negatives. `OUTPUT.manifest.json` has the report; the folder `OUTPUT.work` may be deleted.

    A killed run resumes at the first missing shard. The tasks of an array share the shards and the last one writes the
    file; the bytes are the same except for the rounding of vectors (see `encode_pairs`).

    Args:
        config: A source of `pairs`, or of `sts`: its pairs with a high score, in both directions.
        output: The file to write.
        teachers: The models that score the candidates.
        rules: The rules by which candidates become negatives.
        search: Search for candidates; None for the exact search on the CPU.
        levels: How levels are determined (see `choose_levels`); None for negatives without levels.
        corpus: A file of additional documents (see `index_pairs`), or None for only the source's positives.
        vectors: Folder of the vectors, to share them with other jobs; None for one in the work folder.
        devices: Devices that share the encoding (see `encode_pairs`).
        shard_size: Records and vectors per shard: the most that is lost when the job is killed. By inverted lists up to
            eight shards are mined together, one for each million of records.
        task: Shards that this process computes; None for all.
        cache_dir: Folder of converted sources.

    Returns:
        The report, or None while shards of other tasks are missing.
    """
    search = search or SearchOptions()
    search.check()
    require_minimum("shard_size", shard_size, 1)
    is_json_lines(Path(output))
    if config.conversion not in ("pairs", "sts"):
        raise config.fault("conversion", config.conversion, "has no records to mine for", "use pairs or sts")
    # Resolved before the manifest is written, so that the default and the explicit number are the same job.
    if rules.num_negatives is None:
        rules = replace(rules, num_negatives=rules.count if levels is None else NUM_LEVELS)
    if levels is not None and rules.count % NUM_LEVELS:
        rule = f"must be a multiple of {NUM_LEVELS} with levels, for the same number of each"
        raise OptionError("num_negatives", rules.count, rule, f"use {NUM_LEVELS} for one of each, as in MGH")
    source = open_cached(config, cache_dir)
    target, reranker = Path(output), teachers.reranker
    # Mined shards do not depend on the reranker.
    work_fields = _manifest_fields(source, teachers, rules, search, levels, corpus, shard_size)
    fields = work_fields if reranker is None else {**work_fields, "reranker": reranker.fields}
    if (report := _finished(target, fields)) is not None:
        return report
    work = target.with_name(f"{target.name}.work")
    folder = Path(vectors) if vectors is not None else work / "vectors"
    with discard_on_user_error(work, folder, task=task):
        mined_rows = shard_size
        if search.index == "ivf":
            mined_rows *= max(1, min(MAX_SHARDS_TOGETHER, len(source.table) // _ROWS_PER_SHARD_TOGETHER))
        mined_fields, num_shards = {**work_fields, "shard_size": mined_rows}, -(-len(source.table) // mined_rows)
        job = ShardedJob(work, mined_fields, num_shards, stem="mined", suffix=".parquet")
        index = index_pairs(source, folder / "index", corpus)
        if index.num_documents <= rules.count:
            what = f"has {index.num_documents} distinct documents, too few for {rules.count} negatives"
            raise InputError(f"source {config.name!r}", what, "add documents with --corpus, or lower num_negatives")
        qrels = None
        if levels is not None and levels.judged is not None:
            qrels = DocumentQrels(levels.judged, index, levels.judged_in)
        encoded = teachers.encode(source, index, folder, shard_size=shard_size, devices=devices, task=task)
        searches = [search.over(made, work / f"ivf-{number}", rules.seed, task) for number, made in enumerate(encoded)]
        miner = ShardMiner(index, encoded, searches, rules, None if levels is None else levels.kind, qrels)
        rows = partial(shard_rows, shard_size=mined_rows, num_rows=len(source.table))
        job.run(lambda shard, path: write_shard(miner.mine(rows(shard)), index, rules, path), task, rows=rows)
        scoring = None
        if reranker is not None:
            of_model = work / f"scores-{reranker.fields['model_sha256'][:12]}"
            score_fields = {"kind": "reranker's scores", **reranker.fields}
            scoring = ShardedJob(of_model, score_fields, job.num_shards, stem="scores")
            scoring.run(partial(score_shard, reranker, source.table, mined_rows, job), task, rows=rows)
        jobs = [job] if scoring is None else [job, scoring]
        if any(each.missing() for each in jobs):
            return None
        with file_lock(work / ".merge.lock"):
            # Another task may have written the file already.
            records = (record for _, record in read_records(config, source))
            report = _finished(target, fields) or _merge(job, scoring, target, records, encoded, fields)
        for each in jobs:
            each.finish()
    return report


def _manifest_fields(
    source: CachedSource,
    teachers: Teachers,
    rules: NegativeRules,
    search: SearchOptions,
    levels: LevelRules | None,
    corpus: str | os.PathLike[str] | None,
    shard_size: int,
) -> dict[str, Any]:
    """The options that determine the output's bytes, for the manifest, as JSON types."""
    if corpus is not None and not Path(corpus).is_file():
        raise InputError(str(corpus), "no such file", "check the path")
    fields = {
        "kind": "mined negatives",
        SETTINGS: source.settings,
        "source_key": source.key,
        "corpus_sha256": None if corpus is None else file_sha256(corpus),
        "teachers": [model_fields(teachers.load(model)) for model in teachers.models],
        "query_prompt_name": teachers.query_prompt_name,
        "document_prompt_name": teachers.document_prompt_name,
        "rules": asdict(rules),
        "search": {**asdict(replace(search, gpu_memory_gib=None)), "seed": rules.seed},
        "levels": None if levels is None else levels.fields,
        "shard_size": shard_size,
        "faiss": faiss_version(),
    }
    return dict(json.loads(json.dumps(fields)))


def _merge(
    job: ShardedJob,
    scoring: ShardedJob | None,
    output: Path,
    records: Iterator[Record],
    vectors: Sequence[PairVectors],
    fields: dict[str, Any],
) -> MiningReport:
    index, graded = vectors[0].index, fields["levels"] is not None
    counts: Counter[str] = Counter()
    levels: ByLevel = {}
    recorded = dict(fields)
    with output_file(output, recorded) as temporary:
        with table_writer(temporary, output_schema(graded, scoring is not None), is_json_lines(output)) as write:
            for shard in range(job.num_shards):
                mined = read_shard(job.path(shard))
                counts.update(shard_counts(mined))
                if graded:
                    add_levels(levels, mined)
                originals = list(islice(records, len(mined)))
                scores = None if scoring is None else read_scores(scoring.path(shard), originals, mined)
                write(with_mined(originals, mined, graded, scores))
        removed = {name: count for name, count in counts.items() if name.startswith("removed ")}
        facts: dict[str, Any] = {
            "num_queries": index.num_queries,
            "num_documents": index.num_documents,
            **{name: count for name, count in counts.items() if name not in removed},
            "removed": {name.removeprefix("removed "): count for name, count in removed.items()},
            "by_level": levels or None,
        }
        recorded |= facts
        recorded["mini_batch_tokens"] = [
            check_manifest(made.query_shards.folder, {})["mini_batch_tokens"] for made in vectors
        ]
    report = MiningReport(output, **facts)
    for count, what in (
        (report.num_replaced, "had negatives, which the mined ones replace"),
        (report.num_short, "have fewer negatives than num_negatives"),
    ):
        if count:
            logger.warning("%d of %d records %s", count, index.num_queries, what)
    for level, part in (report.by_level or {}).items():
        if part["num_lacking"]:
            logger.warning(
                "%d of %d records have no negative of level %s; train with the sampler's missing_level: coarser",
                part["num_lacking"], index.num_queries, level,
            )  # fmt: skip
    return report


def _finished(output: Path, fields: dict[str, Any]) -> MiningReport | None:
    manifest = finished_manifest(output, fields)
    if manifest is None:
        return None
    if "reranker" in manifest and "reranker" not in fields:
        what = "field 'reranker': the output was written with a reranker"
        raise InputError(str(manifest_path(output)), what, "use the same --reranker, or name a new file")
    return MiningReport(output, **{name: manifest[name] for name in MiningReport._fields[1:]})
