"""`plan` and `fit --check`: what a training needs and would do, known before it is paid for."""

import shutil
from argparse import SUPPRESS
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from embeddings.callbacks.checkpoints import ExportLanguageModel, ExportModel
from embeddings.callbacks.run_record import run_logger
from embeddings.cli.fit import Checked, CheckingCLI, TrainerCLI, run_trainer
from embeddings.cli.trainer import start_checks
from embeddings.common import InputError, OptionError, TextSettings, UserError
from embeddings.common.checkpoint_file import peek_checkpoint
from embeddings.common.distributed import count_values, planning_for
from embeddings.common.text import format_table
from embeddings.data.datamodule import PlannedDataModule
from embeddings.data.samplers.base import run_steps
from embeddings.data.store import borrowed_cache
from embeddings.inference.vector_folder import SHARD_SIZE
from embeddings.losses import InfoNCE
from embeddings.losses.tiles import scores_at_once
from embeddings.mining.clusters import CLUSTER_SIZE
from embeddings.mining.gpu_search import MEMORY_GIB, kept_documents, search_sizes
from embeddings.mining.negatives import NegativeRules
from embeddings.models.backbone import read_config
from embeddings.models.moe.upcycling import parameter_counts
from embeddings.models.stand_in import architecture, write_structure
from embeddings.modules.base import BaseModule, ContrastiveModule
from embeddings.modules.masked_lm import MaskedLMModule
from embeddings.training.plan import (
    LossSize,
    Plan,
    Setting,
    StrategyName,
    Texts,
    plan_step,
    trace,
    trace_embedder,
    without_data,
)

GIB, GB = 2**30, 1e9
# An H100's NVLink sends 450 GB/s to the GPUs of its node, and its network card 400 Gb/s to other nodes.
GPUS_OF_A_NODE, NVLINK_GB, NETWORK_GB = 8, 450.0, 50.0
# What CUDA, NCCL and fragmentation leave of a GPU's memory.
USABLE = 0.9
# Bytes of a token on disk: of packed rows as they are stored, of English text about as many.
BYTES_A_TOKEN = 4
OPTIONS: dict[str, tuple[type, Any, str]] = {
    "gpus": (int, None, "GPUs of the run, in place of those of its configs"),
    "gpu": (str, "H100 SXM", "what the GPU is called"),
    "gpu_memory_gb": (float, 80.0, "memory of a GPU in 10^9 bytes"),
    "peak_tflops": (float, 989.0, "dense bfloat16 operations of a GPU a second, in 10^12"),
    "peak_share": (float, 0.4, "share of the peak that a run's arithmetic reaches"),
    "link_gb": (float, None, "10^9 bytes a second that a GPU sends; 450 up to 8 GPUs (NVLink), else 50 (400 Gb/s)"),
    "pairs": (int, None, "training pairs of an epoch, or tokens of plain texts"),
    "query_tokens": (int, None, "tokens of a query; the maximum where it is left out"),
    "document_tokens": (int, None, "tokens of a document; the maximum where it is left out"),
    "model_config": (str, None, "a config.json, in place of the backbone's own"),
}


class PlanCLI(CheckingCLI):
    """`fit` up to its parsed options, with those of a plan."""

    command, summary = "plan", "Say what a training needs: memory, arithmetic, hours, disk."

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        for name, (kind, default, help_text) in OPTIONS.items():
            shown = help_text if default is None else f"{help_text} (default: {default})"
            parser.add_argument(f"--{name}", type=kind, default=SUPPRESS, help=shown)


def plan(argv: Sequence[str]) -> None:
    """Print what a run needs: parameters, memory of a GPU, arithmetic of a step, hours and disk.

    The model is built of its config alone, on the meta device, and one step is traced on tensors without content. No
    weights, data or GPU are needed.
    """
    try:
        run_trainer(["fit", *argv[1:]], PlanCLI)
    except Checked as checked:
        parser, run = checked.args
    else:
        return
    given = {name: run.pop(name, default) for name, (_, default, _) in OPTIONS.items()}
    for name, value in given.items():
        if isinstance(value, int | float) and not 0 < value < float("inf"):
            raise OptionError(name, value, "must be > 0", "leave it out for the default")
    if given["peak_share"] > 1:
        raise OptionError("peak_share", given["peak_share"], "must be <= 1", "0.4 is usual for a well fed GPU")
    with TemporaryDirectory() as folder:
        module = build(parser, run, given["model_config"], Path(folder))
    setting = setting_of(run, given["gpus"])
    is_quantised = bool((run.model.init_args.get("backbone") or {}).get("quantization"))
    with without_data(module):
        texts, loss = trace_run(module, run, setting, given)
    found = plan_step(module, texts, loss, setting, module.state_per_weight())
    print("\n".join(lines(module, found, texts, run, setting, given)))
    if is_quantised:
        print("note: weights in 4 bits are counted in bfloat16")


def build(parser: LightningArgumentParser, run: Any, model_config: str | None, folder: Path) -> BaseModule:
    """The run's module on the meta device, of the backbones' configs alone."""
    model: Any = run.model.init_args
    start = model.pop("initial_model", None)
    for name in ("backbone", "first_stage_backbone"):
        if model.get(name) is None:
            continue
        place = folder / name
        if model_config is None:
            found = architecture(start or model[name].name)
        else:
            own = folder / "given"
            own.mkdir(exist_ok=True)
            if not Path(model_config).is_file():
                raise InputError(model_config, "is no file", "give the backbone's config.json")
            shutil.copy(model_config, own / "config.json")
            try:
                found = read_config(own)
            except InputError as error:
                raise InputError(model_config, "is no model's config", "give the backbone's config.json") from error
        write_structure(place, found)
        for option, value in {"name": str(place), "revision": None, "compile": False, "quantization": None}.items():
            model[name][option] = value
    if model.get("masking") is not None:
        # What hides a token is one of the structure's own tokenizer.
        model.masking.mask_token = "_" if model.objective == "mntp" else None
    # Callbacks and strategies may need what is not here.
    only_model = Namespace(model=run.model)  # type: ignore[no-untyped-call]
    with torch.device("meta"):
        module = parser.instantiate_classes(only_model).model
    assert isinstance(module, BaseModule)
    return module


def setting_of(run: Any, gpus: int | None) -> Setting:
    """How the run's step is run."""
    trainer = run.trainer
    ranks = gpus or (num_devices(trainer.devices) or 1) * trainer.num_nodes
    caches = [each for each in trainer.callbacks or () if each.class_path.endswith("GradCacheCallback")]
    found: Any = caches[-1].init_args if caches else {}
    kept = found.get("kept_gib")
    half = any(str(trainer.precision).startswith(kind) for kind in ("bf16", "16"))
    return Setting(
        num_ranks=ranks,
        strategy=strategy_name(trainer.strategy, ranks),
        half_products=half,
        mini_batch_tokens=found.get("mini_batch_tokens"),
        mini_batch_texts=found.get("mini_batch_texts"),
        # What `auto` keeps follows from what is free.
        kept_gib=float(kept) if isinstance(kept, int | float) else 0.0,
        accumulated=int(trainer.accumulate_grad_batches),
    )


def strategy_name(strategy: Any, num_ranks: int) -> StrategyName:
    """What the ranks share, by the option of the trainer."""
    if isinstance(strategy, Namespace):
        name, options = str(strategy.class_path), strategy.get("init_args") or {}
        if name.endswith("ZeroStrategy"):
            stages: tuple[StrategyName, ...] = ("zero1", "zero2", "zero3")
            return stages[int(options.get("stage", 2)) - 1]
        if name.endswith("FSDP2Strategy"):
            return "fsdp2"
    return "ddp" if num_ranks > 1 else "single"


def trace_run(module: BaseModule, run: Any, setting: Setting, given: dict[str, Any]) -> tuple[list[Texts], LossSize]:
    """The texts of one rank's batch with what they cost, and its loss; inside `without_data`."""
    data, half = run.data.init_args, setting.half_products
    if isinstance(module, MaskedLMModule):
        language_model, length = module.language_model, int(data.row_length)

        def states(count: int) -> torch.Tensor:
            ids_NL = torch.zeros(count, length, dtype=torch.int64)
            found: torch.Tensor = language_model(ids_NL, ids_NL, module.task.separate_documents, False)
            return found

        masking = run.model.init_args.masking
        share = 1.0 if module.task.objective == "causal" else float(0.15 if masking is None else masking.probability)
        cost = trace(language_model, states, half)
        width, columns = int(language_model.model.config.hidden_size), language_model.vocab_size
        rows = round(share * data.batch_size * length)
        tile = int(run.model.init_args.head.tile_logits)
        return [Texts("rows", data.batch_size, length, cost)], LossSize(rows, columns, width, tile)
    if not isinstance(module, ContrastiveModule):
        raise OptionError("model", type(module).__name__, "is not planned", "plan a contrastive or a language model")
    queries, text = int(data.batch_size), data.text or TextSettings()
    documents = queries * (1 + int(data.num_negatives))
    query_tokens = given["query_tokens"] or int(text.query_max_length)
    document_tokens = given["document_tokens"] or int(text.document_max_length)
    texts = trace_embedder(module.embedder, queries, documents, query_tokens, document_tokens, half)
    loss: InfoNCE = module.loss
    gathers = loss.gather_across_devices and loss.in_batch_negatives != "off"
    width = sum(loss.widths or (module.embedder.embedding_dim,))
    columns = documents * (setting.num_ranks if gathers else 1)
    # A plan is of GPUs, wherever it is made.
    tile = scores_at_once(loss.tile_size, "cuda")
    gathered = columns if gathers else 0
    return texts, LossSize(queries, columns, width, tile, queries + documents, gathered)


def num_steps(run: Any, setting: Setting, pairs: int | None) -> tuple[float | None, str]:
    """The optimiser steps of the run, None where they follow from data that are not known, and why so many."""
    data, trainer = run.data.init_args, run.trainer
    a_step = data.batch_size * setting.num_ranks * setting.accumulated
    if trainer.max_steps > 0:
        return trainer.max_steps, "trainer.max_steps"
    rows = [source.max_rows for source in data.get("sources") or ()]
    if pairs is None and rows and all(rows):
        pairs = sum(rows)
    if pairs is None or not trainer.max_epochs or trainer.max_epochs < 0:
        return None, "give --pairs, the training pairs of an epoch" if pairs is None else "the run has no end"
    if data.get("row_length"):
        pairs = pairs // int(data.row_length)
    return trainer.max_epochs * (pairs // a_step), f"{trainer.max_epochs} x {pairs:,} pairs"


def lines(
    module: BaseModule, found: Plan, texts: Sequence[Texts], run: Any, setting: Setting, given: dict[str, Any]
) -> list[str]:
    """The table, and a warning where the run does not fit."""
    total, gpu_gb = sum(found.memory.values()) / GB, given["gpu_memory_gb"]
    towers = ", ".join(f"{text.count:,} {text.name} of {text.tokens}" for text in texts)
    rows: list[list[str]] = [
        ["model", type(module).__name__],
        ["GPUs", f"{setting.num_ranks} x {given['gpu']}, {setting.strategy}, {run.trainer.precision}"],
        ["parameters trained", f"{found.trained:,}"],
        ["parameters frozen", f"{found.frozen:,}"],
        ["batch of a GPU", f"{towers} tokens"],
    ]
    if setting.mini_batch_tokens is not None:
        cached = f"{found.num_mini_batches} mini-batches, {found.kept:.0%} of the graphs kept"
        rows.append(["GradCache", cached])
    rows.append(["memory of a GPU at its peak, GB", ""])
    rows += [[f"  {part}", _amount(size / GB)] for part, size in found.memory.items() if size]
    rows.append(["  total", f"{total:.1f} of {gpu_gb:g}"])
    peak_share = given["peak_share"]
    seconds = sum(found.operations.values()) / (given["peak_tflops"] * 1e12 * peak_share)
    rows += part_rows("operations of a GPU a step, 10^12", found.operations, 1e12)
    rows.append(["a step, seconds", f"{seconds:.3g} at {peak_share:g} of {given['peak_tflops']:g} TFLOP/s"])
    if found.sent:
        link_gb = float(given["link_gb"] or (NVLINK_GB if setting.num_ranks <= GPUS_OF_A_NODE else NETWORK_GB))
        sending = sum(found.sent.values()) / (link_gb * 1e9)
        rows += part_rows("sent by a GPU a step, GB", found.sent, GB)
        rows.append(["sending it, seconds", f"{sending:.3g} at {link_gb:g} GB/s"])
        # Arithmetic at its share of the peak, and the same work in the time of both.
        least, most = (peak_share * seconds / time for time in (seconds + sending, max(seconds, sending)))
        how = f"{most:.2f} if sending hides behind arithmetic, {least:.2f} if it does not"
        rows += [["share of the peak", how], ["limits the step", "arithmetic" if seconds >= sending else "sending"]]
        seconds = max(seconds, sending)
    rows += run_rows(module, texts, run, setting, given, seconds, found)
    table = format_table(rows, align="<<")
    if total <= USABLE * gpu_gb:
        return [table]
    fix = "lower data.batch_size or GradCache's mini_batch_tokens and kept_gib, or shard with FSDP2 or ZeRO"
    largest = max(found.memory, key=lambda part: found.memory[part])
    what = f"{total:.1f} GB do not fit: {USABLE:.0%} of {gpu_gb:g} GB are usable, and most are {largest}"
    return [table, f"warning: {what}; {fix}"]


def part_rows(title: str, sizes: dict[str, float], unit: float) -> list[list[str]]:
    """The rows of the table about something that has parts, and their sum."""
    parts = {**{f"  {part}": size for part, size in sizes.items()}, "  total": sum(sizes.values())}
    return [[title, ""], *([name, _amount(size / unit)] for name, size in parts.items())]


def run_rows(
    module: BaseModule,
    texts: Sequence[Texts],
    run: Any,
    setting: Setting,
    given: dict[str, Any],
    seconds: float,
    found: Plan,
) -> list[list[str]]:
    """The rows of the table about the whole run: steps, pairs, tokens, hours and disk."""
    pairs = run.data.init_args.batch_size * setting.num_ranks * setting.accumulated
    # A context's documents are among the batch's own.
    read = sum(text.count * text.tokens for text in texts if text.name != "context documents")
    tokens = read * setting.num_ranks * setting.accumulated
    steps, why = num_steps(run, setting, given["pairs"])
    unit = "rows" if isinstance(module, MaskedLMModule) else "pairs"
    rows = [[f"{unit} a step", f"{pairs:,}"], ["tokens a step, at most", f"{tokens:,}"]]
    if steps is None:
        rows.append(["steps", f"not known: {why}"])
    else:
        hours = steps * seconds / 3600
        rows += [["steps", f"{steps:,} ({why})"], [f"{unit} in all", f"{steps * pairs:,}"]]
        rows.append(["hours", f"{_amount(hours)}, {_amount(hours * setting.num_ranks)} of a GPU"])
        data = min(steps * pairs, given["pairs"] or steps * pairs) / pairs * tokens * BYTES_A_TOKEN
        rows.append(["disk: converted data, GB", f"{_amount(data / GB)} at most"])
    weights = {id(weight): weight for weight in module.parameters()}.values()
    kept = found.trained * 4 * (1 + module.state_per_weight())
    frozen = [] if module.frozen_base is not None else [weight for weight in weights if not weight.requires_grad]
    left = sum(weight.numel() * weight.element_size() for weight in frozen)
    rows.append(["disk: a checkpoint, GB", _amount((kept + left) / GB)])
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    rows.append(["disk: the model's directory, GB", _amount(size / GB)])
    if given["pairs"] is not None and isinstance(module, ContrastiveModule):
        rows += search_rows(int(given["pairs"]), module.embedder.embedding_dim)
    return rows


def search_rows(num_pairs: int, width: int) -> list[list[str]]:
    """The rows about mining and clustering all pairs on a GPU, by a teacher of the model's width, in its defaults."""
    kept = kept_documents(NegativeRules.last_rank + 1)
    sizes = search_sizes(num_pairs, width, 4, min(kept, num_pairs), SHARD_SIZE, MEMORY_GIB)
    vectors = f"{_amount(4 * num_pairs * width / GB)} GB of vectors"
    how = "stay on it" if sizes.is_resident else "stream through it"
    clusters = -(-num_pairs // CLUSTER_SIZE)
    held = f"{_amount(4 * clusters * width / GIB)} for {clusters:,} centroids; {vectors} stay in main memory"
    return [
        ["mine --gpu, GiB", f"{_amount(sizes.num_bytes / GIB)} of {MEMORY_GIB:g}; {vectors} {how}"],
        ["cluster --gpu, GiB", held],
    ]


def _amount(value: float) -> str:
    """A number with two decimals, or with two digits where it is small."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.2g}"


def check_run(argv: Sequence[str]) -> None:
    """Check a run as `fit` would begin it, and print what it would do; nothing is trained or written.

    Config, model, data and checkpoint are read as the run reads them. A source that is not converted yet is converted
    in a temporary folder, so that each of its rows is checked. One line names all faults found before data are read.
    """
    run_trainer(argv, RunCheck)


class RunCheck(TrainerCLI):
    """`fit` up to its first step, with accelerator and devices as the config says wherever they are."""

    only_checks = True

    def instantiate_classes(self) -> None:
        """Make module, data and trainer; without a GPU weights in 4 bits are read as they are in their file."""
        arguments: Any = self.config.model.get("init_args")
        backbone = None if arguments is None else arguments.get("backbone")
        if backbone is not None and backbone.get("quantization") and not torch.cuda.is_available():
            backbone["quantization"] = None
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the trainer; where its devices are not here, as many processes on the CPU stand for them."""
        given = self.config_init.trainer
        count = num_devices(given.devices)
        self.is_here = is_here(given.accelerator, count)
        return super().instantiate_trainer(
            **kwargs, **({} if self.is_here else {"accelerator": "cpu", "devices": count or 1})
        )

    def after_instantiate_classes(self) -> None:
        """Have each part check the run and collect what they find, then read the data and say what the run would do."""
        faults: dict[str, UserError] = {}
        for check in start_checks(self.trainer, self.model, self.datamodule, self.config.ckpt_path):
            try:
                check()
            except UserError as error:
                faults.setdefault(str(error), error)
        if len(faults) > 1:
            raise UserError(f"{len(faults)} faults: {' | '.join(faults)}")
        for fault in faults.values():
            raise fault
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

    def lines(self) -> list[str]:
        """What the run would do: its model, data, hardware and places."""
        module, given, trainer, data = self.model, self.config, self.trainer, self.datamodule
        model = self.config_dump["model"]["init_args"]
        name = (model.get("backbone") or {}).get("name")
        total = parameter_counts(module).total
        trained = count_values(weight for weight in module.parameters() if weight.requires_grad)
        counts = f"{total:,} parameters, {trained:,} of them trained and {total - trained:,} frozen"
        options = {option: given.trainer[option] for option in ("accelerator", "devices", "num_nodes", "strategy")}
        options |= {"precision": given.trainer.precision}
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
            lines.append(f"steps: {'without an end' if steps is None else f'{steps:,}'}, {batches:,} batches an epoch")
        lines.append(f"hardware: {', '.join(shown)}{'' if self.is_here else '; as given, not tried here'}")
        if (logger := run_logger(trainer)) is not None:
            lines.append(f"run: {logger.log_dir}")
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        exports = [callback for callback in callbacks if isinstance(callback, ExportModel | ExportLanguageModel)]
        lines += [f"model directory: {callback.output}" for callback in exports]
        found = given.ckpt_path
        content = peek_checkpoint(found) if found and Path(found).is_file() else {}
        lines.append(f"resume: {found}, step {content.get('global_step', 'unknown')}" if found else "resume: no")
        return [*lines, "no fault was found, and nothing was written"]


def num_devices(devices: Any) -> int | None:
    """How many devices of a machine an option of the trainer asks for; None for as many as there are."""
    if isinstance(devices, list):
        return len(devices)
    words = str(devices).split(",")
    if len(words) > 1:
        return len([word for word in words if word.strip()])
    return int(words[0]) if words[0].strip().isdecimal() else None


def is_here(accelerator: Any, count: int | None) -> bool:
    """Whether this machine has the devices that a config names."""
    if accelerator in ("gpu", "cuda"):
        return torch.cuda.is_available() and (count or 1) <= torch.cuda.device_count()
    return accelerator not in ("mps", "tpu")
