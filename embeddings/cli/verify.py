"""The command `verify`: whether a server or a library computes a model's vectors."""

from functools import cache
from pathlib import Path
from typing import Literal

from embeddings.common import InputError, OptionError
from embeddings.common.errors import refuse_given
from embeddings.common.io import listed_files
from embeddings.inference.encoder import Encoder
from embeddings.interop.answers import Api, Library, Server, library_answers
from embeddings.interop.golden import compute_golden, read_golden, write_golden
from embeddings.interop.verification import MIN_COSINE, verify_answers
from embeddings.models.model_files import GOLDEN_FILE, folder_checksum, resolve_model


def verify(
    model: str,
    url: str | None = None,
    api: Api | None = None,
    name: str | None = None,
    library: Library | None = None,
    precision: Literal["auto", "float32", "bfloat16", "int8"] | None = None,
    device: str | None = None,
    min_cosine: float = MIN_COSINE,
    timeout_seconds: float | None = None,
    trust_code: bool = False,
    write: bool = False,
) -> None:
    """Say in one line whether a server or a library computes a model's vectors, or else the likeliest cause.

    Compared are sixteen texts as queries and documents, with the vectors in the directory's `golden.json`. The exit
    code is 0 for the same model, 1 for a different one. The server's key, if any, is the environment variable
    OPENAI_API_KEY.

    Args:
        model: The model directory that the server or library should compute.
        url: Address of the server, such as `http://HOST:PORT/v1`; without it a library is asked.
        api: The server's protocol, OpenAI's or text-embeddings-inference's; default `tei` for an address that ends
            with `/embed`, else `openai`, where prompts are put before the texts.
        name: The model's name at the server, for OpenAI's protocol; default the value of `--model`.
        library: The library that is asked: `ours` (default), `sentence-transformers`, or the directory's ONNX graph.
        precision: Precision in which a library computes; default float32.
        device: Device of the model, `cpu` or `cuda`; default a GPU if there is one.
        min_cosine: Least cosine of a vector with that in `golden.json`.
        timeout_seconds: Longest time in which the server may send nothing; default 60.
        trust_code: Whether sentence-transformers may run the code in the directory.
        write: Whether to write `golden.json` instead, for a directory without it.
    """
    if not 0 < min_cosine <= 1:
        raise OptionError("min_cosine", min_cosine, "must be above 0 and at most 1", f"leave it out for {MIN_COSINE}")
    of_server = {"api": api, "name": name, "timeout_seconds": timeout_seconds}
    of_library = {"library": library, "precision": precision, "trust_code": trust_code or None}
    if write:
        refuse_given({"url": url, **of_server, **of_library}, "has no effect with --write")
        _write(model, device)
        return
    refuse_given(of_server if url is None else of_library, f"has no effect with{'out' * (url is None)} --url")
    if library != "sentence-transformers":
        refuse_given({"trust_code": trust_code or None}, "has no effect without --library sentence-transformers")
    if library in ("onnx", "onnx-int8"):
        refuse_given({"precision": precision}, f"has no effect with --library {library}, a graph of one precision")
    folder = resolve_model(model)
    golden = read_golden(folder)

    @cache
    def load() -> Encoder:
        return Encoder.from_pretrained(str(folder), device=device, precision="float32")

    if golden is None and url is None and library in (None, "ours"):
        raise InputError(model, f"has no {GOLDEN_FILE} to compare with", "write it with verify --write")
    if golden is not None and url is not None and golden.weights != folder_checksum(folder):
        what = "was written for other weights than those of the directory"
        raise InputError(str(folder / GOLDEN_FILE), what, "write it again with verify --write")
    golden = compute_golden(load(), folder) if golden is None else golden
    if url is not None:
        server = Server(url, api, name or model, golden, 60.0 if timeout_seconds is None else timeout_seconds)
        verdict, where = verify_answers(golden, server, folder, load, min_cosine), server.address
    else:
        ask = library_answers(library or "ours", folder, precision or "float32", device, trust_code)
        verdict, where = verify_answers(golden, ask, folder, load, min_cosine), f"{model} in {library or 'ours'}"
    print(f"{where}: {verdict}")
    if not verdict.is_same:
        raise SystemExit(1)


def _write(model: str, device: str | None) -> None:
    folder = Path(model).expanduser()
    path = folder / GOLDEN_FILE
    if not folder.is_dir():
        raise InputError(model, "is not a directory", "name the model directory that gets the file")
    if path.exists() and GOLDEN_FILE not in listed_files(folder):
        try:
            read_golden(folder)
        except InputError:
            raise InputError(str(path), "was not written by this library", "rename it or remove it") from None
    golden = write_golden(folder, device)
    print(f"wrote {path}: {len(golden.texts)} texts as queries and documents, {golden.width} numbers each")
