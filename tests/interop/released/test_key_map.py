import pytest
import torch
from safetensors.torch import save_file

from embeddings.common import InputError
from embeddings.interop.released.checkpoint import KeyMap, KeyReport, Published, ReleasedWeights

NAMES = {
    "layer.{n}.query.{kind}": Published("block.{n}.fused.{kind}", 0, 2),
    "layer.{n}.key.{kind}": Published("block.{n}.fused.{kind}", 1, 2),
    "experts": Published("piled", stacked=True),
    "head.{rest}": "out.{rest}",
}
EXPECTED = {
    "layer.3.query.weight": torch.empty(2, 5, device="meta"),
    "layer.3.key.weight": torch.empty(2, 5, device="meta"),
    "experts": torch.empty(3, 4, 5, device="meta"),
    "head.a.b": torch.empty(7, device="meta"),
}


def weights(folder, **changed):
    state = {"block.3.fused.weight": torch.randn(4, 5), "piled": torch.randn(12, 5), "out.a.b": torch.randn(7)}
    state = {name: tensor for name, tensor in (state | changed).items() if tensor is not None}
    save_file(state, folder / "model.safetensors")
    return ReleasedWeights(folder), state


def test_tensors_are_cut_and_unstacked(tmp_path):
    found, state = weights(tmp_path)
    taken, report = KeyMap("toys", NAMES).take(found, EXPECTED)
    assert torch.equal(taken["layer.3.query.weight"], state["block.3.fused.weight"][:2])
    assert torch.equal(taken["layer.3.key.weight"], state["block.3.fused.weight"][2:])
    assert torch.equal(taken["experts"][1], state["piled"][4:8])
    assert torch.equal(taken["head.a.b"], state["out.a.b"])
    # A part is no view of the whole: it is kept for itself.
    assert taken["layer.3.key.weight"].untyped_storage().nbytes() == 2 * 5 * 4
    assert report.used["block.3.fused.weight"] == ["layer.3.query.weight", "layer.3.key.weight"]
    assert (sorted(report.used), report.left) == (sorted(state), [])


def test_what_is_left_on_purpose_is_named(tmp_path):
    found, _ = weights(tmp_path, **{"pooler.weight": torch.zeros(2), "block.12.table": torch.zeros(2)})
    _, report = KeyMap("toys", NAMES, ("pooler.{kind}", "block.{n}.table")).take(found, EXPECTED)
    assert report.left == ["block.12.table", "pooler.weight"]
    both = report | KeyReport({"more": ["ours"]}, ["also"])
    assert both.left == ["block.12.table", "pooler.weight", "also"]
    assert both.used["more"] == ["ours"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"piled": None}, "lacks 1 of the 3 tensors of toys, piled first; take a whole copy"),
        ({"extra": torch.zeros(1)}, "has 1 tensors that toys has no place for, extra first"),
        ({"block.x.table": torch.zeros(1)}, "has 1 tensors that toys has no place for, block.x.table first"),
        ({"piled": torch.zeros(12, 6)}, "piled has shape (12, 6), by config.json it has (12, 5)"),
        ({"block.3.fused.weight": torch.zeros(6, 5)}, "fused.weight has shape (6, 5), by config.json it has (4, 5)"),
        ({"out.a.b": torch.zeros(7, 1)}, "out.a.b has shape (7, 1), by config.json it has (7,)"),
    ],
)
def test_what_does_not_fit_is_one_line(changed, says, tmp_path):
    found, _ = weights(tmp_path, **changed)
    with pytest.raises(InputError) as error:
        KeyMap("toys", NAMES, ("block.{n}.table",)).take(found, EXPECTED)
    assert says in str(error.value)


def test_a_dot_in_a_name_is_a_dot():
    assert KeyMap("toys", {}, ("a.b",)).leaves("a.b")
    assert not KeyMap("toys", {}, ("a.b",)).leaves("axb")
    with pytest.raises(AssertionError, match="no place for other"):
        KeyMap("toys", NAMES).place_of("other")
