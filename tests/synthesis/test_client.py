"""One request through the real client to a server that answers well, badly, slowly, and not at all."""

import asyncio
import sys

import pytest

from embeddings.common import InputError, MissingExtraError, OptionError
from embeddings.synthesis.client import ChatClient, Sampling, UnansweredError, make_request
from embeddings.synthesis.validate import Answer
from tests.helpers.chat_server import Reply, chat_server

REQUEST = make_request("example/short_long-0/0", "Write something.", 7)
LIST_REQUEST = make_request("tasks/short_long/0", "Write a list.", 7, wants_object=False)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def ask(reply, sampling=None, request=REQUEST, timeout_seconds=5.0):
    """The answer that the client gets where the server replies like this, and the server."""
    with chat_server(lambda prompt, seed, count: reply) as server:
        return ask_at(server.endpoint, sampling, request, timeout_seconds), server


def ask_at(endpoint, sampling=None, request=REQUEST, timeout_seconds=5.0):
    client = ChatClient(endpoint, sampling or Sampling("some-model"), timeout_seconds)

    async def run():
        async with client.connected():
            return await client.ask(request)

    return asyncio.run(run())


def test_an_answer_comes_with_its_counts():
    answer, server = ask(Reply("x" * 40))
    assert answer == Answer("x" * 40, "stop", None, 4, 10)
    (body,) = server.requests
    assert body == {
        "model": "some-model",
        "messages": [{"role": "user", "content": "Write something."}],
        "seed": REQUEST.seed,
        "temperature": 1.0,
        "max_tokens": 4096,
    }


def test_the_options_of_a_request_reach_the_endpoint():
    sampling = Sampling("m", None, 99, "max_completion_tokens", True, {"reasoning_effort": "low"})
    _, server = ask(Reply("x"), sampling)
    (body,) = server.requests
    assert body["max_completion_tokens"] == 99
    assert body["response_format"] == {"type": "json_object"}
    assert body["reasoning_effort"] == "low"
    assert not {"temperature", "max_tokens"} & set(body)
    _, server = ask(Reply("x"), sampling, LIST_REQUEST)
    assert "response_format" not in server.requests[0]


def test_the_key_comes_from_the_environment(monkeypatch):
    assert ask(Reply("x"))[1].headers[0]["authorization"] == "Bearer none"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert ask(Reply("x"))[1].headers[0]["authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(None), Answer(None, "stop", None, 4, 0)),
        (Reply("", refusal="I will not"), Answer("", "stop", "I will not", 4, 0)),
        (Reply("x", finish_reason="length", usage=False), Answer("x", "length")),
        (Reply(status=400, error="too long"), Answer(None, refused="status 400: too long")),
        (Reply(body=b'{"choices": [{"message": {"content": ["a"]}}], "usage": {"prompt_tokens": -1}}'), Answer(None)),
    ],
)
def test_answers_without_a_text_are_answers_too(reply, expected):
    assert ask(reply)[0] == expected


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(status=401, error="bad key"), "status 401"),
        (Reply(status=404, error="no model"), "--model"),
        (Reply(status=405), "status 405"),
    ],
)
def test_a_wrong_address_key_or_model_is_the_users_to_mend(reply, says):
    with pytest.raises(InputError, match=says):
        ask(reply)


@pytest.mark.parametrize(
    ("reply", "says", "wait", "is_final"),
    [
        (Reply(status=500), "status 500", None, False),
        (Reply(status=408), "status 408", None, False),
        (Reply(status=429, headers={"Retry-After": "2.5"}), "status 429", 2.5, False),
        (Reply(status=429, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), "status 429", None, False),
        (Reply(status=429, headers={"Retry-After": "inf"}), "status 429", None, False),
        (Reply(status=429, code="insufficient_quota"), "status 429", None, True),
        (Reply(status=402), "status 402", None, True),
        (Reply(hangs_up=True), "no connection", None, False),
        (Reply(body=b"<html>"), "no chat completion", None, False),
        (Reply(body=b'{"choices": []}'), "no chat completion", None, False),
        (Reply(body=b'{"choices": [{"message": "x"}]}'), "no chat completion", None, False),
        (Reply(body=b'{"choices": [{"message": {"content": "x"}}], "usage": [1]}'), "no chat completion", None, False),
        (Reply(body=b"x", headers={"Content-Type": "text/plain"}), "no chat completion", None, False),
    ],
)
def test_what_may_be_better_next_time_is_unanswered(reply, says, wait, is_final):
    with chat_server(lambda prompt, seed, count: reply) as server:
        with pytest.raises(UnansweredError, match=says) as failure:
            ask_at(server.endpoint)
        assert len(server.requests) == 1
    assert (failure.value.retry_after_seconds, failure.value.is_final) == (wait, is_final)


@pytest.mark.parametrize("reply", [Reply("x", seconds=0.6), Reply("x", trickle_seconds=0.08)])
def test_an_answer_that_is_late_or_trickles_in_is_waited_for_only_so_long(reply):
    with pytest.raises(UnansweredError, match=r"no answer in 0\.3 s"):
        ask(reply, timeout_seconds=0.3)
    assert ask(Reply("x", seconds=0.05))[0].content == "x"


@pytest.mark.parametrize("endpoint", ["localhost:8000", "ftp://x/v1", "http://", "http://x:port/v1", ""])
def test_what_is_no_address_is_refused(endpoint):
    with pytest.raises(OptionError, match="endpoint must be an address"):
        ChatClient(endpoint, Sampling("m"))


def test_a_temperature_that_is_no_number_is_refused():
    with pytest.raises(OptionError, match="temperature"):
        Sampling("m", float("nan"))


def test_a_missing_client_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.\[synthesis\]'"):
        ChatClient("http://x/v1", Sampling("m"))


def test_a_key_holds_the_prompts_hash_and_seeds_differ():
    other = make_request("example/short_long-0/0", "Write something else.", 7)
    assert other.key != REQUEST.key
    assert other.seed == REQUEST.seed
    assert make_request("example/short_long-0/1", "Write something.", 7).seed != REQUEST.seed
    assert make_request("example/short_long-0/0", "Write something.", 8).seed != REQUEST.seed
