"""Texts with nothing in them, or too much before them."""

from typing import Any

from tests.reliability.cases import (
    ENCODE,
    EVALUATE,
    FILTER,
    FIT,
    GOOD,
    SEARCH,
    Make,
    both,
    cases,
    copied,
    pairs,
    put,
    rows,
    run,
)

GIVE = "give it a text, or leave the row out"


def data(**options: Any) -> Make:
    """A run with these options of its data."""
    return run(lambda config: config["data"]["init_args"].update(options))


def source(**options: Any) -> Make:
    """A run whose source has these options."""
    return run(lambda config: config["data"]["init_args"]["sources"][0].update(options))


def conversion(name: str, *values: object, **options: Any) -> Make:
    """A run over these rows by a conversion."""
    return both(rows("pairs.jsonl", *values), source(conversion=name, **options))


def language_model(*values: object) -> Make:
    """A run of a language model over these rows."""

    def change(config: dict[str, Any]) -> None:
        arguments = config["model"]["init_args"]
        masking = {"probability": 0.5, "mask_fraction": 1.0, "random_fraction": 0.0}
        config["model"] = {
            "class_path": "embeddings.modules.MaskedLMModule",
            "init_args": {
                "objective": "mlm",
                "masking": masking,
                "backbone": arguments["backbone"],
                "head": {"new": True},
                "optimizer": arguments["optimizer"],
                "schedule": arguments["schedule"],
            },
        }
        sources = config["data"]["init_args"]["sources"]
        config["data"] = {
            "class_path": "embeddings.data.TextDataModule",
            "init_args": {"row_length": 24, "batch_size": 2, "cache_dir": "cache", "sources": sources},
        }

    return both(rows("pairs.jsonl", *values), run(change))


SHOW = ("show", "anchor-tokens", "--model", "MODEL")
CASES = cases(
    {
        FILTER: {
            "an empty query": (pairs(query=""), f"pairs.jsonl:2: query is an empty text; {GIVE}"),
            "an empty positive": (pairs(positive=""), f"pairs.jsonl:2: positive is an empty text; {GIVE}"),
            "an empty negative with a level": (
                pairs(negatives=[{"text": "", "level": 1}]),
                "pairs.jsonl:2: negatives[0].text is an empty text",
            ),
            "null for a query": (pairs(query=None), f"pairs.jsonl:2: query is null, expected text; {GIVE}"),
        },
        FIT: {
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
            "texts of three tokens": (data(text={"query_max_length": 3}), "data.text.query_max_length must be >= 4"),
            "texts longer than the model reads": (
                data(text={"query_max_length": 16, "document_max_length": 4096}),
                "data.text.document_max_length must be <= 128",
            ),
            "an empty label": (
                conversion("class_by_label", {"text": "a", "label": " "}),
                "pairs.jsonl:1: label is white space",
            ),
            "a language model without any text": (language_model({"text": ""}, {"text": " "}), "pairs"),
        },
        ENCODE: {
            "null for a document": (
                rows("corpus.jsonl", {"text": "a"}, {"text": None}),
                "corpus.jsonl:2: field 'text' is null, expected text",
            ),
        },
        EVALUATE: {
            "an empty query of an evaluation": (
                copied("eval", lambda d: (d / "queries.jsonl").write_text('{"_id": "q0", "text": " "}\n')),
                "eval/queries.jsonl:1: field 'text' is empty",
            ),
        },
        (
            *SEARCH.split()[:-1],
            " ",
        ): {
            "nothing to search for": (rows("corpus.jsonl", {"text": "a"}), "query must not be empty"),
        },
        (
            *SHOW,
            "fox",
            "",
        ): {
            "nothing to show": (put("a", ""), "TEXT must not be empty"),
        },
        (
            *SHOW,
            "\u200b\u200b",
        ): {
            "a text without a token of its own": (put("a", ""), "TEXT must hold a token of its own"),
        },
        "show routing --model SPARSE --input texts.jsonl": {
            "a file without a text to route": (
                rows("texts.jsonl", {"text": " "}),
                "--input texts.jsonl: holds no text",
            ),
        },
    }
)
