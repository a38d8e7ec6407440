"""The sparse method on tiny models: its losses, its gradient under GradCache, and full runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from embeddings.common import LossOutput, OptionError
from embeddings.losses import LoadBalancing, load_balancing_loss
from embeddings.models import BackboneConfig, LoraSettings, Upcycling, compilation
from embeddings.models.moe.experts import Experts, Router
from embeddings.modules import MoEEmbedModule
from embeddings.training import GradCache
from embeddings.training.gradcache import plain_step
from tests.helpers.casts import Casts
from tests.helpers.contrastive import gradient_vector, random_batch, relative_error
from tests.helpers.tiny import save_backbone, wordpiece_tokenizer
from tests.models.moe import tiny_nomic
from tests.modules.moe_modules import dense_folder, moe_module
from tests.training.test_gradcache import REPLAYED, cached_gradient, direct_gradient

LOSSES: dict[str, dict[str, Any]] = {
    "balanced": {"load_balancing": LoadBalancing()},
    "transformers, with z-loss": {"load_balancing": LoadBalancing(0.5, "transformers", z_coefficient=0.1)},
    "top 1": {"top_k": 1},
    "recomputed layers": {"checkpointing": True},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dense_folder(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dense_folder(tmp_path_factory.mktemp("dropping"), dropout=0.1)


def plain(module: MoEEmbedModule, seed: int = 3) -> tuple[LossOutput, torch.Tensor]:
    module.zero_grad()
    output = plain_step(module, random_batch(6, 2, seed))
    output.loss.backward()
    return output, gradient_vector(module)


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("engine", REPLAYED.values(), ids=REPLAYED)
def test_gradcache_gives_the_gradient_of_the_plain_step(
    engine: dict[str, Any], options: dict[str, Any], dense: str
) -> None:
    module = moe_module(dense, **options).double()
    expected, gradient = plain(module)
    module.zero_grad()
    found = GradCache(**engine).step(module, random_batch(6, 2, seed=3))
    assert relative_error(gradient_vector(module), gradient) <= 1e-12
    for name in ("load_balancing", "contrastive"):
        torch.testing.assert_close(found.terms[name], expected.terms[name])


@pytest.mark.parametrize(
    ("engine", "checkpointing"),
    [("one text", False), ("one text", True), ("uneven", False), ("larger than the batch", True), ("half kept", True)],
)
def test_gradcache_replays_dropout_and_router_noise(engine: str, checkpointing: bool, dropping: str) -> None:
    module, batch = moe_module(dropping, checkpointing).double(), random_batch(6, 2)
    cache = GradCache(**REPLAYED[engine])
    for router in module.modules():
        if isinstance(router, Router):
            router.noise = 0.1
    torch.manual_seed(1)
    found = cached_gradient(module, batch, cache)[1]
    torch.manual_seed(1)
    assert relative_error(found, direct_gradient(module, batch, cache)[1]) <= 1e-12
    assert relative_error(found, direct_gradient(module, batch, cache)[1]) > 1e-3


def test_the_balancing_loss_is_that_of_all_tokens_of_both_towers(dense: str) -> None:
    module = moe_module(dense).double()
    output, gradient = plain(module)
    batch = random_batch(6, 2, seed=3)
    parts = [module.embed(tokens).statistics for tokens in (batch.query, batch.candidate)]
    count = sum(part["expert_counts"] for part in parts)
    assert int(count.sum()) == 2 * (batch.query.num_tokens + batch.candidate.num_tokens)
    probability = sum(part["expert_probabilities"] for part in parts)
    assert isinstance(probability, torch.Tensor)
    expected = load_balancing_loss(count, probability, 2)
    torch.testing.assert_close(output.terms["load_balancing"], expected.detach())
    torch.testing.assert_close(output.loss, output.terms["contrastive"] + expected)
    assert output.terms["load_balancing"] > 1.001
    assert torch.equal(module.routing["expert_counts"], count)
    contrastive_alone = plain(moe_module(dense, load_balancing=LoadBalancing(0.0)).double())[1]
    assert relative_error(gradient, contrastive_alone) > 1e-2


def test_a_coefficient_of_zero_is_infonce_and_the_z_loss_comes_on_top(dense: str) -> None:
    output, _ = plain(moe_module(dense, load_balancing=LoadBalancing(coefficient=0.0)))
    assert output.loss.item() == output.terms["contrastive"].item()
    assert output.terms["load_balancing"] > 1.0
    assert "router_z" not in output.terms
    output, _ = plain(moe_module(dense, load_balancing=LoadBalancing(0.0, z_coefficient=0.5)))
    total = output.terms["contrastive"] + 0.5 * output.terms["router_z"]
    torch.testing.assert_close(output.loss, total)
    assert output.terms["router_z"] > 0.1


def test_a_dense_model_is_trained_without_balancing(dense: str) -> None:
    with pytest.raises(OptionError, match=r"model.load_balancing has no effect on a model without experts, got .*null"):
        MoEEmbedModule(BackboneConfig(dense))
    module = MoEEmbedModule(BackboneConfig(dense), load_balancing=None)
    output, gradient = plain(module)
    assert module.moe_layers == []
    assert set(output.terms) == {"accuracy", "positive_score", "no_negative_fraction"}
    assert gradient.norm() > 0
    upcycled, tokens = MoEEmbedModule(BackboneConfig(dense), upcycling=Upcycling()), random_batch(6, 2).candidate
    vectors = [one.eval().embed(tokens).vector_ND for one in (module, upcycled)]
    assert (vectors[0] - vectors[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_casts_the_experts_weights_once(dense: str, checkpointing: bool) -> None:
    module, batch = moe_module(dense, checkpointing), random_batch(6, 2)
    (experts,) = (part for part in module.modules() if isinstance(part, Experts))
    engine = GradCache(mini_batch_tokens=40, kept_fraction=0.5)
    assert sum(map(len, engine.plan(batch))) > 3
    for run in (engine.forward_backward, plain_step):
        with Casts(experts) as casts, torch.autocast("cpu", torch.bfloat16):
            run(module, batch)
        # A recomputation in a backward outside the step's autocast is not counted.
        assert casts.count == {"w1": 1, "w2": 1, "bias1": 1}


# The compiler inspects attributes whose use causes warnings.
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
@pytest.mark.parametrize("is_half", [False, True])
def test_compiled_experts_have_the_gradient_of_plain_ones(
    dense: str, is_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 a compiler may round differently, so errors against the float64 gradient are compared."""
    monkeypatch.setattr(compilation, "_COMPILER", {"backend": "aot_eager"})
    exact, plain, compiled = (moe_module(dense) for _ in range(3))
    exact.double()
    compilation.compile_layers(compiled.embedder.backbone)
    engine, num_graphs = GradCache(mini_batch_tokens=40, kept_fraction=0.5), []
    for num_pairs in (6, 4, 7, 3, 8, 6):
        gradients = []
        for module in (exact, plain, compiled):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half and module is not exact):
                engine.forward_backward(module, random_batch(num_pairs, 2, seed=num_pairs))
            gradients.append(gradient_vector(module).double())
        lost, found = (relative_error(gradient, gradients[0]) for gradient in gradients[1:])
        assert found <= (1.5 * lost if is_half else 1e-6)
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert num_graphs[-1] == num_graphs[2]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nomic_bert_can_be_upcycled_and_trained(tmp_path: Path, checkpointing: bool) -> None:
    """Gated experts, one per token (§7.1); GradCache has the plain step's gradient with and without kept graphs."""
    folder = save_backbone(str(tmp_path), tiny_nomic(), wordpiece_tokenizer())
    module = moe_module(folder, checkpointing, top_k=1).double()
    output, expected = plain(module)
    for engine in (GradCache(mini_batch_tokens=40), GradCache(mini_batch_tokens=40, kept_fraction=0.5)):
        loss, found = cached_gradient(module, random_batch(6, 2, seed=3), engine)
        assert loss == pytest.approx(output.loss.item(), rel=1e-7)
        assert relative_error(found, expected) < 1e-10


def test_lora_does_not_train_experts_and_routers(dense: str) -> None:
    # In float64, since float32 gradients differ by 2e-6 on some CPUs.
    lora = LoraSettings(rank=2, alpha=4, dropout=0.0)
    module = MoEEmbedModule(BackboneConfig(dense), lora=lora, upcycling=Upcycling(num_experts=4), seed=0).double()
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert not any("router" in name or "experts" in name for name in trained)
    _, expected = plain(module)
    _, found = cached_gradient(module, random_batch(6, 2, seed=3), GradCache(mini_batch_tokens=30))
    assert relative_error(found, expected) <= 1e-12
