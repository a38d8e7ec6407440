"""Layer by layer, a model has the states and statistics of the whole model; files, resuming and memory."""

import ctypes
import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embeddings.common import InputError, OptionError, TokenBatch
from embeddings.compression.layerwise import LayerwiseJob, LayerwiseModel, linear_layers
from embeddings.compression.pruning import Sparsity, prune_by_magnitude, prune_by_sparsegpt
from embeddings.models.backbone import load_model
from embeddings.models.bidirectional import layers, make_bidirectional
from embeddings.models.moe.rotary_moe import RotaryMoeConfig, RotaryMoeModel
from tests.compression.models import DECODERS, FAMILIES, build
from tests.helpers.processes import run_command
from tests.helpers.tiny import tiny_t5

CPU = torch.device("cpu")


def some_tokens(count=7, seed=0):
    """Texts of 1 to 20 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 21, (count,), generator=generator).tolist()
    ids = [torch.randint(3, 380, (length,), generator=generator).tolist() for length in lengths]
    return TokenBatch.from_lists(ids, [[True] * len(each) for each in ids])


class Half:
    """Halves every weight, and records its arguments."""

    def __init__(self):
        self.given = []

    def __call__(self, weight_OI, statistic, dtype):
        self.given.append((weight_OI.clone(), None if statistic is None else statistic.clone()))
        return {"weight": (weight_OI / 2).to(dtype)}


class Pruned:
    """SparseGPT at 2:4; interrupts the job at matrix `stop_at`."""

    def __init__(self, stop_at=None):
        self.stop_at, self.num_calls = stop_at, 0

    def __call__(self, weight_OI, statistic, dtype):
        self.num_calls += 1
        if self.num_calls == self.stop_at:
            raise KeyboardInterrupt
        return {"weight": prune_by_sparsegpt(weight_OI, statistic, Sparsity.parse("2:4")).to(dtype)}


def expected_states(model, tokens):
    """The states of the whole model at the input of each layer and after the last one."""
    found = []
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: found.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        for layer in layers(model)
    ]

    def last(_, args, output):
        found.append(output if isinstance(output, torch.Tensor) else output[0])

    handles.append(list(layers(model))[-1].register_forward_hook(last))
    with torch.no_grad():
        model(input_ids=tokens.input_ids_NL, attention_mask=tokens.attention_mask_NL.long())
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize(
    ("name", "bidirectional"), [*((name, False) for name in FAMILIES), *((name, True) for name in DECODERS)]
)
def test_a_layer_alone_computes_what_it_computes_in_the_model(tmp_path, name, bidirectional):
    model = build(name)
    if bidirectional:
        make_bidirectional(model)
    model.save_pretrained(tmp_path)
    whole, tokens = load_model(tmp_path, torch.float32), some_tokens().padded(None, 0)
    expected = expected_states(whole, tokens)
    assert len(expected) == 4
    alone = LayerwiseModel(tmp_path, CPU)
    assert all(weight.is_meta for weight in alone.model.parameters())
    states, is_token = alone.first_states(tokens), tokens.attention_mask_NL
    for index in range(3):
        assert torch.equal(states[is_token], expected[index][is_token])
        with alone.loaded(index) as (layer, _):
            assert not any(weight.is_meta for weight in layer.parameters())
            before = states
            states = alone.run(index, tokens, states)
        assert all(weight.is_meta for _, layer in alone.layers for weight in layer.parameters())
        assert float((states - before)[is_token].abs().max()) > 0.01
    assert torch.equal(states[is_token], expected[3][is_token])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_is_treated_with_the_inputs_from_the_compressed_earlier_layers(tmp_path, name):
    build(name).save_pretrained(tmp_path / "model")
    treatment, tokens = Half(), some_tokens()
    model = LayerwiseModel(tmp_path / "model", CPU)
    job = LayerwiseJob(model, tmp_path / "work", {"kind": "test"}, treatment, tokens)
    job.run()
    # The same by hand in the whole model: halve the weights of a layer, then compute the inputs of the next.
    whole, padded = load_model(tmp_path / "model", torch.float32), tokens.padded(torch.argsort(-tokens.lengths_N), 0)
    given = iter(treatment.given)
    for layer in layers(whole):
        found = {}
        linear = linear_layers(layer)
        handles = [
            part.register_forward_pre_hook(lambda _, args, key=key, found=found: found.update({key: args[0]}))
            for key, part in linear.items()
        ]
        expected_states(whole, padded)
        for handle in handles:
            handle.remove()
        for key, part in linear.items():
            weight, statistic = next(given)
            assert torch.equal(weight, part.weight)
            expected = sum(torch.outer(token_I, token_I) for token_I in found[key][padded.attention_mask_NL])
            torch.testing.assert_close(statistic, expected, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for part in linear.values():
                part.weight /= 2
    assert next(given, None) is None
    written = {}
    for file in job.files:
        written |= load_file(file)
    whole.save_pretrained(tmp_path / "whole")
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in expected)


def test_weights_keep_their_dtype_and_the_next_layer_gets_them_rounded(tmp_path):
    build("bert").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    treatment, tokens = Half(), some_tokens()
    job = LayerwiseJob(LayerwiseModel(tmp_path / "model", CPU), tmp_path / "work", {}, treatment, tokens)
    job.run()
    assert {tensor.dtype for file in job.files for tensor in load_file(file).values()} == {torch.bfloat16}
    assert {weight.dtype for weight, _ in treatment.given} == {torch.float32}


@pytest.mark.parametrize("stop_at", [1, 7, 10, 18])
def test_a_stopped_job_resumes_at_the_first_missing_layer_with_the_same_bytes(tmp_path, stop_at):
    build("bert").save_pretrained(tmp_path / "model")
    tokens = some_tokens()

    def job(folder, treatment):
        model = LayerwiseModel(tmp_path / "model", CPU)
        return LayerwiseJob(model, tmp_path / folder, {"kind": "test"}, treatment, tokens)

    whole = job("whole", Pruned())
    whole.run()
    with pytest.raises(KeyboardInterrupt):
        job("stopped", Pruned(stop_at)).run()
    resumed = job("stopped", again := Pruned())
    assert sum(file.exists() for file in resumed.files) == (stop_at - 1) // 6
    resumed.run()
    assert again.num_calls == 18 - 6 * ((stop_at - 1) // 6)
    assert [file.read_bytes() for file in resumed.files] == [file.read_bytes() for file in whole.files]
    finished = job("stopped", nothing := Pruned())
    finished.run()
    assert nothing.num_calls == 0


def test_another_job_or_process_in_the_folder_is_refused(tmp_path):
    build("bert").save_pretrained(tmp_path / "model")
    model = LayerwiseModel(tmp_path / "model", CPU)

    class Waiting(Half):
        """Starts a second job in the folder of the first."""

        def __call__(self, *given):
            with pytest.raises(OptionError, match="is being written by another process"):
                LayerwiseJob(model, tmp_path / "work", {"kind": "a"}, Half(), some_tokens()).run()
            return super().__call__(*given)

    LayerwiseJob(model, tmp_path / "work", {"kind": "a"}, Waiting(), some_tokens()).run()
    with pytest.raises(InputError, match="field 'kind' is 'a', expected 'b'"):
        LayerwiseJob(model, tmp_path / "work", {"kind": "b"}, Half(), some_tokens())


def test_models_without_plain_layers_are_refused(tmp_path):
    sparse = RotaryMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, moe_layers=[1]
    )
    RotaryMoeModel(sparse).save_pretrained(tmp_path / "experts")
    with pytest.raises(InputError, match="has experts"):
        LayerwiseModel(tmp_path / "experts", CPU)
    tiny_t5().save_pretrained(tmp_path / "t5")
    with pytest.raises(InputError, match="return more than their states"):
        LayerwiseModel(tmp_path / "t5", CPU)
    build("bert").save_pretrained(tmp_path / "quantised")
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config | {"quantization_config": {"a": 1}}))
    with pytest.raises(InputError, match="is already quantised"):
        LayerwiseModel(tmp_path / "quantised", CPU)


def test_missing_weights_are_named(tmp_path):
    model = build("bert")
    state = {name: tensor for name, tensor in model.state_dict().items() if "layer.1.output.dense.bias" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    alone = LayerwiseModel(tmp_path, CPU)
    with pytest.raises(InputError, match="bias of Linear is missing"), alone.loaded(1):
        pass


class Magnitude(Half):
    """Prunes by magnitude, and still needs the inputs."""

    def __call__(self, weight_OI, statistic, dtype):
        assert statistic is not None
        return {"weight": prune_by_magnitude(weight_OI, Sparsity.parse("2:4"))}


def measure_peak(folder: str, num_layers: str) -> None:
    """Print the peak memory of this process before and after a job."""
    torch.set_num_threads(1)
    # Return freed blocks at once: glibc would keep blocks below 32 MiB, which are all blocks of this small model.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    warm = LayerwiseModel(Path(folder, "1"), CPU)
    LayerwiseJob(warm, Path(folder, "warm", num_layers), {}, Magnitude(), some_tokens()).run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = LayerwiseModel(Path(folder, num_layers), CPU)
    LayerwiseJob(model, Path(folder, "work", num_layers), {}, Magnitude(), some_tokens()).run()
    print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@pytest.mark.slow
def test_memory_does_not_grow_with_depth(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    peaks, added = {}, {}
    for num_layers in (1, 4, 8):
        model = build("bert", num_hidden_layers=num_layers, **sizes)
        model.save_pretrained(tmp_path / str(num_layers))
        added[num_layers] = sum(weight.numel() * 4 for weight in model.parameters()) / 1024
    code = "import sys; from tests.compression.test_layerwise import measure_peak; measure_peak(*sys.argv[1:])"
    for num_layers in (4, 8):
        command = [sys.executable, "-c", code, str(tmp_path), str(num_layers)]
        ended = run_command(command, check=True)
        peaks[num_layers] = [int(number) for number in ended.stdout.split()]
    grown = peaks[8][1] - peaks[4][1]
    assert peaks[8][1] <= 1.05 * peaks[4][1]
    # Almost none of the added weights stay in memory.
    assert grown < 0.2 * (added[8] - added[4])
    assert added[8] - added[4] > 0.05 * peaks[4][1]
