"""The method configs have the numbers of their papers, differ as documented, and can be instantiated."""

from pathlib import Path
from typing import Any

import pytest
import torch

from embeddings.losses.load_balancing import LoadBalancing
from embeddings.modules import ContrastiveModule, MoEEmbedModule
from tests.configs.files import CONFIGS, build, check_texts, init_args, method, read
from tests.helpers.tiny import save_backbone, wordpiece_tokenizer
from tests.models.moe import tiny_rotary

# NV-Embed, Table 11 and Appendix C.
NV_EMBED = {
    "model.class_path": "embeddings.modules.NVEmbedModule",
    "trainer.max_steps": 20_000,
    "optimizer.init_args.lr": 2e-5,
    "optimizer.init_args.weight_decay": 0.03,
    "schedule.warmup_steps": 50,
    "schedule.decay": "linear",
    "lora.rank": 16,
    "lora.alpha": 32,
    "lora.dropout": 0.1,
    "pooling.class_path": "embeddings.models.LatentAttentionPooling",
    "pooling.init_args.num_latents": 512,
    "pooling.init_args.num_heads": 8,
    "backbone.bidirectional": True,
    "backbone.dtype": "bfloat16",
}
# Contextual Document Embeddings, §5 and §6.
CDE = {
    "model.class_path": "embeddings.modules.CDEModule",
    "loss.init_args.gather_across_devices": False,
    "loss.init_args.false_negative_filter.margin": 0.0,
    "backbone.dropout": 0.0,
    "context.num_soft_prompts": 8,
    "context.residual_projection": True,
    "trainer.max_epochs": 3,
    "optimizer.class_path": "torch.optim.Adam",
    "optimizer.init_args.lr": 2e-5,
    "schedule.warmup_steps": 1000,
    "schedule.decay": "linear",
    "loss.init_args.temperature": 0.02,
    "backbone.name": "checkpoints/nomic-bert-2048",
    "context.num_context": 512,
    "context.dropout_fraction": 0.005,
}
# "Negative Matters", Table 5, synthetic and public data together, and §2.1.
MGH = {
    "trainer.max_steps": 1600,
    "optimizer.class_path": "torch.optim.Adam",
    "optimizer.init_args.lr": 2e-5,
    "schedule.warmup_steps": 300,
    "lora.rank": 16,
    "lora.alpha": 32,
    "backbone.name": "checkpoints/mntp",
    "backbone.bidirectional": True,
    "pooling.class_path": "embeddings.models.AnchorTokenPooling",
}
# Nomic Embed v2, §4.3 and §4.5.
MOE = {
    "model.class_path": "embeddings.modules.MoEEmbedModule",
    "optimizer.class_path": "torch.optim.AdamW",
    "trainer.max_epochs": 1,
    "optimizer.init_args.lr": 8e-5,
    "optimizer.init_args.weight_decay": 0.01,
    "schedule.warmup_steps": 1000,
    "schedule.decay": "cosine",
    "loss.init_args.temperature": 0.02,
}
MOE_FINETUNE = MOE | {"optimizer.init_args.lr": 2e-5, "schedule.warmup_steps": 400, "schedule.decay": "linear"}
MOE_FINETUNE |= {"loss.class_path": "embeddings.losses.MatryoshkaInfoNCE", "loss.init_args.widths": [768, 256]}
PAPERS: dict[str, dict[str, Any]] = {
    "nv_embed_stage1": NV_EMBED,
    "nv_embed_stage2": NV_EMBED
    | {"trainer.max_steps": 18_000, "optimizer.init_args.lr": 1.5e-5, "loss.init_args.in_batch_negatives": "off"},
    "cde_unsupervised": CDE,
    "cde_supervised": CDE | {"trainer.max_epochs": 4},
    "cde_small": CDE | {"context.num_context": 64, "backbone.num_layers": 6},
    "cde_small_supervised": CDE | {"context.num_context": 64, "backbone.num_layers": 6},
    "mgh": MGH,
    "mgh_public": MGH | {"trainer.max_steps": 1000},
    "moe_pretrain": MOE,
    "moe_top1": MOE,
    "moe_every_layer": MOE,
    "moe_dense_pretrain": MOE,
    "moe_finetune": MOE_FINETUNE | {"load_balancing.coefficient": 0.0},
    "moe_dense_finetune": MOE_FINETUNE,
    # The release's train_configs/mntp/Mistral.json and run_mntp.py.
    "mntp": {
        "trainer.max_steps": 1000,
        "trainer.val_check_interval": 100,
        "objective": "mntp",
        "backbone.name": "mistralai/Mistral-7B-Instruct-v0.2",
        "backbone.dtype": "bfloat16",
        "masking.probability": 0.8,
        "masking.mask_fraction": 1.0,
        "masking.mask_token": "_",
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.dropout": 0.05,
        "optimizer.init_args.lr": 5e-5,
    },
    # Nomic Embed v2, §4.1, then the released mmlm.yaml.
    "mlm_adapt": {
        "trainer.max_steps": 10_000,
        "trainer.gradient_clip_val": None,
        "objective": "mlm",
        "masking.probability": 0.3,
        "optimizer.init_args.lr": 4e-4,
        "optimizer.init_args.betas": [0.9, 0.98],
        "optimizer.init_args.weight_decay": 0.0,
        "schedule.warmup_steps": 1000,
    },
}
LOSS = "loss.init_args."
# Two methods, and the keys of module and trainer in which they differ, except outputs.
DIFFERENCES = [
    (
        "nv_embed_stage1",
        "nv_embed_stage2",
        {"initial_model", f"{LOSS}in_batch_negatives", "optimizer.init_args.lr", "trainer.max_steps"},
    ),
    # The single stage of Table 4.
    (
        "nv_embed_stage1",
        "nv_embed_single_stage",
        {f"{LOSS}{key}" for key in ("in_batch_negatives", "mask_same_text", "mask_same_class")},
    ),
    (
        "cde_unsupervised",
        "cde_small",
        {"backbone.num_layers", "backbone.gradient_checkpointing", "context.num_context"},
    ),
    ("cde_unsupervised", "cde_supervised", {"initial_model", "trainer.max_epochs"}),
    ("cde_small", "cde_small_supervised", {"initial_model"}),
    ("mgh", "mgh_public", {"trainer.max_steps"}),
    ("moe_pretrain", "moe_top1", {"upcycling.mode", "upcycling.top_k"}),
    ("moe_top1", "moe_every_layer", {"upcycling.first", "upcycling.every"}),
    ("moe_pretrain", "moe_dense_pretrain", {"upcycling", "load_balancing"}),
    ("moe_finetune", "moe_dense_finetune", {"initial_model", "load_balancing"}),
]
# A phase, and the one that starts from its output.
PHASES = {
    "nv_embed_stage1": "nv_embed_stage2",
    "cde_small": "cde_small_supervised",
    "cde_unsupervised": "cde_supervised",
    "moe_pretrain": "moe_finetune",
    "moe_dense_pretrain": "moe_dense_finetune",
}
# Upcycled layers of twelve and experts a token: Nomic Embed v2, §4.3, §7.1, Table 7.
ROUTED = {
    "moe_pretrain": ([1, 3, 5, 7, 9, 11], 2),
    "moe_top1": ([1, 3, 5, 7, 9, 11], 1),
    "moe_every_layer": (list(range(12)), 1),
    "moe_dense_pretrain": ([], None),
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_method_has_its_papers_numbers(name: str) -> None:
    config = method(name)
    assert {key: config[key] for key in PAPERS[name]} == PAPERS[name]


def test_every_method_is_tested_here() -> None:
    names = {path.stem for path in (CONFIGS / "methods").iterdir()}
    assert names == set(PAPERS) | {"nv_embed_single_stage"}
    files = [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("*/*.yaml")]
    assert len(files) >= 50
    check_texts(files)


@pytest.mark.parametrize(("one", "other", "differs"), DIFFERENCES, ids=[f"{a}-{b}" for a, b, _ in DIFFERENCES])
def test_two_methods_differ_only_in_the_listed_keys(one: str, other: str, differs: set[str]) -> None:
    first, second = method(one), method(other)
    found = {key for key in first | second if first.get(key, "absent") != second.get(key, "absent")}
    # A section that is null in one file counts as one difference, whatever it has in the other.
    null = tuple(f"{key}." for key in found if second.get(key, "absent") is None)
    assert {key for key in found if not null or not key.startswith(null)} - {"trainer.callbacks+"} == differs


def test_a_phase_starts_from_the_previous_output_and_outputs_are_unique() -> None:
    outputs = {
        name: export["init_args"]["output"]
        for name in PAPERS
        for export in method(name).get("trainer.callbacks+", [])
        if export["class_path"].endswith("ExportModel")
    }
    assert len(outputs) == len(set(outputs.values())) >= len(PAPERS) - 2
    assert {name: method(later)["initial_model"] for name, later in PHASES.items()} == {
        name: outputs[name] for name in PHASES
    }


@pytest.mark.parametrize("name", ROUTED)
def test_moe_pre_training_is_built_on_a_tiny_stand_in_of_twelve_layers(name: str, tmp_path: Path) -> None:
    config = read(f"methods/{name}")["model"]
    folder = save_backbone(str(tmp_path), tiny_rotary(dropout=0.1, num_layers=12), wordpiece_tokenizer())
    config["init_args"]["backbone"]["name"] = folder
    module = build(ContrastiveModule, config)
    assert isinstance(module, MoEEmbedModule)
    layers, top_k = ROUTED[name]
    assert module.moe_layers == layers
    backbone = module.embedder.backbone
    if layers:
        settings = backbone.config
        # With one expert, renormalised weights are always 1, so the router would get no gradient.
        assert (settings.num_experts, settings.experts_per_token, settings.renormalize_experts) == (8, top_k, top_k > 1)
    assert module.load_balancing == (LoadBalancing(1.0, "balanced") if layers else None)
    assert {part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)} <= {0.0}


def test_the_scale_of_mgh_makes_one_pass_over_the_papers_data() -> None:
    scale = read("scales/h100x1_batch64")
    batch_size, accumulate = scale["data"]["init_args"]["batch_size"], scale["trainer"]["accumulate_grad_batches"]
    assert (batch_size, accumulate, scale["trainer"]["devices"]) == (64, 8, 1)
    assert batch_size * accumulate * MGH["trainer.max_steps"] == pytest.approx(820_000, rel=2e-3)
    assert init_args("data/mgh_in_context", "data") == {
        "text": {"query_max_length": 2048},
        "num_in_context_examples": 5,
    }
