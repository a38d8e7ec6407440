"""The table of public data sets: where each source of a recipe lies, and which sources and steps a recipe needs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Self

import yaml

from embeddings.common.errors import CHECKOUT, PACKAGE, OptionError
from embeddings.data.public.kinds import KINDS
from embeddings.data.sources import SourceConfig

CONFIGS = (CHECKOUT or PACKAGE) / "lightning_configs" / "data"
TABLE = "public_sources.yaml"
# What a data config's paths begin with: the folder that `prepare` writes.
ROOT_VARIABLE = "EMBED_TRAIN_DATA"


@dataclass(frozen=True)
class PublicSource:
    """Where one source lies in public, and how its rows become records; the table's head says what each field means."""

    folder: str
    name: str
    repository: str | None
    kind: str | None
    confirmed: bool
    named_by_paper: bool
    collection: str | None = None
    columns: Mapping[str, str | list[str]] = field(default_factory=dict)
    subset: str | None = None
    split: str | list[str] = "train"
    revision: str | None = None
    data_files: str | None = None
    every: int = 1
    own_negatives: bool = False
    filtered: bool = False
    decontaminate: bool = False
    rows: int | None = None
    licence: str | None = None
    evidence: str | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        kind = None if self.kind is None else KINDS[self.kind]
        assert kind is not None or self.note, f"{self.key}: a source that cannot be fetched needs a note"
        if kind is not None:
            needed = set(kind.fields) - set(kind.optional)
            assert needed <= set(self.columns) <= set(kind.fields), f"{self.key}: columns do not fit kind {self.kind}"
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", self.repository or ""), f"{self.key}: no name of a data set"
        assert self.every >= 1, self.key

    @property
    def key(self) -> str:
        """Folder and name, which name the source's file."""
        return f"{self.folder}/{self.name}"

    @property
    def place(self) -> str:
        """The data set with its subset, split or files, for people."""
        splits = [self.split] if isinstance(self.split, str) else self.split
        more = [self.subset, self.data_files, "" if splits == ["train"] else ", ".join(splits)]
        shown = ", ".join(part for part in more if part)
        return f"{self.repository or 'none found'}{f' [{shown}]' if shown else ''}"

    @property
    def why_left_out(self) -> str | None:
        """Why `prepare` leaves the source out unless it is asked for; None for one that it fetches."""
        if self.kind is None:
            return self.note
        return None if self.confirmed else "not confirmed to be the recipe's data"

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the records besides the data set's content, as JSON types."""
        names = ("repository", "kind", "columns", "subset", "split", "revision", "data_files", "every")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Stage:
    """What one data config needs.

    Attributes:
        recipe: The recipe's name, as `prepare` takes it.
        config: The data config's file, without its suffix.
        run: A row of recipes.csv that reads it.
        stage: The stage's name, None for a recipe of one stage.
        mine: Teacher, number of negatives, prompt and levels of mining; None where nothing is mined. And so the others:
        filter: Model, prompts and top k of the filter for consistency.
        cluster: The model that clusters.
        vectors: Model and prompts of the vectors that tell false negatives.
        data_changes: What the data config must say otherwise of files made by these steps.
    """

    recipe: str
    config: str
    run: str
    stage: str | None = None
    mine: Mapping[str, Any] | None = None
    filter: Mapping[str, Any] | None = None
    cluster: Mapping[str, Any] | None = None
    vectors: Mapping[str, Any] | None = None
    data_changes: Mapping[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        """The arguments of the data config."""
        content = yaml.safe_load((CONFIGS / f"{self.config}.yaml").read_text(encoding="utf-8"))
        arguments: dict[str, Any] = content["data"]["init_args"]
        return arguments

    def wanted(self) -> dict[str, SourceConfig]:
        """The sources that the data config reads, by `FOLDER/NAME`."""
        found = {}
        for entry in self.data["sources"]:
            match = re.fullmatch(rf"\$\{{{ROOT_VARIABLE}\}}/(\w+/\w+)\.parquet", entry["path"])
            assert match, f"{self.config}: {entry['name']} is no file that prepare writes"
            found[match[1]] = SourceConfig(**entry)
        return found


@dataclass(frozen=True)
class PublicTable:
    """The whole table: what each data config needs, and all sources, those of collections among them."""

    stages: Sequence[Stage]
    sources: Sequence[PublicSource]

    @classmethod
    @cache
    def read(cls, path: Path = CONFIGS / TABLE) -> Self:
        """The table of a file."""
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        known = {each.name for each in fields(PublicSource)}
        sources = []
        for group in content["groups"]:
            for entry in group["sources"]:
                values = {"folder": group["folder"], "collection": group.get("collection")}
                values |= {**group.get("defaults", {}), **entry}
                if values["kind"] == "beir":
                    values.setdefault("columns", {})
                assert set(values) <= known, f"{path.name}: unknown fields {set(values) - known}"
                sources.append(PublicSource(**values))
        keys = [(source.key, source.collection) for source in sources]
        assert len(set(keys)) == len(keys), f"{path.name}: a source comes twice"
        return cls([Stage(**stage) for stage in content["stages"]], sources)

    def stages_of(self, recipe: str, stage: str | None) -> list[Stage]:
        """The stages of a recipe, or the one that is named."""
        stages = [each for each in self.stages if each.recipe == recipe]
        chosen = [each for each in stages if stage in (None, each.stage)]
        if not chosen:
            names = [each.stage for each in stages if each.stage]
            rule = f"must be {' or '.join(names)}" if names else f"has no effect on {recipe}, which has one stage"
            raise OptionError("stage", stage, rule, "leave it out for all")
        return chosen

    def place_of(self, key: str, collection: str | None) -> PublicSource:
        """Where a source lies: in the collection if it is there, else in its own place."""
        found = {source.collection: source for source in self.sources if source.key == key}
        return found.get(collection, found[None])

    def collections(self, keys: Sequence[str]) -> list[str]:
        """The collections that hold some of these sources."""
        return sorted({source.collection for source in self.sources if source.key in keys and source.collection})
