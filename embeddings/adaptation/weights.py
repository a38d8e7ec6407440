"""Models that are computed from others: between a starting model and what was trained from it, and whitened."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from embeddings.common import InputError, OptionError
from embeddings.common.errors import shown
from embeddings.common.io import check_manifest
from embeddings.common.own_folder import replaced_folder, require_replaceable
from embeddings.inference import Encoder, VectorFolder, unit_rows
from embeddings.inference.encoder import IRRELEVANT_FIELDS, embedder_sha256, module_sha256
from embeddings.interop.golden import add_golden
from embeddings.models import Embedder, load_embedder
from embeddings.models.backbone import read_config
from embeddings.models.contextual import ContextualEmbedder
from embeddings.models.directory import is_contextual
from embeddings.models.model_card import plain, shown_name, stated_licence, table, write_model_card
from embeddings.models.model_files import quantization_of, resolve_model
from embeddings.models.pooling import plain_backbone
from embeddings.models.poolings import pooling_name

# The places on the path that are compared, and the one that is taken where nothing is measured.
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
DEFAULT_SHARE = 0.5
# Settings that must agree; lengths may differ, and are the trained model's.
_TEXT_SETTINGS = ("append_eos", "pool_prompt", "suffix", "pool_start", "instruction_template", "pooling_rule")
_SAME_KIND = "give a model and what was trained from it"

# The covariance of fewer vectors is too uncertain.
MIN_DOCUMENTS = 512
# What is added to each eigenvalue, as a share of their mean.
SHRINKAGE = 0.1
# Whitening in full would have the exponent -1/2.
_EXPONENT = -0.25

Vectors = npt.NDArray[np.float32]


class WeightPath:
    """The models with the weights (1 - t) start + t trained, one at a time.

    Weights between the two ends often keep most of the gain on the trained task and lose less on others. LoRA matrices
    need no treatment: an exported directory has merged them.

    Args:
        start: The model that training started from, a directory or Hub id.
        trained: The directory of the trained model.

    Attributes:
        embedder: The model, at the trained end until `go` is called.

    Shape/precision: sums in float32; each weight has the wider of its two dtypes. Both models are in memory, and the
        one between them.
    Raises:
        InputError: If the models differ in architecture, tokenizer, pooling, prompts or shapes.
    Source: Wortsman et al. 2022 (WiSE-FT), arXiv:2109.01903.
    """

    def __init__(self, start: str | PathLike[str], trained: str | PathLike[str]) -> None:
        first, self.embedder = _load_plain(start), _load_plain(trained)
        old, new = _facts(first), _facts(self.embedder)
        for name in [*new, *old]:
            if old.get(name) != new.get(name):
                what = f"has another {name} than {start}: {shown(new.get(name))}, not {shown(old.get(name))}"
                raise InputError(str(trained), what, _SAME_KIND)
        weights, of_start = self.embedder.state_dict(keep_vars=True), first.state_dict()
        different = [name for name in weights if name not in of_start or of_start[name].shape != weights[name].shape]
        if different:
            raise InputError(str(start), f"has no {different[0]} like that of {trained}", _SAME_KIND)
        # Tied weights are one.
        names = {id(weight): name for name, weight in weights.items() if weight.is_floating_point()}
        self._ends = {name: (of_start[name], weights[name].detach()) for name in names.values()}

    @torch.no_grad()
    def go(self, share: float) -> Embedder:
        """Give the model the weights at a place t of the path, from 0 to 1; both ends are exact."""
        weights = self.embedder.state_dict(keep_vars=True)
        for name, (old, new) in self._ends.items():
            dtype = torch.promote_types(old.dtype, new.dtype)
            wide = torch.promote_types(dtype, torch.float32)
            mixed = new if share == 1 else old if share == 0 else (1 - share) * old.to(wide) + share * new.to(wide)
            weights[name].data = mixed.to(weights[name].device, dtype, copy=True)
        return self.embedder


def _load_plain(name: str | PathLike[str]) -> Embedder:
    folder = resolve_model(fspath(name))
    if is_contextual(folder):
        raise InputError(str(folder), "is a contextual model, which has no path", "give a plain embedding model")
    # Refuses an adapter without its base model.
    read_config(folder)
    if quantization_of(folder) is not None:
        raise InputError(str(folder), "has quantised weights", "give the model before its quantisation")
    embedder = Embedder.from_pretrained(folder)
    if embedder.norm is not None and not embedder.norm.elementwise_affine:
        # It has ones and zeros, which training may have moved in the other model.
        embedder.norm = nn.LayerNorm(embedder.norm.normalized_shape).eval()
    return embedder


def _facts(embedder: Embedder) -> dict[str, Any]:
    """What must be equal in both models, by its name for messages."""
    backbone, text = plain_backbone(embedder.backbone), embedder.text
    facts: dict[str, Any] = {"architecture": type(backbone).__name__}
    # Dropout and the options of training differ without effect on vectors.
    ignored = (*IRRELEVANT_FIELDS, "gradient_checkpointing", "_name_or_path")
    for name, value in sorted(backbone.config.to_dict().items()):
        if name not in ignored and "drop" not in name and value is not None:
            facts[f"config.json: {name}"] = value
    facts["tokenizer"] = module_sha256(nn.Module(), embedder.tokenizer, {})[:12]
    facts["pooling"] = pooling_name(embedder.pooling)
    facts["pooling's arguments"] = embedder.pooling.arguments()
    facts["layer norm"] = embedder.norm is not None
    facts["head"] = None if embedder.head is None else tuple(embedder.head.weight.shape)
    facts["normalisation"] = embedder.normalize
    facts["similarity"] = embedder.similarity
    facts |= {"set of prompts": text.prompts, "default prompt": text.default_prompt_name}
    return facts | {name: getattr(text, name) for name in _TEXT_SETTINGS}


def interpolate_models(
    start: str | PathLike[str],
    trained: str | PathLike[str],
    output: str | PathLike[str],
    share: float = DEFAULT_SHARE,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write the model directory at one place of the path between two models of one architecture (see `WeightPath`).

    All settings are the trained model's; its maximum lengths may differ from the start's.

    Args:
        start: The model that training started from, a directory or Hub id.
        trained: The directory of the trained model.
        output: The directory to write; an existing one is replaced once the new one is complete.
        share: The place t, from 0 (the start) to 1 (the trained model).
        facts: Further rows of the card's section on the weights.

    Raises:
        InputError: If the models are of different kinds.
    """
    require_replaceable(output)
    if not 0 <= share <= 1:
        raise OptionError("share", share, "must be from 0 to 1", "0 is the start, 1 the trained model")
    embedder = WeightPath(start, trained).go(share)
    rows: dict[str, object] = {"start": shown_name(fspath(start)), "trained": shown_name(fspath(trained))}
    rows |= {"share of the trained weights": f"{share:g}", **(facts or {})}
    text = "Each weight is (1 - t) start + t trained, with t the share of the trained weights."
    _write(embedder, output, "Weights between two models", text, rows, [trained, start])


def _write(
    embedder: Embedder,
    output: str | PathLike[str],
    title: str,
    text: str,
    rows: Mapping[str, object],
    sources: list[str | PathLike[str]],
) -> None:
    """Write a model with golden vectors, and a card with a section; the last of `sources` is its base."""
    licence = next(filter(None, (stated_licence(resolve_model(fspath(source))) for source in sources)), None)
    location = Path(output).expanduser()
    section = table(("", ""), [(name, plain(value)) for name, value in rows.items()])
    with replaced_folder(location) as new:
        embedder.save_pretrained(new, card=False)
        add_golden(new)
        options: dict[str, Any] = {"licence": licence, "location": location, "base": fspath(sources[-1])}
        write_model_card(new, embedder, sections={title: f"{text}\n\n{section}"}, **options)


def best_share(scores: Mapping[float, float]) -> float:
    """The share with the highest score; of equal ones the smallest, and one half where nothing was measured."""
    return max(sorted(scores), key=lambda share: scores[share]) if scores else DEFAULT_SHARE


@dataclass(frozen=True)
class Whitening:
    """A symmetric matrix by which unit vectors are multiplied before they are normalised again, (D, D) float64.

    matrix = (S + 0.1 m I)^(-1/4), with S the covariance of the corpus' unit vectors and m the mean of its eigenvalues.
    Directions in which the corpus varies little count more. The covariance is about the mean, but no mean is subtracted
    from vectors: they are multiplied only.
    """

    matrix_DD: npt.NDArray[np.float64]
    num_documents: int

    @classmethod
    def of(cls, tiles: Iterable[Vectors]) -> Self | None:
        """The whitening of a corpus, from its unit vectors in one pass; None for fewer than 512.

        Shape/precision: sums in float64; a tile, and two matrices of (D, D) float64, are in memory.
        """
        count, sum_D, square_DD = 0, np.zeros(1), np.zeros((1, 1))
        for tile_TD in tiles:
            wide_TD = unit_rows(tile_TD).astype(np.float64)
            count += len(wide_TD)
            sum_D = sum_D + wide_TD.sum(axis=0)
            square_DD = square_DD + wide_TD.T @ wide_TD
        if count < MIN_DOCUMENTS:
            return None
        mean_D = sum_D / count
        value_D, basis_DD = np.linalg.eigh(square_DD / count - np.outer(mean_D, mean_D))
        mean = float(value_D.mean())
        if mean <= 0:
            # All vectors are equal.
            return None
        # Rounding may leave an eigenvalue of 0 slightly negative.
        scale_D = (np.maximum(value_D, 0.0) + SHRINKAGE * mean) ** _EXPONENT
        return cls((basis_DD * scale_D) @ basis_DD.T, count)

    def __call__(self, vector_ND: Vectors) -> Vectors:
        """The whitened vectors at unit length, (N, D) float32."""
        return unit_rows(unit_rows(vector_ND) @ self.matrix_DD.astype(np.float32))


def write_whitened(
    model: str | PathLike[str], vectors: VectorFolder | str | PathLike[str], output: str | PathLike[str]
) -> Whitening:
    """Write a model directory whose vectors are whitened for a corpus, by a `Dense` layer before `Normalize`.

    The layer has no bias and no activation; a head that the model has is multiplied by the matrix. The widths that the
    model was trained for are left out: a truncated vector is no longer one of them.

    Args:
        model: A model directory or Hub id.
        vectors: The corpus as this model encoded it (`encode_corpus`), at least 512 documents in float32.
        output: The directory to write; an existing one is replaced once the new one is complete.

    Raises:
        InputError: If the vectors are another model's, truncated, or too few.
        OptionError: If the model compares vectors by inner products of any length.
    """
    require_replaceable(output)
    folder = vectors if isinstance(vectors, VectorFolder) else VectorFolder.open(vectors)
    folder.require_format("float32", use="whitening")
    embedder = load_embedder(model)
    if isinstance(embedder, ContextualEmbedder):
        raise InputError(str(model), "is a contextual model, whose vectors cannot be whitened", "give a plain model")
    embedder.require_directions("model", str(model), "whitening")
    encoder = Encoder(embedder)
    whole = {"model_sha256": embedder_sha256(encoder), "role": "document", "embedding_dim": encoder.embedding_dim}
    check_manifest(folder.path, whole)
    found = Whitening.of(folder.tiles())
    if found is None:
        what = f"has {folder.num_documents} vectors, whitening needs {MIN_DOCUMENTS} that are not all equal"
        raise InputError(str(folder.path), what, "use the model as it is")
    whiten(embedder, found)
    where = "with S the covariance of a corpus' vectors and m the mean of its eigenvalues"
    text = f"The last layer multiplies vectors by (S + 0.1 m I)^(-1/4), {where}."
    rows = {"model": shown_name(fspath(model)), "corpus": f"{found.num_documents:,} documents"}
    _write(embedder, output, "Partial whitening", text, rows, [model])
    return found


@torch.no_grad()
def whiten(embedder: Embedder, whitening: Whitening) -> None:
    """Add the layer to a model, whose vectors then have unit length."""
    matrix_DD = torch.from_numpy(whitening.matrix_DD)
    old = embedder.head
    weight_DH: Tensor = matrix_DD if old is None else matrix_DD @ old.weight.double()
    bias_D = None if old is None or old.bias is None else matrix_DD @ old.bias.double()
    head = nn.Linear(weight_DH.shape[1], len(weight_DH), bias=bias_D is not None)
    head.weight.copy_(weight_DH)
    if bias_D is not None:
        head.bias.copy_(bias_D)
    embedder.head, embedder.normalize, embedder.trained_widths = head, True, ()
