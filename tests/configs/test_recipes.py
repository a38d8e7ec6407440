"""Every recipe, scale, sweep and job config is parsed as by the command line."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from embeddings.cli.fit import check_arguments, run_trainer
from embeddings.cli.main import main
from embeddings.cli.parser import read_recipes
from embeddings.cli.sweep import Sweep
from tests.configs.files import CONFIGS, read
from tests.helpers.runs import write_config

RECIPES = read_recipes()


# Number of sources with which each recipe is parsed; jsonargparse needs seconds for forty. `test_data_files` reads all.
NUM_PARSED = 1


def shortened(path: str, folder: Path) -> str:
    """A copy of a config with its first source only; the config itself if it has no more."""
    content, is_short = read(Path(path)), False
    arguments = content.get("data", {}).get("init_args", {})
    for key in ("sources", "sources+"):
        if len(arguments.get(key, ())) > NUM_PARSED:
            arguments[key], is_short = arguments[key][:NUM_PARSED], True
    return write_config(folder, content, Path(path).name) if is_short else path


def listed(paths: list[str]) -> list[dict[str, Any]]:
    """The sources after merging config files."""
    found: list[dict[str, Any]] = []
    for path in paths:
        arguments = read(Path(path)).get("data", {}).get("init_args", {})
        found = [*arguments.get("sources", found), *arguments.get("sources+", ())]
    return found


def test_each_recipe_writes_its_model_into_a_folder_of_its_own():
    """The last `ExportModel` of its configs counts, as in `fit`."""
    folders = {}
    for name, recipe in RECIPES.items():
        contents = [read(Path(path)).get("trainer", {}) for path in recipe["configs"].split()]
        callbacks = [
            each for content in contents for key in ("callbacks", "callbacks+") for each in content.get(key, ())
        ]
        outputs = [each["init_args"]["output"] for each in callbacks if "output" in each.get("init_args", {})]
        folders[name] = outputs[-1]
    assert len(folders) == len(RECIPES) > 20
    assert len(set(folders.values())) == len(folders)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_parses_and_keeps_the_callbacks_of_all_files(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EMBED_TRAIN_DATA", "data")
    paths = RECIPES[name]["configs"].split()
    with pytest.raises(SystemExit) as stop:
        run_trainer(["fit", *(f"--config={shortened(path, tmp_path)}" for path in paths), "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    sources = listed(paths)
    assert printed["model"]["class_path"].startswith("embeddings.modules.")
    assert printed["data"]["class_path"].startswith("embeddings.data.")
    if name.startswith("cde") and name != "cde_docstrings":
        # Context documents come from the rank's batch.
        assert printed["data"]["init_args"]["batch_size"] >= printed["model"]["init_args"]["context"]["num_context"]
        # One hard negative in the best large model, none in the small setting (§6, §10.5).
        assert printed["data"]["init_args"]["num_negatives"] == (name == "cde_supervised_h100x8")
    if name.startswith("nv_embed") and "smollm2" not in name:
        # The data file does not change the scale's batch size: 8 ranks of 16 are the paper's 128.
        assert (printed["data"]["init_args"]["batch_size"], printed["trainer"]["devices"]) == (16, 8)
        assert printed["data"]["init_args"]["num_negatives"] == 7
        check_nv_embed_sources(name, sources)
    if name.startswith(("mgh_h", "mgh_public")):
        # Tables 1 and 2: with the synthetic records, without, and with solved examples before queries.
        data, names = printed["data"]["init_args"], [source["name"] for source in sources]
        facts = (len(names), "synthetic" in names, data["num_in_context_examples"], printed["trainer"]["max_steps"])
        expected = {"67.0": (15, True, 0, 1600), "65.87": (14, False, 0, 1000), "66.43": (14, False, 5, 1000)}
        assert facts == expected[RECIPES[name]["paper_value"]]
        assert data["text"]["query_max_length"] == (2048 if "in_context" in name else 512)
    if name.startswith("moe") and name != "moe_docstrings":
        check_moe(name, printed)
    asked = []
    for path in paths:
        trainer = read(Path(path)).get("trainer", {})
        asked += [callback["class_path"] for key in ("callbacks", "callbacks+") for callback in trainer.get(key, [])]
    assert len(asked) >= 2
    found = [callback["class_path"].rpartition(".")[2] for callback in printed["trainer"]["callbacks"]]
    assert found == [path.rpartition(".")[2] for path in asked]


def check_nv_embed_sources(name, sources):
    """S3 is S2 plus the synthetic samples; adding them loses no source of S2 (Table 4)."""
    synthetic = [source for source in sources if source["name"] == "synthetic"]
    assert len(sources) - len(synthetic) == (16 if "stage1" in name else 42)
    assert [source["max_rows"] for source in synthetic] == ([120_000] if "synthetic" in name else [])
    assert not any(source.get("in_batch_negatives", True) for source in synthetic)
    # Table 4: S2 without the synthetic samples, S3 with them, and its first row.
    paper_value = {
        "nv_embed_stage2_h100x8": "72.07",
        "nv_embed_stage2_synthetic_h100x8": "72.31",
        "nv_embed_single_stage_synthetic_h100x8": "70.83",
    }.get(name, "")
    assert RECIPES[name]["paper_value"] == paper_value


def check_moe(name, printed):
    """Nomic Embed v2's numbers in the whole run (§4.3, §4.5, §7.1), whatever file they are in."""
    trainer, model, data = printed["trainer"], printed["model"]["init_args"], printed["data"]["init_args"]
    is_finetuning, is_dense = "finetune" in name, "dense" in name
    ranks = trainer["devices"] * trainer["num_nodes"]
    assert ranks == (8 if is_finetuning else 16)
    batch = ranks * data["batch_size"] * trainer["accumulate_grad_batches"]
    assert (batch, trainer["max_epochs"]) == (256 if is_finetuning else 16_384, 1)
    assert data["num_negatives"] == (10 if is_finetuning else 0)
    text = data["text"]
    ablated = name in ("moe_top1_h100x16", "moe_every_layer_h100x16")
    lengths = (512, 512) if is_finetuning else (128, 128) if ablated else (32, 256)
    assert (text["query_max_length"], text["document_max_length"]) == lengths
    assert text["pool_prompt"]
    assert model["loss"]["init_args"]["temperature"] == 0.02
    assert data["sampler"]["class_path"] == "embeddings.data.HomogeneousBatchSampler"
    coefficient = (model["load_balancing"] or {"coefficient": None})["coefficient"]
    assert coefficient == (None if is_dense else 0 if is_finetuning else 1)
    assert (model["upcycling"] is None) == (is_dense or is_finetuning)
    assert model["backbone"]["gradient_checkpointing"]


def test_the_recipes_of_the_small_decoder_are_a_chain():
    """Each starts from the model that an earlier one writes, and all of them read the same pairs."""
    contents = {
        name: [read(Path(path)) for path in RECIPES[name]["configs"].split()] for name in RECIPES if "smollm2" in name
    }
    outputs, starts = {}, {}
    for name, files in contents.items():
        callbacks = [
            each for file in files for key in ("callbacks", "callbacks+") for each in file["trainer"].get(key, ())
        ]
        outputs[name] = [each["init_args"]["output"] for each in callbacks if "output" in each["init_args"]][-1]
        model = {key: value for file in files for key, value in file["model"]["init_args"].items()}
        starts[name] = model.get("initial_model", model["backbone"]["name"])
    assert starts == {
        "mntp_smollm2": "SmolLM2-135M",
        "nv_embed_smollm2_stage1": outputs["mntp_smollm2"],
        "nv_embed_smollm2": outputs["nv_embed_smollm2_stage1"],
        "mgh_smollm2": outputs["mntp_smollm2"],
    }


def test_only_rows_with_a_value_have_the_status_measured():
    assert len(RECIPES) >= 7
    assert sum(name.startswith("cde") for name in RECIPES) >= 4
    for row in RECIPES.values():
        assert row["status"] in {"planned", "measured", "out of memory", "superseded"}
        assert (row["status"] == "measured") == bool(row["value"])


# Scales under which ranks share the weights.
SHARDED = ("h100x8_fsdp2", "h100x16_fsdp2", "h100x8_zero1", "h100x8_zero2", "h100x16_zero3")


@pytest.mark.parametrize(
    ("scale", "method"),
    [*((scale, "mgh") for scale in SHARDED), (SHARDED[0], "nv_embed_stage1"), (SHARDED[0], "moe_finetune")],
)
def test_a_scale_that_shards_weights_parses_with_the_methods(scale: str, method: str, tmp_path: Path) -> None:
    parts = ("base", f"methods/{method}", f"scales/{scale}", f"data/{method}")
    check_arguments(["fit", *(f"--config={shortened(f'{CONFIGS}/{part}.yaml', tmp_path)}" for part in parts)])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("scales/*.yaml")), ids=lambda path: path.stem)
def test_the_name_of_a_scale_has_its_number_of_devices(path: Path) -> None:
    trainer: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["trainer"]
    num_ranks = trainer["devices"] * trainer.get("num_nodes", 1)
    assert path.stem == "cpu" or path.stem.startswith(f"h100x{num_ranks}")
    assert ("strategy" in trainer) == (num_ranks > 1)
    assert trainer["precision"] == "bf16-mixed"


SWEEPS = {"pooling": 9, "temperature": 12}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_has_its_runs_and_parses(name: str, tmp_path: Path) -> None:
    assert {path.stem for path in (CONFIGS / "sweeps").iterdir()} == set(SWEEPS)
    if name == "temperature":
        pytest.importorskip("optuna")
    runs = Sweep(CONFIGS / "sweeps" / f"{name}.yaml", tmp_path).runs()
    assert len({run.folder for run in runs}) == SWEEPS[name]
    for run in runs[:: SWEEPS[name] // 3]:
        check_arguments(run.words)
    assert list(tmp_path.iterdir()) == []


# Sums of examples over categories: 310K with 180M tokens (MGH), 3 x 40,000 over 60,000 tasks (NV-Embed).
JOBS = {"mgh": (310_000, None, 180_000_000), "nv_embed": (120_000, 60_000, None)}


@pytest.mark.parametrize("name", JOBS)
def test_a_synthesis_config_parses_and_plans(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert {path.stem for path in (CONFIGS / "jobs").iterdir()} == {f"synthesize_{name}" for name in JOBS}
    config = str(CONFIGS / "jobs" / f"synthesize_{name}.yaml")
    line = ["synthesize", "--config", config, "--endpoint", "http://h/v1", "--model", "m"]
    assert main([*line, "--output", str(tmp_path / "out"), "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["method"] == name
    assert (printed["num_examples"], printed["num_brainstormed"], printed["token_budget"]) == JOBS[name]
