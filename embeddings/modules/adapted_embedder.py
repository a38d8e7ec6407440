"""The embedder of a method that puts one pooling on one backbone: new, or from a model directory, with adapters."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from embeddings.common import OptionError, TextSettings, UserError
from embeddings.common.random import run_seed
from embeddings.models import BackboneConfig, Embedder, LoraSettings, Pooling, add_lora, load_backbone
from embeddings.models.directory import read_model_directory
from embeddings.models.hub import FrozenBase, resolve_model
from embeddings.models.layers import compile_layers

PoolingFactory = Callable[[int], Pooling]


def adapted_embedder(
    backbone: BackboneConfig,
    pooling: PoolingFactory,
    lora: LoraSettings | None,
    initial_model: str | None,
    normalize: bool,
    seed: int | None,
    usual_pooling: str,
    change: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
) -> Embedder:
    """The model that is trained: backbone and pooling, the backbone adapted by LoRA where that is asked for.

    Determinism: random initial weights follow from the seed; the global random state is left alone.

    Args:
        backbone: Which model, and how it is loaded.
        pooling: Makes the pooling from the hidden size.
        lora: LoRA settings, or None to train the whole backbone.
        initial_model: A model directory whose weights replace those of `backbone` and `pooling`, or None.
        normalize: Whether vectors have unit norm.
        seed: Seed of random initial weights, None for the run's (`seed_everything`).
        usual_pooling: What the method's paper uses, for the message about a pooling that cannot be made.
        change: What becomes of the loaded backbone before adapters are added; None leaves it as it is.

    Raises:
        UserError: If the pooling cannot be made, or is another than `initial_model` has, or no layer can be compiled.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run_seed(seed))
        text = TextSettings()
        norm: nn.LayerNorm | None = None
        head: nn.Linear | None = None
        if initial_model is None:
            model, tokenizer = load_backbone(backbone)
            made = _make_pooling(pooling, model.config.hidden_size, usual_pooling)
        else:
            # Its parts and not an embedder, which would tap the backbone for a pooling by attention already.
            model, tokenizer = load_backbone(replace(backbone, name=initial_model, revision=None))
            parts = read_model_directory(resolve_model(initial_model), model, tokenizer)
            made, norm, head, text = parts.pooling, parts.norm, parts.head, parts.text
            _check_pooling(made, _make_pooling(pooling, made.hidden_size, usual_pooling), initial_model)
        changed = model if change is None else change(model)
        adapted = changed if lora is None else add_lora(changed, lora)
    embedder = Embedder(adapted, tokenizer, made, norm=norm, head=head, normalize=normalize, text=text)
    if lora is not None and changed is model:
        name, revision = (backbone.name, backbone.revision) if initial_model is None else (initial_model, None)
        embedder.frozen_base = FrozenBase(name, resolve_model(name, revision))
    if backbone.compile:
        compile_layers(embedder.backbone)
    return embedder


def _make_pooling(pooling: PoolingFactory, hidden_size: int, usual: str) -> Pooling:
    try:
        return pooling(hidden_size)
    except ValueError as error:
        raise UserError(f"model.{error}; {usual}") from error


def _check_pooling(found: Pooling, asked: Pooling, initial_model: str) -> None:
    if type(found) is not type(asked) or found.arguments() != asked.arguments():
        rule = f"must be what {initial_model} was trained with: {type(found).__name__} {found.arguments()}"
        raise OptionError("model.pooling", f"{type(asked).__name__} {asked.arguments()}", rule, "repeat that pooling")
