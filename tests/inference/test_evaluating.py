import pytest
from torch import nn

from embeddings.inference.encoder import evaluating


@pytest.mark.parametrize("fails", [False, True])
def test_each_module_is_left_in_its_own_mode(fails):
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[0].eval()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    try:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert [module.training for module in model.modules()] == modes
