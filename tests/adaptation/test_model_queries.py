"""Queries by a language model: prompts, which answers are used, what is asked twice, and what is written."""

import json
import logging
import re
from collections import Counter

import pytest

from embeddings.adaptation import queries
from embeddings.adaptation.candidates import Candidate, Passage, WordStatistics
from embeddings.adaptation.model_queries import (
    INSTRUCTION,
    NUM_EXAMPLES,
    Examples,
    QueryModel,
    cleaned,
    prompt_of,
    read_line,
    read_query,
)
from embeddings.adaptation.queries import QuerySettings, make_queries
from embeddings.common import InputError
from embeddings.common.random import derive_seed
from embeddings.synthesis.client import EndpointError
from embeddings.synthesis.validate import Answer, RejectedAnswer
from tests.adaptation.world import PLACES, VERBS, passage_rows, read_rows
from tests.data.rows import write_rows
from tests.helpers.chat_server import Reply, chat_server
from tests.helpers.refusals import refused


@pytest.fixture(scope="module")
def rows():
    return passage_rows()


@pytest.fixture(scope="module")
def passages(rows, tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("passages") / "passages.jsonl", rows)


def passage_in(prompt):
    """The text of the passage that a prompt asks about, with its title."""
    return prompt.removeprefix("Passage: ").partition("\n\n")[0]


def well(prompt):
    """A query with two rare words of the passage, and a word that it lacks."""
    new = re.findall(r"near (\w+) \w+\.", passage_in(prompt))
    return f"why {new[0]} comes before {new[1]} in {'x'.join(new[2:4])}"


def writes_well(prompt, seed, count):
    return Reply(f"{well(prompt)}\n")


def ask(server, passages, output, **options):
    return make_queries(passages, output, model=QueryModel(server.endpoint, **options))


def keys_of(folder):
    """The keys of all saved answers of an output."""
    paths = folder.with_name(f"{folder.name}.work").glob("*/journal.jsonl")
    return [json.loads(line)["key"] for path in paths for line in path.read_bytes().split(b"\n")[:-1]]


# Answers.


@pytest.mark.parametrize(
    "line",
    [
        "how fast is the boundary layer",
        '"how fast is the boundary layer"',
        "1. how fast is the boundary layer",
        "- **how fast is the boundary layer**",
        "Query: how fast is the boundary layer",
        'Search query: "how fast is the boundary layer"',
        "Sure! Here's a possible search query: how fast is the boundary layer",
        "2) Question 2: «how fast is the boundary layer»",
    ],
)
def test_an_answer_is_cleaned(line):
    assert cleaned(line) == "how fast is the boundary layer"


def test_words_before_a_colon_that_are_no_label_stay():
    for line in ("SQL query: how to join", "python: list or tuple", 'what does "stall" mean', "3 phase motors"):
        assert cleaned(line) == line


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("I'm sorry, but I cannot help with that.", "refused"),
        ("I’m sorry, I don't understand the question.", "refused"),
        ("Query: I cannot provide a search query for", "refused"),
        ("As an AI language model, I do not have access", "refused"),
        ("Es tut mir leid, das kann ich nicht", "refused"),
        ("抱歉，我无法回答", "refused"),
        ("", "empty_answer"),
        (None, "empty_answer"),
        ("Here is a search query:", "empty_answer"),
        ("how to measure\x07 the layer", "unusable_text"),
    ],
)
def test_an_answer_without_a_query_is_rejected(content, reason):
    with pytest.raises(RejectedAnswer) as raised:
        read_line(Answer(content, "stop"))
    assert raised.value.reason == reason


def test_only_a_finished_line_is_read():
    for answer in (Answer("what is a", "length"), Answer(None, refused="filtered"), Answer("x y z", "content_filter")):
        with pytest.raises(RejectedAnswer, match=r"cut_off|refused"):
            read_line(answer)
    # A server that does not stop at the end of the line.
    assert read_line(Answer("Here is a query:\n\nwhat is lift\n\nPassage: and", "length")) == "what is lift"
    assert read_line(Answer("I can't log in to my account", "stop")) == "I can't log in to my account"


@pytest.fixture(scope="module")
def example(rows):
    """A passage, examples for it, and the words of all passages."""
    each = [Passage(row["_id"], row["title"], row["text"], row["document"], row["file"]) for row in rows]
    offered = [
        Candidate(row.text.split(".")[0], "sentence", row.title, ".".join(row.text.split(".")[1:]), row.id, "d")
        for row in each[:40]
    ]
    statistics = WordStatistics([(row.id, f"{row.title} {row.text}") for row in each])
    passage = each[100]
    return passage, Examples(offered, 0).of(passage), statistics


def test_copies_and_echoes_are_rejected_with_their_reasons(example):
    passage, examples, statistics = example
    shown = examples[0].positive.split()
    cases = {
        passage.title.replace(" >", ""): "repeats the title",
        passage.text.split(".")[1].strip(): "copied from the rest",
        "what is the weather like in april": "shares too little with the rest",
        "ok": "too short",
        examples[-1].query.lower(): "echoed prompt",
        " ".join(shown[2:9]): "echoed prompt",
        "A short search query that this passage answers": "echoed prompt",
        f"{INSTRUCTION} fast": "echoed prompt",
        "Passage: how it works": "echoed prompt",
    }
    for query, expected in cases.items():
        with pytest.raises(RejectedAnswer) as raised:
            read_query(query, passage, examples, statistics)
        assert (query, raised.value.cause) == (query, expected)
    query = well(prompt_of(passage.text))
    candidate = read_query(query, passage, examples, statistics)
    assert candidate == (query, "model", passage.title, passage.text, passage.id, passage.document, "")


def test_examples_are_of_other_passages_in_the_same_language():
    german = "Der Motor wird mit dem Öl aus dem Tank versorgt, und der Druck ist in der Anzeige zu sehen"
    english = "The motor is fed with the oil of the tank, and the pressure can be seen on the dial as it is"
    offered = [
        Candidate(f"{kind} {language} {row}", kind, "", text, f"{language}{row}", "d")
        for row in range(30)
        for kind in ("sentence", "question")
        for language, text in (("german", german), ("english", english))
    ]
    examples = Examples(offered, 0)
    for language, text in (("german", german), ("english", english)):
        found = examples.of(Passage(f"{language}7", "", f"{text}. {text}", "d", ""))
        assert len(found) == NUM_EXAMPLES
        assert all(language in each.query and each.passage != f"{language}7" for each in found)
        assert {each.kind for each in found} == {"sentence", "question"}
    assert Examples([], 0).of(Passage("p", "", "text", "d", "")) == []


# Jobs.


def test_training_passages_get_queries_that_pass_all_filters(rows, passages, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    with chat_server(writes_well) as server:
        report = ask(server, passages, tmp_path / "out", max_requests=60)
    assert len(server.requests) == report.kinds["model"]["proposed"] == 60
    pairs, found = (read_rows(tmp_path / "out" / name) for name in ("pairs.jsonl", "pairs-model.jsonl"))
    assert {row["kind"] for row in found} == {"model"}
    assert 55 <= len(found) == report.kinds["model"]["training"] == report.counts["model_pairs"]
    assert report.kinds["model"]["pseudo_test"] == 0
    row_of = {row["_id"]: row for row in rows}
    for row in found:
        passage = row_of[row["passage"]]
        assert row["positive"] == f"{passage['title']} {passage['text']}"
        assert re.match(r"why (\w+) ", row["query"])[1] in passage["text"]
    test = read_rows(tmp_path / "out" / "evaluation-pseudo" / "queries.jsonl")
    assert {row["kind"] for row in test} == {"sentence", "heading"}
    tested = {row_of[row["passage"]]["document"] for row in test}
    assert tested.isdisjoint(row["document"] for row in found)
    # The other pairs are those of a run without a model.
    make_queries(passages, tmp_path / "without")
    assert read_rows(tmp_path / "without" / "pairs.jsonl") == pairs
    assert report.counts["pairs"] == len(pairs)
    assert not (tmp_path / "without" / "pairs-model.jsonl").exists()
    # Real queries that replace the documents' own leave the model's as they are.
    monkeypatch.setattr(queries, "ENOUGH_REAL", 15)
    log = [{"query": f"where is {row['text'].split()[1]}", "passage": row["_id"]} for row in rows[:120:3]]
    with chat_server(writes_well) as other:
        make_queries(
            passages,
            tmp_path / "real",
            log=write_rows(tmp_path / "log.jsonl", log),
            settings=QuerySettings(hold_out_judged=False, training_share=0.5),
            model=QueryModel(other.endpoint, max_requests=60),
        )
    for name, kind in (("pairs.jsonl", "real"), ("pairs-model.jsonl", "model")):
        assert {row["kind"] for row in read_rows(tmp_path / "real" / name)} == {kind}
    # What was sent: examples of other passages, one short line, and the model that the server lists.
    body = server.requests[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["stop"]) == ("m", 32, 0.7, ["\n"])
    assert body["stream"]
    offered = {(row["query"], row["positive"]) for row in pairs}
    for request in server.requests:
        *examples, question = [message["content"] for message in request["messages"]]
        assert question.endswith(INSTRUCTION)
        assert len(examples) == 2 * NUM_EXAMPLES
        shown = zip(examples[::2], examples[1::2], strict=True)
        assert sum((query, passage_in(text)) in offered for text, query in shown) >= 2
    # The cost is said before it is spent.
    line = next(message for message in caplog.messages if "requests, some" in message)
    num_tokens = int(re.search(r"some ([\d,]+) tokens", line)[1].replace(",", ""))
    prompts = sum(len(message["content"]) for request in server.requests for message in request["messages"])
    assert line.startswith("m: 60 requests, ")
    assert num_tokens == pytest.approx(prompts / 4, rel=0.02)
    assert "at most 1,920 of answers; 0 answers are saved" in line


def test_rejected_answers_are_saved_and_counted_by_reason(passages, tmp_path):
    """Good answers too, by the filters that compare queries."""

    def behaviour(prompt, seed, count):
        title, _, text = passage_in(prompt).partition(" The ")
        sentence = text.partition(".")[0]
        absent = [each for each in (*VERBS, *PLACES) if each not in text]
        kinds = {
            0: "I'm sorry, but I can't assist with that.",
            1: title.replace(" >", ""),
            2: "Write one line: a short search query that this passage answers",
            3: f"The {sentence}",
            4: "which of them all is it",
            # The same for passages of a document.
            6: f"why is {title.split()[0]} near the reactor",
            # Nearly a sentence that the passage offers.
            7: f"The {sentence}x",
            # Words that other passages have.
            8: f"{text.split()[1]} {' '.join(absent[:8])} near",
        }
        return Reply(kinds.get(seed % 10, well(prompt)), finish_reason="length" if seed % 10 == 5 else "stop")

    with chat_server(behaviour) as server:
        report = ask(server, passages, tmp_path / "out", max_requests=200)
    count = Counter(request["seed"] % 10 for request in server.requests)
    assert min(count.values()) > 5
    rejected = report.kinds["model"]["rejected"]
    expected = ("refused", "repeats the title", "echoed prompt", "copied from the rest")
    assert [rejected[reason] for reason in expected] == [count[each] for each in range(4)]
    assert rejected["shares too little with the rest"] >= count[4]
    assert rejected["cut off"] == count[5]
    asked = [request for request in server.requests if request["seed"] % 10 == 6]
    topics = [passage_in(request["messages"][-1]["content"]).split()[0] for request in asked]
    num_same = sum(topics.count(topic) > 1 for topic in topics)
    assert num_same == rejected["several passages have it"] > 2
    assert rejected["near-copy of another query"] > 5
    assert rejected["not found by the rest of its passage"] > 5
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["kinds"]["model"]["rejected"] == rejected
    assert sum(rejected.values()) + summary["kinds"]["model"]["training"] == 200
    assert len(keys_of(tmp_path / "out")) == 200


def test_no_query_of_a_model_resembles_an_evaluation_query(rows, passages, tmp_path):
    with chat_server(writes_well) as server:
        model = QueryModel(server.endpoint, "m", 30)
        make_queries(passages, tmp_path / "first", model=model)
        found = [row["query"] for row in read_rows(tmp_path / "first" / "pairs-model.jsonl")]
        log = [{"query": f"{query} today", "passage": rows[0]["_id"]} for query in found[:5]]
        write_rows(tmp_path / "log.jsonl", log)
        make_queries(passages, tmp_path / "second", log=tmp_path / "log.jsonl", model=model)
    kept = {row["query"] for row in read_rows(tmp_path / "second" / "pairs-model.jsonl")}
    assert len(kept & {*found[5:]}) > 10
    assert kept.isdisjoint(found[:5])


def test_a_model_whose_answers_are_all_unusable_is_an_input_error_with_two_of_them(passages, tmp_path):
    def behaviour(prompt, seed, count):
        return Reply(f"I'm sorry, I cannot answer number {seed}.")

    for number, what in ((10, "all 10"), (200, "20 of the last 20")):
        with chat_server(behaviour) as server:
            message = refused(
                InputError, f"m: {what} answers", ask, server, passages, tmp_path / "out", max_requests=number
            )
        assert message.count("refused: \"I'm sorry, I cannot answer number") == 2
        assert "name a stronger model, or leave out --endpoint" in message
        assert not (tmp_path / "out").exists()
        assert not [*tmp_path.rglob("rejected.jsonl")]
        assert len(server.requests) < 40


def test_a_server_that_is_not_there_or_lists_no_single_model_is_refused_before_any_work(passages, tmp_path):
    with chat_server(writes_well) as server:
        for models, says in (
            ([], "does not list its models"),
            (None, "status 404"),
            (["a", "b"], r"2 models \(a, b\)"),
        ):
            server.models = models
            message = refused(InputError, says, ask, server, passages, tmp_path / "out")
            assert "name the model by --endpoint-model" in message
        # A server without a list is asked for the model that is named.
        server.models = None
        assert ask(server, passages, tmp_path / "named", model="x", max_requests=3).kinds["model"]["proposed"] == 3
        assert {request["model"] for request in server.requests} == {"x"}
    message = refused(InputError, "no connection", ask, server, passages, tmp_path / "out", model="m")
    assert "start the server" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["named", "named.work"]


def think_up(prompt, seed, count):
    """A strong model: five kinds of search for a list of passages, of which one is known, and good queries."""
    if "Think up kinds of search" in prompt:
        kinds = [f"Given part {seed} {row}, find its place." for row in range(4)]
        return Reply(json.dumps([*kinds, "Given a machine, find its parts."]))
    return writes_well(prompt, seed, count)


def test_a_strong_model_thinks_up_kinds_of_search_and_writes_a_query_of_one_for_each_passage(
    rows, passages, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    with chat_server(think_up) as server:
        report = ask(server, passages, tmp_path / "out", max_requests=60, form="tasks")
        lists, requests = server.requests[:5], server.requests[5:]
        assert len(requests) == report.kinds["model"]["proposed"] == 60
        assert report.kinds["model"]["training"] >= 55
        # A list is for ten training passages, and no passage is in two.
        shown = [
            text.removeprefix("Passage: ").rstrip("…").strip()
            for body in lists
            for text in body["messages"][0]["content"].split("\n\n")
            if text.startswith("Passage: ")
        ]
        assert len(shown) == len({*shown}) == 50
        test = {row["passage"] for row in read_rows(tmp_path / "out" / "evaluation-pseudo" / "queries.jsonl")}
        held_out = {row["document"] for row in rows if row["_id"] in test}
        document_of = {
            text: row["document"] for text in shown for row in rows if f"{row['title']} {row['text']}".startswith(text)
        }
        assert len(document_of) == 50
        assert held_out.isdisjoint(document_of.values())
        assert all("stop" not in body and body["max_tokens"] == 2_048 for body in lists)
        prompts = [body["messages"][0]["content"] for body in requests]
        assert all(len(body["messages"]) == 1 and body["stop"] == ["\n"] for body in requests)
        assert {body["max_tokens"] for body in requests} == {64}
        kinds = [re.search(r"^Kind of search: (.+)$", prompt, re.MULTILINE)[1] for prompt in prompts]
        # Four different of each list, and that which all have.
        assert 15 <= len({*kinds}) <= 21
        assert any(kind.startswith("Given a machine") for kind in kinds)
        drawn = [re.search(r"is (.+), has (.+), is (.+), and takes (.+) education", each).groups() for each in prompts]
        assert [len({*values}) for values in zip(*drawn, strict=True)] == [3, 3, 3, 3]
        assert len({*drawn}) > 20
        assert "m: 60 passages asked about by 21 kinds of search, " in report.notes[-1]
        announced = [message for message in caplog.messages if "requests, some" in message]
        assert [line.partition(",")[0] for line in announced] == ["m: 5 requests", "m: 60 requests"]
        # More requests change no earlier one.
        server.requests.clear()
        ask(server, passages, tmp_path / "out", max_requests=70, form="tasks")
        assert len(server.requests) == 10


def test_lists_of_kinds_that_cannot_be_used_are_left_out_and_none_is_an_error(passages, tmp_path):
    def behaviour(prompt, seed, count):
        lists.extend([prompt] if "Think up kinds of search" in prompt else [])
        return Reply("I'm sorry.") if lists[:num_bad].count(prompt) else think_up(prompt, seed, count)

    lists, num_bad = [], 3
    with chat_server(behaviour) as server:
        report = ask(server, passages, tmp_path / "out", max_requests=20, form="tasks")
        assert "by 9 kinds of search" in report.notes[-1]
        # Few requests do not make the lists shorter.
        assert [prompt.count("Passage: ") for prompt in lists] == [10] * 5
        # The other form makes other queries.
        assert not ask(server, passages, tmp_path / "out", max_requests=20).reused
        num_bad = 10
        message = refused(
            InputError, "m: all 5 answers are unusable", ask, server, passages, tmp_path / "none", form="tasks"
        )
    assert "name a stronger model" in message
    assert not (tmp_path / "none").exists()


def test_a_command_that_ended_asks_nothing_twice_and_ends_with_the_same_files(passages, tmp_path):
    folder = tmp_path / "ended"
    with chat_server(writes_well) as server:
        model = QueryModel(server.endpoint, max_requests=40)
        make_queries(passages, tmp_path / "whole", model=model)
        server.behaviour = lambda *asked: Reply(status=402) if len(server.requests) > 55 else writes_well(*asked)
        refused(EndpointError, "status 402", make_queries, passages, folder, model=model)
        assert not folder.exists()
        saved = keys_of(folder)
        assert 10 <= len(saved) <= 15
        server.behaviour = writes_well
        server.requests.clear()
        make_queries(passages, folder, model=model)
        names = ("pairs-model.jsonl", "summary.json")
        contents = [[(path / name).read_bytes() for name in names] for path in (folder, tmp_path / "whole")]
        # The line about the answers names their folder.
        assert contents[0][0] == contents[1][0]
        assert contents[0][1] == contents[1][1].replace(b"whole.work", b"ended.work")
        assert len(server.requests) == 40 - len(saved)
        seeds = {derive_seed(0, "request", key.rpartition("/")[0]) % 2**31 for key in saved}
        assert seeds.isdisjoint(request["seed"] for request in server.requests)
        # More requests keep the answers; a finished command sends none.
        server.requests.clear()
        assert make_queries(passages, folder, model=model).reused
        assert not server.requests
        ask(server, passages, folder, max_requests=50)
        assert len(server.requests) == 10
    assert len(keys_of(folder)) == len(set(keys_of(folder))) == 50
