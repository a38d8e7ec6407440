"""The facts of a run in words and whole sentences, for a person who was not there."""

import math
from collections.abc import Mapping
from typing import Any

from embeddings.figures.curves import WINDOW
from embeddings.figures.run_facts import Part, RunFacts, Summary, when
from embeddings.figures.run_metrics import LOSS, SCORE

METHODS = {
    "NVEmbedModule": "NV-Embed (Lee et al. 2024, arXiv:2405.17428)",
    "MGHCurriculumModule": "multi-granularity hard negatives with a curriculum (MGH, Negative Matters)",
    "MoEEmbedModule": "a sparse mixture of experts (Nomic Embed v2, Nussbaum and Duderstadt 2025, arXiv:2502.07972)",
    "CDEModule": "contextual document embeddings (CDE, Morris and Rush 2024, arXiv:2410.02525)",
    "MaskedLMModule": "masked language modelling, to adapt a backbone",
}
_MOST_SHOWN = 300


def short_class(path: Any) -> str:
    """The last part of a class's path."""
    return str(path).rpartition(".")[2]


def method(facts: RunFacts) -> str:
    """The method, or the module's name where it is none of the library's."""
    path = facts.setting("model.class_path")
    return (
        "a method that its config does not name" if path is None else METHODS.get(short_class(path), short_class(path))
    )


def part_of_config(value: Any) -> str:
    """A class and its arguments, or a mapping or list of them, on one line; what is null is left out."""
    if isinstance(value, Mapping) and "class_path" in value:
        inner = part_of_config(value.get("init_args") or {})
        return short_class(value["class_path"]) + (f" ({inner})" if inner else "")
    if isinstance(value, Mapping):
        shown = ((name, part_of_config(each)) for name, each in value.items() if each is not None)
        return _cut(", ".join(f"{name} {each}" for name, each in shown if each))
    if isinstance(value, list):
        return _cut(", ".join(map(part_of_config, value)))
    return _cut(_plain(value))


def backbone(facts: RunFacts) -> str:
    """What the training begins with: a model directory, or else the backbone."""
    arguments = "model.init_args."
    initial = facts.setting(f"{arguments}initial_model")
    return str(initial or facts.setting(f"{arguments}backbone.name") or "a model that the config describes")


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
    """How many processes there were, and on what."""
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
    losses = [value for value in facts.curves.get(LOSS, ([], []))[1] if math.isfinite(value)]
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
    return f"It left no note of its end: it was killed or is still at work; step {last_step:,} is the last one known."


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
    """A time as people write it, in UTC."""
    found = when(text)
    return "not noted" if found is None else f"{found.day} {found:%B %Y, %H:%M} UTC"


def count(number: int, name: str, plural: str = "s") -> str:
    """A number of things."""
    return f"{number:,} {name}{plural if number != 1 else ''}"


def digits(value: float) -> str:
    """A measured value, to four digits."""
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
    return (
        f"{name} went from {score.first[1]:.3f} at step {score.first[0]:,} to {last:.3f} at step {last_step:,}, {end}."
    )


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"
