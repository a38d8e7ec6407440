"""What is wrong with a `fit` line, as far as configs and sources tell: torch and Lightning need not be loaded for it.

Only what the parser would refuse for certain is refused, in the words of `errors.with_way_out`, which are the parser's
too. What no source tells is left to it: classes that do not list their arguments, and types other than the plain ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from embeddings.cli.errors import ConfigError, with_way_out
from embeddings.cli.given import Given, arguments_of, config_paths, configs_of, given_in_order, unfolded_once
from embeddings.cli.imports import may_name
from embeddings.cli.source_names import parameters_in_source, public_names
from embeddings.cli.source_types import Argument, argument_in_source
from embeddings.cli.typed_values import complaint_of

TRAINER = "lightning.pytorch.Trainer"
KEYS = ("ckpt_path", "data", "model", "seed_everything", "trainer", "weights_only")
# What the parser has besides; a config may name a further config.
OTHERS = ("config", "help", "print_config")
# Those of `KEYS` that are plain values.
TYPES = {"seed_everything": Argument(bool | int, 0), "weights_only": Argument(bool | None)}


def check_fit_line(argv: Sequence[str]) -> None:
    """Check the configs' files, that one of them chooses the method, and the names and values that are given.

    Args:
        argv: `fit` and its options, recipes replaced by their configs.

    Raises:
        InputError: If a config, or one that it names, is missing, no YAML, or no mapping.
        ConfigError: If two choose the method, a name is unknown, or a value is of another type.
    """
    check_one_method(argv)
    if any(map(_asks_for_text, argv)):
        return
    chosen: dict[str, str] = {}
    unknown: list[str] = []
    for given in given_in_order(argv):
        if given.option and not _is_known(given.option):
            unknown += given.words
        else:
            _check(given.content, "", chosen, given)
    if unknown:
        raise ConfigError(with_way_out(f"unrecognized arguments: {' '.join(unknown)}", _options()))


def check_one_method(argv: Sequence[str]) -> None:
    """Refuse two configs that each choose a method: the second would inherit the first's nested arguments in silence.

    Refused too is a later list of callbacks that drops those of an earlier config: a run would lose its checkpoints.

    Raises:
        InputError: If a config cannot be read.
        ConfigError: Naming both files, or the one that drops callbacks.
    """
    configs = [config for path in config_paths(argv) for config in configs_of(path)]
    chosen = [path for path, content in configs if _chooses_method(content)]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} both choose model.class_path; give one method config a run")
    _check_callbacks(configs)


def _check_callbacks(configs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    kept: list[str] = []
    for path, content in configs:
        trainer = unfolded_once(content).get("trainer")
        for key, value in unfolded_once(trainer).items() if isinstance(trainer, Mapping) else ():
            given = [_class_name(each) for each in (value if isinstance(value, list) else [value]) if each is not None]
            if key == "callbacks+":
                kept += given
            elif key == "callbacks":
                dropped = [name for name in kept if name not in given]
                if given and dropped:
                    way_out = "write callbacks+: to add to them, or callbacks: [] above callbacks+: to drop them"
                    what = f"trainer.callbacks drops {', '.join(dropped)} of an earlier config"
                    raise ConfigError(f"{path}: {what}; {way_out}")
                kept = given


def _class_name(callback: Any) -> str:
    path = callback.get("class_path") if isinstance(callback, Mapping) else callback
    return str(path).rpartition(".")[2]


def _chooses_method(content: Mapping[str, Any]) -> bool:
    model = unfolded_once(content).get("model")
    return isinstance(model, Mapping) and "class_path" in unfolded_once(model)


def _asks_for_text(word: str) -> bool:
    """Whether an option prints something in place of a run, whatever else is wrong."""
    return word == "-h" or word.startswith("--print_config") or word.partition("=")[0].endswith(("--help", ".help"))


def _options() -> list[str]:
    names = [f"--{name}" for name in (*OTHERS, *KEYS)]
    return names + [f"--trainer.{name}" for name in parameters_in_source(TRAINER) or ()]


def _is_known(option: str) -> bool:
    """Whether the parser may know an option; what comes after the names of its own is a matter of classes."""
    first, _, rest = option.partition(".")
    known = parameters_in_source(TRAINER)
    if first == "trainer" and rest and known is not None:
        return rest.partition(".")[0].removesuffix("+") in known
    return first.removesuffix("+") in (*KEYS, *OTHERS)


def _check(value: Any, where: str, chosen: dict[str, str], given: Given) -> None:
    """Check the names and values in a value.

    Args:
        value: What a config or an option gives.
        where: For which option.
        chosen: The classes that earlier values have chosen, by option; those of this one are added.
        given: The config or option that it is a part of.

    Raises:
        ConfigError: If a name is unknown, or a value is of another type.
    """
    if isinstance(value, Mapping):
        value = unfolded_once(value)
    if not isinstance(value, Mapping) or "class_path" in value:
        for place in [place for place in chosen if f"{place}.".startswith(f"{where}.")]:
            del chosen[place]
    if not isinstance(value, Mapping):
        return
    if "class_path" in value:
        chosen[where] = str(value["class_path"])
        _check_class(chosen[where], where)
    known = _known(where, chosen)
    if known is None:
        return
    for written, inner in (value if where in ("", "trainer") else unfolded_once(arguments_of(value))).items():
        name = written.removesuffix("+")
        if name in known:
            key = f"{where}.{name}".removeprefix(".")
            if name == written:
                _check_argument(inner, key, _argument(where, name, chosen), chosen, given)
            else:
                _check_argument(inner, key, Argument(), {}, given)
        elif inner != {} and not name.startswith("__"):  # which the parser lets pass, `check_names` the latter alone
            raise _unknown(written, where, chosen)


def _check_argument(value: Any, key: str, argument: Argument, chosen: dict[str, str], given: Given) -> None:
    """Check the value of an argument, and what is in it."""
    is_whole = value is given.value
    complaint = complaint_of(key, argument, given.text if is_whole else value, is_text=is_whole)
    if complaint:
        raise ConfigError(with_way_out(complaint, ()))
    if argument.record and isinstance(value, Mapping):
        chosen.setdefault(key, argument.record)
    _check(value, key, chosen, given)
    for element in value if isinstance(value, list) else ():
        _check(element, key, {key: argument.records} if argument.records else {}, given)


def _argument(where: str, name: str, chosen: Mapping[str, str]) -> Argument:
    """What an argument of an option takes, nothing where that cannot be told."""
    if not where:
        return TYPES.get(name, Argument())
    return argument_in_source(TRAINER if where == "trainer" else chosen[where], name)


def _check_class(path: str, where: str) -> None:
    """Check that a package of ours offers a class, where it lists what it offers."""
    module, _, name = path.rpartition(".")
    offered = public_names(module) if module.startswith("embeddings.") and may_name(path) else None
    if offered is not None and name not in offered:
        raise ConfigError(with_way_out(f"Parser key \"{where}\": module '{module}' has no attribute '{name}'", ()))


def _known(where: str, chosen: Mapping[str, str]) -> Sequence[str] | None:
    """The names that an option's value may have, None where that cannot be told."""
    if not where:
        return (*KEYS, *OTHERS)
    if where == "trainer":
        return parameters_in_source(TRAINER)
    path = chosen.get(where, "")
    return parameters_in_source(path) if may_name(path) else None


def _unknown(name: str, where: str, chosen: Mapping[str, str]) -> ConfigError:
    if where in ("", "trainer"):
        key = f"{where}.{name}".removeprefix(".")
        return ConfigError(with_way_out(f"Subcommand 'fit' does not accept option '{key}'", _options()))
    message = (
        f"Parser key \"{where}\": Problem with given class_path '{chosen[where]}': Option '{name}' is not accepted"
    )
    return ConfigError(with_way_out(message, ()))
