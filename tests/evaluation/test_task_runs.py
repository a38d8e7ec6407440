"""Runs of tasks: scores equal those of mteb, results are stored and reused, errors are reported."""

import math
import numbers

import mteb
import numpy as np
import pytest
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.models import ModelMeta

from embeddings.common import InputError, OptionError
from embeddings.evaluation.mteb_library import Instructions, quiet
from embeddings.evaluation.runner import evaluate_folder
from embeddings.evaluation.task_runs import TaskResults, TaskScore, TaskSettings, find_tasks, format_table, run_tasks
from embeddings.inference.encoder import Encoder
from tests.evaluation.data import write_rows, write_similarity
from tests.evaluation.task_sets import memory_task, other_tasks, write_other_sets
from tests.helpers.interrupts import interrupted_at
from tests.inference.models import counted_encodings, given_prompts, tiny_embedder
from tests.models.contextual_models import tiny_contextual


def run(encoder, names, output, share=None, **settings):
    return run_tasks(encoder, "my/model", find_tasks(names), output, TaskSettings(**settings), share)


def results(output):
    return {path.stem: path for path in output.rglob("*.json") if path.name != "model_meta.json"}


def test_finished_tasks_are_not_run_again(encoder, sets, tmp_path, monkeypatch):
    names = [str(sets / "pairs"), str(sets / "topics")]
    first = run(encoder, names[0], tmp_path)
    before = {name: path.stat().st_mtime_ns for name, path in results(tmp_path).items()}
    assert list(before) == ["pairs"]
    counts = counted_encodings(monkeypatch)
    both = run(encoder, names, tmp_path)
    assert len(counts) == 2  # training and test texts
    assert both[0] == first[0]
    assert all(score.complete for score in both)
    assert run(encoder, names, tmp_path) == both
    assert len(counts) == 2
    assert results(tmp_path)["pairs"].stat().st_mtime_ns == before["pairs"]


def test_finished_results_of_a_killed_run_are_kept(encoder, sets, tmp_path, monkeypatch):
    names = [str(sets / "pairs"), str(sets / "topics")]
    with monkeypatch.context() as patch:
        # Pairs are first and second sentences, topics training and test texts.
        patch.setattr(Encoder, "encode", interrupted_at(Encoder.encode, call=4))
        with pytest.raises(KeyboardInterrupt):
            run(encoder, names, tmp_path)
    assert list(results(tmp_path)) == ["pairs"]
    expected = {"pairs": True, "topics": False}
    assert {score.task: score.complete for score in run(encoder, names, tmp_path, share=[])} == expected


@pytest.mark.parametrize("change", ["weights", "precision", "prompt", "instructions", "data"])
def test_a_result_of_another_model_or_other_settings_or_data_is_not_used(change, tmp_path, monkeypatch):
    folder = write_similarity(tmp_path / "pairs")
    encoder = Encoder(tiny_embedder(prompts={"mine": "the "}), precision="float32")
    counts = counted_encodings(monkeypatch)
    for _ in range(2):
        run(encoder, str(folder), tmp_path / "out")
    assert len(counts) == 2  # the first and the second sentences
    changes = {"prompt": {"prompt_name": "mine"}, "instructions": {"instructions": Instructions("i", {"STS": "same?"})}}
    if change == "weights":
        next(encoder.embedder.parameters()).data.add_(1)
    if change == "precision":
        encoder = Encoder(encoder.embedder, precision="bfloat16")
    if change == "data":
        with open(folder / "test.jsonl", "a") as file:
            file.write('{"sentence1": "a", "sentence2": "b", "score": 1}\n')
    run(encoder, str(folder), tmp_path / "out", **changes.get(change, {}))
    assert len(counts) == 4


def test_a_result_with_another_context_is_not_used(sets, tmp_path, monkeypatch):
    encoder, counts = Encoder(tiny_contextual(), precision="float32"), counted_encodings(monkeypatch)
    contexts = [{}, {"context_size": 4}, {"context_size": 3}, {"context_size": 4, "context_seed": 1}]
    for number, settings in enumerate(contexts, 1):
        for _ in range(2):
            run(encoder, str(sets / "pairs"), tmp_path, **settings)
            assert len(counts) == 2 * number


def test_processes_share_the_tasks(encoder, sets, tmp_path):
    names = [str(sets / name) for name in ("pairs", "search", "groups")]
    first = run(encoder, names, tmp_path, share=range(0, 3, 2))
    assert [score.complete for score in first] == [True, False, True]
    second = run(encoder, names, tmp_path, share=range(1, 3, 2))
    assert all(score.complete for score in second)
    assert run(encoder, names, tmp_path / "one") == second
    (shared,), (one,) = (list(folder.glob("results/*/*/scores.csv")) for folder in (tmp_path, tmp_path / "one"))
    assert shared.read_text() == one.read_text()


def test_an_aggregate_has_the_mean_of_its_subtasks_with_its_instruction(encoder, tmp_path, monkeypatch):
    from mteb.abstasks.aggregate_task_metadata import AggregateTaskMetadata

    pairs, *_ = other_tasks()
    other = memory_task("More", "PairClassification", "max_ap", type(pairs).__bases__[0], None)
    type(other).load_data = type(pairs).load_data
    metadata = AggregateTaskMetadata(
        name="Both",
        description="Both.",
        tasks=[pairs, other],
        main_score="max_ap",
        type="PairClassification",
        eval_splits=["test"],
    )
    task = type("Both", (AbsTaskAggregate,), {"metadata": metadata})()
    given = given_prompts(monkeypatch)
    instructions = Instructions("mine", {"Both": "same?"})
    (both,) = run_tasks(encoder, "m", [task], tmp_path, TaskSettings(widths=[32, 8], instructions=instructions))
    assert given
    assert all("same?" in prompt for _, prompt in given)
    # A subtask that is requested separately has no instruction, so it is another result.
    (alone,) = run_tasks(encoder, "m", [pairs], tmp_path, TaskSettings(widths=[32, 8], instructions=instructions))
    assert "same?" not in given[-1][1]
    assert both.complete
    assert both.scores != alone.scores
    assert sorted(results(tmp_path)) == ["Both", "Pairs"]


def test_missing_data_are_reported_before_any_work(encoder, sets, tmp_path, monkeypatch):
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("encoded before all data were found"))
    for names in ("SciFact", [str(sets / "pairs"), "STSBenchmark"], [str(sets / "pairs"), "CQADupstackRetrieval"]):
        with pytest.raises(InputError, match=r"task \w+: its data cannot be loaded \(.+\); run it once with a network"):
            run(encoder, names, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_score_that_is_not_finite_is_refused_and_not_written(encoder, sets, tmp_path, monkeypatch):
    monkeypatch.setattr(Encoder, "encode", lambda self, texts, *_, **__: np.ones((len(texts), 32), np.float32))
    with pytest.raises(InputError, match=r"task pairs, test, default, 32 dimensions: cosine_spearman is nan; check"):
        run(encoder, str(sets / "pairs"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mteb_prints_nothing(encoder, sets, tmp_path, capfd):
    run_tasks(encoder, "m", [*find_tasks(str(sets)), *other_tasks()], tmp_path, TaskSettings())
    assert capfd.readouterr() == ("", "")


def test_mteb_reads_the_results_with_model_and_settings(encoder, sets, tmp_path):
    tasks = find_tasks([str(sets / "pairs"), str(sets / "topics")])
    scores = run_tasks(encoder, "my/model", tasks, tmp_path, TaskSettings(widths=[32, 8]))
    with quiet():
        found = mteb.ResultCache(tmp_path).load_results(tasks=tasks, load_experiments="match_name")
    assert {model.model_name for model in found.model_results} == {"my/model"}
    assert len(found.model_results) == 2
    by_experiment = {
        model.experiment_name: {result.task_name: result.get_score() for result in model.task_results}
        for model in found.model_results
    }
    assert by_experiment == {
        name: {score.task: pytest.approx(score.scores[width], abs=1e-6) for score in scores}
        for name, width in ((None, 32), ("dimensions_8", 8))
    }
    assert all(score.scores[8] != pytest.approx(score.scores[32], abs=1e-4) for score in scores)
    (cut,) = tmp_path.glob("results/my__model/*/experiments/dimensions_8")
    files = {"pairs.json", "topics.json", "model_meta.json", "scores.csv"}
    assert {path.name for path in cut.iterdir()} == files
    assert {path.name for path in cut.parents[1].iterdir()} == {*files, "experiments"}


def test_a_result_with_more_languages_and_splits_is_filtered_to_those_of_the_task(tmp_path):
    """STS17 has eleven pairs of languages; the English suites take one of them."""
    (whole,), english = find_tasks("STS17"), {task.metadata.name: task for task in find_tasks("mgh-26")}["STS17"]
    rows = {subset: {"main_score": row / 10} for row, subset in enumerate(whole.hf_subsets)}
    results = TaskResults(tmp_path, {32: ModelMeta.create_empty({"name": "my/model", "revision": "1"})})
    scores = {"test": rows, "train": {"en-en": {"main_score": 1.0}}}
    results.write(mteb.TaskResult.from_task_results(whole, scores, 1.0), 32)
    assert (len(rows), english.hf_subsets) == (11, ["en-en"])
    found = results.find(english, 32)
    assert found.get_score() == rows["en-en"]["main_score"]
    assert {split: len(kept) for split, kept in found.scores.items()} == {"test": 1}
    assert results.find(whole, 32).get_score() == pytest.approx(0.5)
    results.write(mteb.TaskResult.from_task_results(english, {"test": {"en-en": rows["en-en"]}}, 1.0), 32)
    assert results.find(english, 32).get_score() == rows["en-en"]["main_score"]
    assert results.find(whole, 32) is None


@pytest.mark.parametrize("damage", [lambda text: text[:100], lambda text: '{"mteb_version": 3}'])
def test_a_damaged_result_is_refused(damage, encoder, sets, tmp_path):
    run(encoder, str(sets / "pairs"), tmp_path)
    (path,) = tmp_path.glob("results/**/pairs.json")
    path.write_text(damage(path.read_text()))
    with pytest.raises(InputError, match=r"pairs\.json: is empty or damaged; delete it"):
        run(encoder, str(sets / "pairs"), tmp_path)


def test_the_table_has_a_row_per_task_and_means_over_finished_tasks():
    rows = [
        TaskScore("A", "STS", "cosine_spearman", {32: 0.5, 8: 0.25}),
        TaskScore("Bb", "Retrieval", "ndcg_at_10", {32: 0.25, 8: 0.125}),
        TaskScore("C", "STS", "cosine_spearman", {32: 1.0, 8: 0.75}),
        TaskScore("D", "STS", "cosine_spearman", {32: 0.875, 8: None}),
        TaskScore("E", "STS", "cosine_spearman", {32: math.nan, 8: math.nan}),
    ]
    assert format_table(rows).split("\n") == [
        "task       type       metric           score_32  score_8",
        "A          STS        cosine_spearman  0.5000    0.2500",
        "Bb         Retrieval  ndcg_at_10       0.2500    0.1250",
        "C          STS        cosine_spearman  1.0000    0.7500",
        "D          STS        cosine_spearman  0.8750",
        "E          STS        cosine_spearman  searched  searched",
        "mean of 1  Retrieval                   0.2500    0.1250",
        "mean of 2  STS                         0.7500    0.5000",
        "mean of 3  all                         0.5833    0.3750",
    ]
    assert format_table([rows[3]]).split("\n")[1:] == ["D     STS   cosine_spearman  0.8750"]


def scores_of(result):
    """Every number of a result."""
    (row,) = result.scores["test"]
    return {name: value for name, value in row.items() if isinstance(value, numbers.Number)}


def by_mteb(folder, tasks):
    """The scores of mteb for a model directory, without this project."""
    with quiet():
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
        results = mteb.evaluate(model, tasks, cache=None, co2_tracker=False, show_progress_bar=False)
    return {result.task_name: scores_of(result) for result in results.task_results}


def by_us(encoder, tasks, output, **settings):
    """The scores of this project, read from the files that it wrote."""
    run_tasks(encoder, "model", tasks, output, TaskSettings(**settings))
    files = [path for path in output.rglob("*.json") if path.name != "model_meta.json"]
    results = [mteb.TaskResult.from_disk(path) for path in files]
    return {result.task_name: scores_of(result) for result in results}


def all_tasks(root):
    return [*find_tasks([str(root)]), *other_tasks()]


def test_folders_of_pairs_candidates_and_summaries_have_the_scores_of_mteb(encoder, tmp_path):
    root, folder = write_other_sets(tmp_path / "sets", other_tasks()), tmp_path / "model"
    encoder.embedder.save_pretrained(folder)
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


def test_a_folder_with_copies_and_irrelevant_judgments_has_one_score_in_both_modes(encoder, tmp_path):
    texts = ["brown fox", "lazy dog", "brown fox", "brown fox", "two numbers", "brown fox"]
    write_rows(tmp_path / "r" / "corpus.jsonl", [{"_id": f"d{row}", "text": text} for row, text in enumerate(texts)])
    queries = [{"_id": name, "text": text} for name, text in zip("abc", ["brown fox", "lazy dog", "fox"], strict=True)]
    write_rows(tmp_path / "r" / "queries.jsonl", queries)
    (tmp_path / "r" / "qrels.tsv").write_text("a\td2\t1\na\td5\t2\nb\td0\t0\n")
    result = evaluate_folder(encoder, tmp_path / "r")
    (score,) = run(encoder, str(tmp_path / "r"), tmp_path / "out")
    assert result.metrics["ndcg_at_10"] == pytest.approx(score.scores[32], abs=1e-5)
    # The copies are ranked d5, d3, d2, d0, and query b has the score 0.
    found = (2 + 1 / math.log2(4)) / (2 + 1 / math.log2(3))
    assert result.metrics["ndcg_at_10"] == pytest.approx(found / 2)
    assert (result.counts["num_queries"], result.counts["num_skipped"]) == (2, 1)


def test_every_score_equals_that_of_mteb_alone_with_the_prompts_that_it_chooses(sets, tmp_path, monkeypatch):
    """Alone, mteb reads the prompts of the same directory through sentence-transformers."""
    prompts = {"query": "pad one ", "document": "the lazy ", "STS": "sum numbers ", "Clustering": "return two "}
    model = tiny_embedder(prompts=prompts, pool_prompt=True, query_max_length=64)
    model.save_pretrained(tmp_path / "model")
    given = given_prompts(monkeypatch)
    ours = by_us(Encoder(model, precision="float32"), all_tasks(sets), tmp_path / "out")
    theirs = by_mteb(tmp_path / "model", all_tasks(sets))
    assert set(ours) == {"sets.search", "sets.pairs", "sets.topics", "sets.groups", "Pairs", "Reranked", "Summaries"}
    assert set(theirs) == set(ours)
    for name, scores in theirs.items():
        assert 0.05 < abs(scores["main_score"]) < 0.999, name
        assert ours[name] == pytest.approx(scores, abs=1e-4, nan_ok=True), name  # nauc may be undefined
    assert {*given} == {("document", ""), ("query", "pad one "), *(("document", p) for p in list(prompts.values())[1:])}


def test_instructions_go_before_queries_or_before_every_text_of_other_tasks(sets, tmp_path, monkeypatch):
    table = Instructions("mine", {"search": "find it", "STS": "same?"})
    template = "the {instruction} pad "
    settings = {"prompts": {"document": "the "}, "query_max_length": 64, "instruction_template": template}
    encoder = Encoder(tiny_embedder(**settings), precision="float32")
    given = given_prompts(monkeypatch)
    run(encoder, [str(sets / "search"), str(sets / "pairs")], tmp_path / "out", instructions=table)
    assert given == [("query", "the find it pad "), ("document", "the "), *[("document", "the same? pad ")] * 2]
    given.clear()
    # A named prompt of the model is used in the same places.
    run(encoder, str(sets / "search"), tmp_path / "named", prompt_name="document")
    assert given == [("query", "the "), ("document", "the ")]
    with pytest.raises(OptionError, match="prompt_name must name a prompt of the model"):
        run(encoder, str(sets / "search"), tmp_path / "other", prompt_name="none")
    with pytest.raises(OptionError, match=r"prompt_name has no effect beside instructions, .*; leave one of them out"):
        run(encoder, str(sets / "pairs"), tmp_path / "other", prompt_name="document", instructions=table)
    assert not (tmp_path / "other").exists()


def test_a_search_in_a_context_of_the_corpus_has_the_metrics_of_our_evaluation_of_the_folder(
    contextual, sets, tmp_path
):
    """Our evaluation computes the metrics itself, and draws the same documents from the same seed."""
    found = []
    for settings in ({"context_size": 4, "context_seed": 1}, {}):
        ours = evaluate_folder(contextual, sets / "search", **settings).metrics
        task = by_us(contextual, find_tasks(str(sets / "search")), tmp_path / str(len(found)), **settings)["search"]
        for metric in ("ndcg_at_10", "recall_at_10", "map_at_10", "mrr_at_10", "ndcg_at_100"):
            assert task[metric] == pytest.approx(ours[metric], abs=1e-5), metric
        found.append(task["main_score"])
    assert found[0] != pytest.approx(found[1], abs=1e-3)
