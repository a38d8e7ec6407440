"""Any sentence-transformers directory of an architecture that transformers has, and what such a directory says."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common import InputError, TextSettings
from embeddings.interop.released.checkpoint import Assumed, Imported, KeyReport, ReleasedWeights, names_in
from embeddings.models.backbone import load_model, load_tokenizer
from embeddings.models.directory import is_contextual, read_model_directory
from embeddings.models.embedder import Embedder
from embeddings.models.pooling import MeanPooling

FAMILY = "a sentence-transformers directory"
_NO_LIMIT = 512


def load(folder: Path, assumed: Assumed | None = None) -> Imported:
    """The embedding model of a folder; transformers itself renames the tensors of its architectures.

    Its files state every number, so none is assumed.

    Raises:
        InputError: If a file is missing or damaged, a module is unknown, or the folder is a contextual model that
            this library wrote.
    """
    if is_contextual(folder):
        raise InputError(str(folder), "is a model directory of this library already", "use it as it is")
    names = ReleasedWeights(folder).shapes
    unused: list[str] = []
    backbone = load_model(folder, unused=unused)
    embedder = described_embedder(folder, backbone, load_tokenizer(folder, backbone), {})
    used = names_in(backbone, (name for name in names if name not in unused))
    return Imported(FAMILY, embedder, KeyReport(used, sorted(unused)))


def described_embedder(
    folder: Path,
    backbone: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[str, str],
    longest: int | None = None,
) -> Embedder:
    """The embedding model around a backbone, with pooling and texts as the folder says.

    Where the folder says nothing: the mean of all tokens, unit length, texts as long as tokenizer and positions allow.
    `prompts` are those that the folder need not name, `longest` a limit of length whatever the folder says.

    Raises:
        InputError: If a file is damaged, a module is unknown, or the parts do not fit together.
    """
    if not (folder / "modules.json").is_file():
        limit = min(tokenizer.model_max_length, getattr(backbone.config, "max_position_embeddings", _NO_LIMIT))
        text = TextSettings(limit, limit, dict(prompts), pool_prompt=True)
        return Embedder(backbone, tokenizer, MeanPooling(int(backbone.config.hidden_size)), text=text)
    parts = read_model_directory(folder, backbone, tokenizer)
    text = replace(parts.text, prompts={**prompts, **parts.text.prompts})
    if longest is not None:
        lengths = (text.query_max_length, text.document_max_length)
        query, document = (min(length, longest) for length in lengths)
        text = replace(text, query_max_length=query, document_max_length=document)
    return Embedder.of_parts(folder, backbone, tokenizer, replace(parts, text=text))
