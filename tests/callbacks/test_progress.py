"""The progress of a run, in steps of the full run, and its speed."""

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from embeddings.callbacks import StepProgress, Throughput
from embeddings.callbacks.progress import Work, backbone_of, flops, work_of
from embeddings.cli.fit import TrainerCLI
from embeddings.cli.main import main
from embeddings.common import OptionError, UserError
from embeddings.common.types import Prediction
from embeddings.models.moe.upcycling import Upcycling, upcycle
from embeddings.training.gradcache import GradCache
from tests.helpers.contrastive import random_batch, with_context
from tests.helpers.runs import component, fit, logged_rows, run_config, write_config
from tests.helpers.tiny import tiny_bert
from tests.models.moe import tiny_rotary
from tests.modules.cde_runs import cde_config

EACH_STEP: dict[str, Any] = component("StepProgress", every_seconds=0)


def run(folder: Path, *words: str, callbacks: list[dict[str, Any]], **trainer: Any) -> TrainerCLI:
    config = run_config(folder)
    config["trainer"] |= {"enable_progress_bar": None, "callbacks": callbacks, **trainer}
    return fit(folder, config, *words)


def steps_shown(stderr: str) -> list[str]:
    return [found[1] for line in stderr.splitlines() if (found := re.match(r"training:.*?(\d+/[\d?]+) \[", line))]


def test_a_log_has_one_line_per_step_with_loss_and_remaining_time(tmp_path, capsys):
    run(tmp_path, callbacks=[EACH_STEP])
    stderr = capsys.readouterr().err
    assert steps_shown(stderr) == ["0/4", "1/4", "2/4", "3/4", "4/4"]
    lines = [line for line in stderr.split("\n") if "training:" in line]
    assert not any("\r" in line for line in lines)
    assert all(re.search(r"train/loss=\d", line) for line in lines[1:])
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d, ", lines[2])  # elapsed < remaining


def test_the_bar_counts_optimiser_steps_over_all_epochs(tmp_path, capsys):
    run(tmp_path, callbacks=[EACH_STEP], max_steps=-1, max_epochs=2, accumulate_grad_batches=4)
    stderr = capsys.readouterr().err
    assert steps_shown(stderr) == ["0/4", "1/4", "2/4", "3/4", "4/4"]
    epochs = re.findall(r"(\d)/4 \[.*epoch=(\d)", stderr)
    assert epochs == [("1", "0"), ("2", "0"), ("3", "1"), ("4", "1")]


@pytest.mark.filterwarnings(r"ignore:When using `Trainer\(accumulate_grad_batches != 1\)`")
def test_the_bar_ends_at_its_total_if_the_accumulation_changes(tmp_path, capsys):
    changing = component("GradientAccumulationScheduler", scheduling={0: 4, 1: 8})
    run(tmp_path, callbacks=[EACH_STEP, changing], max_steps=-1, max_epochs=2)
    assert steps_shown(capsys.readouterr().err) == ["0/3", "1/3", "2/3", "3/3"]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_bar_of_a_resumed_run_starts_at_its_step(tmp_path, capsys):
    checkpoint = component("ModelCheckpoint", dirpath=str(tmp_path / "kept"), save_last=True, every_n_train_steps=2)
    run(tmp_path, callbacks=[EACH_STEP, checkpoint], max_steps=2)
    capsys.readouterr()
    resumed = ("--ckpt_path", str(tmp_path / "kept/last.ckpt"))
    run(tmp_path, *resumed, callbacks=[EACH_STEP, checkpoint], max_steps=4)
    assert steps_shown(capsys.readouterr().err) == ["2/4", "3/4", "4/4"]


def test_a_terminal_shows_one_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(tmp_path, callbacks=[])
    bars = [line for line in capsys.readouterr().err.split("\n") if "training:" in line]
    assert len(bars) == 1
    assert bars[0].count("\r") > 1
    assert re.search(r"4/4 \[[^\r]*$", bars[0])


@pytest.mark.parametrize(
    ("callbacks", "enabled", "expected"),
    [
        ([], None, StepProgress),
        ([], False, type(None)),
        ([component("TQDMProgressBar")], None, TQDMProgressBar),
    ],
)
def test_the_bar_is_shown_unless_the_config_disables_or_replaces_it(tmp_path, callbacks, enabled, expected):
    trainer = run(tmp_path, callbacks=callbacks, enable_progress_bar=enabled, max_steps=2).trainer
    assert type(trainer.progress_bar_callback) is expected


@pytest.mark.parametrize("is_named", [False, True])
def test_parameter_counts_are_one_line_unless_the_config_has_a_summary(is_named, tmp_path, capsys):
    config = run_config(tmp_path)
    config["trainer"] |= {"enable_model_summary": None, "max_steps": 2}
    config["trainer"]["callbacks"] = [component("RichModelSummary")] if is_named else []
    assert main(["fit", "--config", write_config(tmp_path, config)]) == 0
    out, err = capsys.readouterr()
    (line,) = re.findall(r"^([\d,]+) parameters, ([\d,]+) of them trained$", err, re.MULTILINE) or [None]
    assert ("FLOPs" in out + err) == is_named == (line is None)
    if line:
        assert line[0] == line[1]


def test_the_work_of_a_contrastive_batch_is_counted():
    batch = random_batch(6, 2)
    lengths = [batch.query.lengths_N.tolist(), batch.candidate.lengths_N.tolist()]
    plain = work_of(batch)
    assert plain.pairs == 6
    assert plain.tokens == sum(map(sum, lengths))
    assert plain.computed == sum(len(of_tower) * max(of_tower) for of_tower in lengths)
    assert plain.read == plain.tokens
    assert plain.squares == sum(length**2 for of_tower in lengths for length in of_tower)
    single = work_of(batch, GradCache(mini_batch_tokens=1, mini_batch_texts=1))
    assert (single.tokens, single.computed, single.squares) == (plain.tokens, plain.tokens, plain.squares)
    pairs = work_of(batch, GradCache(mini_batch_tokens=10**6, mini_batch_texts=2))
    by_hand = 0
    for of_tower in lengths:
        longest_first = sorted(of_tower, reverse=True)
        by_hand += sum(len(longest_first[i : i + 2]) * longest_first[i] for i in range(0, len(of_tower), 2))
    assert pairs.computed == by_hand


@pytest.mark.parametrize("engine", [None, GradCache(mini_batch_tokens=1, mini_batch_texts=1)])
def test_the_context_counts_once_in_the_first_stage_and_for_each_text_in_the_second(engine):
    batch = replace(with_context(random_batch(4, 1), 5), num_extra_tokens=8)
    documents, texts, context = batch.context.lengths_N.tolist(), work_of(random_batch(4, 1)), work_of(batch, engine)
    assert context.tokens == texts.tokens + sum(documents)
    assert (context.context, context.context_squares) == (sum(documents), sum(length**2 for length in documents))
    lengths = [[length + 8 for length in tower.lengths_N.tolist()] for tower in (batch.query, batch.candidate)]
    assert context.read == sum(map(sum, lengths))
    assert context.squares == sum(length**2 for of_tower in lengths for length in of_tower)
    padded = sum(len(of_tower) * max(of_tower) for of_tower in [*lengths, documents])
    assert context.computed == (padded if engine is None else context.read + context.context)


def test_the_work_of_packed_rows_excludes_padding():
    document_NL = torch.tensor([[0, 0, 1, 1], [0, 0, -1, -1]])
    ids_NL, none_P = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(1)
    batch = Prediction(ids_NL, document_NL, none_P, none_P, True, torch.arange(2))
    assert work_of(batch) == Work(pairs=2, tokens=6, computed=8, read=6, squares=32)


def write_equally_long(path):
    """Write records whose texts all have two words."""
    records = [
        {"query": f"{a} {b}", "positive": f"{b} {a}", "negatives": [f"{a} {a}", f"{b} {b}"]}
        for a, b in itertools.permutations(["fox", "dog", "quick", "brown", "lazy"], 2)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records * 2))


class CountsOperations(Throughput):
    """Also counts operations with torch."""

    counted = 0

    def on_train_batch_start(self, *arguments):
        super().on_train_batch_start(*arguments)
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    def on_train_batch_end(self, *arguments):
        self.counter.__exit__(None, None, None)
        super().on_train_batch_end(*arguments)
        self.counted += self.counter.get_total_flops()


@pytest.mark.parametrize("stages", [1, 2])
def test_counted_operations_agree_with_torch(stages, tmp_path):
    config = run_config(tmp_path) if stages == 1 else cde_config(tmp_path, num_context=30, num_soft_prompts=4)
    options = config["model"]["init_args"]
    if stages == 1:
        options["pooling"] = {"class_path": "embeddings.models.MeanPooling"}
    # torch can count eager attention. The texts have one length because torch would also count padding.
    options["backbone"]["attn_implementation"] = "eager"
    write_equally_long(tmp_path / "pairs.jsonl")
    config["trainer"]["callbacks"] = [component(f"{__name__}.CountsOperations")]
    trainer = fit(tmp_path, config).trainer
    (counts,) = (callback for callback in trainer.callbacks if isinstance(callback, CountsOperations))
    assert counts.counted > 1e6
    assert flops(trainer.lightning_module, counts._work) / counts.counted == pytest.approx(1.0, abs=0.1)
    if stages == 2:
        of_context, module = Work(context=100, context_squares=1000), trainer.lightning_module
        trained, module._phase = flops(module, of_context), "frozen"
        # No backward pass reaches a frozen first stage.
        assert flops(module, of_context) == pytest.approx(trained / 3, rel=0.01)


class Module(L.LightningModule):
    def __init__(self, backbone):
        super().__init__()
        self.embedder = nn.Module()
        self.embedder.backbone = backbone


def test_operations_of_an_encoder_equal_the_formula():
    model = tiny_bert()
    config, module = model.config, Module(model)
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    matrices = layers * (4 * width * width + 2 * width * inner)
    found = flops(module, Work(read=100)) / 100
    # The count includes biases and norms.
    assert 6 * matrices < found < 6 * matrices * 1.1
    only_squares = flops(module, Work(squares=1000))
    # Two products of L^2 H per layer, 2 operations each, once forward and twice backward.
    assert only_squares == 3 * layers * 2 * 2 * 1000 * width


def test_frozen_weights_have_no_weight_gradient():
    model = tiny_bert()
    trained = flops(Module(model), Work(read=100))
    model.encoder.layer[1:].requires_grad_(False)
    model.embeddings.requires_grad_(False)
    assert trained * 4 / 6 < flops(Module(model), Work(read=100)) < trained
    # Without any trained weight the backbone has no backward pass.
    model.requires_grad_(False)
    assert flops(Module(model), Work(read=100)) == pytest.approx(trained * 2 / 6)


def test_only_the_experts_that_a_token_uses_count():
    rotary = tiny_rotary()
    dense = flops(Module(rotary), Work(read=100))
    sparse = upcycle(rotary, Upcycling(num_experts=4, top_k=1))
    assert flops(Module(sparse), Work(read=100)) == pytest.approx(dense, rel=0.05)


def test_a_run_logs_its_speed(tmp_path):
    config = run_config(tmp_path)
    config["trainer"]["callbacks"] = [component("Throughput", every_n_steps=2)]
    fit(tmp_path, config)
    rows = logged_rows(tmp_path, "throughput/pairs_per_second")
    assert [int(row["step"]) for row in rows] == [2, 4]
    for row in rows:
        pairs, tokens = float(row["throughput/pairs_per_second"]), float(row["throughput/tokens_per_second"])
        # Each pair has a query and three candidates of at most 16 tokens.
        assert pairs * 4 < tokens <= pairs * 4 * 16
        assert 0 <= float(row["throughput/padding"]) < 1
        assert 0 <= float(row["throughput/waiting"]) < 1
        assert float(row["throughput/tflops"]) > 0


def test_invalid_options_and_modules_without_a_backbone_are_refused():
    with pytest.raises(OptionError, match=r"Throughput\.every_n_steps must be >= 1, got 0"):
        Throughput(0)
    with pytest.raises(UserError, match="needs a module with a backbone"):
        Throughput().check_run(None, L.LightningModule(), None)
    assert backbone_of(L.LightningModule()) is None
