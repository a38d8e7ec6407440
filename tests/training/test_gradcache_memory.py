"""What grows with the batch on the device in a step of GradCache: the vectors and their gradients, nothing else."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embeddings.common import ContrastiveBatch, LossOutput, Representations, TokenBatch, types
from embeddings.data import EmbeddingDataModule
from embeddings.losses import InfoNCE
from embeddings.training import GradCache, gradcache
from tests.helpers.contrastive import Record, batch_of, random_batch
from tests.helpers.live_bytes import LiveBytes

WIDTH, INNER, LENGTH, TEXTS = 256, 4096, 8, 32
META = torch.device("meta")


class MetaStep(nn.Module):
    """A bi-encoder on a device that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        with META:
            self.table, self.up, self.down = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        # As many scores at once as in a batch of a 64th of the pairs.
        self.loss = InfoNCE(tile_size=2**14)
        self.num_forwards = 0

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        assert tokens.device == META
        self.num_forwards += 1
        state_NLH = self.table(tokens.padded().input_ids_NL)
        return Representations(self.down(nn.functional.gelu(self.up(state_NLH))).mean(1))

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        return self.loss(query.vector_ND, candidate.vector_ND, batch)


class NoRandomState:
    """The random state of a device that has none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def replayed(self) -> Any:
        return nullcontext()


@pytest.fixture(autouse=True)
def without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradcache, "RandomState", NoRandomState)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())


def measured(num_pairs: int, moves_texts: bool = False) -> LiveBytes:
    """The memory of one step; the parameters' gradients exist before it."""
    step = MetaStep()
    for parameter in step.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = batch_of([Record([7] * LENGTH, [8] * LENGTH) for _ in range(num_pairs)])
    with LiveBytes() as live:
        batch = batch.to(META) if moves_texts else batch.without_texts_to(META)
        assert batch.query.device == (META if moves_texts else torch.device("cpu"))
        GradCache(mini_batch_tokens=TEXTS * LENGTH).step(step, batch)
    # Without more than 32 mini-batches the last graph is kept.
    num_mini_batches = 2 * num_pairs // TEXTS
    assert step.num_forwards == 2 * num_mini_batches - (num_mini_batches <= 32)
    return live


def test_the_peak_grows_by_the_vectors_and_their_gradients() -> None:
    """Of queries and candidates, in float32: 4·N·d·4 bytes."""
    few, many = 64, 640
    peaks = [measured(num_pairs) for num_pairs in (few, many)]
    must_grow = 4 * (many - few) * WIDTH * 4
    assert (peaks[1].peak - must_grow) / peaks[0].peak < 1.02
    assert peaks[1].peak - peaks[0].peak > 0.9 * must_grow
    assert must_grow > 0.1 * peaks[0].peak
    assert peaks[1].at_peak[f"({many}, {WIDTH}) float32"] == 4 * many * WIDTH * 4
    assert measured(many, moves_texts=True).peak > peaks[1].peak + 2 * many * LENGTH * 9


def test_each_mini_batch_copies_its_own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, step, copied = random_batch(6, 2), MetaStep(), []
    original = types.moved

    def counted(tensor: Tensor, device: torch.device) -> Tensor:
        copied.extend([tensor] if device == META else [])
        return original(tensor, device)

    monkeypatch.setattr(types, "moved", counted)
    GradCache(mini_batch_tokens=20).step(step, batch.without_texts_to(META))
    assert step.num_forwards > 6
    assert len(copied) == 3 * step.num_forwards
    own = [TokenBatch(*copied[at : at + 3]) for at in range(0, len(copied), 3)]
    assert all(tokens.device == torch.device("cpu") and tokens.num_tokens <= 20 for tokens in own)
    first_pass = sum(tokens.num_tokens for tokens in own[: (step.num_forwards + 1) // 2])
    assert first_pass == batch.query.num_tokens + batch.candidate.num_tokens


@pytest.mark.parametrize(("uses_cache", "training"), [(True, True), (True, False), (False, True)])
def test_a_data_module_moves_texts_only_for_a_step_that_needs_all(uses_cache: bool, training: bool) -> None:
    module = SimpleNamespace(grad_cache=GradCache() if uses_cache else None)
    data = SimpleNamespace(trainer=SimpleNamespace(lightning_module=module, training=training))
    batch = EmbeddingDataModule.transfer_batch_to_device(data, random_batch(3, 1), META, 0)
    assert batch.device == batch.candidate_hash_C.device == META
    stays = uses_cache and training
    assert batch.query.device == batch.candidate.device == (torch.device("cpu") if stays else META)
    assert batch.query.lengths_N.device == torch.device("cpu")


def test_a_few_mini_batches_keep_the_last_graph_and_many_do_not() -> None:
    for count, num_forwards in ((32, 63), (34, 68)):
        step = MetaStep()
        batch = batch_of([Record([7] * LENGTH, [8] * LENGTH) for _ in range(count // 2)])
        GradCache(mini_batch_tokens=LENGTH).step(step, batch.to(META))
        assert step.num_forwards == num_forwards
