"""The format of matrix products follows the hardware, the wish and the weights."""

from pathlib import Path

import pytest
import torch

from embeddings.common import OptionError
from embeddings.inference import precision
from embeddings.inference.precision import has_int8_products, has_native_bfloat16, resolve_precision

CPU = torch.device("cpu")


@pytest.fixture
def processor(tmp_path, monkeypatch):
    """Pretends that the processor lists these flags."""

    def pretend(content: str) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(content)
        monkeypatch.setattr(precision, "_CPU_INFO", path)
        monkeypatch.setattr(precision.platform, "system", lambda: "Linux")
        precision._processor_flags.cache_clear()

    yield pretend
    precision._processor_flags.cache_clear()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 vaes\n", torch.bfloat16),
        ("flags : amx_bf16 avx2\n", torch.bfloat16),
        ("Features\t: fp asimd bf16 i8mm\n", torch.bfloat16),
        ("flags\t\t: fpu avx2 avx512f\n", torch.float32),
        ("flags\t\t: avx512_bf16x\n", torch.float32),
        ("model name : bf16 inside\n", torch.float32),
    ],
)
def test_auto_is_bfloat16_only_where_the_processor_multiplies_it(processor, content, expected):
    processor(content)
    assert resolve_precision("auto", CPU) == expected


def test_a_system_without_the_list_of_flags_gets_float32(processor, monkeypatch):
    processor("flags : avx512_bf16\n")
    monkeypatch.setattr(precision, "_CPU_INFO", Path("/no/such/file"))
    precision._processor_flags.cache_clear()
    assert not has_native_bfloat16(CPU)
    assert not has_native_bfloat16(torch.device("meta"))


def test_what_was_asked_for_is_what_is_used():
    assert resolve_precision("float32", CPU) == torch.float32
    assert resolve_precision("bfloat16", CPU, {torch.float32}) == torch.bfloat16


@pytest.mark.parametrize("value", ["float16", "int4", ""])
def test_another_format_is_refused_in_one_line(value):
    with pytest.raises(
        OptionError, match=r"^precision must be one of auto, float32, bfloat16, int8, got '.*'; leave it out"
    ):
        resolve_precision(value, CPU)


def test_float16_weights_on_a_processor_are_refused():
    with pytest.raises(OptionError, match="must not be float16 on a processor"):
        resolve_precision("auto", CPU, {torch.float16})
    assert resolve_precision("auto", torch.device("cuda"), {torch.float16}) == torch.float16


def test_bfloat16_weights_run_in_bfloat16_and_cannot_be_asked_for_float32():
    assert resolve_precision("auto", CPU, {torch.bfloat16}) == torch.bfloat16
    with pytest.raises(OptionError, match="must be that of the weights, bfloat16"):
        resolve_precision("float32", CPU, {torch.bfloat16})


def test_adapters_in_float32_over_lower_weights_leave_the_choice_open():
    assert resolve_precision("float32", CPU, {torch.float32, torch.bfloat16}) == torch.float32


def test_int8_is_for_processors_alone_and_never_chosen():
    assert resolve_precision("int8", CPU, {torch.float32}) == torch.int8
    with pytest.raises(OptionError, match="precision runs on a processor, not on cuda, got 'int8'; use bfloat16"):
        resolve_precision("int8", torch.device("cuda"))
    with pytest.raises(OptionError, match="must be that of the weights, bfloat16"):
        resolve_precision("int8", CPU, {torch.bfloat16})


def test_int8_on_another_kind_of_processor_is_refused(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(OptionError, match="precision is for x86 processors and a torch with oneDNN, got 'int8'; use f"):
        resolve_precision("int8", CPU, {torch.float32})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("flags : avx2 avx512_vnni\n", True),
        ("flags : avx2 avx_vnni\n", True),
        ("flags : avx2 avx512f\n", False),
        ("", False),
    ],
)
def test_products_of_8_bits_are_known_by_the_processors_flags(processor, content, expected):
    processor(content)
    assert has_int8_products() is expected
