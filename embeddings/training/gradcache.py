"""GradCache: the gradient of a batch that does not fit in memory, exact, one mini-batch at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from embeddings.common import ContrastiveBatch, ContrastiveStep, LossOutput, OptionError, Representations
from embeddings.common.distributed import is_distributed, reduce_int
from embeddings.common.mini_batches import take_texts
from embeddings.training.graphs import GraphMemory, attach_gradient, graph_leaves
from embeddings.training.mini_batch_plan import MiniBatch, extend_plan, plan_towers
from embeddings.training.replay import RandomState

Backward = Callable[[Tensor], None]
NoSync = Callable[[], AbstractContextManager[object]]


class GradCache:
    """Two passes over mini-batches that give the loss and the gradient of the whole batch.

    First every mini-batch is embedded, most without a graph; then the loss of all representations gives each of them
    its gradient; then each mini-batch without a graph is embedded again, its random state replayed, and handed its
    share. Memory for graphs is that of one mini-batch, or of as many as may be kept: a kept graph is not recomputed.
    The mini-batches are cut by token budget from texts sorted by length, each tower for itself, and run from the
    longest to the shortest, so a run that does not fit fails at once.

    Where no other graph fills the memory, the last mini-batch of the first pass keeps its graph, since recomputing it
    would need as much: a batch of one mini-batch a tower costs little more than a plain step.

    Args:
        mini_batch_tokens: Most padded tokens of a mini-batch. A longer text is alone.
        mini_batch_texts: Most texts of a mini-batch; None for no such limit.
        kept_fraction: Share of all padded tokens, 0 to 1, whose graphs may be kept; None leaves it to `kept_gib`.
        kept_gib: Memory that kept graphs may hold together, in GiB on this rank; None leaves it to `kept_fraction`.
            The longest mini-batch is measured, the others are taken to need as much a token. With both options both
            limits hold; without either only the last graph is kept.
        equal_mini_batches: Whether all ranks run the same number of mini-batches and keep the same number of graphs,
            as strategies need that gather parameters in each forward (FSDP, ZeRO-3).

    Precision: representations keep their dtype, and so do their gradients. The backward runs outside autocast.
    Distributed: one gradient synchronisation a step, by the last backward. A parameter that only earlier
        mini-batches or the loss reached takes part in it.
    Raises:
        OptionError: If an option is impossible; the message names it and shows the value.
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
            if limit is not None and limit < 1:
                raise OptionError(name, limit, "must be >= 1", "a larger one is faster and needs more memory")
        if kept_fraction is not None and not 0 <= kept_fraction <= 1:
            raise OptionError("kept_fraction", kept_fraction, "must be within 0 and 1", "0.5 keeps half the graphs")
        if kept_gib is not None and not kept_gib >= 0:
            raise OptionError("kept_gib", kept_gib, "must be >= 0", "0 keeps no more than one graph")
        self.mini_batch_tokens = mini_batch_tokens
        self.mini_batch_texts = mini_batch_texts
        self.kept_fraction = kept_fraction
        self.kept_gib = kept_gib
        self.equal_mini_batches = equal_mini_batches
        self.bytes_per_token = 0.0

    def plan(self, batch: ContrastiveBatch) -> list[MiniBatch]:
        """The mini-batches of a batch in the order they run, from the longest texts to the shortest.

        Distributed: one all-reduce where the ranks must have equally many.
        """
        plan = plan_towers(batch, self.mini_batch_tokens, self.mini_batch_texts)
        if self.equal_mini_batches:
            plan = extend_plan(plan, reduce_int(len(plan), "max", batch.query.device), batch)
        return plan

    def step(
        self,
        step: ContrastiveStep,
        batch: ContrastiveBatch,
        backward: Backward = Tensor.backward,
        no_sync: NoSync | None = None,
        scale: float = 1.0,
    ) -> LossOutput:
        """Run a whole step: the gradient of `scale` times the loss is added to the parameters' `.grad`.

        Args:
            step: The method.
            batch: The batch.
            backward: Runs a backward from a scalar.
            no_sync: As in `forward_backward`.
            scale: Factor of the gradient, such as 1 / accumulated batches.

        Returns:
            LossOutput: the detached, unscaled loss and its terms.
        """
        output = self.forward_backward(step, batch, backward, no_sync, scale)
        backward(output.loss * scale)
        return LossOutput(output.loss.detach(), output.terms)

    def forward_backward(
        self,
        step: ContrastiveStep,
        batch: ContrastiveBatch,
        backward: Backward = Tensor.backward,
        no_sync: NoSync | None = None,
        scale: float = 1.0,
    ) -> LossOutput:
        """Run everything but the last backward, and leave that one to the caller.

        The loss that comes back has the whole batch's value and the last mini-batch's graph: a caller whose framework
        runs one backward a step (Lightning's automatic optimisation) returns it as if it were a plain loss.
        Without gradients enabled it is just the loss.

        Args:
            step: The method.
            batch: The batch.
            backward: Runs a backward from a scalar; it is called outside autocast for each mini-batch but the last.
            no_sync: Makes a context in which backwards do not synchronise gradients. Give it where the step's forward
                goes through the wrapper that synchronises (DDP, FSDP); forwards and early backwards run inside it, and
                the last mini-batch is recomputed outside. None where the wrapper is around the caller.
            scale: Factor of the early backwards' gradients. The caller's own backward of the returned loss must apply
                the same (Lightning divides by the number of accumulated batches; an fp16 scaler multiplies).

        Returns:
            LossOutput: `loss` () with the last graph behind it; `terms` detached.
        """
        passes = _TwoPasses(self, step, batch, keeps_last=no_sync is None)
        if not torch.is_grad_enabled():
            passes.embed_all()
            return passes.loss()
        with no_sync() if no_sync else nullcontext():
            passes.embed_all()
            output = passes.loss()
            passes.find_gradients(output.loss)
            *early, last = passes.second_order()
            for visit in early:
                passes.run_early(visit, output.loss, backward, scale)
        return LossOutput(passes.last_surrogate(last, output.loss), output.terms)

    def num_kept(self, plan: list[MiniBatch]) -> int:
        """How many mini-batches from the start of the plan keep their graphs, by what is known of their memory."""
        total = sum(mini_batch.num_tokens for mini_batch in plan)
        fraction = self.kept_fraction
        if fraction is None:
            fraction = 0.0 if self.kept_gib is None else 1.0
        limit = fraction * total
        if self.kept_gib is not None:
            limit = min(limit, self.kept_gib * 2**30 / max(1.0, self.bytes_per_token))
        return sum(tokens <= limit for tokens in accumulate(mini_batch.num_tokens for mini_batch in plan))


@dataclass(slots=True, eq=False)
class _Visit:
    """A mini-batch between the two passes; `graph` is there while its graph is kept."""

    mini_batch: MiniBatch
    random_state: RandomState
    graph: Representations | None


class _TwoPasses:
    """One step: what the first pass found, and what the second one makes of it."""

    def __init__(self, engine: GradCache, step: ContrastiveStep, batch: ContrastiveBatch, keeps_last: bool) -> None:
        self.engine = engine
        self.step = step
        self.batch = batch
        self.keeps_last = keeps_last
        self.device = batch.query.device
        self.plan = engine.plan(batch)
        self.visits: list[_Visit] = []
        self.towers: dict[int, Representations] = {}
        self.gradient_of: dict[Tensor, Tensor] = {}
        self.early_leaves: set[Tensor] = set()
        self.casts_have_graph = False

    def embed_all(self) -> None:
        """The first pass: the representations of every mini-batch, and the graphs that are kept."""
        with_graphs, last = torch.is_grad_enabled(), len(self.plan) - 1
        num_kept = self.engine.num_kept(self.plan) if with_graphs else 0
        for index, mini_batch in enumerate(self.plan):
            keeps = with_graphs and (self._keeps_last(num_kept) if index == last else index < num_kept)
            random_state = RandomState.capture(self.device)
            memory = GraphMemory()
            measures = index == 0 and keeps and self.engine.kept_gib is not None
            with memory.measured(self.device, self._parameters()) if measures else nullcontext():
                graph = self._embed(mini_batch, keeps)
            self.visits.append(_Visit(mini_batch, random_state, graph if keeps else None))
            self._store(mini_batch, graph)
            if index == 0 and with_graphs:
                num_kept = self._agreed_num_kept(memory.num_bytes)
                if num_kept == 0 and index != last:
                    self.visits[0].graph = None
            del graph
        for leaf in self._leaves():
            leaf.requires_grad_(with_graphs and leaf.is_floating_point())

    def loss(self) -> LossOutput:
        """The loss of the whole batch."""
        return self.step.loss_from_representations(self.towers[0], self.towers[1], self.batch)

    def find_gradients(self, loss: Tensor) -> None:
        """The gradients of the representations, and of parameters that the loss itself has."""
        leaves = dict.fromkeys([leaf for leaf in self._leaves() if leaf.requires_grad] + graph_leaves(loss))
        with torch.autocast(self.device.type, enabled=False):
            gradients = torch.autograd.grad(loss, list(leaves), allow_unused=True, materialize_grads=True)
        self.gradient_of = dict(zip(leaves, gradients, strict=True))

    def second_order(self) -> list[_Visit]:
        """Kept graphs first: backward frees the memory that the recomputed ones need."""
        return sorted(self.visits, key=lambda visit: visit.graph is None)

    def run_early(self, visit: _Visit, loss: Tensor, backward: Backward, scale: float) -> None:
        """The second pass of any mini-batch but the last."""
        surrogate = attach_gradient(loss, *self._outputs_and_gradients(visit))
        if not surrogate.requires_grad:
            return
        if is_distributed():
            self.early_leaves.update(graph_leaves(surrogate))
        with torch.autocast(self.device.type, enabled=False):
            backward(surrogate * scale)

    def last_surrogate(self, visit: _Visit, loss: Tensor) -> Tensor:
        """The loss's value with the last mini-batch's graph, and with every parameter that took part in the step."""
        outputs, gradients = self._outputs_and_gradients(visit)
        representations = set(self._leaves())
        of_loss = {leaf: gradient for leaf, gradient in self.gradient_of.items() if leaf not in representations}
        reached = {leaf for output in outputs for leaf in graph_leaves(output)} | set(of_loss)
        # A wrapper that averages gradients waits for every parameter in its one synchronised backward.
        missing = [leaf for leaf in self.early_leaves if leaf not in reached]
        outputs += [*of_loss, *missing]
        gradients += [*of_loss.values(), *(leaf.new_zeros(()).expand_as(leaf) for leaf in missing)]
        return attach_gradient(loss, outputs, gradients)

    def _embed(self, mini_batch: MiniBatch, with_graph: bool) -> Representations:
        if with_graph and not self.casts_have_graph:
            # A weight that autocast cast without a graph would be used again here, and get no gradient.
            torch.clear_autocast_cache()
        self.casts_have_graph = with_graph
        tokens = (self.batch.query, self.batch.candidate)[mini_batch.tower]
        with torch.set_grad_enabled(with_graph):
            return self.step.embed(take_texts(tokens, mini_batch.rows_n))

    def _outputs_and_gradients(self, visit: _Visit) -> tuple[list[Tensor], list[Tensor]]:
        """A mini-batch's representations with their graph, recomputed unless kept, and the gradient of each."""
        graph, visit.graph = visit.graph, None
        if graph is None:
            with visit.random_state.replayed():
                graph = self._embed(visit.mini_batch, with_graph=True)
        outputs, gradients = [], []
        leaves = _tensors(self.towers[visit.mini_batch.tower])
        for name, output in _tensors(graph).items():
            if not output.requires_grad:
                continue
            gradient = self.gradient_of[leaves[name]]
            if name == _VECTOR:
                gradient = gradient[visit.mini_batch.rows_n.to(self.device)]
            outputs.append(output)
            gradients.append(torch.zeros_like(output) if visit.mini_batch.is_filler else gradient)
        return outputs, gradients

    def _leaves(self) -> list[Tensor]:
        """The vectors and statistics of both towers."""
        return [leaf for tower in self.towers.values() for leaf in _tensors(tower).values()]

    def _store(self, mini_batch: MiniBatch, found: Representations) -> None:
        """Put a mini-batch's vectors into their tower's rows, and add its statistics to the tower's."""
        if mini_batch.is_filler:
            return
        num_texts = len((self.batch.query, self.batch.candidate)[mini_batch.tower])
        tower = self.towers.get(mini_batch.tower)
        if tower is None:
            zeros = {name: torch.zeros_like(value) for name, value in found.statistics.items()}
            tower = Representations(found.vector_ND.new_empty(num_texts, found.vector_ND.shape[1]), zeros)
            self.towers[mini_batch.tower] = tower
        tower.vector_ND[mini_batch.rows_n.to(self.device)] = found.vector_ND.detach()
        for name, value in found.statistics.items():
            tower.statistics[name].add_(value.detach())

    def _keeps_last(self, num_kept: int) -> bool:
        """Beside graphs that fill a memory budget the last one has no room, unless it was counted."""
        return self.keeps_last and (self.engine.kept_gib is None or num_kept in (0, len(self.plan)))

    def _agreed_num_kept(self, first_bytes: int) -> int:
        """The number of kept graphs once the first mini-batch's memory is known, where it was measured."""
        if first_bytes:
            self.engine.bytes_per_token = first_bytes / self.plan[0].num_tokens
        num_kept = self.engine.num_kept(self.plan)
        return reduce_int(num_kept, "min", self.device) if self.engine.equal_mini_batches else num_kept

    def _parameters(self) -> list[Tensor]:
        return list(self.step.parameters()) if isinstance(self.step, nn.Module) else []


_VECTOR = "the vectors"


def _tensors(representations: Representations) -> dict[str, Tensor]:
    """Vectors and statistics by name."""
    return {**representations.statistics, _VECTOR: representations.vector_ND}
