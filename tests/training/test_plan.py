"""Plans against real steps of small models: operations and memory within 10%."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embeddings.common import ContrastiveBatch
from embeddings.common.types import take_texts
from embeddings.losses import InfoNCE
from embeddings.losses.info_nce import scores_at_once
from embeddings.models import BackboneConfig, LatentAttentionPooling, LoraSettings, MeanPooling, Upcycling
from embeddings.modules import CDEModule, MoEEmbedModule, NVEmbedModule
from embeddings.modules.base import ContrastiveModule
from embeddings.modules.cde import ContextSettings
from embeddings.training import GradCache
from embeddings.training.gradcache import plain_step
from embeddings.training.plan import (
    _KERNELS,
    Cost,
    Linear,
    LossSize,
    Setting,
    StepCost,
    Texts,
    counted,
    plan_step,
    trace_embedder,
    without_data,
)
from tests.helpers.contrastive import Record, batch_of
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.runs import backbone_folder
from tests.modules.moe_modules import dense_folder

QUERIES, CANDIDATES, QUERY_TOKENS, DOCUMENT_TOKENS, CONTEXT = 8, 16, 12, 20, 8
LOSS = InfoNCE(temperature=0.1)
Make = Callable[[str, bool], ContrastiveModule]


def full(name: str, checkpointing: bool) -> ContrastiveModule:
    backbone = BackboneConfig(name, gradient_checkpointing=checkpointing)
    return NVEmbedModule(backbone, pooling=MeanPooling, lora=None, loss=LOSS)


def decoder(name: str, checkpointing: bool) -> ContrastiveModule:
    backbone = BackboneConfig(name, bidirectional=True, gradient_checkpointing=checkpointing)
    return NVEmbedModule(backbone, pooling=MeanPooling, lora=None, loss=LOSS)


def lora(name: str, checkpointing: bool) -> ContrastiveModule:
    backbone = BackboneConfig(name, bidirectional=True, dtype="bfloat16", gradient_checkpointing=checkpointing)
    settings = LoraSettings(rank=4, alpha=8, dropout=0.1)

    def pooling(hidden_size: int) -> LatentAttentionPooling:
        return LatentAttentionPooling(hidden_size, num_latents=16, num_heads=2, head_dim=16)

    return NVEmbedModule(backbone, pooling=pooling, lora=settings, loss=LOSS)


def moe(name: str, checkpointing: bool) -> ContrastiveModule:
    backbone = BackboneConfig(name, gradient_checkpointing=checkpointing)
    return MoEEmbedModule(backbone, upcycling=Upcycling(num_experts=4, top_k=2), loss=LOSS)


def cde(name: str, checkpointing: bool) -> ContrastiveModule:
    backbone = BackboneConfig(name, gradient_checkpointing=checkpointing)
    return CDEModule(backbone, context=ContextSettings(num_context=CONTEXT, num_soft_prompts=2), loss=LOSS)


MODELS: dict[str, Make] = {"full": full, "decoder": decoder, "lora": lora, "moe": moe, "cde": cde}


def real_and_meta(name: str, folder: Path, checkpointing: bool = False) -> tuple[ContrastiveModule, ContrastiveModule]:
    """A module in training mode, and the same module on the meta device."""
    kind = "mistral" if name in ("lora", "decoder") else "bert"
    backbone = dense_folder(folder) if name == "moe" else backbone_folder(folder, kind)
    with torch.device("meta"):
        structure = MODELS[name](backbone, checkpointing)
    return MODELS[name](backbone, checkpointing).train(), structure


def batch_for(module: ContrastiveModule) -> ContrastiveBatch:
    """Texts of two lengths; the first documents are the context of a contextual module."""
    records = [
        Record([5 + row] * QUERY_TOKENS, [20 + row] * DOCUMENT_TOKENS, [[40 + row] * DOCUMENT_TOKENS])
        for row in range(QUERIES)
    ]
    batch = batch_of(records)
    assert (len(batch.query), len(batch.candidate)) == (QUERIES, CANDIDATES)
    if isinstance(module, CDEModule):
        context = take_texts(batch.candidate, torch.arange(CONTEXT))
        batch = replace(batch, context=context, num_extra_tokens=module.embedder.num_extra_tokens)
    return batch


def planned(module: ContrastiveModule, setting: Setting) -> tuple[StepCost, list[Texts]]:
    """The plan of a module's step over `batch_for`, and the cost of each tower."""
    sizes = (QUERIES, CANDIDATES, QUERY_TOKENS, DOCUMENT_TOKENS)
    with without_data(module):
        texts = trace_embedder(module.embedder, *sizes, setting.half_products)
    width = module.embedder.pooling.hidden_size
    loss = LossSize(QUERIES, CANDIDATES, width, scores_at_once(module.loss.tile_size, "cpu"), QUERIES + CANDIDATES)
    return plan_step(module, texts, loss, setting, module.state_per_weight()), texts


class Saved:
    """Counts the peak bytes of graphs: each saved storage once, without parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.excluded = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
        self.held: Counter[int] = Counter()
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> "_Held":
        return _Held(self, tensor)


class _Held:
    """A tensor that a graph has saved; it is counted until it is deleted."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor, storage = saved, tensor, tensor.untyped_storage()
        self.key, self.size = storage._cdata, storage.nbytes()
        if self.key not in saved.excluded:
            saved.now += 0 if saved.held[self.key] else self.size
            saved.held[self.key] += 1
            saved.peak = max(saved.peak, saved.now)

    def __del__(self) -> None:
        if self.key not in self.saved.excluded:
            self.saved.held[self.key] -= 1
            self.saved.now -= 0 if self.saved.held[self.key] else self.size


def tensor_of(held: _Held) -> Tensor:
    return held.tensor


def step(module: ContrastiveModule, setting: Setting) -> None:
    """Run a step over the batch with these options."""
    batch = batch_for(module)
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.half_products):
        if setting.mini_batch_tokens is None:
            loss = plain_step(module, batch).loss
            with torch.autocast("cpu", enabled=False):
                loss.backward()
            return
        engine = GradCache(setting.mini_batch_tokens, kept_gib=setting.kept_gib or None)
        engine.step(module, batch)


SETTINGS = {
    "plain": Setting(half_products=False),
    "plain in 16 bits": Setting(),
    "GradCache": Setting(half_products=False, mini_batch_tokens=120),
    "GradCache in 16 bits": Setting(mini_batch_tokens=120),
}


# An encoder and a decoder; the other cases take more than a minute.
QUICK = [("full", "plain"), ("decoder", "GradCache in 16 bits")]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(name, setting, marks=() if (name, setting) in QUICK else pytest.mark.slow)
        for name in MODELS
        for setting in SETTINGS
    ],
)
def test_a_plan_is_within_10_percent_of_the_step(name: str, setting: str, tmp_path: Path) -> None:
    if name == "lora" and not SETTINGS[setting].half_products:
        pytest.skip("its frozen weights are in bfloat16")
    module, structure = real_and_meta(name, tmp_path / "backbone")
    plan, _ = planned(structure, SETTINGS[setting])
    weights = list(module.parameters())
    assert plan.trained == sum(weight.numel() for weight in weights if weight.requires_grad) > 0
    assert plan.frozen == sum(weight.numel() for weight in weights if not weight.requires_grad)
    assert (plan.frozen > 0) == (name == "lora")

    saved = Saved(module)
    with counted() as counter, torch.autograd.graph.saved_tensors_hooks(saved.pack, tensor_of):
        step(module, SETTINGS[setting])
    assert sum(plan.operations.values()) == pytest.approx(counter.get_total_flops(), rel=0.1)
    if setting == "plain":
        # Nothing is cast; the shared part is a few rows of constants.
        assert plan.memory["casts of weights, shared by graphs"] < 0.001 * plan.memory["activations"]
    predicted = plan.memory["activations"] + plan.memory.get("casts of weights, shared by graphs", 0)
    assert predicted == pytest.approx(saved.peak, rel=0.1)

    optimizer = torch.optim.AdamW([weight for weight in weights if weight.requires_grad])
    optimizer.step()
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values()]
    for part, tensors in {"weights": weights, "gradients": gradients, "optimiser state": state}.items():
        measured = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert plan.memory[part] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    "name", ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cde", "lora", "moe"))]
)
def test_checkpointed_layers_keep_only_their_inputs_and_are_recomputed(name: str, tmp_path: Path) -> None:
    setting = Setting(half_products=name == "lora")
    plans, operations, kept = [], [], []
    for checkpointing in (False, True):
        module, structure = real_and_meta(name, tmp_path / str(checkpointing), checkpointing)
        plan, texts = planned(structure, setting)
        plans.append(plan)
        with counted() as counter:
            step(module, setting)
        operations.append(counter.get_total_flops())
        module.zero_grad()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=setting.half_products, cache_enabled=False),
            LiveBytes("cpu") as live,
        ):
            output = plain_step(module, batch_for(module))
        kept.append(live.now)
        del output
    assert operations[1] > 1.15 * operations[0]
    assert sum(plans[1].operations.values()) == pytest.approx(operations[1], rel=0.1)
    assert kept[1] < 0.7 * kept[0]
    assert plans[1].memory["activations"] < 0.75 * plans[0].memory["activations"]
    assert sum(text.cost.graph.of(text.count) for text in texts) == pytest.approx(kept[1], rel=0.1)


def test_attention_with_shared_keys_counts_as_many_operations_as_with_a_copy_for_each_head() -> None:
    """By every kernel of torch; its own formula refuses shared keys before 2.13."""
    query_NALE, key_NGLE = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2))
    copied_NALE = key_NGLE.detach().repeat_interleave(2, dim=1).requires_grad_()
    counts = []
    for keys, shares in ((key_NGLE, True), (copied_NALE, False)):
        with counted() as counter:
            attend = torch.nn.functional.scaled_dot_product_attention
            attend(query_NALE, keys, keys, enable_gqa=shares).sum().backward()
        counts.append(counter.get_total_flops())
    products = 2 * 2 * 4 * 5 * 5 * 8
    assert counts == [2 * products + 5 * products] * 2
    kernels = {str(kernel) for kernel in _KERNELS}
    assert {f"aten._scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")} <= kernels


def test_each_strategy_shards_what_it_should() -> None:
    """Computed by hand: two layers of 100 weights and a head of 50 on 4 GPUs."""
    model = nn.Sequential(
        nn.ModuleList([nn.Linear(10, 10, bias=False) for _ in range(2)]), nn.Linear(10, 5, bias=False)
    )
    nothing = Linear()
    texts = [Texts("queries", 4, 8, Cost(Linear(each=100.0), Linear(each=200.0), Linear(3.0, 7.0), nothing, nothing))]

    def memory(name: Any, half: bool) -> list[float]:
        setting = Setting(4, name, half)
        found = plan_step(model, texts, LossSize(0, 0, 0, 0), setting).memory
        rest = sum(value for part, value in found.items() if part not in ("weights", "gradients", "optimiser state"))
        return [found["weights"], found["gradients"], found["optimiser state"], rest - 28]

    assert memory("single", True) == [1000, 1000, 2000, 0]
    assert memory("ddp", True) == [1000, 1000, 2000, 1000]
    # ZeRO under autocast: 2 bytes for weights and gradients; 12 bytes for a float32 copy and two moments.
    assert memory("zero1", True) == [500, 500, 3000 / 4, 0]
    assert memory("zero2", True) == [500, 500 / 4, 3000 / 4, 0]
    assert memory("zero3", True) == [500 / 4, 500 / 4, 3000 / 4, 400]
    assert memory("zero2", False) == [1000, 1000 / 4, 2000 / 4, 0]
    # Two layers of 100 weights are gathered, in 2 bytes each under autocast.
    assert memory("fsdp2", True) == [1000 / 4, 1000 / 4, 2000 / 4, 400]
    assert memory("fsdp2", False) == [1000 / 4, 1000 / 4, 2000 / 4, 800]


def test_gradcache_costs_a_second_forward_of_graphs_that_are_not_kept() -> None:
    """Computed by hand: 8 texts of 10 tokens with 2 GiB of graph and 5 operations forward each; mini-batches of two."""
    cost = Cost(Linear(each=5.0), Linear(each=10.0), Linear(each=2 * 2.0**30), Linear(each=1.0), Linear(9.0, 0.0))
    found = {}
    for kept in (0.0, 8.0, 100.0):
        setting = Setting(mini_batch_tokens=20, kept_gib=kept, accumulated=3)
        plan = plan_step(nn.Linear(2, 2), [Texts("queries", 8, 10, cost)], LossSize(0, 0, 0, 0), setting)
        assert plan.num_mini_batches == 4
        assert (plan.operations["forward"], plan.operations["backward"]) == (3 * 40, 3 * 80)
        again = plan.operations.get("GradCache's second forward", 0)
        found[kept] = (plan.memory["activations"] - 2, plan.kept, again)
        assert plan.memory["casts of weights, shared by graphs"] == 9
    # Without a budget only the last of the four graphs is kept.
    assert found[0.0] == (4 * 2**30, 0.25, 3 * 30)
    assert found[8.0] == (8 * 2**30, 0.5, 3 * 20)
    assert found[100.0] == (16 * 2**30, 1.0, 0)


def test_a_loss_has_three_products_and_one_tile() -> None:
    """Computed by hand: 64 queries, 1,000 candidates of width 8; 2,000 scores, or 32 rows, exist at the same time."""
    size = LossSize(64, 1000, 8, 2000, stored=128)
    assert size.operations == 3 * 2 * 64 * 1000 * 8
    assert size.num_bytes == 8 * 8 * (128 + 1000) + 9 * 32_000
