"""A model directory's card: how to use the model, and what is known of its training or origin, as a `README.md`."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData, try_to_load_from_cache

from embeddings.common import InputError, OptionError
from embeddings.common.io import write_text
from embeddings.common.process import logger
from embeddings.models.embedder import Embedder
from embeddings.models.model_files import (
    CARD_FILE,
    CARD_MARK,
    CURVES_FILE,
    IMPORT_FILE,
    PACKAGED_NAME,
    SCORES_FILE,
    is_own_card,
    read_json,
    resolve_model,
)
from embeddings.models.poolings import pooling_name

_MAX_CHARACTERS = 200
_MAX_SETTINGS = 20_000
_TRAINER_KEYS = (
    *("precision", "strategy", "num_nodes", "devices", "max_epochs", "max_steps"),
    *("accumulate_grad_batches", "gradient_clip_val"),
)
_METHOD_PARTS = ("pooling", "loss", "optimizer")
# No metric is larger, and a card can show it.
_MOST = 1e9
# How the last of a card's limits begins.
_UNMEASURED = "Nothing was measured"
_VALIDATED = "Measured is the validation score of the training, by which it may have chosen the weights"
_MEASURED = "Measured is what stands under Scores"
_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", re.DOTALL)
_LICENCE = re.compile(r"""^license:[ \t]*["']?([A-Za-z0-9][A-Za-z0-9.+-]*)["']?[ \t]*$""", re.MULTILINE)
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
# Where this library's own outputs lie: such a name looks like a Hub id, and may be gone when the card is written.
_OUR_FOLDERS = ("checkpoints", "data")


@dataclass(frozen=True)
class TrainingFacts:
    """What is known of the run that a model comes from.

    Args:
        config: The run's merged config.
        num_steps: Optimiser steps that the weights have taken.
        record: What the run wrote of itself (`run.json`): commit, versions, world size, rows of each source.
        validation: Optimiser steps and validation nDCG@10 at them.
    """

    config: Mapping[str, Any]
    num_steps: int
    record: Mapping[str, Any] = field(default_factory=dict)
    validation: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class ImportFacts:
    """Which published model a directory was made of.

    Args:
        source: A directory or Hub id.
        revision: Commit, tag or branch of a Hub id.
        base: The base that an adapter was merged into, where the user named it.
        family: What kind of checkpoint it was.
        used_as: The published model whose card decides more than the files do.
        num_used: Tensors that were read.
        num_left: Tensors that the model has no use for.
    """

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
    name: str | None = None,
) -> None:
    """Write the card of a model directory; a card that somebody wrote by hand stays.

    Args:
        folder: The directory, with the model in it, and `curves.png` where the card is to show it.
        embedder: The model.
        facts: What is known of its training, or of what it was imported from.
        scores: What `evaluate --output` wrote; without any, the directory's `scores.json` where it has one.
        licence: The model's licence, as the Hub names it.
        name: What the directory is going to be called, where it has not its name yet.
    """
    if not scores and (folder / SCORES_FILE).is_file():
        scores = read_scores(folder / SCORES_FILE)
    if not keeps_card(folder):
        write_text(folder / CARD_FILE, model_card(folder, embedder, facts, scores, licence, name or folder.name))


def keeps_card(folder: Path) -> bool:
    """Whether a directory has a card that somebody wrote by hand; says then that it stays."""
    path = folder / CARD_FILE
    if not path.exists() or is_own_card(path):
        return False
    logger.warning("%s was written by hand and stays; remove it for a card of this model", path)
    return True


def model_card(
    folder: Path,
    embedder: Embedder,
    facts: TrainingFacts | ImportFacts | None,
    scores: Sequence[Mapping[str, Any]],
    licence: str | None,
    name: str,
) -> str:
    """The card's text."""
    needs_code = any(folder.glob("*.py"))
    training = facts if isinstance(facts, TrainingFacts) else None
    origin = facts if isinstance(facts, ImportFacts) else None
    parts = [_front_matter(facts, licence, needs_code, scores, name), f"# {plain(name)}", _summary(embedder)]
    parts += ["## Use", _usage(name, embedder, needs_code)]
    if embedder.text.prompts:
        rows = [(code(name), code(prompt)) for name, prompt in embedder.text.prompts.items()]
        parts += ["## Prompts", "Each is put before a text of its kind.", table(("name", "prompt"), rows)]
    if origin is not None:
        parts += ["## Origin", _origin(origin)]
    if training is not None:
        settings = _settings(training.config)
        parts += ["## Training", _training(training), "## Data", _data(training), "### Settings", settings]
    if scores or (training and training.validation) or (folder / CURVES_FILE).is_file():
        parts += ["## Scores", *_scores(scores, training, folder)]
    parts += ["## Limits", _limits(embedder, training, scores)]
    stated = "Not stated." if licence is None else f"{plain(licence)}."
    if origin is not None:
        stated = "The source states none." if licence is None else f"{plain(licence)}, as the source states."
    stated += "" if training is None else _base_licences(training)
    return "\n\n".join([*parts, "## Licence", stated]) + "\n"


def plain(value: object, limit: int = _MAX_CHARACTERS) -> str:
    """A value as one printable line of Markdown that means nothing but itself."""
    text = " ".join(str(value).split())
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return re.sub(r"([\\`*_{}\[\]<>|#!~&$])", r"\\\1", text)


def code(value: str) -> str:
    """A text as a literal of Markdown, for the cell of a table."""
    text = repr(value if len(value) <= _MAX_CHARACTERS else f"{value[: _MAX_CHARACTERS - 3]}...")
    return f"`{text.replace('`', chr(0x2019)).replace('|', chr(0x2223))}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def add_scores(folder: Path) -> bool:
    """Have the card of a directory show the scores of its `scores.json`; returns whether it does now.

    A card that somebody wrote by hand stays as it is.

    Raises:
        InputError: If the scores are damaged.
    """
    path = folder / CARD_FILE
    if not (folder / SCORES_FILE).is_file() or not is_own_card(path):
        return False
    scores, text = read_scores(folder / SCORES_FILE), path.read_text(encoding="utf-8")
    front = _FRONT_MATTER.match(text)
    if front is None:
        return False
    fields = yaml.safe_load(front[1])
    title, *sections = re.split(r"^(?=## )", text[front.end() :], flags=re.MULTILINE)
    old = next((section for section in sections if section.startswith("## Scores\n")), "")
    # What training wrote stays: its validation score and the curves.
    kept = [line for line in old.splitlines()[1:] if line and not line.startswith("|")]
    new = "\n\n".join(["## Scores", *_scores(scores, None, folder, has_curves=False), *kept]) + "\n\n"
    sections = [section for section in sections if section != old]
    place = next((i for i, section in enumerate(sections) if section.startswith(("## Limits", "## Licence"))), None)
    sections.insert(len(sections) if place is None else place, new)
    header = _header(ModelCardData(ignore_metadata_errors=True, **fields), scores, folder.resolve().name)
    body = f"{title}{''.join(sections)}"
    for told in (_UNMEASURED, _VALIDATED):
        body = body.replace(f"- {told}:", f"- {_MEASURED}:")
    write_text(path, f"{header}\n{body}")
    return True


def read_scores(path: Path) -> list[dict[str, Any]]:
    """The results that `evaluate --output` wrote.

    Raises:
        InputError: If the file is missing or damaged, or holds something else, NaN among it.
    """
    fix = "give the file that evaluate --output wrote"
    results: list[dict[str, Any]] = read_json(path, list, fix)
    if not results or not all(map(_is_result, results)):
        raise InputError(str(path), "holds no scores", fix)
    return results


def _is_result(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    metrics = value.get("metrics")
    if not isinstance(metrics, dict) or not metrics:
        return False
    # NaN and infinite numbers compare as false, and an integer of any length compares.
    return all(type(number) in (int, float) and abs(number) < _MOST for number in metrics.values())


def check_licence(option: str, licence: str | None) -> None:
    """Check that a licence is a name as the Hub has them.

    Raises:
        OptionError: If it is none; `option` names the setting.
    """
    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence):
        raise OptionError(option, licence, "must be a name of the Hub's", "write it as apache-2.0 or other")


def stated_licence(folder: Path) -> str | None:
    """The `license` in the header of a folder's `README.md`, as the Hub names it; None for none or several."""
    found = _LICENCE.findall(_stated(folder))
    return str(found[0]).lower() if len(found) == 1 else None


def stated_languages(folder: Path) -> list[str]:
    """The languages in the header of a folder's `README.md`, as codes; empty where it names none."""
    fields: Any = None
    with suppress(yaml.YAMLError, ValueError, RecursionError):
        fields = yaml.safe_load(_stated(folder))
    named = fields.get("language") if isinstance(fields, dict) else None
    codes = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return [code for code in codes if isinstance(code, str) and re.fullmatch(r"[A-Za-z]{2,3}([-_]\w{2,8})?", code)]


def _stated(folder: Path) -> str:
    """The header of a folder's card; empty for none."""
    try:
        text = (folder / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    front = _FRONT_MATTER.match(text.removeprefix("\ufeff"))
    return front[1] if front else ""


def _base_folder(name: str) -> Path | None:
    """The local folder of a base, nothing being downloaded; None where the machine has none."""
    if name == PACKAGED_NAME or Path(name).expanduser().is_dir():
        with suppress(InputError):
            return resolve_model(name)
    hub = _hub_name(name)
    cached = None if hub is None else try_to_load_from_cache(hub, CARD_FILE)
    return Path(cached).parent if isinstance(cached, str) else None


def _base_licences(facts: TrainingFacts) -> str:
    """A sentence on the licence of each base that states one."""
    found = [(name, _base_folder(name)) for name in _backbones(facts.config)]
    stated = [(name, stated_licence(folder)) for name, folder in found if folder is not None]
    return "".join(f" The base {plain(_shown_name(name))} states {plain(text)}." for name, text in stated if text)


def _limits(embedder: Embedder, facts: TrainingFacts | None, scores: Sequence[Mapping[str, Any]]) -> str:
    """What the model was not made or measured for, as a list."""
    text, positions = embedder.text, embedder.longest_text
    lengths = f"Longer texts are cut: queries at {text.query_max_length} tokens, documents at "
    lengths += f"{text.document_max_length}, prompt and special tokens included."
    lengths += "" if positions is None else f" The backbone has positions for {positions}."
    bases = [] if facts is None else [(name, _base_folder(name)) for name in _backbones(facts.config)]
    codes = [code for _, folder in bases if folder is not None for code in stated_languages(folder)]
    languages = "Languages were neither declared nor checked."
    if codes:
        named = ", ".join(dict.fromkeys(codes))
        languages = f"The base names as languages: {named}. Those of the training texts were not checked."
    told = _MEASURED if scores else _VALIDATED if facts is not None and facts.validation else _UNMEASURED
    rest = f"{told}: no other domain or language, and neither bias nor safety."
    return "\n".join(f"- {line}" for line in (lengths, languages, rest))


def _front_matter(
    facts: TrainingFacts | ImportFacts | None,
    licence: str | None,
    needs_code: bool,
    scores: Sequence[Mapping[str, Any]],
    name: str,
) -> str:
    """The card's header as the Hub reads it; scores become its `model-index`."""
    named = [facts.source, *facts.base] if isinstance(facts, ImportFacts) else []
    named = _backbones(facts.config) if isinstance(facts, TrainingFacts) else named
    bases = [base for base in map(_hub_name, named) if base is not None]
    sources = _sources(facts.config) if isinstance(facts, TrainingFacts) else []
    datasets = [dataset for dataset in map(_hub_dataset, sources) if dataset is not None]
    data = ModelCardData(
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=datasets or None,
        library_name="sentence-transformers",
        license=licence,
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "sentence-similarity", "feature-extraction", *["custom_code"] * needs_code],
    )
    return _header(data, scores, name)


def _header(data: ModelCardData, scores: Sequence[Mapping[str, Any]], name: str) -> str:
    """The front matter with scores as its `model-index`."""
    if scores:
        data.model_name = name
        data.eval_results = [
            EvalResult(str(score.get("kind", "retrieval")), str(score["name"]), str(score["name"]), metric, value)
            for score in scores
            for metric, value in score["metrics"].items()
        ]
    return f"---\n{CARD_MARK}\n{data.to_yaml()}\n---"


def _summary(embedder: Embedder) -> str:
    widths = f", trained to be cut to {', '.join(map(str, embedder.trained_widths))}" if embedder.trained_widths else ""
    norm = "of unit length, compared by cosine" if embedder.normalize else "of any length, compared by cosine"
    pooling = f"{pooling_name(embedder.pooling).replace('_', ' ')} pooling"
    pooling += "" if embedder.norm is None else " and a layer norm"
    text = embedder.text
    return (
        f"A text-embedding model: vectors of {embedder.embedding_dim} dimensions{widths}, {norm}; {pooling}; "
        f"queries are read to {text.query_max_length} tokens, documents to {text.document_max_length}."
    )


def _usage(name: str, embedder: Embedder, needs_code: bool) -> str:
    flag = ", trust_remote_code=True" if needs_code else ""
    context = hasattr(embedder, "embed_context")
    lines = ["from sentence_transformers import SentenceTransformer", ""]
    lines += [f"model = SentenceTransformer({name!r}{flag})"]
    lines += ["model[0].set_context(documents_of_your_corpus)"] if context else []
    lines += ['similarity = model.similarity(model.encode_query(["a query"]), model.encode_document(["a document"]))']
    note = "The code that this needs lies in the directory.\n\n" if needs_code else ""
    ours = ["from embeddings.inference import Encoder", "", f"encoder = Encoder.from_pretrained({name!r})"]
    given = ", context=documents_of_your_corpus" if context else ""
    ours += [f'vectors = encoder.encode(["a query"], role="query"{given})']
    return f"{_block('python', lines)}\n\n{note}With the library that wrote this directory:\n\n{_block('python', ours)}"


def _origin(facts: ImportFacts) -> str:
    rows: dict[str, Any] = {"imported from": _shown_name(facts.source), "revision": facts.revision}
    rows |= {"merged into": ", ".join(map(_shown_name, facts.base)), "kind of checkpoint": facts.family}
    rows |= {"vectors as the card has them of": facts.used_as}
    rows |= {"tensors read": f"{facts.num_used:,}", "tensors left out": f"{facts.num_left:,}"}
    facts_table = table(("", ""), [(name, plain(value)) for name, value in rows.items() if value not in (None, "")])
    return f"{facts_table}\n\nWhich tensor each came from is in `{IMPORT_FILE}`."


def _training(facts: TrainingFacts) -> str:
    model = _mapping(facts.config.get("model"))
    versions = _mapping(facts.record.get("versions"))
    rows: dict[str, Any] = {"method": _class_name(model)}
    rows["backbone"] = ", ".join(map(_shown_name, _backbones(facts.config)))
    rows |= {name: _class_name(_arguments(model).get(name)) for name in _METHOD_PARTS}
    rows |= {"optimiser steps": facts.num_steps, "seed": facts.config.get("seed_everything")}
    rows |= {"processes": facts.record.get("world_size"), "commit": facts.record.get("commit")}
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return table(("", ""), [(name, plain(value)) for name, value in rows.items() if value not in (None, "")])


def _data(facts: TrainingFacts) -> str:
    sources = _sources(facts.config)
    if not sources:
        return "Not known."
    rows, known = [], _mapping(facts.record.get("source_rows"))
    for source in sources:
        name, count = source.get("name"), known.get(str(source.get("name")))
        shown_count = f"{count:,}" if isinstance(count, int) else "unknown"
        cells = (name, _hub_dataset(source) or "files", shown_count, source.get("licence") or "unknown")
        rows.append([plain(cell) for cell in cells])
    return table(("source", "from", "rows", "licence"), rows)


def _settings(config: Mapping[str, Any]) -> str:
    """The settings that decide the training, without paths of the machine it ran on."""
    trainer, data = _mapping(config.get("trainer")), _mapping(config.get("data"))
    told = {name: trainer[name] for name in _TRAINER_KEYS if trainer.get(name) is not None}
    plan = {key: value for key, value in _arguments(data).items() if key not in ("sources", "cache_dir")}
    kept = {"trainer": told, "model": config.get("model"), "data": {**data, "init_args": plan}}
    text = yaml.safe_dump(_portable(kept), sort_keys=False, allow_unicode=True)
    return _block("yaml", text[:_MAX_SETTINGS].splitlines())


def _scores(
    scores: Sequence[Mapping[str, Any]], facts: TrainingFacts | None, folder: Path, *, has_curves: bool = True
) -> list[str]:
    parts = []
    if scores:
        rows = []
        for result in scores:
            metric, value = next(iter(result["metrics"].items()))
            width = result.get("dimensions") or "all"
            counts = ", ".join(f"{count} {name}" for name, count in _mapping(result.get("counts")).items())
            cells = (result["name"], result.get("kind", ""), metric, f"{value:.3f}", width, counts.replace("num_", ""))
            rows.append([plain(cell) for cell in cells])
        parts.append(table(("folder", "kind", "metric", "value", "dimensions", "counted"), rows))
    if facts is not None and facts.validation:
        step, value = facts.validation[-1]
        parts.append(f"Validation nDCG@10 during training: {value:.3f} after {step} steps.")
    if has_curves and (folder / CURVES_FILE).is_file():
        parts.append(f"![loss and validation score over optimiser steps]({CURVES_FILE})")
    return parts


def _portable(value: Any) -> Any:
    """Plain types without empty fields; of a path on the machine only the last part."""
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, str):
        return _shown_name(value) if value.startswith(("/", "~", ".", "$")) else value
    return value


def _block(language: str, lines: Sequence[str]) -> str:
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])


def _backbones(config: Mapping[str, Any]) -> list[str]:
    parts = _arguments(_mapping(config.get("model")))
    names = [_mapping(part).get("name") for key, part in parts.items() if key.endswith("backbone")]
    names.append(parts.get("initial_model"))
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and name))


def _hub_name(name: str) -> str | None:
    """The Hub id that a backbone has, None where it is a directory."""
    if name == PACKAGED_NAME:
        return f"sentence-transformers/{name}"
    is_local = name.split("/")[0] in _OUR_FOLDERS or Path(name).exists()
    return name if _HUB_ID.fullmatch(name) and not is_local else None


def _hub_dataset(source: Mapping[str, Any]) -> str | None:
    """The Hub data set that a source is, None where it is files."""
    path = source.get("path")
    return path.removeprefix("hub:") if isinstance(path, str) and path.startswith("hub:") else None


def _shown_name(name: str) -> str:
    return _hub_name(name) or f".../{Path(name).name}"


def _sources(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sources = _arguments(_mapping(config.get("data"))).get("sources")
    return [source for source in sources if isinstance(source, Mapping)] if isinstance(sources, list) else []


def _arguments(section: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(section.get("init_args"))


def _class_name(section: Any) -> str:
    return str(_mapping(section).get("class_path", "")).rpartition(".")[2]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
