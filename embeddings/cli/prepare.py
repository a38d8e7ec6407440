"""`prepare`: downloads a recipe's public data sets, then filters, mines and clusters them as the recipe says."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from embeddings.cli.mining import decontaminator
from embeddings.cli.retrieval import load_encoder
from embeddings.common import InputError, OptionError
from embeddings.common.errors import program, refuse_given, require_minimum
from embeddings.common.io import atomic_path, read_json_or_empty, write_text
from embeddings.common.jobs import manifest_path
from embeddings.common.process import logger
from embeddings.common.progress import progress_bar
from embeddings.common.text import format_table, one_line
from embeddings.data import SourceConfig
from embeddings.data.public import (
    ROOT_VARIABLE,
    PublicSource,
    PublicTable,
    Stage,
    check_source,
    corpus_path,
    fetch_source,
)
from embeddings.data.records import table_writer
from embeddings.data.sources import Conversion
from embeddings.data.store import open_cached, record_place
from embeddings.inference import Encoder
from embeddings.mining import (
    ClusterSettings,
    Decontaminator,
    EncodingOptions,
    FilterRules,
    LevelRules,
    NegativeRules,
    Teachers,
    cluster_pairs,
    encode_pairs,
    filter_pairs,
    mine_negatives,
)
from embeddings.mining.clusters import VectorFeatures
from embeddings.mining.faiss_library import load_faiss


@dataclass(frozen=True)
class StepOptions:
    """The steps after the download.

    Args:
        fetch_only: Whether to download only, without loading a model. The same command without this option continues.
        teacher: The model for mining, filtering and clustering, a directory or Hub id; default the recipe's models.
        decontaminate: An evaluation folder, or a folder of them; several as `[FOLDER, FOLDER]`. Rows equal to their
            texts are removed from the sources whose recipe requires it.
        bm25_threshold: A text is similar to an evaluation text, and removed too, if it shares at least this fraction of
            that text's BM25 weight.
        precision: Format of the models' matrix products.
        devices: Devices that share the encoding: how many, or their names (see `mine`).
    """

    fetch_only: bool = False
    teacher: str | None = None
    decontaminate: Path | list[Path] | None = None
    bm25_threshold: float | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    devices: int | str | None = None


def prepare(
    recipe: Literal["docstrings", "nv-embed", "mgh", "moe", "cde"],
    output: Path | None = None,
    stage: str | None = None,
    limit: int | None = None,
    only: str | None = None,
    from_: str | None = None,
    unconfirmed: bool = False,
    check: bool = False,
    mirror: Path | None = None,
    *,
    steps: StepOptions,
) -> None:
    """Make a recipe's training data from public data sets of the Hub; to resume, run the same command again.

    Files below `output` have the names that the recipe's data config expects. Data sets that are missing, gated or
    changed are listed at the end; all others are made.

    Args:
        recipe: The recipe. `docstrings`, a corpus of installed packages, works offline and has other options.
        output: The folder to write; set `EMBED_TRAIN_DATA` to it for training. Each file has a manifest beside it.
        stage: One of the recipe's stages: 1 or 2, pretrain or finetune, unsupervised or supervised. Default all.
        limit: Maximum rows of each source; the first ones are used.
        only: Comma-separated names of the sources to make, including sources that are otherwise left out.
        from_: A collection that contains some sources with negatives, to use in place of their original data sets.
        unconfirmed: Whether to download also data sets that are not confirmed to be those of the recipe.
        check: Whether to read only the first row of each data set; nothing is written.
        mirror: A folder with the data sets as `ORGANISATION/NAME`, to use in place of the Hub.
        steps: The steps after the download.
    """
    if recipe == "docstrings":
        raise OptionError("recipe", recipe, "must come first", f"write: {program()} prepare docstrings --output FOLDER")
    require_minimum("limit", limit, 1, "leave it out for all rows", optional=True)
    table = PublicTable.read()
    stages = table.stages_of(recipe, stage)
    wanted = [key for each in stages for key in each.wanted()]
    known, collections = list(map(name_of, wanted)), table.collections(wanted)
    names = known if only is None else only.split(",")
    if not set(names) <= set(known):
        hint = f"they are {one_line(', '.join(known), 400)}"
        raise OptionError("only", only, f"must name sources of {recipe}", hint)
    if from_ is not None and from_ not in collections:
        rule = f"must be {' or '.join(collections)}" if collections else f"has no effect on {recipe}"
        raise OptionError("from", from_, rule, "leave it out for each source's own data set")
    places = {key: table.place_of(key, from_) for key in wanted if name_of(key) in names}
    if check:
        failures = attempt([(key, partial(check_source, place, mirror)) for key, place in places.items() if place.kind])
        rows = [[key, place.place, "missing" if key in failures else place.why_left_out or "found"]
                for key, place in places.items()]  # fmt: skip
        print(format_table([["source", "data set", ""], *rows], "<<<"))
        require_all(recipe, failures, len(places))
        return
    if output is None:
        raise OptionError("output", None, "must be given", "name the folder to write")
    asked = only is not None or unconfirmed
    jobs = {key: place for key, place in places.items() if place.kind and (asked or place.confirmed)}
    left_out = {key: str(place.why_left_out) for key, place in places.items() if key not in jobs}
    if not any(place.decontaminate for place in jobs.values()):
        rule = "has no effect: the papers of these sources do not ask for it"
        refuse_given({"decontaminate": steps.decontaminate}, rule)
    judge = decontaminator(steps.decontaminate, steps.bm25_threshold)
    works = [StageWork(each, output, steps, jobs, judge) for each in stages]
    for work in works:
        work.check_options()
    # All downloads come first, so that the network is not needed while the devices work.
    actions: list[Action] = [
        (key, partial(fetch_source, jobs[key], work.fetched(key), mirror, limit)) for work in works for key in work.keys
    ]
    sizes = [jobs[key].num_rows(limit) for key, _ in actions]
    failures = attempt(one_bar("fetching", actions, sizes))
    if not steps.fetch_only:
        finishing = [(key, partial(work.finish, key)) for work in works for key in work.keys if key not in failures]
        failures |= attempt(finishing)
    for work in works:
        print(work.summary(left_out))
    require_all(recipe, failures, len(places))


# A source, and one of the steps that make it.
Action = tuple[str, Callable[[], object]]


def one_bar(title: str, actions: Sequence[Action], sizes: Sequence[int | None]) -> Iterator[Action]:
    """The actions, with one bar over the rows of all, or over the sources if a number is unknown."""
    has_rows = None not in sizes
    counts = [(size or 0) if has_rows else 1 for size in sizes]
    with progress_bar(sum(counts), title, "row" if has_rows else "source") as bar:
        for (key, action), count in zip(actions, counts, strict=True):
            bar.set_description(f"{title} {key}", refresh=False)
            with bar.item(count):
                yield key, action


def attempt(actions: Iterable[Action]) -> dict[str, str]:
    """Run the steps of all sources but those after a failed one of the same source; returns the errors by source."""
    failures = dict[str, str]()
    for key, action in actions:
        if key in failures:
            continue
        try:
            action()
        except InputError as error:
            failures[key] = str(error)
            logger.warning("%s is left out: %s", key, error)
    return failures


def require_all(recipe: str, failures: Mapping[str, str], num_sources: int) -> None:
    if failures:
        listed = "; ".join(f"{name_of(key)} ({reason})" for key, reason in failures.items())
        what = f"{len(failures)} of {num_sources} sources could not be made: {listed}"
        raise InputError(f"prepare {recipe}", what, "run the same command again for these, or train without them")


# The steps of all sources use one model.
_load = lru_cache(maxsize=1)(load_encoder)


def name_of(key: str) -> str:
    return key.partition("/")[2]


@dataclass
class StageWork:
    """The steps that make the files of one stage from `places`, and the config that reads them."""

    stage: Stage
    output: Path
    options: StepOptions
    places: dict[str, PublicSource]
    decontaminator: Decontaminator | None

    def __post_init__(self) -> None:
        self.wanted = self.stage.wanted()
        self.keys = [key for key in self.places if key in self.wanted]

    def target(self, key: str) -> Path:
        return self.output / f"{key}.parquet"

    def beside(self, key: str, kind: str) -> Path:
        return self.target(key).parent / kind / name_of(key)

    def filters(self, key: str) -> bool:
        is_judged = self.stage.filter is not None and not self.places[key].filtered
        return is_judged or (self.places[key].decontaminate and self.decontaminator is not None)

    def mines(self, key: str) -> bool:
        is_pairs = self.wanted[key].conversion == "pairs"
        return self.stage.mine is not None and is_pairs and not self.places[key].own_negatives

    def fetched(self, key: str) -> Path:
        """The path of the download: the target itself if no step follows."""
        target = self.target(key)
        return target.parent / "fetched" / target.name if self.filters(key) or self.mines(key) else target

    def encoding(self, prompts: Mapping[str, Any]) -> dict[str, Any]:
        texts = {name: prompts[name] for name in ("query_prompt", "document_prompt") if name in prompts}
        encoding = EncodingOptions(devices=self.options.devices, **texts)
        return {**encoding.prompts, "devices": encoding.device_names}

    def encoder(self, step: Mapping[str, Any]) -> Encoder:
        device = next(iter(self.encoding({})["devices"]), None)
        return _load(self.options.teacher or step["model"], self.options.precision, None, device)

    def check_options(self) -> None:
        named = [self.wanted[key].name for key in self.keys if self.places[key].decontaminate]
        if self.decontaminator is None and named:
            logger.warning("not decontaminated, unlike in the paper: %s; give --decontaminate FOLDER", ", ".join(named))
        if not self.options.fetch_only and (self.stage.cluster or any(map(self.mines, self.keys))):
            load_faiss()

    def finish(self, key: str) -> None:
        """Make the target from the download, and the clusters and vectors for training."""
        path = fetched = self.fetched(key)
        if self.filters(key):
            path = fetched.with_name(f"{fetched.stem}.kept.parquet") if self.mines(key) else self.target(key)
            self._filter(key, fetched, path)
        if self.mines(key):
            documents = corpus_path(fetched)
            if "negatives" in self.places[key].columns:
                _write_negatives(path, documents)
            self._mine(key, path, documents if documents.exists() else None)
        if self.stage.cluster or self.stage.vectors:
            self._cluster(key)

    def _filter(self, key: str, path: Path, output: Path) -> None:
        source, step, config = self.places[key], self.stage.filter, self.wanted[key]
        rules, encoding = FilterRules(), dict[str, Any]()
        if step is not None and not source.filtered:
            rules, encoding = FilterRules(top_k=step["top_k"]), {"encoder": self.encoder(step), **self.encoding(step)}
        kind: Conversion = "pairs" if config.conversion == "pairs" else "class_by_example"
        judge = self.decontaminator if source.decontaminate else None
        filter_pairs(SourceConfig(config.name, str(path), kind), output, rules, decontaminator=judge, **encoding)

    def _mine(self, key: str, path: Path, documents: Path | None) -> None:
        step, config = self.stage.mine, self.wanted[key]
        assert step is not None
        instruction = config.instruction if isinstance(config.instruction, str) else (config.instruction or [""])[0]
        prompts = {}
        if "query_prompt" in step:
            sides = ("query_prompt", "document_prompt") if config.symmetric else ("query_prompt",)
            prompts = dict.fromkeys(sides, step["query_prompt"].format(instruction=instruction))
        encoding = self.encoding(prompts)
        devices = encoding.pop("devices")
        mine_negatives(
            SourceConfig(config.name, str(path), "sts" if self.places[key].kind == "scored" else "pairs"),
            self.target(key),
            Teachers([self.options.teacher or step["model"]], lambda _: self.encoder(step), **encoding),
            NegativeRules(num_negatives=step["num_negatives"]),
            levels=LevelRules(step["levels"]) if "levels" in step else None,
            corpus=documents,
            devices=devices,
        )

    def _cluster(self, key: str) -> None:
        """Write the clusters, and the vectors for filtering false negatives, where the data config expects them."""
        config = SourceConfig(name_of(key), str(self.target(key)))
        source = open_cached(config)
        if (step := self.stage.cluster) is not None:
            folder = self.beside(key, "cluster_vectors")
            vectors = encode_pairs(self.encoder(step), source, folder, **self.encoding(step))
            settings = ClusterSettings()
            features = VectorFeatures(vectors, None, settings.seed, partial(record_place, config, source))
            cluster_pairs(features, source, self.beside(key, "clusters"), settings)
        if (step := self.stage.vectors) is not None:
            negatives = self.stage.data["num_negatives"] > 0
            folder = self.beside(key, "vectors")
            encode_pairs(self.encoder(step), source, folder, negatives=negatives, **self.encoding(step))

    def is_made(self, key: str) -> bool:
        """Whether a source is ready for training: its file, clusters and vectors are complete."""
        folders = [self.beside(key, "clusters")] if self.stage.cluster else []
        folders += [self.beside(key, "vectors") / "documents"] if self.stage.vectors else []
        has_file = self.target(key).exists() and manifest_path(self.target(key)).exists()
        return has_file and all(read_json_or_empty(folder / "manifest.json").get("complete") for folder in folders)

    def write_config(self) -> str:
        """Write a data config with the ready sources and their licences; returns the command that trains on them."""
        table, sources = PublicTable.read(), []
        for key, entry in zip(self.wanted, self.stage.data["sources"], strict=True):
            licence = self.places.get(key, table.place_of(key, None)).licence
            if self.is_made(key):
                sources.append(entry | ({"licence": licence} if licence else {}))
        path = self.output / f"{self.stage.config}.yaml"
        output, config = shlex.quote(str(self.output)), shlex.quote(str(path))
        line = f"{ROOT_VARIABLE}={output} {program()} fit --recipe {self.stage.run} --config {config}"
        head = f"# {len(sources)} of the {len(self.wanted)} sources of {self.stage.config}.\n#   {line}\n"
        arguments = {**(self.stage.data_changes or {}), "sources": sources}
        data = {"class_path": "embeddings.data.EmbeddingDataModule", "init_args": arguments}
        write_text(path, head + yaml.safe_dump({"data": data}, sort_keys=False, allow_unicode=True, width=110))
        return line

    def summary(self, left_out: Mapping[str, str]) -> str:
        """The sources that were made and those that were not, as text."""
        made, rows = sum(map(self.is_made, self.wanted)), []
        for key in self.keys:
            config, path = self.wanted[key], self.fetched(key) if self.options.fetch_only else self.target(key)
            count = f"{pq.read_metadata(path).num_rows:,}" if path.exists() else "missing"
            paper = "" if config.max_rows is None else f"{config.max_rows:,}"
            rows.append([config.name, count, paper, self.places[key].licence or "not stated", self.places[key].place])
        table = format_table([["source", "rows", "in the paper", "licence", "data set"], *rows], "<>><<")
        name = f"{self.stage.recipe}{f', stage {self.stage.stage}' if self.stage.stage else ''}"
        lines = [f"{name}: {made} of {len(self.wanted)} sources are ready for training", table]
        for key in (key for key in self.wanted if key in left_out):
            size = self.wanted[key].max_rows
            lines.append(f"left out: {self.wanted[key].name}{f', {size:,} rows' if size else ''}: {left_out[key]}")
        if made:
            lines.append(self.write_config())
        return "\n".join(lines)


def _write_negatives(path: Path, documents: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    with atomic_path(documents) as temporary, table_writer(temporary, schema) as write, pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["negatives"]):
            write(pa.table({"text": batch.column(0).flatten()}, schema))
