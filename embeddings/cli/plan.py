"""`plan` and `fit --check`: what a training run needs and would do, without running it."""

import re
import shutil
import time
from argparse import SUPPRESS
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from embeddings.callbacks.checkpoints import Export
from embeddings.callbacks.gradcache import KEPT_FRACTION, free_memory_bytes
from embeddings.callbacks.run_record import callbacks_of, run_logger
from embeddings.cli.fit import (
    Changes,
    Checked,
    CheckingCLI,
    TrainerCLI,
    avoid_emulation,
    module_class,
    run_trainer,
    use_tiny_model,
)
from embeddings.cli.trainer import print_to_stderr, start_checks
from embeddings.common import InputError, OptionError, UserError
from embeddings.common.checkpoint_file import peek_checkpoint
from embeddings.common.distributed import count_values, planning_for
from embeddings.common.errors import run_checks
from embeddings.common.text import format_table
from embeddings.data.datamodule import PlannedDataModule
from embeddings.data.samplers.base import batches_taken, run_steps
from embeddings.data.store import borrowed_cache
from embeddings.models.backbone import read_config
from embeddings.models.moe.upcycling import parameter_counts
from embeddings.models.stand_in import architecture, write_structure
from embeddings.modules.base import BaseModule
from embeddings.training.plan import Setting, StepCost, StrategyName, Texts, plan_step, without_data

GB = 1e9
# Bandwidth of an H100: 450 GB/s by NVLink to the GPUs of its node, and 400 Gb/s by its network card to other nodes.
GPUS_PER_NODE, NVLINK_GB, NETWORK_GB = 8, 450.0, 50.0
# The architecture that `fit --check` assumes for a model that is not on this machine and whose architecture is unknown.
UNKNOWN_MODEL = "answerdotai/ModernBERT-base"
# Fraction of GPU memory left after CUDA, NCCL and fragmentation; the same of a CPU's free memory.
USABLE_FRACTION = 0.9
# Fractions of a large matrix product's rate that a training step reaches on a CPU. Measured with SmolLM2-135M and LoRA,
# and with MiniLM: 0.39 to 0.50 in float32 and 0.16 to 0.18 in bfloat16. Other programs may take some of the CPU.
CPU_SHARES = (0.1, 0.5)
# Size of the timed products, each of 2 GFLOP.
_PRODUCT_SIZE = 1024
# Bytes per token on disk: exact for packed rows, approximate for English text.
BYTES_PER_TOKEN = 4
OPTIONS: dict[str, tuple[type, Any, str]] = {
    "gpus": (int, None, "number of GPUs; default that of the configs"),
    "gpu": (str, "H100 SXM", "name of the GPU; with an option of GPUs the plan is for GPUs also where there are none"),
    "gpu_memory_gb": (float, 80.0, "memory per GPU in 10^9 bytes"),
    "peak_tflops": (float, 989.0, "peak dense bfloat16 operations per GPU and second, in 10^12"),
    "peak_share": (float, 0.4, "fraction of the peak that the run's arithmetic reaches; on a CPU from 0.1 to 0.5"),
    "link_gb": (float, None, "bandwidth per GPU in GB/s; default 450 up to 8 GPUs (NVLink), else 50 (400 Gb/s)"),
    "pairs": (int, None, "training pairs per epoch, or tokens of plain texts"),
    "query_tokens": (int, None, "tokens per query; default the maximum"),
    "document_tokens": (int, None, "tokens per document; default the maximum"),
    "model_config": (str, None, "a config.json to use in place of the backbone's"),
}
# A plan with one of these options is for GPUs.
GPU_OPTIONS = {"gpus", "gpu", "gpu_memory_gb", "peak_tflops", "link_gb"}


@dataclass(frozen=True)
class Hardware:
    """What each process of a run computes on: a GPU by its options, or a part of this machine's CPU."""

    kind: Literal["GPU", "CPU"]
    name: str
    memory: float  # bytes; infinite if unknown
    rate: float  # peak operations per second
    shares: tuple[float, ...]  # fractions of the rate that the run reaches: one, or the highest and the lowest

    @property
    def unit(self) -> str:
        return "GPU" if self.kind == "GPU" else "process"


class PlanCLI(CheckingCLI):
    """`fit` until its arguments are checked, with the options of `plan`."""

    command, summary = "plan", "Estimate what a training run needs: memory, arithmetic, hours, disk."

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        for name, (kind, default, help_text) in OPTIONS.items():
            shown = help_text if default is None else f"{help_text} (default: {default})"
            parser.add_argument(f"--{name}", type=kind, default=SUPPRESS, help=shown)


def plan(argv: Sequence[str]) -> None:
    """Print what a run needs: parameters, GPU memory, arithmetic of a step, hours and disk.

    The model is built on the meta device, and one step is traced without data.
    """
    try:
        run_trainer(["fit", *argv[1:]], PlanCLI)
    except Checked as checked:
        parser, run = checked.args
    else:
        return
    given = {name for name in OPTIONS if name in run}
    options = {name: run.pop(name, default) for name, (_, default, _) in OPTIONS.items()}
    for name, value in options.items():
        if isinstance(value, int | float) and not 0 < value < float("inf"):
            raise OptionError(name, value, "must be > 0", "leave it out for the default")
    if options["peak_share"] > 1:
        raise OptionError("peak_share", options["peak_share"], "must be <= 1", "0.4 is usual if data is no bottleneck")
    on_cpu = GPU_OPTIONS.isdisjoint(given) and is_for_cpu(run.trainer)
    if on_cpu:
        avoid_emulation(changes := Changes(run, argv))
        for line in changes.lines:
            print_to_stderr(f"changed {line}")
    print_to_stderr("building the model without its weights")
    with TemporaryDirectory() as folder:
        module = build(parser, run, options["model_config"], Path(folder))
    setting = setting_of(run, options["gpus"])
    hardware = hardware_of(setting, options, given, on_cpu)
    memory = hardware.memory if hardware.memory < float("inf") else 0.0
    is_gpu = hardware.kind == "GPU"
    tokens = (is_gpu and gradcache_options(run).get("gpu_mini_batch_tokens")) or setting.mini_batch_tokens
    setting = replace(setting, device="cuda" if is_gpu else "cpu", memory=memory, mini_batch_tokens=tokens)
    backbones = [run.model.init_args.get(name) for name in module_class(run).backbones]
    is_quantised = any(backbone.get("quantization") for backbone in backbones if backbone is not None)
    print_to_stderr("counting the operations of a step")
    with without_data(module):
        lengths = options["query_tokens"], options["document_tokens"]
        texts, loss = module.planned_step(run.data.init_args, setting, *lengths)
    cost = plan_step(module, texts, loss, setting, module.state_per_weight())
    print("\n".join(lines(module, cost, texts, run, setting, options, hardware)))
    if is_quantised:
        print("note: weights in 4 bits are counted in bfloat16")
    if configured(run, "GradientAccumulationScheduler"):
        print("note: GradientAccumulationScheduler is left out: a step is one batch of each process")


def build(parser: LightningArgumentParser, run: Any, model_config: str | None, folder: Path) -> BaseModule:
    """The run's module on the meta device, built from the backbones' configs only."""
    model: Any = run.model.init_args
    start = model.pop("initial_model", None)
    kind = module_class(run)
    for name in kind.backbones:
        if model.get(name) is None:
            continue
        if model_config is None:
            config = architecture(start or model[name].name)
        else:
            try:
                shutil.copy(model_config, folder / "config.json")
                config = read_config(folder)
            except (InputError, OSError) as error:
                raise InputError(model_config, "is not a model config", "give the backbone's config.json") from error
        structure = folder / name
        write_structure(structure, config)
        for option, value in {"name": str(structure), "revision": None, "compile": False, "quantization": None}.items():
            model[name][option] = value
    for name, value in kind.tokenizer_arguments(model).items():
        model[name] = value
    # Only the model: callbacks and strategies may need hardware or files that this machine lacks.
    only_model = Namespace(model=run.model)  # type: ignore[no-untyped-call]
    with torch.device("meta"):
        module = parser.instantiate_classes(only_model).model
    assert isinstance(module, BaseModule)
    return module


def is_for_cpu(trainer: Any) -> bool:
    is_small = trainer.num_nodes == 1 and (num_devices(trainer.devices) or 1) == 1
    without_gpu = trainer.accelerator == "auto" and is_small and not torch.accelerator.is_available()
    return trainer.accelerator == "cpu" or without_gpu


def hardware_of(setting: Setting, options: dict[str, Any], given: Collection[str], on_cpu: bool) -> Hardware:
    """The run's hardware: this machine's CPU, or GPUs by the options."""
    if on_cpu:
        return this_cpu(setting, (options["peak_share"],) if "peak_share" in given else CPU_SHARES[::-1])
    memory, rate = options["gpu_memory_gb"] * GB, options["peak_tflops"] * 1e12
    return Hardware("GPU", options["gpu"], memory, rate, (options["peak_share"],))


def this_cpu(setting: Setting, shares: tuple[float, ...]) -> Hardware:
    """This machine's CPU with its measured rate and free memory, which the run's processes share."""
    print_to_stderr("timing a matrix product on this CPU")
    rate, cores, ranks = product_rate(torch.float32), torch.get_num_threads(), setting.num_ranks
    measured = f"{rate / 1e9:.0f} GFLOP/s measured in float32"
    if setting.half_products:
        rate = product_rate(torch.bfloat16)
        measured += f" and {rate / 1e9:.0f} in bfloat16"
    name = f"{cores} core{'s' * (cores > 1)} of this CPU, {measured}"
    memory = free_memory_bytes(torch.device("cpu")) or float("inf")
    return Hardware("CPU", name, memory / ranks, rate / ranks, shares)


def product_rate(dtype: torch.dtype) -> float:
    """Operations per second of a matrix product on this CPU: the median of three."""
    matrix, seconds = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype), []
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - start)
    return 2 * _PRODUCT_SIZE**3 / sorted(seconds)[1]


def gradcache_options(run: Any) -> Any:
    caches = configured(run, "GradCacheCallback")
    return caches[-1].init_args if caches else {}


def configured(run: Any, name: str) -> list[Any]:
    return [each for each in run.trainer.callbacks or () if each.class_path.endswith(name)]


def planned_devices(trainer: Any) -> int:
    count = num_devices(trainer.devices)
    if count is None and trainer.accelerator != "cpu":
        count = torch.cuda.device_count() or None
    if count is None and str(trainer.devices) == "-1":
        raise OptionError("trainer.devices", -1, "is all GPUs, of which this machine has none", "give --gpus")
    return count or 1


def setting_of(run: Any, gpus: int | None) -> Setting:
    trainer = run.trainer
    ranks = gpus or planned_devices(trainer) * trainer.num_nodes
    options = gradcache_options(run)
    kept = options.get("kept_gib")
    is_auto = kept == "auto" and options.get("kept_fraction") is None
    half = any(str(trainer.precision).startswith(kind) for kind in ("bf16", "16"))
    return Setting(
        num_ranks=ranks,
        strategy=strategy_name(trainer.strategy, ranks),
        half_products=half,
        mini_batch_tokens=options.get("mini_batch_tokens"),
        mini_batch_texts=options.get("mini_batch_texts"),
        kept_gib=float(kept) if isinstance(kept, int | float) else 0.0,
        kept_share=KEPT_FRACTION if is_auto else 0.0,
        accumulated=int(trainer.accumulate_grad_batches),
    )


def strategy_name(strategy: Any, num_ranks: int) -> StrategyName:
    """The plan's name for the trainer's strategy; Lightning's FSDP counts as FSDP2, and its DeepSpeed as ZeRO."""
    options: Any = strategy.get("init_args") or {} if isinstance(strategy, Namespace) else {}
    name = str(strategy.class_path).rpartition(".")[2] if isinstance(strategy, Namespace) else str(strategy)
    if name.lower().startswith(("zero", "deepspeed")):
        found = re.search(r"stage_(\d)", name)
        stages: tuple[StrategyName, ...] = ("ddp", "zero1", "zero2", "zero3")
        return stages[int(found[1] if found else options.get("stage", 2))]
    if name.lower().startswith("fsdp"):
        return "fsdp2"
    return "ddp" if num_ranks > 1 else "single"


def num_steps(run: Any, setting: Setting, pairs: int | None) -> tuple[float | None, str]:
    """The optimiser steps of the run, as in `run_steps`, and their origin; None and a hint if data are unknown."""
    data, trainer = run.data.init_args, run.trainer
    limits = [(trainer.max_steps, "trainer.max_steps")] if trainer.max_steps > 0 else []
    rows, row_length = [source.max_rows for source in data.get("sources") or ()], data.get("row_length")
    # Of plain texts they are documents.
    if pairs is None and rows and all(rows) and row_length is None:
        pairs = sum(rows)
    keys = [f"sampler.init_args.{inner}steps_per_epoch" for inner in ("", "inner.init_args.")]
    batches, what = next(filter(None, map(data.get, keys)), None), None
    if batches is None and pairs is not None:
        pairs //= int(row_length or 1)
        batches, what = pairs // (data.batch_size * setting.num_ranks), f"{pairs:,} pairs"
    if batches is not None and trainer.max_epochs and trainer.max_epochs > 0:
        limit = trainer.overfit_batches or trainer.limit_train_batches
        taken = batches if limit is None else batches_taken(limit, batches)
        steps = trainer.max_epochs * -(-taken // setting.accumulated)
        counted = what if what and taken == batches else f"{taken:,} batches"
        limits.append((steps, f"{trainer.max_epochs} x {counted}"))
    hint = "give --pairs, the training pairs per epoch" if batches is None else "the run has no end"
    return min(limits, key=lambda limit: limit[0], default=(None, hint))


def lines(
    module: BaseModule,
    cost: StepCost,
    texts: Sequence[Texts],
    run: Any,
    setting: Setting,
    options: dict[str, Any],
    hardware: Hardware,
) -> list[str]:
    """The table, and a warning if the run does not fit into memory."""
    total, memory_gb, unit = sum(cost.memory.values()) / GB, hardware.memory / GB, hardware.unit
    if hardware.kind == "GPU":
        where = ["GPUs", f"{setting.num_ranks} x {hardware.name}, {setting.strategy}, {run.trainer.precision}"]
    else:
        processes = f"{setting.num_ranks} processes on " if setting.num_ranks > 1 else ""
        where = ["CPU", f"{processes}{hardware.name}; {run.trainer.precision}"]
    towers = ", ".join(f"{text.count:,} {text.name} of {text.tokens}" for text in texts)
    rows: list[list[str]] = [
        ["model", type(module).__name__],
        where,
        ["parameters trained", f"{cost.trained:,}"],
        ["parameters frozen", f"{cost.frozen:,}"],
        [f"batch per {unit}", f"{towers} tokens"],
    ]
    if setting.mini_batch_tokens is not None:
        cached = f"{cost.num_mini_batches} mini-batches, {cost.kept:.0%} of the graphs kept"
        rows.append(["GradCache", cached])
    rows.append([f"memory per {unit} at its peak, GB", ""])
    rows += [[f"  {part}", _amount(size / GB)] for part, size in cost.memory.items() if size]
    limit = f"{memory_gb:g}" if hardware.kind == "GPU" else f"{memory_gb:.1f} free"
    rows.append(["  total", f"{total:.1f} of {limit}" if memory_gb < float("inf") else f"{total:.1f}"])
    rows += part_rows(f"operations per {unit} and step, 10^12", cost.operations, 1e12)
    times = [sum(cost.operations.values()) / (hardware.rate * share) for share in hardware.shares]
    shown = [" to ".join(f"{value:.3g}" for value in values) for values in (times, hardware.shares)]
    rows.append(["arithmetic of a step, seconds", f"{shown[0]} at {shown[1]} of {hardware.rate / 1e12:.3g} TFLOP/s"])
    if cost.sent and hardware.kind == "GPU":
        (peak_share,), (seconds,) = hardware.shares, times
        link_gb = float(options["link_gb"] or (NVLINK_GB if setting.num_ranks <= GPUS_PER_NODE else NETWORK_GB))
        sending = sum(cost.sent.values()) / (link_gb * 1e9)
        rows += part_rows(f"sent per {unit} and step, GB", cost.sent, GB)
        rows.append(["sending it, seconds", f"{sending:.3g} at {link_gb:g} GB/s"])
        # Sending takes place after the arithmetic, or at the same time.
        low, high = (peak_share * seconds / time for time in (seconds + sending, max(seconds, sending)))
        how = f"{high:.2f} if sending overlaps with arithmetic, {low:.2f} if not"
        bottleneck = "arithmetic" if seconds >= sending else "sending"
        rows += [["share of the peak", how], ["limits the step", bottleneck]]
        times = [max(seconds, sending)]
    rows += run_rows(module, texts, run, setting, options, times, cost)
    table = format_table(rows, align="<<")
    if total <= USABLE_FRACTION * memory_gb:
        return [table]
    fix = "lower data.batch_size or GradCache's mini_batch_tokens and kept_gib"
    fix += ", or shard with FSDP2 or ZeRO" if hardware.kind == "GPU" else ", or close other programs"
    largest = max(cost.memory, key=lambda part: cost.memory[part])
    what = f"{total:.1f} GB do not fit: {USABLE_FRACTION:.0%} of {memory_gb:.4g} GB are usable"
    what += f"; the largest part is {largest}"
    return [table, f"warning: {what}; {fix}"]


def part_rows(title: str, sizes: dict[str, float], unit: float) -> list[list[str]]:
    parts = {**{f"  {part}": size for part, size in sizes.items()}, "  total": sum(sizes.values())}
    return [[title, ""], *([name, _amount(size / unit)] for name, size in parts.items())]


def run_rows(
    module: BaseModule,
    texts: Sequence[Texts],
    run: Any,
    setting: Setting,
    options: dict[str, Any],
    times: Sequence[float],
    cost: StepCost,
) -> list[list[str]]:
    """Table rows about the run: steps, pairs, tokens, hours and disk; `times` are a step's seconds, or their range."""
    pairs = run.data.init_args.batch_size * setting.num_ranks * setting.accumulated
    # Context documents are documents of the batch.
    rank_tokens = sum(text.count * text.tokens for text in texts if text.name != "context documents")
    tokens = rank_tokens * setting.num_ranks * setting.accumulated
    steps, why = num_steps(run, setting, options["pairs"])
    unit = module.row_unit
    rows = [[f"{unit} per step", f"{pairs:,}"], ["tokens per step, at most", f"{tokens:,}"]]
    if steps is None:
        rows.append(["steps", f"not known: {why}"])
    else:
        hours = [steps * seconds / 3600 for seconds in times]
        rows += [["steps", f"{steps:,} ({why})"], [f"{unit} in total", f"{steps * pairs:,}"]]
        of_gpus = f", {_amount(hours[0] * setting.num_ranks)} GPU hours" if setting.device == "cuda" else ""
        rows.append(["hours", f"{' to '.join(map(_amount, hours))}{of_gpus}"])
        data = min(steps * pairs, options["pairs"] or steps * pairs) / pairs * tokens * BYTES_PER_TOKEN
        rows.append(["disk: converted data, GB", f"{_amount(data / GB)} at most"])
    weights = list(module.parameters())
    trained_bytes = cost.trained * 4 * (1 + module.state_per_weight())
    frozen = [] if module.frozen_base is not None else [weight for weight in weights if not weight.requires_grad]
    frozen_bytes = sum(weight.numel() * weight.element_size() for weight in frozen)
    rows.append(["disk: a checkpoint, GB", _amount((trained_bytes + frozen_bytes) / GB)])
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    rows.append(["disk: the model directory, GB", _amount(size / GB)])
    return rows


def _amount(value: float) -> str:
    """A number with two decimals, or with two significant digits if it is < 1."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.2g}"


def check_run(argv: Sequence[str]) -> None:
    """Check a run as `fit` does before its first step, and print what it would do; nothing is trained or written.

    A source that is not converted yet is converted in a temporary folder. One line names all errors that are found
    before data is read.
    """
    run_trainer(argv, RunCheck)


class RunCheck(TrainerCLI):
    """`fit` until its first step, for the accelerator and devices of the config even if this machine lacks them."""

    only_checks = True

    def check_checkpoint(self) -> None:
        """Check the checkpoint; without a valid one the check goes on as for a run that starts from the beginning."""
        self.errors: list[UserError] = []
        try:
            super().check_checkpoint()
        except UserError as error:
            self.errors.append(error)
            self.config.ckpt_path = None

    def instantiate_classes(self) -> None:
        """Make module, data and trainer, whose checks come later; without a GPU, weights are not quantised to 4 bits.

        If the model cannot be loaded, a tiny one takes its place, so that data and callbacks are checked too.
        """
        arguments: Any = self.config.model.get("init_args") or {}
        for name in () if torch.cuda.is_available() else module_class(self.config).backbones:
            if arguments.get(name) is not None:
                arguments[name].quantization = None
        with TemporaryDirectory() as folder:
            try:
                self.make_model()
            except UserError as error:
                self.errors.append(error)
                use_tiny_model(Changes(self.config, ()), Path(folder), unknown=UNKNOWN_MODEL)
                self._make(self.make_model)
            self._make(self.make_data_and_trainer)

    def _make(self, make: Callable[[], None]) -> None:
        """Make a part without which the check cannot go on."""
        try:
            make()
        except UserError as error:
            self.errors.append(error)
            self._raise_errors()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the trainer; missing devices are replaced by as many processes on the CPU."""
        options = self.config_init.trainer
        count = num_devices(options.devices)
        self.is_here = is_here(options.accelerator, count)
        return super().instantiate_trainer(
            **kwargs, **({} if self.is_here else {"accelerator": "cpu", "devices": count or 1})
        )

    def after_instantiate_classes(self) -> None:
        self._raise_errors(*start_checks(self.trainer, self.model, self.datamodule, self.config.ckpt_path))

    def run_command(self) -> None:
        trainer, module, data = self.trainer, self.model, self.datamodule
        with ExitStack() as stack:
            stack.enter_context(planning_for(trainer.world_size))
            trainer.strategy.connect(module)
            module.trainer = trainer
            if data is not None:
                data.trainer = trainer
                trainer.datamodule = data  # type: ignore[attr-defined]
            if isinstance(data, PlannedDataModule):
                data.cache_dir = stack.enter_context(borrowed_cache(data.cache_dir))
                data.prepare_data()
            module.prepare_data()
            print("\n".join(self.lines()))

    def _raise_errors(self, *checks: Callable[[], object]) -> None:
        """Raise the errors so far and those of some checks in one line."""

        def fail(error: UserError) -> None:
            raise error

        run_checks([*(partial(fail, error) for error in self.errors), *checks])

    def lines(self) -> list[str]:
        module, config, trainer, data = self.model, self.config, self.trainer, self.datamodule
        model = self.config_dump["model"]["init_args"]
        backbones = [model.get(name) for name in module_class(self.config).backbones]
        name = next((backbone["name"] for backbone in backbones if backbone), None)
        total = parameter_counts(module).total
        trained = count_values(weight for weight in module.parameters() if weight.requires_grad)
        counts = f"{total:,} parameters, {trained:,} of them trained and {total - trained:,} frozen"
        options = {option: config.trainer[option] for option in ("accelerator", "devices", "num_nodes", "strategy")}
        options |= {"precision": config.trainer.precision}
        shown = [f"{option} {value}" for option, value in options.items() if isinstance(value, int | str)]
        lines = [f"model: {type(module).__name__}{f' on {name}' if name else ''}: {counts}"]
        if isinstance(data, PlannedDataModule):
            rows = [[f"  {name}", f"{count:,}"] for name, count in data.source_rows.items()]
            batches, ranks, accumulated = data.batches_per_epoch, trainer.world_size, trainer.accumulate_grad_batches
            factors = f"{data.batch_size} on each of {ranks} processes"
            factors += f"; {accumulated} batches are one step" if accumulated > 1 else ""
            steps = run_steps(trainer, batches)
            lines.append(format_table([["sources:", "rows"], *rows]))
            lines.append(f"global batch: {data.batch_size * ranks:,} ({factors})")
            lines.append(f"steps: {'unlimited' if steps is None else f'{steps:,}'}, {batches:,} batches per epoch")
        lines.append(f"hardware: {', '.join(shown)}{'' if self.is_here else '; not available here, so not tested'}")
        if (logger := run_logger(trainer)) is not None:
            lines.append(f"run: {logger.log_dir}")
        lines += [f"model directory: {export.output}" for export in callbacks_of(trainer, Export)]
        path = config.ckpt_path
        content = peek_checkpoint(path) if path and Path(path).exists() else {}
        lines.append(f"resume: {path}, step {content.get('global_step', 'unknown')}" if path else "resume: no")
        return [*lines, "no error was found, and nothing was written"]


def num_devices(devices: Any) -> int | None:
    """The devices per machine that `trainer.devices` requests; None for all."""
    if isinstance(devices, list):
        return len(devices)
    words = str(devices).split(",")
    if len(words) > 1:
        return len([word for word in words if word.strip()])
    return int(words[0]) if words[0].strip().isdecimal() else None


def is_here(accelerator: Any, count: int | None) -> bool:
    if accelerator in ("gpu", "cuda"):
        return torch.cuda.is_available() and (count or 1) <= torch.cuda.device_count()
    return accelerator not in ("mps", "tpu")
