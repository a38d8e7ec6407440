"""A run's report: one HTML page on what was trained, how it went, and where its results are."""

import math
import os
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from embeddings.common.errors import program
from embeddings.common.text import shorten
from embeddings.figures.curves import ENTROPY, IDLE, WINDOW, draw_curves, draw_routing_curves
from embeddings.figures.drawing import run_names, write_page
from embeddings.figures.run_facts import LOSS, SCORE, THROUGHPUT, Part, RunFacts, Summary, when

METHODS = {
    "NVEmbedModule": "NV-Embed (Lee et al. 2024, arXiv:2405.17428)",
    "MGHCurriculumModule": "multi-granularity hard negatives with a curriculum (MGH, Negative Matters)",
    "MoEEmbedModule": "a sparse mixture of experts (Nomic Embed v2, Nussbaum and Duderstadt 2025, arXiv:2502.07972)",
    "CDEModule": "contextual document embeddings (CDE, Morris and Rush 2024, arXiv:2410.02525)",
    "MaskedLMModule": "masked language modelling, to adapt a backbone",
}
_SPEEDS = {
    "pairs_per_second": ("pairs a second, all processes", "{:,.1f}"),
    "tokens_per_second": ("tokens a second, all processes", "{:,.0f}"),
    "padding": ("share of the computed positions that is padding", "{:.1%}"),
    "waiting": ("share of the time between steps, in which data are awaited and callbacks work", "{:.1%}"),
    "tflops": ("arithmetic of the first process, 10¹² operations a second", "{:,.2f}"),
    "matmul_share": ("the same over what one large matrix product reaches", "{:.1%}"),
}
_FILES = {
    "metrics.csv": "all that was logged, step by step",
    "run.json": "command, commit, versions, hardware, end",
    "config.yaml": f"all settings, to run it again: {program()} fit --config",
}


def write_report(run: Path, output: Path) -> None:
    """Write a run's page: one self-contained HTML file without scripts or fonts, its pictures inside.

    It uses what the run's folder holds: `config.yaml`, `run.json`, `metrics.csv`, and what callbacks wrote there; of a
    resumed run also the folders of its earlier processes. Where one of the files but the first is missing, the page
    says less.
    """
    facts = RunFacts.read(run)
    (name,) = run_names([run])
    pictures, notes = _curves(facts)
    write_page(
        output,
        "report.html",
        name=name,
        where=str(run.absolute()),
        opening=opening(facts),
        trained=_trained(facts),
        sources=_sources(facts),
        curves=pictures,
        notes=notes,
        scores=_scores(facts),
        speeds=_speeds(facts),
        health=health(facts),
        processes=_processes(facts),
        results=_results(facts),
        pictures=_own_pictures(run),
        config=facts.config_text,
    )


def _trained(facts: RunFacts) -> dict[str, str]:
    record, versions = facts.record, facts.record.get("versions")
    return {
        "method": method(facts),
        "starts from": backbone(facts),
        "size": size(facts),
        "pooling": part_of_config(facts.setting("model.init_args.pooling")),
        "adapter": part_of_config(facts.setting("model.init_args.lora")),
        "loss": part_of_config(facts.setting("model.init_args.loss")),
        "optimiser": part_of_config(facts.setting("model.init_args.optimizer")),
        "schedule": part_of_config(facts.setting("model.init_args.schedule")),
        "queries a batch": batch(facts),
        "hard negatives": part_of_config(facts.setting("data.init_args.num_negatives")),
        "planned length": length(facts),
        "seed": part_of_config(facts.setting("seed_everything")),
        "precision": str(record.get("precision") or "not noted"),
        "hardware": hardware(facts),
        "started": moment(record.get("started")),
        "commit": str(record.get("commit") or "none: it ran outside a checkout"),
        "command": str(record.get("command") or "not noted"),
        "versions": part_of_config(versions) if isinstance(versions, Mapping) else "not noted",
    }


def _sources(facts: RunFacts) -> list[list[str]]:
    """The sources of the data, and how many records each has."""
    found, rows = facts.setting("data.init_args.sources"), facts.record.get("source_rows")
    counts = rows if isinstance(rows, Mapping) else {}
    cells = []
    for source in found if isinstance(found, list) else []:
        if isinstance(source, Mapping):
            number = counts.get(str(source.get("name")))
            shown = [part_of_config(source.get(key)) for key in ("name", "path", "weight", "instruction")]
            cells.append([shown[0], f"{number:,}" if isinstance(number, int) else "not noted", *shown[1:]])
    return cells


def _curves(facts: RunFacts) -> tuple[list[dict[str, str]], list[str]]:
    """Pictures of the curves, and sentences on those that cannot be drawn."""
    pictures, notes = [], []
    if not facts.curves:
        notes.append("Its folder holds no metrics.csv with values: neither loss nor scores are known here.")
    elif not facts.curves[LOSS][0]:
        notes.append("It logged no training loss, so no curves are drawn.")
    else:
        pictures.append(_picture(draw_curves, facts.folder, "Loss and validation score over the optimiser steps."))
    logged = [column for column in (ENTROPY, IDLE) if facts.curves[column][0]]
    if len(logged) == 2 and facts.not_finite.keys().isdisjoint(logged):
        pictures.append(_picture(draw_routing_curves, facts.folder, "How evenly the experts were used."))
    elif logged:
        why = f"{ENTROPY} or {IDLE} was not logged, or has a value that is not finite"
        notes.append(f"How evenly the experts were used is not drawn: {why}.")
    return pictures, notes


def _picture(draw: Callable[[list[Path], Path], None], run: Path, caption: str) -> dict[str, str]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw([run], path)
        return _image(path.read_bytes(), caption)


def _image(content: bytes, caption: str) -> dict[str, str]:
    return {"data": b64encode(content).decode(), "caption": caption}


def _own_pictures(run: Path) -> list[dict[str, str]]:
    """The first 20 pictures that somebody put into the folder; the curves are on the page already."""
    paths = [path for path in sorted(run.glob("*.png")) if path.name != "curves.png" and path.is_file()]
    found = [(path.name, path.read_bytes()) for path in paths[:20]]
    return [_image(content, name) for name, content in found if content.startswith(b"\x89PNG\r\n\x1a\n")]


def _scores(facts: RunFacts) -> list[list[str]]:
    """Loss and scores: first, last, best."""
    rows = []
    for column, summary in facts.summaries.items():
        if column == LOSS or not column.startswith(("train/", THROUGHPUT, "routing/", "lr-", "epoch")):
            best = [digits(summary.highest[1]), f"{summary.highest[0]:,}"] if column != LOSS else ["", ""]
            rows.append([column, digits(summary.first[1]), digits(summary.last[1]), f"{summary.last[0]:,}", *best])
    return rows


def _speeds(facts: RunFacts) -> list[list[str]]:
    found = [(meaning, style, facts.summaries.get(THROUGHPUT + name)) for name, (meaning, style) in _SPEEDS.items()]
    return [[m, style.format(s.median), style.format(s.last[1])] for m, style, s in found if s is not None]


def _processes(facts: RunFacts) -> list[list[str]]:
    if len(facts.parts) == 1 and facts.parts[0].resumed_from is None:
        return []
    rows = []
    for part in facts.parts:
        last = part.end.get("step")
        end = ending(part, last if isinstance(last, int) else 0) if part.end else "It left no note of its end."
        took = "not noted" if part.seconds is None else duration(part.seconds)
        started = moment(part.record.get("started"))
        rows.append([part.folder.absolute().name, started, took, str(part.resumed_from or "the beginning"), end])
    return rows


def _results(facts: RunFacts) -> list[list[str]]:
    """Checkpoints, model directories and the run's own files."""
    rows = []
    for arguments in (*facts.callbacks("ExportModel"), *facts.callbacks("ExportLanguageModel")):
        output = str(arguments.get("output"))
        state = "found" if Path(output).is_dir() else "not found"
        rows.append([output, f"model directory, {state} from where this page was made", ""])
    folders = {part.folder.absolute() for part in facts.parts}
    # A sweep's run writes its checkpoints beside the folders of its processes.
    places = [each.get("dirpath") for each in facts.callbacks("ModelCheckpoint")]
    folders |= {Path(str(place)).absolute() for place in places if place}
    for path in sorted({path for folder in folders for path in folder.rglob("*.ckpt")}):
        rows.append([os.path.relpath(path, facts.folder), "checkpoint", _size_on_disk(path)])
    own = [(facts.folder / name, meaning) for name, meaning in _FILES.items()]
    return rows + [[path.name, meaning, _size_on_disk(path)] for path, meaning in own if path.is_file()]


def _size_on_disk(path: Path) -> str:
    """The size of a file or of a folder's files; a running run may remove some of them meanwhile."""
    num_bytes = 0.0
    for file in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            num_bytes += file.stat().st_size if file.is_file() else 0
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def short_class(path: Any) -> str:
    return str(path).rpartition(".")[2]


def method(facts: RunFacts) -> str:
    """The method, or the name of a module that is not the library's."""
    path = facts.setting("model.class_path")
    name = short_class(path)
    return "a method that its config does not name" if path is None else METHODS.get(name, name)


def part_of_config(value: Any) -> str:
    """A class and its arguments, or a mapping or list of them, on one line; what is null is left out."""
    if value is None:
        return ""
    if isinstance(value, Mapping) and "class_path" in value:
        inner = part_of_config(value.get("init_args") or {})
        return short_class(value["class_path"]) + (f" ({inner})" if inner else "")
    if isinstance(value, Mapping):
        shown = ((name, part_of_config(each)) for name, each in value.items())
        return _cut(", ".join(f"{name} {each}" for name, each in shown if each))
    if isinstance(value, list):
        return _cut(", ".join(map(part_of_config, value)))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else _cut(str(value))


def backbone(facts: RunFacts) -> str:
    """What the training begins with: a model directory, or else the backbone."""
    initial = facts.setting("model.init_args.initial_model")
    return str(initial or facts.setting("model.init_args.backbone.name") or "a model that the config describes")


def size(facts: RunFacts) -> str:
    """How many parameters there are, and how many are trained."""
    counts = facts.record.get("parameters")
    if not isinstance(counts, Mapping) or not isinstance(counts.get("total"), int):
        return "not noted"
    total, trained, active = (counts.get(name) for name in ("total", "trained", "active"))
    words = [f"{total:,} parameters"]
    if isinstance(trained, int):
        words.append("all of them trained" if trained == total else f"{trained:,} of them trained")
    if isinstance(active, int) and active != total:
        words.append(f"{active:,} active for each token")
    return ", ".join(words)


def batch(facts: RunFacts) -> str:
    """How many queries an optimiser step sees, and how that comes about."""
    queries, ranks = facts.setting("data.init_args.batch_size"), facts.record.get("world_size", 1)
    several = facts.setting("trainer.accumulate_grad_batches") or 1
    if not all(isinstance(number, int) for number in (queries, ranks, several)):
        return "not noted"
    factors = [f"{queries:,}"]
    factors += [f"{ranks} processes"] * (ranks > 1) + [f"{several} batches a step"] * (several > 1)
    return " × ".join(factors) + (f" = {queries * ranks * several:,} an optimiser step" if len(factors) > 1 else "")


def length(facts: RunFacts) -> str:
    """How long the run was to be."""
    steps, epochs = facts.setting("trainer.max_steps"), facts.setting("trainer.max_epochs")
    words = []
    if isinstance(steps, int) and steps >= 0:
        words.append(count(steps, "optimiser step"))
    if isinstance(epochs, int) and epochs >= 0:
        words.append(count(epochs, "epoch"))
    return " or ".join(words) + (", whichever comes first" if len(words) > 1 else "") or "until it is stopped"


def hardware(facts: RunFacts) -> str:
    ranks, device = facts.record.get("world_size"), facts.record.get("hardware")
    processes = count(ranks, "process", "es") if isinstance(ranks, int) else "processes that it did not count"
    return f"{processes} on {device or 'hardware that it did not note'}{', each' * (ranks not in (1, None))}"


def opening(facts: RunFacts) -> str:
    """What the run was and what came of it, in a few sentences."""
    rows = facts.record.get("source_rows")
    sources = rows if isinstance(rows, Mapping) else {}
    records = sum(number for number in sources.values() if isinstance(number, int))
    data = f" on {records:,} records of {count(len(sources), 'source')}" if records else ""
    said = [f"This run trained {backbone(facts)} by {method(facts)}{data}.", ending(facts.parts[-1], facts.last_step)]
    seconds = [part.seconds for part in facts.parts]
    known = [each for each in seconds if each is not None]
    if len(known) == len(seconds):
        several = f", in {len(known)} processes one after another" if len(known) > 1 else ""
        said.append(f"It took {duration(sum(known))}{several}.")
    losses = [value for value in facts.curves[LOSS][1] if math.isfinite(value)]
    if losses:
        first, last = (sum(part) / len(part) for part in (losses[:WINDOW], losses[-WINDOW:]))
        means = count(min(WINDOW, len(losses)), "logged value")
        said.append(f"The training loss went from {digits(first)} to {digits(last)}, as means of {means}.")
    said.append(_of_scores(facts.summaries.get(SCORE)))
    return " ".join(said)


def ending(part: Part, last_step: int) -> str:
    """How a process ended."""
    how, step, why = (part.end.get(name) for name in ("how", "step", "why"))
    if how == "finished":
        return f"It ran to its end at step {step:,}." if isinstance(step, int) else "It ran to its end."
    reason = f": {_cut(str(why))}" if why else ""
    if how == "interrupted":
        return f"It was interrupted at step {step}{reason}."
    if how == "failed":
        return f"It failed at step {step}{reason}."
    return f"It left no note of its end: it was killed or is still running; step {last_step:,} is the last one known."


def health(facts: RunFacts) -> list[str]:
    """What went wrong with the numbers, or that nothing was seen."""
    said = []
    for part in facts.parts:
        for found in part.numeric_errors:
            where = f" on rank {found['rank']}" if "rank" in found else ""
            said.append(f"At step {found.get('step', '?')}{where}: {_cut(str(found.get('error', 'no reason given')))}")
    said += [f"{count(times, 'value')} of {name} NaN or infinite." for name, times in facts.not_finite.items()]
    if not said and facts.curves:
        said.append("No value that was logged is NaN or infinite, and no step was stopped for one.")
    return said


def duration(seconds: float) -> str:
    """A length of time, in its two largest units."""
    whole = round(seconds)
    units = [("d", whole // 86400), ("h", whole // 3600 % 24), ("min", whole // 60 % 60), ("s", whole % 60)]
    first = next((place for place, (_, number) in enumerate(units) if number), len(units) - 1)
    return " ".join(f"{number} {name}" for name, number in units[first : first + 2] if number) or "0 s"


def moment(text: Any) -> str:
    found = when(text)
    return "not noted" if found is None else f"{found.day} {found:%B %Y, %H:%M} UTC"


def count(number: int, name: str, plural: str = "s") -> str:
    return f"{number:,} {name}{plural if number != 1 else ''}"


def digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _of_scores(score: Summary | None) -> str:
    if score is None:
        return "It logged no score."
    name = "The validation nDCG@10"
    last_step, last = score.last
    best_step, best = score.highest
    if score.first == score.last:
        return f"{name} was {last:.3f} at step {last_step:,}, the one time it was taken."
    end = "its best" if best == last else f"after its best, {best:.3f} at step {best_step:,}"
    began = f"{score.first[1]:.3f} at step {score.first[0]:,}"
    return f"{name} went from {began} to {last:.3f} at step {last_step:,}, {end}."


def _cut(text: str) -> str:
    return shorten(text, 300)
