import platform

import torch

from embeddings.common import hardware
from embeddings.common.hardware import device_name, processors


def test_the_processors_are_counted_and_named(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    info.write_bytes(b"processor : 0\nmodel name\t: Some CPU: 2.1\xffGHz\n\nprocessor : 1\nmodel name\t: Some CPU\n")
    monkeypatch.setattr(hardware, "_CPU_INFO", info)
    assert processors().startswith("2 x Some CPU")
    assert device_name(torch.device("cpu")) == processors()


def test_a_machine_that_does_not_say_has_the_name_of_its_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "_CPU_INFO", tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert processors() == "riscv64"


def test_a_gpu_has_its_own_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert device_name(torch.device("cuda", 3)) == "GPU 3"
