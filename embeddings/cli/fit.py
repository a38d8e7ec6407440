"""The commands that train: LightningCLI with our parser, our checks and our record of a run."""

import logging
import os
import re
import shutil
import sys
import warnings
import weakref
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from jsonargparse.typing import register_type
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import embeddings.data.text_datamodule
import embeddings.modules  # noqa: F401 - a class that is loaded may be named without its module
from embeddings.callbacks.checkpoints import ExportLanguageModel, ExportModel, make_checkpoints_durable
from embeddings.callbacks.preemption import Preemption
from embeddings.callbacks.progress import replace_displays
from embeddings.callbacks.retrieval_eval import RetrievalEvaluation
from embeddings.callbacks.run_record import RunRecord, model_checkpoints, plain_types, run_logger
from embeddings.cli.configs import check_configs, check_functions, expand_recipe, restrict_imports
from embeddings.cli.errors import ConfigError
from embeddings.cli.parser import OneLineParser, reason, with_hint
from embeddings.cli.trainer import check_checkpoint, check_start, choose_folder, say
from embeddings.common import OptionError, UserError
from embeddings.common.errors import program
from embeddings.common.text import one_line
from embeddings.figures.run_facts import metrics_path, read_curves
from embeddings.models.language_model import HeadKind
from embeddings.models.model_files import PACKAGED_NAME
from embeddings.models.stand_in import TINY, architecture, tiny_architecture, write_stand_in
from embeddings.strategies.ranks import set_up_ranks

# A device is a default of some of Lightning's callbacks, and has to be written with the config.
register_type(torch.device, deserializer_exceptions=(RuntimeError, TypeError))

HARDWARE_OPTIONS = ("accelerator", "devices", "strategy", "precision")
# Lightning's messages about a checkpoint of another model, or of weights alone.
NO_RESUME = r"Error\(s\) in loading state_dict|.?Trying to restore"
# Its message about a `monitor` that is not among the metrics, which it lists.
NO_METRIC = "Early stopping conditioned on metric"
FLOAT16 = ("16", "16-true", "16-mixed")
MAX_SEED = 2**32 - 1
# A process takes half a gigabyte before it holds a model.
MAX_DEVICES_PER_CPU = 8
# jsonargparse knows a source's settings once it knows the data module.
SOURCES_HELP = "--data.sources.help"
UNION_ERROR = "Does not validate against any of the Union subtypes"

# Where stand-ins lie, and the models that they become.
STAND_INS = "checkpoints/stand_in"
MAX_STEPS = 6
_HEADS: dict[str, HeadKind] = {"mlm": "masked", "mntp": "causal", "causal": "causal"}
# What a CPU has.
_HARDWARE: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "plugins": None}
_HARDWARE |= {"sync_batchnorm": False, "log_every_n_steps": 1}
# The largest values of a small run, by the key below the part of the run.
_TRAINER = {"max_steps": MAX_STEPS, "accumulate_grad_batches": 2, "limit_val_batches": 2, "val_check_interval": 4}
_DATA = {"batch_size": 4, "num_workers": 0, "row_length": 32, "sampler.init_args.steps_per_epoch": 2 * MAX_STEPS}
_DATA |= {"sampler.init_args.inner.init_args.steps_per_epoch": 2 * MAX_STEPS}
_MODEL = {"schedule.warmup_steps": 2, "first_stage_training.word_steps": 2, "context.num_context": _DATA["batch_size"]}
_CALLBACKS = {"every_n_steps": 2, "every_n_train_steps": 2, "mini_batch_tokens": 512}
# Values of the trainer that stand for no limit.
_ENDLESS = (-1, None)


class FitParser(OneLineParser, LightningArgumentParser):
    """Lightning's parser with our errors and lists."""


class TrainerCLI(LightningCLI):
    """`fit` over any of our modules, with configs that merge left to right."""

    # As the help names it.
    command, summary = "fit", "Train a model."
    # Whether the run is checked and does not begin, wherever its hardware may be.
    only_checks = False

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options beside Lightning's; `expand_recipe` has replaced `--recipe` before."""
        help_text = "a row of lightning_configs/recipes.csv, in place of the --config options that it stands for"
        parser.add_argument("--recipe", default=SUPPRESS, help=help_text)
        help_text = "check the run without its hardware, print what it would do, and write nothing"
        parser.add_argument("--check", action="store_true", default=SUPPRESS, help=help_text)
        help_text = "take at most so many rows of each source"
        parser.add_argument("--limit_data", type=int, default=SUPPRESS, help=help_text)
        help_text = "train a random model of the same architecture a few steps on the CPU, to see the run through"
        parser.add_argument("--stand_in", choices=["tiny"], default=SUPPRESS, help=help_text)
        given_here = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        self.fit_options = parser.add_method_arguments(L.Trainer, "fit", skip=given_here)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        if self.config.pop("check", False) and not self.only_checks:
            raise ConfigError("--check: is an option of the command line alone; write fit --check")
        self._make_small(args)
        check_functions(args, self.config)
        check_numbers(self.config)
        check_checkpoint(self.config.ckpt_path)

    def _make_small(self, args: Any) -> None:
        """Change the config as `--limit_data` and `--stand_in` ask, and say so on stderr; a check leaves no files."""
        num_rows, stand_in = (self.config.pop(name, None) for name in ("limit_data", "stand_in"))
        changes = Changes(self.config, args)
        if num_rows is not None:
            limit_data(changes, num_rows)
        if stand_in is not None:
            folder = mkdtemp() if self.only_checks else STAND_INS
            if self.only_checks:
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            use_stand_in(changes, Path(folder))
        for line in changes.lines:
            say(f"changed {line}")

    def _dump_config(self) -> None:
        """Make of the config what a module's `save_hyperparameters` saves; Lightning would check it once more."""
        if not hasattr(self, "config_dump"):
            self.config_dump = plain_types(self.parser, self.config)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            if UNION_ERROR not in str(error):
                raise
            raise ConfigError(with_hint(reason(str(error)))) from error

    def after_instantiate_classes(self) -> None:
        """Train. As a subcommand of Lightning's the options would be parsed and checked twice."""
        check_start(self.trainer, self.model, self.datamodule, self.config.ckpt_path)
        options = {name: self.config[name] for name in self.fit_options}
        self.trainer.fit(self.model, datamodule=self.datamodule, **options)
        # `trainer.log_dir` would wait for the other ranks.
        if self.trainer.is_global_zero and run_logger(self.trainer) is not None:
            print("\n".join(end_lines(self.trainer)))

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the trainer; an option that Lightning refuses, or accepts and should not, is one line."""
        batches, norm = (self.config.trainer[name] for name in ("accumulate_grad_batches", "gradient_clip_val"))
        if batches < 1:
            raise OptionError("trainer.accumulate_grad_batches", batches, "must be >= 1", "1 accumulates nothing")
        if norm is not None and not norm >= 0:
            raise OptionError("trainer.gradient_clip_val", norm, "must be >= 0", "leave it out to clip nothing")
        # Lightning lengthens this very list.
        callbacks = list(self.config_init.trainer.callbacks or [])
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except UserError:
            raise
        except (MisconfigurationException, ImportError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(refused_option(str(error), self.config.trainer.as_dict())) from error
        precision = str(self.config.trainer.precision)
        if precision in FLOAT16 and trainer.strategy.root_device.type == "cpu" and not self.only_checks:
            rule = "must not be float16 on a CPU"
            raise OptionError("trainer.precision", precision, rule, "bf16-mixed is the other half precision")
        replace_displays(trainer, callbacks)
        make_checkpoints_durable(trainer)
        if not self.only_checks:
            set_up_ranks(trainer)
        self._choose_folder(trainer)
        return trainer

    def _choose_folder(self, trainer: L.Trainer) -> None:
        """Find the checkpoint that `auto` stands for, give the trainer its run's folder, and the record the config."""
        found = choose_folder(
            trainer, self.config_dump, self.config.ckpt_path, getattr(self.datamodule, "batch_size", None)
        )
        self.config.ckpt_path = self.config_init.ckpt_path = found
        record = RunRecord.of(trainer)
        if record is not None:
            record.plain_config = {**self.config_dump, "ckpt_path": found}


class Checked(Exception):
    """The arguments are parsed and checked, by a parser and to a config; nothing is built."""


class CheckingCLI(TrainerCLI):
    """`fit` up to the point where its arguments are known to be good, where it raises `Checked`."""

    only_checks = True

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        raise Checked(parser, self.config)


def check_arguments(argv: Sequence[str]) -> None:
    """Check a line of arguments as `run_trainer` does first of all; nothing is built, run or written."""
    with suppress(Checked):
        run_trainer(argv, CheckingCLI)


def run_trainer(argv: Sequence[str], kind: type[TrainerCLI] = TrainerCLI) -> TrainerCLI:
    """Run a line of LightningCLI's; `--recipe NAME` stands for the configs that `recipes.csv` lists."""
    restrict_imports()
    words = [re.sub(r"^--[a-z_-]+(?=$|=)", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in argv]
    if SOURCES_HELP in words and "--data.help" not in words:
        named = [value for word in words if (value := word.rpartition("=")[2]).endswith("DataModule")]
        words = ["fit", "--data.help", *(named[-1:] or ["EmbeddingDataModule"]), SOURCES_HELP]
    expanded = expand_recipe(words)
    if expanded != words and not kind.only_checks:
        print(" ".join([program(), *expanded]), file=sys.stderr)
    check_configs(expanded)
    try:
        return make_cli(expanded, kind)
    except MisconfigurationException as error:
        raise ConfigError(f"{one_line(str(error), 220)}; change the option, fit --help lists them") from error
    except (RuntimeError, KeyError) as error:
        if str(error).startswith(NO_METRIC):
            what = one_line(str(error), 300)
            raise ConfigError(f"EarlyStopping.monitor: {what}; name a metric that is logged") from error
        if not re.match(NO_RESUME, str(error)):
            raise
        what = one_line(str(error).strip("'\""), 220)
        raise ConfigError(f"--ckpt_path: {what}; resume with the configs that wrote it") from error


def make_cli(argv: Sequence[str], kind: type[TrainerCLI] = TrainerCLI) -> TrainerCLI:
    """The command line over our base classes; making it runs the command."""
    notes = HeldNotes()
    with notes.holding():
        return kind(
            model_class=L.LightningModule,
            datamodule_class=L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=RunRecord,
            save_config_kwargs={"command": [*program().split(), *argv]},
            trainer_defaults={"callbacks": [Preemption(), notes]},
            seed_everything_default=0,
            parser_class=FitParser,
            auto_configure_optimizers=False,
            run=False,
            parser_kwargs={"prog": f"{program()} {kind.command}", "description": kind.summary},
            args=lists_emptied(argv[1:]),
        )


def end_lines(trainer: L.Trainer) -> list[str]:
    """The places of a finished run, its model and its metrics, and the next two commands."""
    logger = run_logger(trainer)
    assert logger is not None
    folder = logger.log_dir
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    models = [callback.output for callback in callbacks if isinstance(callback, ExportModel)]
    written = models + [callback.output for callback in callbacks if isinstance(callback, ExportLanguageModel)]
    kept = [callback.best_model_path for callback in model_checkpoints(trainer)]
    if models:
        following = [f"evaluate --model {models[0]} --data FOLDER", f'search --model {models[0]} --corpus FILE "QUERY"']
    elif written or not any(kept):
        following = [f"show curves --run {folder}", f"report {folder}"]
    else:
        following = [f"export --checkpoint {next(filter(None, kept))} --output DIR", f"report {folder}"]
    lines = [f"run: {folder} (metrics.csv, run.json, config.yaml)", *(f"model: {model}" for model in written)]
    scores = [score_line(each, Path(folder)) for each in callbacks if isinstance(each, RetrievalEvaluation)]
    return [*filter(None, scores), *lines, *(f"next: {program()} {words}" for words in following)]


def score_line(scored: RetrievalEvaluation, run: Path) -> str:
    """nDCG@10 before training and at its best, as the run logged it; empty where fewer than two were logged."""
    if not metrics_path(run).is_file():
        return ""
    scores = dict(zip(*read_curves(run)[f"{scored.name}/ndcg_at_10"], strict=True))
    first = scores.pop(0, None)
    if first is None or not scores:
        return ""
    best = max(scores, key=lambda step: scores[step])
    return f"nDCG@10 on {scored.folder}: {first:.3f} before training, {scores[best]:.3f} after step {best}, its best"


def refused_option(message: str, given: dict[str, Any]) -> str:
    """Lightning's message about one of the trainer's options, behind its name, or behind those that were chosen."""
    named = [name for name in given if re.search(rf"\b{name}\b", message)]
    valued = [
        name for name in (*HARDWARE_OPTIONS, "max_time") if f"{given.get(name)}" in re.findall(r"[\w.=<>]+", message)
    ]
    chosen = [name for name in HARDWARE_OPTIONS if given.get(name) not in (None, 1, "auto", "cpu")]
    options = ", ".join(f"trainer.{name}: {given[name]}" for name in (named or valued or chosen)[:4])
    return f"{options or 'trainer'}: {one_line(message, 220).rstrip('. ')}; change it, or leave it out"


def check_numbers(given: Namespace) -> None:
    """Check numbers that Lightning does not: the seed's range, and more processes than the machine can hold."""
    if not 0 <= given.seed_everything <= MAX_SEED:
        rule = f"must lie in 0 … {MAX_SEED}"
        raise OptionError("seed_everything", given.seed_everything, rule, "take any number in it")
    devices, most = given.trainer.devices, MAX_DEVICES_PER_CPU * (os.cpu_count() or 1)
    if str(devices).isdecimal() and int(devices) > most:
        rule = f"must be at most {MAX_DEVICES_PER_CPU} for each CPU core, {most} here"
        raise OptionError("trainer.devices", devices, rule, "lower it")


def lists_emptied(argv: Sequence[str]) -> list[str]:
    """The words with each list of mappings emptied before it is given, so that it replaces an earlier one."""
    found: list[str] = []
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if re.fullmatch(r"--[^.]+\..*[^+]", name) and re.match(r"\s*\[.*\{", value if equals else following, re.DOTALL):
            found.append(f"{name}=[]")
        found.append(word)
    return found


class HeldNotes(L.Callback):
    """Keeps Lightning's notes and all warnings back until the run begins: one that is refused ends in one line."""

    def __init__(self) -> None:
        self._notes: list[MemoryHandler] = []
        self._warnings: list[tuple[Any, ...]] = []
        self._show = warnings.showwarning

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep notes back meanwhile; those of a run that never begins are dropped."""
        with ExitStack() as stack:
            for owner in map(logging.getLogger, ("lightning.fabric", "lightning.pytorch")):
                for handler in list(owner.handlers):
                    # A warning that Lightning logs is written at once, with the notes before it.
                    held = MemoryHandler(sys.maxsize, logging.WARNING, handler, flushOnClose=False)
                    self._notes.append(held)
                    owner.removeHandler(handler)
                    owner.addHandler(held)
                    stack.callback(owner.addHandler, handler)
                    stack.callback(owner.removeHandler, held)
                    stack.callback(held.close)
            self._show = warnings.showwarning
            stack.callback(setattr, warnings, "showwarning", self._show)
            setattr(warnings, "showwarning", lambda *warning: self._warnings.append(warning))  # noqa: B010 - for mypy
            yield

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write what was kept, and everything further at once."""
        warnings.showwarning = self._show
        for warning in self._warnings:
            self._show(*warning)
        self._warnings.clear()
        for held in self._notes:
            held.flush()
            held.capacity = 0


class Changes:
    """Changes the parsed options of `fit` in place, with a line for each; what the command line gives stays."""

    def __init__(self, run: Namespace, argv: Sequence[str]) -> None:
        self.run, self.lines = run, list[str]()
        self.given = {_plain(word.partition("=")[0].removeprefix("--")) for word in argv if word.startswith("--")}

    def set(self, key: str, value: Any, owner: Any = None, name: str = "") -> None:
        """Set the value of a key of the run, or of the part of it that is given with the key's full name."""
        owner, name = self.run if owner is None else owner, name or _plain(key)
        found = owner.get(key, value)
        if name not in self.given and found != value:
            self.lines.append(f"{name}: {_shown(found)} -> {_shown(value)}")
            owner[key] = value

    def lower(self, key: str, limit: int, owner: Any = None, name: str = "") -> None:
        """Lower a whole number; a fraction, and a value that is not there, stay."""
        found = (self.run if owner is None else owner).get(key)
        if type(found) is int and found > limit:
            self.set(key, limit, owner, name)


def limit_data(changes: Changes, num_rows: int) -> None:
    """Have every source give at most so many rows; clustered sources stay whole, as their clusters are."""
    if num_rows < 1:
        raise OptionError("limit_data", num_rows, "must be >= 1", "2000 is enough to see a run through")
    data: Any = changes.run.data.init_args
    sampler = data.get("sampler")
    if sampler is not None and sampler.class_path.endswith("ClusteredBatchSampler"):
        changes.lines.append("data.sources: all rows, since their clusters are of all rows")
        return
    sources = [*(data.get("sources") or ()), *(data.get("validation_sources") or ())]
    cut = [source for source in sources if source.max_rows is None or source.max_rows > num_rows]
    for source in cut:
        source.max_rows = num_rows
    changes.lines.append(f"data.sources: {len(cut)} of {len(sources)} cut to at most {num_rows:,} rows each")


def use_stand_in(changes: Changes, folder: Path) -> None:
    """Put a tiny random model of the same architecture in the model's place, and cut the run to what a CPU can do."""
    model: Any = changes.run.model.init_args
    scratch, key = model.get("from_scratch"), "model.init_args"
    if scratch is not None:
        write_stand_in(folder / "tokenizer", tiny_architecture(architecture(PACKAGED_NAME)))
        changes.set(f"{key}.from_scratch.tokenizer", str(folder / "tokenizer"))
        small = {name: min(value, TINY[name]) for name, value in scratch.settings.items() if name in TINY}
        changes.set(f"{key}.from_scratch.settings", {**scratch.settings, **small})
    for name in ("backbone", "first_stage_backbone"):
        if model.get(name) is not None:
            _replace_backbone(changes, name, folder)
    changes.set(f"{key}.initial_model", None)
    if model.get("masking") is not None and model.masking.mask_token is None and model.objective == "mntp":
        # The decoder's stand-in of a tokenizer has no mask token.
        changes.set(f"{key}.masking.mask_token", "_")
    widths = changes.run.get(f"{key}.loss.init_args.widths")
    if widths:
        changes.set(f"{key}.loss.init_args.widths", [width * TINY["hidden_size"] // max(widths) for width in widths])
    for option, value in _HARDWARE.items():
        changes.set(f"trainer.{option}", value)
    if str(changes.run.trainer.precision).startswith("16"):
        changes.set("trainer.precision", "bf16-mixed")
    if changes.run.trainer.max_steps in _ENDLESS:
        changes.set("trainer.max_steps", MAX_STEPS)
    for part, limits in (("trainer", _TRAINER), ("data.init_args", _DATA), (key, _MODEL)):
        for option, limit in limits.items():
            changes.lower(f"{part}.{option}", limit)
    for callback in changes.run.trainer.callbacks or ():
        name, options = callback.class_path.rpartition(".")[2], callback.get("init_args")
        for option, limit in _CALLBACKS.items() if options is not None else ():
            changes.lower(option, limit, options, f"{name}.{option}")
        if options is not None and "output" in options:
            changes.set("output", str(folder / Path(options.output).name), options, f"{name}.output")


def _replace_backbone(changes: Changes, name: str, folder: Path) -> None:
    model: Any = changes.run.model.init_args
    # A model directory that the run starts from decides the architecture, experts included.
    found = architecture(model.get("initial_model") or model[name].name)
    place = folder / f"tiny_{found.model_type}"
    write_stand_in(place, tiny_architecture(found), _HEADS.get(model.get("objective", "")))
    key = f"model.init_args.{name}"
    # A name on the command line says what the stand-in is made of.
    changes.given.discard(f"model.{name}.name")
    changes.set(f"{key}.name", str(place))
    for option, value in (("revision", None), ("num_layers", None), ("compile", False), ("quantization", None)):
        changes.set(f"{key}.{option}", value)
    if model[name].attn_implementation not in (None, "eager", "sdpa"):
        changes.set(f"{key}.attn_implementation", None)


def _plain(key: str) -> str:
    return key.replace(".init_args.", ".")


def _shown(value: Any) -> str:
    return str(value.class_path).rpartition(".")[2] if isinstance(value, Namespace) else str(value)
