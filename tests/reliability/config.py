"""Invalid configs, sweep files and options."""

from typing import Any

import yaml

from tests.reliability.cases import FIT, Make, at, callback, chosen, nothing, put, run
from tests.reliability.world import Place


def sweep(**changes: object) -> Make:
    """A sweep over the config of a run, with some changes."""

    def make(place: Place) -> None:
        place.config()
        parameters = {"model.init_args.loss.init_args.temperature": [0.1, 0.2]}
        place.write("sweep.yaml", yaml.safe_dump({"configs": ["config.yaml"], "parameters": parameters, **changes}))

    return make


def method(name: str, **arguments: object) -> Make:
    """The config of a run of another method."""

    def change(config: dict[str, Any]) -> None:
        options = config["model"]["init_args"]
        kept = {name: options[name] for name in ("backbone", "loss", "optimizer", "schedule")}
        config["model"] = {"class_path": f"embeddings.modules.{name}", "init_args": {**kept, **arguments}}

    return run(change)


EXPORT = "embeddings.callbacks.ExportModel"
LOSS, OPTIMIZER = "model.init_args.loss.init_args", "model.init_args.optimizer.init_args"
DATA, SCHEDULE = "data.init_args", "model.init_args.schedule"
CASES = {
    FIT: {
        "an unknown section": (at("", trainr={"max_steps": 3}), "'trainr.max_steps' is not accepted; did you mean"),
        "an unknown option over an empty mapping": (at("trainer", max_stepz={}), "did you mean trainer.max_steps?"),
        "an unknown option of the loss": (at(LOSS, temprature=1), "did you mean temperature?"),
        "an unknown class name": (at("model", class_path="NVEmbedModul"), "model: expected the name of a class, got"),
        "a word instead of a number": (at(DATA, batch_size="many"), "data.batch_size: expected int, got many"),
        "a negative learning rate": (at(OPTIMIZER, lr=-1.0), "model.optimizer: Invalid learning rate: -1.0"),
        "a batch of 0": (at(DATA, batch_size=0), "data.batch_size must be >= 1, got 0"),
        "null instead of a number": (at(DATA, batch_size=None), "data.batch_size: expected int, got null"),
        "accumulation over no batch": (
            at("trainer", accumulate_grad_batches=0),
            "trainer.accumulate_grad_batches must be >= 1, got 0",
        ),
        "a negative clipping norm": (at("trainer", gradient_clip_val=-1.0), "trainer.gradient_clip_val must be >= 0"),
        "an unknown precision": (at("trainer", precision="fp99"), "trainer.precision: expected"),
        "DeepSpeed on a CPU": (at("trainer", strategy="deepspeed"), "trainer.strategy needs CUDA GPUs, got "),
        "float16 on a CPU": (at("trainer", precision="16-true"), "trainer.precision must not be float16 on a CPU"),
        "a duration that is no time": (
            callback("lightning.pytorch.callbacks.Timer", duration="soon"),
            "Timer: `Timer(duration='soon')` is not a valid duration",
        ),
        "a seed below 0": (at("", seed_everything=-1), "seed_everything must be from 0 to 4294967295, got -1"),
        "a million processes": (at("trainer", devices=10**6), "trainer.devices must be at most 8 for each CPU"),
        "an integer of 5,000 digits": (
            put("config.yaml", "trainer: {max_steps: " + "9" * 5000 + "}\n"),
            "not a YAML file: Exceeds the limit",
        ),
        "zero devices": (at("trainer", devices=0), "trainer.devices: 0"),
        "heads that do not divide the width": (
            chosen(
                "model.init_args.pooling", "embeddings.models.LatentAttentionPooling", paper_literal=True, num_heads=3
            ),
            "num_heads must divide the hidden size 32, got 3",
        ),
        "adapters for an unknown module": (at("model.init_args", lora={"rank": 2, "target_modules": ["nope"]}), "nope"),
        "a file in place of a model": (callback(EXPORT, output="pairs.jsonl"), "which is not a folder"),
        "an exported model with longer texts than positions": (
            callback(EXPORT, output="model", document_max_length=129),
            "ExportModel.document_max_length must be <= 128, the positions that the backbone has, got 129",
        ),
        "a filter without vectors": (
            at(LOSS, false_negative_filter={"margin": 0.0}),
            "model.loss needs a source with surrogate_vectors",
        ),
        "a class that is not a model": (chosen("model", "embeddings.losses.InfoNCE"), "InfoNCE"),
        "an alias that contains itself": (put("config.yaml", "a: &a [*a]\n"), "--config config.yaml: "),
        "a list for a config": (put("config.yaml", "- trainer\n"), "config.yaml: "),
        "a missing config": (nothing, "--config config.yaml: no such file"),
    },
    "sweep sweep.yaml --count": {
        "a sweep's range without an upper end": (
            sweep(method="random", num_runs=2, parameters={"seed_everything": {"low": 1}}),
            "parameters.seed_everything: is not a range of numbers (",
        ),
    },
    FIT + " --model.init_args.optimizer.init_args.lr=nan": {
        "NaN as a learning rate": (run(), "model.optimizer.lr: expected float, got nan")
    },
}
