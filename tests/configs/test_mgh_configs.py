"""The MGH configs hold the paper's hyperparameters and build what they configure, on tiny stand-ins."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embeddings.cli.fit import run_trainer
from embeddings.common import TextSettings
from embeddings.data.sources import SourceConfig
from embeddings.models import AnchorTokenPooling, Embedder
from embeddings.modules import MGHCurriculumModule
from embeddings.synthesis.prompts import MGH
from tests.configs.test_nv_embed_configs import flat
from tests.configs.test_nv_embed_tables import CONFIGS, read
from tests.data.rows import graded, write_jsonl
from tests.helpers.runs import backbone_folder, write_config, write_retrieval_folder

# Table 5, synthetic and public data together, and §2.1.
PAPER = {
    "trainer.max_steps": 1600,
    "model.init_args.optimizer.class_path": "torch.optim.Adam",
    "model.init_args.optimizer.init_args.lr": 2e-5,
    "model.init_args.schedule.warmup_steps": 300,
    "model.init_args.lora.rank": 16,
    "model.init_args.lora.alpha": 32,
    "model.init_args.backbone.name": "checkpoints/mntp",
    "model.init_args.backbone.bidirectional": True,
    "model.init_args.pooling.class_path": "embeddings.models.AnchorTokenPooling",
}


def test_the_method_holds_table_5() -> None:
    config = flat(read(CONFIGS / "methods" / "mgh.yaml"))
    assert {key: config[key] for key in PAPER} == PAPER


def test_public_data_alone_have_fewer_steps_and_an_output_of_their_own() -> None:
    both, public = (flat(read(CONFIGS / "methods" / name)) for name in ("mgh.yaml", "mgh_public.yaml"))
    assert {key for key in both | public if both.get(key) != public.get(key)} == {
        "trainer.max_steps",
        "trainer.callbacks+",
    }
    assert public["trainer.max_steps"] == 1000
    with_examples = read(CONFIGS / "data" / "mgh_in_context.yaml")["data"]["init_args"]
    assert with_examples == {"text": {"query_max_length": 2048}, "num_in_context_examples": 5}


def test_the_scale_holds_table_5_and_a_run_is_one_pass_over_the_papers_data() -> None:
    scale = read(CONFIGS / "scales" / "h100x1_batch64.yaml")
    batch_size, accumulate = scale["data"]["init_args"]["batch_size"], scale["trainer"]["accumulate_grad_batches"]
    assert (batch_size, accumulate, scale["trainer"]["devices"]) == (64, 8, 1)
    assert batch_size * accumulate * PAPER["trainer.max_steps"] == pytest.approx(820_000, rel=2e-3)


def test_the_data_holds_the_curriculum_and_the_instructions_of_table_7() -> None:
    init_args = read(CONFIGS / "data" / "mgh.yaml")["data"]["init_args"]
    assert init_args["num_negatives"] == 1
    text = TextSettings(**init_args["text"])
    assert (text.query_max_length, text.document_max_length) == (512, 512)
    # Fig. 5: every text ends in [/INST]; a record's own instruction is framed like a source's.
    assert (text.suffix, text.prompts["document"]) == (" [/INST]", "[INST] ")
    assert text.instruction_prompt("Find it") == "[INST] Instruct: Find it\nQuery: "
    sources = [SourceConfig(**fields) for fields in init_args["sources"]]
    # Wang et al.'s fourteen sets; the synthetic records carry their own instructions.
    assert len(sources) == 14
    assert not any(source.instruction is None for source in sources)
    (synthetic,) = read(CONFIGS / "data" / "mgh_synthetic.yaml")["data"]["init_args"]["sources+"]
    assert SourceConfig(**synthetic).instruction is None
    assert len(synthetic["path"]) == len(MGH.categories)
    assert all(source.in_batch_negatives for source in sources)
    prompts = {source.name: source.query_prompts(text) for source in sources}
    assert len(prompts["nli"]) == len(prompts["quora"]) == 2
    assert prompts["nq"] == (
        "[INST] Instruct: Given a question, retrieve Wikipedia passages that answer the question\nQuery: ",
    )


def small_run(folder: Path, files: list[str], **trainer: Any) -> Any:
    """The files as they are; what must be small, and where data lies, comes after them."""
    small = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "precision": "32-true",
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs"}},
            **trainer,
        },
        "data": {"init_args": {"batch_size": 4, "num_workers": 0, "cache_dir": "cache"}},
    }
    paths = [*files, write_config(folder, small, "small.yaml")]
    return run_trainer(["fit", *(word for path in paths for word in ("--config", path))])


def test_the_method_as_it_is_runs_its_curriculum_on_a_tiny_mistral(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [str(CONFIGS / part) for part in ("base.yaml", "methods/mgh.yaml", "scales/h100x1_batch64.yaml")]
    data = read(CONFIGS / "data" / "mgh.yaml")
    rows = [{**row, "instruction": "Find it"} for row in graded(40)]
    path = write_jsonl(tmp_path / "records.jsonl", rows)
    data["data"]["init_args"]["sources"] = [{"name": "records", "path": str(path)}]
    data["data"]["init_args"]["text"] |= {"query_max_length": 64, "document_max_length": 32}
    backbone = {"backbone": {"name": backbone_folder(tmp_path / "backbone", "mistral")}}
    data["model"] = {"init_args": backbone | {"schedule": {"warmup_steps": 1}}}
    monkeypatch.chdir(tmp_path)
    cli = small_run(tmp_path, [*files, write_config(tmp_path, data, "data.yaml")], max_steps=4)
    assert isinstance(cli.model, MGHCurriculumModule)
    assert isinstance(cli.model.embedder.pooling, AnchorTokenPooling)
    assert cli.trainer.global_step == 4
    assert cli.trainer.callback_metrics["train/level"] == 1
    optimizer = cli.trainer.optimizers[0]
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["weight_decay"] == 0
    exported = Embedder.from_pretrained(tmp_path / "checkpoints" / "mgh")
    assert exported.text.instruction_prompt("Find it") == "[INST] Instruct: Find it\nQuery: "
    assert exported.text.suffix == " [/INST]"


def test_the_docstring_config_trains_on_records_with_missing_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load((CONFIGS / "mgh_docstrings.yaml").read_text())
    assert config["data"]["init_args"]["sampler"]["init_args"]["inner"]["init_args"]["steps_per_epoch"] == 40
    config["model"]["init_args"]["backbone"]["name"] = backbone_folder(tmp_path / "backbone")
    config["data"]["init_args"]["sampler"]["init_args"]["inner"]["init_args"]["steps_per_epoch"] = 8
    config["trainer"]["callbacks"][1]["init_args"]["every_n_steps"] = 8
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "docstrings" / "eval").mkdir(parents=True)
    rows = graded(10) + graded(10, (2, 3, 4)) + graded(10, (4,)) + graded(10, ())
    write_jsonl(tmp_path / "data" / "docstrings" / "train.jsonl.gz", rows)
    write_retrieval_folder(tmp_path / "data" / "docstrings" / "eval" / "validation")
    cli = small_run(tmp_path, [write_config(tmp_path, config, "docstrings.yaml")])
    assert cli.trainer.global_step == 8
    assert cli.trainer.callback_metrics["train/level"] == 1
    assert json.loads((tmp_path / "checkpoints" / "mgh_docstrings" / "modules.json").read_text())
