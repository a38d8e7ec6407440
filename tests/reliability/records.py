"""Training records, corpora, evaluation data and their configs: invalid bytes, rows, texts and contradictions."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.runs import component
from tests.reliability.cases import (
    CLUSTER,
    ENCODE,
    EVALUATE,
    FILTER,
    FIT,
    GOOD,
    MINE,
    SEARCH,
    Make,
    at,
    both,
    bytes_of,
    content,
    copied,
    judged,
    pairs,
    put,
    rows,
    run,
    source,
    unchanged,
    without,
)
from tests.reliability.world import Place

SHOW = "show anchor-tokens --model MODEL"
LINE = json.dumps(GOOD).encode() + b"\n"
NOT_UTF8 = "is not valid UTF-8; save the file as UTF-8"
HALF = "holds half of a character"
GIVE = "give it a text, or leave the row out"
REFUSE = "--suspect-rows refuse"
SUSPECT = "correct them, or set suspect_rows: leave_out (or keep)"
CLUSTERS = component("embeddings.data.ClusteredBatchSampler", clusters={"pairs": "clusters"})
LABELLED = ({"text": "a", "label": "one"}, {"text": "b", "label": "two"})
EVALUATION = copied("eval")


def long_line(place: Place) -> None:
    """A corpus whose second row is one text of 100 MB."""
    place.write("corpus.jsonl", b'{"text": "short"}\n{"text": "' + b"x" * 100_000_000 + b'"}\n')


def config(change: bytes) -> Make:
    """A config with these bytes at its start."""
    return lambda place: place.write("config.yaml", change + place.config().read_bytes())


def zipped() -> bytes:
    """Many records, compressed."""
    return gzip.compress(b"".join(b'{"query": "q %d", "positive": "p %d"}\n' % (row, row) for row in range(3000)))


def parquet(columns: dict[str, object], change: Callable[[bytes], bytes] = bytes, **options: Any) -> Make:
    """A Parquet file with the name of a JSON Lines file and changed bytes."""

    def make(place: Place) -> None:
        path = place.folder / "pairs.jsonl"
        pq.write_table(pa.table(columns, **options), path)
        path.write_bytes(change(path.read_bytes()))

    return make


def conversion(name: str, *values: object) -> Make:
    """A run over these rows with a conversion."""
    return both(rows("pairs.jsonl", *values), source(conversion=name))


def language_model(*values: object) -> Make:
    """A run of a language model over these rows."""

    def change(config: dict[str, Any]) -> None:
        kept = {name: config["model"]["init_args"][name] for name in ("backbone", "optimizer", "schedule")}
        kept["masking"] = {"probability": 0.5, "mask_fraction": 1.0, "random_fraction": 0.0}
        config["model"] = component("embeddings.modules.MaskedLMModule", objective="mlm", head={"new": True}, **kept)
        options = {"cache_dir": "cache", "sources": config["data"]["init_args"]["sources"]}
        config["data"] = component("embeddings.data.TextDataModule", row_length=24, batch_size=2, **options)

    return both(rows("pairs.jsonl", *values), run(change))


def several(count: int, **fields: object) -> Make:
    """Records with different texts."""
    return rows("pairs.jsonl", *({"query": f"q {row}", "positive": f"p {row}", **fields} for row in range(count)))


def curriculum(config: dict[str, Any]) -> None:
    """Train on the levels of negatives."""
    sampler = {"class_path": "embeddings.data.CurriculumBatchSampler"}
    config["data"]["init_args"] |= {"batch_size": 2, "sampler": sampler}
    config["trainer"]["max_steps"] = 4


def clustered_on(damage: Callable[[Path], object]) -> Make:
    """A run on a damaged copy of the clusters of the world's pairs."""
    return both(copied("clusters", damage), at("data.init_args", sampler=CLUSTERS))


def other_vectors(place: Place) -> None:
    """A run with vectors of other records."""
    vectors = place.world.path("clusters").with_name("clusters.vectors")
    both(several(12), source(surrogate_vectors=str(vectors)))(place)


def tested(*values: object) -> Make:
    """An evaluation folder with these test rows."""
    return rows("eval/test.jsonl", *values)


CASES = {
    FILTER: {
        "Latin-1 in a record": (
            put("pairs.jsonl", LINE + b'{"query": "na\xefve"}\n'),
            f"pairs.jsonl:2: byte 14 of the row {NOT_UTF8}",
        ),
        "UTF-16 without a mark": (
            put("pairs.jsonl", LINE.decode().encode("utf-16-le")),
            "pairs.jsonl:1: the row contains a NUL byte",
        ),
        "an escaped NUL in a record": (pairs(positive="a\0b"), "pairs.jsonl:2: positive contains a NUL character"),
        "half of a character in a list": (
            rows("pairs.jsonl", {**GOOD, "positive": ["a", "\udc00"]}),
            "pairs.jsonl:1: positive[1] contains half of a character",
        ),
        "half of a character in a column's name": (
            rows("pairs.jsonl", {"\ud83d": 1}),
            "pairs.jsonl:1: field 'query': no column 'query' among \\ud83d",
        ),
        "a last row that is cut off": (
            put("pairs.jsonl", LINE + LINE[:20]),
            "pairs.jsonl:2: the file ends in the middle of this row",
        ),
        "comma-separated values": (
            put("pairs.jsonl", b"query,positive\na,b\n"),
            "pairs.jsonl:1: the file is a CSV table, but its name does not end in .csv or .tsv",
        ),
        "an empty file": (put("pairs.jsonl", b""), "pairs.jsonl: is empty"),
        "a column that is not there": (
            rows("pairs.jsonl", GOOD, {"query": "a", "reply": "b"}),
            "pairs.jsonl:2: field 'positive': no column 'positive' among query, reply; map it with columns",
        ),
        "an object for a text": (
            pairs(positive={"text": "b"}),
            "pairs.jsonl:2: positive is an object, expected text or a list; write it as a list of texts",
        ),
        "a score that is NaN": (pairs(score=float("nan")), "pairs.jsonl:2: score is nan, expected a finite number"),
        "gzip that is cut off": (
            put("pairs.jsonl", zipped()[:-4000]),
            ": the gzip data is truncated or damaged here; download or compress the file again",
        ),
        "Parquet that is cut off": (
            parquet({"query": ["a"] * 99, "positive": ["b"] * 99}, lambda data: data[:-30]),
            "pairs.jsonl:1: the Parquet data is truncated or damaged",
        ),
        "a page of Parquet that is damaged": (
            parquet(
                {"query": ["a text"] * 2000, "positive": list(map(str, range(2000)))},
                lambda data: data[:4] + bytes(596) + data[600:],
            ),
            "the Parquet data is truncated or damaged",
        ),
        "Parquet with numbers for texts": (
            parquet({"query": [1, 2], "positive": ["b", "c"]}),
            "pairs.jsonl:1: query is a number, expected text",
        ),
        "an empty positive": (pairs(positive=""), f"pairs.jsonl:2: positive is an empty text; {GIVE}"),
        "an empty negative with a level": (
            pairs(negatives=[{"text": "", "level": 1}]),
            "pairs.jsonl:2: negatives[0].text is an empty text",
        ),
        "null for a query": (pairs(query=None), f"pairs.jsonl:2: query is null, expected text; {GIVE}"),
        "a record without positives": (pairs(positive=[]), "pairs.jsonl:2: positive is an empty list"),
        "a level of 5": (
            pairs(negatives=[{"text": "the fox", "level": 5}]),
            "pairs.jsonl:2: negatives[0].level is 5, expected an integer from 1",
        ),
    },
    ENCODE: {
        "half of a character in a corpus": (
            rows("corpus.jsonl", {"text": "\udead"}),
            "corpus.jsonl:1: field 'text' contains a lone surrogate",
        ),
        "a row of 100 MB": (long_line, "corpus.jsonl:2: the row is longer than 32 MiB"),
        "null for a document": (
            rows("corpus.jsonl", {"text": "a"}, {"text": None}),
            "corpus.jsonl:2: field 'text' is null, expected text",
        ),
        "an id twice in a corpus": (
            rows("corpus.jsonl", {"_id": "a", "text": "b"}, {"_id": "a", "text": "c"}),
            "corpus.jsonl:2: the id 'a' occurs a second time",
        ),
        "an id that is null": (rows("corpus.jsonl", {"_id": None, "text": "a"}), "corpus.jsonl:1: field '_id' is null"),
    },
    EVALUATE: {
        "Latin-1 in judgments": (
            copied("eval", bytes_of("qrels.tsv", lambda data: data[:-1] + b"\xe9\n")),
            f"qrels.tsv:9: {NOT_UTF8}",
        ),
        "judgments that are cut off": (
            copied("eval", bytes_of("qrels.tsv", lambda data: data[:-3])),
            "eval/qrels.tsv:9: has 2 columns",
        ),
        "an empty query of an evaluation": (
            copied("eval", content("queries.jsonl", '{"_id": "q0", "text": " "}\n')),
            "eval/queries.jsonl:1: field 'text' is empty",
        ),
        "a judgment of a very long id": (
            judged(f"q0\t{'d' * 5000}\t1"),
            "eval/qrels.tsv:2: no document has the id 'ddd",
        ),
        "no judgments": (copied("eval", without("qrels.tsv")), "eval: qrels.tsv is missing"),
        "a corpus twice": (
            both(EVALUATION, put("eval/corpus.jsonl.gz", b"")),
            "eval: corpus.jsonl and corpus.jsonl.gz are both there",
        ),
        "one class to train a classifier on": (
            both(tested(*LABELLED), rows("eval/train.jsonl", LABELLED[0])),
            "eval/train.jsonl: every label is 'one'",
        ),
        "a folder without data": (lambda place: (place.folder / "eval").mkdir(), "eval: has no evaluation data"),
    },
    SEARCH.replace("fox", "'fox \udc80'"): {
        "half of a character to search for": (
            rows("corpus.jsonl", {"text": "a"}),
            "'fox \\udc80' on the command line is not valid UTF-8; write it as UTF-8",
        )
    },
    FIT: {
        "half of a character in an instruction": (
            source(instruction="find \ud83d"),
            "--config config.yaml: not a YAML file: an unpaired surrogate, line 8",
        ),
        "a Latin-1 config": (config(b"# caf\xe9\n"), "--config config.yaml: not a YAML file"),
        "a config with a control character": (config(b"# \x07\n"), "--config config.yaml: not a YAML file"),
        "an empty instruction of a source": (
            source(instruction=["find", " "]),
            "data.sources[pairs].instruction must not be empty",
        ),
        "a prompt as long as the texts": (
            source(instruction="pad sequences " * 20),
            "data.text.query_max_length must exceed the",
        ),
        "an instruction in a row as long as the texts": (
            both(rows("pairs.jsonl", *[GOOD] * 8, {**GOOD, "instruction": "pad sequences " * 20}), run()),
            "pairs.jsonl:9: the instruction leaves no room for the query in 16 tokens",
        ),
        "texts of three tokens": (
            at("data.init_args", text={"query_max_length": 3}),
            "data.text.query_max_length must be >= 4",
        ),
        "texts longer than the model reads": (
            at("data.init_args", text={"query_max_length": 16, "document_max_length": 4096}),
            "data.text.document_max_length must be <= 128",
        ),
        "an empty label": (
            conversion("class_by_label", {"text": "a", "label": " "}),
            "pairs.jsonl:1: label is white space",
        ),
        "a language model without any text": (language_model({"text": ""}, {"text": " "}), "pairs"),
        "a curriculum without levels": (
            both(several(8, negatives=["a", "b"]), run(curriculum)),
            "data.sampler needs negatives with levels",
        ),
        "a class with one example": (
            conversion("class_by_example", *LABELLED, LABELLED[1]),
            "pairs.jsonl:1: the class 'one' has only one text",
        ),
        "labels that are numbers without a text": (
            conversion("class_by_label", {"text": "a", "label": 1}, {"text": "b", "label": 2}),
            "label",
        ),
        "clusters that are not there": (
            at("data.init_args", sampler=CLUSTERS),
            "clusters/manifest.json: this output has no manifest",
        ),
        "clusters of another source": (both(several(12), clustered_on(unchanged)), "clusters"),
        "vectors of another source": (other_vectors, "clusters.vectors"),
    },
    "show curves --run run": {
        "Latin-1 in a run's metrics": (
            put("run/metrics.csv", b"step,train/loss\n0,caf\xe9\n"),
            "run/metrics.csv: is damaged",
        )
    },
    MINE: {
        "one JSON array of all rows": (
            put("pairs.jsonl", b"[" + LINE.strip() + b",\n" + LINE + b"]\n"),
            "pairs.jsonl:1: a JSON array starts here, expected JSON lines",
        ),
        "fewer documents than negatives": (pairs(positive="another"), "2 distinct documents, too few for 2 negatives"),
    },
    FILTER + " --columns '{positive: answer}'": {
        "a column mapped to one that is not there": (
            pairs(),
            "pairs.jsonl:1: field 'positive': no column 'answer' among query, positive",
        )
    },
    FILTER.replace(".jsonl", ".parquet"): {
        "JSON lines called Parquet": (put("pairs.parquet", LINE), "pairs.parquet: is not a Parquet file")
    },
    SEARCH.replace("fox", "' '"): {
        "nothing to search for": (rows("corpus.jsonl", {"text": "a"}), "query must not be empty")
    },
    SHOW + " fox ''": {"nothing to show": (put("a", ""), "TEXT must not be empty")},
    SHOW + " \u200b\u200b": {
        "a text without a token of its own": (put("a", ""), "TEXT must have a token that is not special")
    },
    "show routing --model SPARSE --input texts.jsonl": {
        "a file without a text to route": (rows("texts.jsonl", {"text": " "}), "--input texts.jsonl: contains no text")
    },
    f"{FILTER} {REFUSE}": {
        "a positive that is the query": (
            pairs(positive="pad sequences"),
            f"1 suspect row: pairs.jsonl:2 (a positive is the query itself); {SUSPECT}",
        )
    },
    f"{CLUSTER} {REFUSE}": {
        "a negative that is the positive but for spaces": (
            pairs(negatives=[" the pad\n"]),
            f"pairs.jsonl:2 (a negative is also a positive); {SUSPECT}",
        )
    },
    CLUSTER.replace("clusters 2", "clusters 3"): {
        "more clusters than records": (pairs(), "num_clusters must not exceed the 2 rows, got 3")
    },
    MINE.replace("--num-negatives 2", "--levels grades --judgments eval/qrels.tsv"): {
        "judgments of other queries than the records'": (
            both(pairs(), judged("q0\td0\t1", "q0\td1\t2")),
            "eval/qrels.tsv: has no judgment of a document for a query of the source",
        )
    },
    EVALUATE.replace(" eval ", " [] "): {"no folder": (put("a", ""), "--data: has no folder")},
    EVALUATE + " --prompt-name passage": {
        "a prompt that the model has not": (
            EVALUATION,
            "prompt_name must name a prompt of the model (query), got 'passage'",
        )
    },
    EVALUATE + " --dimensions 33": {
        "more dimensions than vectors have": (
            EVALUATION,
            "dimensions must be from 1 to 32, the width of the model's vectors, got 33",
        )
    },
    EVALUATE + " --context-size 2": {
        "a context for a model that takes none": (EVALUATION, "context must be left out: the model is not contextual")
    },
    FILTER + " --decontaminate gone": {
        "evaluation texts to leave out that are not there": (
            rows("pairs.jsonl", {"query": "a", "positive": "b"}),
            "gone: has no evaluation data",
        )
    },
}

ROW = b'{"query": "pad", "positive": "the pad"}\n'
OTHER = b'{"query": "fox", "positive": "the fox"}\n'
TWO = "records              2"
# Unusual inputs that are accepted, with expected output instead of an error.
ACCEPTED = {
    FILTER: {
        "a byte-order mark": (put("pairs.jsonl", b"\xef\xbb\xbf" + ROW + OTHER), TWO, 0),
        "lines that end as on Windows": (put("pairs.jsonl", (ROW + OTHER).replace(b"\n", b"\r\n")), TWO, 0),
        "blank lines between rows": (put("pairs.jsonl", b"\n" + ROW + b" \n" + OTHER + b"\n\n"), TWO, 0),
        "no line end after the last row": (put("pairs.jsonl", ROW + OTHER.strip()), TWO, 0),
        "two gzip files, one after the other": (put("pairs.jsonl", gzip.compress(ROW) * 2), TWO, 0),
        "Parquet under a plain name": (parquet({"query": ["a", "b"], "positive": ["c", "d"]}), TWO, 0),
        "columns of no use": (rows("pairs.jsonl", {"query": "a", "positive": "b", "x": [None, {}]}), "wrote 1", 0),
    },
    ENCODE: {
        "an empty text in a corpus": (rows("corpus.jsonl", {"text": ""}, {"text": "a"}), "wrote 2 vectors", 0),
        "a NUL character in a corpus": (rows("corpus.jsonl", {"text": "a\0b"}), "wrote 1 vectors", 0),
    },
    FILTER + " --suspect-rows leave_out": {
        "records that contradict themselves, by choice": (
            put("pairs.jsonl", ROW + b'{"query": "a", "positive": "a"}\n'),
            "wrote 1 records",
            0,
        )
    },
    CLUSTER: {
        "records that are all alike": (rows("pairs.jsonl", *[{"query": "a", "positive": "b"}] * 3), "wrote 2", 0)
    },
    EVALUATE: {
        "queries that nobody judged": (copied("eval", content("qrels.tsv", "q0 0 d0 1\nq0 0 d0 1\n")), "ndcg_at_10", 0)
    },
}
