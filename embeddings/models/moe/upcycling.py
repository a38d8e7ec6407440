"""Conversion of encoders to rotary positions, upcycling of their MLPs into experts, and metrics of the routing."""

import importlib
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel
from transformers.models.jina_embeddings_v3.configuration_jina_embeddings_v3 import JinaEmbeddingsV3Config
from transformers.models.nomic_bert.configuration_nomic_bert import NomicBertConfig

from embeddings.common import OptionError, require_minimum
from embeddings.common.distributed import count_values, full_shape
from embeddings.common.own_folder import replaced_folder, require_replaceable
from embeddings.common.process import quiet_transformers
from embeddings.models.backbone import BackboneConfig, enable_checkpointing, load_backbone
from embeddings.models.language_model import VOCABULARY_STEP, load_language_model
from embeddings.models.model_files import resolve_model
from embeddings.models.moe.experts import (
    Backend,
    Experts,
    ExpertWeights,
    Routing,
    grouped_experts,
    grouped_mlps,
    loop_experts,
    sorted_experts,
)
from embeddings.models.moe.rotary_moe import RotaryMoeConfig, RotaryMoeModel, RotaryMoeOutput
from embeddings.models.pooling import plain_backbone


@dataclass(frozen=True)
class Upcycling:
    """The MLPs that become experts, their number, and how the dense weights are used.

    Args:
        mode: `preserving` keeps the dense biases (the first in each expert, the second shared) and divides a token's
            weights by their sum, so that the initial output equals the dense model's. `release` follows the released
            model: no dense biases, weights not renormalised, one shared output bias initialised with zeros. NomicBert's
            gated MLPs have no biases; their shared output bias is initialised with zeros in both modes.
        num_experts: Experts in each sparse layer, X. The paper: 8.
        top_k: Experts per token, K. The paper: 2, and 1 in its monolingual study.
        first: Index of the first sparse layer, from 0. The paper: the second layer, 1.
        every: Distance between sparse layers. The paper: 2, every other layer.
        noise: Half the width of the uniform factor on the router's input in training; 0 for none.

    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, §4.3; Komatsuzaki 2023, arXiv:2212.05055, for the method.
    """

    mode: Literal["preserving", "release"] = "preserving"
    num_experts: int = 8
    top_k: int = 2
    first: int = 1
    every: int = 2
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name, minimum in (("num_experts", 1), ("top_k", 1), ("first", 0), ("every", 1), ("noise", 0)):
            require_minimum(f"upcycling.{name}", getattr(self, name), minimum, "leave it out for the paper's value")
        if self.top_k > self.num_experts:
            rule = f"must be at most the number of experts, {self.num_experts}"
            raise OptionError("upcycling.top_k", self.top_k, rule, "lower it")
        if self.noise >= 1:
            raise OptionError("upcycling.noise", self.noise, "must be < 1", "lower it")

    def layers(self, num_layers: int) -> list[int]:
        """The indices of a model's sparse layers, in order; an `OptionError` if there are none."""
        chosen = list(range(self.first, num_layers, self.every))
        if not chosen:
            rule = f"must be < {num_layers}, the model's number of layers"
            raise OptionError("upcycling.first", self.first, rule, "lower it")
        return chosen


def upcycle(dense: PreTrainedModel, settings: Upcycling) -> RotaryMoeModel:
    """Replace chosen MLPs of a dense rotary encoder by experts; dtype, attention and training mode stay the same.

    Each expert is a copy of the layer's MLP; experts become different in training because the router, drawn from
    N(0, 0.02), sends them different tokens.

    Args:
        dense: A rotary encoder without head (see `to_rotary`), or a NomicBert. It shares weights with the result and
            should not be used afterwards.
    """
    gated = type(dense.config) is NomicBertConfig
    if not (gated or type(dense.config) is JinaEmbeddingsV3Config) or not hasattr(dense, "layers"):
        is_sparse = isinstance(dense, RotaryMoeModel)
        rule = "needs a dense backbone, and this one has experts" if is_sparse else "needs rotary positions"
        fix = "take NomicBert, or convert XLM-R or BERT with `convert`"
        raise OptionError("upcycling", f"a {dense.config.model_type} backbone", rule, fix)
    layers, preserving = settings.layers(dense.config.num_hidden_layers), settings.mode == "preserving"
    fields = dense.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "dtype"):
        fields.pop(name, None)
    config = RotaryMoeConfig(
        **fields,
        moe_layers=layers,
        num_experts=settings.num_experts,
        experts_per_token=settings.top_k,
        renormalize_experts=preserving,
        expert_bias=preserving and not gated,
        router_noise=settings.noise,
        gated_mlp=gated,
    )
    with torch.device("meta"):
        options: dict[str, Any] = {"attn_implementation": dense.config._attn_implementation, "dtype": dense.dtype}
        sparse: RotaryMoeModel = AutoModel.from_config(config, **options)  # type: ignore[no-untyped-call]
    state = {name: value for name, value in dense.state_dict().items() if not name.startswith("pooler.")}
    for layer in layers:
        prefix = f"layers.{layer}.mlp."
        mlp = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
        state |= {f"layers.{layer}.mlp.{name}": value for name, value in _experts_of(mlp, settings).items()}
    sparse.load_state_dict(state, assign=True)
    # Buffers are not in the state dict, and the new model's are on the meta device.
    for name, buffer in dense.named_buffers():
        owner, _, attribute = name.rpartition(".")
        setattr(sparse.get_submodule(owner), attribute, buffer)
    sparse.train(dense.training)
    if any(getattr(module, "gradient_checkpointing", False) for module in dense.modules()):
        enable_checkpointing(sparse)
    return sparse


class ParameterCounts(NamedTuple):
    """The number of all parameters of a model, and of those active for one token: K experts in each sparse layer."""

    total: int
    active: int


def parameter_counts(model: nn.Module) -> ParameterCounts:
    """Total and active parameters of a model, over all ranks; the paper's model has 475M and 305M."""
    total = count_values(model.parameters())
    inactive = 0
    for layer in model.modules():
        experts, router = getattr(layer, "experts", None), getattr(layer, "router", None)
        if isinstance(experts, Experts) and router is not None:
            stacked = [full_shape(weight) for weight in (experts.w1, experts.w2, experts.bias1) if weight is not None]
            inactive += (stacked[0][0] - router.top_k) * sum(shape[1:].numel() for shape in stacked)
    return ParameterCounts(total, total - inactive)


def _experts_of(mlp: dict[str, Tensor], settings: Upcycling) -> dict[str, Tensor]:

    def copies(weight: Tensor) -> Tensor:
        return weight.expand(settings.num_experts, *weight.shape).clone()

    gated = "gate_proj.weight" in mlp
    first = torch.cat([mlp["gate_proj.weight"], mlp["up_proj.weight"]]) if gated else mlp["fc1.weight"]
    second = mlp["down_proj.weight" if gated else "fc2.weight"]
    router_XH = first.new_empty(settings.num_experts, first.shape[1]).normal_(std=0.02)
    weights = {"router.weight": router_XH, "experts.w1": copies(first), "experts.w2": copies(second.T)}
    if gated or settings.mode == "release":
        return weights | {"experts.bias2": second.new_zeros(len(second))}
    return weights | {"experts.bias1": copies(mlp["fc1.bias"]), "experts.bias2": mlp["fc2.bias"]}


COUNTS, PROBABILITIES, SQUARED_LOGSUMEXP = "expert_counts", "expert_probabilities", "router_squared_logsumexp"


def has_experts(backbone: nn.Module) -> bool:
    return isinstance(plain_backbone(backbone), RotaryMoeModel)


def moe_layers(backbone: nn.Module) -> list[int]:
    return list(plain_backbone(backbone).config.moe_layers) if has_experts(backbone) else []


@contextmanager
def read_routing(backbone: nn.Module) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Add up the routing sums of the forward passes within this context.

    The yielded function returns the sums so far by their names in `RotaryMoeOutput`; none for a dense backbone.
    """
    sums: dict[str, Tensor] = {}

    def add(_: nn.Module, __: Any, output: RotaryMoeOutput) -> None:
        for name in (COUNTS, PROBABILITIES, SQUARED_LOGSUMEXP):
            value = getattr(output, name)
            sums[name] = sums[name] + value if name in sums else value

    if not has_experts(backbone):
        yield dict
        return
    hook = plain_backbone(backbone).register_forward_hook(add)
    try:
        yield lambda: dict(sums)
    finally:
        hook.remove()


class LoadMetrics(NamedTuple):
    """The balance of the load of X experts in Y sparse layers."""

    entropy_Y: Tensor  # entropy of the experts' shares over its maximum, (Y,) float64, 0 to 1; 1 for an even load
    highest_Y: Tensor  # tokens of the most loaded expert over an even share, (Y,) float32, from 1 to X
    idle_Y: Tensor  # number of experts without tokens, (Y,) int64


def load_metrics(count_YX: Tensor) -> LoadMetrics:
    highest_Y = count_YX.amax(dim=1) * count_YX.shape[1] / count_YX.sum(dim=1).clamp(min=1)
    return LoadMetrics(relative_entropy(count_YX), highest_Y, (count_YX == 0).sum(dim=1))


def routing_metrics(count_YX: Tensor, probability_YX: Tensor, layers: list[int]) -> dict[str, float]:
    """The metrics of one step by their logged names."""
    load = load_metrics(count_YX)
    by_name = {
        "load_entropy": load.entropy_Y,
        "probability_entropy": relative_entropy(probability_YX),
        "highest_load": load.highest_Y,
        "idle_experts": load.idle_Y,
    }
    values = {
        f"routing/{name}_layer_{layer}": float(value)
        for name, value_Y in by_name.items()
        for layer, value in zip(layers, value_Y.tolist(), strict=True)
    }
    totals = {"load_entropy": load.entropy_Y.mean(), "idle_experts": load.idle_Y.sum()}
    return values | {f"routing/{name}": float(value) for name, value in totals.items()}


def relative_entropy(amount_YX: Tensor) -> Tensor:
    """The entropy of each row's shares over log X, (Y,) float64; 1 for a single expert."""
    share_YX = amount_YX.double() / amount_YX.sum(dim=1, keepdim=True).clamp(min=1e-12)
    maximum = math.log(amount_YX.shape[1])
    entropy_Y = torch.special.entr(share_YX).sum(dim=1)
    return entropy_Y / maximum if maximum else torch.ones_like(entropy_Y)


BackendName = Literal["grouped_mm", "loop", "megablocks"]


def set_expert_backend(model: nn.Module, name: BackendName) -> None:
    """Set how all experts of a model are computed.

    `grouped_mm` is torch's grouped product over tokens sorted by expert; `loop`, a loop over experts, the reference;
    `megablocks`, the grouped product of that library, only for bfloat16 on CUDA.
    """
    known: dict[str, Backend] = {"grouped_mm": grouped_experts, "loop": loop_experts}
    backend = known[name] if name in known else MegablocksExperts()
    for module in model.modules():
        if isinstance(module, Experts):
            module.backend = backend


class MegablocksExperts:
    """The experts' sum with megablocks' grouped product, tested only with a replacement of that product."""

    def __init__(self) -> None:
        try:
            util = importlib.import_module("megablocks.grouped_gemm_util")
        except ModuleNotFoundError as error:
            pin = "its newest release, 0.10.0, requires torch<2.7.1, and this library torch>=2.11"
            rule = f"must be grouped_mm or loop here ({error}: {pin})"
            raise OptionError("expert_backend", "megablocks", rule, "leave it out for grouped_mm") from error
        if not util.grouped_gemm_is_available():
            raise OptionError("expert_backend", "megablocks", "lacks its grouped product", "install grouped_gemm too")
        self._gmm: Any = util.ops.gmm

    def __call__(self, token_TH: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
        if token_TH.dtype != torch.bfloat16:
            rule, fix = "supports only bfloat16", "train with precision bf16-mixed or bf16-true, or use grouped_mm"
            raise OptionError("expert_backend", f"megablocks in {token_TH.dtype}", rule, fix)
        return sorted_experts(token_TH, routing, weights, partial(grouped_mlps, product=self._product))

    def _product(self, row_PI: Tensor, matrix_XIO: Tensor, end_X: Tensor) -> Tensor:
        # megablocks needs each expert's number of rows on the CPU, and contiguous matrices.
        size_X = end_X.diff(prepend=end_X.new_zeros(1)).to("cpu", torch.int64)
        is_transposed = not matrix_XIO.is_contiguous()
        matrix = matrix_XIO.transpose(1, 2) if is_transposed else matrix_XIO
        product_PO: Tensor = self._gmm(row_PI, matrix, size_X, trans_b=is_transposed)
        return product_PO


KINDS = ("xlm-roberta", "roberta", "bert")
# Rows that pad the vocabulary are never predicted: their logit is far below any other.
_UNUSED_BIAS = -100.0
_COPIED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size", "initializer_range"),
    *("layer_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id"),
)
_IN_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "post_mlp_layernorm",
}
_IN_HEAD = {
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.decoder": "lm_head.decoder",
    "cls.predictions": "lm_head",
}
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")


def to_rotary(model: PreTrainedModel, num_positions: int = 2048, rope_theta: float = 10_000.0) -> PreTrainedModel:
    """Replace an encoder's position embeddings by rotations of queries and keys.

    All other weights stay, also those of the language-model head; training must then adapt the model. The vocabulary is
    padded with rows of zeros to a multiple of 64. The result is transformers' `JinaEmbeddingsV3Model` or its masked
    language model, in evaluation mode, with the same dtype and attention.

    Args:
        model: XLM-R, RoBERTa or BERT, with or without its masked-language-model head.
        num_positions: Intended maximum length in tokens, stored in the config only. The paper trains on 2,048.
        rope_theta: Base of the rotation's angles. The paper: 10,000; larger values scored lower.

    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, §4.1, which does not state the values of the padding.
    """
    if model.config.model_type not in KINDS or getattr(model.config, "is_decoder", False):
        raise OptionError("model", model.config.model_type, "cannot be converted", f"convert one of {', '.join(KINDS)}")
    if not rope_theta > 1:
        raise OptionError("rope_theta", rope_theta, "must be > 1", "the paper uses 10,000")
    if (width := model.config.hidden_size // model.config.num_attention_heads) % 2:
        raise OptionError("model", f"heads of width {width}", "must have heads of even width", "convert another")
    num_rows = -(-int(model.config.vocab_size) // VOCABULARY_STEP) * VOCABULARY_STEP
    config = JinaEmbeddingsV3Config(
        **{name: getattr(model.config, name) for name in _COPIED},
        vocab_size=num_rows,
        max_position_embeddings=num_positions,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
    )
    state, prefix = _renamed(model)
    if prefix and model.config.hidden_act != "gelu":
        rule = "must be gelu, the activation of the rotary model's head"
        raise OptionError("hidden_act", model.config.hidden_act, rule, "convert the encoder without its head")
    options: dict[str, Any] = {"attn_implementation": model.config._attn_implementation, "dtype": model.dtype}
    options |= {} if prefix else {"add_pooling_layer": False}
    auto_class: Any = AutoModelForMaskedLM if prefix else AutoModel
    rotary: PreTrainedModel = auto_class.from_config(config, **options)
    rotary.load_state_dict({name: _padded(name, value, num_rows) for name, value in state.items()})
    rotary.tie_weights()
    rotary.train(False)
    return rotary


def write_rotary_model(
    source: str,
    output: str | os.PathLike[str],
    num_positions: int = 2048,
    rope_theta: float = 10_000.0,
    keep_head: bool = True,
) -> PreTrainedModel:
    """Write a checkpoint's rotary model as a Hugging Face directory, atomically; an existing model is replaced.

    Args:
        source: A directory or Hub id of XLM-R, RoBERTa or BERT.
        output: The directory; `MaskedLMModule` adapts the model by training, `BackboneConfig` loads only the encoder.
        num_positions: As in `to_rotary`; also the tokenizer's maximum length.
        rope_theta: As in `to_rotary`.
        keep_head: Whether to keep the language-model head, which the adaptation needs.
    """
    folder = resolve_model(source)
    if folder.resolve() == Path(output).expanduser().resolve():
        raise OptionError("output", str(output), "must not be the source, which it would replace", "name a new folder")
    require_replaceable(output)
    config = BackboneConfig(source, dtype="auto")
    model, tokenizer = load_language_model(config, "masked") if keep_head else load_backbone(config)
    rotary = to_rotary(model, num_positions, rope_theta)
    tokenizer.model_max_length = num_positions
    with replaced_folder(Path(output)) as new, quiet_transformers():
        rotary.save_pretrained(new)
        tokenizer.save_pretrained(new)
    return rotary


def _renamed(model: PreTrainedModel) -> tuple[dict[str, Tensor], str]:
    """The weights under the rotary model's names, and the prefix of its encoder: empty without a head."""
    old = f"{model.base_model_prefix}."
    state = model.state_dict()
    prefix = "roberta." if any(name.startswith(old) for name in state) else ""
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        inner = name.removeprefix(old)
        if prefix and inner == name:
            stem, _, kind = name.rpartition(".")
            renamed[f"{_IN_HEAD.get(stem, stem)}.{kind}"] = value
        elif match := _LAYER.fullmatch(inner):
            renamed[f"{prefix}layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"] = value
        elif not inner.startswith(("embeddings.position", "embeddings.token_type_ids", "pooler.")):
            renamed[f"{prefix}{inner}"] = value
    return renamed, prefix


def _padded(name: str, value: Tensor, num_rows: int) -> Tensor:
    """A weight, padded to the rows of the padded vocabulary if it has one row per token."""
    if name.rpartition(".")[0].endswith("word_embeddings") or name == "lm_head.decoder.weight":
        padding = value.new_zeros(num_rows - len(value), value.shape[1])
    elif name in ("lm_head.decoder.bias", "lm_head.bias"):
        padding = torch.full((num_rows - len(value),), _UNUSED_BIAS, dtype=value.dtype, device=value.device)
    else:
        return value
    return torch.cat([value, padding])
