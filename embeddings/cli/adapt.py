"""`adapt`: from one's own documents to better search over them, measured, by the commands that do each step."""

import json
import math
import shlex
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import torch
import yaml

from embeddings.adaptation.model_queries import Form, QueryModel
from embeddings.adaptation.queries import MIN_PASSAGES, MODEL_PAIRS, QuerySettings, content_of
from embeddings.adaptation.rankings import vector_folder
from embeddings.adaptation.real_queries import REAL, deciding_items, read_log, write_label_file
from embeddings.adaptation.verdict import HYBRID, MIN_REAL_QUERIES, START, TRAINED, WHITENED, rank_queries
from embeddings.cli.compare import CARD_SECTION
from embeddings.cli.export import component
from embeddings.cli.parser import CONFIGS, chooses, listed, located, read_configs
from embeddings.common import InputError, OptionError
from embeddings.common.errors import program, refuse_given
from embeddings.common.io import (
    MANIFEST,
    METRICS_FILE,
    atomic_folder,
    link_or_copy,
    text_hash,
    write_manifest,
    write_text,
)
from embeddings.common.jobs import JobFolder, discard_on_user_error
from embeddings.data.records import NUM_LEVELS
from embeddings.inference import Encoder
from embeddings.inference.bm25 import ANY_LANGUAGE, tokenizer
from embeddings.inference.hybrid import WEIGHT, WORDS_FOLDER
from embeddings.models import Embedder
from embeddings.models.directory import require_modules
from embeddings.models.model_card import add_section
from embeddings.models.model_files import PACKAGED_NAME, resolve_model

CONFIG = CONFIGS / "own_pairs.yaml"
LEARNING_RATE, BATCH_SIZE, NUM_NEGATIVES = 3e-5, 32, 1
# Steps of training on a CPU and on a GPU, and passes over the pairs, at most; real queries have `REAL_EPOCHS`.
MAX_STEPS, MAX_GPU_STEPS = 200, 500
EPOCHS, REAL_EPOCHS = 1, 4
# Items of the file of labels, and queries of which they are chosen.
MAX_LABELS, MAX_LABELLED_QUERIES = 100, 500


def adapt(
    documents: Path,
    output: Path,
    model: str = PACKAGED_NAME,
    queries: Path | None = None,
    query_columns: dict[str, str] | None = None,
    columns: dict[str, str] | None = None,
    training: Path | None = None,
    general: Path | list[Path] | None = None,
    language: str = ANY_LANGUAGE,
    hold_out_judged: bool = True,
    training_share: float | None = None,
    minutes: float = 30.0,
    seed: int = 0,
    dry_run: bool = False,
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    endpoint_form: Form = "line",
) -> None:
    """Adapt a model to one's own documents, measure what it gained, and index the documents for search.

    Runs `passages`, `queries`, `mine`, `fit`, `interpolate`, `compare`, `encode` and `index`, and prints each command,
    which can be run by itself. A trained model is recommended only by at least 50 real queries (`--queries`). To
    resume, run the same command again: finished steps are kept. Documents or queries that changed since need a new
    folder.

    Args:
        documents: A folder of documents, or a file (see `passages`).
        output: The folder to write: each step's output, the recommended model's index, and `verdict/report.html`.
        model: The starting model, a directory or Hub id.
        queries: Real queries: a log, pairs, or a labelled evaluation folder (see `queries`).
        query_columns: Columns of the log that are named differently, such as `{query: q, passage: page}`.
        columns: Columns of tables that are named differently, such as `{text: body}`.
        training: A config of training, alone if it chooses a method, else after `own_pairs.yaml`. Its learning rate is
            kept; the model's weights, data, outputs and number of steps are replaced. Default: `own_pairs.yaml` with a
            learning rate of 3e-5.
        general: Data of other domains, on which forgetting is measured (see `compare`); default a search of functions
            of installed packages, and `[]` for none.
        language: Language of the documents for BM25: any, one that PyStemmer stems, or none (words as they are).
        hold_out_judged: Whether documents with relevant passages of real queries are not trained on (see `queries`).
        training_share: Share of the judged real queries that are trained on; default 0.5 if 500 are judged, else 0 (see
            `queries`).
        minutes: Maximum time of training, without the other steps.
        seed: Seed of the random choices.
        dry_run: Whether to print the commands, and run nothing.
        endpoint: Base URL of a server with OpenAI's chat protocol, whose model writes queries for training (see
            `queries`). A second model is trained on them, and is used only if it is better on the validation part of
            `queries`; without these the language model is not asked.
        endpoint_model: The model's name at the endpoint; by default the only one that it lists.
        endpoint_form: `line` asks for queries only; `tasks`, for strong models, for kinds of search, their queries, and
            four negatives of each query, of levels 1 to 4, instead of mined ones (see `queries` and `synthesize`).
    """
    if not 0 < minutes < math.inf:
        raise OptionError("minutes", minutes, "must be > 0 and finite", "30 is the default")
    QuerySettings(training_share=training_share)
    if queries is None:
        unused = {"query_columns": query_columns, "training_share": training_share}
        refuse_given(unused | {"hold_out_judged": None if hold_out_judged else False}, "needs --queries")
    tokenizer(language)
    if endpoint is None:
        form = None if endpoint_form == "line" else endpoint_form
        refuse_given({"endpoint_model": endpoint_model, "endpoint_form": form}, "needs --endpoint")
    else:
        QueryModel(endpoint, endpoint_model)
        if endpoint_form == "tasks" and endpoint_model is None:
            raise OptionError("endpoint_form", endpoint_form, "needs --endpoint-model", "name the model")
        if queries is None:
            worth = "only judged queries (--queries) tell whether its queries are worth training on"
            print(f"the language model is not asked: {worth}")
            endpoint = endpoint_model = None
            endpoint_form = "line"
    config = CONFIG if training is None else Path(located(str(training.expanduser())))
    for name, path in (("documents", documents), ("--queries", queries), ("--training", config)):
        if path is not None and not path.expanduser().exists():
            raise InputError(str(path), "no such file or folder", f"check the path of {name}")
    require_modules(resolve_model(model))
    contents = [content for _, content in read_configs(str(config))]
    is_complete = any(chooses(content, "model") for content in contents)
    configs = [config] if is_complete else [CONFIG, config]
    negatives = ["--endpoint", endpoint, "--model", endpoint_model] if endpoint_form == "tasks" else None
    steps = Steps(output.expanduser(), model, language, seed, dry_run, negatives)
    given: dict[str, Any] = {"--queries": queries, "--hold-out-judged": None if hold_out_judged else "false"}
    given |= {"--training-share": training_share}
    given |= {"--query-columns": json.dumps(query_columns) if query_columns else None}
    given |= {"--endpoint": endpoint, "--endpoint-model": endpoint_model}
    given |= {"--endpoint-form": endpoint_form if endpoint_form != "line" else None}
    inputs = [word for option, value in given.items() if value is not None for word in (option, value)]
    renamed = ["--columns", json.dumps(columns)] if columns else []
    others = None if general is None else listed(general)
    if dry_run:
        steps.run(documents, renamed, inputs, configs, others, minutes)
        return
    fields: dict[str, Any] = {"kind": "adaptation", "model": model, "language": language, "seed": seed}
    fields |= {"documents": str(documents.expanduser().resolve()), "minutes": minutes}
    fields |= {"columns": columns}
    # Other queries hold out other documents. The address of an endpoint may contain a password.
    fields |= {"queries": None if queries is None else str(queries.expanduser().resolve())}
    fields |= {"queries_sha256": None if queries is None else content_of(queries.expanduser())}
    fields |= {"hold_out_judged": hold_out_judged, "training_share": training_share}
    fields |= {"endpoint": None if endpoint is None else text_hash(endpoint), "endpoint_form": endpoint_form}
    fields |= {"training": text_hash(json.dumps(contents, default=str))}
    if not steps.passages.exists():
        # An error in them is reported before the documents are read.
        if queries is not None:
            read_log(queries.expanduser(), query_columns)
        if endpoint is not None:
            QueryModel(endpoint, endpoint_model).found()
    # `queries.work` has a language model's answers.
    with discard_on_user_error(steps.output, unless=lambda: any(steps.output.glob("queries*"))):
        JobFolder(steps.output, fields)
        steps.run(documents, renamed, inputs, configs, others, minutes)
    write_manifest(steps.output, {**fields, "complete": True})


class Steps:
    """The commands of one adaptation, which share a folder.

    `negatives` are the words that name the language model which writes negatives for its queries, if one does.
    """

    def __init__(
        self, output: Path, model: str, language: str, seed: int, dry_run: bool, negatives: list[Any] | None
    ) -> None:
        self.output, self.model, self.language, self.seed, self.dry_run = output, model, language, seed, dry_run
        self.negatives = negatives
        self.passages, self.queries, self.adapted = output / "passages.jsonl", output / "queries", output / "adapted"
        # The vectors of the passages by each model, which the steps share.
        self.encoded = output / "encoded"
        self._count = 0

    def command(self, *words: Any, made: Path | None = None) -> None:
        """Print a command, and run it unless `made`, which it writes at its end, is there."""
        argv, self._count = [str(word) for word in words], self._count + 1
        print(f"\n[{self._count}] {program()} {shlex.join(argv)}", flush=True)
        if made is not None and made.exists():
            print(f"kept {made.parent if made.name == MANIFEST else made} of an earlier run")
        elif not self.dry_run:
            run_step(argv)

    def run(
        self,
        documents: Path,
        renamed: list[Any],
        inputs: list[Any],
        configs: list[Path],
        general: list[Path] | None,
        minutes: float,
    ) -> None:
        """All steps in order; without enough passages none is trained, and without a test nothing is compared."""
        cut = ["--output", self.passages, "--model", self.model, *renamed]
        # Documents that changed since would make other pairs than those that were trained on.
        self.command("passages", documents, *cut, made=self.passages)
        self.command("queries", self.passages, "--output", self.queries, "--seed", self.seed, *inputs)
        num_pairs = count_rows(self.queries / "pairs.jsonl")
        is_trained = self.dry_run or num_pairs >= BATCH_SIZE
        if not is_trained and num_pairs:
            print(f"\nnothing is trained: {num_pairs} pairs are fewer than a batch of {BATCH_SIZE}")
        if is_trained:
            suffixes = ["", "-model"] if "--endpoint" in inputs and self.is_model_tried() else [""]
            for suffix in suffixes:
                self.train(configs, minutes / len(suffixes), suffix)
            self.interpolate([self.output / f"trained{suffix}" for suffix in suffixes])
        trained = [self.adapted] if is_trained else []
        names = ("evaluation",) if self.dry_run else ("evaluation", "evaluation-pseudo")
        tests = [self.queries / name for name in names if self.dry_run or (self.queries / name).exists()]
        verdict = self.output / "verdict"
        if tests:
            options = ["--trained", self.adapted] if is_trained else []
            options += ["--run", run] if (run := self.logged_run()) is not None else []
            if general is None and is_trained:
                general = [self.output / "general"]
                self.command("prepare", "docstrings", "--output", general[0], "--test-only", "true")
            options += ["--general", _listed(general)] if general else []
            validation = self.queries / "validation"
            if count_rows(validation / "queries.jsonl") >= MIN_REAL_QUERIES:
                options += ["--validation", validation, "--hybrid-weight", "tune"]
            options += ["--language", self.language, "--vectors", self.encoded]
            self.command("compare", "--start", self.model, "--data", _listed(tests), "--output", verdict, *options)
            if is_trained and not self.dry_run:
                add_section(self.adapted, "Verdict", (verdict / CARD_SECTION).read_text("utf-8"))
        labels = None if self.dry_run else self.label(trained, verdict)
        chosen, is_hybrid, weight = recommended(verdict / "verdict.json")
        vectors = self.output / "vectors"
        if chosen == WHITENED:
            corpus = self.output / "start-vectors"
            self.encode(self.model, corpus)
            whitened = self.output / "whitened"
            self.command("whiten", "--model", self.model, "--vectors", corpus, "--output", whitened)
            served = str(whitened)
        else:
            served = str(self.adapted) if chosen == TRAINED else self.model
        self.encode(served, vectors)
        table, work = self.output / "passages.parquet", self.output / "passages.parquet.work"
        if not self.dry_run and vectors.exists() and not table.exists():
            link_vectors(vectors, work)
        self.command("encode", "--model", served, "--input", self.passages, "--output", table)
        if not self.dry_run:
            shutil.rmtree(work, ignore_errors=True)
        words = ["--hybrid", "--language", self.language, *([] if weight == WEIGHT else ["--hybrid-weight", weight])]
        self.command("index", "--vectors", vectors, *words, made=vectors / WORDS_FOLDER)
        if labels is not None:
            print(f"\n{labels}")
        if not self.dry_run:
            search = ["search", "--model", served, "--corpus", str(vectors), *(["--hybrid"] if is_hybrid else [])]
            print(f'\nsearch: {program()} {shlex.join(search)} "QUERY"')
            if tests:
                print(f"report: {verdict / 'report.html'}")

    def logged_run(self) -> Path | None:
        """The latest run of training that has logged something; None if two models were trained."""
        if (self.output / "trained-model").exists():
            return None
        logs = self.output / "run" / "logs"
        found = [path.parent for path in logs.glob(f"version_*/{METRICS_FILE}")]
        return max(found, key=lambda path: int(path.name.partition("_")[2]), default=None)

    def encode(self, model: str, vectors: Path) -> None:
        """Encode the passages; the vectors of an earlier step are taken."""
        if not self.dry_run and self.encoded.exists() and not vectors.exists():
            found = vector_folder(Encoder.from_pretrained(model), self.passages, self.encoded)
            if found.exists():
                link_vectors(found, vectors)
        self.command("encode", "--model", model, "--input", self.passages, "--output", vectors)

    def is_model_tried(self) -> bool:
        """Whether to train on a language model's queries: validation queries must tell what they are worth."""
        num_pairs = count_rows(self.queries / MODEL_PAIRS)
        is_judged = (self.queries / "validation").exists()
        if self.dry_run or (is_judged and num_pairs >= MIN_PASSAGES):
            return True
        why = f"{num_pairs} are too few" if is_judged else "no judged queries tell what they are worth"
        print(f"\nthe language model's queries are not trained on: {why}")
        return False

    def train(self, configs: list[Path], minutes: float, suffix: str) -> None:
        """Mine negatives, or have them written for a language model's queries, and train, on the pairs of a suffix."""
        pairs, written = self.queries / f"pairs{suffix}.jsonl", self.output / f"train{suffix}.yaml"
        trained = self.output / f"trained{suffix}"
        if suffix and self.negatives is not None:
            folder, num_negatives = self.output / f"negatives{suffix}", NUM_LEVELS
            records, choice = folder / "records.jsonl", [*self.negatives, "--seed", self.seed]
            self.command("synthesize", "--regenerate-negatives", pairs, "--output", folder, *choice)
        else:
            records, num_negatives = self.output / f"mined{suffix}.parquet", NUM_NEGATIVES
            choice = ["--num-negatives", num_negatives, "--seed", self.seed]
            self.command("mine", "--model", self.model, "--input", pairs, "--output", records, *choice)
        if not self.dry_run:
            own = self.config(records, trained, pairs, minutes, num_negatives)
            if configs == [CONFIG]:
                own["model"]["init_args"]["optimizer"] = {"init_args": {"lr": LEARNING_RATE}}
            write_text(written, yaml.safe_dump(own, sort_keys=False, allow_unicode=True))
        layers = [word for config in (*configs, written) for word in ("--config", config)]
        self.command("fit", *layers, "--ckpt_path", "auto", made=trained / MANIFEST)

    def interpolate(self, trained: list[Path]) -> None:
        """Write the model between the start and the trained weights: half-way, or where enough queries choose."""
        validation = self.queries / "validation"
        # By a few queries the shares differ by chance; of several models one must be chosen.
        chooses = count_rows(validation / "queries.jsonl") >= MIN_REAL_QUERIES or len(trained) > 1
        judged = ["--data", validation, "--vectors", self.encoded] if chooses else []
        models = ["--start", self.model, "--trained", _listed(trained)]
        self.command("interpolate", *models, *judged, "--output", self.adapted, made=self.adapted / MANIFEST)

    def config(self, records: Path, trained: Path, pairs: Path, minutes: float, num_negatives: int) -> dict[str, Any]:
        """What is added to the configs of training: this model, these records, outputs and number of steps."""
        with open(pairs, encoding="utf-8") as file:
            kinds = [json.loads(line)["kind"] for line in file]
        epochs = REAL_EPOCHS if set(kinds) == {REAL} else EPOCHS
        folder = str(self.output / trained.name.replace("trained", "run"))
        max_steps = MAX_GPU_STEPS if torch.cuda.is_available() else MAX_STEPS
        embedder = Embedder.from_pretrained(self.model)
        pooling = component(f"embeddings.models.{type(embedder.pooling).__name__}", **embedder.pooling.arguments())
        model = {"initial_model": self.model, "pooling": pooling, "normalize": embedder.normalize}
        model["schedule"] = {"within_max_time": True}
        # Prompts and lengths are the starting model's.
        data = {"text": None, "batch_size": BATCH_SIZE, "num_negatives": num_negatives}
        return {
            "seed_everything": self.seed,
            "trainer": {
                "max_epochs": epochs,
                "max_steps": max(1, min(max_steps, epochs * (len(kinds) // BATCH_SIZE))),
                "max_time": {"seconds": int(60 * minutes)},
                "default_root_dir": folder,
                "logger": component("lightning.pytorch.loggers.CSVLogger", save_dir=folder, name="logs"),
                # It replaces that of the configs.
                "callbacks+": [component("embeddings.callbacks.ExportModel", output=str(trained), replace=True)],
            },
            "model": {"init_args": model},
            "data": {"init_args": {**data, "sources": [{"name": "documents", "path": str(records)}]}},
        }

    def label(self, trained: list[Path], verdict: Path) -> str | None:
        """Write what to judge, where the variants disagree, if there are too few judged queries; returns a line."""
        path, found = label_path(self.output), verdict / "verdict.json"
        decision = json.loads(found.read_text("utf-8"))["recommendation"] if found.exists() else {}
        if decision.get("num_real_queries", 0) >= MIN_REAL_QUERIES:
            return None
        sources = (self.queries / "unjudged.jsonl", self.queries / "evaluation-pseudo" / "queries.jsonl")
        source = next((each for each in sources if each.exists()), None)
        if source is None:
            return None
        with open(source, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file][:MAX_LABELLED_QUERIES]
        texts = {row["_id"]: row["text"] for row in rows}
        models = [str(each) for each in trained]
        rankings = rank_queries(self.model, models, self.passages, texts, self.encoded, language=self.language)
        items = deciding_items(rankings, MAX_LABELS)
        if not items:
            return None
        num_items = write_label_file(path, list(texts.values()), self.passages, items)
        how = "set relevant to true or false, and give it as --queries with a new --output"
        return f"{path}: {num_items} passages to judge; {how}"


def link_vectors(source: Path, target: Path) -> None:
    """Another folder of the same vectors, without an index of words."""
    with atomic_folder(target) as new:
        ignored = shutil.ignore_patterns(WORDS_FOLDER)
        shutil.copytree(source, new, ignore=ignored, copy_function=link_or_copy, dirs_exist_ok=True)


def label_path(folder: Path) -> Path:
    """The file of labels to write: the first of `label_me.jsonl`, `label_me-2.jsonl`, ... without a judgement."""
    for number in count(1):
        path = folder / f"label_me{'' if number == 1 else f'-{number}'}.jsonl"
        try:
            rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
            is_judged = any(row["relevant"] is not None for row in rows)
        except FileNotFoundError:
            return path
        except (ValueError, KeyError, TypeError):
            # Someone's edit, which is kept too.
            is_judged = True
        if not is_judged:
            return path
    raise AssertionError


def _listed(paths: list[Path]) -> str:
    return json.dumps([str(path) for path in paths]) if len(paths) > 1 else str(paths[0])


def run_step(argv: list[str]) -> None:
    from embeddings.cli.main import dispatch

    dispatch(argv)


def count_rows(path: Path) -> int:
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def recommended(verdict: Path) -> tuple[str, bool, float]:
    """The recommended variant without BM25, whether BM25 is recommended with it, and the weight of BM25."""
    if not verdict.exists():
        return START, True, WEIGHT
    content = json.loads(verdict.read_text("utf-8"))
    variant = content["recommendation"]["variant"]
    name = variant.removesuffix(f" + {HYBRID}")
    model = START if name in (HYBRID, WHITENED) else name
    weight = content.get("fusion", {}).get(model, {}).get("weight", WEIGHT)
    return (START, True, weight) if name == HYBRID else (name, name != variant, weight)
