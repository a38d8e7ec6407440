"""A local server with the part of the Hub's API that commits files; it stores the received files."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN, OWNER = "hf_right", "tester"


@dataclass
class Repository:
    """One repository: the files of its branches, commit messages and deleted files."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b""}})
    messages: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)


@dataclass
class FakeHub:
    """The server's state: LFS uploads by SHA-256; `refusal` is the HTTP status of every commit."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    verified: list[str] = field(default_factory=list)
    refusal: int | None = None
    read_only: bool = False
    calls: list[str] = field(default_factory=list)


class _Refused(Exception):
    def __init__(self, status: int, error: str, **more: str) -> None:
        self.status, self.content = status, {"error": error, **more}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A running server."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self._chunks())
            hub.calls.append(f"{self.command} {self.path}")
            try:
                status, content = 200, _answer(hub, self.command, self.path.partition("?")[0], body, self.headers)
            except _Refused as refusal:
                status, content = refusal.status, refusal.content
            payload = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hashlib.sha1(payload).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(payload)

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        do_GET = do_POST = do_PUT = do_HEAD = answer

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _answer(hub: FakeHub, method: str, path: str, body: bytes, headers: Any) -> Any:
    if match := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
        # The storage host: its URLs are signed, and requests have no token.
        assert method == "PUT"
        assert hashlib.sha256(body).hexdigest() == match[1]
        hub.uploaded[match[1]] = body
        return {}
    if headers.get("Authorization") != f"Bearer {TOKEN}":
        raise _Refused(401, "Invalid credentials in Authorization header")
    if path == "/lfs-verify":
        entry = json.loads(body)
        assert len(hub.uploaded[entry["oid"]]) == entry["size"]
        hub.verified.append(entry["oid"])
        return {}
    if path == "/api/validate-yaml":
        return {"errors": [], "warnings": []}
    if path == "/api/repos/create":
        return _create(hub, json.loads(body))
    if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
        request = json.loads(body)
        assert request["hash_algo"] == "sha256"
        assert "basic" in request["transfers"]
        return {"transfer": "basic", "objects": [_slot(hub, entry) for entry in request["objects"]]}
    if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
        return hub.repositories[match[1]].branches[match[2]][match[3]]
    match = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/(preupload|commit|branch|tree)/([^/]+)(/.*)?", path)
    if match is None or match[1] not in hub.repositories:
        raise _Refused(404, "Repository not found")
    repository, what, revision = hub.repositories[match[1]], match[2], match[3]
    if what == "branch":
        if revision in repository.branches:
            raise _Refused(409, "Reference already exists")
        repository.branches[revision] = dict(repository.branches["main"])
        return {}
    if revision not in repository.branches:
        raise _Refused(404, "Revision not found")
    files = repository.branches[revision]
    if what == "tree":
        return [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
    if what == "preupload":
        return {"files": [_mode(entry) for entry in json.loads(body)["files"]]}
    return _commit(hub, repository, files, [json.loads(line) for line in body.splitlines()], match[1])


def _create(hub: FakeHub, request: dict[str, Any]) -> dict[str, str]:
    if hub.read_only or request["organization"] not in (None, OWNER):
        raise _Refused(403, "You don't have the rights to create a model under this namespace")
    name = f"{request['organization'] or OWNER}/{request['name']}"
    if name in hub.repositories:
        raise _Refused(409, "You already created this model repo", url=f"{hub.url}/{name}")
    hub.repositories[name] = Repository(request.get("visibility") == "private" or request.get("private") is True)
    return {"url": f"{hub.url}/{name}"}


def _mode(entry: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if entry["path"].endswith(".safetensors") else "regular"
    return {"path": entry["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


def _slot(hub: FakeHub, entry: dict[str, Any]) -> dict[str, Any]:
    actions = {"upload": {"href": f"{hub.url}/lfs/{entry['oid']}"}, "verify": {"href": f"{hub.url}/lfs-verify"}}
    return {**entry, "authenticated": True, "actions": actions}


def _commit(
    hub: FakeHub, repository: Repository, files: dict[str, bytes], lines: list[dict[str, Any]], name: str
) -> dict[str, str]:
    if hub.refusal is not None:
        raise _Refused(hub.refusal, "the disk of the server is full")
    for line in lines:
        value = line["value"]
        match line["key"]:
            case "header":
                repository.messages.append(value["summary"])
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                assert value["oid"] in hub.verified
                files[value["path"]] = hub.uploaded[value["oid"]]
                assert value["size"] == len(files[value["path"]])
            case "deletedFile":
                repository.deleted.append(value["path"])
                del files[value["path"]]
    oid = hashlib.sha1(repr(sorted(files)).encode()).hexdigest()
    return {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid}
