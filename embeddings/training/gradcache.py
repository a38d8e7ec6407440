"""GradCache: the exact gradient of a batch that does not fit in memory, computed in mini-batches.

1. Embed every mini-batch, most of them without a graph, and save the random state before each.
2. Compute the loss of all representations together, and its gradient with respect to each of them.
3. Embed each mini-batch again, from its random state and with a graph, and backpropagate its part of that gradient.

The result equals `plain_step`. Graphs of the first pass that are kept (`GraphBudget`) save step 3.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from embeddings.common import (
    ContextualStep,
    ContrastiveBatch,
    ContrastiveStep,
    LossOutput,
    OptionError,
    Representations,
    TokenBatch,
    require_minimum,
)
from embeddings.common.distributed import is_distributed, reduce_int
from embeddings.common.protocols import SharesCasts
from embeddings.common.random import RandomState
from embeddings.common.types import moved, plan_mini_batches, take_texts

Backward = Callable[[Tensor], None]

# The groups of texts that are embedded. The context's documents have a separate encoder.
QUERY, CANDIDATE, CONTEXT = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    group: int  # `QUERY`, `CANDIDATE` or `CONTEXT`
    rows_n: Tensor  # rows of the texts in the group, (n,) int64 on the CPU
    first: int  # position of the first text among the group's texts in the order of the plan, longest first
    longest: int  # tokens of the longest text; for a query or candidate, each context document adds one token
    is_extra: bool = False  # only equalises the number of forwards of the ranks: it is embedded, its gradient is zero

    @property
    def num_tokens(self) -> int:
        return len(self.rows_n) * self.longest


def plan_stages(batch: ContrastiveBatch, mini_batch_tokens: int, mini_batch_texts: int | None) -> list[list[MiniBatch]]:
    """The mini-batches of each stage of a step, from the longest texts to the shortest; limits as in `GradCache`."""

    def of_group(group: int) -> list[MiniBatch]:
        rows = plan_mini_batches(lengths_read(batch, group), mini_batch_tokens, mini_batch_texts)
        firsts = accumulate(map(len, rows), initial=0)
        return [_mini_batch(batch, group, rows_n, first) for rows_n, first in zip(rows, firsts, strict=False)]

    texts = _longest_first(of_group(QUERY) + of_group(CANDIDATE))
    return [_longest_first(of_group(CONTEXT)), texts] if has_context(batch) else [texts]


def extend_plan(plan: list[MiniBatch], count: int, batch: ContrastiveBatch) -> list[MiniBatch]:
    """Split a plan into exactly `count` mini-batches, the largest first; at one text each, extra ones are added."""
    plan = list(plan)
    while len(plan) < count:
        splittable = [mini_batch for mini_batch in plan if len(mini_batch.rows_n) > 1]
        if not splittable:
            plan += [replace(plan[-1], is_extra=True)] * (count - len(plan))
            break
        largest = max(splittable, key=lambda mini_batch: mini_batch.num_tokens)
        rows_n, half = largest.rows_n, (len(largest.rows_n) + 1) // 2
        parts = (rows_n[:half], largest.first), (rows_n[half:], largest.first + half)
        index = plan.index(largest)
        plan[index : index + 1] = [_mini_batch(batch, largest.group, part_n, first) for part_n, first in parts]
    return _longest_first(plan)


def tokens_of(batch: ContrastiveBatch, group: int) -> TokenBatch:
    tokens = (batch.query, batch.candidate, batch.context)[group]
    assert tokens is not None
    return tokens


def lengths_read(batch: ContrastiveBatch, group: int) -> Tensor:
    """Tokens of each text of a group, (N,) int64, including the context and soft prompts that the encoder adds."""
    lengths_N = tokens_of(batch, group).lengths_N
    num_context = 0 if batch.context is None else len(batch.context)
    return lengths_N if group == CONTEXT else lengths_N + max(batch.num_extra_tokens, num_context)


def has_context(batch: ContrastiveBatch) -> bool:
    return batch.context is not None and len(batch.context) > 0


def _mini_batch(batch: ContrastiveBatch, group: int, rows_n: Tensor, first: int) -> MiniBatch:
    return MiniBatch(group, rows_n, first, int(lengths_read(batch, group)[rows_n].max()))


def _longest_first(plan: list[MiniBatch]) -> list[MiniBatch]:
    return sorted(plan, key=lambda mini_batch: -mini_batch.longest)


def plain_step(step: ContrastiveStep, batch: ContrastiveBatch) -> LossOutput:
    """The loss of a batch, with the graphs of all encoders; all texts are embedded at once."""
    context = None
    with _shared_casts(step):
        if has_context(batch):
            context = _contextual(step).embed_context(tokens_of(batch, CONTEXT))
        query, candidate = step.embed(batch.query, context), step.embed(batch.candidate, context)
    return step.loss_from_representations(query, candidate, batch)


def _shared_casts(step: ContrastiveStep) -> AbstractContextManager[object]:
    return step.shared_casts() if isinstance(step, SharesCasts) else nullcontext()


def _contextual(step: ContrastiveStep) -> ContextualStep:
    assert isinstance(step, ContextualStep), "a batch with a context needs a step that embeds it"
    return step


def attach_gradient(
    value: Tensor, outputs: Sequence[Tensor], gradients: Sequence[Tensor], untouched: Sequence[Tensor] = ()
) -> Tensor:
    """A scalar equal to `value` whose backward passes each of `outputs` its gradient: the surrogate loss.

    A loss scale multiplies in float32. Leaves in `untouched` get a zero gradient that uses no memory.
    """
    attached: Tensor = _AttachGradient.apply(  # type: ignore[no-untyped-call]
        value.detach(), len(outputs), *gradients, *outputs, *untouched
    )
    return attached


class _AttachGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, num_outputs: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[:num_outputs])
        ctx.untouched = [(leaf.dtype, leaf.device, leaf.shape) for leaf in tensors[2 * num_outputs :]]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor, ...] = ctx.saved_tensors
        scaled = [(gradient * factor).to(gradient.dtype) for gradient in gradients]
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for dtype, device, shape in ctx.untouched]
        return (None, None, *(None for _ in gradients), *scaled, *zeros)


class GradCache:
    """Computes the loss and the gradient of the full batch in two passes over mini-batches.

    Graphs need the memory of one mini-batch, or of as many as may be kept. The longest mini-batch runs first, so that a
    run that does not fit into memory fails at once. A `ContextualStep` over a batch with a context has two stages; the
    second pass runs them in reverse, when the vectors of the first have their whole gradient.

    Args:
        mini_batch_tokens: Maximum number of padded tokens of a mini-batch, including each text's context. A longer text
            forms a separate mini-batch.
        mini_batch_texts: Maximum number of texts of a mini-batch; None for no limit.
        kept_fraction: Fraction of all padded tokens, 0 to 1, whose graphs may be kept; None: only `kept_gib` limits it.
        kept_gib: Total memory of kept graphs, in GiB on this rank; None: only `kept_fraction` limits it. Without either
            option only the last graph is kept, and none with more than 32 mini-batches.
        equal_mini_batches: Whether all ranks run the same number of mini-batches and keep the same number of graphs.
            Strategies that gather parameters in each forward (FSDP, ZeRO-3) need it.

    Precision: representations and their gradients keep their dtype; the context's gradient is summed over mini-batches
        in float32 or better. The backward runs outside autocast.
    Distributed: one gradient synchronisation per step, in the last backward, which is the first stage's.
    Source: Gao 2021, arXiv:2101.06983, section 3. Differs: token budget, kept graphs, summed statistics.
    """

    def __init__(
        self,
        mini_batch_tokens: int = 8192,
        mini_batch_texts: int | None = None,
        kept_fraction: float | None = None,
        kept_gib: float | None = None,
        equal_mini_batches: bool = False,
    ) -> None:
        for name, limit in (("mini_batch_tokens", mini_batch_tokens), ("mini_batch_texts", mini_batch_texts)):
            require_minimum(name, limit, 1, "a larger one is faster and needs more memory", optional=True)
        self.budget = GraphBudget(kept_fraction, kept_gib)
        self.mini_batch_tokens = mini_batch_tokens
        self.mini_batch_texts = mini_batch_texts
        self.equal_mini_batches = equal_mini_batches

    def plan(self, batch: ContrastiveBatch) -> list[list[MiniBatch]]:
        """The mini-batches of each stage of a batch, in the order of the first pass."""
        stages = plan_stages(batch, self.mini_batch_tokens, self.mini_batch_texts)
        if self.equal_mini_batches:
            counts = [reduce_int(len(stage), "max", batch.device) for stage in stages]
            stages = [extend_plan(stage, count, batch) for stage, count in zip(stages, counts, strict=True)]
        return stages

    def step(self, step: ContrastiveStep, batch: ContrastiveBatch) -> LossOutput:
        """Run a full step: the gradient of the loss is added to the parameters' `.grad`."""
        output = self.forward_backward(step, batch)
        torch.autograd.backward(output.loss)
        return LossOutput(output.loss.detach(), output.terms)

    def forward_backward(
        self,
        step: ContrastiveStep,
        batch: ContrastiveBatch,
        backward: Backward = Tensor.backward,
        scale: float = 1.0,
        syncs_each: bool = False,
    ) -> LossOutput:
        """Run everything except the last backward, which the caller runs on the returned loss.

        Args:
            step: The method.
            batch: The batch.
            backward: Runs a backward from a scalar, outside autocast, for each mini-batch except the last.
            scale: Factor of the early backwards' gradients; the caller must apply it to the last one.
            syncs_each: Whether every backward averages the gradients of its leaves over the ranks (FSDP2, ZeRO).
                Otherwise only the last one averages, and it includes each parameter of the step (DDP).
        """
        passes = _TwoPasses(self, step, batch, syncs_each)
        # Sharded weights are gathered for one layer at a time, so their casts cannot be shared.
        with nullcontext() if syncs_each else _shared_casts(step):
            passes.embed_all()
            output = passes.loss()
            if not torch.is_grad_enabled():
                return output
            passes.find_gradients(output.loss)
            *early, last = passes.second_order()
            for embedded in early:
                passes.run_early(embedded, output.loss, backward, scale)
            return LossOutput(passes.last_surrogate(last, output.loss), output.terms)


@runtime_checkable
class GradCacheModule(Protocol):
    """A module whose training step uses GradCache if `grad_cache` is set."""

    grad_cache: GradCache | None


@dataclass(slots=True, eq=False)
class _Embedded:
    """A mini-batch between the two passes; `graph` contains its representations if their graph is kept."""

    mini_batch: MiniBatch
    random_state: RandomState
    graph: Representations | None


class _PlannedTexts(NamedTuple):
    """A group's texts, longest first, and the row of each; a mini-batch is a slice of them."""

    tokens: TokenBatch  # on the device or in host memory, as in the batch
    row_N: Tensor  # on the device

    @classmethod
    def of(cls, tokens: TokenBatch, plan: Sequence[MiniBatch], device: torch.device) -> "_PlannedTexts":
        rows_of = {mini_batch.first: mini_batch.rows_n for mini_batch in plan}
        row_N = torch.cat([rows_of[first] for first in sorted(rows_of)])
        return cls(take_texts(tokens, row_N), moved(row_N, device))


class _TwoPasses:
    """The state of one step between the first and the second pass."""

    def __init__(self, engine: GradCache, step: ContrastiveStep, batch: ContrastiveBatch, syncs_each: bool) -> None:
        self.engine, self.budget, self.syncs_each = engine, engine.budget, syncs_each
        self.step, self.batch, self.device = step, batch, batch.device
        self.stages = engine.plan(batch)
        plan = [mini_batch for stage in self.stages for mini_batch in stage]
        self.planned = {
            group: _PlannedTexts.of(
                tokens_of(batch, group), [mini for mini in plan if mini.group == group], self.device
            )
            for group in sorted({mini_batch.group for mini_batch in plan})
        }
        self.stage_tokens = [[mini_batch.num_tokens for mini_batch in stage] for stage in self.stages]
        # The first stage whose mini-batches have a second pass.
        self.first_trained = int(len(self.stages) > 1 and not _contextual(step).trains_context)
        self.num_kept: list[int] = []  # number of graphs that each stage keeps, from its first mini-batch on
        self.embedded: list[list[_Embedded]] = []
        self.representations: dict[int, Representations] = {}  # leaves: vectors and summed statistics of each group
        self.gradient_of: dict[Tensor, Tensor] = {}
        self.early_leaves: set[Tensor] = set()
        self.casts_have_graph = False

    @property
    def context(self) -> Tensor | None:
        """The input of the second stage, (M, H), a leaf; None before the first stage has run."""
        return self.representations[CONTEXT].vector_ND if CONTEXT in self.representations else None

    def _leaves(self) -> list[Tensor]:
        return [leaf for group in self.representations.values() for leaf in _tensors(group).values()]

    def embed_all(self) -> None:
        """The first pass: the representations of every mini-batch, and the graphs that are kept."""
        for stage in range(len(self.stages)):
            self._embed_stage(stage)
            for leaf in self._leaves():
                is_trained = leaf is not self.context or self.first_trained == 0
                leaf.requires_grad_(torch.is_grad_enabled() and leaf.is_floating_point() and is_trained)

    def loss(self) -> LossOutput:
        return self.step.loss_from_representations(
            self.representations[QUERY], self.representations[CANDIDATE], self.batch
        )

    def find_gradients(self, loss: Tensor) -> None:
        """The loss's gradient with respect to each representation and to the loss's parameters."""
        leaves = dict.fromkeys([leaf for leaf in self._leaves() if leaf.requires_grad] + graph_leaves(loss))
        with torch.autocast(self.device.type, enabled=False):
            gradients = torch.autograd.grad(loss, list(leaves), allow_unused=True, materialize_grads=True)
        self.gradient_of = dict(zip(leaves, gradients, strict=True))
        if self.context in self.gradient_of:
            # It accumulates over many mini-batches.
            gradient = self.gradient_of[self.context]
            self.gradient_of[self.context] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def second_order(self) -> list[_Embedded]:
        """From the last stage to the first; within a stage kept graphs come first, to free their memory."""
        trained = self.embedded[self.first_trained :]
        return [each for stage in reversed(trained) for each in sorted(stage, key=lambda each: each.graph is None)]

    def run_early(self, embedded: _Embedded, loss: Tensor, backward: Backward, scale: float) -> None:
        """The second pass of a mini-batch that is not the last."""
        surrogate = attach_gradient(loss, *self._outputs_and_gradients(embedded))
        if not surrogate.requires_grad:
            return
        if not self.syncs_each and (is_distributed() or self.context is not None):
            self.early_leaves.update(leaf for leaf in graph_leaves(surrogate) if leaf is not self.context)
        with torch.autocast(self.device.type, enabled=False):
            backward(surrogate * scale)
        self._take_context_gradient(scale)

    def last_surrogate(self, embedded: _Embedded, loss: Tensor) -> Tensor:
        """The loss's value with a graph to the last mini-batch and to every other parameter used in the step."""
        outputs, gradients = self._outputs_and_gradients(embedded)
        of_texts = set(self._leaves())
        of_loss = {leaf: gradient for leaf, gradient in self.gradient_of.items() if leaf not in of_texts}
        reached = {leaf for output in outputs for leaf in graph_leaves(output)} | set(of_loss)
        # A wrapper that averages gradients waits for every parameter in its only synchronised backward.
        missing = [leaf for leaf in self.early_leaves if leaf not in reached]
        return attach_gradient(loss, [*outputs, *of_loss], [*gradients, *of_loss.values()], missing)

    def _embed_stage(self, stage: int) -> None:
        """The first pass over one stage; its longest mini-batch measures the memory of graphs."""
        builds_graphs = torch.is_grad_enabled() and stage >= self.first_trained
        self.num_kept.append(self.budget.num_kept(self.stage_tokens, self.num_kept) if builds_graphs else 0)
        self.embedded.append([])
        for index, mini_batch in enumerate(self.stages[stage]):
            keeps = builds_graphs and self._keeps(stage, index)
            embedded = _Embedded(mini_batch, RandomState(self.device), None)
            measures = keeps and index == 0 and self.budget.measures
            embedded.graph = self._embed_and_measure(stage, mini_batch, measures, keeps)
            self._store(mini_batch, embedded.graph)
            if index == 0 and builds_graphs:
                # The memory of the stage's first graph may be known only now.
                num_kept = self.budget.num_kept(self.stage_tokens, self.num_kept[:stage])
                equal = self.engine.equal_mini_batches
                self.num_kept[stage] = reduce_int(num_kept, "min", self.device) if equal else num_kept
                keeps = keeps and self._keeps(stage, 0)
            if not keeps:
                embedded.graph = None
            self.embedded[stage].append(embedded)

    def _embed_and_measure(self, stage: int, mini_batch: MiniBatch, measures: bool, keeps: bool) -> Representations:
        memory, step = GraphMemory(), self.step
        parameters = step.parameters if isinstance(step, nn.Module) else list
        with memory.measured(self.device, parameters) if measures else nullcontext():
            representations = self._embed(mini_batch, keeps)
        if measures:
            memory.leave_out_casts(_tensors(representations).values())
            if memory.num_bytes:
                self.budget.learn(stage, memory.num_bytes, mini_batch.num_tokens)
        return representations

    def _embed(self, mini_batch: MiniBatch, with_graph: bool) -> Representations:
        if with_graph and not self.casts_have_graph:
            # Autocast would reuse weights that it cast without a graph, and they would get no gradient.
            torch.clear_autocast_cache()
        self.casts_have_graph = with_graph
        tokens = self.planned[mini_batch.group].tokens.run_of_texts(mini_batch.first, len(mini_batch.rows_n))
        tokens = tokens.moved(self.device)
        with torch.set_grad_enabled(with_graph):
            if mini_batch.group == CONTEXT:
                return Representations(_contextual(self.step).embed_context(tokens))
            return self.step.embed(tokens, self.context)

    def _rows(self, mini_batch: MiniBatch) -> Tensor:
        return self.planned[mini_batch.group].row_N[mini_batch.first : mini_batch.first + len(mini_batch.rows_n)]

    def _outputs_and_gradients(self, embedded: _Embedded) -> tuple[list[Tensor], list[Tensor]]:
        """A mini-batch's representations with their graph (kept or recomputed), and the gradient of each."""
        graph, embedded.graph = embedded.graph, None
        if graph is None:
            with embedded.random_state.replayed():
                graph = self._embed(embedded.mini_batch, with_graph=True)
        outputs, gradients = [], []
        leaves = _tensors(self.representations[embedded.mini_batch.group])
        for name, output in _tensors(graph).items():
            if not output.requires_grad:
                continue
            gradient = self.gradient_of[leaves[name]]
            if name == _VECTOR:
                gradient = gradient[self._rows(embedded.mini_batch)].to(output.dtype)
            outputs.append(output)
            gradients.append(torch.zeros_like(output) if embedded.mini_batch.is_extra else gradient)
        return outputs, gradients

    def _take_context_gradient(self, scale: float) -> None:
        """Add the context's gradient from a backward of the second stage, without the scale."""
        context = self.context
        if context is not None and context.grad is not None:
            self.gradient_of[context].add_(context.grad, alpha=1.0 / scale)
            context.grad = None

    def _store(self, mini_batch: MiniBatch, part: Representations) -> None:
        """Copy a mini-batch's vectors into the group's rows, and add its statistics to the group's."""
        if mini_batch.is_extra:
            return
        num_texts = len(tokens_of(self.batch, mini_batch.group))
        whole = self.representations.get(mini_batch.group)
        if whole is None:
            zeros = {name: torch.zeros_like(value) for name, value in part.statistics.items()}
            whole = Representations(part.vector_ND.new_empty(num_texts, part.vector_ND.shape[1]), zeros)
            self.representations[mini_batch.group] = whole
        whole.vector_ND[self._rows(mini_batch)] = part.vector_ND.detach()
        for name, value in part.statistics.items():
            whole.statistics[name].add_(value.detach())

    def _keeps(self, stage: int, index: int) -> bool:
        """Whether a mini-batch keeps its graph; its stage keeps the first `self.num_kept[stage]`."""
        is_counted = index < self.num_kept[stage]
        if index < len(self.stages[stage]) - 1:
            return is_counted
        # The last forward's graph fits if no kept graphs use a memory budget. Among many mini-batches it saves too
        # little time for its memory, which the loss could use.
        is_last_forward = stage == len(self.stages) - 1 and len(self.stages[stage]) <= FEW_MINI_BATCHES
        return is_counted or (is_last_forward and (not self.budget.measures or sum(self.num_kept) == 0))


_VECTOR = "the vectors"
# A kept graph of n saves a forward pass, 1 / 4n of a step's time.
FEW_MINI_BATCHES = 32


def _tensors(representations: Representations) -> dict[str, Tensor]:
    return {**representations.statistics, _VECTOR: representations.vector_ND}


# Autograd graphs: their leaves, their memory, and how many fit into a budget.


def graph_leaves(root: Tensor) -> list[Tensor]:
    """The leaves of the graph of `root` that require a gradient."""
    if root.grad_fn is None:
        return [root] if root.requires_grad else []
    return [node.variable for node in _nodes([root]) if hasattr(node, "variable")]


def _nodes(roots: Iterable[Tensor]) -> list[Any]:
    """The nodes of the graphs of some tensors, breadth first."""
    nodes: list[Any] = list(dict.fromkeys(root.grad_fn for root in roots if root.grad_fn is not None))
    seen = set(nodes)
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


class GraphMemory:
    """The memory of graphs that were built inside `measured`; `num_bytes` is set when that context ends."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._storages: Counter[int] | None = None

    @contextmanager
    def measured(self, device: torch.device, parameters: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Measure the graphs built inside; the tensors that `parameters` returns exist anyway.

        On a CUDA device this is the increase of the allocator's memory, elsewhere the size of the storages that
        autograd saves.
        """
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            yield
            self.num_bytes += torch.cuda.memory_allocated(device) - before
            return
        saved: dict[int, torch.UntypedStorage] = {}

        def remember(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            yield
        for parameter in parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            saved.pop(local.untyped_storage()._cdata, None)
        self._storages = Counter(storage.nbytes() for storage in saved.values())
        self.num_bytes += sum(storage.nbytes() for storage in saved.values())

    def leave_out_casts(self, roots: Iterable[Tensor]) -> None:
        """Subtract the cast weights in the graphs of these tensors: under autocast all graphs share them."""
        for node in _nodes(roots):
            if node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable"):
                (cast,) = node._input_metadata
                size = math.prod(cast.shape) * cast.dtype.itemsize
                if self._storages is not None:
                    # Not every cast is saved; a saved one is recognised by its size.
                    if self._storages[size] == 0:
                        continue
                    self._storages[size] -= 1
                self.num_bytes -= size


class GraphBudget:
    """How many mini-batches of each stage keep their graphs, by memory per token; limits as in `GradCache`."""

    def __init__(self, kept_fraction: float | None = None, kept_gib: float | None = None) -> None:
        if kept_fraction is not None and not 0 <= kept_fraction <= 1:
            raise OptionError("kept_fraction", kept_fraction, "must be from 0 to 1", "0.5 keeps half the graphs")
        require_minimum("kept_gib", kept_gib, 0, "0 keeps one graph at most", optional=True)
        self.kept_fraction, self.kept_gib = kept_fraction, kept_gib
        self._bytes_per_token: dict[int, float] = {}

    @property
    def measures(self) -> bool:
        return self.kept_gib is not None

    def learn(self, stage: int, num_bytes: int, num_tokens: int) -> None:
        self._bytes_per_token[stage] = max(1.0, num_bytes / num_tokens)

    def num_kept(self, stage_tokens: Sequence[Sequence[int]], kept: Sequence[int] = ()) -> int:
        """The number of mini-batches, from the start of the next stage, that keep their graphs.

        `stage_tokens` are the padded tokens of each mini-batch of all stages, `kept` the results for earlier stages.
        """
        fraction = self.kept_fraction
        if fraction is None:
            fraction = 0.0 if self.kept_gib is None else 1.0
        tokens_left = fraction * sum(tokens for stage in stage_tokens for tokens in stage)
        bytes_left = math.inf if self.kept_gib is None else self.kept_gib * 2**30
        for stage, count in enumerate(kept):
            num_tokens = sum(stage_tokens[stage][:count])
            tokens_left -= num_tokens
            bytes_left -= num_tokens * self._bytes_per_token.get(stage, 1.0)
        limit = min(tokens_left, bytes_left / self._bytes_per_token.get(len(kept), 1.0))
        return sum(tokens <= limit for tokens in accumulate(stage_tokens[len(kept)]))
