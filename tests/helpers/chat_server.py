"""A deterministic language model and a local server with OpenAI's chat API."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """The server's reply to one request; `error` replaces the answer if the status is not 200.

    The server waits `seconds` before it sends anything, and `trickle_seconds` between tenths of the body. If the
    request asks for it, an answer is streamed: in parts of `part_characters`, without its end if `breaks_off`.
    """

    content: str | None = ""
    status: int = 200
    error: str = "no"
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    seconds: float = 0.0
    trickle_seconds: float = 0.0
    hangs_up: bool = False
    finish_reason: str = "stop"
    refusal: str | None = None
    usage: bool = True
    part_characters: int = 64
    breaks_off: bool = False


Behaviour = Callable[[str, int, int], Reply]


def written(prompt: str, seed: int) -> str:
    """A valid answer to a prompt of the package."""
    if prompt.startswith("Think up"):
        return json.dumps([f"Find texts number {n} about subject {seed}." for n in range(5)])
    if prompt.startswith("These examples"):
        # The text before the task is the seeds: answers of another model.
        prompt = re.split(r"\n\}\n\n(?!Task: )", prompt, maxsplit=1)[1]
    graded = re.findall(r'"similarity_level": "(\w+)"', prompt)
    names = re.findall(r'^(?:  |- )"(\w+)":', prompt, re.MULTILINE)
    value: dict[str, Any] = {name: f"{name} of number {seed}" for name in names}
    if graded:
        value[names[-1]] = [
            {"similarity_level": level, "text": f"negative {index} of number {seed}"}
            for index, level in enumerate(graded)
        ]
    return json.dumps(value)


def answers_well(prompt: str, seed: int, count: int) -> Reply:
    """Every answer is valid."""
    return Reply(written(prompt, seed))


def spoilt(text: str, kind: int) -> Reply:
    """A damaged answer; some kinds can be repaired, others must not get into the data."""
    unfinished = text[: len(text) // 2]
    kinds = [
        Reply(text),
        Reply(f"Here it is:\n```json\n{text}\n```\nI hope that it helps."),
        Reply(unfinished),
        Reply(unfinished, finish_reason="length"),
        Reply("I cannot help with that.", refusal="I cannot help with that."),
        Reply(None),
        Reply(text.replace('"low"', '"none"').replace("[", "{", 1)),
        Reply(re.sub(r'(of number \d+)"', r'\1 \\ud800"', text)),
        Reply(re.sub(r'": "[^"]*"', '": ""', text)),
        Reply(re.sub(r'": "[^"]*"', '": 7', text)),
        Reply("[" * 20_000),
        Reply(text.replace("}", ",}")),
    ]
    return kinds[kind % len(kinds)]


def answers_badly(prompt: str, seed: int, count: int) -> Reply:
    """The same answer to the same request, valid or damaged depending on the seed."""
    return spoilt(written(prompt, seed), seed)


class ChatServer:
    """The requests of a server; `behaviour` maps a prompt, a seed and their number of earlier requests to a reply."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.endpoint = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        # Requests whose client closed the connection before the answer was complete.
        self.num_cancelled = 0
        # The models that it lists; None for a server without a list.
        self.models: list[str] | None = ["m"]
        self._lock = threading.Lock()

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        request = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        prompt, seed = request["messages"][-1]["content"], request["seed"]
        with self._lock:
            count = sum(other["messages"] == request["messages"] and other["seed"] == seed for other in self.requests)
            self.requests.append(request)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        reply = self.behaviour(prompt, seed, count)
        time.sleep(reply.seconds)
        if reply.hangs_up:
            handler.close_connection = True
            return
        is_stream = bool(request.get("stream")) and reply.status == 200 and reply.body is None
        body = reply.body if reply.body is not None else json.dumps(_body(reply, prompt)).encode()
        kind = "text/event-stream" if is_stream else "application/json"
        handler.send_response(reply.status)
        for name, value in {"Content-Type": kind, **reply.headers}.items():
            handler.send_header(name, value)
        step = -(-len(body) // 10) if reply.trickle_seconds else len(body)
        pieces = [body[start : start + step] for start in range(0, len(body), max(1, step))]
        if is_stream:
            # The end of the connection ends the body.
            handler.send_header("Connection", "close")
            pieces = [f"data: {event}\n\n".encode() for event in _events(reply, prompt)]
        else:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        try:
            for piece in pieces:
                handler.wfile.write(piece)
                handler.wfile.flush()
                time.sleep(reply.trickle_seconds)
        except ConnectionError:
            with self._lock:
                self.num_cancelled += 1
            raise


@contextmanager
def chat_server(behaviour: Behaviour = answers_well) -> Iterator[ChatServer]:
    """A running server on a free local port."""
    chat = ChatServer(behaviour)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Sends headers and body in one packet, to avoid delayed acknowledgements.
        wbufsize = -1

        def do_POST(self) -> None:
            with suppress(ConnectionError):
                chat.serve(self)

        def do_GET(self) -> None:
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in chat.models or []]
            body = json.dumps({"object": "list", "data": models}).encode()
            self.send_response(404 if chat.models is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, *arguments: Any) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as server:
        chat.endpoint = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield chat
        finally:
            server.shutdown()
            thread.join()


def _body(reply: Reply, prompt: str) -> dict[str, Any]:
    if reply.status != 200:
        return {"error": {"message": reply.error, "code": reply.code, "type": "x", "param": None}}
    message = {"role": "assistant", "content": reply.content, "refusal": reply.refusal}
    body: dict[str, Any] = {
        "id": "a",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason}],
    }
    if reply.usage:
        tokens = len(prompt) // 4, len(reply.content or "") // 4
        body["usage"] = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    return body


def _events(reply: Reply, prompt: str) -> Iterator[str]:
    """The events of a streamed answer: its parts, its end, and its tokens."""
    whole = _body(reply, prompt)
    common = {**whole, "object": "chat.completion.chunk"}
    usage = common.pop("usage", None)

    def event(delta: dict[str, Any], finish_reason: str | None = None) -> str:
        return json.dumps({**common, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

    yield event({"role": "assistant", "content": "" if reply.content == "" else None, "refusal": reply.refusal})
    content = reply.content or ""
    for start in range(0, len(content), reply.part_characters):
        yield event({"content": content[start : start + reply.part_characters]})
    if not reply.breaks_off:
        yield event({}, reply.finish_reason)
        if usage is not None:
            yield json.dumps({**common, "choices": [], "usage": usage})
        yield "[DONE]"
