"""Pairs that exist get four new negatives; everything else of them stays."""

import json

import pytest

from embeddings.common import InputError, OptionError
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached, read_records
from embeddings.synthesis.generate import regenerate_dry_run, regenerate_negatives
from embeddings.synthesis.prompts import MGH, Templates
from tests.helpers.chat_server import Reply, answers_badly, answers_well
from tests.synthesis.models import EAGER, FakeClient, contents

OLD = {"negatives": ["old"], "score": 2}
ROWS = [
    {
        "query": f"question {n}",
        "positive": [f"answer {n}", f"another {n}"],
        "negatives": ["old"],
        "id": f"r{n}",
        "score": 2,
    }
    for n in range(5)
] + [{"query": "question 0", "positive": "other answer", "instruction": "Answer.", "label": "x"}]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return SourceConfig("input", str(path))


def run(folder, source, client, **options):
    return regenerate_negatives(source, folder, Templates(MGH), client, traffic=EAGER, **options)


def test_positives_and_fields_stay_and_negatives_are_new(tmp_path, source):
    client = FakeClient(shuffled=True)
    report = run(tmp_path / "job", source, client)
    assert report.num_records == {"records.jsonl": 6}
    config = SourceConfig("new", str(tmp_path / "job" / "records.jsonl"))
    new, old = (list(read_records(config, open_cached(config))) for config in (config, source))
    assert len(new) == len(old) == 6
    for after, before in zip(new, old, strict=True):
        assert [negative.level for negative in after.negatives] == [1, 2, 3, 4]
        assert not set(after.negatives) & set(before.negatives)
        for name in ("query", "positives", "id", "score", "label", "instruction"):
            assert getattr(after, name) == getattr(before, name)
    assert sum("\nanswer 3\n" in request.prompt for request in client.asked) == 1


def test_a_row_without_a_usable_answer_is_left_out_and_listed(tmp_path, source):
    def behaviour(prompt, seed, count):
        return Reply("no") if "question 2" in prompt else answers_well(prompt, seed, count)

    report = run(tmp_path / "job", source, FakeClient(behaviour), max_attempts=2)
    assert (report.num_records, report.num_given_up) == ({"records.jsonl": 5}, 1)
    lines = [json.loads(line) for line in (tmp_path / "job" / "rejected.jsonl").read_text().splitlines()]
    assert [(line["id"], line["attempt"]) for line in lines] == [("row-2", 0), ("row-2", 1)]


def test_a_second_run_asks_nothing_and_gives_the_same(tmp_path, source):
    report = run(tmp_path / "job", source, FakeClient(answers_badly))
    client = FakeClient(answers_badly)
    assert run(tmp_path / "job", source, client) == report
    assert client.asked == []
    run(tmp_path / "again", source, FakeClient(answers_badly, shuffled=True))
    assert contents(tmp_path / "again") == contents(tmp_path / "job")


def test_other_pairs_do_not_go_on_in_the_same_folder(tmp_path, source):
    run(tmp_path / "job", source, FakeClient())
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(InputError, match="was begun with source_key"):
        run(tmp_path / "job", SourceConfig("input", str(other)), FakeClient())


def test_bad_pairs_are_refused_before_anything_is_asked(tmp_path, source):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(ROWS[0]) + "\n" + '{"query": "a", "positive": ""}\n')
    client = FakeClient()
    with pytest.raises(InputError, match=r"bad\.jsonl:2"):
        run(tmp_path / "job", SourceConfig("input", str(bad)), client)
    with pytest.raises(OptionError, match="max_attempts"):
        run(tmp_path / "job", source, client, max_attempts=0)
    assert client.asked == []
    assert not (tmp_path / "job").exists()


def test_a_dry_run_shows_the_first_pair(source):
    text = regenerate_dry_run(source, Templates(MGH))
    assert text.startswith("=== negatives for 6 pairs ===\n")
    assert "\nquestion 0\n" in text
    assert "\nanswer 0\n" in text
