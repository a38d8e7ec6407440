"""What is wrong with a `fit` line, as far as it can be seen before torch and Lightning are loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

from embeddings.cli.errors import ConfigError, with_way_out
from embeddings.cli.given import config_paths, given_mappings, read_config, unknown_option
from embeddings.cli.imports import may_name
from embeddings.cli.source_names import parameters_in_source

TRAINER = "lightning.pytorch.Trainer"
KEYS = ("ckpt_path", "data", "model", "seed_everything", "trainer", "weights_only")
# Options that are no keys of a config.
_OTHERS = ("config", "help", "print_config")
# Parts of an option's name that are no argument's.
_INNER = ("class_path", "dict_kwargs", "help", "init_args")


def check_fit_line(argv: Sequence[str]) -> None:
    """Check what takes no class to see: the files, that one of them chooses the method, and unknown names.

    The parser checks all of it again, and the types, values and records inside classes besides.

    Raises:
        InputError: If a file is missing, no YAML, or no mapping.
        ConfigError: If two choose the method, or a name is unknown.
    """
    check_one_method(argv)
    chosen, of_trainer = {"trainer": TRAINER}, parameters_in_source(TRAINER)
    for content in given_mappings(argv):
        _check_names(content, KEYS, "fit", "")
        if of_trainer is not None and isinstance(content.get("trainer"), Mapping):
            known = [f"trainer.{name}" for name in of_trainer]
            _check_names({f"trainer.{name}": None for name in content["trainer"]}, known, "fit", "")
        _check_classes(content, "", chosen)
    for word in argv[1:]:
        if word.startswith("--"):
            _check_option(word, chosen)


def check_one_method(argv: Sequence[str]) -> None:
    """Refuse two configs that each choose a method: the second would inherit the first's nested arguments in silence.

    Raises:
        ConfigError: Naming both files.
    """
    chosen = [path for path in config_paths(argv) if _chooses_method(path)]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} both choose model.class_path; give one method config a run")


def _chooses_method(path: str) -> bool:
    model = read_config(path).get("model")
    return isinstance(model, dict) and "class_path" in model


def _check_names(given: Mapping[str, Any], known: Sequence[str] | None, owner: str, where: str) -> None:
    for written in given:
        if known is not None and written.removesuffix("+") not in known:
            raise unknown_option(written.removesuffix("+"), owner, known, where)


def _check_classes(value: Any, where: str, chosen: dict[str, str]) -> None:
    """Check the arguments of each class that a config names, or that an earlier one has chosen for this place.

    Args:
        value: What the config gives.
        where: For which option.
        chosen: The classes by option; those of this config are added.
    """
    if isinstance(value, list):
        for element in value:
            _check_classes(element, where, {})
    elif isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str):
            for place in [place for place in chosen if place.startswith(f"{where}.")]:
                del chosen[place]
            chosen[where] = value["class_path"]
        path, arguments = chosen.get(where, ""), value.get("init_args")
        if isinstance(arguments, Mapping) and may_name(path):
            _check_names(arguments, parameters_in_source(path), path.rpartition(".")[2], where)
        for key, inner in value.items():
            _check_classes(inner, where if key == "init_args" else f"{where}.{key}".removeprefix("."), chosen)


def _check_option(word: str, chosen: dict[str, str]) -> None:
    """Check the first name of an option, and the second where it is an argument of a class that is known."""
    first, *rest = word.removeprefix("--").partition("=")[0].split(".")
    if rest in ([], ["class_path"]):
        chosen.pop(first, None)  # the option chooses another class
    taken = parameters_in_source(chosen.get(first, "")) or ()
    name = next((part.removesuffix("+") for part in rest if part not in _INNER), None)
    is_unknown = first not in (*KEYS, *_OTHERS) or (taken and name is not None and name not in taken)
    if is_unknown:
        options = [f"--{key}" for key in KEYS] + [f"--{first}.{argument}" for argument in taken]
        raise ConfigError(with_way_out(f"unrecognized arguments: {word}", options))
