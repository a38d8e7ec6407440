"""The command `fit`: LightningCLI with our parser, checks and run record."""

import json
import logging
import os
import re
import shlex
import shutil
import sys
import warnings
import weakref
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from tempfile import mkdtemp
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from jsonargparse.typing import register_type
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DeepSpeedStrategy

import embeddings.data.text_datamodule
import embeddings.modules  # noqa: F401 - configs may name an imported class without its module
from embeddings.callbacks.checkpoints import Export, ExportLanguageModel, ExportModel
from embeddings.callbacks.gpu import GPUTraining
from embeddings.callbacks.preemption import Preemption
from embeddings.callbacks.retrieval_eval import RetrievalEvaluation
from embeddings.callbacks.run_record import RunRecord, callbacks_of, model_checkpoints, plain_types, run_logger
from embeddings.cli.errors import ConfigError
from embeddings.cli.parser import (
    OneLineParser,
    check_configs,
    class_name,
    expand_recipe,
    parse_yaml,
    plain_key,
    reason,
    with_hint,
)
from embeddings.cli.trainer import (
    AUTO,
    check_checkpoint,
    check_start,
    checks_before_model,
    choose_folder,
    known_accelerator,
    mixed_precision,
    print_to_stderr,
    set_up_trainer,
)
from embeddings.common import InputError, OptionError, UserError
from embeddings.common.class_paths import restricted_imports
from embeddings.common.errors import program, require_minimum
from embeddings.common.io import METRICS_FILE
from embeddings.common.progress import reported
from embeddings.common.text import one_line
from embeddings.figures.run_facts import LOSS, Curves, metrics_path, read_curves
from embeddings.models.stand_in import architecture, tiny_architecture, write_stand_in
from embeddings.modules.base import BaseModule
from embeddings.strategies.ranks import set_up_ranks

# Some of Lightning's callbacks have a device as a default value, which must be written with the config.
register_type(torch.device, deserializer_exceptions=(RuntimeError, TypeError))

HARDWARE_OPTIONS = ("accelerator", "devices", "strategy", "precision")
# Lightning's messages about a checkpoint of another model, or one without optimiser states.
NO_RESUME = r"Error\(s\) in loading state_dict|.?Trying to restore"
# Its message about a `monitor` that is not a logged metric; it lists the metrics.
NO_METRIC = "Early stopping conditioned on metric"
MAX_SEED = 2**32 - 1
# A process needs half a gigabyte before it loads a model.
MAX_DEVICES_PER_CPU = 8
# jsonargparse can print the help of a source's settings only together with the data module.
SOURCES_HELP = "--data.sources.help"
# The options that list sources.
_SOURCES = re.compile(r"--data(\.init_args)?\.(validation_)?sources\+?")
UNION_ERROR = "Does not validate against any of the Union subtypes"

# The folder of models that a run on part of the data exports, and the options that make such a run.
TRIALS = "checkpoints/trials"
_PARTIAL = {"trainer.limit_train_batches", "trainer.overfit_batches"}
# The folder of stand-in models. The constants below are the settings and limits of a stand-in run.
STAND_INS = "checkpoints/stand_in"
MAX_STEPS = 6
# Hardware options of a run on the CPU.
_HARDWARE: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "plugins": None}
_HARDWARE |= {"sync_batchnorm": False, "log_every_n_steps": 1}
# Upper limits for a small run, by key below `trainer`, `data.init_args`, `model.init_args` and each callback.
_TRAINER = {"max_steps": MAX_STEPS, "accumulate_grad_batches": 2, "limit_val_batches": 2, "val_check_interval": 4}
_DATA = {"batch_size": 4, "num_workers": 0, "row_length": 32, "sampler.init_args.steps_per_epoch": 2 * MAX_STEPS}
_DATA |= {"sampler.init_args.inner.init_args.steps_per_epoch": 2 * MAX_STEPS}
_CALLBACKS = {"every_n_steps": 2, "every_n_train_steps": 2, "mini_batch_tokens": 512}
_EXPORTS = (ExportModel.__name__, ExportLanguageModel.__name__)
# Values of `max_steps` that mean no limit.
_UNLIMITED = (-1, None)


class FitParser(OneLineParser, LightningArgumentParser):
    """Lightning's parser with the errors and lists of `OneLineParser`; a path stands for the source that it names."""

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        words = lists_emptied(sources_named(self.normalised(args or [])))
        return super().parse_args(words, *rest, **kwargs)

    def add_config(self, path: str, content: dict[str, Any]) -> None:
        super().add_config(path, content)
        check_configs(self.configs, self.words)

    def _apply_actions(self, cfg: Any, *args: Any, **kwargs: Any) -> Namespace:
        for name in ("sources", "validation_sources", "sources+", "validation_sources+"):
            if name in cfg:
                cfg[name] = with_names(cfg[name])
        return super()._apply_actions(cfg, *args, **kwargs)


class TrainerCLI(LightningCLI):
    """`fit` for any of our modules, with configs merged from left to right."""

    # For the help.
    command, summary = "fit", "Train a model."
    # Whether the run is only checked, possibly on a machine without its hardware.
    only_checks = False
    # Whether the run, or its check, is about this machine.
    runs_here = True

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add our options to Lightning's; `--recipe` is for the help only, `expand_recipe` has replaced it."""
        help_text = "a row of lightning_configs/recipes.csv; replaced by the --config options of its configs"
        parser.add_argument("--recipe", default=SUPPRESS, help=help_text)
        help_text = "check the run without its hardware, print what it would do, and write nothing"
        parser.add_argument("--check", action="store_true", default=SUPPRESS, help=help_text)
        help_text = "use at most this many rows of each source"
        parser.add_argument("--limit-data", type=int, default=SUPPRESS, help=help_text)
        help_text = "train a tiny random model of the same architecture for a few steps on the CPU, to test the run"
        parser.add_argument("--stand-in", choices=["tiny"], default=SUPPRESS, help=help_text)
        passed_here = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        help_text = "the folder for everything that the run writes, such as its logs, checkpoints and models"
        parser.add_argument("--run-dir", default=SUPPRESS, help=help_text)
        self.fit_options = parser.add_method_arguments(L.Trainer, "fit", skip=passed_here)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        assert isinstance(parser, FitParser)
        self.config = parser.parse_args(args)
        if self.config.pop("check", False) and not self.only_checks:
            raise ConfigError("--check: must not be in a config; write fit --check")
        if self.config.pop("recipe", None) is not None:
            raise ConfigError("--recipe: must be given once, and not in a config; write fit --recipe NAME")
        self._make_small(args)
        parser.check_functions(self.config)
        if not 0 <= self.config.seed_everything <= MAX_SEED:
            rule = f"must be from 0 to {MAX_SEED}"
            raise OptionError("seed_everything", self.config.seed_everything, rule, "choose another number")
        devices, maximum = self.config.trainer.devices, MAX_DEVICES_PER_CPU * (os.cpu_count() or 1)
        if str(devices).isdecimal() and int(devices) > maximum:
            rule = f"must be at most {MAX_DEVICES_PER_CPU} for each CPU core, {maximum} here"
            raise OptionError("trainer.devices", devices, rule, "lower it")
        self.check_checkpoint()

    def check_checkpoint(self) -> None:
        check_checkpoint(self.config.ckpt_path)

    def _make_small(self, args: Any) -> None:
        """Apply `--limit_data` and `--stand_in` and report the changes on stderr; a check leaves no files."""
        num_rows, stand_in, run_dir = (self.config.pop(name, None) for name in ("limit_data", "stand_in", "run_dir"))
        changes = Changes(self.config, args)
        keep_last_exports(self.config.trainer)
        if num_rows is not None:
            limit_data(changes, num_rows)
        if stand_in is None and (num_rows is not None or changes.on_command_line & _PARTIAL):
            move_exports(changes, Path(TRIALS))
        if stand_in is not None:
            folder = mkdtemp() if self.only_checks else STAND_INS
            if self.only_checks:
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            use_stand_in(changes, Path(folder))
        if run_dir is not None:
            place_run(self.config, Path(run_dir))
        if self.runs_here:
            avoid_emulation(changes)
        for line in changes.lines:
            print_to_stderr(f"changed {line}")

    def _dump_config(self) -> None:
        """Convert the config for a module's `save_hyperparameters`; Lightning's method would check it once more."""
        if not hasattr(self, "config_dump"):
            self.config_dump = plain_types(self.parser, self.config)

    def before_instantiate_classes(self) -> None:
        # After Lightning's own instantiators, of which the first match is used.
        self.parser.add_instantiator(made, object)
        self._dump_config()

    def instantiate_classes(self) -> None:
        """Make data and trainer, check the run as far as that needs no model, then load the model."""
        self.make_data_and_trainer()
        for check in checks_before_model(self.trainer, self.datamodule, self.config.ckpt_path):
            check()
        arguments: Any = self.config.model.get("init_args") or {}
        module_class(self.config).check_arguments(arguments, self.trainer)
        self.make_model()

    def make_data_and_trainer(self) -> None:
        self.config_init = self._made_parts(*(name for name in vars(self.config) if name != "model"))
        self.datamodule = self.config_init.get("data")
        self.trainer = self.instantiate_trainer()

    def make_model(self) -> None:
        self.model = self._made_parts("model").model

    def _made_parts(self, *names: str) -> Namespace:
        parts = Namespace(**{name: self.config[name] for name in names})  # type: ignore[no-untyped-call]
        try:
            objects: Namespace = self.parser.instantiate_classes(parts)
        except ValueError as error:
            if UNION_ERROR not in str(error):
                raise
            raise ConfigError(with_hint(reason(str(error)))) from error
        return objects

    def after_instantiate_classes(self) -> None:
        check_start(self.trainer, self.model, self.datamodule, self.config.ckpt_path)

    def run_command(self) -> None:
        """Train. With Lightning's own `fit` subcommand the options would be parsed and checked twice."""
        options = {name: self.config[name] for name in self.fit_options}
        self.trainer.fit(self.model, datamodule=self.datamodule, **options)
        # Not `trainer.log_dir`, which waits for the other ranks.
        if self.trainer.is_global_zero and run_logger(self.trainer) is not None:
            print("\n".join(end_lines(self.trainer)))

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the trainer, with one-line errors for options that Lightning rejects, or should reject."""
        batches, norm = (self.config.trainer[name] for name in ("accumulate_grad_batches", "gradient_clip_val"))
        require_minimum("trainer.accumulate_grad_batches", batches, 1, "1 means no accumulation")
        require_minimum("trainer.gradient_clip_val", norm, 0, "leave it out for no clipping", optional=True)
        # A copy, because Lightning appends to the list.
        callbacks = list(self.config_init.trainer.callbacks or [])
        kwargs.setdefault("accelerator", known_accelerator(self.config.trainer.accelerator))
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except UserError:
            raise
        except (MisconfigurationException, ImportError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(trainer_error(str(error), self.config.trainer.as_dict())) from error
        set_up_trainer(trainer, callbacks)
        if not self.only_checks:
            device, precision = trainer.strategy.root_device.type, str(self.config.trainer.precision)
            if device == "cpu" and precision.startswith("16"):
                raise OptionError("trainer.precision", precision, "must not be float16 on a CPU", "use bf16-mixed")
            # DeepSpeed reads the variable, and would otherwise fail without CUDA after minutes.
            needs_cuda = isinstance(trainer.strategy, DeepSpeedStrategy) and os.environ.get("DS_ACCELERATOR") != "cpu"
            if needs_cuda and device != "cuda":
                name = type(trainer.strategy).__name__
                raise OptionError("trainer.strategy", name, "needs CUDA GPUs", "use ddp, or auto for one device")
            set_up_ranks(trainer)
        checkpoint = choose_folder(trainer, self.config_dump, self.config.ckpt_path, self.datamodule)
        self.config.ckpt_path = self.config_init.ckpt_path = checkpoint
        return trainer


def made(kind: type, /, *args: Any, **options: Any) -> Any:
    """An object of a class in the config; Lightning's constructors raise various errors about their arguments."""
    try:
        return kind(*args, **options)
    except (MisconfigurationException, ImportError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UserError) or not kind.__module__.startswith("lightning."):
            raise
        raise ConfigError(f"{kind.__name__}: {one_line(str(error), 220).rstrip('. ')}; change its arguments") from error


class Checked(Exception):
    """Raised with the parser and the config once the arguments are checked; nothing is built."""


class CheckingCLI(TrainerCLI):
    """`fit` until its arguments are checked; then it raises `Checked`."""

    only_checks, runs_here = True, False

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        raise Checked(parser, self.config)


def check_arguments(argv: Sequence[str]) -> None:
    """Check arguments as `run_trainer` does before it builds the run; nothing is built, run or written."""
    with suppress(Checked):
        run_trainer(argv, CheckingCLI)


@restricted_imports()
def run_trainer(argv: Sequence[str], kind: type[TrainerCLI] = TrainerCLI) -> TrainerCLI:
    """Run `fit` with these arguments; `--recipe NAME` is replaced by the configs that `recipes.csv` lists."""
    if SOURCES_HELP in argv and "--data.help" not in argv:
        argv = ["fit", "--data.help", "EmbeddingDataModule", SOURCES_HELP]
    expanded = expand_recipe(argv)
    if expanded != list(argv) and not kind.only_checks:
        print(f"{program()} {shlex.join(expanded)}", file=sys.stderr)
    try:
        # Until the bar of the training, and after it.
        with reported(kind.command):
            return make_cli(expanded, kind)
    except MisconfigurationException as error:
        raise ConfigError(f"{one_line(str(error), 220)}; change the option, fit --help lists all") from error
    except (RuntimeError, KeyError) as error:
        if str(error).startswith(NO_METRIC):
            what = one_line(str(error), 300)
            raise ConfigError(f"EarlyStopping.monitor: {what}; name a metric that is logged") from error
        if not re.match(NO_RESUME, str(error)):
            raise
        what = one_line(str(error).strip("'\""), 220)
        raise ConfigError(f"--ckpt_path: {what}; resume with the configs that wrote it") from error


def make_cli(argv: Sequence[str], kind: type[TrainerCLI] = TrainerCLI) -> TrainerCLI:
    """Make the parts of a run from its arguments, then run the command."""
    with held_messages():
        cli = kind(
            model_class=L.LightningModule,
            datamodule_class=L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=RunRecord,
            save_config_kwargs={"command": [*program().split(), *argv]},
            trainer_defaults={"callbacks": [Preemption(), GPUTraining()]},
            seed_everything_default=0,
            parser_class=FitParser,
            auto_configure_optimizers=False,
            run=False,
            parser_kwargs={"prog": f"{program()} {kind.command}", "description": kind.summary},
            args=list(argv[1:]),
        )
    cli.run_command()
    return cli


def end_lines(trainer: L.Trainer) -> list[str]:
    """A finished run's scores, folder and model directories, and two commands to run next."""
    logger = run_logger(trainer)
    assert logger is not None
    exports = callbacks_of(trainer, Export)
    model = next((shlex.quote(export.output) for export in exports if isinstance(export, ExportModel)), None)
    checkpoint = next(filter(None, (callback.best_model_path for callback in model_checkpoints(trainer))), None)
    folder, run = Path(logger.log_dir), shlex.quote(logger.log_dir)
    curves = read_curves(folder) if metrics_path(folder).is_file() else Curves()
    if model is not None:
        following = [f"evaluate --model {model} --data FOLDER", f'search --model {model} --corpus FILE "QUERY"']
    elif exports or checkpoint is None:
        # A run shorter than `log_every_n_steps` has no loss to draw.
        following = [f"show curves --run {run}"] * bool(curves[LOSS][0]) + [f"report {run}"]
    else:
        following = [f"export --checkpoint {shlex.quote(checkpoint)} --output DIR", f"report {run}"]
    lines = [score_line(each, curves) for each in callbacks_of(trainer, RetrievalEvaluation)]
    files = [name for name in (METRICS_FILE, "run.json", "config.yaml") if (folder / name).is_file()]
    lines += [f"run: {logger.log_dir} ({', '.join(files)})"]
    lines += [f"model: {export.output}" for export in exports]
    return [*filter(None, lines), *(f"next: {program()} {words}" for words in following)]


def score_line(evaluation: RetrievalEvaluation, curves: Curves) -> str:
    """The logged nDCG@10 before training and at its best; empty if either is missing."""
    scores = dict(zip(*curves[f"{evaluation.name}/ndcg_at_10"], strict=True))
    first = scores.pop(0, None)
    if first is None or not scores:
        return ""
    best = max(scores, key=lambda step: scores[step])
    return f"nDCG@10 on {evaluation.folder}: {first:.3f} before training, {scores[best]:.3f} at best (step {best})"


def trainer_error(message: str, options: dict[str, Any]) -> str:
    """Lightning's message about the trainer, after the options that it names, or shows, or that are not defaults."""
    named = [name for name in options if re.search(rf"\b{name}\b", message)]
    words = re.findall(r"[\w.=<>]+", message)
    valued = [name for name in (*HARDWARE_OPTIONS, "max_time") if f"{options.get(name)}" in words]
    changed = [name for name in HARDWARE_OPTIONS if options.get(name) not in (None, 1, "auto", "cpu")]
    causes = ", ".join(f"trainer.{name}: {options[name]}" for name in (named or valued or changed)[:4])
    return f"{causes or 'trainer'}: {one_line(message, 220).rstrip('. ')}; change it, or leave it out"


def with_names(sources: Any) -> Any:
    """The sources of a config, each path in place of a source as a source named after its file."""
    if isinstance(sources, str):
        sources = [sources]
    if not isinstance(sources, list):
        return sources
    return [
        {"name": Path(source).name.partition(".")[0], "path": source} if isinstance(source, str) else source
        for source in sources
    ]


def sources_named(argv: Sequence[str]) -> list[str]:
    words: list[str] = []
    for previous, word in zip(["", *argv], argv, strict=False):
        name, equals, value = word.partition("=") if word.startswith("--") else (previous, "", word)
        if _SOURCES.fullmatch(name) and value and (equals or not word.startswith("--")):
            is_yaml = value == "null" or value.startswith(("[", "{"))
            value = json.dumps(with_names(parse_yaml(value, name) if is_yaml else value))
            word = f"{name}={value}" if equals else value
        words.append(word)
    return words


def lists_emptied(argv: Sequence[str]) -> list[str]:
    """The arguments with `NAME=[]` before each list of mappings, so that it replaces an earlier list."""
    words: list[str] = []
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if re.fullmatch(r"--[^.]+\..*[^+]", name) and re.match(r"\s*\[.*\{", value if equals else following, re.DOTALL):
            words.append(f"{name}=[]")
        words.append(word)
    return words


@contextmanager
def held_messages() -> Iterator[None]:
    """Inside, Lightning's information lines are dropped and warnings held back, so that an error is one line."""
    loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings(record=True) as held:
        for each in loggers:
            each.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)
    for warning in held:
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)


class Changes:
    """Changes the parsed config of `fit` in place and records each change; command-line options keep their values.

    A `callback` is a part of the config whose arguments change.
    """

    def __init__(self, run: Namespace, argv: Sequence[str]) -> None:
        self.run, self.lines = run, list[str]()
        names = (word.partition("=")[0].removeprefix("--") for word in argv if word.startswith("--"))
        self.on_command_line = set(map(plain_key, names))

    def set(self, key: str, value: Any, callback: Any = None) -> None:
        owner = self.run if callback is None else callback.init_args
        name = plain_key(key) if callback is None else f"{class_name(callback)}.{key}"
        previous = owner.get(key, value)
        if name not in self.on_command_line and previous != value:
            self.lines.append(f"{name}: {_shown(previous)} -> {_shown(value)}")
            owner[key] = value

    def force(self, key: str, value: Any) -> None:
        """Set an option that belongs to the replaced model, also if it is on the command line."""
        self.on_command_line.discard(plain_key(key))
        self.set(key, value)

    def lower(self, key: str, limit: int, callback: Any = None) -> None:
        """Lower an integer to at most `limit`; fractions and missing values do not change."""
        previous = (self.run if callback is None else callback.init_args).get(key)
        if type(previous) is int and previous > limit:
            self.set(key, limit, callback)


def limit_data(changes: Changes, num_rows: int) -> None:
    """Limit the rows of every source, unless batches are clustered: clusters are of all rows."""
    require_minimum("limit_data", num_rows, 1, "2000 is enough to test a run")
    data: Any = changes.run.data.init_args
    samplers = (data.get(f"sampler.{inner}class_path") for inner in ("", "init_args.inner."))
    if any(str(path).endswith("ClusteredBatchSampler") for path in samplers):
        changes.lines.append("data.sources: all rows, because their clusters contain all rows")
        return
    sources = [*(data.get("sources") or ()), *(data.get("validation_sources") or ())]
    limited = [source for source in sources if source.max_rows is None or source.max_rows > num_rows]
    for source in limited:
        source.max_rows = num_rows
    changes.lines.append(f"data.sources: {len(limited)} of {len(sources)} limited to {num_rows:,} rows each")


def keep_last_exports(trainer: Namespace) -> None:
    """Drop an `ExportModel` or `ExportLanguageModel` before another one: a later config chooses the folder."""
    given = [trainer.callbacks] if isinstance(trainer.callbacks, Namespace) else trainer.callbacks or []
    last = {class_name(one): one for one in given if class_name(one) in _EXPORTS}
    trainer.callbacks = [one for one in given if last.get(class_name(one), one) is one] or trainer.callbacks


def move_exports(changes: Changes, folder: Path) -> None:
    """Let a trial write its models to `folder`, where each trial replaces the one before."""
    for callback in changes.run.trainer.callbacks or ():
        if class_name(callback) in _EXPORTS:
            changes.set("output", str(folder / Path(callback.init_args.output).name), callback)
            callback.init_args.replace = True


def place_run(run: Namespace, folder: Path) -> None:
    """Let a run write everything into one folder: its logs there, other outputs below it."""
    trainer: Any = run.trainer
    trainer.default_root_dir = str(folder)
    loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
    for part in (*loggers, *(trainer.callbacks or ())):
        options: Any = part.get("init_args") if isinstance(part, Namespace) else None
        for name in ("dirpath", "output", "save_dir") if options is not None else ():
            path = options.get(name)
            if isinstance(path, str | Path):
                options[name] = str(folder if name == "save_dir" else folder / Path(path).name)
        if options is not None and class_name(part) == "CSVLogger":
            # Its `version_N` is in the folder itself, not beside an export of the same name.
            options.name = ""
        if options is not None and class_name(part) in _EXPORTS:
            options.replace = options.replace or run.ckpt_path == AUTO


def use_tiny_model(changes: Changes, folder: Path, unknown: str | None = None) -> None:
    """Replace the model by a tiny random one of the same architecture; if it is not known, of the model `unknown`."""
    model: Any = changes.run.model.init_args
    kind = module_class(changes.run)
    arguments = {**kind.stand_in_arguments(model, folder), **kind.tokenizer_arguments(model)}
    for name, value in arguments.items():
        changes.set(f"model.init_args.{name}", value)
    for name in kind.backbones:
        if model.get(name) is not None:
            _replace_backbone(changes, name, folder, unknown)
    changes.force("model.init_args.initial_model", None)


def module_class(run: Namespace) -> type[BaseModule]:
    """The class of a run's module; what `--stand-in` and `plan` know of a method is declared there."""
    kind = resolve_name(run.model.class_path)
    return kind if issubclass(kind, BaseModule) else BaseModule


def use_stand_in(changes: Changes, folder: Path) -> None:
    """Replace the model by a tiny one of the same architecture, and reduce the run to a few steps on the CPU."""
    use_tiny_model(changes, folder)
    for option, value in _HARDWARE.items():
        changes.set(f"trainer.{option}", value)
    if str(changes.run.trainer.precision).startswith("16"):
        changes.set("trainer.precision", "bf16-mixed")
    if changes.run.trainer.max_steps in _UNLIMITED:
        changes.set("trainer.max_steps", MAX_STEPS)
    limited = ("trainer", _TRAINER), ("data.init_args", _DATA)
    for part, limits in (*limited, ("model.init_args", module_class(changes.run).stand_in_limits)):
        for option, limit in limits.items():
            changes.lower(f"{part}.{option}", limit)
    for callback in changes.run.trainer.callbacks or ():
        for option, limit in _CALLBACKS.items() if callback.get("init_args") is not None else ():
            changes.lower(option, limit, callback)
    move_exports(changes, folder)


def avoid_emulation(changes: Changes) -> None:
    """Train in float32 where products in bfloat16 would be emulated, unless the command line names a precision."""
    trainer = changes.run.trainer
    precision = mixed_precision(trainer.accelerator)
    if trainer.precision != "bf16-mixed" or precision == trainer.precision:
        return
    changes.set("trainer.precision", precision)
    if trainer.precision == precision:
        changes.lines[-1] += (
            ", as this device has no products in bfloat16; --trainer.precision on the command line is kept"
        )
        for name in module_class(changes.run).backbones:
            backbone = changes.run.model.init_args.get(name)
            if backbone is not None and backbone.dtype == "bfloat16" and backbone.quantization is None:
                changes.set(f"model.init_args.{name}.dtype", "float32")


def _replace_backbone(changes: Changes, name: str, folder: Path, unknown: str | None) -> None:
    model: Any = changes.run.model.init_args
    # If the run starts from a model directory, its architecture counts, including experts.
    try:
        original = architecture(model.get("initial_model") or model[name].name)
    except InputError:
        if unknown is None:
            raise
        original = architecture(unknown)
    stand_in = folder / f"tiny_{original.model_type}"
    write_stand_in(stand_in, tiny_architecture(original), module_class(changes.run).head_kind(model))
    key = f"model.init_args.{name}"
    # A backbone named on the command line is replaced too: it determines the architecture.
    changes.force(f"{key}.name", str(stand_in))
    for option in ("revision", "num_layers", "quantization"):
        changes.force(f"{key}.{option}", None)
    changes.set(f"{key}.compile", "auto")
    if model[name].attn_implementation not in (None, "eager", "sdpa"):
        changes.set(f"{key}.attn_implementation", None)


def _shown(value: Any) -> str:
    return class_name(value) if isinstance(value, Namespace) else str(value)
