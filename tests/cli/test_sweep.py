"""Sweeps through the command line: their files, points and results, and runs that fail, resume or are stopped."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from embeddings.cli import sweep as module
from embeddings.cli.main import main
from embeddings.cli.sweep import Sweep, forwarding, short_names
from embeddings.common import UserError
from tests.helpers.forks import fork
from tests.helpers.refusals import assert_refused, refused
from tests.helpers.runs import run_config, write_config
from tests.helpers.waiting import wait_for

TEMPERATURE = "model.init_args.loss.init_args.temperature"
# In place of `fit`: notes its folder in `ran.txt`, writes a record and the loss, which is the sum of the values of `a`
# and a tenth of the seed, and ends as `endings.json` says for its point.
FIT = """
import json, os, signal, sys, time
from pathlib import Path
words = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = Path(words["run_dir"] if "run_dir" in words else words["run-dir"])
with open("ran.txt", "a") as file:
    file.write(f"{folder}\\n")
position = len(Path("ran.txt").read_text().splitlines()) - 1
ending = json.loads(Path("endings.json").read_text()).get(str(position), [0])
for number in ending[1:]:
    signal.signal(number, signal.SIG_IGN)
    os.kill(os.getppid(), number)
    time.sleep(0.3)
if ending[0] > 128:
    signal.signal(ending[0] - 128, signal.SIG_DFL)
    os.kill(os.getpid(), ending[0] - 128)
run = folder / "version_0"
run.mkdir(parents=True, exist_ok=True)
loss = float(words.get("a", 0)) + float(words.get("seed_everything", 0)) / 10
(run / "metrics.csv").write_text(f"epoch,step,train/loss\\n0,0,{loss + 1}\\n0,1,{loss}\\n")
end = {"how": "failed" if ending[0] else "finished", "time": "2026-01-01T00:01:00"}
(run / "run.json").write_text(json.dumps({"started": "2026-01-01T00:00:00", "end": end}))
sys.exit(ending[0])
"""


@pytest.fixture
def sweep_file(tmp_path):
    """Writes a sweep of tiny runs; returns its path."""
    path = write_config(tmp_path, run_config(tmp_path), "tiny.yaml")

    def write(parameters, **more):
        content = {"configs": [path], "parameters": parameters, "metric": {"column": "train/loss", "mode": "min"}}
        (tmp_path / "tried.yaml").write_text(yaml.safe_dump(content | more, sort_keys=False))
        return "tried.yaml"

    return write


@pytest.fixture
def faked(tmp_path, monkeypatch):
    """Runs `FIT` for each point, without checks; a function gives its folders so far, and sets endings by position."""
    for name in ("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "fit.py").write_text(FIT)
    monkeypatch.setattr(module, "COMMAND", [str(tmp_path / "fit.py")])
    monkeypatch.setattr(module, "check_runs", lambda *_: None)

    def ran(endings=None):
        if endings is not None or not Path("endings.json").exists():
            Path("endings.json").write_text(json.dumps(endings or {}))
        return Path("ran.txt").read_text().splitlines() if Path("ran.txt").exists() else []

    ran()
    return ran


def points(path):
    return [run.point for run in Sweep(Path(path), Path("out")).runs()]


def test_a_grid_is_every_combination_and_the_last_key_varies_fastest(sweep_file):
    file = sweep_file({"b": [1, 2], "a": ["x", "1e-5x", None]})
    assert points(file) == [{"b": b, "a": a} for b in (1, 2) for a in ("x", "1e-5x", None)]
    Path(file).write_text(Path(file).read_text().replace("1e-5x", "1e-5"))
    assert points(file)[1] == {"b": 1, "a": 1e-5}


def test_a_random_point_depends_only_on_seed_and_index(sweep_file):
    pytest.importorskip("optuna")
    parameters = {
        "a": {"low": 1e-5, "high": 1e-1, "log": True},
        "b": ["x", {"class_path": "y.Z"}],
        "c": {"low": 1, "high": 4, "int": True},
    }
    search = {"method": "random", "num_runs": 40, "seed": 3}
    found = points(sweep_file(parameters, **search))
    assert points(sweep_file(parameters, **search | {"num_runs": 45}))[:40] == found
    assert points(sweep_file(parameters, **search | {"seed": 4})) != found
    assert {json.dumps(point["b"]) for point in found} == {'"x"', '{"class_path": "y.Z"}'}
    assert {point["c"] for point in found} == {1, 2, 3, 4}
    assert all(-5 <= math.log10(point["a"]) <= -1 for point in found)
    assert sum(math.log10(point["a"]) < -3 for point in found) == pytest.approx(20, abs=9)


def test_a_run_is_named_after_the_recipe_or_the_last_config(sweep_file, tmp_path):
    file = Path(sweep_file({"a": [1]}))
    (tmp_path / "scale.yaml").write_text("trainer: {devices: 2}\n")
    for content, name in (
        ({"configs": ["tiny.yaml", "scale.yaml"]}, "scale"),
        ({"recipe": "mgh_h100x1"}, "mgh_h100x1"),
    ):
        file.write_text(yaml.safe_dump({**content, "parameters": {"a": ["x y"], "d": [None], "e": [{"f": 1}]}}))
        (run,) = Sweep(file, Path("out")).runs()
        assert run.folder.parent == Path("out/tried")
        assert run.folder.name.startswith(f"{name}-")
    ending = ["--a=x y", "--d=null", '--e={"f": 1}', f"--run-dir={run.folder}", "--ckpt_path=auto"]
    assert run.words[-5:] == ending


def test_a_short_name_has_as_few_parts_as_make_it_unique():
    keys = [TEMPERATURE, "model.init_args.router.temperature", "model.init_args.pooling.class_path", "a.lr"]
    assert list(short_names(keys).values()) == ["loss.temperature", "router.temperature", "pooling", "lr"]


ONE, RANDOM = {"a": [1]}, {"method": "random", "num_runs": 2}
UNPARSED = [
    ("[1]", "must be a mapping"),
    ({"parametres": ONE}, "'parametres"),
    ({"recipe": "quickstart", "parameters": ONE}, "needs either recipe or configs"),
    ({"method": "bayes", "parameters": ONE}, "method: expected 'grid', .*, got bayes"),
    ({"parameters": {}}, "parameters: must map config keys"),
    ({"parameters": {"a": []}}, r"parameters\.a: must be a list of values, got \[\]"),
    ({"parameters": {"a": [1, {"b": 2, "c": 3}, {"c": 3, "b": 2}]}}, r"parameters\.a: lists a value twice"),
    ({"parameters": {1: [2]}}, r"parameters\.1: must be a config key other than ckpt_path, run_dir"),
    ({"parameters": {"ckpt_path": ["a", "b"]}}, r"parameters\.ckpt_path: must be a config key other than ckpt_path"),
    (
        {"parameters": {"trainer.default_root_dir": ["a"]}},
        r"parameters\.trainer\.default_root_dir: must be a config key",
    ),
    ({"parameters": {"model.loss.init_args.t": [1], "model.loss.t": [2]}}, r"t: is the same key as model\.loss\.init"),
    ({"parameters": ONE, "num_runs": 3}, "num_runs: is for method random or tpe, which need it"),
    ({**RANDOM, "num_runs": 0, "parameters": ONE}, "num_runs: must be >= 1, got 0"),
]
for _source in ("{low: 3, high: 2}", "{low: '0', high: 2}", "{low: 0, hihg: 2}"):
    UNPARSED.append(({**RANDOM, "parameters": {"a": yaml.safe_load(_source)}}, r"parameters\.a: is not a range of "))


@pytest.mark.parametrize(("content", "says"), UNPARSED)
def test_an_invalid_sweep_file_is_refused_with_the_key(content, says, tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "scale.yaml").write_text("trainer: {devices: 2}\n")
    whole = {"configs": ["scale.yaml"], **content} if isinstance(content, dict) else content
    Path("tried.yaml").write_text(whole if isinstance(whole, str) else yaml.safe_dump(whole, sort_keys=False))
    refused(UserError, says, Sweep, Path("tried.yaml"), Path("out"))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_writes_only_into_its_folder_and_resumes_there(tmp_path, capsys):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {"every_n_train_steps": 1, "save_last": True, "dirpath": "elsewhere/kept"},
        },
        {"class_path": "embeddings.callbacks.ExportModel", "init_args": {"output": "elsewhere/model"}},
    ]
    config["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "logs", "name": "mine"},
    }
    words = ["fit", "--config", write_config(tmp_path, config), "--run-dir=out/point", "--ckpt_path=auto"]
    before = {path.name for path in tmp_path.iterdir()}
    assert main([*words, "--trainer.max_steps=2"]) == 0
    assert {path.name for path in tmp_path.iterdir()} - before <= {"out", "cache"}
    names = {path.name for path in (tmp_path / "out/point").iterdir()}
    assert names == {"kept", "version_0", "model"}
    assert main([*words, "--trainer.max_steps=3"]) == 0
    record = json.loads((tmp_path / "out/point/version_0/run.json").read_text())
    assert record["resumed_from"].endswith("out/point/kept/last.ckpt")
    # Without `auto` it is another run.
    assert_refused(capsys, tmp_path, "must not contain a model of another run", main, words[:-1])


def test_a_folder_below_the_home_folder_is_the_same_for_all_that_a_run_writes(sweep_file, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main(["fit", "--config", "tiny.yaml", "--run-dir=~/run", "--trainer.max_steps=2"]) == 0
    names = {path.name for path in (tmp_path / "home/run/version_0").iterdir()}
    assert names >= {"metrics.csv", "run.json", "config.yaml", "checkpoints"}
    assert not Path("~").exists()
    plan = Sweep(Path(sweep_file({"seed_everything": [1]})), Path("~/sweeps"))
    assert plan.run(0).folder.parent == tmp_path / "home/sweeps/tried"


def test_with_an_index_the_command_becomes_the_fit_of_that_point(sweep_file, faked, monkeypatch, capsys):
    file, commands = sweep_file({"a": [1, 2]}), []
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append((program, words)))
    assert main(["sweep", file, "--index", "1"]) == 0
    ((program, words),) = commands
    assert (program, words[:3]) == (sys.executable, [sys.executable, *module.COMMAND, "fit"])
    assert subprocess.run(words).returncode == 0
    capsys.readouterr()
    assert main(["sweep", file, "--index", "1"]) == 0
    assert capsys.readouterr().out == "point 1 of 2: a=2: done already\n"
    assert len(commands) == len(faked()) == 1


def test_only_unfinished_points_are_run_and_a_failed_run_does_not_stop_the_others(sweep_file, faked, capsys):
    file = sweep_file({"a": [1, 2, 3]})
    faked({"0": [70], "1": [2]})
    assert main(["sweep", file]) == 70
    assert "2 of 3 runs failed: point 0 with exit code 70, point 1 with exit code 2; " in capsys.readouterr().err
    folders = faked()
    assert len(set(folders)) == 3
    assert main(["sweep", file]) == 0
    assert faked()[3:] == folders[:2]
    assert main(["sweep", file]) == 0
    assert len(faked()) == 5
    text = Path("tiny.yaml").read_text()
    for edited, number in ((f"{text}# a comment\n", 5), (text.replace("max_steps: ", "max_steps: 1"), 8)):
        Path("tiny.yaml").write_text(edited)
        assert main(["sweep", file]) == 0
        assert len(faked()) == number


def test_a_point_whose_last_process_did_not_finish_is_run_again(sweep_file, faked):
    file = sweep_file({"a": [1]})
    assert main(["sweep", file]) == 0
    later = Path(faked()[0]) / "version_1" / "run.json"
    later.parent.mkdir()
    later.write_text(json.dumps({"end": {"how": "interrupted"}}))
    assert main(["sweep", file]) == 0
    assert len(faked()) == 2


def test_several_processes_need_an_index(sweep_file, faked, monkeypatch, tmp_path, capsys):
    file = sweep_file({"a": [1, 2]})
    monkeypatch.setenv("WORLD_SIZE", "2")
    says = "error: index must be given if 2 processes train together, got None; "
    assert_refused(capsys, tmp_path, says, main, ["sweep", file])


def test_count_and_dry_run_write_nothing(sweep_file, tmp_path, capsys):
    file = sweep_file({TEMPERATURE: [0.1, 0.2], "seed_everything": [0, 1, 2]})
    before = sorted(tmp_path.iterdir())
    assert main(["sweep", file, "--count"]) == 0
    assert capsys.readouterr().out == "6\n"
    assert main(["sweep", file, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18
    assert lines[3] == "point 1 of 6: temperature=0.1, seed_everything=1 (missing)"
    assert lines[4].startswith("  checkpoints/sweeps/tried/tiny-")
    assert lines[5].startswith(f"  python main.py fit --config {tmp_path}/tiny.yaml --{TEMPERATURE}=0.1 --seed_every")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"model.init_args.loss.init_args.temprature": [0.1]}, "point 0: model"),
        ({TEMPERATURE: [0.1, "warm"]}, "point 1: model"),
    ],
)
def test_a_wrong_point_is_refused_before_any_run(parameters, says, sweep_file, tmp_path, capsys):
    file = sweep_file(parameters)
    for words in ([], ["--dry-run"]):
        assert_refused(capsys, tmp_path, f"error: tried.yaml: {says}", main, ["sweep", file, *words])


def test_results_are_a_table_from_best_to_worst_the_means_over_seeds_and_a_csv_file(sweep_file, faked, capsys):
    file = sweep_file({"a": [2, 1], "seed_everything": [0, 2]})
    faked({"3": [1]})
    assert main(["sweep", file]) == 1
    capsys.readouterr()
    assert main(["sweep", file, "--results", "true"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["point", "a", "seed_everything", *module.RESULT_COLUMNS]
    assert lines[1][:7] == ["2", "1", "0", "1", "1", "1", "done"]
    assert [line[0] for line in lines[1:5]] == ["2", "0", "1", "3"]
    assert lines[4][3:7] == ["-", "-", "-", "unfinished"]
    assert lines[7:9] == [["1", "1", "-", "1"], ["2", "2.1", "0.1414", "2"]]
    with open("checkpoints/sweeps/tried/results.csv", newline="") as rows:
        found = [(row["point"], row["last"]) for row in csv.DictReader(rows)]
    assert found == [("2", "1.0"), ("0", "2.0"), ("1", "2.2"), ("3", "")]
    other = sweep_file({"a": [2, 1], "seed_everything": [0, 2]}, metric={"column": "val/x"})
    assert main(["sweep", other, "--results", "mine.csv"]) == 2
    assert "has not logged 'val/x'; it must be one of train/loss" in capsys.readouterr().err


def test_means_are_over_the_seeds_of_equal_values_also_if_their_names_end_alike(sweep_file, faked, capsys):
    file = sweep_file({"b": ["old/x.Part.jsonl", "new/x.Part.jsonl", "k.Kind", "l.Kind"], "seed_everything": [0, 1]})
    assert main(["sweep", file]) == 0
    capsys.readouterr()
    assert main(["sweep", file, "--results", "true"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    kinds = ["old/x.Part.jsonl", "new/x.Part.jsonl", "Kind", "Kind"]
    assert lines[11:15] == [[kind, "0.05", "0.07071", "2"] for kind in kinds]


def test_equal_points_of_random_draws_are_one_result(sweep_file, faked, capsys):
    pytest.importorskip("optuna")
    file = sweep_file({"a": [1, 2], "seed_everything": [0]}, method="random", num_runs=6)
    assert main(["sweep", file]) == 0
    assert len(faked()) == 2
    capsys.readouterr()
    assert main(["sweep", file, "--results", "true"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines[1:3]] == ["1", "2"]
    assert lines[5:7] == [["1", "1", "-", "1"], ["2", "2", "-", "1"]]
    assert " ".join(lines[8]).startswith("2 of 2 runs done")


def test_runs_without_a_finite_value_are_the_last_results(sweep_file, faked, capsys):
    file = sweep_file({"a": [math.nan, 2, 1], "seed_everything": [0, 1]})
    assert main(["sweep", file]) == 0
    capsys.readouterr()
    assert main(["sweep", file, "--results", "true"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:7]] == ["4", "5", "2", "3", "0", "1"]
    assert [line[:2] for line in lines[9:12]] == [["1", "1.05"], ["2", "2.05"], ["NaN", "nan"]]


def test_a_search_trains_each_point_once_and_uses_the_results(sweep_file, faked, capsys):
    optuna = pytest.importorskip("optuna")
    search = {"method": "tpe", "num_runs": 3, "seed": 1}
    parameters = {"a": {"low": 0.0, "high": 1.0}, "b": [{"c": 1}, "x"]}
    file = sweep_file(parameters, **search)
    assert main(["sweep", file, "--dry-run"]) == 0
    assert capsys.readouterr().out == "3 more points depend on the results of earlier ones\n"
    faked({"1": [7]})
    assert main(["sweep", file]) == 7
    found = points_of_search(file)
    assert len(set(faked())) == 3
    assert main(["sweep", sweep_file(parameters, **search | {"num_runs": 4})]) == 0
    assert faked()[3] == faked()[1]
    assert len(faked()) == 5
    assert points_of_search(file)[:3] == found
    (journal,) = Path("checkpoints/sweeps/tried").glob("*.journal")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    (study,) = optuna.get_all_study_summaries(storage)
    assert study.best_trial.value == pytest.approx(min(point["a"] for point in found))


def points_of_search(file):
    return [run.point for run in Sweep(Path(file), Path("checkpoints/sweeps")).runs()]


def test_a_task_of_an_array_keeps_its_point_and_ranks_share_it(sweep_file, faked):
    pytest.importorskip("optuna")
    file = sweep_file({"a": {"low": 0.0, "high": 1.0}}, method="tpe", num_runs=3)
    first, second = (Sweep(Path(file), Path("checkpoints/sweeps")) for _ in range(2))
    assert first.run(2) == second.run(2)
    assert [run.index for run in second.runs()] == [2]
    assert main(["sweep", file]) == 0
    assert len(set(faked())) == 3
    assert str(first.run(2).folder) in faked()


INT, HUP, USR1, TERM = signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM


@pytest.mark.parametrize(
    ("ending", "code"),
    [([75, USR1], 75), ([75], 75), ([130, INT], 130)],
)
def test_a_signal_reaches_the_run_and_ends_the_sweep_with_its_code(ending, code, sweep_file, faked, capsys):
    handlers = [signal.getsignal(number) for number in module.FORWARDED]
    faked({"0": [int(number) for number in ending]})
    assert main(["sweep", sweep_file({"a": [1, 2]})]) == code
    assert capsys.readouterr().err.endswith("stopped at point 0; run the same command again to resume\n")
    assert len(faked()) == 1
    assert [signal.getsignal(number) for number in module.FORWARDED] == handlers


def test_a_signal_at_a_runs_last_step_or_before_the_first_run_starts_no_other(sweep_file, faked, monkeypatch, capsys):
    faked({"0": [0, int(USR1)]})
    file = sweep_file({"a": [1, 2]})
    assert main(["sweep", file]) == 138
    assert "stopped at point 1; " in capsys.readouterr().err
    monkeypatch.setattr(module, "check_runs", lambda *_: os.kill(os.getpid(), TERM))
    assert main(["sweep", file]) == 143
    assert len(faked()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is a call of Linux")
def test_a_killed_sweep_takes_its_run_along(tmp_path):
    def sweep_one():
        with forwarding() as children:
            children.run(["sh", "-c", f"echo $$ > {tmp_path / 'started'}; exec sleep 60"])

    child, started = fork(sweep_one), tmp_path / "started"
    wait_for(lambda: started.exists() and started.read_text().endswith("\n"), "the run")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    stat = Path("/proc", started.read_text().strip(), "stat")
    wait_for(lambda: not stat.exists() or ") Z " in stat.read_text(), "the end of the run", timeout_seconds=5)
