import pytest

from embeddings.common import InputError
from embeddings.evaluation.instructions import Instructions
from embeddings.evaluation.mteb_library import load_mteb, quiet
from embeddings.inference.encoder import Encoder
from tests.evaluation.task_sets import write_sets
from tests.inference.models import tiny_embedder

load_mteb()

import mteb  # noqa: E402
from mteb.models import ModelMeta  # noqa: E402

from embeddings.evaluation.task_groups import find_tasks  # noqa: E402
from embeddings.evaluation.task_results import TaskResults, TaskScore, format_table  # noqa: E402
from embeddings.evaluation.task_runs import TaskSettings, run_tasks  # noqa: E402


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    encoder = Encoder(tiny_embedder(), precision="float32")
    root = write_sets(folder / "sets")
    tasks = find_tasks([str(root / "pairs"), str(root / "topics")])
    return encoder, tasks


def test_mteb_reads_the_results_with_model_and_settings(world, tmp_path):
    encoder, tasks = world
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


def test_a_result_of_more_languages_and_splits_is_read_for_those_of_the_task(tmp_path):
    """STS17 has eleven pairs of languages; the English suites take one of them."""
    (whole,), english = find_tasks("STS17"), {task.metadata.name: task for task in find_tasks("mgh-26")}["STS17"]
    rows = {subset: {"main_score": row / 10} for row, subset in enumerate(whole.hf_subsets)}
    results = TaskResults(tmp_path, {32: ModelMeta.create_empty({"name": "my/model", "revision": "1"})})
    scores = {"test": rows, "train": {"en-en": {"main_score": 1.0}}}
    results.write(mteb.TaskResult.from_task_results(whole, scores, 1.0), whole, 32)
    assert (len(rows), english.hf_subsets) == (11, ["en-en"])
    found = results.find(english, 32)
    assert found.get_score() == rows["en-en"]["main_score"]
    assert {split: len(kept) for split, kept in found.scores.items()} == {"test": 1}
    assert results.find(whole, 32).get_score() == pytest.approx(0.5)
    results.write(mteb.TaskResult.from_task_results(english, {"test": {"en-en": rows["en-en"]}}, 1.0), english, 32)
    assert results.find(english, 32).get_score() == rows["en-en"]["main_score"]
    assert results.find(whole, 32) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:100],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "{}",
        lambda text: '{"mteb_version": 3}',
        lambda text: text.replace('"scores": {', '"scores": [{').replace("}]}", "}]}]"),
        lambda text: text.replace("pairs", "\xff"),
    ],
)
def test_a_damaged_result_is_refused(damage, world, tmp_path):
    encoder, tasks = world
    run_tasks(encoder, "my/model", tasks, tmp_path, TaskSettings())
    (path,) = tmp_path.glob("results/**/pairs.json")
    path.write_text(damage(path.read_text()), encoding="latin-1")
    with pytest.raises(InputError, match=r"pairs\.json: is empty or damaged; delete it"):
        run_tasks(encoder, "my/model", tasks, tmp_path, TaskSettings())


def test_the_table_has_a_row_a_task_and_means_over_those_that_are_finished():
    rows = [
        TaskScore("A", "STS", "cosine_spearman", {32: 0.5, 8: 0.25}),
        TaskScore("Bb", "Retrieval", "ndcg_at_10", {32: 0.25, 8: 0.125}),
        TaskScore("C", "STS", "cosine_spearman", {32: 1.0, 8: 0.75}),
        TaskScore("D", "STS", "cosine_spearman", {32: 0.875, 8: None}),
    ]
    assert format_table(rows).split("\n") == [
        "task       type       metric           score_32  score_8",
        "A          STS        cosine_spearman  0.5000    0.2500",
        "Bb         Retrieval  ndcg_at_10       0.2500    0.1250",
        "C          STS        cosine_spearman  1.0000    0.7500",
        "D          STS        cosine_spearman  0.8750",
        "mean of 1  Retrieval                   0.2500    0.1250",
        "mean of 2  STS                         0.7500    0.5000",
        "mean of 3  all                         0.5833    0.3750",
    ]
    assert format_table([rows[3]]).split("\n")[1:] == ["D     STS   cosine_spearman  0.8750"]


def test_the_table_is_written_as_it_is_printed(world, tmp_path):
    encoder, tasks = world
    scores = run_tasks(encoder, "my/model", tasks, tmp_path, TaskSettings())
    (table,) = tmp_path.glob("**/scores.csv")
    lines = table.read_text().splitlines()
    assert lines[0] == "task,type,metric,score"
    assert [line.replace(",", " ").split() for line in lines] == [
        line.split() for line in format_table(scores).splitlines()
    ]


def test_models_and_settings_have_a_table_each(world, tmp_path):
    encoder, tasks = world
    first = run_tasks(encoder, "my/model", tasks, tmp_path, TaskSettings(widths=[32, 8]))
    before = {path: path.read_text() for path in tmp_path.glob("**/scores.csv")}
    for width in (32, 8):
        rows = [score._replace(scores={width: score.scores[width]}) for score in first]
        expected = [line.split() for line in format_table(rows).splitlines()]
        assert expected in [[line.replace(",", " ").split() for line in text.splitlines()] for text in before.values()]
    other = Encoder(tiny_embedder(normalize=False), precision="float32")
    run_tasks(other, "my/model", tasks, tmp_path, TaskSettings())
    run_tasks(encoder, "my/model", tasks, tmp_path, TaskSettings(instructions=Instructions("mine", {"STS": "same?"})))
    after = {path: path.read_text() for path in tmp_path.glob("**/scores.csv")}
    assert (len(before), len(after)) == (2, 4)
    assert before.items() <= after.items()
