"""The Nomic Embed v2 configs hold the paper's numbers and build what they configure, on tiny stand-ins."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from embeddings.cli.fit import run_trainer
from embeddings.common import TextSettings
from embeddings.data.checks import with_source_prompts
from embeddings.data.sources import SourceConfig
from embeddings.inference import Encoder
from embeddings.losses import InfoNCE, MatryoshkaInfoNCE
from embeddings.losses.load_balancing import LoadBalancing
from embeddings.models import MeanPooling
from embeddings.modules import ContrastiveModule, MoEEmbedModule
from tests.configs.test_nv_embed_configs import flat
from tests.configs.test_nv_embed_tables import CONFIGS, check_texts, read
from tests.helpers.runs import write_config, write_pairs, write_retrieval_folder
from tests.helpers.tiny import save_backbone, wordpiece_tokenizer
from tests.models.moe import tiny_rotary
from tests.modules.moe_modules import dense_folder

PRETRAINING = ("moe_pretrain", "moe_top1", "moe_every_layer", "moe_dense_pretrain")
FINETUNING = ("moe_finetune", "moe_dense_finetune")
# §4.3 and §4.5: learning rate, warm-up steps and decay.
OPTIMISED = {PRETRAINING: (8e-5, 1000, "cosine"), FINETUNING: (2e-5, 400, "linear")}
# Upcycled layers of twelve and experts a token: §4.3, §7.1, Table 7.
ROUTED = {
    "moe_pretrain": ([1, 3, 5, 7, 9, 11], 2),
    "moe_top1": ([1, 3, 5, 7, 9, 11], 1),
    "moe_every_layer": (list(range(12)), 1),
    "moe_dense_pretrain": ([], None),
}
# The prefixes of the released data config, pre-training's English sets.
SEARCH = {"paq", "gooaq", "yahoo_title_answer", "amazonqa", "yahoo_qa", "yahoo_title_question", "eli5", "squad"}


def method(name: str) -> dict[str, Any]:
    return read(CONFIGS / "methods" / f"{name}.yaml")


def sources(name: str) -> list[SourceConfig]:
    return [
        SourceConfig(**fields) for fields in read(CONFIGS / "data" / f"{name}.yaml")["data"]["init_args"]["sources"]
    ]


def build(config: dict[str, Any]) -> Any:
    parser = ArgumentParser()
    parser.add_subclass_arguments(ContrastiveModule, "model")
    return parser.instantiate_classes(parser.parse_object({"model": config})).model


@pytest.mark.parametrize(("names", "expected"), OPTIMISED.items())
def test_methods_hold_sections_4_3_and_4_5(names: tuple[str, ...], expected: tuple[float, int, str]) -> None:
    for name in names:
        config = flat(method(name))
        found = (
            config["model.init_args.optimizer.init_args.lr"],
            config["model.init_args.schedule.warmup_steps"],
            config["model.init_args.schedule.decay"],
        )
        assert found == expected, name
        assert config["model.init_args.loss.init_args.temperature"] == 0.02
        assert config["model.init_args.optimizer.init_args.weight_decay"] == 0.01
        assert config["trainer.max_epochs"] == 1


@pytest.mark.parametrize(
    ("other", "name", "differs"),
    [
        ("moe_pretrain", "moe_top1", {"upcycling.mode", "upcycling.top_k"}),
        ("moe_top1", "moe_every_layer", {"upcycling.first", "upcycling.every"}),
        ("moe_pretrain", "moe_dense_pretrain", {"upcycling", "load_balancing"}),
        ("moe_finetune", "moe_dense_finetune", {"initial_model", "load_balancing"}),
    ],
)
def test_a_method_differs_from_another_where_it_says_so(other: str, name: str, differs: set[str]) -> None:
    one, two = flat(method(other)), flat(method(name))
    found = {key for key in one | two if one.get(key, "absent") != two.get(key, "absent")} - {"trainer.callbacks+"}
    # A section that is null in one file is one difference, not as many as it has numbers in the other.
    null = tuple(f"{key}." for key in found if two.get(key, "absent") is None)
    found = {key for key in found if not key.startswith(null)} if null else found
    assert found == {f"model.init_args.{key}" for key in differs}


def test_fine_tuning_starts_where_pre_training_was_exported_and_no_two_methods_share_a_place() -> None:
    names = (*PRETRAINING, *FINETUNING)
    outputs = {name: method(name)["trainer"]["callbacks+"][-1]["init_args"]["output"] for name in names}
    assert len(set(outputs.values())) == len(names)
    for phase in ("moe", "moe_dense"):
        assert method(f"{phase}_finetune")["model"]["init_args"]["initial_model"] == outputs[f"{phase}_pretrain"]


@pytest.mark.parametrize("name", PRETRAINING)
def test_pre_training_is_built_on_a_tiny_stand_in_of_twelve_layers(name: str, tmp_path: Path) -> None:
    config = method(name)["model"]
    folder = save_backbone(str(tmp_path), tiny_rotary(dropout=0.1, num_layers=12), wordpiece_tokenizer())
    config["init_args"]["backbone"]["name"] = folder
    module = build(config)
    assert isinstance(module, MoEEmbedModule)
    layers, top_k = ROUTED[name]
    assert module.moe_layers == layers
    backbone = module.embedder.backbone
    if layers:
        settings = backbone.config
        # One expert's weight divided by itself is 1 for good: the router would learn nothing from the vectors.
        assert (settings.num_experts, settings.experts_per_token, settings.renormalize_experts) == (8, top_k, top_k > 1)
    assert module.load_balancing == (LoadBalancing(1.0, "balanced") if layers else None)
    assert type(module.loss) is InfoNCE
    assert isinstance(module.embedder.pooling, MeanPooling)
    assert {part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)} <= {0.0}
    assert any(getattr(part, "gradient_checkpointing", False) for part in backbone.modules())
    optimizer = module._optimizer([torch.nn.Parameter(torch.ones(2, 2))])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert module._schedule.scheduler(optimizer, 100_000).get_last_lr()[0] == pytest.approx(8e-5 / 1000)


@pytest.mark.parametrize("name", FINETUNING)
def test_fine_tuning_is_built_on_a_tiny_stand_in(name: str, tmp_path: Path) -> None:
    earlier, config = (method(part)["model"] for part in (name.replace("finetune", "pretrain"), name))
    earlier["init_args"]["backbone"]["name"] = dense_folder(tmp_path / "dense")
    build(earlier).embedder.save_pretrained(tmp_path / "start")
    config["init_args"]["initial_model"] = str(tmp_path / "start")
    module = build(config)
    is_dense = "dense" in name
    assert module.moe_layers == ([] if is_dense else [1])
    assert module.load_balancing == (None if is_dense else LoadBalancing(0.0))
    assert isinstance(module.loss, MatryoshkaInfoNCE)
    assert (module.loss.widths, module.loss.weights) == ((768, 256), (0.5, 0.5))


def test_pre_training_data_are_the_release_s_english_sets_and_the_languages_of_section_7_2() -> None:
    by_name = {source.name: source for source in sources("moe_pretrain")}
    others = {f"{corpus}_{code}" for corpus in ("mc4", "cc_news") for code in ("ar", "es", "hi", "sw", "zh")}
    assert len(by_name) == 39
    assert others < set(by_name)
    assert len(set(by_name) - others) == 29
    for name, source in by_name.items():
        expected = ("search_query: ", "search_document: ") if name in SEARCH | others else None
        prompts = (*source.query_prompts(TextSettings()), source.document_prompt)
        assert prompts == expected if expected else prompts in {("clustering: ",) * 2, ("classification: ",) * 2}, name
        assert source.path == f"${{EMBED_TRAIN_DATA}}/moe_pretrain/{name}.parquet"
    assert set(by_name) > SEARCH


def test_fine_tuning_data_are_miracl_in_sixteen_languages_and_six_english_sets() -> None:
    listed = sources("moe_finetune")
    assert len({source.name for source in listed}) == len(listed) == 22
    assert sum(source.name.startswith("miracl_") for source in listed) == 16
    assert {(*source.query_prompts(TextSettings()), source.document_prompt) for source in listed} == {
        ("search_query: ", "search_document: ")
    }
    assert all(source.path == f"${{EMBED_TRAIN_DATA}}/moe_finetune/{source.name}.parquet" for source in listed)


@pytest.mark.parametrize("phase", ["pretrain", "finetune"])
def test_a_trained_model_knows_the_prefixes_of_search_and_pools_them(phase: str) -> None:
    text = TextSettings(**read(CONFIGS / "data" / f"moe_{phase}.yaml")["data"]["init_args"]["text"])
    settings = with_source_prompts(text, sources(f"moe_{phase}"))
    assert (settings.prompts["query"], settings.prompts["document"]) == ("search_query: ", "search_document: ")
    assert settings.pool_prompt
    if phase == "pretrain":
        assert settings.prompts["agnews"] == "classification: "


def test_data_files_name_the_public_source_of_every_set() -> None:
    for phase, groups in (("pretrain", 3), ("finetune", 7)):
        text = (CONFIGS / "data" / f"moe_{phase}.yaml").read_text(encoding="utf-8")
        assert len(re.findall(r"# public source[\w ]*: [\w/.-]+", text)) == groups


def test_no_config_holds_a_path_of_one_machine_or_a_line_too_long() -> None:
    files = [*CONFIGS.glob("*/moe_*.yaml"), CONFIGS / "moe_docstrings.yaml"]
    assert len(files) == 10
    check_texts(files)


def small_run(folder: Path, files: list[str], **init_args: Any) -> Any:
    """The files as they are; what must be small, and where data lies, comes after them."""
    small = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "num_nodes": 1,
            "precision": "32-true",
            "strategy": "auto",
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs"}},
        },
        "model": {"init_args": {"schedule": {"warmup_steps": 1}, **init_args}},
        "data": {
            "init_args": {
                "batch_size": 4,
                "num_workers": 0,
                "cache_dir": "cache",
                "text": {"query_max_length": 48, "document_max_length": 48},
            }
        },
    }
    paths = [*files, write_config(folder, small, "small.yaml")]
    return run_trainer(["fit", *(word for path in paths for word in ("--config", path))])


def phase_files(folder: Path, phase: str, scale: str) -> list[str]:
    """Base, method, scale, and the data file over one set of twelve pairs."""
    data = read(CONFIGS / "data" / f"moe_{phase}.yaml")
    source = data["data"]["init_args"]["sources"][-1] | {"path": str(write_pairs(folder / "pairs.jsonl", num_pairs=12))}
    data["data"]["init_args"]["sources"] = [source]
    parts = ("base.yaml", f"methods/moe_{phase}.yaml", f"scales/{scale}.yaml")
    return [*(str(CONFIGS / part) for part in parts), write_config(folder, data, f"{phase}.yaml")]


def test_fine_tuning_starts_from_what_pre_training_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both methods name their outputs, and the second its start, relative to the working directory.
    files = {
        phase: phase_files(tmp_path, phase, scale)
        for phase, scale in (("pretrain", "h100x16_batch16384"), ("finetune", "h100x8_batch256"))
    }
    monkeypatch.chdir(tmp_path)
    backbone = {"name": dense_folder(tmp_path / "dense")}
    first = small_run(tmp_path, files["pretrain"], backbone=backbone)
    metrics = first.trainer.callback_metrics
    assert first.trainer.global_step == 3
    assert metrics["train/loss"] == pytest.approx(float(metrics["train/contrastive"] + metrics["train/load_balancing"]))

    optimizer = {"init_args": {"lr": 0.0, "weight_decay": 0.0}}
    second = small_run(tmp_path, files["finetune"], loss={"init_args": {"widths": [32, 8]}}, optimizer=optimizer)
    metrics = second.trainer.callback_metrics
    # The routing is logged and weighs nothing, and steps of length zero end where pre-training did.
    assert metrics["train/loss"] == pytest.approx(float(metrics["train/contrastive"]))
    assert {"train/load_balancing", "train/loss_32", "train/loss_8"} <= set(metrics)
    before, after = first.model.embedder.state_dict(), second.model.embedder.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], weight) for name, weight in after.items())

    encoder = Encoder.from_pretrained(str(tmp_path / "checkpoints" / "moe_finetune"), precision="float32")
    assert encoder.embedder.text.prompts["query"] == "search_query: "
    vectors = encoder.encode(["the quick fox", "a lazy dog"], role="query")
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() <= 1e-5
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


def test_the_docstring_config_trains_at_both_widths_and_logs_its_routing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load((CONFIGS / "moe_docstrings.yaml").read_text(encoding="utf-8"))
    assert config["data"]["init_args"]["sampler"]["init_args"]["steps_per_epoch"] == 40
    assert config["model"]["init_args"]["loss"]["init_args"]["widths"] == [384, 128]
    config["model"]["init_args"]["loss"]["init_args"]["widths"] = [32, 8]
    config["data"]["init_args"]["sampler"]["init_args"]["steps_per_epoch"] = 2
    for callback in config["trainer"]["callbacks"][1:3]:
        callback["init_args"]["every_n_steps"] = 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "docstrings" / "eval").mkdir(parents=True)
    write_pairs(tmp_path / "data" / "docstrings" / "train.jsonl.gz")
    write_retrieval_folder(tmp_path / "data" / "docstrings" / "eval" / "validation")
    backbone = {"name": dense_folder(tmp_path / "dense")}
    cli = small_run(tmp_path, [write_config(tmp_path, config, "docstrings.yaml")], backbone=backbone)
    assert cli.trainer.global_step == 2
    assert {"train/loss_32", "train/loss_8", "routing/load_entropy", "val/ndcg_at_10"} <= set(
        cli.trainer.callback_metrics
    )
    assert json.loads((tmp_path / "checkpoints" / "moe_docstrings" / "modules.json").read_text())
