"""The top-level names, and the examples run on stand-ins: a tiny encoder, a tiny decoder, and pairs of a few words."""

import ast
import gzip
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from jsonargparse import auto_cli, capture_parser
from sentence_transformers import SentenceTransformer

import embeddings
from embeddings.cli.main import main
from embeddings.common import TextSettings
from embeddings.data.docstrings import SIZES, prepare_docstrings
from embeddings.inference import Encoder
from embeddings.models import Embedder, MeanPooling
from tests.helpers.runs import backbone_folder, write_pairs, write_retrieval_folder
from tests.helpers.tiny import save_backbone, tiny_bert, tiny_mistral, wordpiece_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
Printed = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder, two decoders, pairs of two domains, and a retrieval folder."""
    folder = tmp_path_factory.mktemp("world")
    text = TextSettings(query_max_length=32, document_max_length=32)
    Embedder(tiny_bert(num_positions=512), wordpiece_tokenizer(), MeanPooling(32), text=text).save_pretrained(
        folder / "encoder"
    )
    backbone_folder(folder / "decoder", "mistral")
    save_backbone(str(folder / "decoder_without_eos"), tiny_mistral(), wordpiece_tokenizer())
    rows = [json.loads(line) for line in write_pairs(folder / "pairs.jsonl").read_text().splitlines()]
    others = [{"query": f"{row['query']} x y", "positive": f"{row['positive']} z"} for row in rows]
    (folder / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    write_retrieval_folder(folder / "validation")
    return folder


def script(name: str) -> Callable[..., None]:
    found: Callable[..., None] = importlib.import_module(f"examples.{name}").main
    return found


def run(name: str, *arguments: Path | str, **options: Any) -> None:
    """Call an example's `main`, as its command line does."""
    script(name)(*map(str, arguments), **options)


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """In an empty folder: what of an example's lines fits a pattern."""
    monkeypatch.chdir(tmp_path)
    texts: list[str] = []

    def found(pattern: str) -> list[Any]:
        texts.append(capsys.readouterr().out)
        return re.findall(pattern, "".join(texts), re.MULTILINE)

    return found


def test_the_public_names_are_classes_and_two_functions() -> None:
    functions = [name for name in embeddings.__all__ if not isinstance(getattr(embeddings, name), type)]
    assert functions == ["mixed_precision", "source_from_rows"]
    assert all(callable(getattr(embeddings, name)) for name in functions)
    with pytest.raises(AttributeError, match="module 'embeddings' has no attribute 'Encode'"):
        embeddings.Encode  # noqa: B018


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_what_it_does_and_its_command_parses(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text("utf-8"))) or ""
    page = (EXAMPLES / "README.md").read_text("utf-8")
    lines = [line for line in (docstring + "\n" + page).splitlines() if line.startswith(f"python examples/{name}.py ")]
    assert len(lines) >= 2
    parser: Any = capture_parser(lambda: auto_cli(script(name)))
    for line in lines:
        parser.parse_args(shlex.split(line, comments=True)[2:])


# Lightning's advice to a script, whose author may not want the log.
@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed")
def test_the_first_example_trains_exports_and_searches(world: Path, printed: Printed) -> None:
    Path("data").mkdir()
    Path("data/train.jsonl.gz").write_bytes(gzip.compress((world / "pairs.jsonl").read_bytes()))
    shutil.copytree(world / "validation", "data/eval/validation")
    run("train", "data", "model", steps=2, batch_size=8)
    found = printed(r"^(-?[01]\.\d{3})  (.*)$")[-3:]
    assert found[0][1].endswith("Shortest path in a graph.")
    assert [float(score) for score, _ in found] == sorted((float(score) for score, _ in found), reverse=True)
    # Mean pooling needs no code of its own: any server that reads sentence-transformers directories takes it.
    assert not list(Path("model").glob("*.py"))
    theirs = SentenceTransformer("model", device="cpu")
    ours = Encoder.from_pretrained("model", precision="float32", device="cpu")
    texts = ["how do I pad", "a graph"]
    assert np.abs(theirs.encode_query(texts) - ours.encode_query(texts)).max() <= 1e-5
    scores = ours.similarity(ours.encode_query(texts), ours.encode_document(texts))
    expected = theirs.similarity(theirs.encode_query(texts), theirs.encode_document(texts)).numpy()
    assert np.abs(expected - scores).max() <= 1e-5


def test_own_pairs_are_split_trained_on_and_scored(world: Path, printed: Printed) -> None:
    run("own_pairs", world / "pairs.jsonl", "model", model=str(world / "encoder"), epochs=1, batch_size=8)
    ((before, after),) = printed(r"^nDCG@10 before ([01]\.\d{3}), after ([01]\.\d{3})$")
    assert 0 < float(before) <= 1
    assert 0 < float(after) <= 1
    split = Path("data/own_pairs")
    train = [json.loads(line)["query"] for line in (split / "train.jsonl").read_text().splitlines()]
    queries = [json.loads(line)["text"] for line in (split / "validation/queries.jsonl").read_text().splitlines()]
    assert (len(train), len(queries), set(train) & set(queries)) == (57, 7, set())
    assert SentenceTransformer("model", device="cpu").encode(["pad"]).shape == (1, 32)


# By the stand-ins' random weights all texts are alike, so that a margin would leave no negative.
def test_mined_negatives_train_a_second_model(world: Path, printed: Printed) -> None:
    options = {"model": str(world / "encoder"), "steps": 2, "margin": None}
    run("mine_and_retrain", world / "pairs.jsonl", world / "validation", **options)
    names = printed(r"^(\w[\w ]+?) +nDCG@10 [01]\.\d{3}$")
    assert names == ["as it comes", "trained on pairs", "with mined negatives"]
    place = "checkpoints/mine_and_retrain"
    mined = pq.read_table(f"{place}/mined_2_steps.parquet").to_pylist()
    assert {len(row["negatives"]) for row in mined} == {3}
    vectors = [Encoder.from_pretrained(f"{place}/{name}").encode(["pad the fox"]) for name in ("pairs", "mined")]
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-4


def test_a_model_reads_a_context_of_either_domain(world: Path, printed: Printed) -> None:
    options = {"model": str(world / "encoder"), "steps": 4, "batch_size": 8, "num_held_out": 16}
    run("cde_two_domains", world / "pairs.jsonl", world / "others.jsonl", **options)
    rows = printed(r"^domain (\w+) +context (\w+) +own document first [01]\.\d{3}$")
    first, second = ("none", "matched", "foreign"), ("none", "foreign", "matched")
    assert rows == [*(("first", kind) for kind in first), *(("second", kind) for kind in second)]
    assert Encoder.from_pretrained("checkpoints/cde_two_domains/model").num_context == 8


def test_a_curriculum_mines_four_levels_and_trains_on_them(world: Path, printed: Printed) -> None:
    options = {"model": str(world / "encoder"), "steps": 4, "margin": None}
    run("curriculum", world / "pairs.jsonl", world / "validation", **options)
    assert printed(r"^level (\d): \d+ negatives, scores \S+ to \S+, mean") == ["1", "2", "3", "4"]
    assert printed(r"^(\w+) +nDCG@10 [01]\.\d{3}$") == ["before", "after"]
    mined = pq.read_table("checkpoints/curriculum/levels.parquet").to_pylist()
    assert {negative["level"] for row in mined for negative in row["negatives"]} == {1, 2, 3, 4}


def test_experts_begin_as_the_dense_encoder(world: Path, printed: Printed) -> None:
    options = {"model": str(world / "encoder"), "steps": 2}
    run("upcycle", world / "pairs.jsonl", world / "validation", **options)
    ((total, active),) = printed(r"^([\d,]+) parameters, of which ([\d,]+) work for a token$")
    assert int(active.replace(",", "")) < int(total.replace(",", ""))
    (difference,) = printed(r"^largest difference of the vectors, dense and sparse: (\S+)$")
    assert float(difference) <= 1e-5
    assert [int(width) for width in printed(r"^\w.* (\d+) dimensions +nDCG@10 [01]\.\d{3}$")] == [32, 10, 32, 10]
    ((layer, shares),) = printed(r"^layer (\d): share of each expert ([\d. ]+)$")
    assert (layer, len(shares.split())) == ("1", 4)
    assert sum(map(float, shares.split())) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("decoder", ["decoder", "decoder_without_eos"])
def test_lora_trains_few_weights_and_leaves_a_plain_model(decoder: str, world: Path, printed: Printed) -> None:
    options = {"model": str(world / decoder), "output": "model", "steps": 2, "batch_size": 8}
    run("lora_decoder", world / "pairs.jsonl", world / "validation", **options)
    ((trained, total),) = printed(r"^([\d,]+) of ([\d,]+) parameters are trained$")
    assert 0 < int(trained.replace(",", "")) < int(total.replace(",", "")) / 2
    assert len(printed(r"^nDCG@10 before [01]\.\d{3}, after [01]\.\d{3}$")) == 1
    theirs = SentenceTransformer("model", device="cpu", model_kwargs={"dtype": "float32"})
    ours = Encoder.from_pretrained("model", precision="float32", device="cpu")
    assert ours.embedder.text.prompts["query"].startswith("Instruct: Given a question")
    assert np.abs(theirs.encode_query(["pad the fox"]) - ours.encode_query(["pad the fox"])).max() <= 1e-4


def write_program(path: Path, body: str) -> None:
    """An executable that stands for another one."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def test_a_sweep_is_queued_as_an_array(tmp_path: Path, printed: Printed) -> None:
    for folder in ("examples", "lightning_configs"):
        shutil.copytree(ROOT / folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert main(["sweep", "examples/sweep.yaml", "--count"]) == 0
    (count,) = printed(r"^\d+$")
    write_program(tmp_path / "bin/python", f'[ "$*" = "main.py sweep examples/sweep.yaml --count" ] && echo {count}')
    write_program(tmp_path / "bin/sbatch", 'echo "$@" > sbatch.txt')
    line = ["bash", "examples/slurm_array.sh", "examples/sweep.yaml", "--time=01:00:00"]
    subprocess.run(line, env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}, check=True)
    job = ["lightning_configs/slurm/array.sbatch", "examples/sweep.yaml"]
    assert Path("sbatch.txt").read_text().split() == ["--array=0-5%4", "--time=01:00:00", *job]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_notebook_does_what_the_quickstart_does(
    world: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = json.loads((EXAMPLES / "quickstart.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell.get("outputs", []) == [] for cell in book["cells"])
    assert all(cell.get("execution_count") is None for cell in book["cells"])
    small = {
        '"all-MiniLM-L6-v2", 36': f'"{world}/encoder", 2',
        "num_latents=64, num_heads=4, head_dim=96": "num_latents=4, num_heads=2, head_dim=8",
        "warmup_steps=4": "warmup_steps=1",
        "batch_size=32": "batch_size=4",
        "max_length=128": "max_length=32",
    }
    text = "\n\n# %%\n".join(cells)
    for old, new in small.items():
        assert old in text, old
        text = text.replace(old, new)
    sizes = dict.fromkeys(SIZES, 8)
    fewer = partial(prepare_docstrings, packages=["click"], held_out_packages=["packaging"], sizes=sizes)
    monkeypatch.setattr("embeddings.data.docstrings.prepare_docstrings", fewer)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in text.split("\n\n# %%\n"):
        exec(compile(cell, "quickstart.ipynb", "exec"), namespace)
    assert printed(r"^(\w[\w ]+?) +[01]\.\d{3} +[01]\.\d{3}$") == ["BM25", "before training", "after training"]
    assert len(printed(r"^  -?[01]\.\d{3}  \w")) == 9
    assert Path("checkpoints/quickstart_notebook/curves.png").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_computes_the_vectors_of_the_encoder(world: Path, printed: Printed) -> None:
    """With as many workers as CPUs, which leave some time for reading."""
    pytest.importorskip("ray")
    run("ray_encode", world / "encoder", world / "validation" / "corpus.jsonl", "vectors", workers=os.cpu_count())
    table = pq.read_table("vectors")
    expected = Encoder.from_pretrained(str(world / "encoder"), device="cpu").encode_document(table["text"].to_pylist())
    assert np.array_equal(np.array(table["vector"].to_pylist(), dtype=np.float32), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_datatrove_removes_the_near_copy_of_a_pair(tmp_path: Path, printed: Printed) -> None:
    pytest.importorskip("datatrove")
    words = [f"word{chr(97 + row)}{chr(97 + column)}" for row in range(20) for column in range(20)]
    pairs = [{"query": f"about {words[row * 20]}", "positive": " ".join(words[row * 20 :][:20])} for row in range(20)]
    copies = [{**pair, "positive": f"{pair['positive']} again"} for pair in pairs[:3]]
    (tmp_path / "pairs").mkdir()
    lines = [json.dumps(pair) + "\n" for pair in (*pairs, *copies)]
    (tmp_path / "pairs" / "pairs.jsonl").write_text("".join(lines))
    run("datatrove_near_copies", tmp_path / "pairs", tmp_path / "kept")
    kept = [json.loads(line) for path in (tmp_path / "kept").iterdir() for line in path.read_text().splitlines()]
    assert sorted(pair["query"] for pair in kept) == sorted(pair["query"] for pair in pairs)
