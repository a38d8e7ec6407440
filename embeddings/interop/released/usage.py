"""What the cards of published models say of their vectors, and no file of theirs that is read here does."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import NomicBertConfig

from embeddings.common import OptionError
from embeddings.models.embedder import Embedder
from embeddings.models.language_model import LanguageModel
from embeddings.models.lora import plain_backbone
from embeddings.models.pooling import MeanPooling
from embeddings.models.rotary_moe import RotaryMoeConfig


@dataclass(frozen=True)
class Usage:
    """How a published model's vectors are used.

    Args:
        model_type: What the config of its backbone says here.
        widths: Widths that it was trained to be cut to, the whole one first.
        layer_norm: Whether vectors pass a layer norm without weights before they are cut.
    """

    model_type: str
    widths: tuple[int, ...]
    layer_norm: bool = False


# v1.5's modules.json has Transformer and Pooling alone; its card goes on with layer norm, cut and unit length.
USAGES: Mapping[str, Usage] = {
    "nomic-embed-text-v1.5": Usage(NomicBertConfig.model_type, (768, 512, 256, 128, 64), layer_norm=True),
    "nomic-embed-text-v2-moe": Usage(RotaryMoeConfig.model_type, (768, 256)),
}


def check_name(known_as: str | None) -> None:
    """Refuse a name that no usage is known of.

    Raises:
        OptionError: If it is none of `USAGES`.
    """
    if known_as is not None and known_as not in USAGES:
        rule = "must be a published model that is used in a way of its own"
        raise OptionError("known_as", known_as, rule, f"give one of {', '.join(USAGES)}, or leave it out")


def usage_name(model: Embedder | LanguageModel, source: str, known_as: str | None = None) -> str | None:
    """Which one of `USAGES` an imported model is; None for none of them.

    No file tells v1.5 from what was trained on from it, so the name decides: the last part of the Hub id or directory,
    and in the Hub's own cache the repository's. Backbone and width must agree.

    Args:
        model: What was read.
        source: Where from: a directory or Hub id.
        known_as: The model's published name, where the source has another.

    Raises:
        OptionError: If `known_as` is a model of another backbone or width.
    """
    name = _published_name(source) if known_as is None else known_as
    usage = USAGES.get(name)
    if usage is not None and _model_type(model) == usage.model_type:
        assert isinstance(model, Embedder)
        if model.embedding_dim == usage.widths[0]:
            return name
    if known_as is not None:
        rule = f"cannot apply to {source}, which has another backbone or width"
        raise OptionError("known_as", known_as, rule, "leave it out")
    return None


def as_used(model: Embedder, usage: Usage) -> Embedder:
    """The model with the vectors of its card: of unit length, and brought there again after a cut to any width."""
    norm = nn.LayerNorm(model.hidden_size, elementwise_affine=False) if usage.layer_norm else model.norm
    return Embedder(
        model.backbone,
        model.tokenizer,
        model.pooling,
        norm=norm,
        head=model.head,
        text=model.text,
        trained_widths=usage.widths,
    )


def may_want_norm(model: Embedder | LanguageModel) -> bool:
    """Whether a model of no known usage has the files of nomic-embed-text-v1.5, so that it may be a copy of it."""
    if _model_type(model) != NomicBertConfig.model_type:
        return False
    assert isinstance(model, Embedder)
    return not model.normalize and model.norm is None and type(model.pooling) is MeanPooling


def _model_type(model: Embedder | LanguageModel) -> str | None:
    """What the config of a plain embedding model's backbone says; None for any other model."""
    return str(plain_backbone(model.backbone).config.model_type) if type(model) is Embedder else None


def _published_name(source: str) -> str:
    path = Path(source).expanduser().absolute()
    # The Hub's cache: models--OWNER--NAME/snapshots/COMMIT.
    return path.parents[1].name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name
