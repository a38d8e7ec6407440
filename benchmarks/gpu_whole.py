"""G14 to G16: whole training and encoding from texts, beside the engine alone and beside sentence-transformers.

`benchmarks.gpu` runs them. The models have random weights and the sizes of MiniLM, and a tokenizer of few words: each
word of a text is one token.
"""

import importlib.util
import json
import logging
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from transformers import AutoConfig, BertModel

from benchmarks.gpu import Bench
from benchmarks.workloads import assert_equal_gradients, gradients, pair_batch
from embeddings import BackboneConfig, EmbeddingDataModule, Encoder, NVEmbedModule, Schedule, SourceConfig, TextSettings
from embeddings.callbacks import GradCacheCallback
from embeddings.callbacks.progress import flops, work_of
from embeddings.cli.trainer import Trainer
from embeddings.common.io import text_hash, write_text
from embeddings.losses import InfoNCE
from embeddings.models import Embedder, MeanPooling
from embeddings.models.stand_in import tiny_architecture, wordpiece_tokenizer
from embeddings.training import GradCache

MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
WORDS = ["how", "do", "pad", "sequences", "to", "one", "length", "given", "a", "question", "retrieve", "passages"]
PIECE = 16
# The peer's batch sizes of encoding, and its settings of training, from which the fastest counts.
PEER_BATCH_SIZES = (128, 512, 2048)
PEER_SETTINGS = ({"mini_batch_size": 128}, {"mini_batch_size": 512}, {"mini_batch_num_tokens": 32_768})


def texts(count: int, shortest: int, longest: int, seed: int = 0) -> list[str]:
    """Random texts, of a uniformly drawn number of words each."""
    draw = random.Random(seed)
    # Pieces of a few words: drawing each word of millions would take longer than the measurement.
    pieces = [draw.choices(WORDS, k=PIECE) for _ in range(1000)]
    lengths = [draw.randint(shortest, longest) for _ in range(count)]
    drawn = ([word for piece in draw.choices(pieces, k=-(-each // PIECE)) for word in piece] for each in lengths)
    return [" ".join(words[:each]) for words, each in zip(drawn, lengths, strict=True)]


def write_model(bench: Bench, folder: Path) -> str:
    """Write a model of MiniLM's sizes with mean pooling, which both sides read; returns its folder."""
    config = AutoConfig.for_model("bert", **MINILM)
    torch.manual_seed(0)
    backbone = BertModel(tiny_architecture(config) if bench.tiny else config, add_pooling_layer=False)
    pooling = MeanPooling(backbone.config.hidden_size)
    Embedder(backbone, wordpiece_tokenizer(), pooling).save_pretrained(folder / "model")
    return str(folder / "model")


class Steps(L.Callback):
    """Times every step, and keeps the last batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.batch: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Print how long the first batch took."""
        if batch_idx == 0:
            print(f"the first batch came after {time.perf_counter() - self._start:.1f} s", flush=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The time since the last step, with all work of the device and the wait for the batch."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._start)
        self._start, self.batch = now, batch


def fit(bench: Bench) -> None:
    """G14: training through the trainer of `fit`, with eager and with compiled layers, over the engine alone."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pairs, length, num_steps = bench.pick((8, 16, 3), (1024, 254, 16))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # One epoch: the loader's workers then run ahead of all steps.
        rows = texts(5 * num_steps * pairs, length, length)
        records = [{"query": rows[at], "positive": rows[at + 1], "negatives": rows[at + 2 : at + 5]}
                   for at in range(0, len(rows), 5)]  # fmt: skip
        write_text(folder / "pairs.jsonl", "".join(json.dumps(each) + "\n" for each in records))
        model = write_model(bench, folder)
        for compiles in (True, False) if not bench.tiny else (False,):
            name = f"batches of {pairs}, {length + 2} tokens, {'compiled' if compiles else 'eager'}"
            _measure_fit(bench, folder, model, (pairs, length + 2, num_steps), compiles, name)


def _measure_fit(
    bench: Bench, folder: Path, model: str, sizes: tuple[int, int, int], compiles: bool, name: str
) -> None:
    pairs, length, num_steps = sizes
    module = NVEmbedModule(
        BackboneConfig(model, compile=compiles),
        MeanPooling,
        loss=InfoNCE(temperature=0.05),
        optimizer=partial(torch.optim.AdamW, lr=1e-5, fused=not bench.tiny),
        schedule=Schedule(warmup_steps=0, decay="constant"),
        seed=0,
    )
    data = EmbeddingDataModule(
        [SourceConfig("texts", path=str(folder / "pairs.jsonl"))],
        TextSettings(query_max_length=length, document_max_length=length),
        batch_size=pairs,
        num_negatives=3,
        num_workers=bench.pick(0, 8),
        cache_dir=str(folder / "cache"),
    )
    steps, cache = Steps(), GradCacheCallback(bench.pick(64, 32_768), kept_gib=bench.pick(0, 8))
    trainer = Trainer(
        accelerator="cpu" if bench.tiny else "gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=num_steps,
        default_root_dir=str(folder / name.split(", ")[-1]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[cache, steps],
    )
    trainer.fit(module, data)
    tokens, late = 5 * pairs * length, steps.seconds[num_steps // 2 :]
    seconds = sum(late) / len(late)
    module.to(bench.device)
    batch = steps.batch
    operations = flops(module, work_of(batch, cache.engine))
    engine: Any = cache.engine

    def alone() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            engine.step(module, batch)
        module.zero_grad()

    peer = bench.seconds(alone, 1)
    limit = tokens * bench.bf16_rate / operations
    bench.claim("G14", name, tokens / seconds, limit, seconds / peer, target=None if compiles or bench.tiny else "none")
    first = sum(sorted(steps.seconds[1:10])[1:-1]) / max(1, len(steps.seconds[1:10]) - 2)
    bench.row(f"G14 steps 2 to 10 over the last half, {name}", first / seconds, "ratio", "<=1.5")
    print(f"seconds of each step: {' '.join(f'{each:.3f}' for each in steps.seconds)}", flush=True)


def peers(bench: Bench) -> None:
    """G15 and G16: a training step and encoding, over sentence-transformers in its best setting, all in bfloat16."""
    if not importlib.util.find_spec("sentence_transformers"):
        bench.skip("G15 and G16", "sentence-transformers is not installed")
        return
    from sentence_transformers import SentenceTransformer

    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(bench, Path(temporary))
        peer = SentenceTransformer(folder, device=str(bench.device))
        peer.max_seq_length = 512
        _encoding(bench, folder)
        _training(bench, folder, peer)


def _encoding(bench: Bench, folder: str) -> None:
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(folder, device=str(bench.device), model_kwargs={"dtype": torch.bfloat16})
    peer.max_seq_length = 512
    # The target is for texts of about 50 tokens.
    for length in bench.pick((16,), (50, 128)):
        rows = texts(bench.pick(16, 4_000_000 // length), length // 2, length + length // 2)
        ours = Encoder.from_pretrained(folder, device=bench.device, precision="bfloat16")
        expected, found = peer.encode(rows[:64], normalize_embeddings=True), ours.encode(rows[:64])
        least = float((np.asarray(expected, np.float32) * found).sum(axis=1).min())
        if not least >= 0.99:
            raise RuntimeError(f"a cosine of {least:.3f} to the peer's vectors: nothing to compare")
        runs = {size: partial(peer.encode, rows, batch_size=size, show_progress_bar=False)
                for size in bench.pick((8,), PEER_BATCH_SIZES)}  # fmt: skip
        best = _fastest(bench, runs)
        run = partial(ours.encode, rows)
        run()
        tokens = sum(row.count(" ") + 3 for row in rows)
        name = f"{len(rows)} texts of {length} tokens on average"
        rate = tokens / bench.once(run)
        limit = tokens * bench.bf16_rate / _operations(ours.embedder, rows)
        ratio = bench.over(run, runs[best])
        bench.claim("G16", name, ratio, ratio.median * rate / limit, target=None if length == 50 else "none")
        bench.row(f"G16 tokens/s, {name}", rate, "tokens/s")
        bench.row(f"G16 tokens/s of the peer, batch {best}, {name}", rate * ratio.median, "tokens/s")


def _operations(embedder: Embedder, rows: list[str]) -> float:
    config: Any = embedder.backbone.config
    inner = 2 * config.hidden_size * config.intermediate_size + 4 * config.hidden_size**2
    lengths = [row.count(" ") + 3 for row in rows]
    per_layer = sum(2 * inner * each + 4 * config.hidden_size * each**2 for each in lengths)
    return float(config.num_hidden_layers * per_layer)


def _fastest(bench: Bench, runs: dict[int, Callable[[], Any]]) -> int:
    """The key of the fastest action, by the second of two runs each."""
    seconds = {}
    for key, run in runs.items():
        run()
        seconds[key] = bench.once(run)
    print("peer: " + ", ".join(f"{key} {taken:.2f} s" for key, taken in seconds.items()), flush=True)
    return min(seconds, key=seconds.__getitem__)


def _training(bench: Bench, folder: str, peer: Any) -> None:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    from benchmarks.gpu_claims import EmbedderStep, compile_with

    pairs = bench.pick(8, 4096)
    sides = [
        texts(pairs, *lengths, seed) for seed, lengths in enumerate(bench.pick(((4, 8),) * 2, ((8, 32), (64, 254))))
    ]
    ours = Encoder.from_pretrained(folder, device=bench.device, precision="float32").embedder.eval()
    ids = [ours.tokenizer(side)["input_ids"] for side in sides]
    batch = pair_batch(*ids, *(torch.tensor([text_hash(text) for text in side]) for side in sides)).to(bench.device)
    step, engine = EmbedderStep(ours), GradCache(mini_batch_tokens=bench.pick(64, 32_768), kept_gib=bench.pick(0, 8))
    padded = [tokens.padded() for tokens in (batch.query, batch.candidate)]
    features = [{"input_ids": side.input_ids_NL, "attention_mask": side.attention_mask_NL.long()} for side in padded]
    loss_of = partial(CachedMultipleNegativesRankingLoss, peer, scale=20.0)
    engine.step(step, batch)
    peer.eval()
    loss_of(mini_batch_size=128)([dict(each) for each in features], None).backward()
    assert_equal_gradients(gradients(step), gradients(peer), bench.pick(2e-2, 1e-3))
    ours.train()
    peer.train()

    def cached() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            engine.step(step, batch)
        step.zero_grad()

    def of_peer(loss: Any) -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            value = loss([dict(each) for each in features], None)
        value.backward()
        peer.zero_grad()

    runs = {at: partial(of_peer, loss_of(**setting))
            for at, setting in enumerate(PEER_SETTINGS[:1] if bench.tiny else PEER_SETTINGS)}  # fmt: skip
    best = _fastest(bench, runs)
    tokens = batch.query.num_tokens + batch.candidate.num_tokens
    name = f"{pairs} pairs, {tokens} tokens"
    bench.row(f"G15 time of eager layers over the peer's, {name}", bench.over(cached, runs[best]), "ratio")
    state = compile_with(cached, ours.backbone)
    ratio = bench.over(cached, runs[best])
    seconds = bench.seconds(cached)
    operations = 4 * _operations(ours, sides[0] + sides[1])
    bench.claim(
        "G15",
        f"{name}, {state}, over {PEER_SETTINGS[best]}",
        ratio,
        ratio.median * operations / bench.bf16_rate / seconds,
    )
    bench.row(f"G15 tokens/s, {name}, {state}", tokens / seconds, "tokens/s")
