"""The report of a run: one HTML page with what was trained, its progress and its results."""

import os
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from embeddings.common.errors import program
from embeddings.common.text import shorten
from embeddings.figures.drawing import ENTROPY, draw_curves, draw_routing_curves, run_names, write_page
from embeddings.figures.run_facts import LOSS, Part, RunFacts, when

_FILES = {
    "metrics.csv": "all logged values, by step",
    "run.json": "command, commit, versions, hardware, how it ended",
    "config.yaml": f"all settings; run again with: {program()} fit --config",
}


def write_report(run: Path, output: Path) -> None:
    """Write a run's page: one self-contained HTML file without scripts or fonts, with embedded pictures.

    For a resumed run it also uses the folders of its earlier processes. Only `config.yaml` is required.
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
        health=health(facts),
        processes=_processes(facts),
        results=_results(facts),
        config=facts.config_text,
    )


def _trained(facts: RunFacts) -> dict[str, str]:
    record, versions = facts.record, facts.record.get("versions")
    return {
        "method": method(facts),
        "starts from": backbone(facts),
        "parameters": size(facts),
        "pooling": value_text(facts.setting("model.init_args.pooling")),
        "adapter": value_text(facts.setting("model.init_args.lora")),
        "loss": value_text(facts.setting("model.init_args.loss")),
        "optimiser": value_text(facts.setting("model.init_args.optimizer")),
        "schedule": value_text(facts.setting("model.init_args.schedule")),
        "queries a batch": batch(facts),
        "hard negatives": value_text(facts.setting("data.init_args.num_negatives")),
        "maximum steps": value_text(facts.setting("trainer.max_steps")),
        "maximum epochs": value_text(facts.setting("trainer.max_epochs")),
        "seed": value_text(facts.setting("seed_everything")),
        "precision": str(record.get("precision") or "not recorded"),
        "hardware": f"{record.get('world_size') or '?'} × {record.get('hardware') or 'unknown hardware'}",
        "started": moment(record.get("started")),
        "commit": str(record.get("commit") or "unknown: not run from a git checkout"),
        "command": str(record.get("command") or "not recorded"),
        "versions": value_text(versions) if isinstance(versions, Mapping) else "not recorded",
    }


def _sources(facts: RunFacts) -> list[list[str]]:
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
    if facts.curves[ENTROPY][0]:
        pictures.append(_picture(draw_routing_curves, facts.folder, "How evenly the experts were used."))
    return pictures, notes


def _picture(draw: Callable[[list[Path], Path], None], run: Path, caption: str) -> dict[str, str]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw([run], path)
        return {"data": b64encode(path.read_bytes()).decode(), "caption": caption}


def _scores(facts: RunFacts) -> list[list[str]]:
    rows = []
    for column, (first, last, highest) in facts.summaries.items():
        if not column.startswith("lr-"):
            rows.append(
                [column, digits(first[1]), digits(last[1]), f"{last[0]:,}", digits(highest[1]), f"{highest[0]:,}"]
            )
    return rows


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
    rows = []
    for arguments in (*facts.callbacks("ExportModel"), *facts.callbacks("ExportLanguageModel")):
        output = str(arguments.get("output"))
        # The folder in which the run was started, to which the path may be relative, is not recorded.
        missing = "not found" if Path(output).is_absolute() else "not found below the working folder"
        state = "found" if Path(output).is_dir() else missing
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
    num_bytes = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    return f"{digits(num_bytes / 1e6)} MB"


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
        return shorten(", ".join(f"{name} {text}" for name, text in texts if text), 300)
    if isinstance(value, list):
        return shorten(", ".join(map(value_text, value)), 300)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else shorten(str(value), 300)


def backbone(facts: RunFacts) -> str:
    initial = facts.setting("model.init_args.initial_model")
    return str(initial or facts.setting("model.init_args.backbone.name") or "an unnamed model")


def size(facts: RunFacts) -> str:
    counts = facts.record.get("parameters")
    numbers = counts.items() if isinstance(counts, Mapping) else ()
    return ", ".join(f"{number:,} {name}" for name, number in numbers if isinstance(number, int)) or "not recorded"


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


def opening(facts: RunFacts) -> str:
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
    return " ".join(text)


def ending(part: Part, last_step: int) -> str:
    how, step, why = (part.end.get(name) for name in ("how", "step", "why"))
    if how == "finished":
        return f"It ran to its end at step {step:,}." if isinstance(step, int) else "It ran to its end."
    reason = f": {shorten(str(why), 300)}" if why else ""
    if how == "interrupted":
        return f"It was interrupted at step {step}{reason}."
    if how == "failed":
        return f"It failed at step {step}{reason}."
    return f"Its end was not recorded: it was killed or is still running. The last known step is {last_step:,}."


def health(facts: RunFacts) -> list[str]:
    text = []
    for part in facts.parts:
        for error in part.numeric_errors:
            where = f" on rank {error['rank']}" if "rank" in error else ""
            reason = shorten(str(error.get("error", "unknown error")), 300)
            text.append(f"At step {error.get('step', '?')}{where}: {reason}")
    text += [f"{name}: {count(times, 'value')} NaN or infinite." for name, times in facts.not_finite.items()]
    if not text and facts.curves:
        text.append("No logged value is NaN or infinite, and no step was stopped by a numeric error.")
    return text


def duration(seconds: float) -> str:
    """Days, and hours:minutes:seconds."""
    return str(timedelta(seconds=round(seconds)))


def moment(text: Any) -> str:
    time = when(text)
    return "not recorded" if time is None else f"{time.day} {time:%B %Y, %H:%M} UTC"


def count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' if number != 1 else ''}"


def digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
