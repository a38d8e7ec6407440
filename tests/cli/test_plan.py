"""`plan` on recipes and small runs, and `fit --check` on a machine without the run's hardware."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from embeddings.cli import fit
from embeddings.cli import plan as plan_module
from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.cli.parser import read_recipes
from embeddings.data import store
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import component, run_config, write_config

RECIPES = read_recipes()
# A recipe with few sources; parsing forty sources takes seconds.
QUICK = ["small_decoder_mntp"]


H100 = "--gpu=H100 SXM"
# What `planned` read.
TABLES: list[str] = []


def planned(capsys: pytest.CaptureFixture[str], *words: str, hardware: str = H100) -> dict[str, str]:
    """The rows of a plan's table by name, and the warning."""
    capsys.readouterr()
    assert main(["plan", *([hardware] if hardware else []), *words]) == 0
    TABLES.append(capsys.readouterr().out)
    lines = TABLES[-1].splitlines()
    rows = [re.split(r" {2,}|: (?=\d+\.\d GB do)", line.strip(), maxsplit=1) for line in lines]
    return {row[0]: row[-1] for row in rows}


def small(folder: Path, kind: str = "bert", **trainer: Any) -> str:
    """A small run's config."""
    config = run_config(folder, kind)
    config["trainer"] |= trainer
    return write_config(folder, config)


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES]
)
def test_every_recipe_is_planned_without_its_model_data_and_gpus(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMBED_TRAIN_DATA", "data")
    before = sorted(tmp_path.rglob("*"))
    table = planned(capsys, "--recipe", recipe, "--pairs", "10000000")
    assert sorted(tmp_path.rglob("*")) == before
    ranks = int(found[1]) if (found := re.search(r"h100x(\d+)$", recipe)) else 1
    assert table["GPUs"].startswith(f"{ranks} x H100 SXM, {'ddp' if ranks > 1 else 'single'}, ")
    trained, frozen = (int(table[f"parameters {kind}"].replace(",", "")) for kind in ("trained", "frozen"))
    assert trained > 0
    assert (frozen > 0) == recipe.startswith(("nv_embed", "mgh_h", "mgh_public", "mgh_smollm2", "mntp"))
    assert float(table["total"].split()[0].replace(",", "")) > 0
    assert "hours" in table
    assert not table["steps"].startswith("not known")


def test_the_options_of_plan_change_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", small(tmp_path)]
    table = planned(capsys, *config)
    assert table["batch per GPU"] == "8 queries of 16, 24 documents of 16 tokens"
    assert (table["steps"], table["pairs in total"]) == ("4 (trainer.max_steps)", "32")
    # 3 products of 8 x 24 scores of width 32.
    assert table["loss"] == "3.7e-08"
    assert not [name for name in table if name.startswith(("warning", "limits the step"))]
    more = planned(capsys, *config, "--gpus", "4", "--gpu", "A100", "--query-tokens=4", "--peak-tflops", "312")
    assert more["GPUs"].startswith("4 x A100, ddp, ")
    assert more["batch per GPU"] == "8 queries of 4, 24 documents of 16 tokens"
    assert more["pairs in total"] == "128"
    assert more["arithmetic of a step, seconds"].endswith("at 0.4 of 312 TFLOP/s")
    by_epochs = [*config, "--trainer.max_steps=-1", "--trainer.max_epochs=3"]
    assert planned(capsys, *by_epochs, "--pairs=100")["steps"] == "36 (3 x 100 pairs)"
    # 12 batches per epoch; the last step of each accumulates two.
    accumulated = [*by_epochs, "--pairs=100", "--trainer.accumulate_grad_batches=5"]
    assert planned(capsys, *accumulated)["steps"] == "9 (3 x 100 pairs)"
    both = [*config, "--trainer.max_steps=50", "--trainer.max_epochs=3", "--pairs=100"]
    assert planned(capsys, *both)["steps"] == "36 (3 x 100 pairs)"
    limited = [*by_epochs, "--pairs=100", "--trainer.limit_train_batches=0.5"]
    assert planned(capsys, *limited)["steps"] == "18 (3 x 6 batches)"
    given = [*by_epochs, "--pairs=100", "--data.sampler=BlendedBatchSampler", "--data.sampler.steps_per_epoch=7"]
    assert planned(capsys, *given)["steps"] == "21 (3 x 7 batches)"
    unknown = planned(capsys, *by_epochs)
    assert unknown["steps"] == "not known: give --pairs, the training pairs per epoch"
    assert "hours" not in unknown


@pytest.mark.parametrize(
    ("accelerator", "precision", "has_bfloat16"),
    [
        pytest.param("cpu", "32-true", True, marks=pytest.mark.slow),
        ("auto", "bf16-mixed", True),
        pytest.param("auto", "bf16-mixed", False, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_this_cpu_is_planned_by_its_measured_rate_and_free_memory(
    accelerator: str,
    precision: str,
    has_bfloat16: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(plan_module, "free_memory_bytes", lambda device: 3 * 10**9)
    monkeypatch.setattr("embeddings.cli.trainer.has_native_bfloat16", lambda device: has_bfloat16)
    rates = {torch.float32: 40e9, torch.bfloat16: 90e9}
    monkeypatch.setattr(plan_module, "product_rate", rates.__getitem__)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    config = ["--config", small(tmp_path, accelerator=accelerator, precision=precision)]
    table = planned(capsys, *config, "--pairs=100", hardware="")
    # As `fit` would.
    precision = precision if has_bfloat16 else "32-true"
    is_half = precision != "32-true"
    measured = "40 GFLOP/s measured in float32" + " and 90 in bfloat16" * is_half
    assert table["CPU"] == f"2 cores of this CPU, {measured}; {precision}"
    assert re.search(r"memory per process at its peak.*\n(  .*\n)*  total +0\.0 of 3\.0 free\n", TABLES[-1])
    assert not [name for name in table if "GPU" in name]
    gpu = planned(capsys, *config)
    # Equal but for the rate: the operations are those of a GPU.
    peak = 0.4 * 989e12 / (rates[torch.bfloat16 if is_half else torch.float32])
    seconds = [float(value) for value in re.findall(r"([\d.e-]+) (?:to|at) ", table["arithmetic of a step, seconds"])][
        :2
    ]
    on_gpu = float(gpu["arithmetic of a step, seconds"].split()[0])
    assert seconds == pytest.approx([on_gpu * peak / 0.5, on_gpu * peak / 0.1], rel=0.02)
    hours = [float(value) for value in table["hours"].split(" to ")]
    assert hours == pytest.approx([4 * value / 3600 for value in seconds], rel=0.06)
    # With more devices the run is of another machine.
    elsewhere = planned(capsys, *config, "--trainer.accelerator=auto", "--trainer.devices=2", hardware="")
    assert elsewhere["GPUs"].startswith("2 x H100 SXM, ddp, ")


def test_plan_warns_if_a_run_does_not_fit_into_the_free_memory_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "product_rate", lambda dtype: 1e9)
    monkeypatch.setattr(plan_module, "free_memory_bytes", lambda device: 2 * 10**6)
    both = ["--config", small(tmp_path), "--trainer.devices=2"]
    table = planned(capsys, *both, hardware="")
    assert table["CPU"].startswith("2 processes on ")
    # Two processes share the memory and the rate.
    assert table["arithmetic of a step, seconds"].endswith(" of 0.0005 TFLOP/s")
    warning = next(value for name, value in table.items() if name.startswith("warning"))
    assert "do not fit: 90% of 0.001 GB are usable" in warning
    assert warning.endswith("kept_gib, or close other programs")


def test_the_first_line_of_plan_comes_before_its_imports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = []

    def load(target: str) -> Any:
        before.append((target, capsys.readouterr().err))
        return lambda argv: None

    monkeypatch.setattr("embeddings.cli.main.resolve_name", load)
    assert main(["plan"]) == 0
    assert before == [("embeddings.cli.plan:plan", "reading the configs\n")]


@pytest.mark.slow
def test_a_slow_link_limits_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", small(tmp_path)]
    for gpus, link in (("8", "450"), ("16", "50")):
        assert planned(capsys, *config, "--gpus", gpus)["sending it, seconds"].endswith(f" at {link} GB/s")
    fast = planned(capsys, *config, "--gpus=2", "--link-gb=1e9")
    assert fast["limits the step"] == "arithmetic"
    assert fast["share of the peak"] == "0.40 if sending overlaps with arithmetic, 0.40 if not"
    slow = planned(capsys, *config, "--gpus=2", "--link-gb=1e-5")
    assert slow["limits the step"] == "sending"
    assert slow["share of the peak"].startswith("0.00 if")
    seconds, hours = (float(slow[name].split()[0].strip(",")) for name in ("sending it, seconds", "hours"))
    # Four steps; the table has two digits.
    assert hours == pytest.approx(4 * seconds / 3600, rel=0.06)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("fsdp2", component("embeddings.strategies.FSDP2Strategy")),
        ("zero3", component("embeddings.strategies.ZeroStrategy", stage=3)),
        ("zero1", "deepspeed_stage_1"),
        ("fsdp2", "fsdp"),
        ("ddp", "ddp_find_unused_parameters_true"),
    ],
)
def test_a_strategy_is_recognised(
    name: str, strategy: str | dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path, strategy=strategy, precision="bf16-mixed")
    assert planned(capsys, "--config", config, "--gpus=2")["GPUs"] == f"2 x H100 SXM, {name}, bf16-mixed"


def test_a_plan_for_a_gpu_has_its_mini_batches_and_warns_of_a_run_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = component("GradCacheCallback", mini_batch_tokens=64, gpu_mini_batch_tokens=128)
    table = planned(capsys, "--config", small(tmp_path, callbacks=[cache]), "--gpus=1", "--gpu-memory-gb", "0.001")
    assert table["GradCache"].startswith("4 mini-batches")
    warning = next(value for name, value in table.items() if name.startswith("warning"))
    assert "do not fit: 90% of 0.001 GB are usable; the largest part is " in warning
    assert "shard with FSDP2 or ZeRO" in warning


def test_all_gpus_are_those_of_this_machine_and_accumulation_by_epoch_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = component("GradientAccumulationScheduler", scheduling={0: 4})
    words = ["--config", small(tmp_path, accelerator="gpu", callbacks=[schedule]), "--trainer.devices=-1"]
    for num_gpus, says in ((0, "trainer.devices is all GPUs, of which this machine has none, got -1"), (4, "")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        assert main(["plan", *words]) == (0 if num_gpus else 2)
        said = capsys.readouterr()
        assert says in said.err
    assert re.search(r"GPUs +4 x H100 SXM, ddp, ", said.out)
    assert said.out.endswith("GradientAccumulationScheduler is left out: a step is one batch of each process\n")


def test_gradcache_and_a_model_config_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = component("GradCacheCallback", mini_batch_tokens=64)
    config = ["--config", small(tmp_path, callbacks=[cache]), "--model.backbone.name", "nobody/nothing"]
    table = planned(capsys, *config, "--model-config", str(tmp_path / "backbone" / "config.json"))
    # By default half of the free memory keeps graphs.
    assert table["GradCache"] == "8 mini-batches, 100% of the graphs kept"
    assert main(["plan", *config]) == 2
    assert "nobody/nothing: is not on this machine, and its architecture is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", "0"), "gpus must be > 0, got 0"),
        (("--peak-share", "1.5"), "peak_share must be <= 1, got 1.5"),
        (("--query-tokens", "1000"), "data.text.query_max_length must be <= 128"),
        (("--model-config", __file__), f"{__file__}: is not a model config; give the backbone's config.json"),
        (("--recipe", "nothing"), "there is no recipe"),
    ],
)
def test_a_bad_option_is_refused_in_a_line(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path)
    capsys.readouterr()
    assert main(["plan", "--config", config, *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip().splitlines()[-1].startswith("error: ")
    assert says in said.err
    # The hint is about `plan`, not about `fit`.
    assert " fit --config " not in said.err


def test_the_length_of_a_text_is_refused_for_rows_of_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", H100, "--recipe", "small_decoder_mntp", "--query-tokens=9"]) == 2
    assert "query_tokens has no effect on rows of plain text, got 9; set data.row_length" in capsys.readouterr().err


def test_the_command_line_names_no_option_of_a_method() -> None:
    options = ("first_stage", "from_scratch", "masking", "objective", "num_context", "MaskedLM", "CDE", "MoE", "MGH")
    for name in ("fit", "plan"):
        text = (Path(fit.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        assert [option for option in options if option in text] == []


GPUS = {"accelerator": "gpu", "devices": 8, "num_nodes": 2, "strategy": "ddp", "precision": "bf16-mixed"}


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Check a tiny run on two nodes of eight GPUs without any GPU here; returns the printed lines."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def check(trainer=GPUS, *words, **data):
        config = run_config(tmp_path, **{"batch_size": 2, **data})
        config["trainer"] |= trainer
        path = write_config(tmp_path, config)
        before = {found: found.read_bytes() for found in tmp_path.rglob("*") if found.is_file()}
        capsys.readouterr()
        assert main(["fit", "--config", path, "--check", *words]) == 0
        assert {found: found.read_bytes() for found in tmp_path.rglob("*") if found.is_file()} == before
        return capsys.readouterr().out.splitlines()

    return check


STRATEGIES = ["ddp", component("embeddings.strategies.FSDP2Strategy"), component("embeddings.strategies.ZeroStrategy")]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["ddp", "fsdp2", "zero"])
def test_a_run_on_two_nodes_is_described_on_a_machine_without_a_gpu(strategy, checked, tmp_path):
    lines = checked({**GPUS, "strategy": strategy})
    model, *others = lines
    assert model.startswith(f"model: NVEmbedModule on {tmp_path}/backbone: ")
    total, trained, frozen = re.findall(r"[\d,]+(?= parameters| of them| frozen)", model)
    assert (total, frozen) == (trained, "0")
    given = "accelerator gpu, devices 8, num_nodes 2, " + ("strategy ddp, " if strategy == "ddp" else "")
    assert others == [
        "sources:  rows",
        "  pairs     64",
        "global batch: 32 (2 on each of 16 processes)",
        "steps: 4, 2 batches per epoch",
        f"hardware: {given}precision bf16-mixed; not available here, so not tested",
        f"run: {tmp_path}/run/tiny/version_0",
        "resume: no",
        "no error was found, and nothing was written",
    ]


@pytest.mark.parametrize(
    ("trainer", "more", "row", "says"),
    [
        (GPUS, {}, "", "the 64 training rows (batch_size x 16 ranks), got 8"),
        ({}, {}, '{"query": "alone"}\n', "pairs.jsonl:65: field 'positive'"),
        ({}, {"check": True}, "", "--check: must not be in a config"),
        ({}, {"recipe": "quickstart"}, "", "--recipe: must be given once, and not in a config"),
    ],
    ids=["global batch", "bad row", "check in a config", "recipe in a config"],
)
def test_the_check_refuses_what_the_run_would_refuse(trainer, more, row, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = run_config(tmp_path)
    config["trainer"] |= trainer
    with open(tmp_path / "pairs.jsonl", "a") as file:
        file.write(row)
    words = ["fit", "--config", write_config(tmp_path, config | more), *([] if more else ["--check"])]
    assert_refused(capsys, tmp_path, says, main, words)


@pytest.mark.parametrize("has_teacher", [True, False])
def test_everything_that_is_missing_is_named_in_one_line(has_teacher, tmp_path, capsys):
    """A part for each: model, checkpoint, data files, clusters, validation folder, teacher or surrogate vectors."""
    sources = [{"name": name, "path": f"{name}.jsonl"} for name in ("one", "two")]
    sampler = component("embeddings.data.ClusteredBatchSampler", clusters={"one": "group_1", "two": "group_2"})
    config = run_config(tmp_path, sources=sources, sampler=sampler)
    config["trainer"]["callbacks"] = [component("embeddings.callbacks.RetrievalEvaluation", folder="eval")]
    # The architecture of the second is not known.
    model = "mistralai/Mistral-7B-v0.1" if has_teacher else "nobody/unknown"
    config["model"]["init_args"]["backbone"]["name"] = model
    parts = ["--ckpt_path no.ckpt: no such file", model, "one.jsonl: no such file", "two.jsonl: no such file"]
    parts += ["group_1/manifest.json", "group_2/manifest.json", "eval: is not a folder"]
    if has_teacher:
        loss = component("embeddings.losses.SimilarityDistillation", teacher="no_teacher", temperature=0.05)
        config["model"]["init_args"]["loss"] = loss
        parts.append("no_teacher: is neither")
    else:
        for source in sources:
            source["surrogate_vectors"] = f"surrogate_{source['name']}"
        loss = component("embeddings.losses.InfoNCE", false_negative_filter={"margin": 0.0})
        config["model"]["init_args"]["loss"] = loss
        parts += ["surrogate_one/index/manifest.json", "surrogate_two/index/manifest.json"]
    options = ["--ckpt_path", "no.ckpt", "--check"]
    assert main(["fit", "--config", write_config(tmp_path, config), *options]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    found = line.removeprefix(f"error: {len(parts)} errors: ").split(" | ")
    assert len(found) == len(parts), line
    for part in parts:
        assert any(part in each for each in found), part


def test_a_run_that_would_resume_names_its_checkpoint_and_converts_nothing_again(tmp_path, capsys, monkeypatch):
    config = run_config(tmp_path)
    config["trainer"] |= {"max_steps": 2, "callbacks": [component("ModelCheckpoint", every_n_train_steps=1)]}
    path = write_config(tmp_path, config)
    run_trainer(["fit", "--config", path])
    capsys.readouterr()
    monkeypatch.setattr(store, "_convert", lambda *_: pytest.fail("it is converted already"))
    before = sorted(tmp_path.rglob("*"))
    assert main(["fit", "--config", path, "--trainer.max_steps", "4", "--ckpt_path", "auto", "--check"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: "))
    assert re.fullmatch(rf"resume: {tmp_path}/run/tiny/version_0/checkpoints/\S+\.ckpt, step 2", line)
    assert sorted(tmp_path.rglob("*")) == before
