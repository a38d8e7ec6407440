"""Files that try to have code run, or something else than their own folder written or read."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.reliability.cases import FIT, Make, both, cases, put, run
from tests.reliability.checkpoints import SEARCH, content, edited, model
from tests.reliability.world import Place

CANARY = "canary"
COMMAND = f"touch {CANARY}"
EXPORT = "export --checkpoint last.ckpt --output out"
RESUME = f"{FIT} --ckpt_path last.ckpt"
MODULE = f"open({CANARY!r}, 'w').close()\nclass Thing:\n    def __init__(self, *a, **k): pass\n"


class Payload:
    """What unpickling makes touch the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (COMMAND,)


PICKLE = pickle.dumps(Payload())


def saved(value: object, name: str = "last.ckpt") -> Make:
    """A file that PyTorch wrote, with a payload in its pickle."""

    def make(place: Place) -> None:
        torch.save(value, place.folder / name)

    return make


def beside(name: str, data: bytes | str) -> Callable[[Path], object]:
    """Puts one more file into a model's directory."""
    return content(name, data)


def both_of(*damages: Callable[[Path], object]) -> Callable[[Path], object]:
    """Does one damage after another."""

    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


def nested_archive() -> bytes:
    """An archive in an archive, the inner one with a pickle."""
    inner, outer = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(inner, "w") as file:
        file.writestr("archive/data.pkl", PICKLE)
    with zipfile.ZipFile(outer, "w") as file:
        file.writestr("archive/data.pkl", inner.getvalue())
        file.writestr("archive/version", "3\n")
    return outer.getvalue()


def safetensors(header: bytes | dict[str, Any], body: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of this header, which may lie about its length."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + body


def tensor(start: int, stop: int, shape: int = 2) -> dict[str, Any]:
    """A tensor's entry in such a header."""
    return {"dtype": "F32", "shape": [shape], "data_offsets": [start, stop]}


def deep(levels: int = 100_000) -> str:
    """JSON nested so deep."""
    return '{"a":' * levels + "1" + "}" * levels


def remote(**names: str) -> Callable[[Path], object]:
    """Has a model's config ask for the code that lies beside it."""

    def make(folder: Path) -> None:
        edited("config.json", auto_map=names)(folder)
        (folder / "canary_module.py").write_text(MODULE)

    return make


def unknown_remote(folder: Path) -> None:
    """Has a model of an unknown type ask for the code that lies beside it."""
    remote(AutoConfig="canary_module.Thing", AutoModel="canary_module.Thing")(folder)
    edited("config.json", model_type="canary")(folder)


def remote_tokenizer(folder: Path) -> None:
    """Has a tokenizer ask for the code that lies beside it."""
    changes = {"auto_map": {"AutoTokenizer": ["canary_module.Thing", None]}, "tokenizer_class": "Thing"}
    edited("tokenizer_config.json", **changes)(folder)
    (folder / "canary_module.py").write_text(MODULE)


CASES = cases(
    {
        SEARCH: {
            # Pickles in a model's directory.
            "a pickle for weights": (model(content("model.safetensors", PICKLE)), "model: cannot be loaded: "),
            "a pickle for a tokenizer": (model(content("tokenizer.json", PICKLE)), "model: tokenizer cannot be read: "),
            "a pickle for a config": (model(content("config.json", PICKLE)), "model/config.json: "),
            "weights with a header of all memory": (
                model(content("model.safetensors", safetensors(b"{}", length=2**63 - 1))),
                "model: cannot be loaded: ",
            ),
            "weights that overlap": (
                model(content("model.safetensors", safetensors({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)))),
                "model: cannot be loaded: ",
            ),
            "weights of another size than their shape": (
                model(content("model.safetensors", safetensors({"a": tensor(0, 8, 2**60)}, bytes(8)))),
                "model: cannot be loaded: ",
            ),
            "weights with a header nested deep": (
                model(content("model.safetensors", safetensors(deep(10_000).encode()))),
                "model: cannot be loaded: ",
            ),
            "a config nested deep": (model(content("config.json", deep())), "model/config.json: "),
            "a module outside of the folder": (
                model(content("modules.json", '[{"type": "x.Pooling", "path": "../elsewhere"}]')),
                "leads outside",
            ),
            "a module that is a function": (
                model(content("modules.json", '[{"type": "os.system", "path": ""}]')),
                "has the unknown module system",
            ),
            "an activation that is a function": (
                model(
                    both_of(
                        content(
                            "modules.json",
                            '[{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.Dense", "path": "2_Dense"}]',
                        ),
                        lambda folder: (folder / "2_Dense").mkdir(),
                        content("2_Dense/config.json", '{"activation_function": "os.system", "in_features": 1}'),
                    )
                ),
                "model/2_Dense/config.json: is more than a linear head",
            ),
            "a pooling that is a function": (
                model(edited("1_Pooling/config.json", name="os.system"), "latent"),
                "names no pooling",
            ),
            "a config of an unknown kind with its code": (model(unknown_remote), "model/config.json: "),
            "an attention from a repository": (
                model(edited("config.json", attn_implementation="evil/kernel", _attn_implementation="evil/kernel")),
                "model/config.json: attn_implementation asks for the code of 'evil/kernel'",
            ),
            "adapters of a model elsewhere": (
                model(
                    content("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "../elsewhere"}')
                ),
                "model: holds adapters of another model",
            ),
            # What lies in a model's directory and is of no use to it.
            "more pickles beside the weights": (
                model(
                    both_of(
                        *(beside(name, PICKLE) for name in ("optimizer.pt", "a.pkl", "training_args.bin", "x.ckpt"))
                    )
                ),
                "",
                0,
            ),
            "a config that asks for the code beside it": (
                model(remote(AutoConfig="canary_module.Thing", AutoModel="canary_module.Thing")),
                "",
                0,
            ),
            "a tokenizer that asks for the code beside it": (model(remote_tokenizer), "", 0),
            "a chat template that calls": (
                model(
                    edited(
                        "tokenizer_config.json",
                        chat_template="{{ cycler.__init__.__globals__.os.system('touch canary') }}",
                    )
                ),
                "",
                0,
            ),
            "portable code that was changed": (model(content("portable.py", MODULE), "latent"), "", 0),
        },
        EXPORT: {
            # Checkpoints.
            "a checkpoint that is a pickle": (put("last.ckpt", PICKLE), "last.ckpt: "),
            "a checkpoint in an archive in an archive": (put("last.ckpt", nested_archive()), "last.ckpt: "),
            "a checkpoint that names an instantiator": (
                saved({"state_dict": {}, "hyper_parameters": {"_instantiator": "os.system", "command": COMMAND}}),
                "last.ckpt: ",
            ),
            "a checkpoint that names a class": (
                saved({"state_dict": {}, "hyper_parameters": {"_class_path": "os.system", "command": COMMAND}}),
                "last.ckpt: ",
            ),
            "a checkpoint whose config calls": (
                saved(
                    {
                        "state_dict": {},
                        "run_config": {"model": {"class_path": "os.system", "init_args": {"command": COMMAND}}},
                    }
                ),
                "last.ckpt: ",
            ),
        },
        RESUME: {
            "a pickle to go on from": (both(run(), put("last.ckpt", PICKLE)), "last.ckpt: "),
        },
    }
)
