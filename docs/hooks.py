"""MkDocs hooks: generate tables from CSV files, the command line, the Python API, and copies of root files.

A page includes a table by a fenced block. Its language is the kind of table and its content is YAML:

    ```benchmarks          newest row of each claim in `benchmarks/results.csv`
    claims: [P1, P3]       prefixes of the claims; default: one section per script
    ```
    ```scores              `benchmarks/results.csv` as a two-dimensional table; the pattern yields row and column
    claim: "E14 (?P<column>.+) on vaswani_npl, (?P<row>.+)"
    intervals: true        with sign, minimum and maximum; default: only the value
    ```
    ```growth              newest rows of each operation in `benchmarks/growth.csv`
    ```
    ```trials              mean and standard deviation over the seeds in `benchmarks/trials.csv`
    columns: {held-out packages: held-out packages}                     header: metric
    rows: {bi-encoder on random batches: [E1, "bi-encoder, random"]}    label: [experiment, variant]
    gains: {clustered over random: [bi-encoder on clustered batches, bi-encoder on random batches]}
    metric: validation     with it the columns are suffixes of variants, such as {1e-3: ", learning rate 0.001"}
    ```
    ```recipes             the rows of `lightning_configs/recipes.csv`
    names: [cde]           prefixes of the recipe names; default: all
    ```
    ```sources             a recipe's public data sets, from `lightning_configs/data/public_sources.yaml`
    folder: nv_embed       folder of the recipe's files
    ```
    ```file                a file of the repository as a code block
    path: lightning_configs/base.yaml
    ```

A block that matches no rows is an error, so a page cannot refer to rows that were removed.
"""

import ast
import csv
import importlib
import posixpath
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TRIALS = ROOT / "benchmarks" / "results.csv", ROOT / "benchmarks" / "trials.csv"
GROWTH = ROOT / "benchmarks" / "growth.csv"
RECIPES = ROOT / "lightning_configs" / "recipes.csv"
DATA_CONFIGS = ROOT / "lightning_configs" / "data"
# Pages copied from files outside docs/, which code hosts display; their links are rewritten.
ROOT_PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
ROOT_PAGES |= {"examples.md": "examples/README.md"}

Row = dict[str, str]


@cache
def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file in file order, cached."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cell(text: object) -> str:
    """A text as a one-line cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


# Numbers


def rounded(value: float, digits: int = 3) -> str:
    """A number with three significant digits; from 1000 rounded to an integer."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def score(values: Sequence[float], digits: int, sign: str = "") -> str:
    """The mean, with the sample standard deviation of two or more values; empty without values."""
    if not values:
        return ""
    deviation = f" ±{statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.{digits}f}{deviation}"


# Tables from CSV files


def newest(rows: Iterable[Row]) -> dict[str, Row]:
    """The last row of each claim; rows in the file are chronological."""
    by_claim: dict[str, Row] = {}
    for row in rows:
        by_claim[row["claim"]] = row
    return by_claim


def begins_with(text: str, prefixes: Sequence[str]) -> bool:
    """Whether a text begins with one of the prefixes, as whole words."""
    return any(re.match(rf"{re.escape(prefix)}(?!\w)", text) for prefix in prefixes)


def benchmarks_table(options: Mapping[str, Any]) -> str:
    """The newest row of each claim with spread, target, control, machine and commit."""
    if "claims" in options:
        return rows_table(options["claims"])
    scripts = sorted((ROOT / "benchmarks").glob("p[0-9]*_*.py"), key=lambda path: int(claim_of(path)[1:]))
    parts = []
    for path in scripts:
        claim = claim_of(path)
        parts += [f"### {claim}", f"{title_of(path)}.", f"`python -m benchmarks.{path.stem}`", rows_table([claim])]
    return "\n\n".join(parts)


def claim_of(script: Path) -> str:
    """The claim number of a benchmark script, such as P16."""
    return script.stem.partition("_")[0].upper()


def title_of(script: Path) -> str:
    """The title of a benchmark script: the first line of its docstring without number and final period."""
    line = (ast.get_docstring(ast.parse(script.read_text("utf-8"))) or "").splitlines()[0]
    title = line.partition(": ")[2].strip().rstrip(".")
    return title[0].upper() + title[1:]


def rows_table(claims: Sequence[str]) -> str:
    """The newest rows of the claims that begin with one of the prefixes."""
    rows = [row for claim, row in newest(read_rows(RESULTS)).items() if begins_with(claim, claims)]
    require(rows, f"no claim in {RESULTS.name} begins with one of {claims}")
    header = ["claim", "measured", "target", "control", "machine and commit"]
    return markdown_table(header, map(benchmark_cells, rows))


def benchmark_cells(row: Row) -> list[str]:
    """A row of the results as table cells; a missed target is marked."""
    value, target = float(row["value"]), row["target"]
    low, high = float(row["low"]), float(row["high"])
    unit = "" if row["unit"] == "ratio" else f" {row['unit']}"
    spread = "" if low == high else f" ({rounded(low)} to {rounded(high)})"
    measured = f"{rounded(value)}{unit}{spread}" + ("" if meets(value, target) else ", **missed**")
    control = "" if row["control"] == "nan" else f"{float(row['control']):.3f}"
    machine = row["hardware"].replace("(R)", "").replace(" Processor", "")
    source = f"{machine}, {threads(row['threads'])}, {row['date']}, `{row['commit']}`"
    return [row["claim"], measured, "" if target == "none" else f"`{target}`", control, source]


def threads(count: str) -> str:
    """The number of threads with its unit."""
    return "1 thread" if count == "1" else f"{count} threads"


def meets(value: float, target: str) -> bool:
    """Whether a value meets a target such as `<=1.05`; every value meets `none`."""
    match = re.fullmatch(r"(<=|>=|<|>)([\d.]+)", target)
    if match is None:
        require(target == "none", f"{RESULTS.name}: target must be none or a bound such as <=1.05, got {target!r}")
        return True
    bound = float(match[2])
    return {"<=": value <= bound, ">=": value >= bound, "<": value < bound, ">": value > bound}[match[1]]


def scores_table(options: Mapping[str, Any]) -> str:
    """Values of the results by the groups `row…`, which are joined, and `column` of a pattern for their claims."""
    pattern, digits = re.compile(options["claim"]), options.get("digits", 3)
    values: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = dict.fromkeys(options.get("columns", []))
    for claim, row in newest(read_rows(RESULTS)).items():
        if match := pattern.fullmatch(claim):
            name = match["column"]
            if "columns" in options and name not in columns:
                continue
            columns[name] = None
            cell = f"{float(row['value']):.{digits}f}"
            if options.get("intervals"):
                value, low, high = (f"{float(row[key]):+.{digits}f}" for key in ("value", "low", "high"))
                cell = f"{value} ({low} to {high})"
            label = " ".join(text for group, text in match.groupdict().items() if group.startswith("row"))
            values.setdefault(label, {})[name] = cell
    require(values, f"no claim in {RESULTS.name} matches {options['claim']}")
    rows = [[name, *(by_column.get(column, "–") for column in columns)] for name, by_column in values.items()]
    return markdown_table([options.get("corner", ""), *columns], rows)


def growth_table(_: Mapping[str, Any]) -> str:
    """CPU-seconds and peak memory of each operation by rows, and its last exponent: the newest rows of `growth.csv`.

    Where it was measured, the memory without mapped files follows in parentheses.
    """
    newest_rows = {(row["operation"], int(row["rows"])): row for row in read_rows(GROWTH)}
    operations = dict.fromkeys(operation for operation, _ in newest_rows)
    sizes = sorted({size for _, size in newest_rows})
    lines = []
    for operation in operations:
        found = [newest_rows.get((operation, size)) for size in sizes]
        cells = [growth_cell(row) if row else "" for row in found]
        slopes = [row["exponent"] for row in found if row and row["exponent"] != "nan"]
        lines.append([operation, *cells, slopes[-1] if slopes else ""])
    return markdown_table(["operation", *(f"{size:,} rows" for size in sizes), "exponent"], lines)


def growth_cell(row: Mapping[str, str]) -> str:
    anonymous = f" ({float(row['anonymous_mb']):.0f})" if row["anonymous_mb"] else ""
    return f"{float(row['cpu_seconds']):.0f} s, {float(row['peak_mb']):.0f}{anonymous} MB"


def trials_table(options: Mapping[str, Any]) -> str:
    """Metrics of trials, one row per variant; the highest mean per column is bold; `gains` are means of differences."""
    columns, digits = options["columns"], options.get("digits", 3)
    if "metric" in options:
        by_label = {label: values_by_suffix(*variant, options) for label, variant in options["rows"].items()}
        columns = {column: column for column in columns}
    else:
        by_label = {label: trial_values(*variant) for label, variant in options["rows"].items()}
    for label, metrics in by_label.items():
        required = list(columns.values())
        require(any(metric in metrics for metric in required), f"{label} has none of the metrics {required}")
    rows = [
        [label, *(score([*metrics.get(metric, {}).values()], digits) for metric in columns.values())]
        for label, metrics in by_label.items()
    ]
    if options.get("bold", True):
        for index, metric in enumerate(columns.values(), 1):
            means = [statistics.mean(metrics[metric].values()) for metrics in by_label.values() if metric in metrics]
            for row, metrics in zip(rows, by_label.values(), strict=True):
                if metric in metrics and statistics.mean(metrics[metric].values()) == max(means):
                    row[index] = f"**{row[index]}**"
    for label, (one, other) in options.get("gains", {}).items():
        rows.append([label, *(gain(by_label[one], by_label[other], metric, digits) for metric in columns.values())])
    return markdown_table([options.get("corner", ""), *columns], rows)


def values_by_suffix(experiment: str, variant: str, options: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """A metric by seed of a variant and of those whose names add a suffix, by column."""
    known = {row["variant"] for row in read_rows(TRIALS) if row["experiment"] == experiment}
    variants = {column: f"{variant}{suffix}" for column, suffix in options["columns"].items()}
    found = {column: name for column, name in variants.items() if name in known}
    return {column: trial_values(experiment, name)[options["metric"]] for column, name in found.items()}


def trial_values(experiment: str, variant: str) -> dict[str, dict[int, float]]:
    """Each metric of a variant by seed, including seeds that other experiments ran with the same settings."""
    rows = read_rows(TRIALS)
    keys = {row["key"] for row in rows if (row["experiment"], row["variant"]) == (experiment, variant)}
    require(len(keys) == 1, f"{TRIALS.name}: {experiment}, {variant!r} must have one key, got {sorted(keys)}")
    by_metric: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["key"] in keys:
            by_metric.setdefault(row["metric"], {})[int(row["seed"])] = float(row["value"])
    return by_metric


def gain(one: Mapping[str, Any], other: Mapping[str, Any], metric: str, digits: int) -> str:
    """The mean difference between two variants over the seeds that both have."""
    if metric not in one or metric not in other:
        return ""
    seeds = sorted(one[metric].keys() & other[metric].keys())
    return score([one[metric][seed] - other[metric][seed] for seed in seeds], digits, "+") if seeds else ""


def recipes_table(options: Mapping[str, Any]) -> str:
    """The recipes with the measured value and the paper's."""
    names = options.get("names", [])
    rows = [row for row in read_rows(RECIPES) if not names or row["recipe"].startswith(tuple(names))]
    require(rows, f"no recipe begins with one of {names}")
    header = ["recipe", "hardware", "metric", "measured", "paper", "seconds", "status"]
    fields = ["hardware", "metric", "value", "paper_value", "seconds", "status"]
    return markdown_table(header, ([f"`{row['recipe']}`", *(row[field] for field in fields)] for row in rows))


def sources_table(options: Mapping[str, Any]) -> str:
    """The sources of one folder: location, columns read, rows, the paper's rows and licence."""
    table = yaml.safe_load((DATA_CONFIGS / "public_sources.yaml").read_text("utf-8"))
    groups = [group for group in table["groups"] if group["folder"] == options["folder"] and "collection" not in group]
    require(groups, f"no group of public_sources.yaml has the folder {options['folder']}")
    paper_rows = {
        entry["path"]: entry.get("max_rows")
        for stage in table["stages"]
        for entry in yaml.safe_load((DATA_CONFIGS / f"{stage['config']}.yaml").read_text("utf-8"))["data"]["init_args"][
            "sources"
        ]
    }
    rows = []
    for entry in (group.get("defaults", {}) | entry for group in groups for entry in group["sources"]):
        splits = [entry["split"]] if isinstance(entry.get("split", []), str) else entry.get("split", [])
        part = ", ".join(filter(None, [entry.get("subset"), entry.get("data_files"), *splits]))
        read = "; ".join(
            f"{field}: {column if isinstance(column, str) else ' + '.join(column)}"
            for field, column in entry.get("columns", {}).items()
        )
        every = f", 1 of {entry['every']}" if entry.get("every", 1) > 1 else ""
        count = paper_rows[f"${{EMBED_TRAIN_DATA}}/{options['folder']}/{entry['name']}.parquet"]
        state = "cannot be fetched" if entry["kind"] is None else "" if entry["confirmed"] else "not confirmed"
        rows.append(
            [
                entry["name"],
                f"{entry['repository'] or 'none found'}{f' `{part}`' if part else ''}",
                read or ("queries, corpus, qrels" if entry["kind"] == "beir" else ""),
                f"{entry['rows']:,}{every}" if "rows" in entry else every.removeprefix(", "),
                f"{count:,}" if count else "",
                entry.get("licence", ""),
                ". ".join(filter(None, [state, entry.get("note", "")])),
            ]
        )
    return markdown_table(["source", "data set", "columns read", "rows", "the paper's", "licence", "remark"], rows)


def file_block(options: Mapping[str, Any]) -> str:
    """A file of the repository as a code block."""
    path = ROOT / options["path"]
    return f"```{path.suffix.removeprefix('.')}\n{path.read_text('utf-8').rstrip()}\n```"


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "benchmarks": benchmarks_table,
    "scores": scores_table,
    "growth": growth_table,
    "trials": trials_table,
    "recipes": recipes_table,
    "sources": sources_table,
    "file": file_block,
}
BLOCK = re.compile(rf"^```({'|'.join(TABLES)})\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def with_tables(text: str) -> str:
    """A page whose table blocks are replaced by their tables."""
    return BLOCK.sub(lambda match: TABLES[match[1]](yaml.safe_load(match[2]) or {}), text)


def require(condition: object, message: str) -> None:
    """Stop the build with a message if a condition is false."""
    if not condition:
        raise ValueError(message)


# The command line


class _ParserBuilt(Exception):
    """Raised with the parser of a command before it parses arguments."""


def command_parser(name: str) -> Any:
    """The parser of a command other than `fit` and `plan`, as the command line builds it."""
    from embeddings.cli.main import run_command
    from embeddings.cli.parser import OneLineParser

    def stop(parser: Any, *arguments: object) -> None:
        raise _ParserBuilt(parser)

    with mock.patch.object(OneLineParser, "parse_args", stop):
        try:
            run_command(name, [])
        except _ParserBuilt as built:
            return built.args[0]
    raise RuntimeError(f"{name} did not build a parser")


def fit_parser(name: str = "fit") -> Any:
    """The parser of `fit`, or of `plan`, which adds options."""
    from embeddings.cli.fit import TrainerCLI, make_cli
    from embeddings.cli.plan import PlanCLI

    kind: Any = PlanCLI if name == "plan" else TrainerCLI

    class Stopping(kind):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise _ParserBuilt(parser)

    try:
        make_cli(["fit"], Stopping)
    except _ParserBuilt as built:
        return built.args[0]
    raise RuntimeError(f"{name} did not build a parser")


def option_rows(parser: Any) -> list[list[str]]:
    """The options of a parser: names, type, default and help."""
    rows = []
    for action in parser._actions:
        names = [name for name in action.option_strings if not name.endswith("+")] or [action.dest]
        if (
            names[0] in ("-h", "--help", "--print_config")
            or names[-1].endswith(".help")
            or action.help == "==SUPPRESS=="
        ):
            continue
        kind = type_name(getattr(action, "_typehint", None))
        if action.choices:
            kind = ", ".join(map(str, action.choices))
        if is_flag := type(action).__name__ == "ActionYesNo":
            kind = "flag"
        default = "required" if action.required else shown_default(action.default, is_flag)
        shown = ", ".join(f"`{name.replace('_', '-') if '.' not in name else name}`" for name in names)
        rows.append([shown, f"`{kind}`" if kind else "", default, help_text(action.help)])
    return rows


def shown_default(value: Any, is_flag: bool) -> str:
    """A default as the help shows it, or an empty text without one."""
    if value is None or (is_flag and value is False) or str(value) == "==SUPPRESS==":
        return ""
    return f"`{value}`"


def type_name(kind: Any) -> str:
    """The name of a type without module names."""
    if kind is None:
        return ""
    text = str(kind) if not isinstance(kind, type) else kind.__name__
    text = re.sub(r"(?:\w+\.)+(?=\w)", "", text)
    text = re.sub(r"Literal\[([^\]]*)\]", lambda match: match[1].replace("'", "").replace(", ", " | "), text)
    text = re.sub(r"Optional\[(.*)\]$", r"\1 | None", text)
    text = re.sub(r"^Union\[(.*)\]$", lambda match: re.sub(r", (?![^\[]*\])", " | ", match[1]), text)
    return text.replace("NoneType", "None")


def help_text(text: str | None) -> str:
    """An option's help as Markdown."""
    return re.sub(r"``", "`", " ".join((text or "").split())).replace("<", "&lt;")


def command_line_page() -> str:
    """The page of all commands with their options, generated from the parsers."""
    from embeddings.cli.main import COMMANDS, TRAINER_COMMANDS

    header = ["option", "type", "default", "meaning"]
    parts = [
        "# Command line",
        "This page is generated from the parsers. `python main.py COMMAND --help` prints the same for one command.",
        "Write option names in full, with hyphens or underscores. Every command accepts `--config FILE` and "
        "`--print_config`. [Exit codes](reliability.md#exit-codes) are the same for all commands.",
    ]
    names = [*TRAINER_COMMANDS, *COMMANDS]
    summaries = {**TRAINER_COMMANDS, **{name: command.summary for name, command in COMMANDS.items()}}
    links = [[f"[`{name}`](#{name.replace(' ', '-')})", summaries[name]] for name in names]
    parts.append(markdown_table(["command", "what it does"], links))
    for name in names:
        parser = fit_parser(name) if name in TRAINER_COMMANDS else command_parser(name)
        positions = " ".join(action.dest.upper() for action in parser._actions if not action.option_strings)
        parts.append(f"## {name}")
        parts.append(f"`python main.py {name}{' ' + positions if positions else ''} [options]`: {summaries[name]}.")
        parts += paragraphs(name)
        rows = option_rows(parser)
        if name == "plan":
            shared = option_rows(fit_parser())
            rows = [row for row in rows if row not in shared]
        parts.append(markdown_table(header, rows))
    return "\n\n".join(parts) + "\n"


def paragraphs(name: str) -> list[str]:
    """The text of a command's docstring before its arguments; for `fit`, how to list the options of a class."""
    from embeddings.cli.main import COMMANDS

    if name == "plan":
        text = "It accepts the options of [`fit`](#fit) and the following."
    elif name not in COMMANDS:
        text = (
            "The options of `model` and `data` depend on the chosen class. "
            "`python main.py fit --model.help CLASS` lists them."
        )
    else:
        text = (COMMANDS[name].load().__doc__ or "").split("Args:")[0]
    return [" ".join(part.split()).replace("<", "&lt;") for part in text.strip().split("\n\n")]


# The Python API


def packages() -> list[str]:
    """The packages that have public names, in alphabetical order."""
    files = sorted((ROOT / "embeddings").glob("*/__init__.py"))
    return [path.parent.name for path in files if public_names(path.parent.name)]


def source_of(package: str) -> ast.Module:
    """A package's `__init__.py`, read without importing it."""
    return ast.parse((ROOT / "embeddings" / package / "__init__.py").read_text("utf-8"))


def public_names(package: str) -> list[str]:
    """The names in a package's `__all__`."""
    for node in source_of(package).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def api_page(package: str) -> str:
    """The reference page of a package's public names."""
    places = defining_modules(package)
    members = [f"::: {places[name]}.{name}" for name in public_names(package)]
    return "\n\n".join([f"# embeddings.{package}", first_line(package), *members]) + "\n"


def api_index() -> str:
    """The index page: names importable from `embeddings` with links to their reference, and all packages."""
    rows = []
    for name, module in sorted(defining_modules("").items()):
        package = module.split(".")[1] if module.count(".") else ""
        if package in packages() and name in public_names(package):
            place = defining_modules(package)[name]
            rows.append([f"[`{name}`]({package}.md#{place}.{name})", f"`from embeddings import {name}`"])
    listed = [[f"[`embeddings.{name}`]({name}.md)", first_line(name)] for name in packages()]
    names = "These names can be imported from `embeddings`; each loads on first use:"
    parts = ["# Python", names, markdown_table(["name", "import"], rows), "All public names, by package:"]
    return "\n\n".join([*parts, markdown_table(["package", "contents"], listed)]) + "\n"


def first_line(package: str) -> str:
    """The first sentence of a package's docstring."""
    return (ast.get_docstring(source_of(package)) or "").partition(". ")[0].rstrip(".") + "."


def defining_modules(package: str) -> dict[str, str]:
    """The module from which a package's `__init__` imports each name; an empty name is the library itself."""
    modules: dict[str, str] = {}
    own = f"embeddings.{package}"
    for node in ast.walk(source_of(package)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.update({alias.asname or alias.name: node.module for alias in node.names})
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)):
            targets = getattr(node, "targets", [getattr(node, "target", node)])
            modules.update({getattr(each, "id", getattr(each, "name", "")): own for each in targets})
    return modules


# Functions that MkDocs calls


def relinked(text: str, page: str) -> str:
    """A root file's text with links relative to its page; links to files without a page become plain text."""
    pages = {name: page for page, name in ROOT_PAGES.items()}

    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        name, sharp, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not name:
            return match[0]
        name = posixpath.normpath(posixpath.join(posixpath.dirname(ROOT_PAGES[page]), name))
        if name.startswith("docs/"):
            return f"[{label}]({name.removeprefix('docs/')}{sharp}{anchor})"
        return f"[{label}]({pages[name]}{sharp}{anchor})" if name in pages else label

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, text).replace("](docs/", "](")


def on_config(config: Any) -> Any:
    """Add a page for each package to the navigation."""
    pages = ["api/index.md", *({name: f"api/{name}.md"} for name in packages())]
    for section in config["nav"]:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else []:
                if "Python" in entry:
                    entry["Python"] = pages
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    file_class = importlib.import_module("mkdocs.structure.files").File
    pages = {page: relinked((ROOT / name).read_text("utf-8"), page) for page, name in ROOT_PAGES.items()}
    pages["cli.md"] = command_line_page()
    pages["api/index.md"] = api_index()
    pages |= {f"api/{name}.md": api_page(name) for name in packages()}
    for name, text in pages.items():
        files.append(file_class.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the table blocks of a page."""
    return with_tables(markdown)
