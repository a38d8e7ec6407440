"""`synthesize` through the command line: records, reports, and one line and an exit code for errors."""

import json
import os
import signal
import sys

import pytest

from embeddings.cli.main import main
from tests.helpers.chat_server import Reply, answers_badly, answers_well, chat_server
from tests.helpers.refusals import assert_refused


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def run(endpoint, *options):
    return main(["synthesize", "--endpoint", endpoint, "--model", "m", "--output", "out", *options])


def test_records_are_written_and_reported(work, capsys):
    with chat_server(answers_badly) as server:
        options = ["--num-examples", "20", "--num-brainstormed", "10", "--method", "nv_embed", "--seed=4"]
        assert run(server.endpoint, *options) == 0
        printed = capsys.readouterr().out
        assert run(server.endpoint, *options) == 0
        assert capsys.readouterr().out == printed
        spent = len(server.requests)
    assert f"{spent} answers, " in printed
    assert "  rejected: not json" in printed
    names = {path.name for path in (work / "out").iterdir()}
    assert names >= {"short_long.jsonl", "long_short.jsonl", "short_short.jsonl", "tasks.jsonl", "manifest.json"}
    manifest = json.loads((work / "out" / "manifest.json").read_text())
    assert (manifest["complete"], manifest["model"], manifest["report"]["num_answers"]) == (True, "m", spent)


def test_the_key_is_written_nowhere(work, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with chat_server() as server:
        assert run(server.endpoint, "--num-examples", "3") == 0
        assert server.headers[0]["authorization"] == "Bearer sk-very-secret"
    written = b"".join(path.read_bytes() for path in work.rglob("*") if path.is_file())
    assert b"very-secret" not in written
    assert "very-secret" not in str(capsys.readouterr())


def test_pairs_get_new_negatives(work, capsys):
    rows = [{"question": f"question {n}", "positive": f"answer {n}", "negatives": ["old"]} for n in range(4)]
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with chat_server() as server:
        options = ["--regenerate-negatives", "pairs.jsonl", "--columns", "{query: question}", "--no-stream"]
        assert run(server.endpoint, *options) == 0
        assert "stream" not in server.requests[0]
    assert "wrote 4 records to out/records.jsonl" in capsys.readouterr().out
    first = json.loads((work / "out" / "records.jsonl").read_text().splitlines()[0])
    assert (first["query"], first["positive"]) == ("question 0", ["answer 0"])
    assert [negative["level"] for negative in first["negatives"]] == [1, 2, 3, 4]


def test_a_dry_run_prints_prompts_and_needs_neither_server_nor_client(work, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert run("http://nowhere.invalid/v1", "--dry-run", "--languages", "[Thai]") == 0
    printed = capsys.readouterr().out
    assert printed.count("=== ") == 10
    assert "Query and documents are in Thai" in printed
    (work / "pairs.jsonl").write_text('{"query": "a question", "positive": "its answer"}\n')
    assert run("http://nowhere.invalid/v1", "--dry-run", "--regenerate-negatives", "pairs.jsonl") == 0
    assert "its answer" in capsys.readouterr().out
    assert not (work / "out").exists()


def test_a_refusing_server_ends_with_code_2_and_nothing_is_written(work, capsys):
    with chat_server(lambda prompt, seed, count: Reply(status=404, error="unknown model")) as server:
        assert run(server.endpoint) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert "status 404" in error[-1]
    assert "unknown model" in error[-1]
    assert list(work.iterdir()) == []


def test_ctrl_c_says_how_many_answers_are_saved(work, capsys):
    def behaviour(prompt, seed, count):
        if len(server.requests) == 9:
            os.kill(os.getpid(), signal.SIGINT)
            return Reply("[]", seconds=2)
        return answers_well(prompt, seed, count)

    with chat_server(behaviour) as server:
        assert run(server.endpoint, "--num-examples", "20", "--concurrency", "1") == 130
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error == "interrupted: 8 answers are saved in out; the same command continues after them"
        first = {request["seed"] for request in server.requests[:8]}
        server.behaviour = answers_well
        assert run(server.endpoint, "--num-examples", "20") == 0
        assert not first & {request["seed"] for request in server.requests[9:]}
    assert "20 records of 20" in capsys.readouterr().out


def test_the_end_of_a_budget_says_what_is_missing(work, capsys):
    """After three good examples all answers are unusable, so the fourth is asked for until the budget ends."""

    def behaviour(prompt, seed, count):
        return answers_well(prompt, seed, count) if len(server.requests) <= 5 + 3 else Reply("{}")

    options = ["--num-examples", "12", "--num-brainstormed", "5", "--max-answer-tokens", "300", "--concurrency", "1"]
    options += ["--max-attempts", "50"]
    with chat_server(behaviour) as server:
        assert run(server.endpoint, *options, "--token-budget", "7000") == 0
    printed = capsys.readouterr().out
    report = json.loads((work / "out" / "manifest.json").read_text())["report"]
    needed, unasked, unfinished = (report[f"num_{name}"] for name in ("tokens_needed", "unasked", "unfinished"))
    assert report["prompt_tokens"] + report["completion_tokens"] + needed > 7000
    assert (sum(report["num_records"].values()), unfinished, unasked) == (3, 1, 8)
    assert f"the next request may take {needed:,} tokens, more than the token budget leaves;" in printed
    assert f"{unasked} records were not requested, {unfinished} have no usable answer yet;" in printed


BAD = [
    (["--columns", "{query: question}"], "columns needs --regenerate-negatives"),
    (["--suspect-rows", "keep"], "suspect_rows needs --regenerate-negatives"),
    (["--regenerate-negatives", "bad.jsonl", "--method", "nv_embed"], "method has no prompt for negatives"),
    (["--max-attempts", "0"], "max_attempts must be > 0"),
    (["--regenerate-negatives", "bad.jsonl"], "bad.jsonl:1"),
    (["--output", "bad.jsonl"], "bad.jsonl: already exists and has no manifest"),
]


@pytest.mark.parametrize(("options", "says"), BAD, ids=[" ".join(options) for options, _ in BAD])
def test_a_user_error_is_reported_in_one_line_with_code_2_and_nothing_is_written(options, says, work, capsys):
    (work / "bad.jsonl").write_text('{"query": 3, "positive": "a"}\n')
    with chat_server(answers_well) as server:
        assert_refused(capsys, work, says, run, server.endpoint, *options)
        assert server.requests == []
