"""Publishing a model directory: its card (`README.md`) and the upload to the Hugging Face Hub."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
    get_token,
    metadata_load,
)

from embeddings.common import InputError, OptionError
from embeddings.common.io import MANIFEST, check_file, write_text
from embeddings.common.own_folder import own_hashes, record_files
from embeddings.common.process import logger
from embeddings.common.text import one_line
from embeddings.models.model_files import (
    CARD_FILE,
    CURVES_FILE,
    PACKAGED_NAME,
    SCORES_FILE,
    UNDAMAGED,
    is_own_card,
    read_json,
)
from embeddings.models.poolings import pooling_name

# An `Embedder`, whose file imports this one.
Embedder = Any
_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
_SCORES, _LIMITS = "\n## Scores\n", "\n## Limits\n"
_MAX_CHARACTERS = 200
_FIX_UPLOAD = "check the name, the token and the network; add --update if the repository exists"
_FIX_BY_STATUS = {
    401: "log in with: hf auth login",
    403: "use a token with write access to that owner",
    409: "name another, or commit to it with --update",
}
# Further files that are uploaded with a model.
_COMPANIONS = (MANIFEST, CARD_FILE, SCORES_FILE, "training_run.json", "LICENSE*", "LICENCE*", "NOTICE*")
# Output folders of this library: a path in them looks like a Hub id, and may be gone when the card is written.
_OUTPUT_FOLDERS = ("checkpoints", "data")


@dataclass(frozen=True)
class TrainingFacts:
    """The run that trained a model: its merged config, `run.json` as `record`, and validation nDCG@10 by step."""

    config: Mapping[str, Any]
    num_steps: int
    record: Mapping[str, Any] = field(default_factory=dict)
    validation: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class ImportFacts:
    """The published model that a directory was imported from, and how many of its tensors are used."""

    source: str
    revision: str | None
    base: Sequence[str]
    family: str
    used_as: str | None  # the published model whose card is followed
    num_used: int
    num_left: int


def write_model_card(
    folder: Path,
    embedder: Embedder,
    facts: TrainingFacts | ImportFacts | None = None,
    *,
    licence: str | None = None,
    location: Path | None = None,
    base: str | None = None,
    sections: Mapping[str, str] | None = None,
) -> None:
    """Write the card of a model directory with the scores of its `scores.json`.

    `location` is the folder that `folder` will replace, and that the card's commands load. A card in it that the user
    wrote or changed is kept. `base` is the model that this one was made from, without training facts. `sections` are
    further ones, Markdown by title.
    """
    location = folder if location is None else location
    if keeps_card(location):
        return
    training = facts if isinstance(facts, TrainingFacts) else None
    origin = facts if isinstance(facts, ImportFacts) else None
    sources = [] if training is None else _sources(training.config)
    models = [name for name in (base,) if name is not None] if training is None else _backbones(training.config)
    bases = [hub for hub in map(_hub_name, [origin.source, *origin.base] if origin else models) if hub]
    needs_code = any(folder.glob("*.py"))
    data = ModelCardData(
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=[dataset for dataset in map(_hub_dataset, sources) if dataset] or None,
        library_name="sentence-transformers",
        license=licence,
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "sentence-similarity", "feature-extraction", *["custom_code"] * needs_code],
    )
    prompts = [(code(kind), code(text)) for kind, text in embedder.text.prompts.items()]
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=plain(location.resolve().name),
        location=repr(str(location)),
        model=embedder,
        pooling=pooling_name(embedder.pooling).rpartition(".")[2].replace("_", " "),
        needs_code=needs_code,
        is_contextual=hasattr(embedder, "embed_context"),
        prompts=prompts and table(("name", "prompt"), prompts),
        origin=origin and _origin(origin),
        training=training and _training(training),
        sources=training and _data(sources, _within(training.record, "source_rows")),
        settings=training and _settings(training.config),
        validation=training.validation[-1] if training and training.validation else None,
        has_curves=(folder / CURVES_FILE).is_file(),
        licence=licence and plain(licence),
        sections=sections or {},
    )
    _save(card, folder)


def _save(card: ModelCard, folder: Path) -> None:
    """Write a card, with the scores of `scores.json` in its header and in its last section."""
    if (folder / SCORES_FILE).is_file():
        scores = read_scores(folder / SCORES_FILE)
        name = next(line for line in card.text.splitlines() if line.startswith("# "))
        data: Any = card.data
        data.model_name = re.sub(r"\\(.)", r"\1", name.removeprefix("# "))
        names = [str(score["name"]) for score in scores]
        data.eval_results = [
            EvalResult(
                str(score.get("kind", "retrieval")),
                name,
                name,
                metric,
                value,
                dataset_config=f"{score.get('dimensions')} dimensions" if names.count(name) > 1 else None,
            )
            for name, score in zip(names, scores, strict=True)
            for metric, value in score["metrics"].items()
        ]
        card.text = f"{card.text.partition(_SCORES)[0].rstrip()}\n{_SCORES}\n{_score_table(scores)}\n"
    write_text(folder / CARD_FILE, str(card).rstrip("\n") + "\n")
    record_files(folder, CARD_FILE)


def add_scores(folder: Path) -> bool:
    """Add the scores of `scores.json` to a directory's generated card; returns whether the card shows them."""
    if not (folder / SCORES_FILE).is_file() or not is_own_card(folder / CARD_FILE):
        return False
    _save(ModelCard.load(folder / CARD_FILE), folder)
    record_files(folder, SCORES_FILE)
    return True


def add_section(folder: Path, title: str, text: str) -> bool:
    """Add a section to a directory's generated card, or replace that of this title; returns whether the card shows it.

    `text` is Markdown without headings of the first two levels.
    """
    if not is_own_card(folder / CARD_FILE):
        return False
    card = ModelCard.load(folder / CARD_FILE)
    before, _, old = card.text.partition(f"\n## {title}\n")
    rest = old.partition("\n## ")
    content = f"{before}\n## {rest[2]}" if rest[1] else before
    before, limits, after = content.partition(_LIMITS)
    card.text = f"{before.rstrip()}\n\n## {title}\n\n{text}\n{limits}{after}"
    write_text(folder / CARD_FILE, str(card).rstrip("\n") + "\n")
    record_files(folder, CARD_FILE)
    return True


def keeps_card(folder: Path) -> bool:
    """Whether a directory has a card that the user wrote or changed, which is kept; logs a warning if so."""
    path = folder / CARD_FILE
    if not path.exists() or is_own_card(path):
        return False
    logger.warning("%s was written or changed by hand and is kept; remove it for a card of this model", path)
    return True


def plain(value: object) -> str:
    """A value as one printable line of escaped Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#!~&$])", r"\\\1", one_line(str(value), _MAX_CHARACTERS))


def code(value: str) -> str:
    """A text as Markdown code, for the cell of a table."""
    text = repr(value if len(value) <= _MAX_CHARACTERS else f"{value[: _MAX_CHARACTERS - 3]}...")
    return f"`{text.replace('`', chr(0x2019)).replace('|', chr(0x2223))}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def read_scores(path: Path) -> list[dict[str, Any]]:
    """The results of `evaluate --output`; an `InputError` if the file has other content or a metric is not finite."""
    fix = "give the file that evaluate --output wrote"
    results: list[dict[str, Any]] = read_json(path, list, fix)
    metrics = [_within(result, "metrics") for result in results]
    is_named = all(isinstance(_within(result).get("name"), str) for result in results)
    # False for NaN and infinite numbers.
    is_finite = all(type(value) in (int, float) and abs(value) < 1e9 for each in metrics for value in each.values())
    if not (metrics and all(metrics) and is_named and is_finite):
        raise InputError(str(path), "does not contain scores", fix)
    return results


def check_licence(option: str, licence: str | None) -> None:
    """Check that a licence is written as a licence identifier of the Hub; `option` names the setting."""
    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence):
        rule = "must be a licence identifier of the Hub"
        raise OptionError(option, licence, rule, "write it as apache-2.0 or other")


def stated_licence(folder: Path) -> str | None:
    """The `license` in the header of a folder's `README.md`, in lower case; None if there is no such identifier."""
    licence = None
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        licence = (metadata_load(folder / CARD_FILE) or {}).get("license")
    is_name = isinstance(licence, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", licence)
    return str(licence).lower() if is_name else None


def _origin(facts: ImportFacts) -> str:
    rows: dict[str, Any] = {"imported from": shown_name(facts.source), "revision": facts.revision}
    rows |= {"merged into": ", ".join(map(shown_name, facts.base)), "kind of checkpoint": facts.family}
    rows |= {"vectors computed as for": facts.used_as}
    return _known(rows | {"tensors read": f"{facts.num_used:,}", "tensors left out": f"{facts.num_left:,}"})


def _training(facts: TrainingFacts) -> str:
    model = _within(facts.config, "model")
    versions = _within(facts.record, "versions")
    rows: dict[str, Any] = {"method": _class_name(model)}
    rows["backbone"] = ", ".join(map(shown_name, _backbones(facts.config)))
    rows |= {part: _class_name(_within(model, "init_args", part)) for part in ("pooling", "loss", "optimizer")}
    rows |= {"optimiser steps": facts.num_steps, "seed": facts.config.get("seed_everything")}
    rows |= {"processes": facts.record.get("world_size"), "commit": facts.record.get("commit")}
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return _known(rows)


def _known(rows: Mapping[str, Any]) -> str:
    """A table of the rows that have a value."""
    return table(("", ""), [(name, plain(value)) for name, value in rows.items() if value not in (None, "")])


def _data(sources: Sequence[Mapping[str, Any]], num_rows: Mapping[str, Any]) -> str:
    if not sources:
        return "Not known."
    rows = []
    for source in sources:
        count = num_rows.get(str(source.get("name")))
        shown_count = f"{count:,}" if isinstance(count, int) else "unknown"
        cells = (source.get("name"), _hub_dataset(source) or "files", shown_count, source.get("licence") or "unknown")
        rows.append([plain(cell) for cell in cells])
    return table(("source", "from", "rows", "licence"), rows)


def _settings(config: Mapping[str, Any]) -> str:
    """The settings of a run as YAML, without paths of the machine."""
    trainer = {name: value for name, value in _within(config, "trainer").items() if name not in ("callbacks", "logger")}
    settings = _portable({"trainer": trainer, "model": config.get("model"), "data": config.get("data")})
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    # Not the end of the code block that shows it.
    return text.replace("```", "'''").rstrip("\n")


def _score_table(scores: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in scores:
        metric, value = next(iter(result["metrics"].items()))
        counts = ", ".join(f"{count} {name}" for name, count in _within(result, "counts").items())
        cells = (result["name"], result.get("kind", ""), metric, f"{value:.3f}", result.get("dimensions") or "all")
        rows.append([plain(cell) for cell in (*cells, counts.replace("num_", ""))])
    return table(("folder", "kind", "metric", "value", "dimensions", "counted"), rows)


def _portable(value: Any) -> Any:
    """Plain types without empty fields; a local path is shortened to its last component."""
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, bool | int | float):
        return value
    text = str(value)
    return shown_name(text) if text.startswith(("/", "~", ".", "$")) else text


def _backbones(config: Mapping[str, Any]) -> list[str]:
    parts = _within(config, "model", "init_args")
    names = [_within(parts, key).get("name") for key in parts if key.endswith("backbone")]
    names.append(parts.get("initial_model"))
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and name))


def _hub_name(name: str) -> str | None:
    """The Hub id of a backbone, None for a directory."""
    if name == PACKAGED_NAME:
        return f"sentence-transformers/{name}"
    is_local = name.split("/")[0] in _OUTPUT_FOLDERS or Path(name).exists()
    return name if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not is_local else None


def _hub_dataset(source: Mapping[str, Any]) -> str | None:
    """The Hub data set of a source, None for local files."""
    path = source.get("path")
    return path.removeprefix("hub:") if isinstance(path, str) and path.startswith("hub:") else None


def shown_name(name: str) -> str:
    """A Hub id, or the last component of a path."""
    return _hub_name(name) or f".../{Path(name).name}"


def _sources(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sources = _within(config, "data", "init_args").get("sources") or []
    return [source for source in sources if isinstance(source, Mapping)]


def _class_name(section: Mapping[str, Any]) -> str:
    return str(section.get("class_path", "")).rpartition(".")[2]


def _within(value: Any, *keys: str) -> Mapping[str, Any]:
    """The mapping at a path of keys; empty if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class PushedModel:
    """The result of a push: the repository `OWNER/NAME`, its page, the commit, its files and their size."""

    name: str
    url: str
    commit: str
    files: tuple[str, ...]
    num_bytes: int


def push_to_hub(
    folder: str | os.PathLike[str],
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload the model",
    update: bool = False,
    token: str | None = None,
) -> PushedModel:
    """Upload a model directory with its card to the Hub, in one commit.

    Uploads the model's files, `README.md`, `scores.json` and the licence, and nothing else. The scores of
    `scores.json` are first added to a generated card.

    Args:
        folder: The directory.
        name: The repository, `OWNER/NAME`; `NAME` alone belongs to the token's owner.
        private: Whether a new repository is private.
        revision: The branch to commit to, created if missing; None for `main`.
        message: First line of the commit message.
        update: Whether the repository may exist already. Of its files, those that its manifest lists and the directory
            lacks are deleted.
        token: A token with write access; None for `HF_TOKEN` or the one that `hf auth login` stored.
    """
    folder = Path(folder).expanduser()
    paths = own_files(folder)
    token = token or get_token()
    if token is None:
        raise InputError(name, "the Hub needs a token", "set HF_TOKEN, or log in with: hf auth login")
    add_scores(folder)
    # huggingface_hub itself ignores an HF_ENDPOINT that is set after its import.
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        page = api.create_repo(name, private=private, exist_ok=update)
        repository = page.repo_id
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        contents: dict[str, Any] = {path: folder / path for path in paths}
        if is_own_card(folder / CARD_FILE):
            # The commands load the repository in place of the folder.
            text = (folder / CARD_FILE).read_text(encoding="utf-8")
            location = re.search(r"""SentenceTransformer\(('(?:\\.|[^\\'\n])*'|"[^"\n]*")""", text)
            contents[CARD_FILE] = (text.replace(location[1], repr(repository)) if location else text).encode()
        operations: list[Any] = [CommitOperationAdd(path, content) for path, content in contents.items()]
        if update:
            existing = api.list_repo_files(repository, revision=revision)
            earlier = _pushed_files(api, repository, revision) if MANIFEST in existing else set()
            operations += [CommitOperationDelete(path) for path in existing if path in earlier.difference(paths)]
        commit = api.create_commit(repository, operations, commit_message=message, revision=revision)
    except Exception as error:
        # httpx's errors are in different packages under versions 1 and 2 of huggingface_hub.
        if not (isinstance(error, ValueError | OSError) or type(error).__module__.startswith("httpx")):
            raise
        status = getattr(getattr(error, "response", None), "status_code", 0)
        what = one_line(getattr(error, "server_message", None) or f"{type(error).__name__}: {error}", 160)
        raise InputError(
            name, f"cannot be uploaded to {api.endpoint} ({what})", _FIX_BY_STATUS.get(status, _FIX_UPLOAD)
        ) from error
    num_bytes = sum((folder / path).stat().st_size for path in paths)
    return PushedModel(repository, str(page), commit.oid, tuple(paths), num_bytes)


def push_embedder(embedder: Embedder, name: str, **options: Any) -> PushedModel:
    """Upload a model from memory, with a card that describes only its use; `options` as in `push_to_hub`."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, name.rpartition("/")[2])
        embedder.save_pretrained(folder)
        return push_to_hub(folder, name, **options)


def own_files(folder: Path) -> list[str]:
    """The files to upload from a model directory, which must be as its manifest lists them."""
    own = [name for name in own_hashes(folder) if name != CARD_FILE]
    for name in own:
        if not (folder / name).is_file():
            raise InputError(str(folder / name), "is missing, so the model is incomplete", "export it again")
        check_file(folder / name, UNDAMAGED)
    companions = [path.name for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()]
    paths = sorted({*own, *companions})
    for name in paths:
        if (folder / name).resolve() != folder.resolve() / name:
            what = "is a symbolic link, whose target may not belong to the model"
            raise InputError(str(folder / name), what, "replace it by the file")
    return paths


def _pushed_files(api: HfApi, repository: str, revision: str | None) -> set[str]:
    """The files that the manifest in a repository lists; none if it is not the manifest of a model."""
    with TemporaryDirectory() as temporary:
        manifest = Path(api.hf_hub_download(repository, MANIFEST, revision=revision, local_dir=temporary))
        with suppress(InputError):
            return set(own_hashes(manifest.parent))
    return set()
