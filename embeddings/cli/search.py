"""`search` and `index`: the documents nearest to a query, and what finds them quickly."""

import io
import shlex
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Literal

from embeddings.cli.encode import PrecisionName, draw_named_context, load_encoder, warn_without_context
from embeddings.common import InputError, OptionError
from embeddings.common.errors import program
from embeddings.common.process import logger
from embeddings.common.text import printable
from embeddings.inference import CorpusSearch, VectorFolder
from embeddings.inference.search import require_multiplier, require_top_k
from embeddings.mining import VectorIndex, build_index, recall_of
from embeddings.mining.vector_index import INDEX_FILE

# From this size on a corpus file is worth encoding once.
LARGE_CORPUS_BYTES = 2**20


def search(
    query: str | None,
    model: str,
    corpus: Path,
    top_k: int = 5,
    index: Literal["exact", "ivf"] = "exact",
    rescore_multiplier: int | None = None,
    interactive: bool = False,
    precision: PrecisionName = "auto",
    dimensions: int | None = None,
    context: Path | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
) -> None:
    """Print the documents nearest to a query, or to each of the lines that are typed where none is given.

    Args:
        query: What to look for. Without it queries are read line by line, until an empty line: from a terminal, or with
            `interactive` from any standard input.
        model: A model directory or Hub id.
        corpus: A corpus file, which each search encodes anew, or a folder that `encode` wrote with the same model.
        top_k: How many documents.
        index: Compare with every document, or only with those that the folder's index finds (see `index`).
        rescore_multiplier: With a folder of binary vectors, how many documents found by sign are rescored with the
            query's full vector for each one printed; 4 if left out.
        interactive: Whether queries are read from standard input even if that is no terminal.
        precision: Format of matrix products.
        dimensions: How many leading dimensions of each vector are compared; an encoded folder must hold as many.
        context: The corpus that a contextual model reads query and documents in, a file or an encoded folder. An
            encoded folder knows its own and refuses another.
        context_size: How many documents are drawn; as many as the model takes if left out.
        context_seed: Seed of the draw.
    """
    if query is not None and interactive:
        raise OptionError("interactive", True, "must be left out where a query is given", "drop one of them")
    if query is None and not interactive and not is_terminal():
        raise OptionError("query", None, "must be given", "write it last, or read queries with --interactive")
    if query is not None and not query.strip():
        raise OptionError("query", query, "must not be empty", "say what to look for")
    require_top_k(top_k)
    if rescore_multiplier is not None:
        require_multiplier(rescore_multiplier)
    if index == "ivf" and not corpus.is_dir():
        raise OptionError("index", "ivf", "needs an encoded folder", "run encode and index first, and name the folder")
    nearest = None if index == "exact" else VectorIndex.open(VectorFolder.open(corpus)).search
    encoder = load_encoder(model, precision, dimensions)
    drawn = draw_named_context(encoder, context, context_size, context_seed)
    if corpus.is_file() and corpus.stat().st_size >= LARGE_CORPUS_BYTES:
        given = {"precision": precision, "dimensions": dimensions, "context": context, "context_size": context_size}
        chosen = {name: value for name, value in given.items() if value not in (None, "auto")}
        words = ["encode", "--model", model, "--input", str(corpus), "--output", f"{corpus}.vectors"]
        words += [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]
        line = f"{program()} {shlex.join(words)}"
        logger.info("each search encodes %s anew; encode it once and search %s.vectors: %s", corpus, corpus, line)
    searched = CorpusSearch(encoder, corpus, context=drawn, nearest=nearest, rescore_multiplier=rescore_multiplier)
    warn_without_context(encoder, searched.has_context, "--context")

    def answer(query: str) -> None:
        (hits,) = searched.search([query], top_k)
        for hit in hits:
            text = printable(" ".join(hit.text.split()))[:160]
            print(f"{hit.score:.3f}  {printable(hit.document_id)}\n       {text}")

    if query is None:
        answer_lines(answer)
    else:
        answer(query)


def index(vectors: Path, num_lists: int | None = None, num_probes: int | None = None, seed: int = 0) -> None:
    """Make the index of an encoded folder's vectors, beside them: inverted lists, for `search --index ivf`.

    Its recall@10 against the exact search is printed, of 200 documents of the folder as queries.

    Args:
        vectors: A folder that `encode` wrote; `ivf.faiss` and `ivf.manifest.json` are added to it, or replaced.
        num_lists: Lists; chosen by the number of vectors if left out.
        num_probes: Lists that are searched for a query; 32 if left out, or all where there are fewer.
        seed: Seed of the sample that the lists are trained on.
    """
    folder = VectorFolder.open(vectors)
    made = build_index(folder, num_lists=num_lists, num_probes=num_probes, seed=seed)
    print(
        f"wrote {folder.path / INDEX_FILE}: {folder.num_documents} vectors in {made.num_lists} lists, "
        f"{made.num_probes} searched for a query; recall@10 {recall_of(made, folder):.3f}"
    )


def is_terminal() -> bool:
    """Whether a person can type queries."""
    return sys.stdin is not None and sys.stdin.isatty()


def answer_lines(answer: Callable[[str], None]) -> None:
    """Answer the lines of standard input until its end or an empty one, each with the time that it took."""
    # The bytes: text is decoded ahead, and would fail on a line that is not asked for yet.
    stream = io.BytesIO() if sys.stdin is None else sys.stdin.buffer
    for number in count(1):
        if is_terminal():
            print("query> ", end="", file=sys.stderr, flush=True)
        try:
            query = stream.readline().decode().strip()
        except UnicodeDecodeError:
            raise InputError(f"standard input:{number}", "is not valid UTF-8", "write it as UTF-8") from None
        if not query:
            break
        start = perf_counter()
        answer(query)
        print(f"       {1000 * (perf_counter() - start):.0f} ms", flush=True)
