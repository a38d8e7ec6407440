"""Single requests through the real client: options, streamed answers, refusals and failures."""

import asyncio
import time

import pytest

from embeddings.common import InputError, OptionError
from embeddings.synthesis.client import ChatClient, EndpointError, Limits, Sampling, make_request
from embeddings.synthesis.validate import Answer, RejectedAnswer
from tests.helpers.chat_server import Reply, chat_server
from tests.helpers.refusals import refused


def read(value):
    """Any answer but an empty object can be used."""
    if value == {}:
        raise RejectedAnswer("missing_field", "query")


REQUEST = make_request("example/short_long-0/0", "Write something.", 7, read)


def ask(reply, sampling=None, request=REQUEST, **limits):
    """The client's answer for a server's reply, and the server."""
    with chat_server(lambda prompt, seed, count: reply) as server:
        return ask_at(server.endpoint, sampling, request, **limits), server


def ask_at(endpoint, sampling=None, request=REQUEST, max_retries=0, **limits):
    client = ChatClient(endpoint, sampling or Sampling("some-model"), Limits(max_retries=max_retries, **limits))

    async def run():
        async with client.connected():
            return await client.ask(request)

    return asyncio.run(run())


def test_an_answer_has_its_token_counts():
    answer, server = ask(Reply("x" * 40))
    assert answer == Answer("x" * 40, "stop", None, 4, 10)
    (body,) = server.requests
    assert body == {
        "model": "some-model",
        "messages": [{"role": "user", "content": "Write something."}],
        "seed": REQUEST.seed,
        "temperature": 1.0,
        "max_tokens": 4096,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    "reply",
    [
        Reply('{"query": "é \\ud800"}\n', part_characters=1),
        Reply(None),
        Reply("", refusal="I will not"),
        Reply("x", finish_reason="length"),
        Reply("x", usage=False),
    ],
)
def test_a_streamed_answer_is_the_whole_answer(reply):
    (streamed, first), (whole, second) = (ask(reply, Sampling("m", stream=stream)) for stream in (True, False))
    assert streamed == whole
    assert first.requests[0]["stream"]
    assert "stream" not in second.requests[0]
    assert "stream_options" not in second.requests[0]


def test_the_options_of_a_request_reach_the_endpoint():
    sampling = Sampling("m", None, 99, "max_completion_tokens", {"reasoning_effort": "low"})
    _, server = ask(Reply("[1]"), sampling)
    (body,) = server.requests
    assert body["max_completion_tokens"] == 99
    assert body["reasoning_effort"] == "low"
    assert not {"temperature", "max_tokens"} & set(body)
    schema = {"type": "object", "properties": {}}
    for request, expected in ((REQUEST._replace(schema=schema), "json_schema"), (REQUEST, None)):
        _, server = ask(Reply("[1]"), Sampling("m", json_schema=True), request)
        form = server.requests[0].get("response_format", {})
        assert form.get("type") == expected
        assert form.get("json_schema", {}).get("schema") == request.schema


def test_examples_are_an_earlier_conversation():
    request = make_request("a/0", "last", 7, read, examples=[("first", "one"), ("second", "two")])
    _, server = ask(Reply("[1]"), request=request)
    messages = [(message["role"], message["content"]) for message in server.requests[0]["messages"]]
    expected = [("user", "first"), ("assistant", "one"), ("user", "second"), ("assistant", "two"), ("user", "last")]
    assert messages == expected
    assert request.num_bytes == 21
    # An answer to other examples is not used.
    assert request.key != make_request("a/0", "last", 7, read, examples=[("first", "one")]).key


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert ask(Reply("[1]"))[1].headers[0]["authorization"] == "Bearer none"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert ask(Reply("[1]"))[1].headers[0]["authorization"] == "Bearer sk-secret"


EVENTS = {"Content-Type": "text/event-stream"}
OTHER = Answer(None, refused="the response is not a chat completion")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(None), Answer(None, "stop", None, 4, 0)),
        (Reply("", refusal="I will not"), Answer("", "stop", "I will not", 4, 0)),
        (Reply("x", finish_reason="length", usage=False), Answer("x", "length")),
        (Reply(status=400, error="too long"), Answer(None, refused="status 400: too long")),
        (Reply(status=422, body=b'{"detail": "no seed"}'), Answer(None, refused="status 422: no seed")),
        (Reply(body=b'{"choices": [{"message": {"content": ["a"]}}]}'), Answer(None)),
        (
            Reply(body=b'{"choices": [{"message": {}}], "usage": {"prompt_tokens": "3", "completion_tokens": [1]}}'),
            Answer(None),
        ),
        (Reply(body=b'{"choices": [{"message": {}, "finish_reason": ["stop"]}]}'), Answer(None)),
        (Reply(body=b'{"choices": []}'), OTHER),
        (Reply(body=b'{"choices": [{"message": "x"}]}'), OTHER),
        (Reply(body=b'{"choices": [{"message": {"content": "x"}}], "usage": [1]}'), OTHER),
    ],
)
def test_refusals_and_responses_without_content_are_answers(reply, expected):
    assert ask(reply)[0] == expected


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(status=401, error="bad key"), "status 401"),
        (Reply(status=404, error="no model"), "the model's name"),
        (Reply(status=405), "status 405"),
    ],
)
def test_a_wrong_url_key_or_model_is_an_input_error(reply, says):
    refused(InputError, says, ask, reply)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(status=500), "status 500: no"),
        (Reply(status=429, code="insufficient_quota", error="pay"), "status 429: pay"),
        (Reply(status=402), "status 402: no"),
        (Reply(status=503, body=b"<title>Down</title>"), "status 503: <title>Down"),
        (Reply(status=429, headers={"Retry-After": "3600"}), "status 429: no"),
        (Reply(hangs_up=True), "no connection"),
        (Reply(body=b"<html>"), "status 200 without an answer: <html>"),
        (Reply(body=b"[1]"), "status 200 without an answer: [1]"),
        (Reply(body=b'{"error": "overloaded"}'), "status 200 without an answer: overloaded"),
        (Reply("[1]", seconds=0.6), "no part of an answer in 0.3 s"),
        (Reply("[1]", breaks_off=True), "the answer ended early"),
        (Reply(body=b'data: {"error": {"message": "overloaded"}}\n\n', headers=EVENTS), "broke off (overloaded)"),
        (Reply(body=b"data: {nonsense\n\n", headers=EVENTS), "the answer broke off ("),
        (Reply(body=b"no gzip", headers={"Content-Encoding": "gzip"}), "the answer broke off ("),
        (Reply(body=b"data: [1]\n\n", headers=EVENTS), "the answer broke off ("),
        (Reply(body=b'data: {"choices": {"a": 1}}\n\n', headers=EVENTS), "the answer broke off ("),
        (Reply(body=b'data: {"choices": [{"delta": "x"}]}\n\n', headers=EVENTS), "the answer broke off ("),
        (Reply(status=502, body=b""), "status 502: an empty response"),
    ],
)
def test_an_endpoint_that_does_not_answer_ends_the_job_with_code_74(reply, says):
    with pytest.raises(EndpointError) as failure:
        ask(reply, timeout_seconds=0.3)
    assert says in str(failure.value)
    assert "the same command resumes" in str(failure.value)
    assert failure.value.exit_code == 74


def test_an_endpoint_that_is_not_an_http_url_is_refused():
    refused(OptionError, "endpoint must be an HTTP URL", ChatClient, "ftp://x/v1", Sampling("m"))


def test_a_long_answer_needs_only_its_parts_in_time():
    start = time.monotonic()
    answer, _ = ask(Reply("x" * 640, trickle_seconds=0.1), timeout_seconds=1.0)
    assert (answer.content, time.monotonic() - start > 1.0) == ("x" * 640, True)


def test_an_answer_that_is_given_up_is_cancelled_at_the_server():
    reply = Reply("x" * 6400, trickle_seconds=0.25)
    with chat_server(lambda prompt, seed, count: reply) as server:
        with pytest.raises(EndpointError, match=r"no part of an answer in 0\.1 s"):
            ask_at(server.endpoint, timeout_seconds=0.1)
        deadline = time.monotonic() + 5
        while not server.num_cancelled and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.num_cancelled == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sampling("m", -0.1), "temperature must be >= 0"),
        (lambda: Sampling("m", float("nan")), "temperature must be >= 0"),
        (lambda: Sampling("m", max_answer_tokens=0), "max_answer_tokens must be > 0"),
        (lambda: Sampling("m", extra_body={"n": 2}), "extra_body must not contain"),
        (lambda: Limits(max_attempts=0), "max_attempts must be > 0"),
        (lambda: Limits(concurrency=0), "concurrency must be > 0"),
        (lambda: Limits(max_retries=-1), "max_retries must be >= 0"),
        (lambda: Limits(requests_per_minute=0), "requests_per_minute must be > 0"),
        (lambda: Limits(timeout_seconds=0), "timeout_seconds must be > 0"),
        (lambda: Limits(token_budget=0), "token_budget must be > 0"),
        (lambda: Limits(max_unusable=95), "max_unusable must be from 0 to 1, got 95"),
    ],
)
def test_invalid_numbers_and_fields_are_refused(make, says):
    assert Limits(max_retries=0).max_retries == Sampling("m", 0).temperature == 0
    refused(OptionError, says, make)
