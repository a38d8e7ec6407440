"""One page about a run that needs nothing but itself: what was trained, how it went, and where its results lie."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from embeddings.common.io import write_text
from embeddings.figures import run_words as words
from embeddings.figures.curves import draw_curves
from embeddings.figures.html import Html, definitions, element, joined, png_image, table
from embeddings.figures.routing_curves import ENTROPY, IDLE, draw_routing_curves
from embeddings.figures.run_facts import THROUGHPUT, RunFacts
from embeddings.figures.run_lines import run_names
from embeddings.figures.run_metrics import LOSS

# Of the run's own pictures; a folder may hold any number.
MOST_PICTURES = 20
_PNG = b"\x89PNG\r\n\x1a\n"
_SPEEDS = {
    "pairs_per_second": ("pairs a second, all processes", "{:,.1f}"),
    "tokens_per_second": ("tokens a second, all processes", "{:,.0f}"),
    "padding": ("share of the computed positions that is padding", "{:.1%}"),
    "waiting": ("share of the time between steps, in which data are awaited and callbacks work", "{:.1%}"),
    "tflops": ("arithmetic of the first process, 10¹² operations a second", "{:,.2f}"),
    "matmul_share": ("the same over what one large matrix product reaches", "{:.1%}"),
}
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 54rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.where { color: #666; margin-top: 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: 10rem 1fr; gap: .3rem 1rem; margin: 0; }
dt { color: #666; } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .8rem 0; width: 100%; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top;
  overflow-wrap: anywhere; }
th { font-weight: 600; } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
img { max-width: 100%; height: auto; } figure { margin: 1rem 0; } figcaption { color: #666; }
pre { background: #f6f6f4; padding: 1rem; font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .6rem; }
  table { display: block; overflow-x: auto; } th, td { overflow-wrap: normal; } }
@media print { body { margin: 0; max-width: none; font-size: 11pt; } h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; } }
"""


def write_report(run: Path, output: Path) -> None:
    """Write a run's page: one HTML file without a script, a font or any other file, its pictures inside.

    It is made from what the run's folder holds: `config.yaml`, `run.json`, `metrics.csv`, and what callbacks wrote
    there; of a run that went on from another one's checkpoint, also from that one's. Where one of the files but the
    first is missing, the page says less.

    Args:
        run: The run's folder.
        output: The HTML file to write, whole or not at all.

    Raises:
        InputError: If the folder is no run's, or a file of it is damaged.
        MissingExtraError: If matplotlib is not installed.
    """
    facts = RunFacts.read(run)
    (name,) = run_names([run])
    sections = {
        "What was trained": _trained(facts),
        "How it went": _went(facts),
        "Where its results lie": _results(facts),
        "Other pictures in its folder": _own_pictures(run),
        "All settings": _settings(facts),
    }
    body = [element("h1", name), element("p", str(run.absolute()), class_="where")]
    body.append(element("p", words.opening(facts)))
    for title, content in sections.items():
        body += [element("h2", title), content] if content else []
    head = joined(
        [
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("title", f"Run {name}"),
            element("style", Html(_STYLE)),
        ]
    )
    page = element("html", element("head", head), element("body", *body), lang="en")
    write_text(output, f"<!DOCTYPE html>\n{page}\n")


def _trained(facts: RunFacts) -> Html:
    """Model, data and machine."""
    model, record = "model.init_args.", facts.record
    versions = record.get("versions")
    listed = {
        "method": words.method(facts),
        "starts from": words.backbone(facts),
        "size": words.size(facts),
        "pooling": _setting(facts, f"{model}pooling"),
        "adapter": _setting(facts, f"{model}lora"),
        "loss": _setting(facts, f"{model}loss"),
        "optimiser": _setting(facts, f"{model}optimizer"),
        "schedule": _setting(facts, f"{model}schedule"),
        "queries a batch": words.batch(facts),
        "hard negatives": _setting(facts, "data.init_args.num_negatives"),
        "planned length": words.length(facts),
        "seed": _setting(facts, "seed_everything"),
        "precision": str(record.get("precision") or "not noted"),
        "hardware": words.hardware(facts),
        "started": words.moment(record.get("started")),
        "commit": str(record.get("commit") or "none: it ran outside a checkout"),
        "command": element("code", str(record.get("command") or "not noted")),
        "versions": words.part_of_config(versions) if isinstance(versions, Mapping) else "not noted",
    }
    return joined([definitions((name, value) for name, value in listed.items() if value), _sources(facts)])


def _setting(facts: RunFacts, path: str) -> str:
    """A part of the config in words, empty where there is none."""
    value = facts.setting(path)
    return "" if value is None else words.part_of_config(value)


def _sources(facts: RunFacts) -> Html:
    """The sources of the data, and how many records each has."""
    found, rows = facts.setting("data.init_args.sources"), facts.record.get("source_rows")
    counts = rows if isinstance(rows, Mapping) else {}
    cells = []
    for source in found if isinstance(found, list) else []:
        if isinstance(source, Mapping):
            fields = {key: source.get(key) for key in ("name", "path", "weight", "instruction")}
            number = counts.get(str(source.get("name")))
            records = f"{number:,}" if isinstance(number, int) else "not noted"
            shown = [words.part_of_config(value) if value is not None else "" for value in fields.values()]
            cells.append([shown[0], records, *shown[1:]])
    return table(["source", "records", "file", "weight", "instruction"], cells) if cells else Html()


def _went(facts: RunFacts) -> Html:
    """Curves, scores, speed, health, and what the run was made of."""
    if not facts.curves:
        parts = [element("p", "Its folder holds no metrics.csv with values: neither loss nor scores are known here.")]
    elif not facts.curves.get(LOSS, ([], []))[0]:
        parts = [element("p", "It logged no training loss, so no curves are drawn."), _scores(facts), _speed(facts)]
    else:
        parts = [_picture(draw_curves, facts.folder, "Loss and validation score over the optimiser steps.")]
        parts += [_scores(facts), _speed(facts)]
    parts.append(_routing(facts))
    said = words.health(facts)
    parts += [element("h3", "Health"), *(element("p", sentence) for sentence in said)] if said else []
    return joined([*parts, _processes(facts)])


def _routing(facts: RunFacts) -> Html:
    """How evenly a mixture's experts were used, as far as it was logged."""
    logged = [column for column in (ENTROPY, IDLE) if facts.curves.get(column, ([], []))[0]]
    if not logged:
        return Html()
    if len(logged) < 2 or not facts.not_finite.keys().isdisjoint(logged):
        why = f"{ENTROPY} or {IDLE} was not logged, or has a value that is no number"
        return element("p", f"How evenly the experts were used is not drawn: {why}.")
    return _picture(draw_routing_curves, facts.folder, "How evenly the experts were used.")


def _picture(draw: Callable[[list[Path], Path], None], run: Path, caption: str) -> Html:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw([run], path)
        image = png_image(path.read_bytes(), caption)
    return element("figure", image, element("figcaption", caption))


def _scores(facts: RunFacts) -> Html:
    """Loss and scores: first, last, best."""
    rows = []
    for column, summary in facts.summaries.items():
        if column == LOSS or not column.startswith(("train/", THROUGHPUT, "routing/", "lr-", "epoch")):
            best = words.digits(summary.highest[1]) if column != LOSS else ""
            at = f"{summary.highest[0]:,}" if column != LOSS else ""
            firsts = [words.digits(summary.first[1]), words.digits(summary.last[1])]
            rows.append([column, *firsts, f"{summary.last[0]:,}", best, at])
    return table(["logged", "first", "last", "at step", "highest", "at step"], rows) if rows else Html()


def _speed(facts: RunFacts) -> Html:
    rows = []
    for name, (meaning, style) in _SPEEDS.items():
        summary = facts.summaries.get(f"{THROUGHPUT}{name}")
        if summary is not None:
            rows.append([meaning, style.format(summary.median), style.format(summary.last[1])])
    return table(["speed", "median", "last"], rows) if rows else Html()


def _processes(facts: RunFacts) -> Html:
    """The processes of a run that was interrupted, or went on from another one's checkpoint."""
    if len(facts.parts) == 1 and facts.parts[0].went_on_from is None:
        return Html()
    title = element("h3", "Interruptions")
    rows = []
    for part in facts.parts:
        last = part.end.get("step")
        end = words.ending(part, last if isinstance(last, int) else 0) if part.end else "It left no note of its end."
        origin = part.went_on_from or "the beginning"
        took = "not noted" if part.seconds is None else words.duration(part.seconds)
        rows.append([part.folder.absolute().name, words.moment(part.record.get("started")), took, origin, end])
    return joined([title, table(["process", "started", "took", "went on from", "how it ended"], rows)])


def _results(facts: RunFacts) -> Html:
    """Checkpoints, model directories and the run's own files."""
    rows = []
    for callback in ("ExportModel", "ExportLanguageModel"):
        for arguments in facts.callbacks(callback):
            output = str(arguments.get("output"))
            state = "found" if Path(output).is_dir() else "not found"
            rows.append([output, f"model directory, {state} from where this page was made", ""])
    folders = {part.folder.absolute() for part in facts.parts}
    # A sweep's run writes its checkpoints beside the folders of its processes.
    folders |= {
        Path(str(each["dirpath"])).absolute() for each in facts.callbacks("ModelCheckpoint") if each.get("dirpath")
    }
    for path in sorted({path for folder in folders for path in folder.rglob("*.ckpt")}):
        rows.append([_place(path, facts.folder), "checkpoint", _size(path)])
    for name, meaning in (
        ("metrics.csv", "all that was logged, step by step"),
        ("run.json", "command, commit, versions, hardware, end"),
        ("config.yaml", "all settings, to run it again: python main.py fit --config"),
    ):
        path = facts.folder / name
        rows += [[name, meaning, _size(path)]] if path.is_file() else []
    return table(["file", "what it is", "size"], rows)


def _place(path: Path, folder: Path) -> str:
    """A path seen from the run's folder, where it lies in or beside it."""
    return os.path.relpath(path, folder)


def _size(path: Path) -> str:
    """The size of a file or of a folder's files; a run that is at work may remove some of them meanwhile."""
    num_bytes = 0.0
    for file in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            num_bytes += file.stat().st_size if file.is_file() else 0
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def _own_pictures(run: Path) -> Html:
    """The pictures that somebody put into the folder; the curves are on the page already."""
    paths = [path for path in sorted(run.glob("*.png")) if path.name != "curves.png" and path.is_file()]
    found = {path.name: path.read_bytes() for path in paths[:MOST_PICTURES]}
    figures = (
        element("figure", png_image(content, name), element("figcaption", name))
        for name, content in found.items()
        if content.startswith(_PNG)
    )
    return joined(figures)


def _settings(facts: RunFacts) -> Html:
    summary = element("summary", "The merged config, as the run read it")
    return element("details", summary, element("pre", facts.config_text))
