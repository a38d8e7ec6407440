"""`compare`, `interpolate` and `whiten`: what was made of a model, the verdict on it, and how it is written."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from embeddings.adaptation.rankings import RetrievalSet, path_scores
from embeddings.adaptation.report import write_verdict_page
from embeddings.adaptation.verdict import compare as compare_models
from embeddings.adaptation.verdict import format_verdict
from embeddings.adaptation.weights import (
    DEFAULT_SHARE,
    SHARES,
    WeightPath,
    best_share,
    interpolate_models,
    write_whitened,
)
from embeddings.cli.parser import listed
from embeddings.cli.retrieval import TUNE
from embeddings.common import InputError, OptionError
from embeddings.common.errors import refuse_given
from embeddings.common.io import scratch_folder, write_json, write_json_lines, write_manifest, write_text
from embeddings.common.jobs import JobFolder, discard_on_user_error
from embeddings.common.own_folder import require_replaceable
from embeddings.common.process import tune_malloc
from embeddings.common.text import format_table
from embeddings.figures.run_facts import LOSS, read_curves
from embeddings.inference import Precision
from embeddings.inference.bm25 import ANY_LANGUAGE
from embeddings.models.model_card import shown_name

VERDICT = {"kind": "verdict"}
# The places of a path are compared on at most so many documents: each place encodes them anew.
MAX_DOCUMENTS = 50_000
# The verdict for the card of a model.
CARD_SECTION = "verdict.md"


def compare(
    start: str,
    data: Path | list[Path],
    output: Path,
    trained: str | list[str] | None = None,
    general: Path | list[Path] | None = None,
    language: str = ANY_LANGUAGE,
    hybrid_weight: float | Literal["tune"] | None = None,
    validation: Path | None = None,
    run: Path | None = None,
    vectors: Path | None = None,
    precision: Precision = "auto",
    context_size: int | None = None,
) -> None:
    """Score a model, what was trained from it, BM25, hybrid search and whitening on test queries, and recommend one.

    It recommends the simplest variant that is not significantly worse than the best one. Only queries that people wrote
    decide: rows of `queries.jsonl` without a `kind`, or of the kind `real`. With fewer than 50 of them no trained model
    is recommended. To resume, run the same command again: finished vectors are kept.

    Args:
        start: The starting model, a directory or Hub id.
        data: A retrieval folder with test queries, or a folder of them; several as `[FOLDER, FOLDER]`.
        output: The folder to write: `verdict.json`, `verdict.md` for a card, `queries.jsonl` with the scores of each
            query, `report.html`, and the documents' vectors, which a later comparison in this folder reads.
        trained: A model that was trained from it; several as `[MODEL, MODEL]`, the simplest first.
        general: Data of other domains, on which forgetting is measured: folders of retrieval data, or of sentence pairs
            with scores; several as `[FOLDER, FOLDER]`.
        language: Language of the texts for BM25: any, one that PyStemmer stems, or none (words as they are).
        hybrid_weight: Weight of BM25 in hybrid search, from 0 to 1; default 0.2. `tune` chooses it for each model on
            the queries of `validation`.
        validation: A retrieval folder with other queries than those of the test, for `tune`.
        run: The run that trained the model, such as `checkpoints/runs/NAME/version_0`, whose loss the report draws.
        vectors: The folder that keeps the vectors of the documents; default `vectors` in the output.
        precision: Format of matrix products.
        context_size: Number of documents that a contextual model draws as context from each corpus.
    """
    roots, others, models = listed(data), listed(general), listed(trained)
    if not roots:
        raise InputError("--data", "has no folder", "give one, or several as [FOLDER, FOLDER]")
    if (hybrid_weight == TUNE) != (validation is not None):
        raise OptionError(
            "hybrid_weight", hybrid_weight, "must be tune exactly with --validation", "give both, or none"
        )
    losses = ([], []) if run is None else read_curves(run)[LOSS]
    tune_malloc()
    with discard_on_user_error(output, unless=lambda: (output / "vectors").exists()):
        folder = JobFolder(output, VERDICT).folder
        options: dict[str, Any] = {"general": others, "language": language, "precision": precision}
        options |= {"weight": None if hybrid_weight == TUNE else hybrid_weight, "validation": validation}
        kept = folder / "vectors" if vectors is None else vectors.expanduser()
        verdict = compare_models(start, models, roots, kept, context_size=context_size, **options)
    write_json(folder / "verdict.json", verdict.to_dict())
    write_json_lines(folder / "queries.jsonl", verdict.query_rows())
    write_text(folder / CARD_SECTION, f"```text\n{format_verdict(verdict)}\n```\n")
    write_verdict_page(verdict, folder / "report.html", losses)
    write_manifest(folder, {**VERDICT, "complete": True})
    print(format_verdict(verdict))
    print(f"\nwrote {folder / 'report.html'}, verdict.json and queries.jsonl")


def interpolate(
    start: str,
    trained: str | list[str],
    output: Path,
    share: float | None = None,
    data: Path | None = None,
    vectors: Path | None = None,
    precision: Precision = "auto",
) -> None:
    """Write a model between a starting model and what was trained from it: (1 - share) start + share trained.

    With `data`, the shares 0, 0.25, 0.5, 0.75 and 1 are scored on its queries, and the model with the highest nDCG@10
    is written, of equal ones the nearest to the start. Of several trained models the best is chosen too, of equal ones
    the first. Of a corpus above 50,000 documents, the judged ones and others at random are searched. Choose on other
    queries than you test on.

    Args:
        start: The model that training started from, a directory or Hub id.
        trained: The directory of the trained model; several, which need `data`, as `[MODEL, MODEL]`.
        output: The directory to write; an existing one is replaced once the new one is complete.
        share: The share of the trained weights, from 0 to 1; default 0.5, or the best on `data`.
        data: A retrieval folder with validation queries.
        vectors: A folder that keeps the documents' vectors by the start and the written model, for `compare --vectors`.
        precision: Format of matrix products on `data`.
    """
    require_replaceable(output)
    models = list(dict.fromkeys(listed(trained)))
    if not models:
        raise InputError("--trained", "has no model", "give one, or several as [MODEL, MODEL]")
    if share is not None and data is not None:
        raise OptionError("share", share, "excludes --data, which chooses it", "leave one of them out")
    if data is None and len(models) > 1:
        raise OptionError("trained", models, "needs --data, which chooses one of them", "give one model")
    chosen, place, facts = models[0], DEFAULT_SHARE if share is None else share, dict[str, object]()
    if data is None:
        refuse_given({"vectors": vectors, "precision": None if precision == "auto" else precision}, "needs --data")
    else:
        test = RetrievalSet.read(data.resolve().name, data)
        for each in models[1:]:
            # Refuses it before any is scored.
            WeightPath(start, each)
        tune_malloc()
        scores: dict[str, dict[float, float]] = {}
        with scratch_folder(output.expanduser()) if vectors is None else nullcontext(vectors.expanduser()) as kept:
            sample = test.sampled(MAX_DOCUMENTS, kept / "sample.jsonl")
            for each in models:
                # The start, which all paths share, is scored once.
                shares = SHARES[1:] if scores else SHARES
                scores[each] = path_scores(WeightPath(start, each), sample, kept, shares, precision)
        chosen = max(scores, key=lambda each: max(scores[each].values()))
        place = best_share(scores[chosen])
        rows = [
            (each, f"{at:g}", f"{score:.4f}", "chosen" if (each, at) == (chosen, place) else "")
            for each, found in scores.items()
            for at, score in found.items()
        ]
        first = 0 if len(models) > 1 else 1
        all_documents, documents = (len(each.folder.documents) for each in (test, sample))
        over = f" over {documents:,} of {all_documents:,} documents" if sample is not test else ""
        print(f"nDCG@10 on {len(test.folder.queries)} validation queries{over}")
        print(format_table([("trained", "share", "nDCG@10", "")[first:], *(row[first:] for row in rows)], "<"))
        for each, found in scores.items():
            scored = ", ".join(f"{score:.4f} at {at:g}" for at, score in found.items())
            name = "chosen by" if each == chosen else f"not chosen: {shown_name(each)}"
            facts[name] = f"nDCG@10 on {len(test.folder.queries)} validation queries{over}: {scored}"
    interpolate_models(start, chosen, output, place, facts)
    print(f"wrote {output}: {place:g} of the way from {start} to {chosen}")


def whiten(model: str, vectors: Path, output: Path) -> None:
    """Write a model whose vectors are partially whitened for a corpus, by one more linear layer.

    Vectors are multiplied by (S + 0.1 m I)^(-1/4) and normalised, with S the covariance of the corpus' vectors and m
    the mean of its eigenvalues. This helps on some corpora and hurts on others: `compare` measures it.

    Args:
        model: A model directory or Hub id.
        vectors: The corpus, at least 512 documents, as `encode` wrote it with this model.
        output: The directory to write; an existing one is replaced once the new one is complete.
    """
    found = write_whitened(model, vectors, output)
    print(f"wrote {output}: whitened for {found.num_documents:,} documents")
