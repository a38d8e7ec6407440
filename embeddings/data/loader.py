"""A data loader that a killed run can go on with from the very next batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from embeddings.common.errors import UserError
from embeddings.common.stopping import held_back
from embeddings.data.examples import RowDraw
from embeddings.data.samplers.base import BatchSampler


class Drawable(Protocol):
    """Rows that are read one entry of the plan at a time, or a whole batch at once where it has `__getitems__`."""

    def __getitem__(self, entry: RowDraw, /) -> Any: ...


@dataclass(frozen=True)
class _Fault:
    """A fault of the data, or of the disk it lies on, on its way out of a worker."""

    error: Exception


class _Batches:
    """The batches of a data set by their entries.

    torch carries an exception out of a worker as the text of its traceback, so a fault is handed over as a value.
    """

    def __init__(self, dataset: Drawable, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __getitems__(self, entries: list[RowDraw]) -> Any:
        read_all = getattr(self.dataset, "__getitems__", None)
        try:
            return self.collate_fn(read_all(entries) if read_all else [self.dataset[entry] for entry in entries])
        except (UserError, OSError) as error:
            return _Fault(error)


def _as_it_is(batch: Any) -> Any:
    return batch


class ShieldedLoader(DataLoader[Any]):
    """A `DataLoader` whose workers make batches until the run ends them.

    A signal to the run's process group is the run's to answer; `start_worker` has them hear their parent alone.
    """

    def __iter__(self) -> Any:
        """The batches."""
        with held_back():
            return super().__iter__()


class ResumableLoader(ShieldedLoader):
    """A `DataLoader` whose state is the number of batches it has handed over in which epoch.

    Workers run ahead of training, so what the sampler has given out says nothing of what training has seen; this
    counts the batches as they are delivered. Iterating again after a whole epoch goes on with the next one, with or
    without a `set_epoch` in between. Iteration begins with the first `next`: a state loaded after `iter` still counts.

    Determinism: batches are those of the sampler's plan, whatever the number of workers; the global random state is
    left alone. The state is the same on every rank, so the one that rank 0 saves serves all.

    Args:
        dataset: Answers `dataset[RowDraw]`, and where it can `dataset.__getitems__(list of them)`, as torch asks it.
        batch_sampler: The plan.
        collate_fn: Makes a batch of a list of what the data set answers.
        num_workers: Processes that read and tokenise ahead; 0 does it between the steps.
        prefetch_factor: Batches each worker runs ahead, or None for torch's own choice.
        pin_memory: Whether batches lie in page-locked memory, for asynchronous copies to a GPU.
        worker_init_fn: Called with its number in each worker before it starts.
    """

    batch_sampler: BatchSampler

    def __init__(
        self,
        dataset: Drawable,
        batch_sampler: BatchSampler,
        collate_fn: Callable[[list[Any]], Any],
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(
            _Batches(dataset, collate_fn),  # type: ignore[arg-type]  # torch wants its own class and calls this alone
            batch_sampler=batch_sampler,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            persistent_workers=num_workers > 0,
            # A generator of its own: each iterator draws from it, and a resumed run makes fewer iterators.
            generator=torch.Generator().manual_seed(batch_sampler.seed),
        )
        # How many of the batches handed over have not been trained on: whoever trains can say.
        self.in_flight: Callable[[], int] = int
        # Whether a run's beginning may be resumed by another plan.
        self.tries_batch_sizes = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of the present epoch that have not been delivered yet, or else of the next epoch.

        Raises:
            UserError: If data cannot be used; the same from a worker as without one.
            OSError: If it cannot be read.
        """
        plan = self.batch_sampler
        if plan.start >= len(plan):
            plan.set_epoch(plan.epoch + 1)
        batches = super().__iter__()
        for batch in batches:
            if isinstance(batch, _Fault):
                # Left to the garbage collector, the error's traceback would have each worker waited for five seconds.
                getattr(batches, "_shutdown_workers", lambda: None)()
                self._iterator = None
                raise batch.error
            plan.start += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Plain types: the epoch, the batches delivered in it without those in flight, and what the plan depends on."""
        plan = self.batch_sampler
        return {"epoch": plan.epoch, "delivered": plan.start - self.in_flight(), "plan": plan.plan_fields()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            OptionError: If the plan is not the one that was saved; the message names the first field that differs.
        """
        # A search for a batch size begins each of its trials where the run began, with another plan.
        if not self.tries_batch_sizes or state["epoch"] or state["delivered"]:
            self.batch_sampler.check_same_plan(state["plan"])
        self.batch_sampler.resume(state["epoch"], state["delivered"])
