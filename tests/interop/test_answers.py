"""Servers that fail or answer with something else than vectors: one line each, exit code 2, and no key in it."""

import json

import numpy as np
import pytest

from embeddings.cli.main import main
from embeddings.common import TextSettings
from embeddings.inference.encoder import Encoder
from embeddings.interop.golden import add_golden
from embeddings.models import Embedder, MeanPooling
from tests.helpers.embedding_server import Answer, embedding_server
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer

PROMPTS = {"query": "search_query: "}
KEY = "sk-very-secret-0123456789"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    text = TextSettings(64, 64, prompts=PROMPTS, pool_prompt=True)
    Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32), text=text).save_pretrained(folder)
    add_golden(folder)
    return folder


@pytest.fixture(scope="module")
def right(model):
    encoder = Encoder.from_pretrained(str(model), precision="float32", device="cpu")
    return lambda texts, role: encoder.encode(texts, role=role)


def replaced(vectors, value):
    vectors = np.array(vectors)
    vectors[3, 5] = value
    return vectors


def body(text, **options):
    return lambda *_: Answer(body=text if isinstance(text, bytes) else text.encode(), **options)


BAD = {
    "HTML": (body("<html>Welcome</html>"), "does not answer with JSON ('<html>Welcome</html>')"),
    "deep": (body("[" * 100_000), "does not answer with JSON"),
    "an error with the key": (
        body(json.dumps({"error": {"message": f"bad key {KEY}"}}), status=401),
        "answers with 401: bad key (the key); check --url, --api and --name",
    ),
    "not found": (body("<html>", status=404), "answers with 404 (Not Found)"),
    "a refusal": (body('{"detail": [{"msg": "no"}]}', status=422), 'answers with 422: [{"msg": "no"}]'),
    "an error of 200": (body('{"error": {"message": "no model"}}'), "does not answer with vectors"),
    "a redirect": (
        body("", status=307, headers={"Location": "http://example.invalid/v1"}),
        "answers with 307, a redirect to http://example.invalid/v1; give that address",
    ),
    "too few": (lambda texts, _: np.ones((len(texts) - 1, 32)), "answers with 15 vectors for 16 texts"),
    "no width": (lambda texts, _: np.ones((len(texts), 0)), "does not answer with vectors of numbers"),
    "words": (lambda texts, _: np.full((len(texts), 2), "0.5"), "does not answer with vectors of numbers"),
    "hangs up": (lambda *_: Answer(hangs_up=True), "cannot be reached"),
    "cut off": (body("[[1.0", missing_bytes=50), "cannot be reached (IncompleteRead(5 bytes read, 50 more expected))"),
    "slow": (lambda *_: Answer(body=b"[]", seconds=2.0), "has not answered within 0.5 s"),
}


def ask(capsys, model, address, *words):
    capsys.readouterr()
    code = main(["verify", "--model", str(model), "--url", address, *words])
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err
    return code, captured


@pytest.mark.parametrize("case", BAD)
def test_a_server_that_does_not_answer_with_vectors_is_reported_in_one_line(case, model, capsys, monkeypatch):
    behaviour, says = BAD[case]
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with embedding_server(behaviour, PROMPTS) as server:
        address = server.address + ("/embed" if len(case) % 2 else "")
        code, captured = ask(capsys, model, address, "--timeout-seconds", "0.5")
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1), captured
    assert captured.err.startswith(f"error: {server.address}/")
    assert says in captured.err
    assert set(server.keys) == {f"Bearer {KEY}"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(value, model, right, capsys):
    with embedding_server(lambda texts, role: replaced(right(texts, role), value), PROMPTS) as server:
        code, captured = ask(capsys, model, f"{server.address}/v1/embeddings")
    assert (code, "answers with NaN or infinite numbers; check the server's precision" in captured.err) == (2, True)


def test_vectors_of_different_widths_are_refused(model, capsys):
    rows = json.dumps([[0.5] * (3 + place % 2) for place in range(16)])
    with embedding_server(body(rows), PROMPTS) as server:
        code, captured = ask(capsys, model, f"{server.address}/embed")
    assert (code, "answers with vectors of different widths" in captured.err) == (2, True)


def test_a_request_has_the_model_the_prompt_and_the_key_but_only_if_there_is_one(model, right, capsys, monkeypatch):
    with embedding_server(right, PROMPTS) as server:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        assert ask(capsys, model, server.address, "--name", "mine")[0] == 0
        monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
        assert ask(capsys, model, server.address, "--api", "tei")[0] == 0
    assert server.keys == [None, None, f"Bearer {KEY}", f"Bearer {KEY}"]
    first, second, third, fourth = server.requests
    assert {first["model"], second["model"], first["encoding_format"]} == {"mine", "float"}
    assert all(text.startswith("search_query: ") for text in first["input"])
    assert [text.removeprefix("search_query: ") for text in first["input"]] == second["input"] == third["inputs"]
    assert (third["prompt_name"], "prompt_name" in fourth, third["truncate"], third["normalize"]) == (
        "query",
        False,
        True,
        True,
    )


def test_a_key_that_a_header_cannot_have_is_not_shown(model, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nx: y")
    code, captured = ask(capsys, model, "http://127.0.0.1:9/v1")
    assert (code, "OPENAI_API_KEY: has characters that are not allowed" in captured.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--url", "ftp://host/v1"], "url must be an HTTP URL"),
        (["--url", "http://"], "url must be an HTTP URL"),
        (["--url", "localhost:8000"], "url must be an HTTP URL"),
        (["--url", f"http://me:{KEY}@host/v1"], "url: must not contain a user name or a password"),
        (["--url", "http://127.0.0.1:9/v1"], "cannot be reached"),
        (["--url", "http://127.0.0.1:9/v1", "--timeout-seconds", "0"], "timeout_seconds must be > 0"),
        (["--url", "http://127.0.0.1:9/v1", "--timeout-seconds", ".inf"], "timeout_seconds must be > 0 and at most"),
        (["--url", "http://127.0.0.1:9/v1", "--library", "ours"], "library has no effect with --url"),
        (["--api", "tei"], "api has no effect without --url"),
        (["--write", "--url", "http://127.0.0.1:9/v1"], "url has no effect with --write"),
        (["--min-cosine", "0"], "min_cosine must be above 0"),
        (["--library", "sentence-transformers", "--precision", "int8"], "precision is not offered"),
        (["--library", "onnx", "--precision", "bfloat16"], "precision has no effect with --library onnx"),
        (["--trust-code"], "trust_code has no effect without --library sentence-transformers"),
    ],
)
def test_options_that_cannot_apply_are_refused(words, says, model, capsys):
    capsys.readouterr()
    assert main(["verify", "--model", str(model), *words]) == 2
    error = capsys.readouterr().err
    assert (error.count("\n"), says in error, KEY in error) == (1, True, False), error
