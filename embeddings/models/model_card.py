"""A model directory's card: how to use the model, and what is known of its training or origin, as a `README.md`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from embeddings.common.io import write_text
from embeddings.common.process import logger
from embeddings.models.embedder import Embedder
from embeddings.models.model_files import CARD_FILE, CARD_MARK, CURVES_FILE, IMPORT_FILE, PACKAGED_NAME, is_own_card
from embeddings.models.poolings import pooling_name

_MAX_CHARACTERS = 200
_MAX_SETTINGS = 20_000
_TRAINER_KEYS = (
    *("precision", "strategy", "num_nodes", "devices", "max_epochs", "max_steps"),
    *("accumulate_grad_batches", "gradient_clip_val"),
)
_METHOD_PARTS = ("pooling", "loss", "optimizer")
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
        scores: What `evaluate --output` wrote.
        licence: The model's licence, as the Hub names it.
        name: What the directory is going to be called, where it has not its name yet.
    """
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
    stated = "Not stated." if licence is None else f"{plain(licence)}."
    if origin is not None:
        stated = "The source states none." if licence is None else f"{plain(licence)}, as the source states."
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
    results = [
        EvalResult(str(score.get("kind", "retrieval")), str(score["name"]), str(score["name"]), metric, value)
        for score in scores
        for metric, value in score["metrics"].items()
    ]
    data = ModelCardData(
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=datasets or None,
        library_name="sentence-transformers",
        license=licence,
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "sentence-similarity", "feature-extraction", *["custom_code"] * needs_code],
        eval_results=results or None,
        model_name=name if results else None,
    )
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


def _scores(scores: Sequence[Mapping[str, Any]], facts: TrainingFacts | None, folder: Path) -> list[str]:
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
    if (folder / CURVES_FILE).is_file():
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
