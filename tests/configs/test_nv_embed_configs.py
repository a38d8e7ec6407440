"""The NV-Embed configs hold the paper's hyperparameters and parse as what they configure."""

import importlib
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import auto_cli

from embeddings.common import TextSettings
from embeddings.data.sources import SourceConfig
from embeddings.losses import InfoNCE
from embeddings.models import BackboneConfig, LatentAttentionPooling, LoraSettings
from embeddings.training.optim import Schedule
from tests.configs.test_nv_embed_tables import CONFIGS, read

# Table 11 and Appendix C: (stage 1, stage 2).
PAPER = {
    "trainer.max_steps": (20_000, 18_000),
    "model.init_args.optimizer.init_args.lr": (2e-5, 1.5e-5),
    "model.init_args.optimizer.init_args.weight_decay": (0.03, 0.03),
    "model.init_args.schedule.warmup_steps": (50, 50),
    "model.init_args.schedule.decay": ("linear", "linear"),
    "model.init_args.lora.rank": (16, 16),
    "model.init_args.lora.alpha": (32, 32),
    "model.init_args.lora.dropout": (0.1, 0.1),
    "model.init_args.pooling.init_args.num_latents": (512, 512),
    "model.init_args.pooling.init_args.num_heads": (8, 8),
    "model.init_args.backbone.bidirectional": (True, True),
    "model.init_args.backbone.dtype": ("bfloat16", "bfloat16"),
}


def flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in content.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def method(stage: int) -> dict[str, Any]:
    return flat(read(CONFIGS / "methods" / f"nv_embed_stage{stage}.yaml"))


@pytest.mark.parametrize("stage", [1, 2])
def test_methods_hold_table_11(stage: int) -> None:
    config = method(stage)
    assert {key: config[key] for key in PAPER} == {key: values[stage - 1] for key, values in PAPER.items()}


def test_stage_2_differs_from_stage_1_where_the_paper_says_so_and_nowhere_else() -> None:
    first, second = method(1), method(2)
    assert {key for key in first | second if first.get(key) != second.get(key)} == {
        "model.init_args.initial_model",
        "model.init_args.loss.init_args.in_batch_negatives",
        "model.init_args.optimizer.init_args.lr",
        "trainer.max_steps",
        "trainer.callbacks+",
    }


def test_the_single_stage_of_table_4_differs_from_stage_1_in_its_loss_alone() -> None:
    first, single = method(1), flat(read(CONFIGS / "methods" / "nv_embed_single_stage.yaml"))
    changed = {key: value for key, value in single.items() if first.get(key) != value}
    assert first.keys() <= single.keys()
    assert changed.pop("trainer.callbacks+")[0]["init_args"] == {"output": "checkpoints/nv_embed_single_stage"}
    loss = "model.init_args.loss.init_args."
    assert changed == {
        f"{loss}in_batch_negatives": "on",
        f"{loss}mask_same_text": False,
        f"{loss}mask_same_class": False,
    }


@pytest.mark.parametrize("stage", [1, 2])
def test_loss_schedule_and_optimiser_of_a_method_can_be_made(stage: int) -> None:
    config = read(CONFIGS / "methods" / f"nv_embed_stage{stage}.yaml")["model"]["init_args"]
    loss = InfoNCE(**config["loss"]["init_args"])
    assert loss.in_batch_negatives == ("source" if stage == 1 else "off")
    weight = torch.nn.Parameter(torch.ones(2, 2))
    package, name = config["optimizer"]["class_path"].rsplit(".", 1)
    optimizer = getattr(importlib.import_module(package), name)([weight], **config["optimizer"]["init_args"])
    schedule = Schedule(**config["schedule"])
    assert schedule.factor(49, 20_000) == schedule.factor(50, 20_000) == 1.0
    assert schedule.scheduler(optimizer, 20_000).get_last_lr()[0] == pytest.approx(
        config["optimizer"]["init_args"]["lr"] / 50
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_backbone_adapters_and_pooling_of_a_method_are_options_that_exist(stage: int) -> None:
    config = read(CONFIGS / "methods" / f"nv_embed_stage{stage}.yaml")["model"]["init_args"]
    assert config["pooling"]["class_path"] == "embeddings.models.LatentAttentionPooling"
    assert BackboneConfig(**config["backbone"]).bidirectional
    assert LoraSettings(**config["lora"]) == LoraSettings(rank=16, alpha=32, dropout=0.1)
    # Made small: at the backbone's 4096 the block has 740 M parameters.
    pooling = LatentAttentionPooling(hidden_size=32, **config["pooling"]["init_args"])
    assert (tuple(pooling.latents.shape), pooling.num_heads) == ((512, 32), 8)


@pytest.mark.parametrize(("stage", "num_sources"), [(1, 16), (2, 42)])
def test_data_configs_parse_as_what_they_configure(stage: int, num_sources: int, tmp_path: Path) -> None:
    content = read(CONFIGS / "data" / f"nv_embed_stage{stage}.yaml")
    assert content["data"]["class_path"] == "embeddings.data.EmbeddingDataModule"
    init_args = content["data"]["init_args"]
    config = tmp_path / "data.yaml"
    config.write_text(yaml.safe_dump({name: init_args[name] for name in ("sources", "text")}), encoding="utf-8")
    sources, text = auto_cli(_made, args=["--config", str(config)], as_positional=False)
    assert len(sources) == num_sources
    for source in sources:
        assert isinstance(source, SourceConfig)
        assert source.in_batch_negatives == (stage == 1), source.name
        prompts = source.query_prompts(text)
        assert all(prompt.startswith("Instruct: ") and prompt.endswith("\nQuery: ") for prompt in prompts)
    assert text == TextSettings(query_max_length=512, document_max_length=512, append_eos=True)
    assert init_args["num_negatives"] == 7


def test_table_5_by_label_is_the_second_stages_file_after_the_edit_that_it_names(tmp_path: Path) -> None:
    path = CONFIGS / "data" / "nv_embed_stage2.yaml"
    (line,) = (line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#   sed "))
    command = shlex.split(line.removeprefix("#").split(" > ")[0].replace("THIS_FILE", str(path)))
    edited = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (tmp_path / "by_label.yaml").write_text(edited, encoding="utf-8")
    by_example, by_label = (
        {source["name"]: SourceConfig(**source) for source in read(file)["data"]["init_args"]["sources"]}
        for file in (path, tmp_path / "by_label.yaml")
    )
    assert by_example.keys() == by_label.keys()
    changed = [name for name, source in by_label.items() if source != by_example[name]]
    assert len(changed) == 16
    for name in changed:
        assert (by_example[name].conversion, by_label[name].conversion) == ("class_by_example", "class_by_label")
        assert by_label[name].label_texts == {}


def _made(sources: list[SourceConfig], text: TextSettings) -> tuple[list[SourceConfig], TextSettings]:
    return sources, text
