"""The report of a run: one HTML page with what was trained, its progress and its results."""

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

_SPEEDS = {
    "pairs_per_second": ("pairs per second, all processes", "{:,.1f}"),
    "tokens_per_second": ("tokens per second, all processes", "{:,.0f}"),
    "padding": ("share of the computed positions that are padding", "{:.1%}"),
    "waiting": ("share of time between steps (waiting for data, callbacks)", "{:.1%}"),
    "tflops": ("arithmetic of the first process, 10¹² operations per second", "{:,.2f}"),
}
_FILES = {
    "metrics.csv": "all logged values, by step",
    "run.json": "command, commit, versions, hardware, how it ended",
    "config.yaml": f"all settings; run again with: {program()} fit --config",
}


def write_report(run: Path, output: Path) -> None:
    """Write a run's page: one self-contained HTML file without scripts or fonts, with embedded pictures.

    It uses the files of the run's folder: `config.yaml`, `run.json`, `metrics.csv` and those of callbacks, and for a
    resumed run also the folders of its earlier processes. Only `config.yaml` is required.
    """
    facts = RunFacts.read(run)
    (name,) = run_names([run])
    curves, notes = _curves(facts)
    write_page(
        output,
        "report.html",
        name=name,
        where=str(run.absolute()),
        opening=opening(facts),
        trained=_trained(facts),
        sources=_sources(facts),
        curves=curves,
        notes=notes,
        scores=_scores(facts),
        speeds=_speeds(facts),
        health=health(facts),
        processes=_processes(facts),
        results=_results(facts),
        pictures=_folder_pictures(run),
        config=facts.config_text,
    )


def _trained(facts: RunFacts) -> dict[str, str]:
    record, versions = facts.record, facts.record.get("versions")
    return {
        "method": method(facts),
        "starts from": backbone(facts),
        "size": size(facts),
        "pooling": value_text(facts.setting("model.init_args.pooling")),
        "adapter": value_text(facts.setting("model.init_args.lora")),
        "loss": value_text(facts.setting("model.init_args.loss")),
        "optimiser": value_text(facts.setting("model.init_args.optimizer")),
        "schedule": value_text(facts.setting("model.init_args.schedule")),
        "queries a batch": batch(facts),
        "hard negatives": value_text(facts.setting("data.init_args.num_negatives")),
        "planned length": length(facts),
        "seed": value_text(facts.setting("seed_everything")),
        "precision": str(record.get("precision") or "not recorded"),
        "hardware": hardware(facts),
        "started": moment(record.get("started")),
        "commit": str(record.get("commit") or "unknown: not run from a git checkout"),
        "command": str(record.get("command") or "not recorded"),
        "versions": value_text(versions) if isinstance(versions, Mapping) else "not recorded",
    }


def _sources(facts: RunFacts) -> list[list[str]]:
    """The sources of the data, and the number of records of each."""
    sources, rows = facts.setting("data.init_args.sources"), facts.record.get("source_rows")
    counts = rows if isinstance(rows, Mapping) else {}
    cells = []
    for source in sources if isinstance(sources, list) else []:
        if isinstance(source, Mapping):
            number = counts.get(str(source.get("name")))
            shown = [value_text(source.get(key)) for key in ("name", "path", "weight", "instruction")]
            cells.append([shown[0], f"{number:,}" if isinstance(number, int) else "not recorded", *shown[1:]])
    return cells


def _curves(facts: RunFacts) -> tuple[list[dict[str, str]], list[str]]:
    """Pictures of the curves, and sentences about curves that cannot be drawn."""
    pictures, notes = [], []
    if not facts.curves:
        notes.append("Its folder has no metrics.csv with values, so loss and scores are unknown.")
    elif not facts.curves[LOSS][0]:
        notes.append("It logged no training loss, so no curves are drawn.")
    else:
        pictures.append(_picture(draw_curves, facts.folder, "Loss and validation score over the optimiser steps."))
    logged = [column for column in (ENTROPY, IDLE) if facts.curves[column][0]]
    if len(logged) == 2 and facts.not_finite.keys().isdisjoint(logged):
        pictures.append(_picture(draw_routing_curves, facts.folder, "How evenly the experts were used."))
    elif logged:
        reason = f"{ENTROPY} or {IDLE} was not logged, or has a value that is not finite"
        notes.append(f"The plot of how evenly the experts were used is missing: {reason}.")
    return pictures, notes


def _picture(draw: Callable[[list[Path], Path], None], run: Path, caption: str) -> dict[str, str]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw([run], path)
        return _image(path.read_bytes(), caption)


def _image(content: bytes, caption: str) -> dict[str, str]:
    return {"data": b64encode(content).decode(), "caption": caption}


def _folder_pictures(run: Path) -> list[dict[str, str]]:
    """The first 20 other pictures in the run's folder; `curves.png` is on the page already."""
    paths = [path for path in sorted(run.glob("*.png")) if path.name != "curves.png" and path.is_file()]
    contents = [(path.name, path.read_bytes()) for path in paths[:20]]
    return [_image(content, name) for name, content in contents if content.startswith(b"\x89PNG\r\n\x1a\n")]


def _scores(facts: RunFacts) -> list[list[str]]:
    """Loss and scores: first, last, best."""
    rows = []
    for column, summary in facts.summaries.items():
        if column == LOSS or not column.startswith(("train/", THROUGHPUT, "routing/", "lr-", "epoch")):
            best = [digits(summary.highest[1]), f"{summary.highest[0]:,}"] if column != LOSS else ["", ""]
            rows.append([column, digits(summary.first[1]), digits(summary.last[1]), f"{summary.last[0]:,}", *best])
    return rows


def _speeds(facts: RunFacts) -> list[list[str]]:
    speeds = [(meaning, style, facts.summaries.get(THROUGHPUT + name)) for name, (meaning, style) in _SPEEDS.items()]
    return [[m, style.format(s.median), style.format(s.last[1])] for m, style, s in speeds if s is not None]


def _processes(facts: RunFacts) -> list[list[str]]:
    if len(facts.parts) == 1 and facts.parts[0].resumed_from is None:
        return []
    rows = []
    for part in facts.parts:
        last = part.end.get("step")
        end = ending(part, last if isinstance(last, int) else 0) if part.end else "Its end was not recorded."
        took = "not recorded" if part.seconds is None else duration(part.seconds)
        started = moment(part.record.get("started"))
        rows.append([part.folder.absolute().name, started, took, str(part.resumed_from or "the beginning"), end])
    return rows


def _results(facts: RunFacts) -> list[list[str]]:
    """Checkpoints, model directories and the files in the run's folder."""
    rows = []
    for arguments in (*facts.callbacks("ExportModel"), *facts.callbacks("ExportLanguageModel")):
        output = str(arguments.get("output"))
        state = "found" if Path(output).is_dir() else "not found"
        rows.append([output, f"model directory, {state} when this page was written", ""])
    folders = {part.folder.absolute() for part in facts.parts}
    # A sweep's run writes its checkpoints beside the folders of its processes.
    paths = [arguments.get("dirpath") for arguments in facts.callbacks("ModelCheckpoint")]
    folders |= {Path(str(path)).absolute() for path in paths if path}
    for path in sorted({path for folder in folders for path in folder.rglob("*.ckpt")}):
        rows.append([os.path.relpath(path, facts.folder), "checkpoint", _size_on_disk(path)])
    files = [(facts.folder / name, meaning) for name, meaning in _FILES.items()]
    return rows + [[path.name, meaning, _size_on_disk(path)] for path, meaning in files if path.is_file()]


def _size_on_disk(path: Path) -> str:
    """The size of a file or folder; a run that is still running may remove files meanwhile."""
    num_bytes = 0.0
    for file in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            num_bytes += file.stat().st_size if file.is_file() else 0
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def method(facts: RunFacts) -> str:
    return str(facts.record.get("method") or facts.setting("model.class_path") or "an unknown method")


def value_text(value: Any) -> str:
    """A value of a config on one line: a class as name and arguments, without null values."""
    if value is None:
        return ""
    if isinstance(value, Mapping) and "class_path" in value:
        inner = value_text(value.get("init_args") or {})
        return str(value["class_path"]).rpartition(".")[2] + (f" ({inner})" if inner else "")
    if isinstance(value, Mapping):
        texts = ((name, value_text(item)) for name, item in value.items())
        return _shortened(", ".join(f"{name} {text}" for name, text in texts if text))
    if isinstance(value, list):
        return _shortened(", ".join(map(value_text, value)))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else _shortened(str(value))


def backbone(facts: RunFacts) -> str:
    """The initial model of the training: a model directory or a backbone."""
    initial = facts.setting("model.init_args.initial_model")
    return str(initial or facts.setting("model.init_args.backbone.name") or "an unnamed model")


def size(facts: RunFacts) -> str:
    """The numbers of parameters: all, trained, and active per token."""
    counts = facts.record.get("parameters")
    if not isinstance(counts, Mapping) or not isinstance(counts.get("total"), int):
        return "not recorded"
    total, trained, active = (counts.get(name) for name in ("total", "trained", "active"))
    parts = [f"{total:,} parameters"]
    if isinstance(trained, int):
        parts.append("all of them trained" if trained == total else f"{trained:,} of them trained")
    if isinstance(active, int) and active != total:
        parts.append(f"{active:,} active per token")
    return ", ".join(parts)


def batch(facts: RunFacts) -> str:
    """The number of queries per optimiser step, as a product."""
    queries, ranks = facts.setting("data.init_args.batch_size"), facts.record.get("world_size", 1)
    accumulated = facts.setting("trainer.accumulate_grad_batches") or 1
    if not all(isinstance(number, int) for number in (queries, ranks, accumulated)):
        return "not recorded"
    factors = [f"{queries:,}"]
    factors += [f"{ranks} processes"] * (ranks > 1) + [f"{accumulated} batches per step"] * (accumulated > 1)
    total = f" = {queries * ranks * accumulated:,} per optimiser step"
    return " × ".join(factors) + total * (len(factors) > 1)


def length(facts: RunFacts) -> str:
    """The planned length of the run."""
    steps, epochs = facts.setting("trainer.max_steps"), facts.setting("trainer.max_epochs")
    limits = []
    if isinstance(steps, int) and steps >= 0:
        limits.append(count(steps, "optimiser step"))
    if isinstance(epochs, int) and epochs >= 0:
        limits.append(count(epochs, "epoch"))
    return " or ".join(limits) + (", whichever comes first" if len(limits) > 1 else "") or "unlimited"


def hardware(facts: RunFacts) -> str:
    ranks, device = facts.record.get("world_size"), facts.record.get("hardware")
    processes = count(ranks, "process", "es") if isinstance(ranks, int) else "an unknown number of processes"
    return f"{processes} on {device or 'unknown hardware'}{', each' * (ranks not in (1, None))}"


def opening(facts: RunFacts) -> str:
    """A summary of the run and its results in a few sentences."""
    rows = facts.record.get("source_rows")
    sources = rows if isinstance(rows, Mapping) else {}
    records = sum(number for number in sources.values() if isinstance(number, int))
    data = f" on {records:,} records of {count(len(sources), 'source')}" if records else ""
    text = [f"This run trained {backbone(facts)} by {method(facts)}{data}.", ending(facts.parts[-1], facts.last_step)]
    seconds = [part.seconds for part in facts.parts]
    known = [value for value in seconds if value is not None]
    if len(known) == len(seconds):
        processes = f", in {len(known)} successive processes" if len(known) > 1 else ""
        text.append(f"It took {duration(sum(known))}{processes}.")
    losses = [value for value in facts.curves[LOSS][1] if math.isfinite(value)]
    if losses:
        first, last = (sum(values) / len(values) for values in (losses[:WINDOW], losses[-WINDOW:]))
        means = count(min(WINDOW, len(losses)), "logged value")
        text.append(f"The training loss went from {digits(first)} to {digits(last)}, as means of {means}.")
    text.append(_score_sentence(facts.summaries.get(SCORE)))
    return " ".join(text)


def ending(part: Part, last_step: int) -> str:
    """How a process ended."""
    how, step, why = (part.end.get(name) for name in ("how", "step", "why"))
    if how == "finished":
        return f"It ran to its end at step {step:,}." if isinstance(step, int) else "It ran to its end."
    reason = f": {_shortened(str(why))}" if why else ""
    if how == "interrupted":
        return f"It was interrupted at step {step}{reason}."
    if how == "failed":
        return f"It failed at step {step}{reason}."
    return f"Its end was not recorded: it was killed or is still running. The last known step is {last_step:,}."


def health(facts: RunFacts) -> list[str]:
    """Numeric errors and non-finite values, or a sentence that there were none."""
    text = []
    for part in facts.parts:
        for error in part.numeric_errors:
            where = f" on rank {error['rank']}" if "rank" in error else ""
            reason = _shortened(str(error.get("error", "unknown error")))
            text.append(f"At step {error.get('step', '?')}{where}: {reason}")
    text += [f"{name}: {count(times, 'value')} NaN or infinite." for name, times in facts.not_finite.items()]
    if not text and facts.curves:
        text.append("No logged value is NaN or infinite, and no step was stopped by a numeric error.")
    return text


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    total = round(seconds)
    units = [("d", total // 86400), ("h", total // 3600 % 24), ("min", total // 60 % 60), ("s", total % 60)]
    first = next((index for index, (_, number) in enumerate(units) if number), len(units) - 1)
    return " ".join(f"{number} {name}" for name, number in units[first : first + 2] if number) or "0 s"


def moment(text: Any) -> str:
    time = when(text)
    return "not recorded" if time is None else f"{time.day} {time:%B %Y, %H:%M} UTC"


def count(number: int, name: str, plural: str = "s") -> str:
    return f"{number:,} {name}{plural if number != 1 else ''}"


def digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _score_sentence(score: Summary | None) -> str:
    if score is None:
        return "It logged no score."
    name = "The validation nDCG@10"
    last_step, last = score.last
    best_step, best = score.highest
    if score.first == score.last:
        return f"{name} was {last:.3f} at step {last_step:,}, its only measurement."
    end = "its best" if best == last else f"after its best, {best:.3f} at step {best_step:,}"
    began = f"{score.first[1]:.3f} at step {score.first[0]:,}"
    return f"{name} went from {began} to {last:.3f} at step {last_step:,}, {end}."


def _shortened(text: str) -> str:
    return shorten(text, 300)
