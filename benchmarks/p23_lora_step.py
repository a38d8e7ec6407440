"""P23: a LoRA step takes no longer than sentence-transformers', with at most 1.2 of its peak memory.

SmolLM2-135M under its causal mask, LoRA of rank 16 on all linear layers, mean pooling, InfoNCE over 32 pairs of 24 and
32 tokens. Each run is a process of one thread. Its time is the mean CPU time of its steps but the first, from the
forward pass to the optimizer. Our steps are those of a Lightning trainer, the peer's those of a plain loop. In bfloat16
both compute under autocast over a frozen backbone in bfloat16. Our adapters stay in float32; the peer's are in
bfloat16, as its `add_adapter` makes them, or in float32.
"""

import multiprocessing
import resource
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from peft import LoraConfig, TaskType
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch.utils.data import DataLoader

from benchmarks.decoder_trials import DECODER, LORA, Workspace
from benchmarks.docstring_trials import optimisation
from benchmarks.harness import Ratio, options, ratio_of, record
from benchmarks.workloads import pair_batch
from embeddings.common import InputError
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, MeanPooling
from embeddings.models.model_files import resolve_model
from embeddings.modules import NVEmbedModule

Dtype = Literal["bfloat16", "float32"]
NUM_PAIRS, QUERY_LENGTH, DOCUMENT_LENGTH = 32, 24, 32
RUNS, STEPS = 3, 4
TEMPERATURE, LEARNING_RATE, CLIP = 0.05, 5e-4, 1.0
# The most that first losses may differ by. In bfloat16 the peer's logits, up to 20, are rounded to multiples of 1/8, so
# that the two logits of a loss are off by at most 1/16 each; the loss itself is rounded to a multiple of 1/32.
LOSS_ERRORS = {"bfloat16": 2 / 16 + 1 / 64, "float32": 1e-3}


class Run(NamedTuple):
    """The mean CPU seconds of a step, the peak memory of the process in bytes, and the loss of the first step."""

    seconds: float
    peak: int
    first_loss: float


def random_tokens(num_pairs: int) -> list[torch.Tensor]:
    """Queries and documents of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(20, 80, (num_pairs, length), generator=generator) for length in (QUERY_LENGTH, DOCUMENT_LENGTH)
    ]


class StepClock(L.Callback):
    """Notes the CPU time before the first and after each step, and the losses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.seconds:
            self.seconds.append(time.process_time())

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.seconds.append(time.process_time())
        self.losses.append(float(outputs["loss"]))


def our_steps(folder: str, dtype: Dtype, num_pairs: int) -> tuple[list[float], float]:
    """The CPU seconds of each step, and the first loss."""
    clock, (queries, documents), hashes = StepClock(), random_tokens(num_pairs), torch.arange(2 * num_pairs).view(2, -1)
    batch = pair_batch(queries.tolist(), documents.tolist(), hashes[0], hashes[1])
    module = NVEmbedModule(
        BackboneConfig(folder, bidirectional=False, dtype=dtype),
        MeanPooling,
        LORA,
        InfoNCE(temperature=TEMPERATURE),
        **optimisation(LEARNING_RATE, STEPS),
        seed=0,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        precision="bf16-mixed" if dtype == "bfloat16" else "32-true",
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([batch] * STEPS, batch_size=None))  # type: ignore[arg-type]
    return [after - before for before, after in pairwise(clock.seconds)], clock.losses[0]


def peer_steps(folder: str, dtype: Dtype, num_pairs: int, adapters: torch.dtype) -> tuple[list[float], float]:
    """The CPU seconds of each step of sentence-transformers, and the first loss."""
    transformer = Transformer(folder, model_kwargs={"dtype": getattr(torch, dtype)})
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    config = LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.alpha,
        lora_dropout=LORA.dropout,
        target_modules="all-linear",
        task_type=TaskType.FEATURE_EXTRACTION,
    )
    model.add_adapter(config)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.data = weight.data.to(adapters)
    loss = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    model.train()
    features = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in random_tokens(num_pairs)]
    seconds, losses = list[float](), list[float]()
    for _ in range(STEPS):
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss([dict(feature) for feature in features], None)
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
        losses.append(float(value.detach()))
    return seconds, losses[0]


def measured(steps: Callable[..., tuple[list[float], float]], *arguments: Any) -> Run:
    """Run the steps in this process."""
    torch.set_num_threads(1)
    seconds, first_loss = steps(*arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Run(sum(seconds[1:]) / len(seconds[1:]), peak, first_loss)


def in_a_process(chosen: Namespace, *arguments: Any) -> Run:
    """Run the steps in a new process; in this one if the run is tiny."""
    if chosen.tiny:
        return measured(*arguments)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, arguments)


def compare(chosen: Namespace, folder: str, dtype: Dtype) -> None:
    """Run both sides alternately, and record the ratios of time and memory."""
    shared = (folder, dtype, 4 if chosen.tiny else NUM_PAIRS)
    sides = {"ours": (our_steps, *shared)}
    for adapters in (torch.bfloat16, torch.float32) if dtype == "bfloat16" else (torch.float32,):
        sides[str(adapters).removeprefix("torch.")] = (peer_steps, *shared, adapters)  # type: ignore[assignment]
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for number in range(1 if chosen.tiny else RUNS):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(in_a_process(chosen, *sides[name]))
            print(f"{dtype}, {name}: {runs[name][-1]}", flush=True)
    ours = runs.pop("ours")
    for adapters, peer in runs.items():
        error = abs(ours[0].first_loss - peer[0].first_loss)
        if error > LOSS_ERRORS[dtype]:
            raise RuntimeError(f"first losses differ ({ours[0]}, {peer[0]}): the steps are not comparable")
        title = f"P23 LoRA step in {dtype} over sentence-transformers with adapters in {adapters}"
        for what, unit, target in (("seconds", "ratio", "<=1"), ("peak", "ratio", "<=1.2")):
            ratio: Ratio = ratio_of([getattr(run, what) for run in ours], [getattr(run, what) for run in peer])
            name = title if what == "seconds" else f"{title}: peak memory"
            record(chosen, name, ratio, unit, target, "sentence-transformers, peft, torch")


def main() -> None:
    """Compare both precisions."""
    chosen = options(__doc__)
    torch.manual_seed(0)
    with TemporaryDirectory() as work:
        try:
            folder = Workspace(Path(work), tiny=True).model(DECODER) if chosen.tiny else str(resolve_model(DECODER))
        except InputError as error:
            print(f"P23 skipped: {error}")
            return
        for dtype in ("bfloat16", "float32"):
            compare(chosen, folder, dtype)


if __name__ == "__main__":
    main()
