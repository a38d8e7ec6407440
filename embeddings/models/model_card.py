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
    try_to_load_from_cache,
)
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

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
    resolve_model,
)
from embeddings.models.poolings import pooling_name

# An `Embedder`, whose file imports this one.
Embedder = Any
_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
_SCORES = "\n## Scores\n"
_MAX_CHARACTERS = 200
_TRAINER_KEYS = (
    *("precision", "strategy", "num_nodes", "devices", "max_epochs", "max_steps"),
    *("accumulate_grad_batches", "gradient_clip_val"),
)
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
    """The published model that a directory was imported from; `used_as` is the model whose card is followed."""

    source: str
    revision: str | None
    base: Sequence[str]
    family: str
    used_as: str | None
    num_used: int
    num_left: int


def write_model_card(
    folder: Path,
    embedder: Embedder,
    facts: TrainingFacts | ImportFacts | None = None,
    *,
    scores: Sequence[Mapping[str, Any]] = (),
    licence: str | None = None,
    location: str | os.PathLike[str] | None = None,
) -> None:
    """Write the card of a model directory, unless it has one that the user wrote or changed.

    The card shows `curves.png` if it exists, and `scores`, by default those of `scores.json`. `location` is what the
    card's commands load, a folder or a Hub id, by default `folder`; its last part is the model's name.
    """
    if keeps_card(folder):
        return
    location = folder if location is None else location
    training = facts if isinstance(facts, TrainingFacts) else None
    origin = facts if isinstance(facts, ImportFacts) else None
    backbones, sources = ([], []) if training is None else (_backbones(training.config), _sources(training.config))
    bases = [hub for hub in map(_hub_name, [origin.source, *origin.base] if origin else backbones) if hub]
    needs_code = any(folder.glob("*.py"))
    data = ModelCardData(
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=[dataset for dataset in map(_hub_dataset, sources) if dataset] or None,
        library_name="sentence-transformers",
        license=licence,
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "sentence-similarity", "feature-extraction", *["custom_code"] * needs_code],
    )
    folders = {_shown_name(base): place for base in backbones if (place := _base_folder(base))}
    stated = {base: stated_licence(place) for base, place in folders.items()}
    languages = dict.fromkeys(language for place in folders.values() for language in stated_languages(place))
    prompts = [(code(kind), code(text)) for kind, text in embedder.text.prompts.items()]
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=plain(Path(location).expanduser().resolve().name),
        location=repr(os.fspath(location)),
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
        languages=", ".join(languages),
        licence=plain(licence) if licence else None,
        base_licences=[(plain(base), plain(name)) for base, name in stated.items() if name],
    )
    if not scores and (folder / SCORES_FILE).is_file():
        scores = read_scores(folder / SCORES_FILE)
    _save(card, folder, scores)


def _save(card: ModelCard, folder: Path, scores: Sequence[Mapping[str, Any]]) -> None:
    """Write a card, with the scores in its header and in its last section."""
    if scores:
        name = next(line for line in card.text.splitlines() if line.startswith("# "))
        data: Any = card.data
        data.model_name = re.sub(r"\\(.)", r"\1", name.removeprefix("# "))
        data.eval_results = [
            EvalResult(str(score.get("kind", "retrieval")), str(score["name"]), str(score["name"]), metric, value)
            for score in scores
            for metric, value in score["metrics"].items()
        ]
        card.text = f"{card.text.partition(_SCORES)[0].rstrip()}\n{_SCORES}\n{_score_table(scores)}\n"
    write_text(folder / CARD_FILE, str(card).rstrip("\n") + "\n")
    record_files(folder, CARD_FILE)


def add_scores(folder: Path) -> bool:
    """Add the scores of `scores.json` to a directory's generated card; returns whether the card shows them."""
    if not (folder / SCORES_FILE).is_file() or not is_own_card(folder / CARD_FILE):
        return False
    _save(ModelCard.load(folder / CARD_FILE), folder, read_scores(folder / SCORES_FILE))
    record_files(folder, SCORES_FILE)
    return True


def keeps_card(folder: Path) -> bool:
    """Whether a directory has a card that the user wrote or changed, which is kept; logs a warning if so."""
    path = folder / CARD_FILE
    if not path.exists() or is_own_card(path):
        return False
    logger.warning("%s was written or changed by hand and is kept; remove it for a card of this model", path)
    return True


def plain(value: object, limit: int = _MAX_CHARACTERS) -> str:
    """A value as one printable line of escaped Markdown."""
    text = " ".join(str(value).split())
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return re.sub(r"([\\`*_{}\[\]<>|#!~&$])", r"\\\1", text)


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
    if not results or not all(map(_is_result, results)):
        raise InputError(str(path), "does not contain scores", fix)
    return results


def _is_result(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    metrics = value.get("metrics")
    # False for NaN and infinite numbers.
    return (
        isinstance(metrics, dict)
        and bool(metrics)
        and all(type(number) in (int, float) and abs(number) < 1e9 for number in metrics.values())
    )


def check_licence(option: str, licence: str | None) -> None:
    """Check that a licence is written as a licence identifier of the Hub; `option` names the setting."""
    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence):
        rule = "must be a licence identifier of the Hub"
        raise OptionError(option, licence, rule, "write it as apache-2.0 or other")


def stated_licence(folder: Path) -> str | None:
    """The `license` in the header of a folder's `README.md`, in lower case; None if there is no such identifier."""
    licence = _card_fields(folder).get("license")
    is_name = isinstance(licence, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", licence)
    return str(licence).lower() if is_name else None


def stated_languages(folder: Path) -> list[str]:
    """The language codes in the header of a folder's `README.md`."""
    value = _card_fields(folder).get("language")
    codes = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [code for code in codes if isinstance(code, str) and re.fullmatch(r"[A-Za-z]{2,3}([-_]\w{2,8})?", code)]


def _card_fields(folder: Path) -> dict[str, Any]:
    """The header of a folder's card; empty if there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        return metadata_load(folder / CARD_FILE) or {}
    return {}


def _base_folder(name: str) -> Path | None:
    """The local folder of a base model, without a download; None if it is not on this machine."""
    if name == PACKAGED_NAME or Path(name).expanduser().is_dir():
        with suppress(InputError):
            return resolve_model(name)
    hub = _hub_name(name)
    cached = None if hub is None else try_to_load_from_cache(hub, CARD_FILE)
    return Path(cached).parent if isinstance(cached, str) else None


def _origin(facts: ImportFacts) -> str:
    rows: dict[str, Any] = {"imported from": _shown_name(facts.source), "revision": facts.revision}
    rows |= {"merged into": ", ".join(map(_shown_name, facts.base)), "kind of checkpoint": facts.family}
    rows |= {"vectors computed as for": facts.used_as}
    return _known(rows | {"tensors read": f"{facts.num_used:,}", "tensors left out": f"{facts.num_left:,}"})


def _training(facts: TrainingFacts) -> str:
    model = _within(facts.config, "model")
    versions = _within(facts.record, "versions")
    rows: dict[str, Any] = {"method": _class_name(model)}
    rows["backbone"] = ", ".join(map(_shown_name, _backbones(facts.config)))
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
    """The training settings as YAML, without paths of the machine."""
    trainer, data = _within(config, "trainer"), dict(_within(config, "data", "init_args"))
    for name in ("sources", "cache_dir"):
        data.pop(name, None)
    settings = {
        "trainer": {name: trainer[name] for name in _TRAINER_KEYS if trainer.get(name) is not None},
        "model": config.get("model"),
        "data": {**_within(config, "data"), "init_args": data},
    }
    text = yaml.safe_dump(_portable(settings), sort_keys=False, allow_unicode=True)
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
    if isinstance(value, str):
        return _shown_name(value) if value.startswith(("/", "~", ".", "$")) else value
    return value


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


def _shown_name(name: str) -> str:
    return _hub_name(name) or f".../{Path(name).name}"


def _sources(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sources = _within(config, "data", "init_args").get("sources")
    return [source for source in sources if isinstance(source, Mapping)] if isinstance(sources, list) else []


def _class_name(section: Mapping[str, Any]) -> str:
    return str(section.get("class_path", "")).rpartition(".")[2]


def _within(value: Any, *keys: str) -> Mapping[str, Any]:
    """The mapping at a path of keys; empty if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class PushedModel:
    """The result of a push: the repository `OWNER/NAME`, its page, the commit, its files and their size.

    `left_out` are the entries of the directory that do not belong to the model and were not uploaded.
    """

    name: str
    url: str
    commit: str
    files: tuple[str, ...]
    num_bytes: int
    left_out: tuple[str, ...]


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

    Raises:
        InputError: If the model is incomplete, a file is a symbolic link, or the Hub refuses the upload.
    """
    folder = Path(folder).expanduser()
    paths, left_out = own_files(folder)
    token = token or get_token()
    if token is None:
        raise InputError(name, "the Hub needs a token", "set HF_TOKEN, or log in with: hf auth login")
    add_scores(folder)
    # huggingface_hub itself ignores an HF_ENDPOINT that is set after its import.
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    is_new = False
    try:
        page = api.create_repo(name, private=private, exist_ok=update)
        is_new = not update
        repository = page.repo_id
        if revision not in (None, "main"):
            api.create_branch(repository, branch=str(revision), exist_ok=True)
        contents: dict[str, Any] = {path: folder / path for path in paths}
        if is_own_card(folder / CARD_FILE):
            text = (folder / CARD_FILE).read_text(encoding="utf-8")
            # The commands load the repository in place of the folder.
            _, _, rest = text.partition("SentenceTransformer(")
            location = re.match(r"('[^'\n]*'|\"[^\"\n]*\")", rest)
            contents[CARD_FILE] = (text.replace(location[0], repr(repository)) if location else text).encode()
        operations: list[Any] = [CommitOperationAdd(path, content) for path, content in contents.items()]
        if update:
            existing = api.list_repo_files(repository, revision=revision)
            earlier = _pushed_files(api, repository, revision) if MANIFEST in existing else set()
            operations += [CommitOperationDelete(path) for path in existing if path in earlier.difference(paths)]
        commit = api.create_commit(repository, operations, commit_message=message, revision=revision)
    except Exception as error:
        explained = _explained(error, api.endpoint)
        if explained is None:
            raise
        what, fix = explained
        is_empty = "; the repository was created and is empty, so use --update next time" if is_new else ""
        raise InputError(name, what, fix + is_empty) from error
    num_bytes = sum((folder / path).stat().st_size for path in paths)
    return PushedModel(repository, str(page), commit.oid, tuple(paths), num_bytes, tuple(left_out))


def push_embedder(embedder: Embedder, name: str, **options: Any) -> PushedModel:
    """Upload a model from memory, with a card that describes only its use; `options` as in `push_to_hub`."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary, name.rpartition("/")[2])
        embedder.save_pretrained(folder)
        return push_to_hub(folder, name, **options)


def own_files(folder: Path) -> tuple[list[str], list[str]]:
    """The files to upload from a model directory, and its other entries; hidden ones are in neither.

    To upload are the files that the directory's manifest lists, which must be unchanged except for the card, and those
    that accompany a model. An `InputError` refuses a directory that this library did not write.
    """
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
    tops = {name.split("/")[0] for name in paths}
    others = [path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()]
    others = [path for path in others if path.as_posix() not in paths and not str(path).startswith(".")]
    shown = {path.as_posix() if path.parts[0] in tops else path.parts[0] for path in others if "/." not in str(path)}
    return paths, sorted(shown)


def _pushed_files(api: HfApi, repository: str, revision: str | None) -> set[str]:
    """The files that the manifest in a repository lists; none if it is not the manifest of a model."""
    with TemporaryDirectory() as temporary:
        manifest = Path(api.hf_hub_download(repository, MANIFEST, revision=revision, local_dir=temporary))
        with suppress(InputError):
            return set(own_hashes(manifest.parent))
    return set()


def _explained(error: BaseException, endpoint: str) -> tuple[str, str] | None:
    """The problem and the hint for an error of the Hub or of the connection to it; None for any other error."""
    if isinstance(error, HFValidationError):
        return "is not a repository name", "write OWNER/NAME with letters, digits, -, _ and ."
    if isinstance(error, OfflineModeIsEnabled):
        return "cannot be reached while HF_HUB_OFFLINE is set", "unset it"
    answers = {
        401: ("the Hub does not accept the token (401)", "log in with: hf auth login"),
        403: ("the token has no write access (403)", "use a token with write access to that owner"),
        404: ("does not exist, or the token has no access to it (404)", "check the name"),
        409: ("exists already", "name another, or commit to it with --update"),
    }
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        message = getattr(error, "server_message", None) or str(error)
        return answers.get(status, (f"the Hub answered {status}: {one_line(message, 160)}", "try again"))
    # Connection errors: huggingface_hub 1 raises httpx's, version 2 those of httpx2.
    if type(error).__module__.startswith("httpx") or isinstance(error, ConnectionError):
        return f"{endpoint} cannot be reached ({type(error).__name__})", "check the network and HF_ENDPOINT"
    if isinstance(error, ValueError) and "README.md" in str(error):
        return one_line(str(error), 200), "correct the card's header"
    return None if error.__cause__ is None else _explained(error.__cause__, endpoint)
