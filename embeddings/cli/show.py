"""`show` and `report`: figures of runs and models, and an HTML report on a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from embeddings import figures
from embeddings.cli.parser import listed
from embeddings.common import InputError, OptionError
from embeddings.common.errors import refuse_given, require_minimum
from embeddings.common.text import format_table, one_line
from embeddings.data.samplers.clustered import ClusterFolder
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.figures.clusters import MAX_CLUSTERS, MAX_CORPORA, MAX_DOCUMENTS, draw_cluster_points
from embeddings.figures.drawing import run_names
from embeddings.figures.heat_maps import expert_map, latent_maps, text_map
from embeddings.inference import Encoder, choose_context, expert_loads, read_corpus, require_context_size
from embeddings.inference import contextual_shift as measure_shift
from embeddings.inference.context import draw_documents
from embeddings.inference.inspection import latent_pooling, latent_weights, token_weights
from embeddings.models import AnchorTokenPooling
from embeddings.models.poolings import pooling_name


def curves(run: Path | list[Path], output: Path | None = None) -> None:
    """Plot the loss and nDCG@10 of runs over optimiser steps.

    Args:
        run: The folder of a run, with the `metrics.csv` that `fit` wrote; several as `[RUN,RUN]`, in one figure.
        output: The PNG file; default `curves.png` in the run's folder, or in this folder for several runs.
    """
    runs = _runs(run)
    path = output or (runs[0] if len(runs) == 1 else Path()) / "curves.png"
    figures.check_output(path)
    figures.draw_curves(runs, path)
    print(f"wrote {path}")


def _runs(given: Path | list[Path]) -> list[Path]:
    runs = listed(given)
    if not runs:
        raise OptionError("run", runs, "must not be empty", "give a folder such as checkpoints/runs/NAME/version_0")
    return runs


def _check_texts(texts: Sequence[str]) -> None:
    for text in texts:
        if not text.strip():
            raise OptionError("TEXT", text, "must not be empty", "give a sentence")


def anchor_tokens(
    texts: list[str],
    model: str,
    output: Path = Path("anchor-tokens.html"),
    prompt_name: str | None = None,
    role: Literal["document", "query"] = "document",
) -> None:
    """Show the weights of anchor-token-aware pooling on the tokens of texts.

    A model with this pooling shows its own weights; other models show the weights that this pooling would compute.

    Args:
        texts: The texts, shown with a common colour scale.
        model: A model directory or Hub id.
        output: The HTML file to write.
        prompt_name: Name of the model's prompt to prepend to each text; default the role's. Its tokens get no weight.
        role: Role of the texts, which determines the default prompt and the maximum length.
    """
    _check_texts(texts)
    figures.check_output(output, needs_matplotlib=False)
    embedder = Encoder.from_pretrained(model).embedder
    pooling, whose = embedder.pooling, ": its own anchor weights"
    if not isinstance(pooling, AnchorTokenPooling):
        whose = f" ({pooling_name(pooling).replace('_', '-')} pooling): hypothetical anchor weights"
        pooling = AnchorTokenPooling(embedder.hidden_size)
    weights = token_weights(embedder, texts, pooling, prompt_name=prompt_name, role=role)
    described = ", ".join(f"{name} {value}" for name, value in pooling.arguments().items())
    title, subtitle = f"{one_line(Path(model).name, 40)}{whose}", f"Anchor-token-aware pooling: {described}."
    figures.draw_anchor_tokens(weights, title, subtitle, output)
    print(f"{title}\n{subtitle}\nwrote {output}")


def latent_attention(
    texts: list[str],
    model: str,
    output: Path = Path("latent-attention.html"),
    prompt_name: str | None = None,
    role: Literal["document", "query"] = "document",
    head: int | None = None,
    num_latents: int = 24,
    by_text: bool = False,
) -> None:
    """Show which latents the tokens of texts attend to, in a model with latent attention.

    Args:
        texts: The texts, shown over the same latents.
        model: A model directory or Hub id.
        output: The HTML file to write.
        prompt_name: Name of the model's prompt to prepend to each text; default the role's. Its tokens are not shown.
        role: Role of the texts, which determines the default prompt and the maximum length.
        head: The head whose attention is shown, from 0; default the mean over all heads.
        num_latents: Number of latents shown: those with the most attention over all texts.
        by_text: Whether to show one row for each text, the mean over its tokens, as in NV-Embed's Fig. 2.
    """
    _check_texts(texts)
    require_minimum("num_latents", num_latents, 1, "24 is usual")
    figures.check_output(output, needs_matplotlib=False)
    embedder = Encoder.from_pretrained(model).embedder
    weights = latent_weights(embedder, texts, head=head, prompt_name=prompt_name, role=role)
    pooling = latent_pooling(embedder)
    total, shown = len(pooling.latents), min(num_latents, len(pooling.latents))
    heads = f"mean of {pooling.num_heads} heads" if head is None else f"head {head} of {pooling.num_heads}"
    title = f"{one_line(Path(model).name, 40)}: latents that its {'texts' if by_text else 'tokens'} attend to"
    subtitle = (
        f"Latent attention, {heads}. Columns: the {shown} of {total} latents with the most attention, numbered from 0. "
        "Spread: effective number of latents that a row attends to (exponential of the entropy)."
    )
    maps = [text_map(weights, num_latents)] if by_text else latent_maps(weights, num_latents)
    figures.write_heat_maps(maps, 1 / total, title, subtitle, output)
    print(f"{title}\n{subtitle}\nwrote {output}")


def routing(
    texts: list[str],
    model: str | None = None,
    runs: Path | list[Path] | None = None,
    output: Path | None = None,
    input: Path | None = None,
    prompt_name: str | None = None,
    role: Literal["document", "query"] = "document",
) -> None:
    """Show how a sparse model routes the tokens of texts, or how evenly training runs used the experts.

    With `--model`, an HTML page has a row for each sparse layer and a column for each expert. With `--runs`, a PNG file
    has two curves for each run, logged by the callback `RoutingStatistics`: load entropy and number of idle experts.

    Args:
        texts: The texts, with `--model` only. Duplicates count once.
        model: A model directory or Hub id.
        runs: Folders of runs, each with the `metrics.csv` that `fit` wrote; several as `[RUN, RUN]`.
        output: The file to write; default `routing.html` with `--model`, `routing.png` with `--runs`.
        input: A JSONL (also `.gz`) or Parquet file with `text`, and optionally `title`, in place of texts.
        prompt_name: Name of the model's prompt to prepend to each text; default the role's. Its tokens count too.
        role: Role of the texts, which determines the default prompt and the maximum length.
    """
    if (model is None) == (runs is None):
        got = "neither" if model is None else "both"
        raise OptionError("model", got, "or runs must be given", "give exactly one: --model DIR TEXT, or --runs RUN")
    if runs is not None:
        given = {"TEXT": texts or None, "input": input, "prompt_name": prompt_name}
        refuse_given(given, "has no effect with --runs")
        picture = output or Path("routing.png")
        figures.check_output(picture)
        figures.draw_routing_curves(_runs(runs), picture)
        print(f"wrote {picture}")
        return
    if bool(texts) == (input is not None):
        got = "both" if texts else "neither"
        raise OptionError("TEXT", got, "or input must be given", "give texts, or --input FILE")
    page = output or Path("routing.html")
    figures.check_output(page, needs_matplotlib=False)
    if input is not None:
        texts = [document.text for document in read_corpus(input)]
    _check_texts(texts)
    encoder = Encoder.from_pretrained(str(model), precision="float32", show_progress=len(texts) > 1000)
    loads = expert_loads(encoder, texts, prompt_name, role)
    num_texts, num_experts = len(set(texts)), loads.count_YX.shape[1]
    title = f"{one_line(Path(str(model)).name, 40)}: routing of the tokens of {num_texts:,} text{'s' * (num_texts > 1)}"
    subtitle = (
        f"{loads.num_tokens:,} tokens with prompts and special tokens, each routed to {loads.top_k} of "
        f"{num_experts} experts. Layers and experts are numbered from 0."
    )
    figures.write_heat_maps([expert_map(loads)], 1 / num_experts, title, subtitle, page)
    print(f"{title}\n{subtitle}\nwrote {page}")


def contextual_shift(
    model: str,
    corpus: Path | list[Path],
    output: Path = Path("contextual-shift.png"),
    num_documents: int = 8,
    num_contexts: int = 10,
    context_size: int | None = None,
    seed: int = 0,
) -> None:
    """Plot how a contextual model's vectors of the same documents differ between contexts, with a table of cosines.

    Args:
        model: The directory of a contextual model.
        corpus: A corpus file or encoded folder, or several as `[A,B]`: documents are from the first, contexts from all.
        output: The PNG file to write.
        num_documents: Number of documents, from 2 to 20.
        num_contexts: Number of contexts drawn from each corpus; 2 or more in total.
        context_size: Number of documents in a context; default the model's number.
        seed: Random seed of the draws.
    """
    corpora = listed(corpus)
    if not 1 <= len(corpora) <= MAX_CORPORA:
        rule = f"must have from 1 to {MAX_CORPORA} corpora"
        raise OptionError("corpus", list(map(str, corpora)), rule, "give one, or several as [A,B]")
    if not 2 <= num_documents <= MAX_DOCUMENTS:
        raise OptionError("num_documents", num_documents, f"must be from 2 to {MAX_DOCUMENTS}", "8 is usual")
    if num_contexts * len(corpora) < 2:
        raise OptionError("num_contexts", num_contexts, "must be >= 2 with one corpus, else >= 1", "10 is usual")
    figures.check_output(output)
    encoder = Encoder.from_pretrained(model, precision="float32")
    size = require_context_size(encoder, context_size)
    # Draws from a small corpus contain duplicates.
    by_text = {document.text: document for document in draw_documents(corpora[0], num_documents, seed)}
    documents = [document for text, document in by_text.items() if text.strip()]
    if len(documents) < 2:
        raise OptionError("corpus", str(corpora[0]), "must have two different documents", "give a larger corpus")
    contexts = [
        choose_context(encoder, path, size, seed + 1 + draw) for path in corpora for draw in range(num_contexts)
    ]
    shift = measure_shift(encoder, [document.text for document in documents], contexts)
    names = [name for name in run_names(corpora) for _ in range(num_contexts)]
    title = f"{one_line(Path(model).name, 40)}: {len(documents)} documents in {len(contexts)} contexts"
    subtitle = (
        f"Colours: documents of {names[0]}. Dots: their vectors in a context of {size} documents of a corpus. "
        f"The nearest vector of another context is one of the same document for {shift.stays_nearest:.1%} of the dots."
    )
    figures.draw_contextual_shift(shift, [document.text for document in documents], names, title, subtitle, output)
    rows = [["mean between contexts", "minimum", "with no context", "nearest other", "document"]]
    cosines = (shift.own_cosine_NP, shift.alone_cosine_N, shift.other_cosine_N)
    for document, own_P, alone, other in zip(documents, *cosines, strict=True):
        name = f"{one_line(document.document_id, 20)}: {one_line(document.text, 50)}"
        rows.append([*(f"{number:.4f}" for number in (own_P.mean(), own_P.min(), alone, other)), name])
    print(f"{title}\n{subtitle}\n\n{format_table(rows, '>>>><')}\n\nwrote {output}")


def clusters(
    clusters: Path,
    vectors: Path | None = None,
    output: Path = Path("clusters.png"),
    num_clusters: int = 10,
    rows_per_cluster: int = 100,
    seed: int = 0,
) -> None:
    """Plot rows of some clusters on their two principal components, and print how compact each cluster is.

    Args:
        clusters: The folder that `cluster` wrote.
        vectors: The vectors of the same source; default `CLUSTERS.vectors`.
        output: The PNG file to write.
        num_clusters: Number of randomly chosen clusters, at most 20.
        rows_per_cluster: Maximum rows of a cluster.
        seed: Random seed of the chosen clusters and rows.
    """
    if num_clusters > MAX_CLUSTERS:
        raise OptionError("num_clusters", num_clusters, f"must be at most {MAX_CLUSTERS}", "10 is usual")
    figures.check_output(output)
    cluster_folder = ClusterFolder(clusters)
    folder = vectors or clusters.absolute().with_name(f"{clusters.absolute().name}.vectors")
    if not folder.is_dir():
        fix = "give the vectors of the same source, which `cluster` writes"
        raise InputError(f"--vectors {vectors or folder.name}", "no such folder", fix)
    surrogates = SurrogateVectors(folder, cluster_folder.source_key, check_files=False)
    points = draw_cluster_points(cluster_folder, surrogates, num_clusters, rows_per_cluster, seed)
    counts = f"{len(points.clusters)} of {cluster_folder.num_clusters:,} clusters"
    title = f"{one_line(clusters.absolute().name, 40)}: {counts}"
    subtitle = (
        f"{len(points.vector_ND):,} of {cluster_folder.num_rows:,} rows, at most {rows_per_cluster} per cluster. A dot "
        "is a row's query and document vectors, concatenated. Numbers: the clusters, at the centre of their rows."
    )
    figures.draw_clusters(points, title, subtitle, output)
    print(f"{title}\n{subtitle}\n\n{format_table(points.table(), '>')}\n\nwrote {output}")


def report(run: Path, output: Path | None = None) -> None:
    """Write a report on a run, as one HTML file that includes its figures.

    Args:
        run: The run's folder, such as `checkpoints/runs/NAME/version_0`, with the `config.yaml` that `fit` wrote.
        output: The HTML file to write; default `report.html` in the run's folder.
    """
    if not run.is_dir():
        raise InputError(str(run), "is not a folder", "give a run's folder, such as checkpoints/runs/NAME/version_0")
    path = output or run / "report.html"
    figures.check_output(path)
    figures.write_report(run, path)
    print(f"wrote {path}")
