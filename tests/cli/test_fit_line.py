"""What is refused before torch is loaded, in the words of the parser, which would refuse it seconds later."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from embeddings.cli.errors import ConfigError
from embeddings.cli.fit import Checked, check_arguments, run_trainer
from embeddings.cli.fit_line import KEYS, check_fit_line, check_one_method
from embeddings.cli.recipes import expand_recipe, read_recipes
from embeddings.cli.sweep_file import read_sweep
from embeddings.cli.sweep_runs import runs_of
from embeddings.common import InputError
from tests.helpers.runs import run_config, write_config

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "lightning_configs"
# Sweeps, the jobs of other commands, and two tables of a paper are no configs of fit.
NO_RUNS = ("jobs", "sweeps", "nv_embed_tables")
FILES = [path for path in CONFIGS.rglob("*.yaml") if not {path.parent.name, path.stem} & {*NO_RUNS}]
GRADCACHE = {"class_path": "embeddings.callbacks.GradCacheCallback", "init_args": {"mini_batch_token": 1}}
# What is merged into the config of a run, and options.
WRONG = {
    "a key": ({"modle": 1}, [], "Subcommand 'fit' does not accept option 'modle'; did you mean model? --help"),
    "a key of the trainer": ({"trainer": {"max_stepz": 3}}, [], "'trainer.max_stepz'; did you mean trainer.max_steps?"),
    "in two parts": ({"trainer.max_stepz": 3}, [], "option 'trainer.max_stepz'; did you mean trainer.max_steps?"),
    "of the module": (
        {"model": {"init_args": {"shedule": 1}}},
        [],
        "model: Option 'shedule' is not accepted by NVEmbedModule; did you mean schedule?",
    ),
    "of a class inside": (
        {"model.init_args.loss.init_args.temprature": 1},
        [],
        "model.loss: Option 'temprature' is not accepted by InfoNCE; did you mean temperature?",
    ),
    "of a class in a list": (
        {"trainer": {"callbacks": [GRADCACHE]}},
        [],
        "trainer.callbacks: Option 'mini_batch_token' is not accepted by GradCacheCallback; did you mean mini",
    ),
    "of a list to append to": ({"data.init_args.sourcse+": [1]}, [], "Option 'sourcse+' is not accepted by Emb"),
    "a class": (
        {"data.class_path": "embeddings.data.EmbedingDataModule"},
        [],
        "data: module 'embeddings.data' has no attribute 'EmbedingDataModule'; did you mean EmbeddingDataModule?",
    ),
    "a class inside": ({"model.init_args.loss.class_path": "embeddings.losses.InfoNC"}, [], "did you mean InfoNCE?"),
    "of an option's mapping": ({}, ["--data.init_args={bach_size: 3}"], "data: Option 'bach_size' is not accepted by"),
    "an option": ({}, ["--conf=a.yaml"], "unrecognized arguments: --conf=a.yaml; did you mean --config?"),
    "an option and its value": ({}, ["--modle", "x"], "unrecognized arguments: --modle x; did you mean --model?"),
    "two options": ({}, ["--modle.x", "-1", "--trainr=3"], "unrecognized arguments: --modle.x -1 --trainr=3; "),
    "an option of the trainer": (
        {},
        ["--trainer.max_ep", "3"],
        " --trainer.max_ep 3; did you mean --trainer.max_epochs?",
    ),
    "the start of an option": ({}, ["--trainer.max_s=3"], "did you mean --trainer.max_steps? "),
    "an option of the data": (
        {},
        ["--data.init_args.batchsize=3"],
        "'batchsize' is not accepted by EmbeddingDataModule; did you mean batch_size?",
    ),
    "an option of the data, in short": ({}, ["--data.bath_size", "3"], "did you mean batch_size?"),
    "a value": ({"trainer": {"max_steps": "many"}}, [], "trainer.max_steps: expected int, got many; --help says"),
    "a value of the seed": ({"seed_everything": 1.5}, [], "seed_everything: expected bool or int, got 1.5"),
    "a value of several types": ({"trainer.max_epochs": 1.5}, [], "trainer.max_epochs: expected int or null, got 1.5"),
    "a value of a choice": ({"trainer.precision": "float8"}, [], "or '64', '32', '16', 'bf16' or null, got float8"),
    "a value of the data": ({"data.init_args": {"batch_size": 1.5}}, [], "data.batch_size: expected int, got 1.5"),
    "a value of a class inside": (
        {"model.init_args.loss.init_args.temperature": "hot"},
        [],
        "model.loss.temperature: expected float, got hot",
    ),
    "a value of a class in a list": (
        {"trainer": {"callbacks": [GRADCACHE | {"init_args": {"mini_batch_tokens": "all"}}]}},
        [],
        "trainer.callbacks.mini_batch_tokens: expected int, got all",
    ),
    "a value of a record": (
        {"model.init_args.backbone.dropout": "high"},
        [],
        "backbone.dropout: expected float or null",
    ),
    "a key of a record": (
        {"model.init_args.backbone.nmae": "x"},
        [],
        "model.backbone: Option 'nmae' is not accepted by BackboneConfig; did you mean name? --help lists the options",
    ),
    "a key of a source": (
        {"data.init_args.sources": [{"name": "a", "path": "a"}, {"name": "b", "pth": "b"}]},
        [],
        "data.sources: Option 'pth' is not accepted by SourceConfig; did you mean path? --help lists the options",
    ),
    "a key of a source that names its class": (
        {"data.init_args.sources": [{"class_path": "embeddings.data.SourceConfig", "init_args": {"pth": "b"}}]},
        [],
        "data.sources: Option 'pth' is not accepted by SourceConfig; did you mean path?",
    ),
    "a value of a source": (
        {"data.init_args.sources": [{"name": "a", "path": "a", "weight": "much"}]},
        [],
        "data.sources.weight: expected float, got much",
    ),
    "a choice of a source": (
        {"data.init_args.sources": [{"conversion": "pair"}]},
        [],
        "'binary_by_label', 'sts', got pa",
    ),
    "a mapping of a source": (
        {"data.init_args.sources": [{"columns": {"query": 3}}]},
        [],
        "columns: expected str, got 3",
    ),
    "a list of a source": ({"data.init_args.sources": [{"path": ["a", 3]}]}, [], "data.sources.path: expected str or"),
    "a value and its repair": (
        {"trainer": {"max_steps": "many"}},
        ["--trainer.max_steps=3"],
        "trainer.max_steps: expected int, got many",
    ),
    "an option's value": ({}, ["--trainer.max_steps", "1e3"], "trainer.max_steps: expected int, got 1000.0"),
    "an option's value of the data": (
        {},
        ["--data.init_args.batch_size", "1.5"],
        "data.batch_size: expected int, got 1.5",
    ),
    "an option's value of a class inside": (
        {},
        ["--model.loss.temperature=hot"],
        "model.loss.temperature: expected flo",
    ),
    "an option's value of a record": ({}, ["--model.lora.rank=x"], "model.lora.rank: expected int, got x"),
    "an option's key of a record": (
        {},
        ["--model.backbone.nmae=x"],
        "'nmae' is not accepted by BackboneConfig; did you",
    ),
    "an option's key of a record that may be null": (
        {},
        ["--data.text.pool=x"],
        "'pool' is not accepted by TextSettings",
    ),
    "an option's list of sources": (
        {},
        ["--data.sources=[{pth: a}]"],
        "data.sources: Option 'pth' is not accepted by So",
    ),
    "a config as text": (
        {},
        ["--config={trainer: {max_steps: many}}"],
        "trainer.max_steps: expected int, got many; --help",
    ),
    "an option of a class inside": (
        {},
        ["--model.init_args.loss.init_args.temprature", "0"],
        "model.loss: Option 'temprature' is not accepted by InfoNCE; did you mean temperature?",
    ),
}


def wrong_line(folder, changes, words):
    """A run that works, but for the changes: each is merged into the one config, or is an option."""

    def merge(into, value):
        for key, content in value.items():
            first, _, rest = key.partition(".")
            content = {rest: content} if rest else content
            into[first] = merge(into.get(first, {}), content) if isinstance(content, dict) else content
        return into

    return ["fit", "--config", write_config(folder, merge(run_config(folder), changes)), *words]


@pytest.mark.parametrize("name", WRONG)
def test_an_unknown_name_is_refused_in_the_parsers_words(name, tmp_path):
    changes, words, says = WRONG[name]
    line = wrong_line(tmp_path, changes, words)
    with pytest.raises(ConfigError) as quick:
        check_fit_line(line)
    with pytest.raises(ConfigError) as slow:
        check_arguments(line)
    assert str(quick.value) == str(slow.value)
    assert says in str(quick.value)


def test_what_is_wrong_in_a_config_that_another_names_is_refused_in_the_parsers_words(tmp_path):
    config, wrong = run_config(tmp_path), {"max_stepz": 3}
    said = []
    for inner in (
        {"trainer": wrong},
        {"model": {"class_path": "embeddings.modules.NVEmbedModule", "init_args": {"shedule": 3}}},
        {"data": {**config["data"], "init_args": {"batch_size": "many"}}},
    ):
        write_config(tmp_path, inner, "inner.yaml")
        outer = {name: value for name, value in config.items() if name not in inner}
        line = ["fit", "--config", write_config(tmp_path, {**outer, "config": "inner.yaml"}, "outer.yaml")]
        for check in (check_fit_line, check_arguments):
            with pytest.raises(ConfigError) as refused:
                check(line)
            said.append(str(refused.value))
    assert said[::2] == said[1::2]
    assert [line.partition("; did you")[0] for line in said[::2]] == [
        "Subcommand 'fit' does not accept option 'trainer.max_stepz'",
        "model: Option 'shedule' is not accepted by NVEmbedModule",
        "data.batch_size: expected int, got many; --help says what each option takes",
    ]


def test_a_config_whose_values_the_one_that_names_it_would_drop_is_refused(tmp_path):
    write_config(tmp_path, {"trainer": {"max_steps": 9}}, "inner.yaml")
    line = ["fit", "--config", write_config(tmp_path, {**run_config(tmp_path), "config": "inner.yaml"})]
    for check in (check_fit_line, check_arguments):
        with pytest.raises(
            InputError, match=r"config\.yaml: gives trainer beside .*inner\.yaml, .* would be lost; name"
        ):
            check(line)


def test_a_later_config_is_checked_by_the_class_that_an_earlier_one_chose(tmp_path):
    first = write_config(tmp_path, run_config(tmp_path), "first.yaml")

    def check(content, *options):
        check_fit_line(["fit", "--config", first, "--config", write_config(tmp_path, content), *options])

    check({"model": {"init_args": {"loss": {"init_args": {"temperature": 1}}}}})
    with pytest.raises(ConfigError, match="model: Option 'lossy' is not accepted by NVEmbedModule; did you mean loss"):
        check({"model": {"init_args": {"lossy": 1}}})
    with pytest.raises(ConfigError, match=r"model\.loss: Option 'widths' is not accepted by InfoNCE"):
        check({"model": {"init_args": {"loss": {"init_args": {"widths": 1}}}}})
    # Another class has other arguments, and other classes inside; what a lone name stands for is the parser's to say.
    other = '--model={"class_path": "embeddings.modules.CDEModule"}'
    check({}, other, "--model.context.num_context=3", '--model={"init_args": {"loss": {"init_args": {"widths": 1}}}}')
    check({}, "--model", "CDEModule", "--model.context.size=3")
    check({}, "--model.loss=null", "--model.loss.widths=3")


OPEN = {"class_path": "embeddings.losses.MatryoshkaInfoNCE"}
LEFT_TO_THE_PARSER = {
    "over nothing": ({"modle": {}, "trainer": {"x": {}}}, []),
    "what parsers write": ({"__path__": 1}, []),
    "a class with open arguments": ({"model.init_args.loss": OPEN}, ["--model.loss.x=1"]),
    "a class that may not be named": ({"model": {"class_path": "os.system"}}, ["--model.init_args.x=1"]),
    "a class of a module without a list": ({"data.class_path": "embeddings.data.datamodule.Embeding"}, []),
    "an option of a list's element": ({}, ["--data.init_args.sources.0.nmae", "x"]),
    "a list to append to": ({"data.init_args.sources+": [{"pth": "b", "weight": "much"}]}, []),
    "a number as text": ({"model.init_args.loss.init_args.temperature": "1e-2"}, ["--model.loss.temperature=1e-2"]),
    "text as a number": ({}, ["--data.cache_dir=3", "--trainer.default_root_dir=[a]", "--data.tokenizer={a: b}"]),
    "null": ({"trainer": {"max_steps": None}}, ["--trainer.max_steps=null", "--data.batch_size="]),
    "what is filled in": ({"trainer": {"max_steps": "${STEPS}"}}, ["--trainer.accelerator=${A}"]),
    "the default in another form": ({"trainer": {"overfit_batches": 0, "fast_dev_run": 1}}, []),
    "a class in place of a value": ({"model.init_args.lora": "lora.yaml", "trainer": {"logger": "x"}}, []),
    "keys with a dot": ({"data.init_args.sources": [{"label_texts": {"0.5": 1, "a.b": "c"}}]}, []),
    "keys that are numbers": ({"data.init_args.sources": [{"label_texts": {0: "a", 1: "b"}}]}, []),
    "a type that no source tells": ({"model.init_args.optimizer.init_args.lr": "high", "trainer": {"plugins": 3}}, []),
    "a config that names another": ({"config": '{"weights_only": null}'}, []),
    "no value": ({}, ["--config"]),
    "help": ({"modle": 1}, ["--help"]),
    "help of a class": ({}, ["--modle", "--model.help"]),
    "printing": ({"modle": 1}, ["--print_config=skip_null"]),
    "no option": ({}, ["--", "--modle"]),
    "a value with a space": ({}, ["--modle x"]),
}


@pytest.mark.parametrize("name", LEFT_TO_THE_PARSER)
def test_what_is_not_certain_is_left_to_the_parser(name, tmp_path):
    check_fit_line(wrong_line(tmp_path, *LEFT_TO_THE_PARSER[name]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_of_our_configs_is_refused(path):
    check_fit_line(["fit", "--config", str(path)])


def test_nothing_of_recipes_sweeps_and_the_readme_is_refused(tmp_path):
    assert len(FILES) >= 30
    recipes = read_recipes()
    sweeps = [run for path in (CONFIGS / "sweeps").iterdir() for run in runs_of(read_sweep(path), tmp_path)]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert min(len(recipes), len(sweeps), len(blocks)) >= 2
    for name in recipes:
        check_fit_line(expand_recipe(["fit", "--recipe", name]))
    for run in sweeps:
        check_fit_line(expand_recipe(list(run.words)))
    for block in blocks:
        check_fit_line(["fit", "--config", str(CONFIGS / "quickstart.yaml"), f"--config={block}"])


def test_all_that_the_parser_takes_is_let_through(tmp_path, capsys):
    config = run_config(tmp_path) | {"ckpt_path": None, "weights_only": None}
    line = ["fit", "--config", write_config(tmp_path, config), "--trainer.max_steps=1"]
    check_fit_line(line)
    with pytest.raises(SystemExit):
        check_arguments([*line, "--print_config"])
    whole = yaml.safe_load(capsys.readouterr().out)
    assert sorted(whole) == sorted(KEYS)
    options = ["--trainer.callbacks+=[]", "--trainer", "x.yaml", "--data.batch_size=4", "--seed_everything", "3"]
    check_fit_line(["fit", "--config", write_config(tmp_path, whole, "whole.yaml"), *options])


def test_two_method_configs_are_refused_by_name(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"model:\n  class_path: {name}\n")
    (tmp_path / "scale.yaml").write_text("trainer:\n  devices: 2\n")
    line = ["fit", "--config", str(tmp_path / "one.yaml"), "--config", str(tmp_path / "scale.yaml")]
    check_one_method(line)
    with pytest.raises(ConfigError, match=r"one\.yaml and .*two\.yaml both choose"):
        check_one_method([*line, "--config", str(tmp_path / "two.yaml")])


@pytest.mark.parametrize("second", ["-c{}/two.yaml", "-c={}/two.yaml", "--config={}/sub/names_two.yaml"])
def test_a_second_method_is_found_however_its_config_is_named(second, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "one.yaml").write_text("model.class_path: one\n")
    (tmp_path / "two.yaml").write_text("model:\n  class_path: two\n")
    (tmp_path / "sub" / "names_two.yaml").write_text("config: ../two.yaml\n")
    check_one_method(["fit", second.format(tmp_path)])
    with pytest.raises(ConfigError, match=r"one\.yaml and .*two\.yaml both choose"):
        check_one_method(["fit", "--config", str(tmp_path / "one.yaml"), second.format(tmp_path)])


@pytest.mark.parametrize(
    ("named", "what"),
    [("[b.yaml]", r"a\.yaml: config: must be one file; name more by"), ("b.yaml", r"a\.yaml: names itself; take")],
)
def test_a_config_that_names_others_as_the_parser_does_not_take_it_is_refused(named, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(f"config: {named}\n")
    (tmp_path / "b.yaml").write_text(f"config: ../{tmp_path.name}/a.yaml\n")
    with pytest.raises(InputError, match=what):
        check_fit_line(["fit", "--config", "a.yaml"])


def test_a_config_that_is_no_yaml_names_the_file(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [1,\n")
    with pytest.raises(InputError, match=r"bad\.yaml: not a YAML file"):
        check_one_method(["fit", "--config", str(tmp_path / "bad.yaml")])


def test_torch_is_not_loaded_for_it(tmp_path):
    paths = [str(tmp_path / f"{number}.yaml") for number in range(7)]
    lines = [["fit", "--config", str(tmp_path / "none.yaml")], ["fit", "--recipe", "none"]]
    lines += [["fit", "--config", path] for path in paths]
    Path(paths[0]).write_text("a: [1,\n")
    Path(paths[1]).write_text("trainer: {max_stepz: 3}\n")
    Path(paths[2]).write_text("model: {class_path: embeddings.modules.NVEmbedModule, init_args: {shedule: 3}}\n")
    Path(paths[3]).write_text("data: {class_path: embeddings.data.EmbedingDataModule}\n")
    Path(paths[4]).write_text("trainer: {max_steps: many}\n")
    Path(paths[5]).write_text("data: {class_path: embeddings.data.EmbeddingDataModule, sources: [{pth: a}]}\n")
    Path(paths[6]).write_text("config: 1.yaml\n")
    code = "import sys; from embeddings.cli.main import main; "
    code += f"print([main(line) for line in {lines!r}], 'torch' in sys.modules, 'lightning' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[2, 2, 2, 2, 2, 2, 2, 2, 2] False False\n"
    assert ended.stderr.count("\n") == 9


def of_callbacks(folder, name, **trainer):
    return write_config(folder, {"trainer": trainer}, name)


def named(*names):
    return [{"class_path": f"lightning.pytorch.callbacks.{name}"} for name in names]


def test_callbacks_of_an_earlier_config_are_not_dropped_unasked(tmp_path):
    base = of_callbacks(tmp_path, "base.yaml", callbacks=named("ModelCheckpoint", "ModelSummary"))
    more = of_callbacks(tmp_path, "more.yaml", **{"callbacks+": named("LearningRateMonitor")})
    mine = of_callbacks(tmp_path, "mine.yaml", callbacks=named("ModelSummary"))
    with pytest.raises(ConfigError) as error:
        check_one_method(["fit", "--config", base, "--config", more, "--config", mine])
    assert str(error.value) == (
        f"{mine}: trainer.callbacks drops ModelCheckpoint, LearningRateMonitor of an earlier config; "
        "write callbacks+: to add to them, or callbacks: [] above callbacks+: to drop them"
    )
    dotted = write_config(tmp_path, {"trainer.callbacks": named("ModelSummary")}, "dotted.yaml")
    with pytest.raises(ConfigError, match="drops ModelCheckpoint of"):
        check_one_method(["fit", "--config", base, "--config", dotted])


def test_callbacks_are_dropped_on_request_and_added_by_their_own_key(tmp_path, monkeypatch):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = named("ModelCheckpoint")
    base = write_config(tmp_path, config, "base.yaml")
    anew = of_callbacks(tmp_path, "anew.yaml", callbacks=[], **{"callbacks+": named("ModelSummary")})
    (tmp_path / "anew.yaml").write_text("trainer:\n  callbacks: []\n  callbacks+:\n    - class_path: ModelSummary\n")
    more = of_callbacks(tmp_path, "more.yaml", **{"callbacks+": named("LearningRateMonitor")})
    whole = of_callbacks(tmp_path, "whole.yaml", callbacks=named("ModelCheckpoint", "ModelSummary"))
    for second, kept in (
        (anew, ["ModelSummary"]),
        (more, ["ModelCheckpoint", "LearningRateMonitor"]),
        (whole, ["ModelCheckpoint", "ModelSummary"]),
    ):
        found = []

        def note(cli, found=found):
            found += [each.class_path.rpartition(".")[2] for each in cli.config.fit.trainer.callbacks]
            raise Checked

        monkeypatch.setattr("embeddings.cli.fit.TrainerCLI.before_fit", note)
        words = ["fit", "--config", base, "--config", second]
        check_fit_line(words)
        with pytest.raises(Checked):
            run_trainer(words)
        assert found == kept


def test_the_readmes_own_config_is_accepted_and_keeps_checkpoints(tmp_path):
    text = (ROOT / "README.md").read_text("utf-8")
    (block,) = re.findall(r"```yaml\n(data:\n.*?name: support.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
    words = ["fit", "--config", str(CONFIGS / "quickstart.yaml"), "--config", str(tmp_path / "mine.yaml")]
    check_fit_line(words)
    added = yaml.safe_load(block)["trainer"]["callbacks+"]
    assert {"ModelCheckpoint", "RunHealth", "ExportModel"} <= {each["class_path"].rpartition(".")[2] for each in added}
    assert list(yaml.safe_load(block)["trainer"])[-2:] == ["callbacks", "callbacks+"]
