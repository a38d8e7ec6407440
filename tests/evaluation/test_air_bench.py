"""AIR-Bench with stand-ins in its layout, which the `datasets` library reads without a network."""

import json
import math
import zipfile
from itertools import combinations

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.evaluation import air_bench
from embeddings.evaluation.air_bench import air_bench_tasks, format_domains
from embeddings.evaluation.task_runs import TaskSettings, find_tasks, format_table, run_tasks
from embeddings.inference.context import sample_context
from embeddings.inference.encoder import Encoder
from tests.evaluation.air_bench_sets import read_set, stand_in
from tests.inference.models import counted_encodings, tiny_embedder
from tests.models.contextual_models import tiny_contextual

FINANCE = "air-bench-24.05-qa-finance-en-dev"
FOLDER, LABELS = "AIR-Bench/qa_finance_en", "AIR-Bench/qrels-qa_finance_en-dev"
FILES = "AIR-Bench_24.05/default"
PRIVATE = ["air-bench-24.04-qa-finance-en", "air-bench-24.04-qa-law", "air-bench-24.04-long-doc-arxiv"]


@pytest.fixture
def world(tmp_path, monkeypatch):
    return stand_in(monkeypatch, tmp_path)


def run(encoder, names, output, share=None, **settings):
    return run_tasks(encoder, "my/model", find_tasks(names), output, TaskSettings(**settings), share)


def of_task(name):
    return [task.data for task in air_bench_tasks(name)]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("air-bench", 58),
        ("air-bench-long-doc", 4),
        ("air-bench-en", 12),
        ("air-bench-law", 4),
        ("air-bench-qa-law-en-de", 2),
        ("air-bench-24.05-test", 64),
        ("air-bench-24.04", 28),
        ("air-bench-24.04-long-doc", 15),
        ("air-bench-24.04-24.05-qa-finance-en", 2),
        (FINANCE, 1),
        ("air-bench-24.05-long-doc-arxiv-en-test-llm-survey", 1),
    ],
)
def test_a_name_selects_the_data_sets_with_its_words(name, count):
    tasks = find_tasks(name)
    assert len(tasks) == count
    assert {task.data.has_labels for task in tasks} <= {"24.04" not in name and "test" not in name, "24.05-qa" in name}
    main_scores = {(task.data.task, task.metadata.main_score) for task in tasks}
    assert main_scores <= {("qa", "ndcg_at_10"), ("long-doc", "recall_at_10")}


def test_a_name_without_a_data_set_is_refused():
    with pytest.raises(OptionError, match=r"has the unknown word 'finanse', got .*; the words are 24\.04, 24\.05; lo"):
        find_tasks("air-bench-finanse")
    for name in ("air-bench-long-doc-wiki", "air-bench-24.04-dev", "air-bench-24.04-science"):
        with pytest.raises(OptionError, match="matches no data set"):
            find_tasks(name)


def by_hand(encoder, corpus, queries, relevant, width):
    """nDCG@10 and Recall@10, a query and a document at a time."""
    documents = dict(zip(corpus, encoder.encode([*corpus.values()], role="document"), strict=True))
    vectors = dict(zip(queries, encoder.encode([*queries.values()], role="query"), strict=True))
    gains, recalls = [], []
    for query, vector in vectors.items():
        cosine = {}
        for name, document in documents.items():
            a, b = vector[:width].astype(float), document[:width].astype(float)
            cosine[name] = sum(a * b) / math.sqrt(sum(a * a) * sum(b * b))
        best = sorted(cosine, key=cosine.get, reverse=True)[:10]
        gain = sum(1 / math.log2(rank + 2) for rank, name in enumerate(best) if name in relevant[query])
        gains.append(gain / sum(1 / math.log2(rank + 2) for rank in range(min(10, len(relevant[query])))))
        recalls.append(len({*best} & relevant[query]) / len(relevant[query]))
    return sum(gains) / len(gains), sum(recalls) / len(recalls)


def test_public_labels_are_scored_as_by_a_loop_with_the_prompts_of_the_model(world, tmp_path):
    encoder = Encoder(tiny_embedder(prompts={"query": "the fox ", "document": "a dog "}), precision="float32")
    labels = world / LABELS / FILES / "dev_qrels.jsonl"
    labels.write_text(2 * labels.read_text())  # A pair counts once.
    scores = run(encoder, "air-bench-qa-finance-en,air-bench-long-doc-arxiv", tmp_path / "out", widths=[32, 8])
    assert [(score.task, score.metric) for score in scores] == [
        (FINANCE, "ndcg_at_10"),
        ("air-bench-24.05-long-doc-arxiv-en-dev-llama2", "recall_at_10"),
    ]
    for width in (32, 8):
        gain, _ = by_hand(encoder, *read_set(world, "qa_finance_en"), width)
        _, recall = by_hand(encoder, *read_set(world, "long-doc_arxiv_en", "llama2"), width)
        assert [score.scores[width] for score in scores] == pytest.approx([gain, recall], abs=1e-5)
        assert 0.1 < gain < 0.9
        assert 0.1 < recall < 0.9
    assert len({value for score in scores for value in score.scores.values()}) == 4
    (place,) = (tmp_path / "out").glob("results/*/*")
    assert {path.name for path in place.iterdir()} == {
        *(f"{score.task}.json" for score in scores),
        *("model_meta.json", "scores.csv", "experiments"),
    }


def test_the_context_is_drawn_from_the_corpus_of_the_data_set(world, tmp_path, monkeypatch):
    encoder = Encoder(tiny_contextual(), precision="float32")
    corpus, queries, _ = read_set(world, "qa_finance_en", version="24.04", split="test")
    found = []
    for settings in ({}, {"context_size": 4}, {"context_size": 4, "context_seed": 1}):
        run(encoder, PRIVATE[0], tmp_path / str(len(found)), **settings)
        context = sample_context(encoder, [*corpus.values()], 4, settings.get("context_seed", 0)) if settings else None
        document_ND = encoder.encode([*corpus.values()], context=context, role="document")
        cosine_N = encoder.similarity(encoder.encode([queries["q-0"]], context=context, role="query"), document_ND)[0]
        (path,) = (tmp_path / str(len(found))).rglob("en_default_test.json")
        searched = json.loads(path.read_text())["search_results"]["q-0"]
        assert searched == pytest.approx(dict(zip(corpus, cosine_N.tolist(), strict=True)), abs=1e-6)
        found.append(np.array([searched[name] for name in corpus]))
    for first, second in combinations(found, 2):
        assert np.abs(first - second).max() > 1e-5


def test_private_sets_are_searched_and_zipped_for_the_leaderboard(encoder, world, tmp_path, monkeypatch):
    monkeypatch.setattr(air_bench, "SUBMITTED", 15)
    first = run(encoder, PRIVATE, tmp_path / "out", share=[0])
    assert [score.complete for score in first] == [True, *[False] * 5]
    assert not list((tmp_path / "out").rglob("*.zip"))
    scores = run(encoder, PRIVATE, tmp_path / "out")
    assert all(score.complete and math.isnan(score.scores[32]) for score in scores)
    (packed,) = (tmp_path / "out").glob("results/my__model/*/AIR-Bench_24.04/model_NoReranker.zip")
    names = {
        *(f"qa/{domain}/en_default_test.json" for domain in ("finance", "law")),
        *(f"long-doc/arxiv/en_{name}_test.json" for name in ("gpt3", "llama2", "gemini", "llm-survey")),
    }
    with zipfile.ZipFile(packed) as file:
        assert {*file.namelist()} == names
        content = {name: json.loads(file.read(name)) for name in names}
    searched = content["long-doc/arxiv/en_llm-survey_test.json"]
    results = searched.pop("search_results")
    assert searched == {
        "model_name": "model",
        "reranker_name": "NoReranker",
        "benchmark_version": "AIR-Bench_24.04",
        "task_type": "long-doc",
        "domain": "arxiv",
        "language": "en",
        "dataset_name": "llm-survey",
        "split": "test",
    }
    folder = packed.parent / "model" / "NoReranker"
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.json")} == names
    corpus, queries, _ = read_set(world, "long-doc_arxiv_en", "llm-survey", "24.04", "test")
    document_ND = encoder.encode([*corpus.values()], role="document")
    assert list(results) == list(queries)
    for query, text in queries.items():
        cosine_N = encoder.similarity(encoder.encode([text], role="query"), document_ND)[0]
        best = np.argsort(-cosine_N, kind="stable")[:15]
        assert list(results[query].values()) == pytest.approx(cosine_N[best].tolist(), abs=1e-6)
        assert {*results[query]} == {f"doc-{row}" for row in best}
    counts = counted_encodings(monkeypatch)
    assert format_table(run(encoder, PRIVATE, tmp_path / "out")) == format_table(scores)
    assert counts == []


def test_a_zip_includes_later_searches_and_other_settings_have_another_zip(encoder, world, tmp_path):
    run(encoder, PRIVATE[0], tmp_path / "out")
    run(encoder, PRIVATE[1], tmp_path / "out", widths=[32, 8])
    packed = {}
    for path in (tmp_path / "out").rglob("*.zip"):
        with zipfile.ZipFile(path) as file:
            packed[path.name] = file.namelist()
    assert packed == {
        "model_NoReranker.zip": ["qa/finance/en_default_test.json", "qa/law/en_default_test.json"],
        "model_dimensions_8_NoReranker.zip": ["qa/law/en_default_test.json"],
    }


def test_the_table_has_means_of_domains_and_of_all_data_sets_with_those_of_the_paper():
    sets = of_task("air-bench-24.04-long-doc")
    values = {"arxiv": 0.2, "book": 0.4, "healthcare": 0.6, "law": None}
    table = format_domains([(one, {32: 0.3 if one.dataset == "gpt3" else values[one.domain]}) for one in sets])
    rows = [line.rsplit(maxsplit=5) for line in table.split("\n")]
    title = "AIR-Bench 24.04 long-doc dev, Recall@10 x 100"
    assert rows[0] == [title, "arxiv", "book", "healthcare", "law", "mean"]
    mean = (0.3 + 3 * 0.2 + 2 * 0.4 + 5 * 0.6) / 11
    assert table.split("\n")[1].split() == ["en", "22.50", "40.00", "60.00", f"{100 * mean:.2f}"]
    assert rows[2] == ["NV-Embed-v2, 24.04 test, en", "79.27", "77.46", "73.01", "71.18", "74.78"]
    assert [row[5] for row in rows[2:]] == ["74.78", "73.75", "73.45"]
    books = [(one, {32: 0.5}) for one in sets if one.domain == "book"]
    assert format_domains(books).split("\n")[2].split()[-2:] == ["en", "77.46"]


def test_the_table_has_a_row_per_language_and_width():
    laws = of_task("air-bench-qa-law")
    table = format_domains([(one, {32: 0.5 if one.language == "en" else 0.25, 8: 0.125}) for one in laws])
    rows = [line.split() for line in table.split("\n")]
    assert rows[1:9] == [
        *(["en", "[32]", "50.00", "50.00"], ["fr", "[32]", "25.00", "25.00"], ["de", "[32]", "25.00", "25.00"]),
        ["all", "[32]", "33.33", "33.33"],
        *([name, "[8]", "12.50", "12.50"] for name in ("en", "fr", "de", "all")),
    ]
    assert [row[-1] for row in rows[9:]] == ["25.10", "25.00", "20.65"]
    assert "NV-Embed" not in format_domains([(laws[1], {32: 0.5})])
    whole = format_domains([(one, {32: 0.5}) for one in of_task("air-bench-qa-en")]).split("\n")
    assert [line.split()[-1] for line in whole[1:]] == ["50.00", "52.93", "52.28", "50.02"]


def test_the_means_of_the_paper_are_over_data_sets():
    """Tables 9 and 10 of NV-Embed, with the numbers of data sets here."""
    for task, rows in air_bench._table()["paper"].items():
        domains = [one.domain for one in of_task("air-bench-24.04-en") if one.task == task]
        for row in rows.values():
            assert {*row} == {*domains, "mean"}
            assert row["mean"] == pytest.approx(np.mean([row[domain] for domain in domains]), abs=0.006)


CARD, OF_LABELS = f"{FOLDER}/README.md", f"{LABELS}/{FILES}/dev_qrels.jsonl"


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (CARD, "queries_default_dev", "queries_dev", 'qa-finance-en-dev: its data cannot be loaded (Unknown split "q'),
        (f"{FOLDER}/{FILES}/*.jsonl", '"text"', '"body"', "split corpus_default has no column text (found: id, body)"),
        (f"{FOLDER}/{FILES}/corpus.jsonl", '"doc-7"', '"doc-8"', "an id of the corpus occurs twice"),
        (f"{FOLDER}/{FILES}/dev_queries.jsonl", '"q-1"', '"q-2"', "an id of the queries occurs twice"),
        (OF_LABELS, '"q-1"', '"q-99"', "a label names the unknown qid 'q-99'"),
        (OF_LABELS, '"doc-', '"d-', "a label names the unknown docid 'd-"),
        (OF_LABELS, '"relevance": 1', '"relevance": 0', "no document is relevant to any query"),
        (f"{FOLDER}/{FILES}/dev_queries.jsonl", "{", "[", "its data cannot be loaded"),
    ],
)
def test_an_unexpected_data_set_is_refused_before_any_work(path, old, new, message, encoder, world, tmp_path):
    files = [*world.glob(path)]
    assert files
    for file in files:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
    with pytest.raises(InputError) as caught:
        run(encoder, ["air-bench-qa-law-en", "air-bench-qa-finance-en"], tmp_path / "out")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
