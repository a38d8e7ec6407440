"""Checkpoint contents: build a module from the configuration, set its weights, adjust the position in the data."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from jsonargparse import ArgumentError, ArgumentParser

from embeddings.common import InputError
from embeddings.common.class_paths import RULE, named_function, refused_path, restricted_imports, trust_hint
from embeddings.common.text import one_line


def configured_module(
    content: Mapping[str, Any], source: str, explain: Callable[[str], str] = str
) -> L.LightningModule:
    """The module that a checkpoint's configuration describes, without its weights; `explain` shortens errors."""
    config = content.get("run_config")
    if not isinstance(config, dict) or "model" not in config:
        raise InputError(source, "contains no run_config", "use one that `fit` wrote, or pass the module's arguments")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningModule, "model")
    try:
        with restricted_imports():
            parsed = parser.parse_object({"model": config["model"]})
            function = named_function(parsed, repr(config["model"]))
            if function is not None:
                raise InputError(source, f"may not name the function {function}", RULE)
            module = parser.instantiate(parsed).model
    except (ArgumentError, TypeError) as error:
        refused = refused_path(str(error))
        if refused is not None:
            raise InputError(source, f"may not name {refused}", trust_hint(refused)) from error
        problem = f"its config is invalid: {one_line(explain(str(error)), 120)}"
        raise InputError(source, problem, "load it with the version that wrote it") from error
    assert isinstance(module, L.LightningModule)
    return module


def set_weights(module: L.LightningModule, content: dict[str, Any], source: str, strict: bool = True) -> None:
    """Load a checkpoint's weights into a module; those of a frozen base come from the base's files."""
    try:
        module.on_load_checkpoint(content)
        module.load_state_dict(content["state_dict"], strict=strict)
    except (KeyError, RuntimeError, TypeError) as error:
        problem = f"its content does not match its config: {one_line(str(error), 100)}"
        raise InputError(source, problem, "use another checkpoint") from error


def rewind(checkpoint: dict[str, Any], data_key: str, num_batches: int) -> None:
    """Set the checkpoint's Lightning loops and data loaders back by the batches since the last optimiser step."""
    loops = checkpoint["loops"]["fit_loop"]
    batches = loops["epoch_loop.batch_progress"]
    for counts in (batches["total"], batches["current"]):
        last = counts["processed"] - num_batches
        # As `ModelCheckpoint` saves after a step's last batch: `completed` is one behind.
        counts.update(ready=last, started=last, processed=last, completed=last - 1)
    batches["is_last_batch"] = False
    # What follows that step has run.
    loops["state_dict"]["is_step_open"] = False
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    cleared = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["zero_grad"]
    for counts in (cleared["total"], cleared["current"]):
        counts.update({name: count - 1 for name, count in counts.items()})
    for loader in (checkpoint[data_key]["loader"], *loops["state_dict"].get("combined_loader", [])):
        loader["delivered"] -= num_batches


def reopen_epoch(checkpoint: dict[str, Any]) -> None:
    """Correct the count of epochs, so that a resumed run trains all batches of the epoch that was begun.

    Lightning calls an epoch complete if the run reached its maximum of steps within it. It would end an epoch that was
    not started when the checkpoint was written, because it still has the previous epoch's count of batches.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is None:
        return
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    for counts in (epochs["total"], epochs["current"]):
        counts["ready"] = counts["started"]
    was_counted = epochs["current"]["ready"] > 0 and epochs["current"]["processed"] == epochs["current"]["ready"]
    if was_counted and batches["current"]["ready"] > 0 and not batches["is_last_batch"]:
        for counts in (epochs["total"], epochs["current"]):
            counts.update(processed=counts["ready"] - 1, completed=counts["ready"] - 1)
