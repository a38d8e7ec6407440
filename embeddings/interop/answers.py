"""Vectors as others compute them: a server with OpenAI's or text-embeddings-inference's API, or a library."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from embeddings.common import InputError, OptionError
from embeddings.common.errors import require
from embeddings.common.process import quiet_libraries, quiet_transformers
from embeddings.common.text import TextRole, one_line
from embeddings.inference.encoder import Encoder, Vectors
from embeddings.inference.precision import Precision
from embeddings.interop.golden import Golden
from embeddings.interop.onnx import GRAPH_FILE, INT8_GRAPH_FILE, open_graph
from embeddings.models.pooling import plain_backbone

# Maps texts, without their prompts, to vectors.
Ask = Callable[[Sequence[str], TextRole], Vectors]
Api = Literal["openai", "tei"]
Library = Literal["ours", "sentence-transformers", "onnx", "onnx-int8"]
API_KEY_VARIABLE = "OPENAI_API_KEY"
# How servers refuse one text, such as one that is too long.
_REFUSALS = (400, 413, 422)
_MAX_SECONDS = 86_400
_CHECK = "check --url, --api and --name"


class RefusedError(InputError):
    """A server that refuses the content of a request."""


class _NoRedirects(HTTPRedirectHandler):
    """Redirects are errors: urllib would send the API key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Server:
    """A server of embeddings; the API key, if any, is the environment variable OPENAI_API_KEY.

    With OpenAI's API the client puts the model's prompts before the texts; text-embeddings-inference adds them by
    `prompt_name`. `url` is a base URL or a whole address; `api` None is `tei` if it ends with `/embed`, else `openai`.
    Of `golden`, the expected model, prompts and normalisation are used.
    """

    url: str
    api: Api | None
    name: str
    golden: Golden
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_http = False
        if not is_http or not self.url.isascii() or not self.url.isprintable() or " " in self.url:
            raise OptionError("url", self.url, "must be an HTTP URL", "write it as http://HOST:PORT/v1")
        if parts.username is not None or parts.password is not None:
            # Without the value, which may be secret.
            fix = f"put the key into the environment variable {API_KEY_VARIABLE}"
            raise InputError("url", "must not contain a user name or a password", fix)
        if not 0 < self.timeout_seconds <= _MAX_SECONDS:
            rule = f"must be > 0 and at most {_MAX_SECONDS}, a day"
            raise OptionError("timeout_seconds", self.timeout_seconds, rule, "leave it out for 60")

    @property
    def protocol(self) -> Api:
        return self.api or ("tei" if urlsplit(self.url).path.rstrip("/").endswith("/embed") else "openai")

    @property
    def address(self) -> str:
        parts = urlsplit(self.url)
        path, end = parts.path.rstrip("/"), "/embed" if self.protocol == "tei" else "/embeddings"
        if self.protocol == "openai" and not path:
            path = "/v1"
        return parts._replace(path=path if path.endswith(end) else path + end, fragment="").geturl()

    def __call__(self, texts: Sequence[str], role: TextRole) -> Vectors:
        prompt = self.golden.prompt(role)
        if self.protocol == "openai":
            inputs = [prompt + text for text in texts]
            content = self._post({"model": self.name, "input": inputs, "encoding_format": "float"})
        else:
            body: dict[str, Any] = {"inputs": list(texts), "truncate": True}
            body |= {"normalize": bool(self.golden.settings["normalize"])}
            content = self._post(body | ({"prompt_name": role} if prompt else {}))
        return self._vectors(content, len(texts))

    def _post(self, body: dict[str, Any]) -> Any:
        """The JSON of the answer to a request."""
        key = (os.environ.get(API_KEY_VARIABLE) or "").strip()
        if not (key.isascii() and key.isprintable()):
            what = "has characters that are not allowed in a header"
            raise InputError(f"the environment variable {API_KEY_VARIABLE}", what, "set it again")
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        request = Request(self.address, json.dumps(body).encode(), headers)
        try:
            with build_opener(_NoRedirects).open(request, timeout=self.timeout_seconds) as answer:
                content = answer.read()
        except HTTPError as error:
            problem = _problem(error)
            problem = problem.replace(key, "(the key)") if key else problem
            kind = RefusedError if error.code in _REFUSALS else InputError
            raise kind(self.address, f"answers with {error.code}{problem}", _CHECK) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                what = f"has not answered within {self.timeout_seconds:g} s"
                raise InputError(self.address, what, "check the server, or raise --timeout-seconds") from None
            what = f"cannot be reached ({one_line(str(reason) or type(reason).__name__, 120)})"
            raise InputError(self.address, what, "check --url, and that the server runs") from None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            what = f"does not answer with JSON ({one_line(content[:40].decode('utf-8', 'replace'))!r})"
            raise InputError(self.address, what, _CHECK) from None

    def _vectors(self, content: Any, num_texts: int) -> Vectors:
        rows = content
        if self.protocol == "openai":
            try:
                entries = list(content["data"])
                order = sorted(range(len(entries)), key=lambda place: int(entries[place].get("index", place)))
                rows = [entries[place]["embedding"] for place in order]
            except (KeyError, TypeError, ValueError, AttributeError):
                what = f"does not answer with vectors ({one_line(json.dumps(content), 80)})"
                raise InputError(self.address, what, _CHECK) from None
        if isinstance(rows, list) and len(rows) != num_texts:
            raise InputError(self.address, f"answers with {len(rows)} vectors for {num_texts} texts", _CHECK)
        try:
            vector_ND = np.asarray(rows)
        except (TypeError, ValueError):
            raise InputError(self.address, "answers with vectors of different widths", _CHECK) from None
        if vector_ND.dtype.kind not in "if" or vector_ND.ndim != 2 or vector_ND.shape[1] == 0:
            what = f"does not answer with vectors of numbers ({one_line(json.dumps(rows), 80)})"
            raise InputError(self.address, what, _CHECK)
        return checked(vector_ND.astype(np.float32), self.address)


def checked(vector_ND: Vectors, where: str) -> Vectors:
    """Refuse vectors with NaN or infinite numbers, of which no cosine says anything."""
    if not np.isfinite(vector_ND).all():
        what = "answers with NaN or infinite numbers"
        raise InputError(where, what, "check the server's precision: float16 overflows in some models")
    return vector_ND


def _problem(error: HTTPError) -> str:
    """The reason that an error's body states, as `: REASON`; empty if there is none."""
    if 300 <= error.code < 400:
        return f", a redirect to {one_line(str(error.headers.get('Location')), 100)}; give that address"
    try:
        content = json.loads(error.fp.read(4096))
    except (OSError, HTTPException, ValueError, RecursionError, AttributeError):
        return f" ({one_line(str(error.reason), 60)})"
    for key in ("error", "message", "detail"):
        content = content.get(key, content) if isinstance(content, dict) else content
    return f": {one_line(content if isinstance(content, str) else json.dumps(content), 160)}"


def library_answers(
    library: Library, folder: Path, precision: Precision, device: str | None, trust_code: bool = False
) -> Ask:
    """The answers of a library that reads the directory; `onnx` and `onnx-int8` run its graph with our pooling."""
    if library == "sentence-transformers":
        return _sentence_transformers(folder, precision, device, trust_code)
    if library == "ours":
        encoder = Encoder.from_pretrained(str(folder), device=device, precision=precision)
    else:
        path = folder / (GRAPH_FILE if library == "onnx" else INT8_GRAPH_FILE)
        if not path.is_file():
            raise InputError(str(path), "is not there", f"write it with export --format {library}")
        encoder = Encoder.from_pretrained(str(folder), device="cpu", precision="float32")
        encoder.embedder.backbone = _Graph(path, encoder.embedder.backbone)

    def ask(texts: Sequence[str], role: TextRole) -> Vectors:
        return checked(encoder.encode(texts, role=role), str(folder))

    return ask


class _Graph(nn.Module):
    """An ONNX graph in the place of the backbone that it was written from."""

    def __init__(self, path: Path, backbone: nn.Module) -> None:
        super().__init__()
        self.config = plain_backbone(backbone).config
        # The encoder asks the weights for device and precision.
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.states = open_graph(path)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
        state_NLH: Any = torch.from_numpy(self.states((input_ids, attention_mask)))
        return BaseModelOutput(last_hidden_state=state_NLH)


def _sentence_transformers(folder: Path, precision: Precision, device: str | None, trust_code: bool) -> Ask:
    if any(folder.glob("*.py")) and not trust_code:
        rule = "needs the code in this directory, which runs on this machine"
        raise OptionError("library", "sentence-transformers", rule, "add --trust-code if you trust the directory")
    with quiet_libraries():
        library = require("sentence_transformers", "rerank")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}
    if precision not in dtypes:
        raise OptionError("precision", precision, "is not offered by sentence-transformers", "use float32 or bfloat16")
    try:
        with quiet_libraries(), quiet_transformers():
            options: dict[str, Any] = {"model_kwargs": {"dtype": dtypes[precision]}, "trust_remote_code": trust_code}
            model = library.SentenceTransformer(str(folder), device=device, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError, ImportError, AttributeError) as error:
        what = f"cannot be loaded by sentence-transformers ({one_line(str(error), 160)})"
        raise InputError(str(folder), what, "export the model again") from error

    def ask(texts: Sequence[str], role: TextRole) -> Vectors:
        encode = model.encode_query if role == "query" else model.encode_document
        try:
            vector_ND = encode(list(texts), show_progress_bar=False, convert_to_numpy=False, convert_to_tensor=True)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            what = f"fails in sentence-transformers ({one_line(str(error), 160)})"
            raise InputError(str(folder), what, "export the model again") from error
        return checked(np.asarray(vector_ND.float().cpu().numpy(), np.float32), str(folder))

    return ask
