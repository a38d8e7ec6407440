"""What a run needs before it is paid for: memory, arithmetic and disk, counted on a model that has no weights."""

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
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers.modeling_layers import GradientCheckpointingLayer

from embeddings.common import PaddedTokens
from embeddings.models import ContextualEmbedder, Embedder
from embeddings.models.bidirectional import layers
from embeddings.models.moe.experts import Experts, ExpertWeights, sorted_experts

StrategyName = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
# What the ranks of a strategy share.
_SHARES_STATE = ("zero1", "zero2", "zero3", "fsdp2")
_SHARES_GRADIENTS = ("zero2", "zero3", "fsdp2")
_SHARES_WEIGHTS = ("zero3", "fsdp2")
_ZERO = ("zero1", "zero2", "zero3")
# Texts of the two traces. What a mini-batch costs is linear in its texts, which all have one length.
_TRACED = (2, 4)


@dataclass(frozen=True)
class Linear:
    """A cost of n texts of one length: what they share, and what each adds."""

    shared: float = 0.0
    each: float = 0.0

    def of(self, count: float) -> float:
        return self.shared + self.each * count

    @classmethod
    def through(cls, values: Sequence[float]) -> "Linear":
        """The line through the costs of the traces."""
        each = (values[1] - values[0]) / (_TRACED[1] - _TRACED[0])
        return cls(values[0] - _TRACED[0] * each, each)


@dataclass(frozen=True)
class Cost:
    """What embedding texts of one length costs.

    Attributes:
        forward: Operations (a product and a sum are two) of a forward.
        backward: Of its backward, with what checkpointed layers compute again.
        graph: Bytes that its graph keeps until the backward; of a checkpointed layer its input.
        again: Bytes of the largest checkpointed layer's graph, which exists once while it is computed again.
        unchecked: Bytes that the graph would keep without checkpointing. What texts share of it are cast weights.
    """

    forward: Linear
    backward: Linear
    graph: Linear
    again: Linear
    unchecked: Linear


@dataclass(frozen=True)
class Texts:
    """Texts of one tower on one rank, each of `tokens` tokens behind `extra` slots of context and soft prompt."""

    name: str
    count: int
    tokens: int
    cost: Cost
    extra: int = 0

    def per_mini_batch(self, tokens: int | None, texts: int | None) -> int:
        """Texts of one of GradCache's mini-batches; all where there is no limit."""
        if tokens is None:
            return self.count
        return min(self.count, max(1, tokens // (self.tokens + self.extra)), texts or self.count)


@dataclass(frozen=True)
class Setting:
    """How a step is run.

    Attributes:
        half_products: Whether autocast computes products in 16 bits.
        mini_batch_tokens: GradCache's limit; None without GradCache.
        kept_gib: GradCache's memory for kept graphs, in GiB.
        accumulated: Batches of an optimiser step.
    """

    num_ranks: int = 1
    strategy: StrategyName = "single"
    half_products: bool = True
    mini_batch_tokens: int | None = None
    mini_batch_texts: int | None = None
    kept_gib: float = 0.0
    accumulated: int = 1


@dataclass(frozen=True)
class LossSize:
    """The sizes of a loss on one rank.

    Attributes:
        num_rows: Rows of scores: queries, or predicted tokens.
        num_columns: Their columns: candidates of all ranks, or the vocabulary.
        width: Width of the vectors that are compared; the sum of several.
        tile: Scores that exist at once.
        stored: Vectors of this rank that are kept with their gradients.
        gathered: Candidates of all ranks that are sent to each of them; 0 where the ranks compare their own.
    """

    num_rows: int
    num_columns: int
    width: int
    tile: int
    stored: int = 0
    gathered: int = 0

    @property
    def operations(self) -> float:
        """Three products: scores, and the gradients of both sides."""
        return 6.0 * self.num_rows * self.num_columns * self.width

    @property
    def num_bytes(self) -> float:
        """Vectors and gradients in float32, and a tile with its softmax and its mask."""
        vectors = 8.0 * self.stored * self.width + 8.0 * self.num_columns * self.width
        return vectors + 9.0 * min(self.num_rows * self.num_columns, max(self.tile, 32 * self.num_columns))


@dataclass(frozen=True)
class Plan:
    """What one GPU holds and does: bytes at the peak, operations, and bytes sent in an optimiser step, each by part.

    Attributes:
        num_mini_batches: GradCache's mini-batches of a batch; without it the towers.
        kept: Share of the graphs that need no second forward.
    """

    trained: int
    frozen: int
    memory: dict[str, float]
    operations: dict[str, float]
    num_mini_batches: int
    kept: float
    sent: dict[str, float]


def plan_step(
    module: nn.Module, texts: Sequence[Texts], loss: LossSize, setting: Setting, state_per_weight: float = 2.0
) -> Plan:
    """The memory and arithmetic of an optimiser step on one GPU.

    Not counted are the CUDA context, NCCL's buffers, fragmentation, and intermediate results of a single operation.
    Operations are those of matrix products and attention. `module` may be on the meta device.

    Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, §3 and §5, for what the stages share.
    """
    weights = list(module.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    frozen = sum(weight.numel() for weight in weights if not weight.requires_grad)
    # The texts of each tower, how many of them a mini-batch has, and how many mini-batches they make.
    sizes = [text.per_mini_batch(setting.mini_batch_tokens, setting.mini_batch_texts) for text in texts]
    towers = [(text, size, text.count / size) for text, size in zip(texts, sizes, strict=True)]
    num_mini_batches = sum(math.ceil(count) for _, _, count in towers)
    chunks = [text.cost.graph.each * size for text, size, _ in towers]
    again = max(text.cost.again.each * size for text, size, _ in towers)
    whole = sum(chunk * count for chunk, (_, _, count) in zip(chunks, towers, strict=True))
    kept = 1.0
    if setting.mini_batch_tokens is not None:
        budget = setting.kept_gib * 2**30
        # Without a budget the last graph is kept all the same.
        kept = min(1.0, max(budget / whole, 1 / num_mini_batches)) if whole else 1.0
    memory = _state_bytes(module, setting, state_per_weight)
    # Under FSDP2 and ZeRO the weights themselves are in 16 bits where they are used.
    if setting.strategy not in _SHARES_STATE:
        memory["casts of weights, shared by graphs"] = max(text.cost.unchecked.shared for text in texts)
    memory["activations"] = max(kept * whole, max(chunks)) + again
    memory["vectors, candidates and loss tiles"] = loss.num_bytes
    forward = sum(count * text.cost.forward.of(size) for text, size, count in towers)
    backward = sum(count * text.cost.backward.of(size) for text, size, count in towers)
    operations = {"forward": forward, "GradCache's second forward": (1 - kept) * forward, "backward": backward}
    operations["loss"] = loss.operations
    scaled = {part: setting.accumulated * value for part, value in operations.items() if value}
    sent = sent_bytes(module, setting, loss, num_mini_batches, kept)
    return Plan(trained, frozen, memory, scaled, num_mini_batches, kept, sent)


def sent_bytes(
    module: nn.Module, setting: Setting, loss: LossSize, num_mini_batches: int, kept: float
) -> dict[str, float]:
    """What a GPU sends in an optimiser step, in bytes by part.

    Of S bytes that are gathered by R ranks in a ring, or reduced and scattered, a rank sends (R - 1) / R; of S bytes
    that are all-reduced twice as many. With n mini-batches of which a share k keeps its graph, there are n (2 - k)
    forwards and n backwards; without GradCache one of each for each tower, and one reduction of gradients for both.

        DDP      gradients once a step, in the last backward
        ZeRO-1   gradients once a step; trained weights after the update
        ZeRO-2   gradients in every backward; trained weights after the update
        ZeRO-3   gradients in every backward; all weights in every forward and backward
        FSDP2    gradients in every backward; a layer's weights in every forward and backward, and the others, which
                 stay until their gradient is reduced, once for each reduction

    Sums over ranks of a few numbers, hashes of texts, and what padding adds are not counted.

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
    # Trained weights are as large as their gradients.
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
    """The size of some weights, at most two bytes a number where they are used in 16 bits."""
    return float(sum(weight.numel() * min(2 if as_half else 8, weight.element_size()) for weight in weights))


def _state_bytes(module: nn.Module, setting: Setting, state_per_weight: float) -> dict[str, float]:
    """Weights, gradients and the optimiser's state of one GPU."""
    name, ranks = setting.strategy, setting.num_ranks
    as_half = name in _ZERO and setting.half_products
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    state = sum(state_per_weight * weight.numel() * (4 if as_half else weight.element_size()) for weight in trained)
    if as_half:
        # ZeRO updates a copy in float32.
        state += 4 * sum(weight.numel() for weight in trained)
    gradients = _num_bytes(trained, as_half)
    found = {"weights": _num_bytes(module.parameters(), as_half) / (ranks if name in _SHARES_WEIGHTS else 1)}
    found["gradients"] = gradients / (ranks if name in _SHARES_GRADIENTS else 1)
    found["optimiser state"] = state / (ranks if name in _SHARES_STATE else 1)
    if name == "ddp":
        found["gradient buckets of DDP"] = gradients
    if name in _SHARES_WEIGHTS:
        # The layer at work and the next one.
        largest = max((sum(weight.numel() for weight in layer.parameters()) for layer in layers(module)), default=0)
        found["gathered weights of two layers"] = 2.0 * largest * (2 if setting.half_products else 4)
    return found


def trace(module: nn.Module, run: Callable[[int], Tensor], half: bool) -> Cost:
    """Count what embedding texts costs, forward and backward, without computing anything.

    `module` is inside `without_data`, in training mode; `run` embeds so many texts, all of one length, without padding.
    With `half` autocast computes products in bfloat16.
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
    """Bytes of a graph, of its largest checkpointed layer, and of all without checkpointing; none is a parameter's."""
    # Kept while the graph is, so that no two storages have one address.
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
    """A counter of the operations of products and attention inside, those of a CPU's kernels too."""
    counter = FlopCounterMode(display=False, custom_mapping=_KERNELS)
    # By module it would count with hooks that GradCache's `autograd.grad` does not allow.
    counter.mod_tracker = _Everything()  # type: ignore[assignment]
    return counter


class _Everything(nullcontext[None]):
    """Stands in the place of the counter's tracker of modules."""

    parents = ("Global",)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


def _grouped(first: Any, second: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Of (P, I) and (X, I, O), or of (I, P) and (P, O) with a result of (X, I, O)."""
    return int(2 * first[0] * first[1] * second[-1])


_ATEN = torch.ops.aten
_KERNELS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._grouped_mm: _grouped,
}


class _NoPadding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what follows from values, which are not there: every mask is true everywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is _ATEN._local_scalar_dense.default:
            return 1
        return func(*args, **(kwargs or {}))


@contextmanager
def without_data(module: nn.Module) -> Iterator[None]:
    """Inside, a module of the meta device pretends to be on the CPU, where nothing is stored or computed.

    Experts share their tokens evenly.
    """
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
    """The towers of a contrastive batch on one rank, traced inside `without_data`; `half` as in `trace`."""
    found, context, extra = [], None, 0
    if isinstance(embedder, ContextualEmbedder):
        num_context, extra = min(embedder.num_context, num_candidates), embedder.num_extra_tokens
        context = torch.zeros(num_context, embedder.context_size, requires_grad=True)
        limit = min(document_tokens, embedder.first_stage.max_length or document_tokens)
        cost = trace(embedder, lambda count: embedder.embed_context(_tokens(count, limit)), half)
        found.append(Texts("context documents", num_context, limit, cost))
    arguments = () if context is None else (context,)
    costs = {
        length: trace(embedder, lambda count, n=length: embedder(_tokens(count, n), *arguments), half)  # type: ignore[misc]
        for length in {query_tokens, document_tokens}
    }
    found.append(Texts("queries", num_queries, query_tokens, costs[query_tokens], extra))
    found.append(Texts("documents", num_candidates, document_tokens, costs[document_tokens], extra))
    return found


def _tokens(count: int, length: int) -> PaddedTokens:
    all_NL = torch.ones(count, length, dtype=torch.bool)
    return PaddedTokens(torch.zeros(count, length, dtype=torch.int64), all_NL, all_NL)
