"""`show` and `report`: figures of runs and models with their numbers as tables, and an HTML report on a run."""

from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Literal

from embeddings import figures
from embeddings.common import InputError, OptionError
from embeddings.common.errors import refuse_given
from embeddings.common.text import format_table, one_line
from embeddings.data.samplers.clustered import ClusterFolder
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.data.tokenize import TokenSpan
from embeddings.figures.clusters import MAX_CLUSTERS, MAX_CORPORA, MAX_DOCUMENTS, draw_cluster_points
from embeddings.figures.drawing import run_names
from embeddings.figures.heat_maps import (
    MEAN,
    PLACE_NAMES,
    HeatMap,
    expert_map,
    latent_maps,
    spread,
    text_map,
    token_name,
    weighted_pieces,
)
from embeddings.inference import Encoder, choose_context, expert_loads, read_corpus, require_context_size
from embeddings.inference import contextual_shift as measure_shift
from embeddings.inference.context import draw_documents
from embeddings.inference.inspection import (
    ContextualShift,
    LatentWeights,
    TokenWeights,
    latent_pooling,
    latent_weights,
    shares_of,
    token_weights,
)
from embeddings.inference.vector_folder import Document
from embeddings.models import AnchorTokenPooling, Embedder
from embeddings.models.poolings import pooling_name

# Number of latents listed for a token, and for the mean of a text's tokens.
_NUM_TOKEN_LATENTS, _NUM_TEXT_LATENTS = 3, 8


def curves(run: Path | list[Path], output: Path | None = None) -> None:
    """Plot the loss and nDCG@10 of runs over optimiser steps.

    Args:
        run: The folder of a run, with the `metrics.csv` that `fit` wrote; several as `[RUN,RUN]`, in one figure.
        output: The PNG file to write; default `curves.png` in the run's folder, or in this folder for several runs.
    """
    runs = [run] if isinstance(run, Path) else run
    _require_runs("run", runs)
    path = output or (runs[0] if len(runs) == 1 else Path()) / "curves.png"
    figures.check_output(path)
    figures.draw_curves(runs, path)
    print(f"wrote {path}")


def _require_runs(option: str, runs: Sequence[Path]) -> None:
    if not runs:
        raise OptionError(option, runs, "must not be empty", "give a folder such as checkpoints/runs/NAME/version_0")


def anchor_tokens(
    texts: list[str],
    model: str,
    output: Path = Path("anchor-tokens.html"),
    prompt_name: str | None = None,
    role: Literal["document", "query"] = "document",
    axis: Literal["key", "query"] | None = None,
    layers: int | list[int] | None = None,
    per_head: bool | None = None,
    include_first: bool | None = None,
    by_visible_queries: bool | None = None,
) -> None:
    """Show the weights of anchor-token-aware pooling on the tokens of texts, and print them as a table.

    A model with this pooling shows its own weights; other models show the weights that this pooling would compute.

    Args:
        texts: The texts, shown with a common colour scale.
        model: A model directory or Hub id.
        output: The HTML file to write.
        prompt_name: Name of the model's prompt to prepend to each text; default the role's. Its tokens get no weight.
        role: Role of the texts, which determines the default prompt and the maximum length.
        axis: `key`: the attention that a token receives; `query`: how evenly its attention is distributed. The default
            of this option and of those below is the model's setting, or else that of the pooling.
        layers: Layers whose attention is used, from 0 or, if negative, from the last: `-1`, or several as `[-1,-2]`.
        per_head: Whether each head has the same weight.
        include_first: Whether to pool the first token of a text.
        by_visible_queries: Whether to divide weights by the number of queries that see the token, for the key axis of a
            causal mask.
    """
    _check_texts(texts)
    figures.check_output(output, needs_matplotlib=False)
    embedder = Encoder.from_pretrained(model).embedder
    options = {
        "axis": axis,
        "layers": [layers] if isinstance(layers, int) else layers,
        "per_head": per_head,
        "include_first": include_first,
        "by_visible_queries": by_visible_queries,
    }
    pooling, whose = _anchor_pooling(embedder, {name: value for name, value in options.items() if value is not None})
    weights = token_weights(embedder, texts, pooling, prompt_name=prompt_name, role=role)
    _check_tokens(texts, [compress(each.spans, each.pooled_T) for each in weights])
    title = f"{one_line(Path(model).name, 40)}{whose}"
    subtitle = f"Anchor-token-aware pooling, {_pooling_settings(pooling)}."
    figures.draw_anchor_tokens(weights, title, subtitle, output)
    print("\n\n".join([f"{title}\n{subtitle}", *map(_anchor_table, weights), f"wrote {output}"]))


def _check_texts(texts: Sequence[str]) -> None:
    for text in texts:
        if not text.strip():
            raise OptionError("TEXT", text, "must not be empty", "give a sentence")


def _check_tokens(texts: Sequence[str], pooled: Iterable[Iterable[TokenSpan]]) -> None:
    """Refuse a text without any pooled token besides special tokens."""
    for text, spans in zip(texts, pooled, strict=True):
        if all(span.is_special for span in spans):
            rule = "must have a token that is not special"
            raise OptionError("TEXT", text[:40], rule, "use another text: the tokenizer drops all of this one")


def _anchor_pooling(embedder: Embedder, options: dict[str, object]) -> tuple[AnchorTokenPooling, str]:
    """The pooling whose weights are shown, and its description, which follows the model's name in the title."""
    own = embedder.pooling if isinstance(embedder.pooling, AnchorTokenPooling) else None
    settings = (own or AnchorTokenPooling(embedder.hidden_size)).arguments()
    try:
        pooling = AnchorTokenPooling(embedder.hidden_size, **{**settings, **options})
    except ValueError as error:
        raise OptionError("layers", options.get("layers"), str(error), "leave it out for the last layer") from error
    if own is None:
        name = pooling_name(embedder.pooling).replace("_", "-")
        return pooling, f" ({name} pooling): hypothetical anchor weights"
    same = pooling.arguments() == settings
    return pooling, ": its own anchor weights" if same else ": anchor weights with changed settings"


def _pooling_settings(pooling: AnchorTokenPooling) -> str:
    layers = ", ".join(map(str, pooling.layers))
    words = [f"{pooling.axis} axis", f"layer{'s' * (len(pooling.layers) > 1)} {layers}"]
    words += ["equal head weights"] * pooling.per_head
    words += ["without the first token"] * (not pooling.include_first)
    words += ["by visible queries"] * pooling.by_visible_queries
    return ", ".join(words)


def _anchor_table(weights: TokenWeights) -> str:
    """Each token's weight, then the share of the weight at each kind of position."""
    num_pooled = int(weights.pooled_T.sum())
    rows: list[list[object]] = [["  weight", "over mean", "token"]]
    for piece in weighted_pieces(weights):
        text = piece.text if piece.is_special else " ".join(piece.text.split()) or repr(piece.text)
        text += f"  ({piece.num_tokens} tokens)" if piece.num_tokens > 1 else ""
        numbers = [f"{piece.weight:.4f}", f"{piece.weight * num_pooled / piece.num_tokens:.2f}"]
        rows.append([*(numbers if piece.is_pooled else "--"), text])
    shares = shares_of([weights])
    positions = [("share of", "the weight", "the tokens")]
    positions += [(name, f"{shares.weight[at]:.1%}", f"{shares.tokens[at]:.1%}") for at, name in PLACE_NAMES.items()]
    return f"{format_table(rows, '>><')}\n\n{format_table(positions)}"


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
    """Show which latents the tokens of texts attend to, in a model with latent attention, and print a table.

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
    if num_latents < 1:
        raise OptionError("num_latents", num_latents, "must be >= 1", "24 is usual")
    figures.check_output(output, needs_matplotlib=False)
    embedder = Encoder.from_pretrained(model).embedder
    weights = latent_weights(embedder, texts, head=head, prompt_name=prompt_name, role=role)
    _check_tokens(texts, [each.spans for each in weights])
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
    print("\n\n".join([f"{title}\n{subtitle}", *map(_latent_table, weights), f"wrote {output}"]))


def _latent_table(weights: LatentWeights) -> str:
    """The latents with the highest weights of each token, then of the mean over tokens."""
    rows: list[list[object]] = [["  spread", "token", "latents, highest weight first"]]
    named = [
        (" ".join(token_name(weights.text, span).split()), weight_R, _NUM_TOKEN_LATENTS)
        for span, weight_R in zip(weights.spans, weights.weight_TR, strict=True)
    ]
    for name, weight_R, count in [*named, (MEAN, weights.mean_R, _NUM_TEXT_LATENTS)]:
        highest = (-weight_R).argsort(kind="stable")[:count]
        shares = "  ".join(f"{latent} ({weight_R[latent]:.1%})" for latent in highest.tolist())
        rows.append([f"{spread(weight_R):.1f}", name, shares])
    return format_table(rows, "><")


def routing(
    texts: list[str],
    model: str | None = None,
    runs: Path | list[Path] | None = None,
    output: Path | None = None,
    input: Path | None = None,
    prompt_name: str | None = None,
    role: Literal["document", "query"] | None = None,
) -> None:
    """Show how a sparse model routes the tokens of texts, or how evenly training runs used the experts.

    With `--model`, an HTML page has a row for each sparse layer and a column for each expert, also printed as a table.
    With `--runs`, a PNG file has two curves for each run, which the callback `RoutingStatistics` logged: the load
    entropy and the number of idle experts.

    Args:
        texts: The texts, with `--model` only. Duplicates count once.
        model: A model directory or Hub id.
        runs: Folders of runs, each with the `metrics.csv` that `fit` wrote; several as `[RUN, RUN]`.
        output: The file to write; default `routing.html` with `--model`, `routing.png` with `--runs`.
        input: A JSONL (also `.gz`) or Parquet file with `text`, and optionally `title`, in place of texts.
        prompt_name: Name of the model's prompt to prepend to each text; default the role's. Its tokens count too.
        role: Role of the texts, which determines the default prompt and the maximum length; default `document`.
    """
    if (model is None) == (runs is None):
        got = "neither" if model is None else "both"
        raise OptionError("model", got, "or runs must be given", "give exactly one: --model DIR TEXT, or --runs RUN")
    if model is None:
        hint = "leave it out, or give --model in place of --runs"
        options = {"TEXT": texts or None, "input": input, "prompt_name": prompt_name, "role": role}
        refuse_given(options, "has no effect on runs", hint)
        folders = [runs] if isinstance(runs, Path) else list(runs or ())
        _require_runs("runs", folders)
        picture = output or Path("routing.png")
        figures.check_output(picture)
        figures.draw_routing_curves(folders, picture)
        print(f"wrote {picture}")
        return
    if bool(texts) == (input is not None):
        got = "both" if texts else "neither"
        raise OptionError("TEXT", got, "or input must be given", "give texts, or --input FILE")
    _check_texts(texts)
    page = output or Path("routing.html")
    figures.check_output(page, needs_matplotlib=False)
    if input is not None:
        texts = [document.text for document in read_corpus(input)]
        if not any(text.strip() for text in texts):
            raise InputError(f"--input {input}", "contains no text", "give a file with texts")
    encoder = Encoder.from_pretrained(model, precision="float32", show_progress=len(texts) > 1000)
    loads = expert_loads(encoder, texts, prompt_name, role or "document")
    num_texts, num_experts = len(set(texts)), loads.count_YX.shape[1]
    title = f"{one_line(Path(model).name, 40)}: routing of the tokens of {num_texts:,} text{'s' * (num_texts > 1)}"
    subtitle = (
        f"{loads.num_tokens:,} tokens with prompts and special tokens, each routed to {loads.top_k} of "
        f"{num_experts} experts. Layers and experts are numbered from 0."
    )
    heat_map = expert_map(loads)
    figures.write_heat_maps([heat_map], 1 / num_experts, title, subtitle, page)
    print(f"{title}\n{subtitle}\n\n{_routing_table(heat_map)}\n\nwrote {page}")


def _routing_table(loads: HeatMap) -> str:
    rows: list[list[object]] = [["layer", *loads.statistics, *loads.columns]]
    for layer, shares, *statistics in zip(loads.rows, loads.share_NC, *loads.statistics.values(), strict=True):
        rows.append([layer, *statistics, *(f"{share:.1%}" for share in shares)])
    return format_table(rows, ">")


def contextual_shift(
    model: str,
    corpus: Path | list[Path],
    output: Path = Path("contextual-shift.png"),
    num_documents: int = 8,
    num_contexts: int = 10,
    context_size: int | None = None,
    seed: int = 0,
) -> None:
    """Plot how a contextual model's vectors of the same documents differ between contexts.

    A table shows how similar the vectors of one document are, and how close the nearest other document is.

    Args:
        model: The directory of a contextual model.
        corpus: A corpus file or encoded folder, or several as `[A,B]`: documents are from the first, contexts from all.
        output: The PNG file to write.
        num_documents: Number of documents, from 2 to 20.
        num_contexts: Number of contexts drawn from each corpus; 2 or more in total.
        context_size: Number of documents in a context; default the model's number.
        seed: Random seed of the draws.
    """
    corpora = [corpus] if isinstance(corpus, Path) else corpus
    if not 1 <= len(corpora) <= MAX_CORPORA:
        rule = f"must have from 1 to {MAX_CORPORA} corpora"
        raise OptionError("corpus", list(map(str, corpora)), rule, "give one, or several as [A,B]")
    if not 2 <= num_documents <= MAX_DOCUMENTS:
        rule = f"must be from 2 to {MAX_DOCUMENTS}, since more colours cannot be distinguished"
        raise OptionError("num_documents", num_documents, rule, "8 is usual")
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
    print(f"{title}\n{subtitle}\n\n{_shift_table(shift, documents)}\n\nwrote {output}")


def _shift_table(shift: ContextualShift, documents: Sequence[Document]) -> str:
    rows = [["mean between contexts", "minimum", "with no context", "nearest other", "document"]]
    cosines = (shift.own_cosine_NP, shift.alone_cosine_N, shift.other_cosine_N)
    for document, own_P, alone, other in zip(documents, *cosines, strict=True):
        name = f"{one_line(document.document_id, 20)}: {one_line(document.text, 50)}"
        rows.append([*(f"{number:.4f}" for number in (own_P.mean(), own_P.min(), alone, other)), name])
    return format_table(rows, ">>>><")


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
        vectors: The vectors of the same source; default `CLUSTERS.vectors`. Clusters by words (`--features bm25`) have
            no vectors, but can be plotted with those of a model.
        output: The PNG file to write.
        num_clusters: Number of randomly chosen clusters, at most 20.
        rows_per_cluster: Maximum rows of a cluster.
        seed: Random seed of the chosen clusters and rows.
    """
    if num_clusters > MAX_CLUSTERS:
        rule = f"must be at most {MAX_CLUSTERS}, since more colours cannot be distinguished"
        raise OptionError("num_clusters", num_clusters, rule, "10 is usual")
    figures.check_output(output)
    cluster_folder = ClusterFolder(clusters)
    folder = vectors or clusters.absolute().with_name(f"{clusters.absolute().name}.vectors")
    if not folder.is_dir():
        fix = "give the vectors of the same source, which `cluster --model` writes"
        raise InputError(f"--vectors {vectors or folder.name}", "no such folder", fix)
    surrogates = SurrogateVectors(folder, cluster_folder.source_key, check_vectors=False)
    points = draw_cluster_points(cluster_folder, surrogates, num_clusters, rows_per_cluster, seed)
    counts = f"{len(points.clusters)} of {cluster_folder.num_clusters:,} clusters"
    title = f"{one_line(clusters.absolute().name, 40)}: {counts}"
    subtitle = (
        f"{len(points.vector_ND):,} of {cluster_folder.num_rows:,} rows, at most {rows_per_cluster} per cluster. A dot "
        "is a row's query and document vectors, concatenated. Numbers: the clusters, at the centre of their rows."
    )
    figures.draw_clusters(points, title, subtitle, output)
    columns = ["cluster", "rows", "plotted", "cosine with its mean", "nearest other", "cosine of means"]
    rows: list[list[object]] = [[*columns, "nearest to own mean"]]
    for each in points.facts():
        cosines = f"{each.cosine:.3f}", each.nearest, f"{each.nearest_cosine:.3f}", f"{each.at_home:.1%}"
        rows.append([each.cluster, f"{each.num_rows:,}", each.num_drawn, *cosines])
    print(f"{title}\n{subtitle}\n\n{format_table(rows, '>')}\n\nwrote {output}")


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
