"""What is in the model that a method trains; the methods' own tests go through it too."""

from pathlib import Path

import pytest
import torch

from embeddings.common import OptionError, UserError
from embeddings.models import (
    AnchorTokenPooling,
    BackboneConfig,
    Embedder,
    LatentAttentionPooling,
    LoraSettings,
    MeanPooling,
)
from embeddings.modules.base import PoolingFactory, build_embedder
from tests.helpers.runs import backbone_folder
from tests.models.reading import random_tokens

TOKENS = random_tokens(384, [7, 3, 12], skip=1)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return backbone_folder(tmp_path_factory.mktemp("backbone"), "mistral")


def make(
    name: str,
    pooling: PoolingFactory = AnchorTokenPooling,
    lora: LoraSettings | None = None,
    initial_model: Path | None = None,
) -> Embedder:
    start = None if initial_model is None else str(initial_model)
    return build_embedder(BackboneConfig(name, bidirectional=True), pooling, lora, start, True, 0, "take the usual")


@torch.no_grad()
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, dropout=0.0)])
@pytest.mark.parametrize("pooling", [AnchorTokenPooling, MeanPooling])
def test_an_initial_model_goes_on_with_the_vectors_it_had(
    mistral: str, pooling: PoolingFactory, lora: LoraSettings | None, tmp_path: Path
) -> None:
    """A pooling by attention taps the loaded backbone once, not twice."""
    one = make(mistral, pooling)
    one.save_pretrained(tmp_path / "one")
    two = make("not-asked-for", pooling, lora, tmp_path / "one").eval()
    torch.testing.assert_close(two(TOKENS), one.eval()(TOKENS), rtol=0, atol=1e-6)
    assert any("lora_" in name for name, _ in two.named_parameters()) == (lora is not None)


def test_a_head_of_the_initial_model_is_kept(mistral: str, tmp_path: Path) -> None:
    one = make(mistral, MeanPooling)
    headed = Embedder(one.backbone, one.tokenizer, MeanPooling(32), head=torch.nn.Linear(32, 8))
    headed.save_pretrained(tmp_path / "one")
    two = make("not-asked-for", MeanPooling, initial_model=tmp_path / "one")
    assert two.embedding_dim == 8
    assert two.head is not None
    assert two.head.weight.requires_grad


@torch.no_grad()
def test_a_layer_norm_of_the_initial_model_is_kept(mistral: str, tmp_path: Path) -> None:
    one = make(mistral, MeanPooling)
    normed = Embedder(
        one.backbone, one.tokenizer, MeanPooling(32), norm=torch.nn.LayerNorm(32, elementwise_affine=False)
    )
    normed.save_pretrained(tmp_path / "one")
    two = make("not-asked-for", MeanPooling, initial_model=tmp_path / "one").eval()
    torch.testing.assert_close(two(TOKENS), normed.eval()(TOKENS), rtol=0, atol=1e-6)
    assert (two(TOKENS) - one.eval()(TOKENS)).abs().max() > 1e-3
    assert two.state_dict().keys() == one.state_dict().keys()


def test_another_pooling_than_the_initial_models_is_refused(mistral: str, tmp_path: Path) -> None:
    make(mistral).save_pretrained(tmp_path / "one")
    with pytest.raises(OptionError, match=r"model\.pooling must be what .*AnchorTokenPooling .*got 'MeanPooling"):
        make(mistral, MeanPooling, initial_model=tmp_path / "one")


def test_a_pooling_that_cannot_be_made_is_refused_with_the_usual_one(mistral: str) -> None:
    with pytest.raises(UserError, match=r"model\.pooling\.num_latents must be >= 1, got 0; take the usual"):
        make(mistral, lambda width: LatentAttentionPooling(width, num_latents=0))
