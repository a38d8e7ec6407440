"""Predicts the memory, arithmetic and traffic of a training step from a model on the meta device."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer

from embeddings.common import PaddedTokens, TextSettings
from embeddings.models import ContextualEmbedder, Embedder
from embeddings.models.bidirectional import layers
from embeddings.models.moe.experts import Experts, ExpertWeights, sorted_experts
from embeddings.training.gradcache import FEW_MINI_BATCHES

StrategyName = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
# Strategies that shard the optimiser state, the gradients and the weights.
_SHARES_STATE = ("zero1", "zero2", "zero3", "fsdp2")
_SHARES_GRADIENTS = ("zero2", "zero3", "fsdp2")
_SHARES_WEIGHTS = ("zero3", "fsdp2")
_ZERO = ("zero1", "zero2", "zero3")
# Numbers of texts of the two traces. The cost of a mini-batch is linear in its texts, which have equal lengths.
_TRACED = (2, 4)


@dataclass(frozen=True)
class Linear:
    """A cost that is linear in the number of texts: a constant plus a cost per text."""

    shared: float = 0.0
    each: float = 0.0

    def of(self, count: float) -> float:
        return self.shared + self.each * count

    @classmethod
    def through(cls, values: Sequence[float]) -> "Linear":
        each = (values[1] - values[0]) / (_TRACED[1] - _TRACED[0])
        return cls(values[0] - _TRACED[0] * each, each)


@dataclass(frozen=True)
class Cost:
    """The cost of embedding texts of equal length."""

    forward: Linear  # floating-point operations of a forward; a multiply-add counts as two
    backward: Linear  # the same for its backward, including recomputed layers
    graph: Linear  # bytes that the graph keeps until the backward; a checkpointed layer keeps only its input
    again: Linear  # bytes of the largest checkpointed layer's graph, which exists only during its recomputation
    unchecked: Linear  # bytes that the graph would keep without checkpointing; its shared part is cast weights


@dataclass(frozen=True)
class Texts:
    """Texts of one group on one rank, each with `tokens` tokens after `extra` positions of context and soft prompt."""

    name: str
    count: int
    tokens: int
    cost: Cost
    extra: int = 0

    def per_mini_batch(self, tokens: int | None, texts: int | None) -> int:
        """Texts of one GradCache mini-batch; all if there is no limit."""
        if tokens is None:
            return self.count
        return min(self.count, max(1, tokens // (self.tokens + self.extra)), texts or self.count)


@dataclass(frozen=True)
class Setting:
    num_ranks: int = 1
    strategy: StrategyName = "single"
    half_products: bool = True  # whether autocast computes matrix products in 16 bits
    mini_batch_tokens: int | None = None  # GradCache's limit; None without GradCache
    mini_batch_texts: int | None = None
    kept_gib: float = 0.0  # GradCache's memory for kept graphs
    kept_share: float = 0.0  # the same as a fraction of the part of `memory` that is free after a step
    memory: float = 0.0  # bytes for a process, on its GPU
    device: Literal["cuda", "cpu"] = "cuda"
    accumulated: int = 1  # batches per optimiser step


@dataclass(frozen=True)
class LossSize:
    """The sizes of a loss on one rank."""

    num_rows: int  # of the score matrix: queries, or predicted tokens
    num_columns: int  # of the score matrix: candidates of all ranks, or the vocabulary
    width: int  # dimensions of the compared vectors; the sum for several losses
    tile: int  # number of scores in memory at the same time
    stored: int = 0  # vectors of this rank that are stored with their gradients
    gathered: int = 0  # candidates that are gathered from all ranks; 0 if each rank uses only its own

    @property
    def operations(self) -> float:
        return 6.0 * self.num_rows * self.num_columns * self.width

    @property
    def num_bytes(self) -> float:
        vectors = 8.0 * self.stored * self.width + 8.0 * self.num_columns * self.width
        return vectors + 9.0 * min(self.num_rows * self.num_columns, max(self.tile, 32 * self.num_columns))


@dataclass(frozen=True)
class StepCost:
    """The costs of an optimiser step on one GPU, by component: peak bytes, operations and bytes sent."""

    trained: int
    frozen: int
    memory: dict[str, float]
    operations: dict[str, float]
    num_mini_batches: int
    kept: float
    sent: dict[str, float]


def plan_step(
    module: nn.Module, texts: Sequence[Texts], loss: LossSize, setting: Setting, state_per_weight: float = 2.0
) -> StepCost:
    """The memory, arithmetic and traffic of an optimiser step on one GPU.

    It excludes the CUDA context, NCCL's buffers, fragmentation, and temporary results inside one operation. Operations
    are those of matrix products and attention.

    Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, §3 and §5, for what each stage shards.
    """
    weights = list(module.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    frozen = sum(weight.numel() for weight in weights if not weight.requires_grad)
    # (texts, texts per mini-batch, mini-batches as a fraction) of each group.
    sizes = [text.per_mini_batch(setting.mini_batch_tokens, setting.mini_batch_texts) for text in texts]
    groups = [(text, size, text.count / size) for text, size in zip(texts, sizes, strict=True)]
    num_mini_batches = sum(math.ceil(count) for _, _, count in groups)
    chunks = [text.cost.graph.each * size for text, size, _ in groups]
    again = max(text.cost.again.each * size for text, size, _ in groups)
    all_graphs = sum(chunk * count for chunk, (_, _, count) in zip(chunks, groups, strict=True))
    memory = _state_bytes(module, setting, state_per_weight)
    kept = 1.0
    if setting.mini_batch_tokens is not None:
        free = max(0.0, setting.memory - sum(memory.values()))
        budget = setting.kept_gib * 2**30 + setting.kept_share * free
        # Of a few mini-batches the last graph is kept even without a budget.
        least = 1 / num_mini_batches if num_mini_batches <= FEW_MINI_BATCHES else 0.0
        kept = min(1.0, max(budget / all_graphs, least)) if all_graphs else 1.0
    # FSDP2 and ZeRO use 16-bit weights directly.
    if setting.strategy not in _SHARES_STATE:
        memory["casts of weights, shared by graphs"] = max(text.cost.unchecked.shared for text in texts)
    memory["activations"] = max(kept * all_graphs, max(chunks)) + again
    memory["vectors, candidates and loss tiles"] = loss.num_bytes
    forward = sum(count * text.cost.forward.of(size) for text, size, count in groups)
    backward = sum(count * text.cost.backward.of(size) for text, size, count in groups)
    operations = {"forward": forward, "GradCache's second forward": (1 - kept) * forward, "backward": backward}
    operations["loss"] = loss.operations
    scaled = {part: setting.accumulated * value for part, value in operations.items() if value}
    sent = sent_bytes(module, setting, loss, num_mini_batches, kept)
    return StepCost(trained, frozen, memory, scaled, num_mini_batches, kept, sent)


def sent_bytes(
    module: nn.Module, setting: Setting, loss: LossSize, num_mini_batches: int, kept: float
) -> dict[str, float]:
    """Bytes that a GPU sends in an optimiser step, by component.

    In a ring of R ranks, an all-gather or reduce-scatter of S bytes sends S (R - 1) / R bytes per rank; an all-reduce
    sends twice as many. With n mini-batches of which a fraction k keeps its graph, there are n (2 - k) forwards and n
    backwards.

        DDP      gradients once per step, in the last backward
        ZeRO-1   gradients once per step; trained weights after the update
        ZeRO-2   gradients in every backward; trained weights after the update
        ZeRO-3   gradients in every backward; all weights in every forward and backward
        FSDP2    gradients in every backward; a layer's weights in every forward and backward; other weights once per
                 reduction, because they stay gathered until their gradient is reduced

    Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, §7, and Patarasuk and Yuan 2009 for the ring.
    """
    name, ranks, half = setting.strategy, setting.num_ranks, setting.half_products
    if ranks == 1:
        return {}
    weights = list(module.parameters())
    is_half = name in _ZERO and half
    share, backwards = (ranks - 1) / ranks, setting.accumulated
    if setting.mini_batch_tokens is not None:
        backwards *= num_mini_batches
    passes = setting.accumulated * num_mini_batches * (3 - kept)
    # Gradients are as large as the trained weights.
    trained = share * _num_bytes((weight for weight in weights if weight.requires_grad), is_half)
    sent = {"gradients": trained * backwards}
    match name:
        case "ddp" | "single":
            sent["gradients"] = 2 * trained
        case "zero1":
            sent = {"gradients": trained, "weights": trained}
        case "zero2":
            sent["weights"] = trained
        case "zero3":
            sent["weights"] = share * passes * _num_bytes(weights, is_half)
        case "fsdp2":
            in_layers = {id(weight) for layer in layers(module) for weight in layer.parameters()}
            inner = _num_bytes((weight for weight in weights if id(weight) in in_layers), half)
            others = _num_bytes((weight for weight in weights if id(weight) not in in_layers), False)
            sent["weights"] = share * (passes * inner + backwards * others)
    if loss.gathered:
        sent["candidates and their gradients"] = 8.0 * share * setting.accumulated * loss.gathered * loss.width
    return sent


def _num_bytes(weights: Iterable[Tensor], as_half: bool) -> float:
    return float(sum(weight.numel() * min(2 if as_half else 8, weight.element_size()) for weight in weights))


def _state_bytes(module: nn.Module, setting: Setting, state_per_weight: float) -> dict[str, float]:
    name, ranks = setting.strategy, setting.num_ranks
    as_half = name in _ZERO and setting.half_products
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    state = sum(state_per_weight * weight.numel() * (4 if as_half else weight.element_size()) for weight in trained)
    if as_half:
        # ZeRO updates a float32 copy.
        state += 4 * sum(weight.numel() for weight in trained)
    gradients = _num_bytes(trained, as_half)
    memory = {"weights": _num_bytes(module.parameters(), as_half) / (ranks if name in _SHARES_WEIGHTS else 1)}
    memory["gradients"] = gradients / (ranks if name in _SHARES_GRADIENTS else 1)
    memory["optimiser state"] = state / (ranks if name in _SHARES_STATE else 1)
    if name == "ddp":
        memory["gradient buckets of DDP"] = gradients
    if name in _SHARES_WEIGHTS:
        # The current layer and the next one.
        largest = max((sum(weight.numel() for weight in layer.parameters()) for layer in layers(module)), default=0)
        memory["gathered weights of two layers"] = 2.0 * largest * (2 if setting.half_products else 4)
    return memory


def trace(module: nn.Module, run: Callable[[int], Tensor], half: bool) -> Cost:
    """Count the cost of embedding texts, forward and backward, without computing anything, inside `without_data`.

    `run` embeds the given number of texts, of equal length and without padding. With `half`, autocast computes matrix
    products in bfloat16.
    """
    values: list[tuple[float, ...]] = []
    for count in _TRACED:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
        with autocast, counted() as forward:
            vectors = run(count)
        with counted() as backward:
            if vectors.requires_grad:
                torch.autograd.backward(vectors.sum())
        with autocast:
            num_bytes = _graph_bytes(module, partial(run, count))
        values.append((forward.get_total_flops(), backward.get_total_flops(), *num_bytes))
        module.zero_grad()
    return Cost(*(Linear.through(two) for two in zip(*values, strict=True)))


def _graph_bytes(module: nn.Module, run: Callable[[], Tensor]) -> tuple[float, float, float]:
    """Bytes of a graph, of its largest checkpointed layer, and of the graph without checkpointing; no parameters."""
    # Keeps the storages alive, so that addresses are unique.
    saved: dict[int, tuple[torch.UntypedStorage, nn.Module | None]] = {}
    inputs: dict[nn.Module, int] = {}
    current: list[nn.Module] = []

    def enter(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        current.append(layer)
        inputs[layer] = arguments[0].untyped_storage().nbytes()

    def leave(*_: Any) -> None:
        current.pop()

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved.setdefault(storage._cdata, (storage, current[-1] if current else None))
        return tensor

    checkpointed = [part for part in module.modules() if getattr(part, "gradient_checkpointing", False)]
    again = [part for part in checkpointed if isinstance(part, GradientCheckpointingLayer)]
    handles = [layer.register_forward_pre_hook(enter) for layer in again]
    handles += [layer.register_forward_hook(leave) for layer in again]
    for part in checkpointed:
        part.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            vectors = run()
    finally:
        for part in checkpointed:
            part.gradient_checkpointing = True  # type: ignore[assignment]
        for handle in handles:
            handle.remove()
    for parameter in (*module.parameters(), *module.buffers()):
        saved.pop(parameter.untyped_storage()._cdata, None)
    by_owner: dict[nn.Module | None, int] = dict.fromkeys(again, 0)
    for storage, owner in saved.values():
        by_owner[owner] = by_owner.get(owner, 0) + storage.nbytes()
    if not vectors.requires_grad:
        return 0.0, 0.0, 0.0
    largest = max((by_owner[layer] for layer in again), default=0)
    return by_owner.get(None, 0) + sum(inputs.values()), largest, sum(by_owner.values())


def counted() -> FlopCounterMode:
    """A counter of the operations of matrix products and attention, including CPU kernels."""
    counter = FlopCounterMode(display=False, custom_mapping=_KERNELS)
    # Counting per module needs hooks that do not work with GradCache's `autograd.grad`.
    counter.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
    return counter


class _NoModuleTracker(nullcontext[None]):
    """Replaces the counter's module tracker: all operations count for the root."""

    parents = ("Global",)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products for each of the query's heads. They may share keys, which torch's formula refuses before 2.13."""
    return int(2 * math.prod(query[:3]) * key[2] * (query[3] + value[3]))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The scores again, and the gradients of weights, values, queries and keys."""
    return int(2 * math.prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3]))


def _grouped(first: Any, second: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Of (P, I) x (X, I, O), or of (I, P) x (P, O) with a result of (X, I, O)."""
    return int(2 * first[0] * first[1] * second[-1])


_ATEN = torch.ops.aten
_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_KERNELS: dict[Any, Any] = {
    **{getattr(_ATEN, f"_scaled_dot_product_{name}"): _attention for name in _ATTENTION},
    **{getattr(_ATEN, f"_scaled_dot_product_{name}_backward"): _attention_backward for name in _ATTENTION},
    _ATEN._grouped_mm: _grouped,
}


class _NoPadding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces operations that depend on values, which fake tensors lack: every mask is true everywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is _ATEN._local_scalar_dense.default:
            return 1
        return func(*args, **(kwargs or {}))


@contextmanager
def without_data(module: nn.Module) -> Iterator[None]:
    """A context in which a module on the meta device acts as if on the CPU; nothing is stored or computed."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _NoPadding():  # type: ignore[no-untyped-call]
            module.to_empty(device="cpu")
            for part in module.modules():
                if isinstance(part, Experts):
                    part.backend = partial(sorted_experts, mlps=_even_mlps)
            module.train()
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _even_mlps(row_PH: Tensor, _: Tensor, weights: ExpertWeights) -> Tensor:
    """Each expert's MLP over an equal part of the rows, (P, H)."""
    num_experts, num_rows = len(weights.w1_XFH), len(row_PH)
    row_XRH = F.pad(row_PH, (0, 0, 0, -num_rows % num_experts)).view(num_experts, -1, row_PH.shape[1])
    inner_XRF = row_XRH @ weights.w1_XFH.transpose(1, 2)
    if weights.bias_XF is not None:
        inner_XRF = inner_XRF + weights.bias_XF[:, None]
    return (weights.activation(inner_XRF) @ weights.w2_XFH).flatten(0, 1)[:num_rows]


def trace_embedder(
    embedder: Embedder, num_queries: int, num_candidates: int, query_tokens: int, document_tokens: int, half: bool
) -> list[Texts]:
    """The groups of texts of a contrastive batch on one rank, traced inside `without_data`."""
    embedder.check_lengths(TextSettings(query_max_length=query_tokens, document_max_length=document_tokens))
    groups, context, extra = [], None, 0
    if isinstance(embedder, ContextualEmbedder):
        num_context, extra = min(embedder.num_context, num_candidates), embedder.num_extra_tokens
        context = torch.zeros(num_context, embedder.context_size, requires_grad=True)
        limit = min(document_tokens, embedder.first_stage.max_length or document_tokens)
        cost = trace(embedder, lambda count: embedder.embed_context(_tokens(count, limit)), half)
        groups.append(Texts("context documents", num_context, limit, cost))
    arguments = () if context is None else (context,)
    costs = {
        length: trace(embedder, lambda count, n=length: embedder(_tokens(count, n), *arguments), half)  # type: ignore[misc]
        for length in {query_tokens, document_tokens}
    }
    groups.append(Texts("queries", num_queries, query_tokens, costs[query_tokens], extra))
    groups.append(Texts("documents", num_candidates, document_tokens, costs[document_tokens], extra))
    return groups


def _tokens(count: int, length: int) -> PaddedTokens:
    all_NL = torch.ones(count, length, dtype=torch.bool)
    return PaddedTokens(torch.zeros(count, length, dtype=torch.int64), all_NL, all_NL)
