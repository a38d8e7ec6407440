"""A local server with the embedding APIs of OpenAI and of text-embeddings-inference."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np


@dataclass
class Answer:
    """The server's reply after `seconds`; `body` replaces the vectors."""

    vectors: Any = None
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    missing_bytes: int = 0
    hangs_up: bool = False


# Maps texts without their prompt and a role to vectors or to a reply.
Behaviour = Callable[[Sequence[str], str], Any]


class EmbeddingServer:
    """The requests of a server; `prompts` are removed from the texts of OpenAI's API, to find their role."""

    def __init__(self, behaviour: Behaviour, prompts: dict[str, str]) -> None:
        self.behaviour, self.prompts = behaviour, prompts
        self.address = ""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        self.requests.append(request)
        self.keys.append(handler.headers.get("authorization"))
        is_tei = handler.path == "/embed"
        assert is_tei or handler.path == "/v1/embeddings"
        texts, role = request["inputs" if is_tei else "input"], request.get("prompt_name", "document")
        if not is_tei:
            # The longest prompt first: one of them may be empty.
            ordered = sorted(self.prompts.items(), key=lambda item: -len(item[1]))
            role, prompt = next(item for item in ordered if all(text.startswith(item[1]) for text in texts))
            texts = [text.removeprefix(prompt) for text in texts]
        found = self.behaviour(texts, role)
        answer = found if isinstance(found, Answer) else Answer(found)
        time.sleep(answer.seconds)
        if answer.hangs_up:
            handler.close_connection = True
            return
        rows = np.asarray(answer.vectors).tolist() if answer.body is None else []
        entries = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        # The order of the entries is their index.
        content = rows if is_tei else {"object": "list", "data": entries[::-1], "model": request.get("model")}
        body = json.dumps(content).encode() if answer.body is None else answer.body
        handler.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body) + answer.missing_bytes))
        handler.end_headers()
        handler.wfile.write(body)
        handler.wfile.flush()
        handler.close_connection = True


@contextmanager
def embedding_server(behaviour: Behaviour, prompts: dict[str, str] | None = None) -> Iterator[EmbeddingServer]:
    """A running server on a free local port; `address` has no path."""
    embeddings = EmbeddingServer(behaviour, {"document": "", **(prompts or {})})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def do_POST(self) -> None:
            with suppress(ConnectionError):
                embeddings.serve(self)

        def log_message(self, *arguments: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *arguments: Any) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as server:
        embeddings.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield embeddings
        finally:
            server.shutdown()
            thread.join()
