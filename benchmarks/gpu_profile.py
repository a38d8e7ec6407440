"""A profile of one training step of each method, through Lightning: time by kind of kernel, host waits, share of peak.

`python -m benchmarks.gpu --profile FOLDER` writes one text file a method. The weights and texts are random.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from transformers import AutoConfig, PretrainedConfig

from benchmarks.gpu import Bench, device_name
from benchmarks.workloads import synthetic_batch
from embeddings.callbacks import GPUTraining, GradCacheCallback
from embeddings.callbacks.progress import flops, work_of
from embeddings.common.io import write_text
from embeddings.losses import InfoNCE
from embeddings.models import (
    AnchorTokenPooling,
    BackboneConfig,
    LatentAttentionPooling,
    LoraSettings,
    MeanPooling,
    Upcycling,
)
from embeddings.models.stand_in import architecture, tiny_architecture, write_stand_in
from embeddings.modules import CDEModule, MGHCurriculumModule, MoEEmbedModule, NVEmbedModule
from embeddings.training.optim import Schedule

# Kinds of kernels by their names, of CUDA's, Triton's and torch's own; the first match counts.
KINDS = {
    "attention": r"flash|fmha|attention|attn",
    "matrix products": r"gemm|cutlass|nvjet|xmma|cublas|grouped_mm|(^|:)(add|ba|b)?mm$|matmul|linear",
    "fused by the compiler": r"^triton_",
    "norms": r"layer_?norm|rms_?norm|vectorized_norm",
    "optimiser": r"adam|multi_tensor|foreach|lpnorm",
    "dropout": r"dropout|bernoulli",
    "index, gather, sort": r"index|gather|scatter|sort|embedding|topk|radix|nonzero|where|masked",
    "sums": r"reduce|sum|softmax|logsumexp|mean|cumsum|scan",
    "copies and casts": r"memcpy|memset|copy|fill|zero|cat|clone|pin|::to$|empty|view",
    "elementwise": r"elementwise|gelu|silu|mul|add|sub|div|exp|pow|tanh|neg|sqrt|clamp|lerp|normalize|cos|sin",
}
WAITS = re.compile(r"cuda(Stream|Device|Event)Synchronize|aten::(_local_scalar_dense|nonzero)$")
STEPS = 12
NUM_SLOWEST = 15


class Method(NamedTuple):
    """A method and its random backbone: a name of `ARCHITECTURES`, or a model type with transformers' sizes."""

    backbone: str
    module: Callable[[BackboneConfig], L.LightningModule]


def _module(kind: Any, *poolings: Any, **options: Any) -> Callable[[BackboneConfig], L.LightningModule]:
    schedule, loss = Schedule(warmup_steps=0, decay="constant"), InfoNCE(temperature=0.05)
    optimizer = partial(torch.optim.AdamW, lr=1e-5)
    return lambda config: kind(config, *poolings, loss=loss, optimizer=optimizer, schedule=schedule, seed=0, **options)


METHODS = {
    "encoder": Method("bert", _module(NVEmbedModule, MeanPooling, lora=None)),
    "nv_embed": Method("SmolLM2-135M", _module(NVEmbedModule, LatentAttentionPooling, lora=LoraSettings())),
    "mgh": Method("SmolLM2-135M", _module(MGHCurriculumModule, AnchorTokenPooling, lora=LoraSettings())),
    "moe": Method("checkpoints/minilm_rotary", _module(MoEEmbedModule, upcycling=Upcycling(num_experts=8))),
    "cde": Method("nomic_bert", _module(CDEModule)),
}


class ProfiledStep(L.Callback):
    """Times every step, and profiles the last but one.

    Attributes:
        seconds: The time of each step, with all work of the device done.
        events: What the profiler recorded.
        operations: Operations of the profiled step, as `Throughput` counts them.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.seconds: list[float] = []
        self.events: Any = []
        self.operations = 0.0
        self._profile: Any = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock, and the profiler."""
        _wait(pl_module.device)
        if batch_idx == self.num_steps - 2:
            on_gpu = [ProfilerActivity.CUDA] if pl_module.device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profile.__enter__()
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock, and the profiler."""
        _wait(pl_module.device)
        self.seconds.append(time.perf_counter() - self._start)
        if batch_idx == self.num_steps - 2:
            self._profile.__exit__(None, None, None)
            self.events = self._profile.key_averages()
            module: Any = pl_module
            self.operations = flops(pl_module, work_of(getattr(module, "read_batch", batch), module.grad_cache))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def profiled(bench: Bench, name: str, compiles: bool, folder: Path) -> ProfiledStep:
    """Train a method for a few steps of one batch, and profile one."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    method = METHODS[name]
    write_stand_in(folder / "model", _architecture(bench, method.backbone))
    is_decoder = name in ("nv_embed", "mgh")
    config = BackboneConfig(
        str(folder / "model"),
        bidirectional=is_decoder,
        dtype="bfloat16" if is_decoder else "float32",
        compile=compiles or "auto",
    )
    batch = synthetic_batch(bench.pick(8, 1024), bench.pick(8, 128), 60)
    steps = ProfiledStep(bench.pick(3, STEPS))
    cache = GradCacheCallback(bench.pick(32, 32_768), kept_gib=bench.pick(0, 8))
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu" if bench.tiny else "gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=steps.num_steps,
        callbacks=[cache, GPUTraining(), steps],
        **off,
    )
    trainer.fit(method.module(config), DataLoader([batch] * steps.num_steps, batch_size=None))
    return steps


def _architecture(bench: Bench, name: str) -> PretrainedConfig:
    config = architecture(name) if "/" in name or name[0].isupper() else AutoConfig.for_model(name)
    return tiny_architecture(config) if bench.tiny else config


def kind_of(name: str) -> str:
    """The kind of a kernel, or of an operator of torch."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def report(bench: Bench, name: str, step: ProfiledStep) -> str:
    """The profile as text."""
    on_gpu = bench.device.type == "cuda"
    times: dict[str, tuple[float, int]] = {}
    waits: dict[str, tuple[float, int]] = {}
    for event in step.events:
        is_kernel = event.device_type == DeviceType.CUDA if on_gpu else event.key.startswith("aten::")
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if is_kernel:
            times[event.key] = microseconds / 1e3, event.count
        if WAITS.fullmatch(event.key):
            waits[event.key] = event.self_cpu_time_total / 1e3, event.count
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for key, (milliseconds, count) in times.items():
        by_kind[kind_of(key)][0] += milliseconds
        by_kind[kind_of(key)][1] += count
    busy, seconds = sum(milliseconds for milliseconds, _ in times.values()), step.seconds[-1]
    share = step.operations / seconds / bench.bf16_rate
    lines = [
        f"{name}: one training step on {device_name(bench.device) or 'a CPU'}, torch {torch.__version__}",
        f"seconds of each step: {' '.join(f'{each:.3f}' for each in step.seconds)} (the last but one is profiled)",
        f"kernels: {busy:.1f} ms of the last step's {1e3 * seconds:.1f} ms",
        f"operations: {step.operations / 1e12:.3g} T, {share:.1%} of the measured rate of 16-bit products",
        "",
        f"{'kind':<24}{'ms':>10}{'share':>8}{'count':>8}",
    ]
    for kind, (milliseconds, count) in sorted(by_kind.items(), key=lambda item: -item[1][0]):
        lines.append(f"{kind:<24}{milliseconds:>10.2f}{milliseconds / busy:>8.1%}{count:>8.0f}")
    lines += ["", f"{'host waits':<40}{'ms':>10}{'count':>8}"]
    lines += [f"{key:<40}{milliseconds:>10.2f}{count:>8}" for key, (milliseconds, count) in sorted(waits.items())]
    lines += ["", f"{'slowest kernels':<80}{'ms':>10}{'count':>8}"]
    slowest = sorted(times.items(), key=lambda item: -item[1][0])[:NUM_SLOWEST]
    lines += [f"{key[:78]:<80}{milliseconds:>10.2f}{count:>8}" for key, (milliseconds, count) in slowest]
    return "\n".join(lines) + "\n"


def write_profile(bench: Bench, name: str, output: Path, compiles: bool) -> None:
    """Profile a method's step and write `NAME.txt` into a folder, or `NAME_compiled.txt`."""
    with TemporaryDirectory() as folder:
        step = profiled(bench, name, compiles, Path(folder))
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}{'_compiled' * compiles}.txt"
    write_text(path, report(bench, name, step))
    print(path, flush=True)
