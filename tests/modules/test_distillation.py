"""Frozen teachers of states and of vectors: plain steps, GradCache, two ranks, full runs; zero-keeping LoRA."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from embeddings.cli.main import main
from embeddings.common import ContrastiveBatch, OptionError, TextSettings, TokenBatch
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from embeddings.inference import Encoder
from embeddings.losses import InfoNCE, MarginMSE, SimilarityDistillation, SurrogateFilter
from embeddings.losses.distillation import Distillation
from embeddings.mining.pair_vectors import encode_pairs
from embeddings.models import (
    BackboneConfig,
    Embedder,
    LatentAttentionPooling,
    LoraSettings,
    MeanPooling,
    add_lora,
)
from embeddings.models.lora import merged_state_dict
from embeddings.models.pooling import plain_backbone
from embeddings.modules import LayerDistillation, NVEmbedModule, distillation
from embeddings.modules.distillation import LayerTeacher, VectorTeacher, layer_pairs
from embeddings.training import GradCache
from embeddings.training.gradcache import plain_step
from tests.helpers.contrastive import batch_of, gradient_vector, random_batch, random_records, relative_error
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import backbone_folder, component, fit, run_config, write_config
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.modules.test_checkpoints import differences_after_resuming
from tests.training.test_gradcache import REPLAYED

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory")

SETTINGS = LayerDistillation(teacher="given", alpha=0.3)
ENGINES = {name: GradCache(**REPLAYED[name]) for name in ("one text", "uneven", "half kept")}


def latent_teacher(hidden_size: int = 32) -> Embedder:
    torch.manual_seed(5)
    pooling = LatentAttentionPooling(hidden_size, num_latents=4, num_heads=2, head_dim=8)
    return Embedder(tiny_bert(seed=7, hidden_size=hidden_size), wordpiece_tokenizer(), pooling).double()


def student(folder: str, settings: LayerDistillation = SETTINGS, width: int = 32, **options: Any) -> NVEmbedModule:
    loss = InfoNCE(temperature=0.1, **options)
    module = NVEmbedModule(BackboneConfig(folder), MeanPooling, loss=loss, distillation=settings, seed=1)
    module.double().eval()
    module.layer_teacher = LayerTeacher(settings, module.embedder, latent_teacher(width))
    return module


def test_the_distillation_is_the_papers_sum(bert: str) -> None:
    module, batch = student(bert), random_batch(5, 2)
    found = plain_step(module, batch)
    squares: dict[str, list[Tensor]] = {"layer 1": [], "output": []}
    for tokens in (batch.query, batch.candidate):
        start = 0
        for length in tokens.lengths_N.tolist():
            ids_1L = tokens.input_ids_T[start : start + length][None]
            start += length
            models = (module.embedder, module.layer_teacher.embedder)
            own, other = (plain_backbone(model.backbone)(ids_1L, output_hidden_states=True) for model in models)
            squares["layer 1"] += [*(own.hidden_states[1] - other.hidden_states[1])[0].square().mean(1)]
            block = models[1].pooling.token_states(other.last_hidden_state[0])
            vector_1H = models[1].pooling(other.last_hidden_state, torch.ones_like(ids_1L, dtype=torch.bool))
            torch.testing.assert_close(block.mean(0), vector_1H[0], rtol=1e-10, atol=1e-12)
            squares["output"] += [*(own.last_hidden_state[0] - block).square().mean(1)]
    expected = sum(torch.stack(values).mean() for values in squares.values())
    torch.testing.assert_close(found.terms["distillation"], expected.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(found.loss, found.terms["contrastive"] + 0.3 * expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_gradcache_gives_the_gradient_of_the_plain_step(engine: GradCache, width: int, bert: str) -> None:
    settings = LayerDistillation("given", 0.3, teacher_width=width if width != 32 else None)
    module, batch = student(bert, settings, width), random_batch(6, 2)
    output = plain_step(module, batch)
    output.loss.backward()
    expected = gradient_vector(module)
    module.zero_grad()
    found = engine.step(module, batch)
    assert relative_error(gradient_vector(module), expected) <= 1e-12
    torch.testing.assert_close(found.terms["distillation"], output.terms["distillation"])
    assert (module.width_maps is not None) == (width != 32)
    if module.width_maps is not None:  # drawn from the seed, the same on every rank
        torch.manual_seed(99)
        again = student(bert, settings, width).width_maps
        assert again is not None
        assert torch.equal(again.maps[0].weight, module.width_maps.maps[0].weight)


def errors(module: NVEmbedModule, own: ContrastiveBatch, expected: Tensor) -> dict[str, float]:
    """Relative errors of the ranks' mean gradient."""
    results = {}
    for name, engine in ENGINES.items():
        module.zero_grad()
        engine.step(module, own)
        found = gradient_vector(module)
        dist.all_reduce(found)
        results[name] = relative_error(found / 2, expected)
    return results


def errors_of_states(rank: int) -> dict[str, float]:
    folder, records = str(Path.cwd() / "bert"), random_records(8, 1, seed=5)
    reference = student(folder, gather_across_devices=False)
    # The reference sums over one rank only.
    with patch("embeddings.modules.distillation.sum_over_ranks", lambda value: value):
        plain_step(reference, batch_of(records)).loss.backward()
    return errors(student(folder), batch_of(records[4 * rank : 4 * rank + 4]), gradient_vector(reference))


def errors_of_vectors(rank: int) -> dict[str, float]:
    folder, records, teacher = str(Path.cwd() / "bert"), random_records(8, 1, seed=5), teacher_of("mistral").double()
    reference = module_of(folder, SimilarityDistillation(gather_across_devices=False))
    plain_step(reference, with_precomputed_vectors(teacher, batch_of(records))).loss.backward()
    own = with_teacher_tokens(batch_of(records[4 * rank : 4 * rank + 4]))
    module = module_of(folder, SimilarityDistillation(teacher="given"), teacher)
    return errors(module, own, gradient_vector(reference))


@pytest.mark.parametrize(("errors_on_two_ranks", "maximum"), [(errors_of_states, 1e-12), (errors_of_vectors, 1e-6)])
def test_two_ranks_give_the_gradient_of_one_process(
    errors_on_two_ranks: Any, maximum: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backbone_folder(tmp_path / "bert")
    for found in run_on_two_ranks(errors_on_two_ranks):
        assert found.keys() == ENGINES.keys()
        assert max(found.values()) <= maximum, found


def test_layers_are_spread_over_the_teachers_or_chosen() -> None:
    assert layer_pairs(3, 6, None) == [(1, 1), (2, 3)]
    assert layer_pairs(6, 3, None) == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)]
    assert layer_pairs(4, 4, None) == [(1, 1), (2, 2), (3, 3)]
    assert layer_pairs(3, 6, [(2, 5)]) == [(2, 5)]
    for pair in ((2, 7), (4, 5), (0, 1)):
        with pytest.raises(OptionError, match=r"layers must be within the student's 3 layers and the teacher's 6"):
            layer_pairs(3, 6, [pair])


def test_a_teacher_that_does_not_fit_is_refused(bert: str) -> None:
    module = student(bert)
    with pytest.raises(OptionError, match=r"width 48, but the student's have width 32.*teacher_width: 48"):
        LayerTeacher(SETTINGS, module.embedder, latent_teacher(48))
    other = latent_teacher()
    other.tokenizer.add_tokens("zebra")
    with pytest.raises(OptionError, match="must have the student's tokenizer"):
        LayerTeacher(SETTINGS, module.embedder, other)


def test_a_run_distils_its_teacher_and_its_checkpoint_omits_it(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    teacher = Embedder(tiny_bert(seed=7), wordpiece_tokenizer(), MeanPooling(32))
    teacher.save_pretrained(tmp_path / "teacher")
    config["model"]["init_args"]["distillation"] = {"teacher": str(tmp_path / "teacher"), "alpha": 10.0}
    run = fit(tmp_path, config)
    metrics = run.trainer.logged_metrics
    assert metrics["train/distillation"] > 0
    loss = metrics["train/contrastive"] + 10 * metrics["train/distillation"]
    torch.testing.assert_close(metrics["train/loss"], loss)
    assert not any("teacher" in name for name in run.model.state_dict())
    run.trainer.save_checkpoint(tmp_path / "run.ckpt")
    # Loading a checkpoint does not need the teacher.
    (tmp_path / "teacher").rename(tmp_path / "gone")
    loaded = NVEmbedModule.load_from_checkpoint(tmp_path / "run.ckpt")
    assert all(map(torch.equal, loaded.parameters(), run.model.parameters()))


def sparse(model: nn.Module) -> nn.Module:
    """The model with half of each linear weight zero, in groups of four."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            group = layer.weight.data.view(-1, 4)
            group[torch.arange(len(group))[:, None], group.abs().argsort(1)[:, :2]] = 0
    return model


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: layer.weight == 0 for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


@pytest.mark.parametrize("make", [tiny_bert, tiny_mistral])
def test_zero_keeping_lora_computes_the_merged_model(make: Any) -> None:
    base: Any = sparse(make().double())
    before = zeros(base)
    adapted = add_lora(base, LoraSettings(rank=4, dropout=0.0, keep_zeros=True)).double()
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    ids_NL = torch.randint(5, 90, (3, 7))
    found = adapted(input_ids=ids_NL).last_hidden_state
    found[..., 0].sum().backward()
    assert all(weight.grad.any() for name, weight in adapted.named_parameters() if "lora_" in name)
    written = merged_state_dict(adapted)
    merged = adapted.merge_and_unload()
    for name, is_zero in zeros(merged).items():
        assert torch.equal(is_zero, before[name]), name
        assert torch.equal(written[f"{name}.weight"] == 0, before[name]), name
    torch.testing.assert_close(merged(input_ids=ids_NL).last_hidden_state, found, rtol=1e-10, atol=1e-10)


def test_a_pruned_model_trained_with_zero_keeping_lora_stays_sparse(tmp_path: Path) -> None:
    config = run_config(tmp_path, "mistral")
    folder = Path(config["model"]["init_args"]["backbone"]["name"])
    model: Any = sparse(tiny_mistral())
    before = zeros(model)
    model.save_pretrained(folder)
    config["model"]["init_args"]["lora"]["keep_zeros"] = True
    run = fit(tmp_path, config)
    run.model.embedder.save_pretrained(tmp_path / "written")
    backbone = plain_backbone(Embedder.from_pretrained(tmp_path / "written").backbone)
    changed = 0
    for name, is_zero in zeros(backbone).items():
        assert torch.equal(is_zero, before[name]), name
        changed += int((backbone.get_submodule(name).weight != model.get_submodule(name).weight).sum())
    assert changed > 1000


LOSSES: dict[str, type[Distillation]] = {"similarity": SimilarityDistillation, "margin": MarginMSE}
CACHE = component("GradCacheCallback", mini_batch_tokens=40)
TEXT = TextSettings(12, 20, {"query": "search_query: ", "document": "a b c "})


def teacher_of(kind: str) -> Embedder:
    """An encoder of the student's width, or a decoder of another one with another tokenizer."""
    if kind == "bert":
        return Embedder(tiny_bert(seed=7), wordpiece_tokenizer(), MeanPooling(32), text=TEXT)
    return Embedder(tiny_mistral(seed=7, hidden_size=48), sentencepiece_tokenizer(), MeanPooling(48), text=TEXT)


def module_of(folder: str, loss: Distillation, teacher: Embedder | None = None) -> NVEmbedModule:
    """A student in float64; a decoder has LoRA matrices that are not zero."""
    is_decoder = "mistral" in folder
    lora = LoraSettings(rank=4, dropout=0.0) if is_decoder else None
    module = NVEmbedModule(BackboneConfig(folder, bidirectional=is_decoder), MeanPooling, lora, loss, seed=1)
    module = module.double().eval()
    torch.manual_seed(0)
    for name, weight in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    if teacher is not None:
        module.vector_teacher = VectorTeacher("given", teacher)
    return module


def with_teacher_tokens(batch: ContrastiveBatch) -> ContrastiveBatch:
    """The batch for a teacher with the student's tokens."""
    return replace(batch, teacher_query=batch.query, teacher_candidate=batch.candidate)


@torch.no_grad()
def vectors_by_hand(teacher: Embedder, tokens: TokenBatch) -> Tensor:
    """The normalised mean state of each text, embedded alone."""
    texts, backbone = tokens.input_ids_T.split(tokens.lengths_N.tolist()), teacher.backbone
    return torch.cat([F.normalize(backbone(ids_L[None]).last_hidden_state.mean(1), dim=1) for ids_L in texts])


def with_precomputed_vectors(teacher: Embedder, batch: ContrastiveBatch) -> ContrastiveBatch:
    query_BS, candidate_CS = (vectors_by_hand(teacher, tokens) for tokens in (batch.query, batch.candidate))
    return replace(batch, surrogate_query_BS=query_BS, surrogate_candidate_CS=candidate_CS)


@pytest.mark.parametrize("kind", ["bert", "mistral"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_loss_and_gradient_equal_those_with_precomputed_vectors(
    loss: type[Distillation], kind: str, bert: str, mistral: str
) -> None:
    """In the plain step and under GradCache."""
    teacher, batch = teacher_of("mistral").double(), random_batch(6, 2)
    by_hand, options = with_precomputed_vectors(teacher, batch), {"temperature": 0.1, "alpha": 0.7}
    folder = bert if kind == "bert" else mistral
    reference = module_of(folder, loss(**options))
    expected = plain_step(reference, by_hand)
    expected.loss.backward()
    assert expected.terms["distillation"] > 1e-3
    module = module_of(folder, loss(teacher="given", **options), teacher)
    for engine in (None, *ENGINES.values()):
        module.zero_grad()
        if engine is None:
            found = plain_step(module, with_teacher_tokens(batch))
            found.loss.backward()
        else:
            found = engine.step(module, with_teacher_tokens(batch))
        torch.testing.assert_close(found.loss.detach(), expected.loss.detach(), rtol=1e-6, atol=0)
        assert relative_error(gradient_vector(module), gradient_vector(reference)) <= 1e-6


def config_with_teacher(folder: Path, kind: str, student: str = "bert", **loss: Any) -> dict[str, Any]:
    """A run with a teacher, which is written to `folder`."""
    config = run_config(folder, student)
    teacher_of(kind).save_pretrained(folder / "teacher")
    options = {"temperature": 0.1, "teacher": str(folder / "teacher"), **loss}
    config["model"]["init_args"]["loss"] = component("embeddings.losses.SimilarityDistillation", **options)
    return config


def steps_of(run: Any) -> list[float]:
    """Loss and divergence of each step."""
    with open(Path(run.trainer.log_dir) / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [float(row[name]) for row in rows for name in ("train/loss", "train/distillation") if row.get(name)]


@pytest.mark.parametrize(
    ("student", "kind", "callbacks"),
    [
        pytest.param("bert", "mistral", [], marks=pytest.mark.slow),
        pytest.param("bert", "bert", [CACHE], marks=pytest.mark.slow),
        ("mistral", "bert", [CACHE]),
    ],
)
def test_a_run_with_a_teacher_equals_one_with_precomputed_vectors(
    student: str, kind: str, callbacks: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The teacher uses its own prompts, lengths and tokenizer, like the jobs that precompute vectors."""
    config = config_with_teacher(tmp_path, kind, student)
    config["trainer"]["callbacks"] = callbacks
    live = steps_of(fit(tmp_path, config))
    data = config["data"]["init_args"]
    (source,) = data["sources"]
    cached = open_cached(SourceConfig(**source), data["cache_dir"])
    encoder = Encoder.from_pretrained(str(tmp_path / "teacher"), precision="float32")
    encode_pairs(encoder, cached, tmp_path / "vectors", negatives=True)
    source["surrogate_vectors"] = str(tmp_path / "vectors")
    del config["model"]["init_args"]["loss"]["init_args"]["teacher"]
    before = steps_of(fit(tmp_path, config))
    assert len(live) == len(before) == 8
    assert min(live) > 1e-3
    assert live == pytest.approx(before, rel=1e-6)


@pytest.mark.slow
def test_a_run_with_a_teacher_resumes_to_the_same_bits_and_its_checkpoint_omits_it(tmp_path: Path) -> None:
    config = config_with_teacher(tmp_path, "mistral")
    config["trainer"]["callbacks"] = [CACHE]
    assert differences_after_resuming(tmp_path, config, 2) == {}
    # Loading does not need the teacher.
    (tmp_path / "teacher").rename(tmp_path / "gone")
    module = NVEmbedModule.load_from_checkpoint(tmp_path / "whole.ckpt")
    assert module.loss.teacher == str(tmp_path / "teacher")
    assert not any("teacher" in name for name in module.state_dict())


def test_a_teacher_without_an_effect_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run_config(tmp_path)
    config["model"]["init_args"]["loss"] = component("embeddings.losses.MarginMSE", temperature=0.1)
    for num_scored, is_warned in ((3, False), (1, True)):
        scores = [[2.0, 1.0, 0.0][:num_scored] + [None] * (3 - num_scored)] * 64
        rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
        lines = [json.dumps(row | {"scores": each}) for row, each in zip(rows, scores, strict=True)]
        (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
        caplog.clear()
        fit(tmp_path, config)
        assert any("the term of the teacher is 0" in message for message in caplog.messages) is is_warned


def test_a_missing_teacher_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_with_teacher(tmp_path, "bert")
    (tmp_path / "teacher").rename(tmp_path / "gone")
    says = f"{tmp_path / 'teacher'}: is not a directory"
    assert_refused(capsys, tmp_path, says, main, ["fit", "--config", write_config(tmp_path, config)])


def test_two_teachers_are_refused() -> None:
    for loss in (SimilarityDistillation(teacher="a"), MarginMSE(teacher="a")):
        for has_scores in (None, False):
            loss.check_teacher(False, has_scores)
        with pytest.raises(OptionError, match=r"model\.loss\.teacher cannot be combined .* has surrogate_vectors.*'a'"):
            loss.check_teacher(True, None)
    with pytest.raises(OptionError, match="cannot be combined with a source that has `scores`"):
        MarginMSE(teacher="a").check_teacher(False, True)
    SimilarityDistillation(teacher="a", false_negative_filter=SurrogateFilter()).check_teacher(False, True)


@pytest.mark.parametrize("mini_batch_tokens", [8192, 10])
@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_a_teachers_vectors_of_a_batch_equal_those_of_single_texts(
    kind: str, mini_batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "MINI_BATCH_TOKENS", mini_batch_tokens)
    embedder = teacher_of(kind).double()
    teacher, batch = VectorTeacher("given", embedder), random_batch(5, 2)
    assert not embedder.training
    found, expected = teacher.with_vectors(with_teacher_tokens(batch)), with_precomputed_vectors(embedder, batch)
    for name in ("surrogate_query_BS", "surrogate_candidate_CS"):
        assert not getattr(found, name).requires_grad
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-12)
