"""The verdict: equal to `evaluate`, its rule on hand-made scores, kinds of queries, forgetting, files and refusals."""

import json
import os
import re
import shutil
import weakref
from xml.etree import ElementTree

import numpy as np
import pytest

from embeddings.adaptation import compare, format_verdict, rank_queries, recommend
from embeddings.adaptation import verdict as module
from embeddings.adaptation.rankings import vector_folder
from embeddings.adaptation.report import changed_queries, write_verdict_page
from embeddings.cli.main import main
from embeddings.common import InputError
from embeddings.common.io import GENERATOR
from embeddings.evaluation import evaluate_folder, evaluate_hybrid, paired_bootstrap, spearman
from embeddings.evaluation.bootstrap import bootstrap
from embeddings.inference import Encoder
from embeddings.models.model_card import add_section
from tests.adaptation.data import write_models, write_test_set
from tests.evaluation.data import write_labelled, write_similarity
from tests.helpers.refusals import assert_refused, refused
from tests.inference.models import on_encode

OPTIONS = {"precision": "float32"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two models, and test sets of 30 and 520 documents."""
    folder = tmp_path_factory.mktemp("world")
    write_models(folder, prompts={"query": "q: "})
    write_test_set(folder / "small", kinds=("real", "sentence", "heading"))
    write_test_set(folder / "large", num_documents=520, num_queries=60, seed=3, kinds=(None,))
    write_similarity(folder / "pairs")
    return folder


@pytest.fixture(scope="module")
def verdict(world):
    """A comparison on the large set, with both kinds of general data."""
    start, trained = str(world / "start"), str(world / "trained")
    others = [world / "small", world / "pairs"]
    return compare(start, [trained], [world / "large"], world / "out" / "vectors", general=others, **OPTIONS)


def test_the_scores_are_those_of_evaluate(world, verdict):
    (group,) = verdict.groups
    assert (group.data, group.kind, group.num_queries) == ("large", "real", 60)
    names = ["BM25", "start", "hybrid", "whitened", "trained", "trained + hybrid"]
    assert list(group.scores) == names
    for label, dense, hybrid in (("start", "start", "hybrid"), ("trained", "trained", "trained + hybrid")):
        encoder = Encoder.from_pretrained(str(world / label), precision="float32")
        plain = evaluate_folder(encoder, world / "large").metrics
        (fused,) = evaluate_hybrid(encoder, [world / "large"])
        for found, wanted in ((dense, plain), (hybrid, fused.hybrid), ("BM25", fused.bm25)):
            for metric in ("ndcg_at_10", "recall_at_10", "recall_at_100"):
                assert group.scores[found].metrics[metric] == pytest.approx(wanted[metric], abs=1e-9)
        if label == "start":
            assert group.scores["hybrid"].difference == pytest.approx(fused.difference)
    values = [group.scores[name].metrics["ndcg_at_10"] for name in names]
    assert len({round(value, 6) for value in values}) == len(names)
    assert min(values) > 0
    assert group.scores["start"].difference is None


def test_the_whitened_scores_are_those_of_the_whitened_model(world, verdict, tmp_path):
    start = Encoder.from_pretrained(str(world / "start"), precision="float32")
    folder = vector_folder(start, world / "large" / "corpus.jsonl", world / "out" / "vectors")
    line = ["whiten", "--model", str(world / "start"), "--vectors", str(folder), "--output", str(tmp_path / "white")]
    assert main(line) == 0
    encoder = Encoder.from_pretrained(str(tmp_path / "white"), precision="float32")
    wanted = evaluate_folder(encoder, world / "large").metrics
    found = verdict.groups[0].scores["whitened"].metrics
    assert found["ndcg_at_10"] == pytest.approx(wanted["ndcg_at_10"], abs=1e-9)
    assert found["recall_at_100"] == pytest.approx(wanted["recall_at_100"], abs=1e-9)
    general = {each.data: each.values["whitened"] for each in verdict.general}
    for name, metric in (("small", "ndcg_at_10"), ("pairs", "cosine_spearman")):
        assert general[name] == pytest.approx(evaluate_folder(encoder, world / name).metrics[metric], abs=1e-6)


def test_forgetting_is_measured_on_retrieval_and_similarity(world, verdict):
    retrieval, similarity = verdict.general
    assert (retrieval.metric, retrieval.num_rows) == ("ndcg_at_10", 12)
    assert (similarity.metric, similarity.num_rows) == ("cosine_spearman", 4)
    for label in ("start", "trained"):
        encoder = Encoder.from_pretrained(str(world / label), precision="float32")
        for found, name in ((retrieval, "small"), (similarity, "pairs")):
            wanted = evaluate_folder(encoder, world / name).metrics[found.metric]
            assert found.values[label] == pytest.approx(wanted, abs=1e-9)
    for found in (retrieval, similarity):
        assert set(found.differences) == {"whitened", "trained"}
        change = found.values["trained"] - found.values["start"]
        assert found.differences["trained"].mean == pytest.approx(change)


def test_the_interval_of_any_statistic_equals_a_loop():
    generator = np.random.default_rng(1)
    human_N, first_N = generator.random(25), generator.random(25)
    second_N = human_N + 0.3 * generator.random(25)

    def difference(rows):
        return spearman(second_N[rows], human_N[rows]) - spearman(first_N[rows], human_N[rows])

    found = bootstrap(difference, 25, num_resamples=400, seed=2)
    draws, values = np.random.default_rng(2), []
    for _ in range(400):
        values.append(difference(draws.integers(25, size=25)))
    values.sort()
    assert found.mean == difference(np.arange(25))
    assert values[7] <= found.low <= values[12]
    assert values[387] <= found.high <= values[392]
    assert found.is_significant
    means = bootstrap(lambda rows: float((second_N - first_N)[rows].mean()), 25, num_resamples=3000)
    exact = paired_bootstrap(second_N, first_N)
    assert means == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("num_rows", [5, 6])
def test_too_few_rows_for_a_sign_test_have_no_significant_difference_of_any_statistic(num_rows):
    human_N = np.arange(float(num_rows))
    # One model has the ranks of people, the other has them reversed.
    found = bootstrap(lambda rows: 2 * spearman(human_N[rows], human_N[rows]), num_rows)
    assert found.mean == pytest.approx(2.0)
    assert found.is_significant == (num_rows > 5)


def test_groups_are_by_kind_of_query_and_only_real_ones_decide(world, tmp_path):
    found = compare(str(world / "start"), [str(world / "trained")], [world / "small"], tmp_path / "out", **OPTIONS)
    kinds = {group.kind: group.num_queries for group in found.groups}
    assert kinds == {"real": 4, "made from the documents": 8, "heading": 4, "sentence": 4}
    ndcg_Q = {name: each.metrics["ndcg_at_10"] for name, each in found.ranked[0].items()}
    is_real_Q = np.arange(12) % 3 == 0
    for group, rows in zip(found.groups, (is_real_Q, ~is_real_Q), strict=False):
        for name, score in group.scores.items():
            assert score.metrics["ndcg_at_10"] == pytest.approx(ndcg_Q[name][rows].mean())
            if name != "start":
                wanted = paired_bootstrap(ndcg_Q[name][rows], ndcg_Q["start"][rows])
                assert score.difference == pytest.approx(wanted)
    # Too few documents to whiten, too few queries for a trained model.
    assert "whitened" not in found.groups[0].scores
    assert found.recommendation.num_real_queries == 4
    assert found.recommendation.variant in ("start", "hybrid")
    assert any("No trained model can be recommended by 4 real queries" in line for line in found.recommendation.reasons)
    assert found.counts["small"] == {
        "documents": 30,
        "relevant pairs": 12,
        "queries: heading": 4,
        "queries: real": 4,
        "queries: sentence": 4,
    }
    table = format_verdict(found)
    assert "small: 4 queries, real" in table
    assert "forgetting: not measured; name data of other domains with --general" in table


def test_without_real_queries_the_start_is_recommended_with_hybrid_search(world, tmp_path):
    write_test_set(tmp_path / "data", num_queries=6, kinds=("sentence",))
    found = compare(str(world / "start"), [str(world / "trained")], [tmp_path / "data"], tmp_path / "out", **OPTIONS)
    assert [group.kind for group in found.groups] == ["made from the documents"]
    assert (found.recommendation.variant, found.recommendation.gain) == ("hybrid", None)
    assert found.recommendation.reasons[0].startswith("Not measured on your queries")
    assert "Not measured on your queries" in format_verdict(found)
    gained, lost = changed_queries(found, "trained")
    assert all(query["kind"] == "sentence" for query in gained + lost)


def scores(num_queries=400, **means):
    """Scores of variants that differ from the start's by a noise of 0.1 and by a mean."""
    generator = np.random.default_rng(0)
    start_Q = generator.random(num_queries)
    return {"BM25": start_Q - 0.2, "start": start_Q} | {
        name.replace("_", " + "): start_Q + mean + 0.1 * (generator.random(num_queries) - 0.5)
        for name, mean in means.items()
    }


@pytest.mark.parametrize(
    ("means", "num_queries", "chosen"),
    [
        ({"hybrid": 0.1, "whitened": 0.05, "trained": 0.1, "trained_hybrid": 0.1}, 400, "hybrid"),
        ({"hybrid": 0.0, "trained": 0.0, "trained_hybrid": 0.001}, 400, "start"),
        ({"hybrid": 0.02, "trained": 0.05, "trained_hybrid": 0.1}, 400, "trained + hybrid"),
        ({"hybrid": 0.02, "trained": 0.1, "trained_hybrid": 0.1}, 400, "trained"),
        ({"hybrid": -0.1, "whitened": 0.1, "trained": -0.1, "trained_hybrid": -0.1}, 400, "whitened"),
        ({"hybrid": -0.1, "trained": -0.2, "trained_hybrid": -0.2}, 400, "start"),
        # The same with too few queries.
        ({"hybrid": 0.05, "trained": 0.3, "trained_hybrid": 0.3}, 49, "hybrid"),
        ({"hybrid": 0.05, "trained": 0.3, "trained_hybrid": 0.3}, 50, "trained"),
    ],
)
def test_the_simplest_variant_that_is_not_worse_than_the_best_is_recommended(means, num_queries, chosen):
    score_of = scores(num_queries, **means)
    found = recommend(score_of)
    assert found.variant == chosen
    order = ["start", "hybrid", "whitened", "trained", "trained + hybrid"]
    # By hand: every simpler candidate lies significantly below the best one, the chosen one does not.
    candidates = [name for name in order if name in score_of and (num_queries >= 50 or "trained" not in name)]
    best = max(candidates, key=lambda name: score_of[name].mean())
    assert found.best == best
    for name in candidates[: candidates.index(chosen)]:
        assert paired_bootstrap(score_of[name], score_of[best]).high < 0
    assert paired_bootstrap(score_of[chosen], score_of[best]).high >= 0
    later = [name for name in order if name in score_of and order.index(name) > order.index(chosen)]
    assert list(found.steps) == later
    for name, step in found.steps.items():
        assert step == paired_bootstrap(score_of[name], score_of[chosen])
    assert (found.gain is None) == (chosen == "start")
    assert any("No trained model" in line for line in found.reasons) == (num_queries < 50)


def test_hybrid_search_takes_the_place_of_the_start_where_few_queries_do_not_decide():
    start_Q = np.random.default_rng(0).random(48)
    change_Q = np.tile([0.1, -0.1], 24)
    for mean, num_copies, chosen in ((0.001, 1, "hybrid"), (-0.001, 1, "start"), (0.001, 2, "start")):
        score_of = {"start": np.tile(start_Q, num_copies), "hybrid": np.tile(start_Q + change_Q + mean, num_copies)}
        difference = paired_bootstrap(score_of["hybrid"], score_of["start"])
        assert difference.low < 0 < difference.high
        found = recommend(score_of)
        assert found.variant == chosen
        assert any("by default" in line for line in found.reasons) == (chosen == "hybrid")


def test_several_trained_models_are_compared_in_order(world, tmp_path):
    shutil.copytree(world / "trained", tmp_path / "other")
    trained = [str(world / "trained"), str(tmp_path / "other")]
    found = compare(str(world / "start"), trained, [world / "small"], tmp_path / "out", **OPTIONS)
    names = ["trained trained", "trained other", "trained trained + hybrid", "trained other + hybrid"]
    assert list(found.groups[0].scores)[3:] == names
    one, other = (found.groups[0].scores[name].metrics for name in names[:2])
    assert one == other
    refused(InputError, "is named twice", compare, "m", ["a/b", "a/b"], [world / "small"], tmp_path / "out")


def test_a_contextual_model_has_the_context_of_evaluate(tmp_path):
    from tests.models.contextual_models import tiny_contextual

    tiny_contextual().save_pretrained(tmp_path / "model")
    data = write_test_set(tmp_path / "data")
    found = compare(str(tmp_path / "model"), [], [data], tmp_path / "out", context_size=3, **OPTIONS)
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32")
    wanted = evaluate_folder(encoder, data, context_size=3).metrics
    assert found.groups[0].scores["start"].metrics["ndcg_at_10"] == pytest.approx(wanted["ndcg_at_10"], abs=1e-9)
    assert list(found.groups[0].scores) == ["BM25", "start", "hybrid"]


def command(world, output, *more):
    line = ["compare", "--start", str(world / "start"), "--trained", str(world / "trained")]
    return [*line, "--data", str(world / "large"), "--output", str(output), "--precision", "float32", *more]


def test_the_command_writes_verdict_queries_and_report_and_reads_its_vectors_again(
    world, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    line = command(world, out, "--general", f"[{world / 'small'}, {world / 'pairs'}]")
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "recommended: " in printed
    assert "nDCG@10 - start" in printed
    written = json.loads((out / "verdict.json").read_text())
    assert written["generator"] == GENERATOR
    assert [group["kind"] for group in written["groups"]] == ["real"]
    hybrid = written["groups"][0]["scores"]["hybrid"]
    assert set(hybrid["difference"]) == {"mean", "low", "high"}
    assert f"{hybrid['metrics']['ndcg_at_10']:.4f}" in printed
    assert written["recommendation"]["variant"] in printed
    rows = [json.loads(row) for row in (out / "queries.jsonl").read_text().splitlines()]
    assert len(rows) == 60
    mean = np.mean([row["ndcg_at_10"]["trained"] for row in rows])
    assert mean == pytest.approx(written["groups"][0]["scores"]["trained"]["metrics"]["ndcg_at_10"], abs=1e-5)
    assert all(len(row["documents"]["whitened"]) == 10 for row in rows)
    # Again: only queries and pairs are encoded, and the files are replaced.
    before = (out / "verdict.json").read_bytes(), (out / "report.html").read_bytes()
    counts = []
    on_encode(monkeypatch, lambda _, texts, __: counts.append(sum(map(bool, texts))))
    assert main(line) == 0
    assert max(counts) == 60
    assert ((out / "verdict.json").read_bytes(), (out / "report.html").read_bytes()) == before


def test_the_report_is_one_closed_page_with_intervals_and_changed_queries(world, verdict, tmp_path):
    write_verdict_page(verdict, tmp_path / "report.html", ([1, 2, 5], [2.0, 1.5, 1.0]))
    text = (tmp_path / "report.html").read_text()
    # As XML, every element must be closed in order.
    page = ElementTree.fromstring(re.sub(r"(<meta[^>]*)>", r"\1/>", text))
    assert not any({"href", "src"} & set(element.attrib) for element in page.iter())
    # From left to right and from top to bottom: the loss halves, a quarter of the steps after another.
    assert '<polyline points="10.0,10.0 145.0,70.0 550.0,130.0"' in text
    assert "steps 2 to 6, loss 2.000 to 1.000" in text
    tags = [element.tag for element in page.iter()]
    assert "script" not in tags
    assert tags.count("circle") == 5
    words = " ".join(page.itertext())
    for group in verdict.groups:
        for score in group.scores.values():
            assert f"{score.metrics['ndcg_at_10']:.3f}" in words
            assert score.difference is None or str(score.difference) in words
    gained, lost = changed_queries(verdict, "hybrid")
    assert 0 < len(gained) <= 20
    assert [float(query["change"]) for query in gained] == sorted((float(q["change"]) for q in gained), reverse=True)
    assert all(float(query["change"]) < 0 for query in lost)
    best = gained[0]
    change_Q = verdict.ranked[0]["hybrid"].metrics["ndcg_at_10"] - verdict.ranked[0]["start"].metrics["ndcg_at_10"]
    assert float(best["change"]) == pytest.approx(change_Q.max(), abs=0.006)
    row = verdict.tests[0].folder.queries.index(best["text"])
    passages = best["after"]["passages"]
    assert [each["id"] for each in passages] == [f"d{place}" for place in verdict.ranked[0]["hybrid"].first_QK[row, :3]]
    for query in gained + lost:
        seen = {each["id"] for when in ("before", "after") for each in query[when]["passages"]}
        relevant = f"d{verdict.tests[0].folder.queries.index(query['text'])}"
        assert [each["id"] for each in query["missed"]] == [relevant] * (relevant not in seen)
    # The relevant document of query r is document r.
    assert [each["relevant"] for each in passages] == [each["id"] == f"d{row}" for each in passages]


def test_the_verdict_is_a_section_of_a_card(world, verdict, tmp_path):
    shutil.copytree(world / "start", tmp_path / "model")
    text = f"```text\n{format_verdict(verdict)}\n```"
    before = (tmp_path / "model" / "README.md").read_text()
    for content in ("old\n\nlines", text):
        assert add_section(tmp_path / "model", "Verdict", content)
        card = (tmp_path / "model" / "README.md").read_text()
        assert card.count("## Verdict") == 1
        assert content in card
        assert card.index("## Use") < card.index("## Verdict") < card.index("## Limits")
        assert "".join(card.replace(content, "").replace("## Verdict", "").split()) == "".join(before.split())
    (tmp_path / "model" / "README.md").write_text("mine")
    assert not add_section(tmp_path / "model", "Verdict", text)
    assert (tmp_path / "model" / "README.md").read_text() == "mine"


def test_bad_input_is_one_line_and_writes_nothing(world, tmp_path, capsys):
    out = tmp_path / "out"
    line = command(world, out)
    data = line.index(str(world / "large"))
    empty, kinds = tmp_path / "empty", write_test_set(tmp_path / "kinds")
    empty.mkdir()
    assert_refused(capsys, tmp_path, "has no evaluation data", main, [*line[:data], str(empty), *line[data + 1 :]])
    (kinds / "queries.jsonl").write_text('{"_id": "q0", "text": "a", "kind": 3}\n')
    (kinds / "qrels.tsv").write_text("q0\td0\t1\n")
    assert_refused(capsys, tmp_path, "field 'kind' is", main, [*line[:data], str(kinds), *line[data + 1 :]])
    pairs = str(world / "pairs")
    assert_refused(capsys, tmp_path, "has sts data", main, [*line[:data], pairs, *line[data + 1 :]])
    labelled = write_labelled(tmp_path / "labelled", with_train=False)
    assert_refused(capsys, tmp_path, "has clustering data", main, [*line, "--general", str(labelled)])
    assert_refused(capsys, tmp_path, "language must be", main, [*line, "--language", "klingon"])
    assert_refused(capsys, tmp_path, "is not a directory", main, [*line[:4], "./none", *line[5:]])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert_refused(capsys, tmp_path, "already exists and has no manifest", main, command(world, tmp_path / "mine"))
    assert_refused(capsys, tmp_path, "field 'kind' is 'model'", main, command(world, world / "start"))


def test_an_interrupted_comparison_resumes(world, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(module, "searched", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(command(world, out)) == 130
    monkeypatch.undo()
    assert not (out / "verdict.json").exists()
    encode = "embeddings.inference.vector_folder._encode_shard"
    monkeypatch.setattr(encode, lambda *_: pytest.fail("a document is encoded again"))
    assert main(command(world, out)) == 0


def test_queries_without_judgments_are_ranked_as_those_with(world, tmp_path):
    models, corpus = (str(world / "start"), [str(world / "trained")]), world / "large" / "corpus.jsonl"
    verdict = compare(*models, [world / "large"], tmp_path / "out")
    test, ranked = verdict.tests[0], verdict.ranked[0]
    texts = dict(zip(test.folder.query_ids, test.folder.queries, strict=True))
    found = rank_queries(*models, corpus, texts, tmp_path / "out")
    assert list(found) == list(ranked)
    for name, row_QK in found.items():
        np.testing.assert_array_equal(row_QK, ranked[name].first_QK)
    assert (found["start"] != found["hybrid"]).any()


def test_folders_with_one_corpus_share_its_texts_and_index_and_one_index_is_kept(world, tmp_path, monkeypatch):
    for name in ("validation", "other"):
        shutil.copytree(world / "small", tmp_path / name)
    (tmp_path / "validation" / "corpus.jsonl").unlink()
    os.link(world / "small" / "corpus.jsonl", tmp_path / "validation" / "corpus.jsonl")
    made, kept, documents = [], [], []
    original = module.searched

    def searched(test, *options):
        documents.append(test.folder.documents)
        return original(test, *options)

    class Counted(module.BM25):
        def __init__(self, *arguments):
            kept.append(sum(index() is not None for index in made))
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr(module, "BM25", Counted)
    monkeypatch.setattr(module, "searched", searched)
    tests, validation = [world / "small", tmp_path / "other"], tmp_path / "validation"
    compare(str(world / "start"), [], tests, tmp_path / "vectors", validation=validation, **OPTIONS)
    assert kept == [0, 0]
    assert len({id(texts) for texts in documents}) == 2


def test_the_weight_of_bm25_is_chosen_for_each_model_on_other_queries(world, tmp_path, capsys):
    validation = write_test_set(tmp_path / "validation", seed=5)
    line = command(world, tmp_path / "out", "--hybrid-weight", "tune")
    assert_refused(capsys, tmp_path, "hybrid_weight must be tune exactly with --validation", main, line)
    assert main([*line, "--validation", str(validation)]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "verdict.json").read_text())
    for label in ("start", "trained"):
        encoder = Encoder.from_pretrained(str(world / label), precision="float32")
        (tuned,) = evaluate_hybrid(encoder, [validation], tune=True)
        assert written["fusion"][label]["weight"] == tuned.rule.weight
        assert f"{label}: {tuned.tuned}" in printed
        (wanted,) = evaluate_hybrid(encoder, [world / "large"], tuned.rule)
        found = written["groups"][0]["scores"]["hybrid" if label == "start" else "trained + hybrid"]["metrics"]
        assert found["ndcg_at_10"] == pytest.approx(wanted.hybrid["ndcg_at_10"], abs=1e-9)
