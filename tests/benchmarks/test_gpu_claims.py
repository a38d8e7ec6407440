"""Each GPU claim has a value, a limit and a peer, and its code runs on a CPU; no test depends on times."""

import re
import sys
from argparse import Namespace

import pytest

from benchmarks import gpu
from benchmarks.gpu import CLAIMS, MINUTES, offers, report, run_group
from benchmarks.gpu_claims import GROUPS
from benchmarks.gpu_profile import METHODS as PROFILED
from benchmarks.gpu_profile import kind_of
from benchmarks.harness import RESULTS

TINY = Namespace(tiny=True, threads=1, pairs=1)
METHODS = list(PROFILED)
QUICK = ("loss", "search", "kmeans", "checkpoint")


def test_every_claim_is_in_one_group_and_all_fit_into_the_time():
    assert sorted(key for group in GROUPS.values() for key in group.claims) == sorted(CLAIMS)
    assert list(CLAIMS) == [f"G{number}" for number in range(1, 17)]
    assert sum(group.seconds for group in GROUPS.values()) <= 60 * MINUTES
    assert all(claim.limit and claim.peer and re.match("[<>]=", claim.target) for claim in CLAIMS.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in GROUPS]
)
def test_a_group_runs_at_a_tiny_size_and_writes_no_row(name, capsys):
    before = RESULTS.read_bytes()
    run_group(name, TINY)
    assert RESULTS.read_bytes() == before
    printed = capsys.readouterr().out
    for key in GROUPS[name].claims:
        assert f"{key} {CLAIMS[key].what}, " in printed
        assert f"{key} limit of it: {CLAIMS[key].limit}, " in printed
        # For these claims the value itself is a comparison with the peer.
        assert CLAIMS[key].peer in printed or key in ("G2", "G7", "G13", "G15", "G16")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["encoder", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS[1:])])
def test_a_step_of_each_method_is_profiled_into_a_file(name, tmp_path):
    gpu.profile_method(name, Namespace(**vars(TINY), profile=tmp_path, compiled=False))
    lines = (tmp_path / f"{name}.txt").read_text().splitlines()
    assert lines[0].startswith(f"{name}: one training step on a CPU")
    assert len(re.findall(r"\d\.\d{3}", lines[1])) == 3
    # The calls of each kind.
    kinds = dict(re.findall(r"^([a-z, ]+?) +\d+\.\d+ +[\d.]+% +(\d+)$", "\n".join(lines), re.MULTILINE))
    assert {"matrix products", "attention", "optimiser"} <= kinds.keys()
    # Names that no kind matches are many of the calls, and take little time.
    assert int(kinds.get("other", 0)) < 0.5 * sum(map(int, kinds.values()))
    assert any(line.startswith("aten::_local_scalar_dense") for line in lines)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>", "norms"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "sums"),
        ("triton_poi_fused_add_native_layer_norm_3", "fused by the compiler"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimiser"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and casts"),
    ],
)
def test_kernels_are_sorted_into_kinds(kernel, kind):
    assert kind_of(kernel) == kind


def run(monkeypatch, *arguments):
    """Run the command as on a machine without a GPU; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    monkeypatch.setattr(gpu, "offers", lambda: dict.fromkeys(offers(), ""))
    return gpu.main()


def test_the_check_says_what_is_skipped_without_each_part(monkeypatch, capsys):
    assert run(monkeypatch, "--check") == 0
    output = capsys.readouterr().out
    assert all(f"{name}: none" in output for name in offers())
    assert "without deepspeed skipped: G13" in output
    assert report(dict.fromkeys(offers(), "yes")) == [f"{name}: yes" for name in offers()]


def test_a_machine_without_a_gpu_is_refused_in_a_line(monkeypatch, capsys):
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err == "error: needs a CUDA GPU with bfloat16; --tiny runs on a CPU\n"
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--only", "G5,G99")
    assert "no such claim: G99; there are G1 to G16" in capsys.readouterr().err
