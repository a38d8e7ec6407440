"""The golden vectors of a model directory: sixteen texts as queries and as documents, with their exact vectors.

`golden.json` contains the texts, a unit vector (base64 of little-endian float16) and a length for each, a checksum of
the weights, and the settings that explain differences. `verify` compares a server's or library's answers with it.
"""

import base64
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import tokenizers
import torch
import transformers

from embeddings.common import InputError
from embeddings.common.io import file_hash, write_json
from embeddings.common.own_folder import record_files
from embeddings.common.process import logger
from embeddings.common.text import TextRole, one_line
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference.encoder import Encoder, Vectors, unit_rows
from embeddings.models.bidirectional import is_causal
from embeddings.models.model_files import GOLDEN_FILE, folder_checksum, num_weights, read_json
from embeddings.models.pooling import plain_backbone
from embeddings.models.poolings import pooling_name

ROLES: tuple[TextRole, ...] = get_args(TextRole)
# The kinds of the two texts whose lengths are chosen for the model.
AT_LIMIT, BEYOND_LIMIT = "at the length limit", "beyond the length limit"
# Tokens of the text at the limit, for models with longer limits; the other text is half as long again.
LONGEST = 512
# Multiplications that `add_golden` may spend, some ten seconds of one CPU core.
_MAX_PRODUCTS = 3e11
_TEXTS = {
    # Servers refuse an empty text.
    "a space": " ",
    "one word": "embedding",
    "sentence": "how do I reset my password?",
    "upper case": "WHY DOES MY ORDER SAY DELIVERED?",
    "digits": "3.14159 26535 2026-11-27 1,000,000",
    "code": "def add(a: int, b: int) -> int:\n    return a + b  # the sum",
    "newlines": "first line\nsecond line\n\nlast line",
    "trailing space": "a text that ends with two spaces  ",
    "repeated word": "very very very very very very very very good",
    "emoji": "thanks 🙏🏽 see you 👩‍👩‍👧 🇫🇷",
    "right to left": "مرحبا بالعالم שלום עולם",
    "Chinese and Japanese": "東京は日本の首都です。北京是中国的首都。",
    "mixed": "Él paid ５€ for the naïve Tōkyō 東京 trip ☕ (see №7)",
}
_WORDS = (
    *("river", "stone", "market", "winter", "engine", "letter", "garden", "signal", "bridge", "copper", "theory"),
    *("harvest", "window", "captain", "music", "shadow", "paper", "island", "number"),
)
_WRITE = "write it again with verify --write"


@dataclass(frozen=True)
class Golden:
    """The texts by their kind, their vectors by role, (16, D) float32, the weights' checksum and the settings."""

    texts: Mapping[str, str]
    vectors: Mapping[TextRole, Vectors]
    weights: str
    settings: Mapping[str, Any]

    @property
    def width(self) -> int:
        return int(self.vectors["query"].shape[1])

    def prompt(self, role: TextRole) -> str:
        return str(self.settings["prompts"].get(role, ""))


def compute_golden(encoder: Encoder, folder: Path) -> Golden:
    """The golden vectors of a directory by its encoder, which should compute in float32."""
    texts = golden_texts(encoder)
    vectors = {role: encoder.encode(list(texts.values()), role=role) for role in ROLES}
    return Golden(texts, vectors, folder_checksum(folder), settings_of(encoder, folder))


def settings_of(encoder: Encoder, folder: Path) -> dict[str, Any]:
    """The settings that determine vectors besides the weights, as JSON types."""
    embedder, tokenizer = encoder.embedder, folder / "tokenizer.json"
    settings: dict[str, Any] = {"width": embedder.embedding_dim, "pooling": pooling_name(embedder.pooling)}
    settings |= {"normalize": embedder.normalize, "similarity": embedder.similarity}
    settings |= {"norm": embedder.norm is not None, "head": embedder.head is not None}
    settings["causal"] = None if encoder.num_context else is_causal(plain_backbone(embedder.backbone))
    settings |= {"eos_token": embedder.tokenizer.eos_token, **embedder.text.to_dict()}
    settings["tokenizer_xxh3_128"] = file_hash(tokenizer) if tokenizer.is_file() else None
    return settings


def golden_texts(encoder: Encoder) -> dict[str, str]:
    """Sixteen different texts by their kind; two have lengths that depend on the model's limit and document prompt."""
    text = encoder.embedder.text
    tokenizer, prompt = TextTokenizer(encoder.embedder.tokenizer, text), text.prompts.get("document", "")
    limit = min(text.document_max_length, LONGEST)
    prefix = next(filter(None, (text.prompts.get(role) for role in ROLES)), "query: ")
    texts = {**_TEXTS, "prompt": f"{prefix}a text that starts with a prompt"}
    texts[AT_LIMIT] = _text_of_length(lambda body: tokenizer.num_tokens(prompt + body), limit, _WORDS)
    longer = limit + limit // 2
    texts[BEYOND_LIMIT] = _text_of_length(lambda body: tokenizer.num_tokens(prompt + body), longer, _WORDS[::-1])
    assert len(set(texts.values())) == 16
    return texts


def _text_of_length(num_tokens: Callable[[str], int], limit: int, words: tuple[str, ...]) -> str:
    """The longest text of these words, in turn, that has at most `limit` tokens."""

    def joined(number: int) -> str:
        # Each round starts one word later.
        return " ".join(words[(place + place // len(words)) % len(words)] for place in range(number))

    fitting = bisect_right(range(1, limit + 1), limit, key=lambda number: num_tokens(joined(number)))
    text = joined(max(1, fitting))
    # Fills the rest where a word has several tokens.
    while num_tokens(text) < num_tokens(f"{text} a") <= limit:
        text = f"{text} a"
    return text


def write_golden(folder: Path, device: str | None = None) -> Golden:
    """Compute the golden vectors of a model directory in float32 and write them, also into its manifest."""
    encoder = Encoder.from_pretrained(str(folder), device=device, precision="float32")
    golden = compute_golden(encoder, folder)
    content: dict[str, Any] = {"texts": dict(golden.texts)}
    for role, vector_ND in golden.vectors.items():
        unit_ND, length_N = unit_rows(vector_ND).astype("<f2"), np.linalg.norm(vector_ND, axis=1)
        packed = base64.b64encode(unit_ND.tobytes()).decode()
        content[role] = {"lengths": [float(f"{length:.7g}") for length in length_N], "unit_vectors": packed}
    content |= {"weights_xxh3_128": golden.weights, "settings": dict(golden.settings)}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    content["versions"] = {**versions, "tokenizers": tokenizers.__version__}
    write_json(folder / GOLDEN_FILE, content)
    record_files(folder, GOLDEN_FILE)
    return golden


def add_golden(folder: Path) -> None:
    """Add golden vectors to a directory that was just written; a large model, or a failure, is only logged."""
    try:
        # Before the model is loaded: a large one may not fit into memory beside the one in training.
        if num_weights(folder) * 4 * LONGEST > _MAX_PRODUCTS:
            logger.info("%s is not written, since the model is large; verify --write writes it", GOLDEN_FILE)
            return
        write_golden(folder, "cpu")
    # The model itself is complete, whatever went wrong here.
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        logger.warning("%s is not written (%s); verify --write writes it", GOLDEN_FILE, reason)


def read_golden(folder: Path) -> Golden | None:
    """The golden vectors of a model directory, None if it has none; an `InputError` for a damaged file."""
    path = folder / GOLDEN_FILE
    if not path.exists():
        return None
    content = read_json(path, dict, _WRITE)
    try:
        texts, settings = content["texts"], content["settings"]
        vectors = {role: _vectors(content[role], len(texts), int(settings["width"])) for role in ROLES}
        texts = {str(kind): str(text) for kind, text in texts.items()}
        golden = Golden(texts, vectors, str(content["weights_xxh3_128"]), settings)
        is_whole = {AT_LIMIT, BEYOND_LIMIT} < texts.keys() and "normalize" in settings
        is_whole &= isinstance(settings["prompts"], dict)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(str(path), f"has no golden vectors ({one_line(repr(error), 80)})", _WRITE) from error
    if not is_whole or not all(np.isfinite(vector_ND).all() for vector_ND in vectors.values()):
        raise InputError(str(path), "has no complete golden vectors", _WRITE)
    return golden


def _vectors(content: Mapping[str, Any], num_texts: int, width: int) -> Vectors:
    unit = np.frombuffer(base64.b64decode(content["unit_vectors"], validate=True), "<f2").astype(np.float32)
    length_N = np.array(content["lengths"], np.float32)
    vectors: Vectors = unit.reshape(num_texts, width) * length_N.reshape(num_texts, 1)
    return vectors
