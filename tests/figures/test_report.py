"""A run's page, and the sentences on it."""

import os
from base64 import b64decode
from html.parser import HTMLParser

import pytest

from embeddings.figures import report as words
from embeddings.figures.drawing import pyplot
from embeddings.figures.report import write_report
from embeddings.figures.run_facts import RunFacts
from tests.figures.run_folders import METRICS, RECORD, write_run

pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = '<script>alert("x")</script> & \'"></td>'


class Reader(HTMLParser):
    """The elements, attributes and text of markup, without white space between elements."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data if data.strip() else ""


@pytest.fixture
def page_of(tmp_path):
    def make(run):
        write_report(run, tmp_path / "report.html")
        return Reader((tmp_path / "report.html").read_text(encoding="utf-8"))

    return make


def pictures(page):
    sources = [value for name, value in page.attributes if name == "src"]
    return [b64decode(source.removeprefix("data:image/png;base64,"), validate=True) for source in sources]


def test_a_page_has_settings_progress_and_results(tmp_path, page_of):
    run = write_run(tmp_path / "small" / "version_0")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()
    os.truncate(run / "checkpoints" / "last.ckpt", 1_234_500_000)
    page = page_of(run)
    said = [
        "small/version_0",
        "This run trained some/backbone by NV-Embed (Lee et al. 2024, arXiv:2405.17428) on 1,234 records of 2 sources. "
        "It ran to its end at step 20. It took 1:05:30.",
        "LatentAttentionPooling (num_latents 64)",
        "InfoNCE (temperature 0.05)",
        "32 × 2 processes × 4 batches per step = 256 per optimiser step",
        "2,000 total, 1,500 active, 500 trained",
        "0123456789abcdef+",
        "python main.py fit --config a.yaml",
        "torch 2.11.0",
        "1 March 2026, 10:00 UTC",
        "a.jsonl, b.jsonl",
        "val/ndcg_at_100.250.520",
        "throughput/padding0.1250.2520",
        "No logged value is NaN or infinite, and no step was stopped by a numeric error.",
        "checkpoints/last.ckptcheckpoint1,234 MB",
        "checkpoints/smallmodel directory, not found below the working folder when this page was written",
    ]
    assert [words for words in said if words not in page.text] == []
    assert "Interruptions" not in page.text
    assert page.tags.count("h2") == 4
    assert page.tags[page.tags.index("details") :][:3] == ["details", "summary", "pre"]
    assert (run / "config.yaml").read_text() in page.text


def test_content_of_files_is_escaped(tmp_path, page_of):
    config = {
        "model": {"class_path": HOSTILE, "init_args": {"backbone": {"name": HOSTILE}, "loss": HOSTILE}},
        "data": {"init_args": {"sources": [{"name": HOSTILE, "path": HOSTILE, "instruction": [HOSTILE]}]}},
        "trainer": {"callbacks": [{"class_path": "a.ExportModel", "init_args": {"output": HOSTILE}}]},
        "seed_everything": HOSTILE,
    }
    record = {key: HOSTILE for key in RECORD if key != "end"}
    record["source_rows"] = {HOSTILE: 3}
    record["versions"] = {HOSTILE: HOSTILE}
    record["end"] = {"how": "failed", "step": HOSTILE, "why": HOSTILE}
    run = write_run(
        tmp_path / "<b>&" / "<i>", config, record, METRICS.replace("val/ndcg_at_10", HOSTILE.replace('"', ""))
    )
    (run / "numeric-error-rank-0.json").write_text('{"error": "<script>", "rank": "<script>", "step": "<script>"}')
    page = page_of(run)
    assert set(page.tags).isdisjoint({"script", "link", "iframe", "object", "a", "b", "i"})
    assert all(content.startswith(PNG) for content in pictures(page))
    assert page.text.count(HOSTILE) >= 12
    assert "<b>&/<i>" in page.text


def test_a_run_of_several_processes_is_one_run(tmp_path, page_of):
    first = write_run(
        tmp_path / "name" / "version_0",
        record={"id": "one", "end": {"how": "interrupted", "step": 5, "why": "SIGTERM: stopped after step 5"}},
        metrics="step,train/loss\n0,9.0\n1,8.0\n2,7.0\n",
    )
    (first / "numeric-error-rank-0.json").write_text('{"step": 4, "error": "the loss is nan", "rank": 0}')
    checkpoint = "runs/name/version_0/checkpoints/last.ckpt"
    metrics = "step,train/loss\n2,5.0\n3,4.0\n"
    record = {"continued_id": "one"}
    page = page_of(write_run(tmp_path / "name" / "version_1", {"ckpt_path": checkpoint}, record, metrics))
    assert "Interruptions" in page.text
    assert f"version_11 March 2026, 10:00 UTC1:05:30{checkpoint}It ran to its end at step 20" in page.text
    assert "It was interrupted at step 5: SIGTERM: stopped after step 5." in page.text
    assert "At step 4 on rank 0: the loss is nan" in page.text


ROUTED = "step,train/loss,routing/load_entropy,routing/idle_experts\n0,2.0,,\n"


@pytest.mark.parametrize(
    ("metrics", "num_pictures", "says"),
    [
        (ROUTED + "10,,0.9,1\n20,,nan,0\n", 2, "routing/load_entropy: 1 value NaN or infinite."),
        (ROUTED + "10,,0.9,\n", 2, "How evenly the experts were used."),
        ("step,epoch,val/ndcg_at_10\n0,0,0.5\n", 0, "It logged no training loss, so no curves are drawn."),
        ("", 0, "Its folder has no metrics.csv with values"),
    ],
)
def test_partly_logged_values_are_shown(metrics, num_pictures, says, tmp_path, page_of):
    page = page_of(write_run(tmp_path / "run", metrics=metrics))
    assert len(pictures(page)) == num_pictures
    assert says in page.text
    assert pyplot().get_fignums() == []
    assert ("val/ndcg_at_100.50.500.50" in page.text) == ("val/" in metrics)
    assert ("No logged value is NaN" in page.text) == (bool(metrics) and "nan" not in metrics)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ({"how": "failed", "step": 3, "why": "NumericError: nan"}, "It failed at step 3: NumericError: nan."),
        ({"how": "finished"}, "It ran to its end."),
        (None, "Its end was not recorded: it was killed or is still running. The last known step is 20."),
    ],
)
def test_each_way_to_end_has_a_sentence(end, says, tmp_path):
    facts = RunFacts.read(write_run(tmp_path / "run", record={"end": end}))
    assert words.ending(facts.parts[-1], facts.last_step) == says


def test_missing_records_are_reported(tmp_path):
    nothing = dict.fromkeys(("parameters", "world_size", "hardware", "source_rows", "started", "method"))
    config = {"model": None, "data": None, "trainer": None}
    facts = RunFacts.read(write_run(tmp_path / "run", config, nothing))
    assert words.size(facts) == words.batch(facts) == words.moment(facts.record["started"]) == "not recorded"
    assert words.opening(facts).startswith("This run trained an unnamed model by an unknown method.")
