"""The tables of the documentation come from the CSV files, and a page that asks for rows that are gone is an error."""

import re

import pytest

from tests.docs.pages import ROOT, hooks

HEAD = "claim,value,unit,low,high,control,target,peer,hardware,threads,commit,date"


def write(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_newest_row_of_a_claim_is_shown_and_a_missed_target_is_named(tmp_path, monkeypatch):
    rows = [
        "P2 b,0.5,ratio,0.4,0.6,1.0012,<=0.6,torch,4 x CPU,1,aaa,2026-01-01",
        "P10 a,3,ms,3,3,nan,none,torch,4 x CPU,2,aaa,2026-01-01",
        "P2 b,0.7,ratio,0.6,0.8,0.99,<=0.6,torch,4 x CPU,1,bbb,2026-01-02",
    ]
    monkeypatch.setattr(hooks, "RESULTS", write(tmp_path / "results.csv", [HEAD, *rows]))
    lines = hooks.with_tables("before\n\n```benchmarks\nclaims: [P2, P10]\n```\n\nafter").splitlines()
    assert lines[0] == "before"
    assert lines[4] == (
        "| P2 b | 0.7 (0.6 to 0.8), **missed** | `<=0.6` | 0.990 | 4 x CPU, 1 thread, 2026-01-02, `bbb` |"
    )
    assert lines[5] == "| P10 a | 3 ms |  |  | 4 x CPU, 2 threads, 2026-01-01, `aaa` |"
    assert lines[-1] == "after"
    assert "P10 a" not in hooks.with_tables("```benchmarks\nclaims: [P1, P2]\n```")
    with pytest.raises(ValueError, match="no claim"):
        hooks.with_tables("```benchmarks\nclaims: [P3]\n```")


def test_scores_are_laid_out_by_row_and_column_and_may_have_their_intervals(tmp_path, monkeypatch):
    claims = {"E1 recall on x, 4": 0.25, "E1 recall on x, 8": 0.5, "E1 nDCG on x, 4": 0.125}
    rows = [f'"{claim}",{value},score,0,0,nan,none,none,c,1,a,d' for claim, value in claims.items()]
    rows.append('"E2 gain on x, a",0.25,score,-0.125,0.5,nan,none,none,c,1,a,d')
    monkeypatch.setattr(hooks, "RESULTS", write(tmp_path / "results.csv", [HEAD, *rows]))
    text = '```scores\nclaim: "(?P<row>E1) (?P<column>.+) on x, (?P<row_2>.+)"\n```'
    assert [line[:6] for line in hooks.with_tables(text).splitlines()[2:]] == ["| E1 4", "| E1 8"]
    text = '```scores\nclaim: "E1 (?P<column>.+) on x, (?P<row>.+)"\ncorner: lists\n```'
    assert hooks.with_tables(text).splitlines() == [
        "| lists | recall | nDCG |",
        "| --- | --- | --- |",
        "| 4 | 0.250 | 0.125 |",
        "| 8 | 0.500 | – |",
    ]
    text = '```scores\nclaim: "E2 gain on (?P<row>.+), (?P<column>.+)"\nintervals: true\n```'
    assert hooks.with_tables(text).splitlines()[2] == "| x | +0.250 (-0.125 to +0.500) |"


def test_the_growth_of_an_operation_is_a_row_with_its_newest_values(tmp_path, monkeypatch):
    head = "operation,rows,cpu_seconds,peak_mb,anonymous_mb,exponent"
    rows = ["sort,10,9,500,,nan", "sort,1000,11,510,,nan", "sort,1000,21.4,520.6,310.2,1.05", "scan,10,8,400,,nan"]
    monkeypatch.setattr(hooks, "GROWTH", write(tmp_path / "growth.csv", [head, *rows]))
    assert hooks.with_tables("```growth\n```").splitlines() == [
        "| operation | 10 rows | 1,000 rows | exponent |",
        "| --- | --- | --- | --- |",
        "| sort | 9 s, 500 MB | 21 s, 521 (310) MB | 1.05 |",
        "| scan | 8 s, 400 MB |  |  |",
    ]


def test_trials_are_averaged_over_seeds_and_gains_are_taken_seed_by_seed(tmp_path, monkeypatch):
    head = "experiment,variant,seed,key,metric,value,hardware,commit,date"
    values = {("E1", "a", "k1"): (0.5, 0.7), ("E1", "b", "k2"): (0.4, 0.4), ("E2", "same as b", "k2"): (0.3,)}
    rows = [
        f"{experiment},{variant},{seed + 2 * (experiment == 'E2')},{key},ndcg,{value},c,x,d"
        for (experiment, variant, key), found in values.items()
        for seed, value in enumerate(found)
    ]
    monkeypatch.setattr(hooks, "TRIALS", write(tmp_path / "trials.csv", [head, *rows]))
    text = "```trials\ncolumns: {nDCG@10: ndcg}\nrows: {one: [E1, a], two: [E1, b]}\ngains: {gain: [one, two]}\n```"
    assert hooks.with_tables(text).splitlines()[2:] == [
        "| one | **0.600 ±0.141** |",
        "| two | 0.367 ±0.058 |",
        "| gain | +0.200 ±0.141 |",
    ]
    with pytest.raises(ValueError, match="must have one key"):
        hooks.with_tables("```trials\ncolumns: {n: ndcg}\nrows: {one: [E3, a]}\n```")
    suffixes = "metric: ndcg\ncolumns: {usual: '', fast: ', fast'}\nbold: false"
    text = f"```trials\n{suffixes}\nrows: {{a: [E1, a], b: [E1, b]}}\n```"
    rows.append('E1,"a, fast",0,k4,ndcg,0.8,c,x,d')
    hooks.read_rows.cache_clear()
    write(tmp_path / "trials.csv", [head, *rows])
    assert hooks.with_tables(text).splitlines()[2:] == ["| a | 0.600 ±0.141 | 0.800 |", "| b | 0.367 ±0.058 |  |"]


def test_every_benchmark_has_its_section_with_the_rows_of_its_claim():
    text = hooks.with_tables("```benchmarks\n```")
    scripts = list((ROOT / "benchmarks").glob("p[0-9]*.py"))
    assert text.count("\n### P") + 1 == len(scripts) > 15
    assert all(f"`python -m benchmarks.{path.stem}`" in text for path in scripts)
    assert re.search(r"\| P1 GradCache step over the step with every graph kept \| \d", text)


def test_recipes_are_chosen_by_the_beginnings_of_their_names():
    rows = hooks.with_tables("```recipes\nnames: [cde, quickstart]\n```").splitlines()[2:]
    assert len(rows) >= 5
    assert all(row.startswith(("| `cde", "| `quickstart")) for row in rows)
    with pytest.raises(ValueError, match="no recipe"):
        hooks.with_tables("```recipes\nnames: [nothing]\n```")


def test_links_of_root_files_lead_to_their_pages():
    text = "[a](docs/data.md#x) [b](CONTRIBUTING.md) [c](LICENSE) [d](https://x.org) ![e](docs/img/p.png) [f](#here)"
    expected = "[a](data.md#x) [b](contributing.md) c [d](https://x.org) ![e](img/p.png) [f](#here)"
    assert hooks.relinked(text, "index.md") == expected


def test_every_command_and_package_has_its_reference():
    packages = hooks.packages()
    assert {"data", "inference", "losses", "models", "modules"} <= set(packages)
    for package in packages:
        page = hooks.api_page(package)
        assert page.count("\n::: embeddings.") == len(hooks.public_names(package)) > 0
    rows = {row[0]: row for row in hooks.option_rows(hooks.command_parser("mine"))}
    assert rows["`--model`"][2] == "required"
    assert rows["`--num-negatives`"][1] == "`int | None`"
