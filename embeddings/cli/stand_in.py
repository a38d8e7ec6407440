"""`fit --limit-data N --stand-in tiny`: a run as its configs say, but small enough for one CPU and a few steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from embeddings.common import OptionError
from embeddings.models.language_model import HeadKind
from embeddings.models.model_files import PACKAGED_NAME
from embeddings.models.stand_in import TINY, architecture, tiny_architecture, write_stand_in

# Where stand-ins lie, and the models that they become.
FOLDER = "checkpoints/stand_in"
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
