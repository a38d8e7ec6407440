"""The CDE configs hold the paper's hyperparameters and build what they configure, on tiny stand-ins."""

from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from embeddings.common import TextSettings
from embeddings.data.checks import with_source_prompts
from embeddings.data.sources import SourceConfig
from embeddings.losses import SurrogateFilter
from embeddings.modules import CDEModule, ContrastiveModule
from tests.configs.test_nv_embed_configs import flat
from tests.configs.test_nv_embed_tables import CONFIGS, read
from tests.helpers.runs import backbone_folder

# §5, §6: small setting and large one, each in its unsupervised phase and its supervised one.
METHODS = ("cde_small", "cde_small_supervised", "cde_unsupervised", "cde_supervised")
PAPER = {
    "trainer.max_epochs": (3, 3, 3, 4),
    "model.init_args.optimizer.class_path": ("torch.optim.Adam",) * 4,
    "model.init_args.optimizer.init_args.lr": (2e-5,) * 4,
    "model.init_args.schedule.warmup_steps": (1000,) * 4,
    "model.init_args.schedule.decay": ("linear",) * 4,
    "model.init_args.loss.init_args.temperature": (0.02,) * 4,
    "model.init_args.backbone.name": ("checkpoints/nomic-bert-2048",) * 4,
    "model.init_args.context.num_context": (64, 64, 512, 512),
    "model.init_args.context.dropout_fraction": (0.005,) * 4,
}


def method(name: str) -> dict[str, Any]:
    return read(CONFIGS / "methods" / f"{name}.yaml")


@pytest.mark.parametrize("name", METHODS)
def test_methods_hold_section_5(name: str) -> None:
    config = flat(method(name))
    assert {key: config[key] for key in PAPER} == {key: values[METHODS.index(name)] for key, values in PAPER.items()}


@pytest.mark.parametrize(
    ("other", "name", "differs"),
    [
        (
            "cde_unsupervised",
            "cde_small",
            {"backbone.num_layers", "backbone.gradient_checkpointing", "context.num_context"},
        ),
        ("cde_unsupervised", "cde_supervised", {"initial_model"}),
        ("cde_small", "cde_small_supervised", {"initial_model"}),
    ],
)
def test_a_method_differs_from_another_where_it_says_so(other: str, name: str, differs: set[str]) -> None:
    one, two = flat(method(other)), flat(method(name))
    found = {key for key in one | two if one.get(key) != two.get(key)} - {"trainer.callbacks+", "trainer.max_epochs"}
    assert found == {f"model.init_args.{key}" for key in differs}


@pytest.mark.parametrize("phase", ["cde_small", "cde_unsupervised"])
def test_a_supervised_phase_starts_where_the_unsupervised_one_was_exported(phase: str) -> None:
    later = {"cde_small": "cde_small_supervised", "cde_unsupervised": "cde_supervised"}[phase]
    (export,) = method(phase)["trainer"]["callbacks+"]
    assert export["init_args"]["output"] == method(later)["model"]["init_args"]["initial_model"]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_built_on_a_tiny_stand_in(name: str, tmp_path: Any) -> None:
    config = {"model": method(name)["model"]}
    init_args = config["model"]["init_args"]
    init_args["backbone"]["name"] = backbone_folder(tmp_path / "backbone", dropout=0.1)
    assert init_args["backbone"].pop("num_layers", 12) == (6 if "small" in name else 12), "§5"
    init_args["context"]["num_context"] = 8
    if "initial_model" in init_args:
        start = {**init_args, "initial_model": None}
        build({"model": {**config["model"], "init_args": start}}).embedder.save_pretrained(tmp_path / "start")
        init_args["initial_model"] = str(tmp_path / "start")
    module = build(config)
    assert isinstance(module, CDEModule)
    assert module.embedder.num_extra_tokens == 8 + 8
    assert module.embedder.residual is not None
    assert {part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)} == {0.0}
    assert module.embedder.slots.dropout_fraction == 0.005
    assert module.loss.false_negative_filter == SurrogateFilter(margin=0.0)
    assert not module.loss.gather_across_devices
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = module._optimizer([weight])
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["weight_decay"] == 0
    rate = module._schedule.scheduler(optimizer, 10_000).get_last_lr()[0]
    assert rate == pytest.approx(2e-5 / 1000)


def build(config: dict[str, Any]) -> Any:
    parser = ArgumentParser()
    parser.add_subclass_arguments(ContrastiveModule, "model")
    return parser.instantiate_classes(parser.parse_object(config)).model


@pytest.mark.parametrize(("phase", "names"), [("unsupervised", 2), ("supervised", 2)])
def test_data_holds_clustered_batches_of_prefixed_texts_with_surrogates(phase: str, names: int) -> None:
    init_args = read(CONFIGS / "data" / f"cde_{phase}.yaml")["data"]["init_args"]
    assert init_args["sampler"]["class_path"] == "embeddings.data.ClusteredBatchSampler"
    assert set(init_args["text"].values()) == {512}
    assert init_args["num_negatives"] == (phase == "supervised")
    sources = [SourceConfig(**fields) for fields in init_args["sources"]]
    assert len(sources) == names
    for source in sources:
        assert source.query_prompts(TextSettings()) == ("search_query: ",)
        assert source.document_prompt == "search_document: "
        assert source.surrogate_vectors is not None
        assert source.surrogate_vectors.endswith(f"vectors/{source.name}")
    prompts = with_source_prompts(TextSettings(), sources).prompts
    assert (prompts["query"], prompts["document"]) == ("search_query: ", "search_document: ")
    short = read(CONFIGS / "data" / "cde_short.yaml")["data"]["init_args"]
    assert (set(short["text"].values()), short["num_negatives"]) == ({64}, 0)
