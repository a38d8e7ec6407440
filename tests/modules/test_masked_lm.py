"""Language modelling through the real command line, on tiny models of the real architectures."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from embeddings.cli.main import main
from embeddings.common import OptionError
from embeddings.common.types import PackedRows, Prediction
from embeddings.data.samplers.base import PlanEntry
from embeddings.figures.run_facts import read_curves
from embeddings.models import BackboneConfig, HeadSettings, LoraSettings, MeanPooling
from embeddings.modules import MaskedLMModule, NVEmbedModule
from embeddings.modules.masked_lm import LanguageTask, Masking
from tests.helpers.runs import component, fit
from tests.helpers.tiny import bpe_tokenizer, save_backbone, wordpiece_tokenizer
from tests.models.language_models import causal_mistral, language_model_folder
from tests.modules.language_runs import language_config

SETTINGS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SETTINGS |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
SCRATCH = {"model_type": "mistral", "settings": SETTINGS}
UNDERSCORE = Masking(0.5, 1.0, 0.0, mask_token="_")


def logged(cli: Any, name: str) -> list[float]:
    with open(Path(cli.trainer.log_dir) / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return language_model_folder(tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return language_model_folder(tmp_path_factory.mktemp("bert"), "bert")


@pytest.mark.parametrize(
    "objective", ["mntp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlm", "scratch"))]
)
def test_a_short_run_lowers_the_loss_and_logs_training_and_validation(objective: str, tmp_path: Path) -> None:
    model: dict[str, Any] = {}
    if objective == "scratch":
        wordpiece_tokenizer().save_pretrained(tmp_path / "tokenizer")
        model = {"from_scratch": {"tokenizer": str(tmp_path / "tokenizer"), **SCRATCH}, "separate_documents": True}
    config = language_config(tmp_path, "causal" if objective == "scratch" else objective, **model)
    config["trainer"] |= {"val_check_interval": 6, "check_val_every_n_epoch": None}
    cli = fit(tmp_path, config)
    losses = logged(cli, "train/loss")
    assert len(losses) == 12
    vocabulary = cli.model.language_model.vocab_size
    # An untrained model's loss is the log of the vocabulary size.
    assert losses[0] == pytest.approx(math.log(vocabulary), rel=0.1)
    assert losses[-1] < 0.75 * losses[0]
    for stage, count in (("train", 12), ("val", 2)):
        pairs = list(zip(logged(cli, f"{stage}/loss"), logged(cli, f"{stage}/perplexity"), strict=True))
        assert len(pairs) == count
        assert all(perplexity == pytest.approx(math.exp(loss), rel=1e-4) for loss, perplexity in pairs)
        assert all(0 <= value <= 1 for value in logged(cli, f"{stage}/accuracy"))
    val = logged(cli, "val/loss")
    assert val[1] < val[0] < losses[0]
    # Validation is logged at the number of completed steps, training at the index of the step.
    curves = read_curves(Path(cli.trainer.log_dir))
    assert [curves[f"val/{name}"][0] for name in ("loss", "perplexity", "accuracy")] == [[6, 12]] * 3
    assert curves["train/loss"][0] == list(range(12))


def test_lora_does_not_change_the_base_and_its_export_is_an_initial_model(tmp_path: Path) -> None:
    config = language_config(tmp_path, "mntp", lora={"rank": 4, "alpha": 8, "dropout": 0.1})
    config["trainer"]["callbacks"] = [component("ExportLanguageModel", output=str(tmp_path / "mntp"))]
    cli = fit(tmp_path, config)
    start, end = load_file(tmp_path / "backbone/model.safetensors"), load_file(tmp_path / "mntp/model.safetensors")
    assert start.keys() == end.keys()
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if "_proj" in name}
    state = cli.model.state_dict()
    kept = {name.replace(".base_layer", "") for name in state if ".base_layer." in name}
    assert len(kept) == 2 * 7

    backbone = BackboneConfig(str(tmp_path / "mntp"), bidirectional=True)
    module = NVEmbedModule(backbone, MeanPooling, lora=LoraSettings(rank=2))
    ids_NL = torch.arange(5, 17)[None]
    with torch.no_grad():
        trained = cli.model.language_model.eval()(ids_NL, torch.zeros_like(ids_NL), False, False)
        found = module.embedder.backbone.eval()(input_ids=ids_NL).last_hidden_state
    torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-5)
    # It can be trained further.
    MaskedLMModule("mntp", backbone, masking=UNDERSCORE)


def test_a_checkpoint_is_exported_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = language_config(tmp_path, "causal", lora={"rank": 2, "alpha": 4, "dropout": 0.0})
    config["trainer"]["max_steps"] = 2
    config["trainer"]["callbacks"] = [
        component("ModelCheckpoint", save_last=True),
        component("ExportLanguageModel", output=str(tmp_path / "one")),
    ]
    cli = fit(tmp_path, config)
    last = Path(cli.trainer.log_dir) / "checkpoints" / "last.ckpt"
    assert main(["export", "--checkpoint", str(last), "--output", str(tmp_path / "two")]) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_loss_of_masked_next_tokens_equals_a_loop(mistral: str) -> None:
    """The cross-entropy of each masked token from the full logits one position before it."""
    module = MaskedLMModule("mntp", BackboneConfig(mistral, bidirectional=True), masking=UNDERSCORE).eval()
    ids_NL = torch.randint(10, 300, (4, 20))
    zeros_NL = torch.zeros_like(ids_NL)
    prediction = module.task(PackedRows(ids_NL, zeros_NL, zeros_NL.bool(), torch.arange(4), torch.arange(4)))
    underscore = module.tokenizer.get_vocab()["_"]
    with torch.no_grad():
        logits_NLV = module.language_model.model(input_ids=prediction.input_ids_NL).logits
        losses = [
            F.cross_entropy(logits_NLV[n, i - 1], ids_NL[n, i])
            for n in range(4)
            for i in range(20)
            if int(prediction.input_ids_NL[n, i]) == underscore != int(ids_NL[n, i])
        ]
        assert 20 < len(losses) < 60
        output = module.score(prediction)
    assert output.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


@pytest.mark.parametrize("separate", [False, True])
def test_a_document_changes_anothers_loss_only_without_separation(separate: bool, mistral: str) -> None:
    backbone, head = BackboneConfig(mistral), HeadSettings(tile_logits=3000)
    module = MaskedLMModule("causal", backbone, separate_documents=separate, head=head).eval()
    assert module._tile_positions == 3000 // module.language_model.vocab_size == 5
    ids_NL, places_P = torch.randint(10, 300, (1, 20)), torch.arange(8, 19)
    document_NL = (torch.arange(20) >= 8).long()[None]
    changed_NL = torch.where(document_NL == 0, ids_NL + 5, ids_NL)
    labels_P, row_N = ids_NL[0, 9:], torch.arange(1)
    of_second = [Prediction(ids, document_NL, places_P, labels_P, False, row_N) for ids in (ids_NL, changed_NL)]
    with torch.no_grad():
        losses = [module.score(prediction).loss.item() for prediction in of_second]
    assert (losses[0] == losses[1]) is separate


def test_validation_masks_the_same_tokens_each_time_and_counts_every_target_once(tmp_path: Path) -> None:
    config = language_config(tmp_path, "mlm")
    config["trainer"] |= {"max_steps": 4, "val_check_interval": 2, "check_val_every_n_epoch": None}
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.0
    cli = fit(tmp_path, config)
    first, second = logged(cli, "val/loss")
    assert first == second
    data, module = cli.datamodule, cli.model.eval()
    rows = data._validation_rows
    assert len(rows) > 8
    assert len(rows) % 8 != 0
    entries = rows.__getitems__([PlanEntry(row, row) for row in range(len(rows))])
    whole = data._collator()(entries)
    assert isinstance(whole, Prediction)
    with torch.no_grad():
        assert module.score(whole).loss.item() == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"objective": "mntp", "masking": Masking()}, "mask_token must be set: the tokenizer has no mask token"),
        ({"objective": "mntp", "masking": Masking(mask_token="fish")}, "mask_token must be a token of the vocabulary"),
        ({"objective": "causal", "masking": Masking()}, "masking has no effect on objective causal"),
        ({"objective": "mntp", "bidirectional": False}, "bidirectional does not fit objective mntp, got False"),
        ({"objective": "causal", "bidirectional": True}, "bidirectional does not fit objective causal, got True"),
        ({"objective": "causal", "backbone": None}, "or model.from_scratch must be set, got 'neither'"),
    ],
)
def test_what_cannot_take_effect_is_refused(arguments: dict[str, Any], says: str, mistral: str) -> None:
    bidirectional = arguments.pop("bidirectional", arguments["objective"] == "mntp")
    options = {"backbone": BackboneConfig(mistral, bidirectional=bidirectional), **arguments}
    with pytest.raises(OptionError, match=says):
        MaskedLMModule(**options)


def test_a_decoder_saved_without_its_causal_mask_cannot_have_the_causal_objective(mistral: str, tmp_path: Path) -> None:
    module = MaskedLMModule("mntp", BackboneConfig(mistral, bidirectional=True), masking=UNDERSCORE)
    module.save_pretrained(tmp_path / "open")
    with pytest.raises(OptionError, match="needs a causal mask"):
        MaskedLMModule("causal", BackboneConfig(str(tmp_path / "open")))


def test_rows_longer_than_the_positions_or_than_a_window_that_keeps_documents_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"data\.row_length must be <= 128, the positions that the backbone has"):
        fit(tmp_path, language_config(tmp_path, "mlm"), "--data.init_args.row_length=129")
    model = causal_mistral()
    model.config.sliding_window = 16
    folder = save_backbone(str(tmp_path / "windowed"), model, bpe_tokenizer())
    config = language_config(tmp_path, "causal", separate_documents=True)
    config["model"]["init_args"]["backbone"]["name"] = folder
    with pytest.raises(OptionError, match=r"data\.row_length must be <= 16, the window of the sliding"):
        fit(tmp_path, config)


MASK, BOS, EOS, PAD = 4, 1, 2, 0
ORDINARY = torch.arange(5, 60)


def packed(num_rows: int = 6, length: int = 40, seed: int = 0) -> PackedRows:
    """Rows of documents `<s> … </s>` of random length; the last row ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    ids_NL = torch.randint(5, 60, (num_rows, length), generator=generator)
    document_NL = torch.zeros_like(ids_NL)
    for row in range(num_rows):
        begins = torch.rand(length, generator=generator) < 0.15
        begins[0] = False
        document_NL[row] = begins.cumsum(0)
        ids_NL[row][begins] = BOS
        ids_NL[row, :-1][begins[1:]] = EOS
    ids_NL[0, 7] = MASK
    ids_NL[-1, -9:], document_NL[-1, -9:] = PAD, -1
    special_NL = (ids_NL == BOS) | (ids_NL == EOS) | (document_NL < 0)
    return PackedRows(ids_NL, document_NL, special_NL, torch.arange(100, 100 + num_rows), torch.arange(num_rows))


def task(objective: Any, separate: bool = False, seed: int = 0, probability: float = 0.5) -> LanguageTask:
    masking = None if objective == "causal" else Masking(probability, 1.0, 0.0)
    return LanguageTask(objective, masking, MASK, ORDINARY, separate, seed)


def pairs(prediction: Prediction) -> list[tuple[int, int]]:
    """(position of the state, label) of each target."""
    return list(zip(prediction.read_P.tolist(), prediction.label_P.tolist(), strict=True))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("objective", ["mlm", "mntp", "causal"])
def test_each_target_is_predicted_from_the_position_of_the_objective(objective: str, separate: bool) -> None:
    rows = packed()
    found = task(objective, separate)(rows)
    ids, documents = rows.input_ids_NL.tolist(), rows.document_NL.tolist()
    expected, length = [], len(ids[0])
    for n in range(len(ids)):
        for i in range(length):
            hidden = int(found.input_ids_NL[n, i]) != ids[n][i]
            if documents[n][i] < 0 or (objective != "causal" and not hidden):
                continue
            if objective == "mlm":
                expected.append((n * length + i, ids[n][i]))
            elif i > 0 and (not separate or documents[n][i] == documents[n][i - 1]):
                # The token at i is predicted from the state at i - 1.
                expected.append((n * length + i - 1, ids[n][i]))
    assert len(expected) > 50
    assert pairs(found) == expected
    assert found.has_padding


@pytest.mark.parametrize("objective", ["mlm", "mntp"])
def test_special_tokens_padding_and_mask_tokens_are_never_masked(objective: str) -> None:
    rows = packed(60)
    found = task(objective, probability=0.95)(rows)
    hidden_NL = found.input_ids_NL != rows.input_ids_NL
    assert hidden_NL.sum() > 1000
    assert not (hidden_NL & rows.special_NL).any()
    assert not {BOS, EOS, PAD, MASK} & set(found.label_P.tolist())
    # The first token of a row is masked only if it can be predicted.
    assert bool(hidden_NL[:, 0].any()) is (objective == "mlm")


def test_targets_follow_from_seed_and_draw_key_and_not_from_the_batch() -> None:
    rows = packed()
    one, again, other = task("mntp")(rows), task("mntp")(rows), task("mntp", seed=1)(rows)
    assert pairs(one) == pairs(again)
    assert pairs(one) != pairs(other)
    parts = (getattr(rows, name)[2:3] for name in rows.__dataclass_fields__)
    last = PackedRows(*parts)
    assert torch.equal(task("mntp")(last).input_ids_NL[0], one.input_ids_NL[2])
    redrawn = replace(rows, draw_N=rows.draw_N + 1000)
    assert pairs(task("mntp")(redrawn)) != pairs(one)


@pytest.mark.parametrize(
    ("probability", "mask_fraction", "random_fraction"), [(0.15, 0.8, 0.1), (0.8, 1.0, 0.0), (0.3, 0.0, 1.0)]
)
def test_tokens_are_masked_with_the_configured_probabilities(
    probability: float, mask_fraction: float, random_fraction: float
) -> None:
    """20,000 tokens, with a tolerance of four standard deviations."""
    ids_NL, zeros_NL = torch.randint(5, 60, (40, 500)), torch.zeros(40, 500, dtype=torch.int64)
    masking = Masking(probability, mask_fraction, random_fraction)
    hide = LanguageTask("mlm", masking, MASK, ORDINARY)
    found = hide(PackedRows(ids_NL, zeros_NL, zeros_NL.bool(), torch.arange(40), torch.arange(40)))
    count, total = len(found), ids_NL.numel()
    assert abs(count / total - probability) < 4 * (probability * (1 - probability) / total) ** 0.5
    hidden_P = found.input_ids_NL.flatten()[found.read_P]
    assert int((found.input_ids_NL != ids_NL).sum()) == int((hidden_P != found.label_P).sum())
    is_mask_P = hidden_P == MASK
    is_changed_P = (hidden_P != found.label_P) & ~is_mask_P
    # A random token may equal the original one.
    for is_found_P, expected in ((is_mask_P, mask_fraction), (is_changed_P, random_fraction * (1 - 1 / len(ORDINARY)))):
        assert abs(float(is_found_P.double().mean()) - expected) <= 4 * (expected * (1 - expected) / count) ** 0.5
    drawn = set(hidden_P[is_changed_P].tolist())
    assert not drawn or (min(drawn), max(drawn)) == (5, 59)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(({"probability": bad}, "probability must be above 0 and below 1") for bad in (0.0, 1.0, -0.1, float("nan"))),
        ({"mask_fraction": 0.9, "random_fraction": 0.2}, r"mask_fraction must be >= 0 and at most 1 together"),
        ({"mask_fraction": -0.1}, "mask_fraction must be >= 0"),
    ],
)
def test_invalid_masking_probabilities_are_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Masking(**options)
