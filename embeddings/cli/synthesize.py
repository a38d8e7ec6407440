"""`synthesize`: training records, or negatives for records that exist, from a language model."""

from pathlib import Path
from typing import Literal

from embeddings.cli.encode import load_encoder
from embeddings.common import OptionError
from embeddings.common.errors import refuse_given
from embeddings.common.text import format_table
from embeddings.data import SourceConfig
from embeddings.inference import Encoder
from embeddings.synthesis import (
    METHODS,
    Budget,
    ChatClient,
    Limits,
    Plan,
    PromptOptions,
    Sampling,
    SynthesisReport,
    Templates,
)
from embeddings.synthesis.generate import dry_run as dry_run_of_examples
from embeddings.synthesis.generate import regenerate_dry_run
from embeddings.synthesis.generate import regenerate_negatives as regenerate
from embeddings.synthesis.generate import synthesize as synthesize_examples
from embeddings.synthesis.validate import check_levels


def synthesize(
    endpoint: str,
    model: str,
    output: Path,
    regenerate_negatives: str | list[str] | None = None,
    columns: dict[str, str] | None = None,
    suspect_rows: Literal["refuse", "leave_out", "keep"] | None = None,
    judge: str | None = None,
    dry_run: bool = False,
    *,
    plan: Plan,
    prompts: PromptOptions,
    sampling: Sampling,
    limits: Limits,
    budget: Budget,
) -> None:
    """Write synthetic training records by a language model; the same line resumes after a kill, and pays nothing twice.

    The model brainstorms tasks, then writes an example for each draw of a task and its placeholders. Any endpoint of
    OpenAI's chat protocol will do; the key is the environment variable OPENAI_API_KEY, and none where it is not set.

    Args:
        endpoint: Base address, as `http://HOST:PORT/v1`.
        model: The model's name at the endpoint.
        output: The folder to write: `CATEGORY.jsonl` (or `records.jsonl`), and a journal of every answer.
        regenerate_negatives: A file, a glob, a list of these, or `hub:organisation/name`, of records that get four new
            negatives each.
        columns: Column of a field of these records, for fields whose column has another name.
        suspect_rows: What becomes of records among them that contradict themselves; `leave_out` where nothing is given.
        judge: A model directory or Hub id, by whose vectors the report says whether similarity to the query falls from
            level to level.
        dry_run: Whether to print prompts, ask nothing and write nothing.
        plan: What is asked for.
        prompts: What fills the prompts.
        sampling: How the model answers.
        limits: How the endpoint is used.
        budget: What the answers may cost.
    """
    templates = Templates(METHODS[plan.method], prompts)
    if judge is not None and plan.method == "nv_embed":
        raise OptionError("judge", judge, "has no effect on nv_embed, which has no levels", "leave it out")
    # Loaded before anything is paid for.
    encoder = None if judge is None or dry_run else load_encoder(judge)
    if regenerate_negatives is None:
        refuse_given({"columns": columns, "suspect_rows": suspect_rows}, "needs regenerate_negatives")
        if dry_run:
            print(dry_run_of_examples(plan, templates))
            return
        client = ChatClient(endpoint, sampling, limits.timeout_seconds)
        report = synthesize_examples(output, plan, templates, client, limits=limits, budget=budget)
    else:
        unused = {name: getattr(plan, name) for name in ("num_examples", "num_tasks", "shares", "tasks")}
        unused |= {"seeds": prompts.seeds, "languages": prompts.languages}
        unused["method"] = None if plan.method == "mgh" else plan.method
        refuse_given(unused, "has no effect on regenerate_negatives")
        rows = suspect_rows or "leave_out"
        source = SourceConfig("input", regenerate_negatives, columns=columns or {}, suspect_rows=rows)
        if dry_run:
            print(regenerate_dry_run(source, templates))
            return
        client = ChatClient(endpoint, sampling, limits.timeout_seconds)
        report = regenerate(source, output, templates, client, seed=plan.seed, limits=limits, budget=budget)
    print(synthesis_table(report, output))
    if encoder is not None:
        print(level_table(str(judge), encoder, [output / name for name in report.num_records]))


def level_table(judge: str, encoder: Encoder, paths: list[Path]) -> str:
    """How similar the negatives of each level of records are to their queries by a model, as text."""
    found = check_levels(paths, encoder)
    rows = [("  positive", f"{found.positive:.3f}")]
    rows += [(f"  level {level}", f"{mean:.3f}") for level, mean in enumerate(found.levels, start=1)]
    lines = [f"mean cosine with the query by {judge}, {found.num_records} records:", format_table(rows)]
    lines.append(f"similarity falls from level to level in {found.falling_fraction:.0%} of the records")
    return "\n".join(lines if found.is_falling else [*lines, "the means do not fall from level to level"])


def synthesis_table(report: SynthesisReport, output: Path) -> str:
    """What was asked for, what came of it, and what it took, as text."""
    written = sum(report.num_records.values())
    lines = [f"{report.num_answers} answers, {written} records of {report.num_wanted}"]
    groups = {"rejected": report.rejected, "repaired": report.repaired, "tried again": report.retries}
    counts = {(group, what): count for group, found in groups.items() for what, count in found.items()}
    if counts:
        rows = [(f"  {group}: {what.replace('_', ' ')}", count) for (group, what), count in counts.items()]
        lines.append(format_table(rows))
    if report.num_given_up:
        lines.append(f"{report.num_given_up} records have no answer that could be used")
    tokens = report.prompt_tokens + report.completion_tokens
    lines.append(f"{tokens} tokens: {report.prompt_tokens} of prompts, {report.completion_tokens} of answers")
    if report.cost is not None:
        lines.append(f"cost {report.cost:.2f}")
    if not report.complete:
        lines.append(f"the token budget is used up, {report.num_unasked} records were not asked for;")
        lines.append("the same line with a larger token_budget resumes")
    lines += [f"wrote {count} records to {output / name}" for name, count in report.num_records.items()]
    return "\n".join(lines)
