"""`adapt`: all steps on small documents, what it recommends and asks for, its resume, and refusals."""

import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.growth import write_model
from embeddings.adaptation import queries
from embeddings.cli import adapt
from embeddings.cli.main import main
from embeddings.common import TextSettings
from embeddings.models import Embedder, LastTokenPooling
from tests.adaptation.world import passage_rows, read_rows
from tests.data.rows import write_rows
from tests.helpers.chat_server import Reply, answers_well, chat_server
from tests.helpers.refusals import assert_refused
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_mistral

NUM_DOCUMENTS = 36
NUM_SENTENCES = 3


@pytest.fixture(autouse=True)
def _few_are_enough(monkeypatch):
    """A third of the passages that a user needs are trained on."""
    for module in (adapt, queries):
        monkeypatch.setattr(module, "MIN_PASSAGES", 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model of 512 positions, because its tokenizer knows none of the documents' words."""
    folder = tmp_path_factory.mktemp("long")
    write_model(folder)
    return str(folder / "model")


def write_documents(num_documents):
    """Write a folder of Markdown files of five sections each; returns the rows of their passages."""
    rows = passage_rows(num_documents)
    for row in rows:
        row["text"] = ".".join([*row["text"].split(".")[:NUM_SENTENCES], ""])
        page, heading = row["title"].split(" > ")
        path = Path("docs", row["document"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"# {page}\n\n" if file.tell() == 0 else "")
            file.write(f"## {heading}\n\n{row['text']}\n\n")
    return rows


@pytest.fixture
def documents():
    return write_documents(NUM_DOCUMENTS)


def run(model, *options):
    return main(["adapt", "docs", "--output", "mine", "--model", model, "--general", "[]", *options])


def steps(printed):
    return [line.split()[3] for line in printed.splitlines() if line.startswith("[")]


ALL = ["passages", "queries", "mine", "fit", "interpolate", "compare", "encode", "encode", "index"]


def test_documents_alone_become_pairs_a_verdict_an_index_and_a_file_of_labels(documents, model, capsys, monkeypatch):
    monkeypatch.setattr(adapt, "MAX_STEPS", 2)
    line = ["adapt", "docs", "--output", "mine", "--model", model]
    assert main(line) == 0
    printed = capsys.readouterr().out
    # Functions and descriptions of installed packages show what was forgotten.
    assert steps(printed) == [*ALL[:5], "prepare", *ALL[5:]]
    general = {each["data"]: each for each in json.loads(Path("mine/verdict/verdict.json").read_text())["general"]}
    assert set(general) == {"general/docstrings", "general/descriptions"}
    assert general["general/docstrings"]["num_rows"] == 200
    assert general["general/descriptions"]["num_rows"] > 20
    assert all(set(each["differences"]) >= {"trained"} for each in general.values())
    assert "Not measured on your queries" in printed
    config = yaml.safe_load(Path("mine/train.yaml").read_text())
    assert (config["trainer"]["max_epochs"], config["trainer"]["max_steps"]) == (1, 2)
    assert config["trainer"]["max_time"] == {"seconds": 1800}
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 3e-5
    assert config["model"]["init_args"]["initial_model"] == model
    # The start is kept, and its vectors are what is searched, with BM25.
    assert json.loads(Path("mine/verdict/verdict.json").read_text())["recommendation"]["variant"] == "hybrid"
    assert printed.splitlines()[-2].startswith("search: ")
    assert f"search --model {model} --corpus mine/vectors --hybrid" in printed
    table = pq.read_table("mine/passages.parquet")
    assert table.column_names == ["id", "title", "text", "metadata", "vector"]
    ids = [row["_id"] for row in read_rows(Path("mine/passages.jsonl"))]
    assert table["id"].to_pylist() == ids
    assert not Path("mine/passages.parquet.work").exists()
    # Both files have a manifest of their own, so that the first command can be run again.
    kinds = [json.loads(Path(f"mine/passages.{end}.manifest.json").read_text())["kind"] for end in ("jsonl", "parquet")]
    assert kinds == ["passages", "vector_table"]
    # A model encodes the passages once, and those of the pseudo test once.
    assert len(list(Path("mine/encoded").iterdir())) == 2 * 2 + 2 * 2
    assert "<polyline" in Path("mine/verdict/report.html").read_text()
    labels = read_rows(Path("mine/label_me.jsonl"))
    assert 0 < len(labels) <= 100
    assert all(row["relevant"] is None and row["passage"] in ids for row in labels)


def test_a_file_with_judgements_is_never_written_again(tmp_path):
    path = tmp_path / "label_me.jsonl"
    assert adapt.label_path(tmp_path) == path
    write_rows(path, [{"query": "q", "passage": "p", "relevant": None}])
    assert adapt.label_path(tmp_path) == path
    write_rows(path, [{"query": "q", "passage": "p", "relevant": None}, {"query": "q", "passage": "r", "relevant": 0}])
    assert adapt.label_path(tmp_path) == tmp_path / "label_me-2.jsonl"
    (tmp_path / "label_me-2.jsonl").write_text("an edit of\n")
    assert adapt.label_path(tmp_path) == tmp_path / "label_me-3.jsonl"


def test_other_queries_or_columns_need_a_new_folder(documents, model, capsys, monkeypatch, tmp_path):
    write_rows(Path("log.jsonl"), [{"query": "what", "file": documents[0]["document"]}])
    monkeypatch.setattr(adapt, "run_step", lambda argv: None)
    assert run(model) == 0
    before = Path("mine/manifest.json").read_bytes()
    Path("base.yaml").write_text("trainer: {gradient_clip_val: 1}\n")
    Path("own.yaml").write_text("config: base.yaml\n")
    assert run(model, "--output", "trained", "--training", "own.yaml") == 0
    Path("base.yaml").write_text("trainer: {gradient_clip_val: 2}\n")
    options = ["--output", "trained", "--training", "own.yaml"]
    assert_refused(capsys, tmp_path, "field 'training' is", run, model, *options)
    for options in (["--queries", "log.jsonl"], ["--columns", "{text: body}"]):
        assert_refused(capsys, tmp_path, f"field '{options[0][2:]}' is None, expected", run, model, *options)
    assert Path("mine/manifest.json").read_bytes() == before
    # With other judgements the trained model may have seen queries that are now tested.
    options = ["--output", "judged", "--queries", "log.jsonl"]
    assert run(model, *options) == 0
    write_rows(Path("log.jsonl"), [{"query": "what", "file": documents[-1]["document"]}])
    assert_refused(capsys, tmp_path, "field 'queries_sha256' differs", run, model, *options)


def test_a_second_run_keeps_finished_steps(documents, model, capsys, monkeypatch):
    monkeypatch.setattr(adapt, "MAX_STEPS", 1)
    calls, dispatch = [], adapt.run_step
    stopped = RuntimeError("killed")

    def interrupted(argv):
        calls.append(argv[0])
        if argv[0] == "compare" and calls.count("compare") == 1:
            raise stopped
        dispatch(argv)

    monkeypatch.setattr(adapt, "run_step", interrupted)
    with pytest.raises(RuntimeError, match="killed"):
        adapt.adapt(Path("docs"), Path("mine"), model, general=[])
    weights = Path("mine/trained/model.safetensors").stat()
    # Documents that changed since are not read: the rest of the run is that of the first.
    Path("docs", "new.md").write_text("# New\n\nAnother page of the documents. It has two sentences.")
    capsys.readouterr()
    adapt.adapt(Path("docs"), Path("mine"), model, general=[])
    assert calls == [*ALL[:6], *(name for name in ALL if name not in ("passages", "fit", "interpolate"))]
    printed = capsys.readouterr().out
    assert steps(printed) == ALL
    assert "kept mine/passages.jsonl of an earlier run" in printed
    assert "kept mine/trained of an earlier run" in printed
    assert Path("mine/trained/model.safetensors").stat() == weights
    assert json.loads(Path("mine/manifest.json").read_text())["complete"]


# 20 of the 80 queries are for validation.
@pytest.mark.parametrize("min_queries", [20, pytest.param(21, marks=pytest.mark.slow)])
def test_enough_real_queries_choose_the_share_and_real_queries_decide(
    min_queries, documents, model, capsys, monkeypatch
):
    monkeypatch.setattr(adapt, "MAX_STEPS", 2)
    monkeypatch.setattr(adapt, "MIN_REAL_QUERIES", min_queries)
    log = [{"query": row["text"].split(".")[0], "file": row["document"]} for row in documents[:80]]
    write_rows(Path("log.jsonl"), log)
    # Another method trains by a copy of the config with its module.
    config = adapt.CONFIG.read_text().replace("NVEmbedModule", "MGHCurriculumModule")
    Path("mgh.yaml").write_text(config)
    assert run(model, "--queries", "log.jsonl", "--training", "mgh.yaml") == 0
    printed = capsys.readouterr().out
    assert "fit --config mgh.yaml --config mine/train.yaml" in printed
    assert "MGHCurriculumModule" in Path("mine/run/logs/version_0/config.yaml").read_text()
    assert ("--data mine/queries/validation" in printed) == (min_queries == 20)
    assert ("0.5 of the way" in printed) >= (min_queries == 21)
    verdict = json.loads(Path("mine/verdict/verdict.json").read_text())["recommendation"]
    assert verdict["num_real_queries"] >= 50
    assert not Path("mine/label_me.jsonl").exists()
    # BM25 finds the words that a tiny model of random weights does not know.
    assert verdict["variant"].endswith("hybrid")
    # The printed line of a search works.
    line = shlex.split(printed.split("search: ")[1].splitlines()[0])
    assert line[-2:] == ["--hybrid", "QUERY"]
    assert main(line[line.index("search") :]) == 0
    assert "p0" in capsys.readouterr().out
    assert Path("mine/vectors/words").is_dir()
    # The card of the trained model says what it gained.
    card = Path("mine/adapted/README.md").read_text()
    assert Path("mine/verdict/verdict.md").read_text().strip() in card.partition("## Verdict")[2]


def test_a_config_without_a_method_follows_the_usual_one_and_keeps_its_learning_rate(documents, monkeypatch):
    """Here that of a decoder with LoRA."""
    backbone, tokenizer = tiny_mistral(), sentencepiece_tokenizer()
    backbone.config.max_position_embeddings = 512
    text = TextSettings(64, 512, append_eos=True)
    Embedder(backbone, tokenizer, LastTokenPooling(32), text=text).save_pretrained("decoder")
    monkeypatch.setattr(adapt, "MAX_STEPS", 1)
    dispatch = adapt.run_step

    def until_compare(argv):
        if argv[0] == "compare":
            raise RuntimeError("enough")
        dispatch(argv)

    monkeypatch.setattr(adapt, "run_step", until_compare)
    config = Path("lightning_configs/own_pairs_decoder.yaml")
    with pytest.raises(RuntimeError, match="enough"):
        adapt.adapt(Path("docs"), Path("mine"), "decoder", training=config, general=[])
    run = yaml.safe_load(Path("mine/run/logs/version_0/config.yaml").read_text())
    assert run["model"]["init_args"]["lora"]["rank"] == 16
    assert run["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 1e-3
    schedule = {"warmup_steps": 0.1, "decay": "linear", "total_steps": None, "within_max_time": True}
    assert run["model"]["init_args"]["schedule"] == schedule
    assert run["data"]["init_args"]["text"] is None
    adapted, start = (Embedder.from_pretrained(folder) for folder in ("mine/adapted", "decoder"))
    assert adapted.text == start.text
    assert adapted.tokenizer("word").input_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("variant", "served", "is_hybrid"),
    [
        ("start", "START", False),
        ("hybrid", "START", True),
        ("whitened", "mine/whitened", False),
        ("trained", "mine/adapted", False),
        ("trained + hybrid", "mine/adapted", True),
    ],
)
def test_the_recommended_variant_is_what_is_served(variant, served, is_hybrid, documents, model, capsys, monkeypatch):
    """The other commands are stand-ins: these models cannot be made to win."""
    calls = []

    def stand_in(argv):
        calls.append(argv)
        if argv[0] == "queries":
            for name in ("evaluation", "validation"):
                Path("mine/queries", name).mkdir(parents=True)
            write_rows(Path("mine/queries/validation/queries.jsonl"), [{}] * 50)
            kinds = ["sentence" if variant == "start" else "real", *["real"] * 99]
            write_rows(Path("mine/queries/pairs.jsonl"), [{"kind": kind} for kind in kinds])
        if argv[0] == "compare":
            Path("mine/verdict").mkdir()
            decision = {"variant": variant, "num_real_queries": 60}
            fusion = {"start": {"weight": 0.4}, "trained": {"weight": 0.3}}
            Path("mine/verdict/verdict.json").write_text(json.dumps({"recommendation": decision, "fusion": fusion}))
            Path("mine/verdict/verdict.md").write_text("the verdict\n")

    monkeypatch.setattr(adapt, "run_step", stand_in)
    write_rows(Path("log.jsonl"), [{"query": "what"}])
    assert run(model, "--queries", "log.jsonl", "--training-share", "0.4") == 0
    assert "--training-share 0.4" in " ".join(next(argv for argv in calls if argv[0] == "queries"))
    # Four passes over three batches if all queries are real.
    trainer = yaml.safe_load(Path("mine/train.yaml").read_text())["trainer"]
    assert (trainer["max_epochs"], trainer["max_steps"]) == ((1, 3) if variant == "start" else (4, 12))
    encoded = next(argv for argv in calls if argv[0] == "encode" and argv[argv.index("--output") + 1] == "mine/vectors")
    expected = model if served == "START" else served
    assert encoded[encoded.index("--model") + 1] == expected
    # The weight of BM25 is chosen on the validation queries, and stored with the index.
    (compared,) = (argv for argv in calls if argv[0] == "compare")
    assert "--validation mine/queries/validation --hybrid-weight tune" in " ".join(compared)
    assert calls[-1][0] == "index"
    assert calls[-1][-1] == ("0.3" if "trained" in variant else "0.4")
    line = shlex.split(capsys.readouterr().out.split("search: ")[1].splitlines()[0])
    assert line[line.index("--model") + 1] == expected
    assert ("--hybrid" in line) == is_hybrid
    assert adapt.recommended(Path("absent.json")) == ("start", True, 0.2)


def test_few_passages_are_compared_without_training(model, capsys):
    write_documents(10)
    assert run(model) == 0
    printed = capsys.readouterr().out
    assert steps(printed) == ["passages", "queries", "compare", "encode", "encode", "index"]
    assert "too few to train on" in printed


def test_fewer_pairs_than_a_batch_are_not_trained_on(documents, model, capsys, monkeypatch):
    dispatch, pairs = adapt.run_step, Path("mine/queries/pairs.jsonl")

    def with_few_pairs(argv):
        dispatch(argv)
        if argv[0] == "queries":
            pairs.write_text("".join(pairs.read_text().splitlines(keepends=True)[: adapt.BATCH_SIZE - 1]))

    monkeypatch.setattr(adapt, "run_step", with_few_pairs)
    assert run(model) == 0
    printed = capsys.readouterr().out
    assert steps(printed) == ["passages", "queries", "compare", "encode", "encode", "index"]
    assert "nothing is trained: 31 pairs are fewer than a batch of 32" in printed


def test_a_dry_run_prints_the_commands_and_writes_nothing(documents, model, capsys, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert run(model, "--dry-run") == 0
    assert steps(capsys.readouterr().out) == ALL
    assert sorted(tmp_path.rglob("*")) == before


def test_a_language_model_is_asked_for_judged_queries_and_has_a_training_of_its_own(documents, model, capsys):
    options = ["--endpoint", "http://localhost:8000/v1", "--endpoint-model", "m"]
    assert run(model, "--dry-run", *options) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("the language model is not asked: only judged queries (--queries) tell")
    assert steps(printed) == ALL
    assert "--endpoint" not in printed
    assert run(model, "--dry-run", "--queries", "docs", "--training-share", "0", *options) == 0
    printed = capsys.readouterr().out
    assert steps(printed) == [*ALL[:2], "mine", "fit", "mine", "fit", *ALL[4:]]
    line = next(line for line in printed.splitlines() if line.startswith("[2]"))
    given = ["--output mine/queries --seed 0 --queries docs --training-share 0.0", *options]
    assert line.endswith(" ".join(given))
    assert '--trained \'["mine/trained", "mine/trained-model"]\'' in printed
    # A strong model writes negatives of its queries too, which are mined for the documents' own.
    assert run(model, "--dry-run", "--queries", "docs", *options, "--endpoint-form", "tasks") == 0
    printed = capsys.readouterr().out
    assert steps(printed) == [*ALL[:2], "mine", "fit", "synthesize", "fit", *ALL[4:]]
    endpoint = "--endpoint http://localhost:8000/v1"
    assert f"{endpoint} --endpoint-model m --endpoint-form tasks" in printed
    pairs = "--regenerate-negatives mine/queries/pairs-model.jsonl --output mine/negatives-model"
    assert f"synthesize {pairs} {endpoint} --model m --seed 0\n" in printed


@pytest.fixture
def server():
    """An endpoint that writes queries with words of their passages, kinds of search, and negatives."""

    def behaviour(prompt, seed, count):
        if "Think up kinds of search" in prompt:
            return Reply('["Given a part, find its place.", "Given a place, find its parts."]')
        if prompt.startswith("Here is a query"):
            return answers_well(prompt, seed, count)
        new = re.findall(r"near (\w+) \w+\.", prompt.rpartition("Passage: ")[2])
        return Reply(f"why {new[0]} comes before {new[1]} in {'x'.join(new[1:3])}")

    with chat_server(behaviour) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("is_better", "form"), [(True, "line"), (False, "tasks")])
def test_a_models_queries_are_used_if_validation_queries_prefer_them(
    is_better, form, documents, model, server, capsys, monkeypatch
):
    monkeypatch.setattr(adapt, "MAX_STEPS", 1)
    monkeypatch.setattr(adapt, "MIN_PASSAGES", 20)
    scored = []

    def path_scores(path, test, vectors, shares, precision):
        scored.append(tuple(shares))
        best = 0.6 if len(scored) == 2 and is_better else 0.5
        return {share: best if share == 0.25 else 0.4 for share in shares}

    monkeypatch.setattr("embeddings.cli.compare.path_scores", path_scores)
    log = [{"query": row["text"].split(".")[1], "file": row["document"]} for row in documents[:20]]
    write_rows(Path("log.jsonl"), log)
    named = ["--endpoint", server.endpoint, "--endpoint-model", "m", "--endpoint-form", form]
    assert run(model, "--queries", "log.jsonl", *named) == 0
    printed = capsys.readouterr().out
    negatives = {"line": "mine", "tasks": "synthesize"}[form]
    assert steps(printed) == [*ALL[:2], "mine", "fit", negatives, "fit", *ALL[4:]]
    # The start is scored once; of equal models the one without a language model is written.
    assert scored == [(0, 0.25, 0.5, 0.75, 1), (0.25, 0.5, 0.75, 1)]
    chosen = "trained-model" if is_better else "trained"
    assert f"0.25 of the way from {model} to mine/{chosen}\n" in printed
    first, second = (yaml.safe_load(Path(f"mine/train{name}.yaml").read_text()) for name in ("", "-model"))
    assert [each["trainer"]["max_time"] for each in (first, second)] == [{"seconds": 900}] * 2
    data = [each["data"]["init_args"] for each in (first, second)]
    sources = [(each["sources"][0]["path"], each["num_negatives"]) for each in data]
    records = {"line": ("mine/mined-model.parquet", 1), "tasks": ("mine/negatives-model/records.jsonl", 4)}
    assert sources == [("mine/mined.parquet", 1), records[form]]
    assert first["trainer"]["default_root_dir"] != second["trainer"]["default_root_dir"]
    kinds = [{row["kind"] for row in read_rows(Path(f"mine/queries/pairs{name}.jsonl"))} for name in ("", "-model")]
    assert kinds == [{"sentence", "heading"}, {"model"}]
    if form == "tasks":
        # The second run asks for nothing again.
        server.requests.clear()
        assert run(model, "--queries", "log.jsonl", *named) == 0
        assert not server.requests
        levels = [[each["level"] for each in row["negatives"]] for row in read_rows(Path(records[form][0]))]
        assert levels == [[1, 2, 3, 4]] * len(levels)


@pytest.mark.slow
def test_a_models_queries_are_left_aside_without_judgements(documents, model, server, capsys, monkeypatch):
    monkeypatch.setattr(adapt, "MAX_STEPS", 1)
    Path("log.txt").write_text("where is it\nwho was there\n")
    assert run(model, "--queries", "log.txt", "--endpoint", server.endpoint) == 0
    printed = capsys.readouterr().out
    assert steps(printed) == ALL
    assert "not trained on: no judged queries tell what they are worth" in printed
    assert len(read_rows(Path("mine/queries/pairs-model.jsonl"))) > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0"], "minutes must be > 0 and finite"),
        (["--queries", "lost.jsonl"], "lost.jsonl: no such file or folder; check the path of --queries"),
        (["--training", "lost.yaml"], "lost.yaml: no such file or folder; check the path of --training"),
        (["--training", "docs/a.md"], "contains no options"),
        (["--language", "klingon"], "language"),
        (["--model", "nowhere/model"], "nowhere/model"),
        (["--model", "docs"], "docs: has no modules.json, so it is not an embedding model"),
        (["--output", "notes"], "notes"),
        (["--endpoint", "localhost:8000"], "endpoint must be an HTTP URL"),
        (["--endpoint-model", "m"], "endpoint_model needs --endpoint"),
        (["--endpoint-form", "tasks"], "endpoint_form needs --endpoint"),
        (["--endpoint", "http://host/v1", "--endpoint-form", "tasks"], "endpoint_form needs --endpoint-model"),
        (["--training-share", "0.5"], "training_share needs --queries"),
        (["--no-hold-out-judged"], "hold_out_judged needs --queries"),
        (["--query-columns", "{query: q}"], "query_columns needs --queries"),
        (["--training-share", "0.9", "--queries", "docs"], "training_share must be below 1 - validation_share, 0.75"),
        (["--queries", "columns.jsonl"], "columns.jsonl:1: has no query"),
        # With the log or the endpoint mended, the same command must not find another output.
        (["--queries", "names.jsonl"], "no query names a relevant passage"),
        (["--queries", "log.jsonl", "--endpoint", "http://127.0.0.1:9/v1"], "no connection"),
    ],
)
def test_a_user_error_is_one_line(model, tmp_path, capsys, options, message):
    Path("docs").mkdir()
    Path("docs", "a.md").write_text("# Page\n\nThe quick fox jumps over the dog.")
    Path("notes").mkdir()
    Path("notes", "mine.txt").write_text("mine")
    write_rows(Path("log.jsonl"), [{"query": "what", "passage": "a.md"}])
    write_rows(Path("names.jsonl"), [{"query": "what", "passage": "nothing"}])
    write_rows(Path("columns.jsonl"), [{"q": "what", "page": "a.md"}])
    assert_refused(capsys, tmp_path, message, run, model, *options)


def test_a_folder_without_text_is_refused_and_nothing_is_left(model, tmp_path, capsys):
    Path("docs").mkdir()
    Path("docs", "logo.png").write_bytes(b"\x89PNG\0\0")
    assert_refused(capsys, tmp_path, "contains no text that can be read", run, model)
