"""A teacher of vectors that runs beside the student: against vectors made before, a loop by hand, and on two ranks."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from embeddings.cli.main import main
from embeddings.common import ContrastiveBatch, OptionError, TextSettings, TokenBatch
from embeddings.data import EmbeddingDataModule, SourceConfig
from embeddings.data.store import open_cached
from embeddings.inference import Encoder
from embeddings.losses import MarginMSE, SimilarityDistillation, SurrogateFilter
from embeddings.losses.distillation import Distillation
from embeddings.mining.pair_vectors import encode_pairs
from embeddings.models import BackboneConfig, Embedder, LoraSettings, MeanPooling
from embeddings.modules import ContrastiveModule, NVEmbedModule, distillation
from embeddings.modules.distillation import VectorTeacher
from embeddings.training import GradCache
from embeddings.training.gradcache import plain_step
from tests.helpers.contrastive import batch_of, gradient_vector, random_batch, random_records, relative_error
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import backbone_folder, component, fit, quiet_trainer, run_config, write_config
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.losses.test_distillation import divergence_reference
from tests.modules.cde_runs import cde_config
from tests.modules.test_checkpoints import differences_after_resuming
from tests.training.test_gradcache import REPLAYED

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory")

ENGINES = {name: GradCache(**REPLAYED[name]) for name in ("one text", "uneven", "half kept")}
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


def read_by_teacher(batch: ContrastiveBatch) -> ContrastiveBatch:
    """The batch for a teacher that has the student's tokens."""
    return replace(batch, teacher_query=batch.query, teacher_candidate=batch.candidate)


@torch.no_grad()
def vectors_by_hand(teacher: Embedder, tokens: TokenBatch) -> Tensor:
    """The mean state of each text, read alone, of unit length."""
    texts, backbone = tokens.input_ids_T.split(tokens.lengths_N.tolist()), teacher.backbone
    return torch.cat([F.normalize(backbone(ids_L[None]).last_hidden_state.mean(1), dim=1) for ids_L in texts])


def taught_by_hand(teacher: Embedder, batch: ContrastiveBatch) -> ContrastiveBatch:
    query_BS, candidate_CS = (vectors_by_hand(teacher, tokens) for tokens in (batch.query, batch.candidate))
    return replace(batch, surrogate_query_BS=query_BS, surrogate_candidate_CS=candidate_CS)


@pytest.mark.parametrize("mini_batch_tokens", [8192, 10])
@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_vectors_of_a_batch_are_those_of_each_text_alone(
    kind: str, mini_batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "MINI_BATCH_TOKENS", mini_batch_tokens)
    embedder = teacher_of(kind).double()
    teacher, batch = VectorTeacher("given", embedder), random_batch(5, 2)
    assert not embedder.training
    with pytest.raises(OptionError, match="train with an EmbeddingDataModule"):
        teacher.taught(batch)
    found, expected = teacher.taught(read_by_teacher(batch)), taught_by_hand(embedder, batch)
    for name in ("surrogate_query_BS", "surrogate_candidate_CS"):
        assert not getattr(found, name).requires_grad
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["bert", "mistral"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_loss_and_gradient_are_those_of_vectors_made_by_hand(
    loss: type[Distillation], kind: str, bert: str, mistral: str
) -> None:
    """In the plain step and under GradCache."""
    teacher, batch = teacher_of("mistral").double(), random_batch(6, 2)
    by_hand, options = taught_by_hand(teacher, batch), {"temperature": 0.1, "alpha": 0.7}
    folder = bert if kind == "bert" else mistral
    reference = module_of(folder, loss(**options))
    expected = plain_step(reference, by_hand)
    expected.loss.backward()
    if loss is SimilarityDistillation:
        student = [reference.embed(tokens).vector_ND for tokens in (batch.query, batch.candidate)]
        value = divergence_reference(student, by_hand, 0.1, 0.05)
        assert value > 0.01
        assert expected.terms["distillation"].item() == pytest.approx(value, rel=1e-6)
    module = module_of(folder, loss(teacher="given", **options), teacher)
    for engine in (None, *ENGINES.values()):
        module.zero_grad()
        if engine is None:
            found = plain_step(module, read_by_teacher(batch))
            found.loss.backward()
        else:
            found = engine.step(module, read_by_teacher(batch))
        torch.testing.assert_close(found.loss.detach(), expected.loss.detach(), rtol=1e-6, atol=0)
        assert relative_error(gradient_vector(module), gradient_vector(reference)) <= 1e-6


def errors_on_two_ranks(rank: int) -> dict[str, float]:
    folder, everything, results = str(Path.cwd() / "bert"), random_records(8, 1, seed=5), {}
    teacher = teacher_of("mistral").double()
    for name, engine in ENGINES.items():
        module = module_of(folder, SimilarityDistillation(teacher="given"), teacher)
        engine.step(module, read_by_teacher(batch_of(everything[4 * rank : 4 * rank + 4])))
        found = gradient_vector(module)
        dist.all_reduce(found)
        reference = module_of(folder, SimilarityDistillation(gather_across_devices=False))
        plain_step(reference, taught_by_hand(teacher, batch_of(everything))).loss.backward()
        results[name] = relative_error(found / 2, gradient_vector(reference))
    return results


def test_two_ranks_give_the_gradient_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backbone_folder(tmp_path / "bert")
    for errors in run_on_two_ranks(errors_on_two_ranks):
        assert errors.keys() == ENGINES.keys()
        assert max(errors.values()) <= 1e-6, errors


def taught_config(folder: Path, kind: str, student: str = "bert", **loss: Any) -> dict[str, Any]:
    """A run that follows a teacher, which is written to `folder`."""
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
    ("student", "kind", "callbacks"), [("bert", "mistral", []), ("bert", "bert", [CACHE]), ("mistral", "bert", [CACHE])]
)
def test_a_run_is_that_of_vectors_made_before_it(
    student: str, kind: str, callbacks: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The teacher reads its own prompts and lengths, as the jobs that make vectors do, and may have its own tokens."""
    config = taught_config(tmp_path, kind, student)
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


def test_a_run_resumes_to_the_same_bits_and_its_checkpoint_leaves_the_teacher_out(tmp_path: Path) -> None:
    config = taught_config(tmp_path, "mistral")
    config["trainer"]["callbacks"] = [CACHE]
    assert differences_after_resuming(tmp_path, config, 2) == {}
    # Exporting needs no teacher.
    (tmp_path / "teacher").rename(tmp_path / "gone")
    module = NVEmbedModule.load_from_checkpoint(tmp_path / "whole.ckpt")
    assert module.loss.teacher == str(tmp_path / "teacher")
    assert not any("teacher" in name for name in module.state_dict())


def test_a_rank_that_checks_nothing_has_its_teacher_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning prepares data, and so checks the run, on the first rank of a machine."""
    monkeypatch.setattr(ContrastiveModule, "prepare_data", lambda self: None)
    teacher_of("bert").save_pretrained(tmp_path / "teacher")
    config = run_config(tmp_path)["data"]["init_args"]
    text, sources = TextSettings(**config.pop("text")), [SourceConfig(**source) for source in config.pop("sources")]
    loss = SimilarityDistillation(teacher=str(tmp_path / "teacher"))
    module = NVEmbedModule(BackboneConfig(str(tmp_path / "backbone")), MeanPooling, loss=loss)
    trainer: L.Trainer = quiet_trainer(max_steps=1, use_distributed_sampler=False)
    trainer.fit(module, EmbeddingDataModule(sources, text, **config))
    assert trainer.callback_metrics["train/distillation"] > 0


def test_a_contextual_student_follows_a_teacher(tmp_path: Path) -> None:
    config, teacher = cde_config(tmp_path), str(tmp_path / "teacher")
    teacher_of("mistral").save_pretrained(teacher)
    config["model"]["init_args"]["loss"] = component("embeddings.losses.SimilarityDistillation", teacher=teacher)
    config["trainer"] |= {"max_steps": 2, "callbacks": [CACHE]}
    assert fit(tmp_path, config).trainer.callback_metrics["train/distillation"] > 0


def test_a_teacher_that_cannot_be_followed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = taught_config(tmp_path, "bert")
    (tmp_path / "teacher").rename(tmp_path / "gone")
    says = f"{tmp_path / 'teacher'}: is no directory"
    assert_refused(capsys, tmp_path, says, main, ["fit", "--config", write_config(tmp_path, config)])


def test_two_teachers_are_refused() -> None:
    for loss in (SimilarityDistillation(teacher="a"), MarginMSE(teacher="a")):
        for has_scores in (None, False):
            loss.check_teacher(False, has_scores)
        with pytest.raises(OptionError, match=r"model\.loss\.teacher cannot be followed .* has surrogate_vectors.*'a'"):
            loss.check_teacher(True, None)
    with pytest.raises(OptionError, match="cannot be followed where a source has `scores`"):
        MarginMSE(teacher="a").check_teacher(False, True)
    SimilarityDistillation(teacher="a", false_negative_filter=SurrogateFilter()).check_teacher(False, True)
