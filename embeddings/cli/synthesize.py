"""`synthesize`: training records, or negatives for records that exist, from a language model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from embeddings.common import OptionError

if TYPE_CHECKING:
    from embeddings.inference import Encoder
    from embeddings.synthesis import SynthesisReport


def synthesize(
    endpoint: str,
    model: str,
    output: Path,
    method: Literal["mgh", "nv_embed"] = "mgh",
    num_examples: int | None = None,
    num_tasks: int | None = None,
    shares: dict[str, float] | None = None,
    tasks: Path | None = None,
    languages: list[str] | None = None,
    regenerate_negatives: str | list[str] | None = None,
    columns: dict[str, str] | None = None,
    suspect_rows: Literal["refuse", "leave_out", "keep"] | None = None,
    templates: Path | None = None,
    seeds: Path | None = None,
    num_seeds: int = 4,
    temperature: float | None = 1.0,
    max_answer_tokens: int = 4096,
    token_limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
    json_mode: bool = False,
    extra_body: dict[str, Any] | None = None,
    max_attempts: int = 3,
    concurrency: int = 8,
    requests_per_minute: float | None = None,
    tokens_per_minute: float | None = None,
    max_retries: int = 8,
    timeout_seconds: float = 120.0,
    token_budget: int | None = None,
    price_per_million_prompt_tokens: float | None = None,
    price_per_million_completion_tokens: float | None = None,
    judge: str | None = None,
    seed: int = 0,
    dry_run: bool = False,
) -> None:
    """Write synthetic training records by a language model; the same line resumes after a kill, and pays nothing twice.

    The model brainstorms tasks, then writes an example for each draw of a task and its placeholders. Any endpoint of
    OpenAI's chat protocol will do; the key is the environment variable OPENAI_API_KEY, and none where it is not set.

    Args:
        endpoint: Base address, as `http://HOST:PORT/v1`.
        model: The model's name at the endpoint.
        output: The folder to write: `CATEGORY.jsonl` (or `records.jsonl`), and a journal of every answer.
        method: Four negatives of graded similarity in five categories, or NV-Embed's three categories.
        num_examples: Records to ask for; 1,000 where none is given.
        num_tasks: Tasks to brainstorm; half of `num_examples` where none is given.
        shares: Share of each category, as `{short_long: 2, sts: 1}`; the method's where none is given.
        tasks: The `tasks.jsonl` of another job, in place of brainstorming.
        languages: Languages to draw from; English where none is given.
        regenerate_negatives: A file, a glob, a list of these, or `hub:organisation/name`, of records that get four new
            negatives each.
        columns: Column of a field of theirs, for fields whose column has another name.
        suspect_rows: What becomes of records among them that contradict themselves; `refuse` where nothing is given.
        templates: A folder of prompts in place of the package's, by the same names.
        seeds: The folder of an earlier job by a stronger model, whose records every prompt begins with (MGH, §3.1).
        num_seeds: How many of its records a prompt begins with.
        temperature: Temperature of sampling; `null` leaves it to the endpoint.
        max_answer_tokens: Most tokens of an answer.
        token_limit_field: Field of a request that says so.
        json_mode: Whether to ask the endpoint for JSON objects by its own means.
        extra_body: More fields of every request.
        max_attempts: Most answers for one record, where answers are rejected.
        concurrency: Requests under way at once.
        requests_per_minute: Most requests a minute.
        tokens_per_minute: Most tokens a minute, on average.
        max_retries: Times that a request is tried again, each after a longer wait, before the job stops.
        timeout_seconds: Longest wait for one answer.
        token_budget: Most tokens of the whole job, earlier runs included; it then ends with what is there.
        price_per_million_prompt_tokens: For the cost report, in your currency.
        price_per_million_completion_tokens: The same of answers.
        judge: A model directory or Hub id, by whose vectors the report says whether similarity to the query falls from
            level to level.
        seed: Seed of tasks, placeholders and requests.
        dry_run: Whether to print prompts, ask nothing and write nothing.
    """
    from embeddings.data import SourceConfig
    from embeddings.synthesis import METHODS, Budget, ChatClient, Limits, Plan, PromptOptions, Sampling, Templates
    from embeddings.synthesis.generate import dry_run as dry_run_of_examples
    from embeddings.synthesis.generate import regenerate_dry_run
    from embeddings.synthesis.generate import regenerate_negatives as regenerate
    from embeddings.synthesis.generate import synthesize as synthesize_examples

    prompts = Templates(METHODS[method], PromptOptions(templates, languages, seeds, num_seeds))
    sampling = Sampling(model, temperature, max_answer_tokens, token_limit_field, json_mode, extra_body)
    if judge is not None and method == "nv_embed":
        raise OptionError("judge", judge, "has no effect on nv_embed, which has no levels", "leave it out")
    encoder = None if judge is None or dry_run else load_judge(judge)
    limits = Limits(max_attempts, concurrency, requests_per_minute, tokens_per_minute, max_retries, timeout_seconds)
    budget = Budget(token_budget, price_per_million_prompt_tokens, price_per_million_completion_tokens)
    if regenerate_negatives is None:
        without_effect({"columns": columns, "suspect_rows": suspect_rows}, "needs regenerate_negatives", "leave it out")
        plan = Plan(method, num_examples, num_tasks, shares, tasks, seed)
        if dry_run:
            print(dry_run_of_examples(plan, prompts))
            return
        report = synthesize_examples(
            output,
            plan,
            prompts,
            ChatClient(endpoint, sampling, limits.timeout_seconds),
            limits=limits,
            budget=budget,
        )
    else:
        without_effect(
            {
                "num_examples": num_examples,
                "num_tasks": num_tasks,
                "shares": shares,
                "tasks": tasks,
                "seeds": seeds,
                "languages": languages,
                "method": None if method == "mgh" else method,
            },
            "has no effect on regenerate_negatives",
            "leave it out",
        )
        source = SourceConfig(
            "input", regenerate_negatives, columns=columns or {}, suspect_rows=suspect_rows or "refuse"
        )
        if dry_run:
            print(regenerate_dry_run(source, prompts))
            return
        report = regenerate(
            source,
            output,
            prompts,
            ChatClient(endpoint, sampling, limits.timeout_seconds),
            seed=seed,
            limits=limits,
            budget=budget,
        )
    print(table(report, output))
    if encoder is not None:
        print(level_table(str(judge), encoder, [output / name for name in report.num_records]))


def load_judge(model: str) -> "Encoder":
    """The model that judges levels, loaded before anything is paid for."""
    from embeddings.inference import Encoder

    return Encoder.from_pretrained(model, show_progress=True)


def level_table(judge: str, encoder: "Encoder", paths: list[Path]) -> str:
    """How similar the negatives of each level are to their queries, as text.

    Args:
        judge: What the report calls the model.
        encoder: The model.
        paths: Files of records with levels.
    """
    from embeddings.synthesis.validate import check_levels

    found = check_levels(paths, encoder)
    lines = [
        f"mean cosine with the query by {judge}, {found.num_records} records:",
        f"  positive{found.positive:>13.3f}",
    ]
    lines += [f"  level {level}{mean:>14.3f}" for level, mean in enumerate(found.levels, start=1)]
    lines.append(f"similarity falls from level to level in {found.falling_fraction:.0%} of the records")
    return "\n".join(lines if found.is_falling else [*lines, "the means do not fall from level to level"])


def without_effect(options: dict[str, Any], rule: str, fix: str) -> None:
    """Check that none of some options is given.

    Raises:
        OptionError: At the first that is.
    """
    for name, value in options.items():
        if value is not None:
            raise OptionError(name, str(value) if isinstance(value, Path) else value, rule, fix)


def table(report: "SynthesisReport", output: Path) -> str:
    """What was asked for, what came of it, and what it took, as text."""
    written = sum(report.num_records.values())
    lines = [f"{report.num_answers} answers, {written} records of {report.num_wanted}"]
    groups = {"rejected": report.rejected, "repaired": report.repaired, "tried again": report.retries}
    for group, counts in groups.items():
        lines += [f"  {group}: {what.replace('_', ' '):<40}{count:>12}" for what, count in counts.items()]
    if report.num_given_up:
        lines.append(f"{report.num_given_up} records have no answer that could be used")
    tokens = report.prompt_tokens + report.completion_tokens
    lines.append(f"{tokens} tokens: {report.prompt_tokens} of prompts, {report.completion_tokens} of answers")
    if report.cost is not None:
        lines.append(f"cost {report.cost:.2f}")
    if not report.complete:
        lines.append(f"the token budget is used up, {report.num_unasked} records were not asked for;")
        lines.append("the same line with a larger token_budget goes on")
    lines += [f"wrote {count} records to {output / name}" for name, count in report.num_records.items()]
    return "\n".join(lines)
