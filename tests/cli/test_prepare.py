"""`prepare` of a recipe, from stand-in data sets to training data; the parts of `quickstart`."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from embeddings.cli import quickstart
from embeddings.cli.fit import run_trainer
from embeddings.cli.main import main
from embeddings.cli.quickstart import SPLITS, score_table
from embeddings.data.public import PublicTable
from tests.data.killed_runs import LIGHTNING_WARNINGS
from tests.data.public.mirror import answer, question, rows_of, write_data_set, write_mirror
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import write_retrieval_folder

pytestmark = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
ROOT = Path(__file__).parents[2]
TABLE = PublicTable.read()
LIMIT = 30
STAGES = {stage.config: stage for stage in TABLE.stages}


def stages(*quick):
    """All stages; those that are not quick have the mark slow."""
    marks = [() if name in quick else pytest.mark.slow for name in STAGES]
    return [pytest.param(name, marks=mark) for name, mark in zip(STAGES, marks, strict=True)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return write_mirror(tmp_path_factory.mktemp("hub"), [s for s in TABLE.sources if not s.collection], 40)


@pytest.fixture
def prepare(model, hub):
    """Run `prepare` with the stand-ins and more options; returns the exit code."""

    def run(recipe, *options, mirror=hub):
        words = ["--limit", str(LIMIT), "--mirror", str(mirror), "--teacher", model]
        return main(["prepare", recipe, "--output", "out", *words, *options])

    return run


def rows(path):
    return pq.read_table(path).to_pylist()


# More than twenty sources take ten seconds.
@pytest.mark.parametrize("config", stages("cde_supervised"))
def test_the_data_config_of_each_stage_names_the_prepared_files(config, prepare, monkeypatch, capsys):
    """The same command without --fetch-only continues, with the clusters and vectors of contextual batches."""
    stage = STAGES[config]
    options = ["--stage", stage.stage] if stage.stage else []
    assert prepare(stage.recipe, *options, "--fetch-only") == 0
    printed = capsys.readouterr().out
    assert not stage.vectors or f"0 of {len(stage.wanted())} sources are ready for training" in printed
    assert prepare(stage.recipe, *options) == 0
    printed = capsys.readouterr().out
    fetched = {key for key in stage.wanted() if TABLE.place_of(key, None).why_left_out is None}
    assert f"{len(fetched)} of {len(stage.wanted())} sources are ready for training" in printed
    assert {str(path) for path in Path("out").glob("*/*.parquet")} == {f"out/{key}.parquet" for key in fetched}
    for key in stage.wanted().keys() - fetched:
        assert f"left out: {key.partition('/')[2]}" in printed
    for group, _, name in (key.partition("/") for key in fetched if stage.vectors):
        assert Path(f"out/{group}/clusters/{name}/cluster_ids.npy").exists()
        index = json.loads(Path(f"out/{group}/vectors/{name}/index/manifest.json").read_text())
        assert bool(index["negatives"]) is (stage.data["num_negatives"] > 0)

    variable, *line = printed.strip().splitlines()[-1].split()
    assert line[-5:] == ["fit", "--recipe", stage.run, "--config", f"out/{config}.yaml"]
    # The command that it prints at the end, without loading the model.
    monkeypatch.setenv(*variable.split("="))
    with pytest.raises(SystemExit):
        run_trainer([*line[-5:], "--print_config"])
    arguments = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    licences = {key.partition("/")[2]: TABLE.place_of(key, None).licence for key in fetched}
    assert {source["name"]: source["licence"] for source in arguments["sources"]} == licences


@pytest.mark.parametrize("config", stages("cde_supervised"))
def test_the_command_in_the_docs_trains_and_scores_a_stand_in(config, model, hub, monkeypatch, capsys):
    """Only the names of the recipe, the teacher, FOLDER and the location of the data sets are replaced."""
    stage, page = STAGES[config], ROOT / "docs" / "prepare.md"
    (block,) = (text for text in page.read_text("utf-8").split("```") if " && " in text)
    exported = f"checkpoints/stand_in/{'mgh_public' if config == 'mgh' else config}"
    names = {
        "nv-embed --stage 1": f"{stage.recipe} --mirror {hub}" + (f" --stage {stage.stage}" if stage.stage else ""),
        "nv_embed_stage1_h100x8": stage.run,
        "checkpoints/stand_in/nv_embed_stage1": exported,
        "data/train/nv_embed_stage1.yaml": f"data/train/{config}.yaml",
        "all-MiniLM-L6-v2": model,
        "FOLDER": str(write_retrieval_folder(Path("validation"))),
    }
    for old, new in names.items():
        assert block.count(old) == 1, old
        block = block.replace(old, new)
    ran = []
    for line in block.replace("\\\n", "").split(" && "):
        words = shlex.split(line)
        program = words.index("python")
        for variable in words[:program]:
            monkeypatch.setenv(*variable.split("="))
        assert words[program + 1] == "main.py"
        assert main(words[program + 2 :]) == 0, line
        ran.append(words[program + 2])
    assert ran == ["prepare", "fit", "evaluate"]
    assert "ndcg_at_10" in capsys.readouterr().out
    card = Path(exported, "README.md").read_text("utf-8")
    made = [key.partition("/")[2] for key in stage.wanted() if TABLE.place_of(key, None).why_left_out is None]
    assert [name for name in made if name not in card] == []


def test_negatives_are_mined_by_the_teacher_with_the_data_sets_instruction(prepare):
    assert prepare("nv-embed", "--stage", "1", "--only", "fiqa,miracl,nli") == 0
    found = rows("out/nv_embed/fiqa.parquet")
    assert [row["query"] for row in found] == [question(row) for row in range(LIMIT)]
    assert [row["positive"] for row in found] == [[f"T{row} {answer(row)}"] for row in range(LIMIT)]
    assert sum(len(row["negatives"] or ()) for row in found) > 5 * LIMIT
    assert all(row["positive"][0] not in (row["negatives"] or ()) for row in found)
    fields = json.loads(Path("out/nv_embed/fiqa.parquet.manifest.json").read_text())
    asked = "Given a financial question, retrieve relevant passages that answer the query"
    assert fields["query_prompt_name"] == {"text": f"Instruct: {asked}\nQuery: "}
    assert (fields["rules"]["num_negatives"], fields["rules"]["margin"]) == (7, 0.95)
    assert fields["corpus_sha256"]
    # A data set's negatives are candidates for mining, or stay if training uses them directly.
    mined = {text for row in rows("out/nv_embed/miracl.parquet") for text in row["negatives"] or ()}
    assert mined & {answer(row + 500) for row in range(LIMIT)}
    assert rows("out/nv_embed/nli.parquet")[2]["negatives"] == [answer(502 + n) for n in range(7)]
    assert not Path("out/nv_embed/fetched/nli.parquet").exists()
    # Scored pairs become records in both directions.
    assert prepare("nv-embed", "--stage", "2", "--only", "sts12") == 0
    found = rows("out/nv_embed/sts12.parquet")
    both = [(question(0), [answer(0)]), (answer(0), [question(0)])]
    assert [(row["query"], row["positive"]) for row in found[:2]] == both
    fields = json.loads(Path("out/nv_embed/sts12.parquet.manifest.json").read_text())
    assert fields["document_prompt_name"] == fields["query_prompt_name"]
    assert fields["query_prompt_name"]["text"].startswith("Instruct: Retrieve semantically similar text.")


def test_web_pages_are_filtered_and_released_pairs_are_not(prepare):
    assert prepare("moe", "--stage", "pretrain", "--only", "mc4_ar,agnews") == 0
    fields = json.loads(Path("out/moe_pretrain/mc4_ar.parquet.manifest.json").read_text())
    assert (fields["kind"], fields["rules"]["top_k"]) == ("filtered pairs", 2)
    assert fields["rules"]["query_prompt_name"] == {"text": "query: "}
    assert json.loads(Path("out/moe_pretrain/agnews.parquet.manifest.json").read_text())["kind"] == "public data"


def test_a_curriculums_negatives_have_levels(prepare):
    assert prepare("mgh", "--only", "nq") == 0
    levels = [negative["level"] for row in rows("out/mgh/nq.parquet") for negative in row["negatives"] or ()]
    assert set(levels) == {1, 2, 3, 4}


def test_texts_of_test_sets_are_removed_if_the_recipe_requires_it(prepare, tmp_path, caplog):
    folder = tmp_path / "mteb" / "emotion"
    folder.mkdir(parents=True)
    held_out = [{"text": f"{question(row)} 0", "label": "joy"} for row in range(5)]
    for split in ("train", "test"):
        texts = held_out if split == "test" else [{"text": f"other {row}", "label": str(row % 2)} for row in range(4)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    assert prepare("nv-embed", "--stage", "2", "--only", "emotion,imdb") == 0
    assert "not decontaminated, unlike in the paper: emotion; give --decontaminate FOLDER" in caplog.text
    shutil.rmtree("out")
    options = ["--stage", "2", "--only", "emotion,imdb", "--decontaminate", str(tmp_path / "mteb")]
    assert prepare("nv-embed", *options) == 0
    kept = [row["text"] for row in rows("out/nv_embed/emotion.parquet")]
    assert kept == [f"{question(row)} 0" for row in range(5, LIMIT)]
    assert len(rows("out/nv_embed/imdb.parquet")) == LIMIT


def test_a_missing_or_changed_data_set_is_named_and_the_others_are_made(prepare, hub, tmp_path, capsys):
    mirror = tmp_path / "part"
    shutil.copytree(hub, mirror)
    shutil.rmtree(mirror / "mteb" / "scifact")
    squad = TABLE.place_of("nv_embed/squad", None)
    write_data_set(mirror / "rajpurkar" / "squad", {"default": {"train": [{"question": "a", "answer": "b"}] * 4}})
    options = ["--stage", "1", "--only", "squad,scifact,nq"]
    assert prepare("nv-embed", *options, mirror=mirror) == 2
    written = capsys.readouterr()
    last = written.err.strip().splitlines()[-1]
    assert "2 of 3 sources could not be made: squad (hub:rajpurkar/squad: has no" in last
    assert "scifact (hub:mteb/scifact: is not in" in last
    assert "1 of 16 sources are ready for training" in written.out
    assert [Path(path).name for path in Path("out/nv_embed").glob("*.parquet")] == ["nq.parquet"]
    before = Path("out/nv_embed/nq.parquet").read_bytes()
    shutil.copytree(hub / "mteb" / "scifact", mirror / "mteb" / "scifact")
    write_data_set(mirror / "rajpurkar" / "squad", {"default": {"train": rows_of(squad, 40)}})
    assert prepare("nv-embed", *options, mirror=mirror) == 0
    assert "3 of 16 sources are ready for training" in capsys.readouterr().out
    assert Path("out/nv_embed/nq.parquet").read_bytes() == before


def test_fetch_only_loads_no_model_and_unconfirmed_sources_are_made_on_request(prepare, capsys):
    options = ["--stage", "1", "--only", "nq,nli,arguana", "--fetch-only", "--teacher", "nowhere"]
    assert prepare("nv-embed", *options) == 0
    printed = capsys.readouterr().out
    assert "1 of 16 sources are ready for training" in printed
    assert f"nq {LIMIT}" in " ".join(printed.split())
    assert not Path("out/nv_embed/nq.parquet").exists()
    assert len(rows("out/nv_embed/fetched/arguana.parquet")) == LIMIT
    assert prepare("moe", "--stage", "finetune", "--fetch-only", "--unconfirmed", "--limit", "3") == 0
    assert "left out" not in capsys.readouterr().out


def test_a_collection_has_its_own_negatives(prepare, tmp_path):
    held = [source for source in TABLE.sources if source.collection == "bge-full-data"]
    mirror = write_mirror(tmp_path / "bge", [*held, TABLE.place_of("nv_embed/nli", None)], 40)
    options = ["--stage", "1", "--from", "bge-full-data", "--only", "fever,nli"]
    assert prepare("nv-embed", *options, mirror=mirror) == 0
    assert rows("out/nv_embed/fever.parquet")[0]["negatives"] == [answer(500 + n) for n in range(9)]


def test_check_looks_for_each_data_set_and_writes_nothing(hub, tmp_path, capsys):
    assert main(["prepare", "nv-embed", "--check", "--mirror", str(hub)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"nv_embed/arguana .* not confirmed", printed)
    assert "The challenge's data require registration" in printed
    assert main(["prepare", "cde", "--check", "--mirror", str(tmp_path)]) == 2
    written = capsys.readouterr()
    assert written.out.count("missing") == 4
    assert "4 of 4 sources could not be made: reddit (hub:nomic-ai/nomic-embed-uns" in written.err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["nv-embed", "--limit", "0"], "limit must be >= 1, got 0"),
        (["mgh", "--only", "nq,nothing"], "only must name sources of mgh, got 'nq,nothing'; they are nli, dureader"),
        (["mgh", "--from", "bge-full-data"], "from has no effect on mgh, got 'bge-full-data'"),
        (["cde", "--bm25-threshold", "0.9"], "bm25_threshold needs evaluation texts to compare with"),
        (["mgh", "--decontaminate", "o"], "decontaminate has no effect: the papers of these"),
        (["--limit", "3", "docstrings"], "recipe must come first, got 'docstrings'; write: "),
    ],
)
def test_impossible_options_are_reported_in_one_line_and_nothing_is_written(options, says, capsys, tmp_path):
    assert_refused(capsys, tmp_path, says, main, ["prepare", "--output", "o", *options])


def test_the_score_table_has_a_row_for_each_system_and_both_splits():
    row = {"ndcg_at_10": 0.1, "mrr_at_10": 0.2, "recall_at_10": 0.3}
    lines = score_table({key: dict.fromkeys(SPLITS, row) for key in ("bm25", "before", "after")}).splitlines()
    assert [line.split("  ")[0] for line in lines[2:5]] == ["BM25", "before training", "after training"]
    assert lines[4].split()[-6:] == ["0.100", "0.200", "0.300"] * 2


def test_a_folder_with_other_files_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    line = ["prepare", "docstrings", "--output", str(tmp_path)]
    assert_refused(capsys, tmp_path, "must be new, empty or written by this library", main, line)


def test_the_quickstart_resumes_its_training(monkeypatch):
    class Trained(Exception):
        pass

    def train(words):
        raise Trained(*words)

    for name in ("prepare_docstrings", "read_retrieval_folder", "score_bm25"):
        monkeypatch.setattr(quickstart, name, lambda *_: {})
    monkeypatch.setattr(quickstart, "score_model", lambda *_: ({}, None))
    monkeypatch.setattr("embeddings.cli.fit.run_trainer", train)
    with pytest.raises(Trained) as found:
        quickstart.quickstart()
    assert found.value.args == ("fit", "--config", quickstart.CONFIG, "--ckpt_path", "auto")
