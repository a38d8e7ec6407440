"""Several processes write the folder that one would, and what they finished is kept whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from embeddings.common import OptionError
from embeddings.inference import vector_folder
from embeddings.inference.encoder import Encoder
from embeddings.inference.vector_folder import encode_corpus, on_devices, parse_devices
from tests.inference.models import some_texts, tiny_embedder, write_corpus

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("devices", "num_gpus", "found"),
    [
        (1, 0, ("cpu",)),
        (3, 0, ("cpu", "cpu", "cpu")),
        ("cpu, cpu", 0, ("cpu", "cpu")),
        (2, 4, ("cuda:0", "cuda:1")),
        ("cuda:3,cuda:1", 4, ("cuda:3", "cuda:1")),
        ("cuda", 1, ("cuda",)),
        ("cpu", 4, ("cpu",)),
        (0, 0, "devices must be >= 1, got 0; give a number"),
        (0, 4, "devices must be from 1 to the 4 GPUs there are, got 0"),
        (5, 4, "devices must be from 1 to the 4 GPUs there are, got 5"),
        ("cuda:0", 0, r"devices must name devices of this machine \(cpu\), got 'cuda:0'"),
        *((name, 0, "devices must name devices") for name in ("cuda", "", "cpu,", "tpu")),
        ("cuda:4", 4, "devices must name devices"),
        ("cpu,cuda:0", 4, "devices must all be of one kind"),
    ],
)
def test_devices_are_counted_or_named_and_refused_where_they_are_not_there(devices, num_gpus, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    if isinstance(found, tuple):
        assert parse_devices(devices) == found
    else:
        with pytest.raises(OptionError, match=found):
            parse_devices(devices)


def test_a_single_device_works_here_and_reads_no_further_than_asked():
    encoder, read = Encoder(tiny_embedder()), []
    results = on_devices(encoder, ("cpu",), lambda used, item: (used, read.append(item), item)[::2], iter(range(3)))
    assert next(results) == (encoder, 0)
    assert read == [0]
    assert [item for _, item in results] == [1, 2]


def test_a_model_that_lies_nowhere_cannot_be_shared_out():
    with pytest.raises(OptionError, match="devices needs a model that was read from a directory"):
        on_devices(Encoder(tiny_embedder()), ("cpu", "cpu"), print, [])


@pytest.mark.parametrize("is_closed", [False, True])
def test_the_model_makes_room_for_others_and_is_back_afterwards(is_closed, model, monkeypatch):
    encoder, moves, events = Encoder.from_pretrained(model, device="cpu"), [], []
    monkeypatch.setattr(encoder.embedder, "to", moves.append)
    home = encoder.embedder.device

    def spread(makers, items):
        for item in items:
            events.append((item, list(moves)))
            yield item

    monkeypatch.setattr(vector_folder, "spread", spread)
    results = on_devices(encoder, ("cpu", "cpu"), print, [1, 2])
    assert moves == []
    assert next(results) == 1
    results.close() if is_closed else list(results)
    assert events == [(1, ["cpu"]), (2, ["cpu"])][: 1 if is_closed else 2]
    assert moves == ["cpu", home]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices") / "model"
    tiny_embedder(prompts={"document": "a dog "}).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", some_texts(40))


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def encoded(model, corpus, output, **options):
    encoder = Encoder.from_pretrained(model, device="cpu", precision="float32", dimensions=20)
    encode_corpus(encoder, corpus, output, shard_size=4, **options)
    return content(output)


@pytest.mark.slow
@pytest.mark.parametrize("vector_format", ["float32", "int8"])
def test_two_devices_and_a_tokeniser_write_the_bytes_of_one_process(vector_format, model, corpus, tmp_path, one_thread):
    options = {"vector_format": vector_format}
    whole = encoded(model, corpus, tmp_path / "whole", **options)
    assert len([name for name in whole if name.startswith("vectors")]) == 10
    found = encoded(model, corpus, tmp_path / "shared", devices=("cpu", "cpu"), tokenizer_workers=1, **options)
    assert found == whole
    for name in ("vectors-00002.npy", "vectors-00007.npy", "manifest.json"):
        (tmp_path / "shared" / name).unlink()
    manifest = json.loads(whole["manifest.json"]) | {"complete": False}
    (tmp_path / "shared" / "manifest.json").write_text(json.dumps(manifest))
    assert encoded(model, corpus, tmp_path / "shared", tokenizer_workers=2, **options) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "number", "code", "says"),
    [
        ("group", signal.SIGINT, 130, "interrupted; finished files and shards are kept"),
        ("worker", signal.SIGKILL, 70, ", cpu was ended by a signal (SIGKILL); what is finished is kept"),
    ],
)
def test_a_run_that_is_cut_short_goes_on(target, number, code, says, model, tmp_path, one_thread):
    corpus, output = write_corpus(tmp_path / "corpus.jsonl", some_texts(800)), tmp_path / "out"
    line = ["encode", "--model", model, "--input", str(corpus), "--output", str(output), "--precision", "float32"]
    line += ["--dimensions", "20", "--shard_size", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "main.py", *line, "--devices", "2"],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not list(output.glob("vectors-*.npy")):
        assert process.poll() is None
        time.sleep(0.02)
    if target == "group":
        # As a terminal's Ctrl-C.
        os.killpg(process.pid, number)
    else:
        os.kill(worker_of(process.pid), number)
    errors = process.communicate()[1].decode().strip().splitlines()
    assert not [line for line in errors if "Traceback" in line]
    assert process.returncode == code
    assert errors[-1].startswith("error: ")
    assert says in errors[-1]
    left = content(output)
    assert 0 < len([name for name in left if name.startswith("vectors")]) < 200
    assert not [name for name in left if name.startswith(".")] or target == "worker"
    whole = encoded(model, corpus, tmp_path / "whole")
    resumed = encoded(model, corpus, output)
    assert {name: resumed[name] for name in whole} == whole


def worker_of(process):
    """One of the processes that a process started for a device."""
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("no worker")
