"""GradCache: the gradient of a batch that does not fit in memory, exact, one mini-batch at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embeddings.common import (
    ContextualStep,
    ContrastiveBatch,
    ContrastiveStep,
    LossOutput,
    OptionError,
    Representations,
)
from embeddings.common.distributed import is_distributed, reduce_int
from embeddings.common.types import take_texts
from embeddings.models.experts import shared_casts
from embeddings.training.graph_budget import GraphBudget
from embeddings.training.graphs import GraphMemory, attach_gradient, graph_leaves
from embeddings.training.mini_batch_plan import (
    CANDIDATE,
    CONTEXT,
    QUERY,
    MiniBatch,
    extend_plan,
    plan_stages,
    tower_tokens,
)
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

    A `ContextualStep` over a batch with a context has two stages. The first pass runs them in order, and the vectors
    of the first are a leaf that every mini-batch of the second reads; the second pass runs them in reverse, so that
    the leaf has the gradient of both towers when the first stage is handed it. A second stage that is not trained
    costs nothing but its recomputation; a first stage that is not (`trains_context` of the step is false) runs once.

    Args:
        mini_batch_tokens: Most padded tokens of a mini-batch, a text's context included. A longer text is alone.
        mini_batch_texts: Most texts of a mini-batch; None for no such limit.
        kept_fraction: Share of all padded tokens, 0 to 1, whose graphs may be kept; None leaves it to `kept_gib`.
        kept_gib: Memory that kept graphs may hold together, in GiB on this rank; None leaves it to `kept_fraction`.
            The longest mini-batch of a stage is measured, the others are taken to need as much a token. With both
            options both limits hold; without either only the last graph is kept.
        equal_mini_batches: Whether all ranks run the same number of mini-batches and keep the same number of graphs,
            as strategies need that gather parameters in each forward (FSDP, ZeRO-3).

    Precision: representations keep their dtype, and so do their gradients; what the mini-batches say of a context is
        summed in float32 or better. The backward runs outside autocast.
    Distributed: one gradient synchronisation a step, by the last backward, which is the first stage's. A parameter
        that only earlier mini-batches, a later stage or the loss reached takes part in it. Each rank has its own
        context; only candidates cross ranks, in the loss.
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
        self.budget = GraphBudget(kept_fraction, kept_gib)
        self.mini_batch_tokens = mini_batch_tokens
        self.mini_batch_texts = mini_batch_texts
        self.kept_fraction = kept_fraction
        self.kept_gib = kept_gib
        self.equal_mini_batches = equal_mini_batches

    def plan(self, batch: ContrastiveBatch) -> list[MiniBatch]:
        """The mini-batches of a batch in the order they first run: stage by stage, the longest texts first.

        Distributed: as `plan_stages`.
        """
        return [mini_batch for stage in self.plan_stages(batch) for mini_batch in stage]

    def plan_stages(self, batch: ContrastiveBatch) -> list[list[MiniBatch]]:
        """The mini-batches of each stage of a batch.

        Distributed: one all-reduce a stage where the ranks must have equally many.
        """
        stages = plan_stages(batch, self.mini_batch_tokens, self.mini_batch_texts)
        if self.equal_mini_batches:
            counts = [reduce_int(len(stage), "max", batch.query.device) for stage in stages]
            stages = [extend_plan(stage, count, batch) for stage, count in zip(stages, counts, strict=True)]
        return stages

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
        syncs_each: bool = False,
    ) -> LossOutput:
        """Run everything but the last backward, and leave that one to the caller.

        The loss that comes back has the whole batch's value and the last mini-batch's graph: a caller whose framework
        runs one backward a step (Lightning's automatic optimisation) returns it as if it were a plain loss.
        Without gradients enabled it is just the loss.

        Args:
            step: The method.
            batch: The batch.
            backward: Runs a backward from a scalar, without a factor of its own; it is called outside autocast for
                each mini-batch but the last.
            no_sync: Makes a context in which backwards do not synchronise gradients. Give it where the step's forward
                goes through the wrapper that synchronises (DDP, FSDP); forwards and early backwards run inside it, and
                the last mini-batch is recomputed outside. Encoders of two stages must share one wrapper. None where
                the wrapper is around the caller.
            scale: Factor of the early backwards' gradients. The caller's own backward of the returned loss must apply
                the same (Lightning divides by the number of accumulated batches; an fp16 scaler multiplies).
            syncs_each: Whether every backward averages the gradients of its own leaves over the ranks (FSDP2, ZeRO).
                Otherwise the last one does so for all, and each parameter of the step takes part in it (DDP).

        Returns:
            LossOutput: `loss` () with the last graph behind it; `terms` detached.
        """
        passes = _TwoPasses(self, step, batch, keeps_last=no_sync is None, syncs_each=syncs_each)
        # Sharded weights are whole for one layer at a time, and so are their casts.
        with nullcontext() if syncs_each else shared_casts():
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


@dataclass(slots=True, eq=False)
class _Visit:
    """A mini-batch between the two passes; `graph` is there while its graph is kept."""

    mini_batch: MiniBatch
    random_state: RandomState
    graph: Representations | None


class _TwoPasses:
    """One step: what the first pass found, and what the second one makes of it."""

    def __init__(
        self, engine: GradCache, step: ContrastiveStep, batch: ContrastiveBatch, keeps_last: bool, syncs_each: bool
    ) -> None:
        self.engine = engine
        self.step = step
        self.batch = batch
        self.keeps_last = keeps_last
        self.syncs_each = syncs_each
        self.device = batch.query.device
        self.stages = engine.plan_stages(batch)
        # The first stage whose mini-batches have a second pass.
        self.first_trained = int(len(self.stages) > 1 and not getattr(step, "trains_context", True))
        self.num_kept: list[int] = []
        self.visits: list[list[_Visit]] = []
        self.towers: dict[int, Representations] = {}
        self.gradient_of: dict[Tensor, Tensor] = {}
        self.early_leaves: set[Tensor] = set()
        self.casts_have_graph = False

    @property
    def context(self) -> Tensor | None:
        """The leaf that the second stage reads, (M, H), once the first stage has run."""
        return self.towers[CONTEXT].vector_ND if CONTEXT in self.towers else None

    def embed_all(self) -> None:
        """The first pass: the representations of every mini-batch, and the graphs that are kept."""
        for stage in range(len(self.stages)):
            self._embed_stage(stage)
            for leaf in self._leaves():
                is_trained = leaf is not self.context or self.first_trained == 0
                leaf.requires_grad_(torch.is_grad_enabled() and leaf.is_floating_point() and is_trained)

    def loss(self) -> LossOutput:
        """The loss of the whole batch."""
        return self.step.loss_from_representations(self.towers[QUERY], self.towers[CANDIDATE], self.batch)

    def find_gradients(self, loss: Tensor) -> None:
        """The gradients of the representations, and of parameters that the loss itself has."""
        leaves = dict.fromkeys([leaf for leaf in self._leaves() if leaf.requires_grad] + graph_leaves(loss))
        with torch.autocast(self.device.type, enabled=False):
            gradients = torch.autograd.grad(loss, list(leaves), allow_unused=True, materialize_grads=True)
        self.gradient_of = dict(zip(leaves, gradients, strict=True))
        if self.context in self.gradient_of:
            # Many mini-batches will add to it.
            gradient = self.gradient_of[self.context]
            self.gradient_of[self.context] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def second_order(self) -> list[_Visit]:
        """From the last stage to the first; of each the kept graphs before the others, whose memory they free."""
        trained = self.visits[self.first_trained :]
        return [visit for visits in reversed(trained) for visit in sorted(visits, key=lambda v: v.graph is None)]

    def run_early(self, visit: _Visit, loss: Tensor, backward: Backward, scale: float) -> None:
        """The second pass of any mini-batch but the last."""
        surrogate = attach_gradient(loss, *self._outputs_and_gradients(visit))
        if not surrogate.requires_grad:
            return
        if not self.syncs_each and (is_distributed() or self.context is not None):
            self.early_leaves.update(leaf for leaf in graph_leaves(surrogate) if leaf is not self.context)
        with torch.autocast(self.device.type, enabled=False):
            backward(surrogate * scale)
        self._take_context_gradient(scale)

    def last_surrogate(self, visit: _Visit, loss: Tensor) -> Tensor:
        """The loss's value with the last mini-batch's graph, and with every parameter that took part in the step."""
        outputs, gradients = self._outputs_and_gradients(visit)
        representations = set(self._leaves())
        of_loss = {leaf: gradient for leaf, gradient in self.gradient_of.items() if leaf not in representations}
        reached = {leaf for output in outputs for leaf in graph_leaves(output)} | set(of_loss)
        # A wrapper that averages gradients waits for every parameter in its one synchronised backward.
        missing = [leaf for leaf in self.early_leaves if leaf not in reached]
        return attach_gradient(loss, [*outputs, *of_loss], [*gradients, *of_loss.values()], missing)

    def _embed_stage(self, stage: int) -> None:
        plan, budget = self.stages[stage], self.engine.budget
        with_graphs = torch.is_grad_enabled() and stage >= self.first_trained
        num_kept = budget.num_kept(self.stages, self.num_kept) if with_graphs else 0
        visits: list[_Visit] = []
        for index, mini_batch in enumerate(plan):
            keeps = with_graphs and self._keeps(stage, index, num_kept)
            random_state, memory = RandomState.capture(self.device), GraphMemory()
            measures = index == 0 and keeps and budget.measures
            with memory.measured(self.device, self._parameters) if measures else nullcontext():
                graph = self._embed(mini_batch, keeps)
            if measures:
                memory.leave_out_casts(_tensors(graph).values())
            visits.append(_Visit(mini_batch, random_state, graph if keeps else None))
            self._store(mini_batch, graph)
            if index == 0 and with_graphs:
                num_kept = self._agreed_num_kept(stage, memory.num_bytes)
                if not self._keeps(stage, 0, num_kept):
                    visits[0].graph = None
            del graph
        self.visits.append(visits)
        self.num_kept.append(num_kept)

    def _embed(self, mini_batch: MiniBatch, with_graph: bool) -> Representations:
        if with_graph and not self.casts_have_graph:
            # A weight that autocast cast without a graph would be used again here, and get no gradient.
            torch.clear_autocast_cache()
        self.casts_have_graph = with_graph
        tokens = take_texts(tower_tokens(self.batch, mini_batch.tower), mini_batch.rows_n)
        with torch.set_grad_enabled(with_graph):
            if mini_batch.tower == CONTEXT:
                assert isinstance(self.step, ContextualStep), "a batch with a context needs a step that embeds it"
                return Representations(self.step.embed_context(tokens))
            return self.step.embed(tokens, self.context)

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
                gradient = gradient[visit.mini_batch.rows_n.to(self.device)].to(output.dtype)
            outputs.append(output)
            gradients.append(torch.zeros_like(output) if visit.mini_batch.is_filler else gradient)
        return outputs, gradients

    def _take_context_gradient(self, scale: float) -> None:
        """Add what a backward of the second stage left on the context to its gradient, without the scale."""
        context = self.context
        if context is not None and context.grad is not None:
            self.gradient_of[context].add_(context.grad, alpha=1.0 / scale)
            context.grad = None

    def _leaves(self) -> list[Tensor]:
        """The vectors and statistics of all towers."""
        return [leaf for tower in self.towers.values() for leaf in _tensors(tower).values()]

    def _store(self, mini_batch: MiniBatch, found: Representations) -> None:
        """Put a mini-batch's vectors into their tower's rows, and add its statistics to the tower's."""
        if mini_batch.is_filler:
            return
        num_texts = len(tower_tokens(self.batch, mini_batch.tower))
        tower = self.towers.get(mini_batch.tower)
        if tower is None:
            zeros = {name: torch.zeros_like(value) for name, value in found.statistics.items()}
            tower = Representations(found.vector_ND.new_empty(num_texts, found.vector_ND.shape[1]), zeros)
            self.towers[mini_batch.tower] = tower
        tower.vector_ND[mini_batch.rows_n.to(self.device)] = found.vector_ND.detach()
        for name, value in found.statistics.items():
            tower.statistics[name].add_(value.detach())

    def _keeps(self, stage: int, index: int, num_kept: int) -> bool:
        """Whether a mini-batch keeps its graph where the first `num_kept` of its stage may."""
        if index < len(self.stages[stage]) - 1:
            return index < num_kept
        if stage == self.first_trained and not self.keeps_last:
            # Its backward ends the step, and the wrapper must see its forward outside `no_sync`.
            return False
        # Beside graphs that fill a memory budget the last one has no room, unless it was counted.
        is_last_forward = stage == len(self.stages) - 1
        has_room = not self.engine.budget.measures or sum(self.num_kept) + num_kept == 0
        return index < num_kept or (is_last_forward and has_room)

    def _agreed_num_kept(self, stage: int, first_bytes: int) -> int:
        """The number of kept graphs once the first mini-batch's memory is known, where it was measured."""
        if first_bytes:
            self.engine.budget.learn(stage, first_bytes, self.stages[stage][0].num_tokens)
        num_kept = self.engine.budget.num_kept(self.stages, self.num_kept)
        return reduce_int(num_kept, "min", self.device) if self.engine.equal_mini_batches else num_kept

    def _parameters(self) -> list[Tensor]:
        return list(self.step.parameters()) if isinstance(self.step, nn.Module) else []


_VECTOR = "the vectors"


def _tensors(representations: Representations) -> dict[str, Tensor]:
    """Vectors and statistics by name."""
    return {**representations.statistics, _VECTOR: representations.vector_ND}
