"""Pairs and evaluation folders for passages: what is held out, what each file contains, and what is refused."""

import json

import pytest

from embeddings.adaptation import queries
from embeddings.adaptation.candidates import key_of
from embeddings.adaptation.queries import MIN_PASSAGES, QuerySettings, make_queries
from embeddings.adaptation.real_queries import read_log
from embeddings.common import InputError
from embeddings.common.io import check_file
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from embeddings.evaluation import read_evaluation_folder
from embeddings.inference.bm25 import BM25, word_tokens
from embeddings.mining import EvaluationTexts
from tests.adaptation.world import passage_rows, read_rows
from tests.data.rows import write_rows
from tests.helpers.interrupts import interrupted_at
from tests.helpers.refusals import refused


@pytest.fixture(scope="module")
def rows():
    return passage_rows()


@pytest.fixture(scope="module")
def passages(rows, tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("passages") / "passages.jsonl", rows)


@pytest.fixture(scope="module")
def made(passages, tmp_path_factory):
    """The folder for passages without real queries, and the report."""
    folder = tmp_path_factory.mktemp("made") / "queries"
    return folder, make_queries(passages, folder)


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def asked(rows, numbers):
    """Judged queries about passages."""
    return [{"query": f"where is {rows[each]['text'].split()[1]}", "passage": rows[each]["_id"]} for each in numbers]


def test_no_document_is_on_both_sides(rows, made):
    folder, report = made
    pairs, test = read_rows(folder / "pairs.jsonl"), read_rows(folder / "evaluation-pseudo" / "queries.jsonl")
    document_of = {row["_id"]: row["document"] for row in rows}
    trained, tested = {row["document"] for row in pairs}, {document_of[row["passage"]] for row in test}
    assert len(trained) > 40
    assert len(tested) > 8
    assert trained.isdisjoint(tested)
    assert all(document_of[row["passage"]] == row["document"] for row in pairs)
    assert report.counts["held_out_documents"] == 12
    assert report.counts["documents"] == 60
    assert report.counts["pairs"] == len(pairs)
    assert report.counts["pseudo_test_queries"] == len(test)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("evaluation-pseudo", "manifest.json", "pairs.jsonl", "summary.json")
    ]


def test_a_sentence_is_not_in_its_positive(rows, made):
    folder, _ = made
    text_of = {row["_id"]: row["text"] for row in rows}
    title_of = {row["_id"]: row["title"] for row in rows}
    pairs = read_rows(folder / "pairs.jsonl")
    kinds = {row["kind"] for row in pairs}
    assert kinds == {"sentence", "heading"}
    for row in pairs:
        whole, title = text_of[row["passage"]], title_of[row["passage"]]
        if row["kind"] == "sentence":
            assert row["query"] in whole
            assert row["query"] not in row["positive"]
            assert sorted(f"{row['query']} {row['positive']}".split()) == sorted(f"{title} {whole}".split())
        else:
            assert row["query"] == title.partition(" > ")[2]
            assert row["positive"] == whole
    counts = [sum(row["passage"] == each and row["kind"] == "sentence" for row in pairs) for each in text_of]
    assert max(counts) == 3


def test_the_pseudo_test_searches_passages_without_the_query(rows, made):
    folder, _ = made
    read = read_evaluation_folder(folder / "evaluation-pseudo")
    test = read_rows(folder / "evaluation-pseudo" / "queries.jsonl")
    assert [len(read.documents), len(read.queries)] == [len(rows), len(test)]
    assert len({row["passage"] for row in test}) == len(test)
    changed = {row["passage"]: row for row in test}
    for row, text in zip(rows, read.documents, strict=True):
        original = f"{row['title']} {row['text']}"
        if row["_id"] in changed:
            assert changed[row["_id"]]["text"] not in text
            assert len(text) < len(original)
        else:
            assert text == original
    # The words of the rest still find most passages.
    ranked_QK, _ = BM25(read.documents, word_tokens).search(read.queries, 10)
    ids = [*read.document_ids]
    found = [row["passage"] in {ids[each] for each in ranked_QK[number]} for number, row in enumerate(test)]
    assert sum(found) > 0.9 * len(test)


def test_the_pairs_are_a_source_of_training_records(made, tmp_path):
    folder, report = made
    source = open_cached(SourceConfig("own", str(folder / "pairs.jsonl")), tmp_path)
    assert len(source.table) == report.counts["pairs"] > 300


def test_the_summary_counts_every_candidate(made):
    folder, report = made
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["counts"] == report.counts
    for kind, counts in summary["kinds"].items():
        kept = counts["training"] + counts["pseudo_test"]
        # Candidates of held-out passages that already have a query are neither.
        assert 0 < kept + sum(counts["rejected"].values()) <= counts["proposed"], kind
    assert sum(counts["training"] for counts in summary["kinds"].values()) == report.counts["pairs"]
    for name in files(folder):
        check_file(folder / name)


def test_the_same_inputs_give_the_same_bytes_and_are_recognised(passages, made, tmp_path):
    folder, report = made
    again = make_queries(passages, tmp_path / "again")
    assert files(tmp_path / "again") == files(folder)
    assert not again.reused
    reused = make_queries(passages, tmp_path / "again")
    assert reused.reused
    assert (reused.counts, reused.kinds) == (report.counts, report.kinds)
    other = make_queries(passages, tmp_path / "again", settings=QuerySettings(seed=1))
    assert not other.reused
    assert files(tmp_path / "again")["pairs.jsonl"] != files(folder)["pairs.jsonl"]


def test_real_queries_are_test_and_validation_and_their_documents_are_held_out(rows, passages, tmp_path):
    judged_rows = [{**row, "relevant": 1 + number % 3} for number, row in enumerate(asked(rows, range(0, 80, 4)))]
    log = write_rows(tmp_path / "log.jsonl", judged_rows)
    report = make_queries(passages, tmp_path / "out", log=log)
    grades = {row["query"]: row["relevant"] for row in judged_rows}
    parts = {}
    for name, size in (("evaluation", 15), ("validation", 5)):
        read = read_evaluation_folder(tmp_path / "out" / name)
        assert len(read.queries) == size == report.counts[f"{name}_queries"]
        assert len(read.documents) == len(rows)
        parts[name] = {*read.queries}
        assert [grades[read.queries[row]] for row in read.qrels.query_J] == read.qrels.relevance_J.tolist()
    assert parts["evaluation"].isdisjoint(parts["validation"])
    assert {row["query"] for row in read_rows(log)} == parts["evaluation"] | parts["validation"]
    judged = {rows[each]["document"] for each in range(0, 80, 4)}
    trained = {row["document"] for row in read_rows(tmp_path / "out" / "pairs.jsonl")}
    assert trained.isdisjoint(judged)
    # Without judgements 12 documents would be held out; now these are the only ones.
    assert report.counts["held_out_documents"] == len(judged) == 16
    corpora = [tmp_path / "out" / name / "corpus.jsonl" for name in parts]
    # One file, so that it takes room and is encoded once.
    assert corpora[0].samefile(corpora[1])

    options = {"hold_out_judged": False, "validation_share": 0.5}
    report = make_queries(passages, tmp_path / "out", log=log, settings=QuerySettings(**options))
    assert report.counts["held_out_documents"] == 0
    assert report.counts["validation_queries"] == report.counts["evaluation_queries"] == 10
    assert {row["document"] for row in read_rows(tmp_path / "out" / "pairs.jsonl")} & judged
    assert not (tmp_path / "out" / "evaluation-pseudo").exists()


def test_a_share_of_the_real_queries_is_trained_on_but_no_query_or_document_of_the_test(rows, passages, tmp_path):
    asked_rows = asked(rows, range(0, 120, 3))
    # Some queries have another passage in a second document.
    asked_rows += [{**row, "passage": rows[150 + number]["_id"]} for number, row in enumerate(asked_rows[::3])]
    asked_rows += [{**row, "passage": rows[3 * number]["_id"]} for number, row in enumerate(asked_rows[1:20:4])]
    irrelevant = [
        {**row, "passage": rows[200 + number]["_id"], "relevant": False} for number, row in enumerate(asked_rows)
    ]
    log = write_rows(tmp_path / "log.jsonl", [*asked_rows, *irrelevant])
    folder, share = tmp_path / "out", {"training_share": 0.5, "held_out_share": 0.0}
    relevant = {(row["query"], row["passage"]) for row in asked_rows}
    by_id = {row["_id"]: row for row in rows}
    for hold_out_judged in (True, False):
        settings = QuerySettings(hold_out_judged=hold_out_judged, **share)
        report = make_queries(passages, folder, log=log, settings=settings)
        judged = {name: read_rows(folder / name / "queries.jsonl") for name in ("evaluation", "validation")}
        assert [len(each) for each in judged.values()] == [10, 10]
        tested = {row["text"] for each in judged.values() for row in each}
        documents = {by_id[passage]["document"] for query, passage in relevant if query in tested}
        trained = [row for row in read_rows(folder / "pairs.jsonl") if row["kind"] == "real"]
        assert len(trained) > 10
        assert {(row["query"], row["passage"]) for row in trained} <= relevant
        assert all(row["positive"] == "{title} {text}".format(**by_id[row["passage"]]) for row in trained)
        assert tested.isdisjoint(row["query"] for row in trained)
        counts = report.kinds["real"]
        for_training = [passage for query, passage in relevant if query not in tested]
        held_out = [passage for passage in for_training if by_id[passage]["document"] in documents]
        assert counts["proposed"] == len(for_training)
        assert counts["training"] == len(trained) == len(for_training) - sum(counts["rejected"].values())
        assert 0 < len(held_out) < 8
        if hold_out_judged:
            assert counts["rejected"]["its passage is held out"] == len(held_out)
            assert documents.isdisjoint(row["document"] for row in read_rows(folder / "pairs.jsonl"))
        else:
            assert "its passage is held out" not in counts["rejected"]


def test_enough_real_queries_are_trained_on_alone(rows, passages, tmp_path, monkeypatch):
    # Each query has two passages.
    log = asked(rows, range(0, 120, 3))
    log += [{**row, "passage": rows[150 + number]["_id"]} for number, row in enumerate(log)]
    write_rows(tmp_path / "log.jsonl", log)
    settings = QuerySettings(hold_out_judged=False, training_share=0.5)
    for least, kinds in ((21, {"real", "sentence", "heading"}), (20, {"real"})):
        monkeypatch.setattr(queries, "ENOUGH_REAL", least)
        report = make_queries(passages, tmp_path / str(least), log=tmp_path / "log.jsonl", settings=settings)
        pairs = read_rows(tmp_path / str(least) / "pairs.jsonl")
        assert {row["kind"] for row in pairs} == kinds
        assert len({row["query"] for row in pairs if row["kind"] == "real"}) == 20
        assert sum(row["kind"] == "real" for row in pairs) == report.kinds["real"]["training"] == 40
        assert report.counts["pairs"] == len(pairs)
        dropped = report.kinds["sentence"]["rejected"].get("the real queries are enough", 0)
        assert (dropped > 50) == (least == 20)


@pytest.mark.parametrize(
    ("many", "settings", "parts"),
    [
        (40, QuerySettings(), [20, 10, 10]),
        (41, QuerySettings(), [0, 10, 30]),
        (40, QuerySettings(training_share=0.0), [0, 10, 30]),
        (40, QuerySettings(validation_share=0.7), [8, 28, 4]),
    ],
)
def test_a_half_of_many_judged_queries_is_trained_on_by_default(
    many, settings, parts, rows, passages, tmp_path, monkeypatch
):
    monkeypatch.setattr(queries, "MANY_REAL", many)
    log = write_rows(tmp_path / "log.jsonl", asked(rows, range(0, 120, 3)))
    counts = make_queries(passages, tmp_path / "out", log=log, settings=settings).counts
    assert [counts[f"{part}_queries"] for part in ("training", "validation", "evaluation")] == parts


def test_without_training_no_query_is_lost_to_it(rows, tmp_path):
    """All queries are about one document, which is then held out."""
    one = [{**row, "document": "handbook.md"} for row in rows]
    log = write_rows(tmp_path / "log.jsonl", asked(one, range(0, 120, 3)))
    passages = write_rows(tmp_path / "passages.jsonl", one)
    report = make_queries(passages, tmp_path / "out", log=log, settings=QuerySettings(training_share=0.5))
    assert [report.counts[f"{part}_queries"] for part in ("training", "validation", "evaluation")] == [0, 10, 30]
    assert len(read_rows(tmp_path / "out" / "evaluation" / "queries.jsonl")) == 30
    assert any("too few to train on" in note for note in report.notes)


def test_training_queries_that_resemble_evaluation_queries_are_removed(rows, passages, made, tmp_path):
    folder, _ = made
    copied = [row for row in read_rows(folder / "pairs.jsonl") if row["kind"] == "sentence"][:5]
    texts = [copied[0]["query"].upper(), " ".join(copied[1]["query"].split()[:-1])]
    report = make_queries(passages, tmp_path / "out", evaluation=EvaluationTexts(texts, []))
    remaining = {key_of(row["query"]) for row in read_rows(tmp_path / "out" / "pairs.jsonl")}
    assert report.kinds["sentence"]["rejected"]["resembles an evaluation query"] == 2
    assert [key_of(row["query"]) in remaining for row in copied] == [False, False, True, True, True]


def test_a_query_of_two_passages_is_no_query_and_of_near_copies_one_remains(tmp_path):
    rows = passage_rows()
    shared = f"{rows[0]['text'].split('. ')[0]}."
    # Another passage has a sentence of the first one, where it is no query.
    rows[250]["text"] = f"{rows[250]['text']} {shared}"
    made = make_queries(write_rows(tmp_path / "p.jsonl", rows), tmp_path / "out", settings=QuerySettings(per_passage=9))
    assert made.kinds["sentence"]["rejected"]["several passages have it"] == 1
    texts = {row["query"] for row in read_rows(tmp_path / "out" / "pairs.jsonl")}
    assert shared not in texts
    rows = passage_rows()
    rows[200]["text"] = rows[0]["text"].replace("near ", "near a ")
    made = make_queries(
        write_rows(tmp_path / "p.jsonl", rows), tmp_path / "near", settings=QuerySettings(per_passage=9)
    )
    assert made.kinds["sentence"]["rejected"]["near-copy of another query"] >= 3
    names = ["evaluation-pseudo/queries.jsonl", "pairs.jsonl"]
    found = [row for name in names for row in read_rows(tmp_path / "near" / name)]
    texts = [row.get("query", row.get("text")).replace("near a ", "near ") for row in found]
    assert texts.count(shared) <= 1
    assert len(set(texts)) == len(texts)


def linked(rows, source, text, target):
    return [{**row, "links": [[text, target]]} if number == source else row for number, row in enumerate(rows)]


def test_the_text_of_a_link_asks_for_its_target(tmp_path, rows):
    """A link leads to the first passage of a file, relative to its own, or to the section that it names."""
    target = rows[40]
    name, section = target["file"].removeprefix("folder/"), rows[42]
    slug = "-".join(section["title"].partition(" > ")[2].casefold().split())
    first, other = (f"{row['text'].split('.')[1].split()[1]} of the kind" for row in (target, section))
    marked = [{**row, "title": f"{row['title']} (new)"} if row is section else row for row in rows]
    changed = linked(linked(marked, 100, first, name), 105, other, f"../{target['file']}#{slug}-new")
    changed = linked(linked(changed, 110, "another page entirely", "https://example.org/x"), 115, "go here", name)
    # Of one document, none of these.
    settings = QuerySettings(held_out_share=0.01)
    make_queries(write_rows(tmp_path / "p.jsonl", changed), tmp_path / "out", settings=settings)
    found = [row for row in read_rows(tmp_path / "out" / "pairs.jsonl") if row["kind"] == "anchor"]
    assert {(row["query"], row["passage"]) for row in found} == {(first, target["_id"]), (other, section["_id"])}
    assert all(target["document"] == row["document"] for row in found)


HEADINGS = {
    "Install (Linux)": "install-linux",
    "What's new?": "whats-new",
    "A & B_c": "a--b_c",
    "Die Straße": "die-straße",
    "दिल्ली तक": "दिल्ली-तक",
}


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_heading_is_named_in_links_without_its_punctuation(heading):
    assert queries.slug_of(f"Guide > {heading}") == HEADINGS[heading]


def test_a_link_means_a_file_by_its_path_before_one_in_its_own_folder(tmp_path, rows):
    """So `passages` writes links, also to a file whose name occurs in several folders."""
    named = {40: "README.md", 100: "folder/README.md"}
    changed = [{**row, "file": named.get(number // 5 * 5, row["file"])} for number, row in enumerate(rows)]
    names = sorted({sentence.split()[1] for sentence in rows[40]["text"].split(".") if sentence})[:2]
    texts = [f"{name} of the kind" for name in names]
    for source, text in zip((100, 105), texts, strict=True):
        changed = linked(changed, source, text, "README.md")
    # Of one document, none of these.
    settings = QuerySettings(held_out_share=0.01)
    make_queries(write_rows(tmp_path / "p.jsonl", changed), tmp_path / "out", settings=settings)
    found = [row for row in read_rows(tmp_path / "out" / "pairs.jsonl") if row["kind"] == "anchor"]
    assert {(row["query"], row["passage"]) for row in found} == {(text, rows[40]["_id"]) for text in texts}


def test_few_passages_give_an_evaluation_and_no_pairs(rows, tmp_path):
    few = write_rows(tmp_path / "few.jsonl", rows[: MIN_PASSAGES - 20])
    log = write_rows(tmp_path / "log.jsonl", asked(rows, (0, 40, 80)))
    report = make_queries(few, tmp_path / "out", log=log)
    assert report.counts["pairs"] == 0
    assert "too few to train on: 200 are needed" in report.notes[0]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"evaluation", "validation", "evaluation-pseudo", "manifest.json", "summary.json"}
    # Without real queries there is still the pseudo test.
    assert make_queries(few, tmp_path / "out").counts["pseudo_test_queries"] > 10


def test_passages_without_sentences_say_why_there_is_nothing_to_train_on(rows, tmp_path):
    bare = [
        {**row, "title": "", "text": row["text"].lower().translate(str.maketrans("", "", ".!?#\n"))} for row in rows
    ]
    log = write_rows(tmp_path / "log.jsonl", asked(rows, (0, 40, 80)))
    report = make_queries(write_rows(tmp_path / "bare.jsonl", bare), tmp_path / "out", log=log)
    assert report.counts["pairs"] == 0
    assert report.notes == ["nothing to train on: the passages offer no queries (no sentences, no headings)"]


def test_one_document_is_never_held_out(rows, tmp_path):
    one = [{**row, "document": "same"} for row in rows]
    report = make_queries(write_rows(tmp_path / "p.jsonl", one), tmp_path / "out")
    assert report.counts["held_out_documents"] == report.counts["pseudo_test_queries"] == 0
    assert report.counts["pairs"] > 300
    assert "there is one document" in report.notes[0]
    two = [{**row, "document": "a" if number < 250 else "b"} for number, row in enumerate(rows)]
    report = make_queries(write_rows(tmp_path / "two.jsonl", two), tmp_path / "two", settings=QuerySettings(seed=4))
    assert report.counts["held_out_documents"] == 1


def test_queries_without_judgements_serve_for_the_file_of_labels(rows, passages, tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("where is it\nwho is it\n")
    report = make_queries(passages, tmp_path / "out", log=log)
    assert [row["text"] for row in read_rows(tmp_path / "out" / "unjudged.jsonl")] == ["where is it", "who is it"]
    assert "the queries name no passages" in report.notes[0]
    assert report.counts["evaluation_queries"] == 0
    assert report.counts["pairs"] > 300
    rows = [{"query": "where is it", "passage": "p000001", "relevant": None}]
    report = make_queries(passages, tmp_path / "out", log=write_rows(tmp_path / "label_me.jsonl", rows))
    assert "no row is judged" in report.notes[0]
    assert read_log(tmp_path / "out" / "unjudged.jsonl").queries == ["where is it"]


def test_some_unknown_passages_are_counted_and_only_irrelevant_ones_refused(rows, passages, tmp_path):
    some = [*asked(rows, (0, 40)), {"query": "lost", "passage": "unknown"}]
    report = make_queries(passages, tmp_path / "out", log=write_rows(tmp_path / "log.jsonl", some))
    assert "1 of 3 real queries name no passage" in report.notes[0]
    irrelevant = [{**asked(rows, (0,))[0], "relevant": 0}]
    log = write_rows(tmp_path / "zero.jsonl", irrelevant)
    refused(InputError, "no query names a relevant passage", make_queries, passages, tmp_path / "new", log=log)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("other", "is_noted"), [("b", True), ("a", False)])
def test_a_judged_id_that_rows_of_several_files_have_is_noted(other, is_noted, rows, tmp_path):
    some = [
        {**row, "document": str(number), "file": f"{name}.csv"}
        for name in ("a", other)
        for number, row in enumerate(rows[:3])
    ]
    path = write_rows(tmp_path / "tables.jsonl", [{**row, "_id": f"p{place}"} for place, row in enumerate(some)])
    log = write_rows(tmp_path / "log.jsonl", [{"query": "where", "document": "1"}, {"query": "who", "passage": "p5"}])
    report = make_queries(path, tmp_path / "out", log=log)
    note = "'1' is the id of rows in several files, which are all judged: name their passages"
    assert (note in report.notes) == is_noted


def test_passages_without_queries_are_refused(tmp_path):
    empty = write_rows(tmp_path / "empty.jsonl", [{"text": "no sentence"}, {"text": ""}])
    refused(InputError, "offer no queries", make_queries, empty, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_leaves_the_earlier_folder(passages, made, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    make_queries(passages, folder)
    before = files(folder)
    monkeypatch.setattr(queries, "_write_pseudo", interrupted_at(queries._write_pseudo))
    with pytest.raises(KeyboardInterrupt):
        make_queries(passages, folder, settings=QuerySettings(seed=1))
    assert files(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
