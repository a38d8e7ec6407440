"""Negatives of four levels for pairs that exist: query and positives stay, whatever negatives there were go."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from embeddings.common.errors import OptionError
from embeddings.data.cache import CachedSource, open_cached, read_records
from embeddings.data.records import Record
from embeddings.data.sources import SourceConfig
from embeddings.synthesis.asker import Spending, Traffic
from embeddings.synthesis.categories import REGENERATED_FIELD
from embeddings.synthesis.client import ChatClient
from embeddings.synthesis.examples import RECIPE, sampling_fields
from embeddings.synthesis.job import SynthesisReport, finished_report, open_job
from embeddings.synthesis.prompts import Templates
from embeddings.synthesis.rounds import Item, run_rounds
from embeddings.synthesis.validate import read_negatives

RECORDS_FILE = "records.jsonl"


def regenerate_negatives(
    source: SourceConfig,
    output: Path,
    templates: Templates,
    client: ChatClient,
    *,
    seed: int = 0,
    max_attempts: int = 3,
    traffic: Traffic | None = None,
    spending: Spending | None = None,
) -> SynthesisReport:
    """Write the records of a source with four new negatives each, of the levels 1 (hardest) to 4.

    Everything else of a record stays. The prompt shows the query and the first positive. A record whose every answer is
    rejected is left out, and `rejected.jsonl` has its row and the reason: `row-0` is the source's first record.

    The folder gets `records.jsonl`; for its other files, determinism and guarantees see `synthesize`.

    Args:
        source: A source of pairs.
        output: The folder: new, empty, or of an earlier run of the same job.
        templates: The prompts of MGH.
        client: The endpoint.
        seed: Seed of the requests.
        max_attempts: Most answers for one record.
        traffic: How the endpoint is used.
        spending: What it may cost.

    Raises:
        OptionError: If an option is impossible.
        InputError: If the source cannot be used, the folder is another job's, or the endpoint knows not the address,
            the key or the model.
        EndpointError: If it went silent for longer than the retries last.

    Source: Pan et al. 2025 (MGH), section 2.1. Differs: the prompt is ours.
    """
    if max_attempts < 1:
        raise OptionError("max_attempts", max_attempts, "must be >= 1", "3 is the default")
    cached = open_cached(source)
    identity = {
        "kind": "regenerated negatives",
        "recipe": RECIPE,
        "source_key": cached.key,
        "seed": seed,
        "templates_sha256": templates.sha256,
        **sampling_fields(client.sampling),
    }
    size = {"max_attempts": max_attempts}
    if (report := finished_report(output, {**identity, **size})) is not None:
        return report
    total = len(cached.table)
    items = partial(pair_items, source, cached, templates)
    with open_job(output, identity, size, client, traffic or Traffic(), spending or Spending()) as job:
        outcome = run_rounds(items, total, job.asker, job.journal, seed=seed, max_attempts=max_attempts)
        return job.finish(items, total, seed, outcome, {})


def pair_items(source: SourceConfig, cached: CachedSource, templates: Templates) -> Iterator[Item]:
    """The items of a source, row by row."""
    for row, record in enumerate(read_records(source, cached)):
        prompt = templates.negatives(record.query, record.positives[0])
        read = partial(read_negatives, record=_fields(record), field=REGENERATED_FIELD, prompt=prompt)
        yield Item(f"row-{row}", RECORDS_FILE, prompt, read, is_unique=False)


def regenerate_dry_run(source: SourceConfig, templates: Templates) -> str:
    """The prompt of a source's first pair, and how many there would be at least, as text."""
    cached = open_cached(source)
    prompts = [item.prompt for item in islice(pair_items(source, cached, templates), 1)]
    return f"=== negatives for {len(cached.table)} pairs ===\n{prompts[0]}"


def _fields(record: Record) -> Mapping[str, Any]:
    """The record as a row without its negatives."""
    named = {"id": record.id, "label": record.label, "score": record.score, "instruction": record.instruction}
    given = {name: value for name, value in named.items() if value is not None}
    return {"query": record.query, "positive": list(record.positives), **given}
