from pathlib import Path

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import LayerNorm
from torch import nn

from embeddings.common import InputError, OptionError
from embeddings.models.directory import read_head, read_norm, write_head, write_norm
from tests.models.test_directory import edit

VECTORS = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * 3 + 2


def norm(**options: bool) -> nn.LayerNorm:
    made = nn.LayerNorm(8, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_a_norm_gives_the_same_vectors_here_and_in_sentence_transformers(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    ours = norm(**options)
    write_norm(tmp_path / "norm", ours)
    expected = ours(VECTORS)
    assert (expected - VECTORS).abs().max() > 1
    torch.testing.assert_close(read_norm(tmp_path / "norm")(VECTORS), expected, rtol=0, atol=1e-6)
    theirs = LayerNorm.load(str(tmp_path / "norm"))({"sentence_embedding": VECTORS})["sentence_embedding"]
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-6)


def test_a_norm_without_weights_has_none_after_reading_and_one_with_weights_has_its_own(tmp_path: Path) -> None:
    for name, options in (("plain", {"elementwise_affine": False}), ("own", {})):
        write_norm(tmp_path / name, norm(**options))
    assert list(read_norm(tmp_path / "plain").parameters()) == []
    assert len(list(read_norm(tmp_path / "own").parameters())) == 2


def test_an_epsilon_that_no_directory_has_room_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"norm\.eps must be 1e-05, .* got 1e-12"):
        write_norm(tmp_path / "norm", nn.LayerNorm(8, eps=1e-12))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dimension", [None, "8", 0, True, 7])
def test_a_norm_of_no_or_another_width_is_one_line(tmp_path: Path, dimension: object) -> None:
    write_norm(tmp_path / "norm", norm())
    edit(tmp_path / "norm" / "config.json", dimension=dimension)
    with pytest.raises(InputError, match="cannot be loaded" if dimension == 7 else "has dimension") as caught:
        read_norm(tmp_path / "norm")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_comes_back(tmp_path: Path, bias: bool) -> None:
    head = nn.Linear(8, 3, bias=bias)
    write_head(tmp_path / "head", head)
    assert torch.equal(read_head(tmp_path / "head")(VECTORS), head(VECTORS))


@pytest.mark.parametrize("changes", [{"use_residual": True}, {"activation_function": "torch.nn.Tanh"}])
def test_more_than_a_linear_head_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    write_head(tmp_path / "head", nn.Linear(8, 3))
    edit(tmp_path / "head" / "config.json", **changes)
    with pytest.raises(InputError, match="is more than a linear head"):
        read_head(tmp_path / "head")
