"""`show` and `report`: pictures of runs and models, with the same numbers as tables, and a page about a run."""

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
from embeddings.figures.clusters import (
    MAX_CLUSTERS,
    MAX_CORPORA,
    MAX_DOCUMENTS,
    PERPLEXITY,
    draw_cluster_points,
    neighbour_map,
)
from embeddings.figures.drawing import run_names
from embeddings.figures.heat_maps import (
    MAX_COLUMNS,
    MEAN,
    PLACE_NAMES,
    draw_latents_by_text,
    layer_shares,
    spread,
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
from embeddings.models.model_files import resolve_model, zeros_by_matrix
from embeddings.models.moe.upcycling import load_metrics
from embeddings.models.poolings import pooling_name

# Latents named beside a token, and beside the mean of a text's tokens.
_OF_A_TOKEN, _OF_A_TEXT = 3, 8


def curves(run: Path | list[Path], output: Path | None = None) -> None:
    """Draw the loss and nDCG@10 of some runs over their optimiser steps.

    Args:
        run: The run's folder, which holds the `metrics.csv` that `fit` wrote; several as `[RUN,RUN]`, in one picture.
        output: The PNG file to write; `curves.png` in the run's folder, or for several here, where none is given.
    """
    runs = [run] if isinstance(run, Path) else run
    _require_runs("run", runs)
    path = output or (runs[0] if len(runs) == 1 else Path()) / "curves.png"
    figures.check_output(path)
    figures.draw_curves(runs, path)
    print(f"wrote {path}")


def _require_runs(option: str, runs: Sequence[Path]) -> None:
    if not runs:
        raise OptionError(option, runs, "must name a run", "give a folder such as checkpoints/runs/NAME/version_0")


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
    """Show where anchor-token-aware pooling puts its weight in some texts, and print it as a table.

    A model that pools so shows its own weights, any other one those that such a pooling would give.

    Args:
        texts: The texts, shown below each other on one scale.
        model: A model directory or Hub id.
        output: The HTML file to write.
        prompt_name: Which of the model's prompts precedes each text, the role's if left out; its tokens get no weight.
        role: Whose prompt and length limit hold for the texts.
        axis: `key`: what a token receives; `query`: how evenly it looks about. The pooling's own, or `key`, if left
            out, and so the others.
        layers: Whose attention counts, from 0 or, negative, from the last: `-1`, or several as `[-1,-2]`.
        per_head: Whether heads count alike.
        include_first: Whether the text's first token is pooled.
        by_visible_queries: Whether weights are divided by the queries that see the token, for a causal mask's key axis.
    """
    _check_texts(texts)
    figures.check_output(output, "an HTML file", needs_matplotlib=False)
    embedder = Encoder.from_pretrained(model).embedder
    given = {
        "axis": axis,
        "layers": [layers] if isinstance(layers, int) else layers,
        "per_head": per_head,
        "include_first": include_first,
        "by_visible_queries": by_visible_queries,
    }
    pooling, whose = _anchor_pooling(embedder, {name: value for name, value in given.items() if value is not None})
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
    """Refuse a text of which nothing but special tokens is pooled."""
    for text, spans in zip(texts, pooled, strict=True):
        if all(span.is_special for span in spans):
            rule = "must hold a token of its own"
            raise OptionError("TEXT", text[:40], rule, "the model's tokenizer drops all of it")


def _anchor_pooling(embedder: Embedder, given: dict[str, object]) -> tuple[AnchorTokenPooling, str]:
    """The pooling whose weights are shown, and whose it is, as the end of a title that begins with the model's name."""
    own = embedder.pooling if isinstance(embedder.pooling, AnchorTokenPooling) else None
    settings = (own or AnchorTokenPooling(embedder.hidden_size)).arguments()
    try:
        pooling = AnchorTokenPooling(embedder.hidden_size, **{**settings, **given})
    except ValueError as error:
        raise OptionError("layers", given.get("layers"), str(error), "leave it out for the last layer") from error
    if own is None:
        name = pooling_name(embedder.pooling).replace("_", "-")
        return pooling, f" ({name} pooling): anchor weights as they would be"
    same = pooling.arguments() == settings
    return pooling, ": its own anchor weights" if same else ": anchor weights with other settings than its own"


def _pooling_settings(pooling: AnchorTokenPooling) -> str:
    layers = ", ".join(map(str, pooling.layers))
    words = [f"{pooling.axis} axis", f"layer{'s' * (len(pooling.layers) > 1)} {layers}"]
    words += ["heads count alike"] * pooling.per_head
    words += ["without the first token"] * (not pooling.include_first)
    words += ["by visible queries"] * pooling.by_visible_queries
    return ", ".join(words)


def _anchor_table(weights: TokenWeights) -> str:
    """Each token's weight, then the shares of the weight by place."""
    num_pooled = int(weights.pooled_T.sum())
    rows: list[list[object]] = [["  weight", "over mean", "token"]]
    for piece in weighted_pieces(weights):
        text = piece.text if piece.is_special else " ".join(piece.text.split()) or repr(piece.text)
        text += f"  ({piece.num_tokens} tokens)" if piece.num_tokens > 1 else ""
        numbers = [f"{piece.weight:.4f}", f"{piece.weight * num_pooled / piece.num_tokens:.2f}"]
        rows.append([*(numbers if piece.is_pooled else "--"), text])
    shares = shares_of([weights])
    places = [("share of", "the weight", "the tokens")]
    places += [(name, f"{shares.weight[at]:.1%}", f"{shares.tokens[at]:.1%}") for at, name in PLACE_NAMES.items()]
    return f"{format_table(rows, '>><')}\n\n{format_table(places)}"


def latent_attention(
    texts: list[str],
    model: str,
    output: Path = Path("latent-attention.png"),
    prompt_name: str | None = None,
    role: Literal["document", "query"] = "document",
    head: int | None = None,
    num_latents: int = 24,
    by_text: bool = False,
) -> None:
    """Draw how the tokens of some texts attend to the latents of a model that pools by them, and print it as a table.

    Args:
        texts: The texts, drawn below each other over the same latents.
        model: A model directory or Hub id.
        output: The PNG file to write.
        prompt_name: Which of the model's prompts precedes each text, the role's if left out; its tokens do not attend.
        role: Whose prompt and length limit hold for the texts.
        head: The head whose attention is shown, from 0; the mean over all of them if left out.
        num_latents: How many latents have a column: the busiest over all texts.
        by_text: Whether a text is one row, with a column for every latent of every head, as in NV-Embed's Fig. 2.
    """
    _check_texts(texts)
    if not 1 <= num_latents <= MAX_COLUMNS:
        rule = f"must be from 1 to {MAX_COLUMNS}, what a picture has room for"
        raise OptionError("num_latents", num_latents, rule, "24 is usual")
    figures.check_output(output)
    embedder = Encoder.from_pretrained(model).embedder
    found = latent_weights(embedder, texts, head=head, prompt_name=prompt_name, role=role)
    _check_tokens(texts, [weights.spans for weights in found])
    pooling = latent_pooling(embedder)
    total, shown = len(pooling.latents), min(num_latents, len(pooling.latents))
    if by_text:
        title = f"{one_line(Path(model).name, 40)}: what its texts attend to"
        subtitle = "Latent attention, the mean over each text's tokens (NV-Embed, Fig. 2)."
        draw_latents_by_text(found, title, subtitle, output)
        print(f"{title}\n{subtitle}\n\nwrote {output}")
        return
    heads = f"mean of {pooling.num_heads} heads" if head is None else f"head {head} of {pooling.num_heads}"
    title = f"{one_line(Path(model).name, 40)}: what its tokens attend to"
    subtitle = (
        f"Latent attention, {heads}. Columns: the {shown} busiest of {total} latents over all texts, counted from 0. "
        "Spread: over how many latents a row's attention lies (exponential of its entropy)."
    )
    figures.draw_latent_weights(found, num_latents, title, subtitle, output)
    print("\n\n".join([f"{title}\n{subtitle}", *map(_latent_table, found), f"wrote {output}"]))


def _latent_table(weights: LatentWeights) -> str:
    """Each token's heaviest latents, then those of the mean over the tokens."""
    rows: list[list[object]] = [["  spread", "token", "latents, the heaviest first"]]
    named = [
        (" ".join(token_name(weights.text, span).split()), weight_R, _OF_A_TOKEN)
        for span, weight_R in zip(weights.spans, weights.weight_TR, strict=True)
    ]
    for name, weight_R, most in [*named, (MEAN, weights.mean_R, _OF_A_TEXT)]:
        heaviest = (-weight_R).argsort(kind="stable")[:most]
        shares = "  ".join(f"{latent} ({weight_R[latent]:.1%})" for latent in heaviest.tolist())
        rows.append([f"{spread(weight_R):.1f}", name, shares])
    return format_table(rows, "><")


def routing(
    texts: list[str],
    model: str | None = None,
    runs: Path | list[Path] | None = None,
    output: Path = Path("routing.png"),
    input: Path | None = None,
    prompt_name: str | None = None,
    role: Literal["document", "query"] | None = None,
) -> None:
    """Draw where the tokens of some texts go in a sparse model, or how evenly the experts were used over training runs.

    With `--model`, a row a sparse layer and a column an expert, printed as a table too. With `--runs`, two curves a run
    of what the callback `RoutingStatistics` logged: the load entropy and the number of idle experts.

    Args:
        texts: The texts, with a model only. One that occurs twice counts once.
        model: A model directory or Hub id.
        runs: Folders of runs, each of which holds the `metrics.csv` that `fit` wrote; several as `[RUN, RUN]`.
        output: The PNG file to write.
        input: A JSONL file (`.gz` too) or Parquet file with `text`, and `title` where there are any, in place of texts.
        prompt_name: Which of the model's prompts precedes each text, the role's if left out; its tokens count too.
        role: Whose prompt and length limit hold for the texts; `document` if left out.
    """
    if (model is None) == (runs is None):
        given = "neither" if model is None else "both"
        raise OptionError("model", given, "or runs must be given", "give exactly one: --model DIR TEXT, or --runs RUN")
    if model is None:
        hint = "leave it out, or give --model in place of --runs"
        options = {"TEXT": texts or None, "input": input, "prompt_name": prompt_name, "role": role}
        refuse_given(options, "has no effect on runs", hint)
        folders = [runs] if isinstance(runs, Path) else list(runs or ())
        _require_runs("runs", folders)
        figures.check_output(output)
        figures.draw_routing_curves(folders, output)
        print(f"wrote {output}")
        return
    if bool(texts) == (input is not None):
        given = "both" if texts else "neither"
        raise OptionError("TEXT", given, "or input must be given", "give texts, or --input FILE")
    _check_texts(texts)
    figures.check_output(output)
    if input is not None:
        texts = [document.text for document in read_corpus(input)]
        if not any(text.strip() for text in texts):
            raise InputError(f"--input {input}", "holds no text", "give a file with texts")
    encoder = Encoder.from_pretrained(model, precision="float32", show_progress=len(texts) > 1000)
    loads = expert_loads(encoder, texts, prompt_name, role or "document")
    num_texts, num_experts = len(set(texts)), loads.count_YX.shape[1]
    title = f"{one_line(Path(model).name, 40)}: where the tokens of {num_texts:,} text{'s' * (num_texts > 1)} go"
    subtitle = (
        f"{loads.num_tokens:,} tokens, prompts and special tokens among them, each to {loads.top_k} of "
        f"{num_experts} experts. Layers and experts count from 0."
    )
    figures.draw_expert_loads(loads, title, subtitle, output)
    load = load_metrics(loads.count_YX)
    rows: list[list[object]] = [["layer", "entropy", "busiest/even", "idle", *range(num_experts)]]
    columns = (loads.layers, load.entropy_Y, load.highest_Y, load.idle_Y, loads.share_YX.tolist())
    for layer, entropy, highest, idle, shares in zip(*columns, strict=True):
        rows.append([layer, f"{entropy:.3f}", f"{highest:.2f}", int(idle), *(f"{share:.1%}" for share in shares)])
    print(f"{title}\n{subtitle}\n\n{format_table(rows, '>')}\n\nwrote {output}")


def sparsity(model: str, output: Path = Path("sparsity.png")) -> None:
    """Draw the share of zeros in every matrix of a model's layers, and print it as a table.

    Args:
        model: A model directory or Hub id, such as `compress` writes.
        output: The PNG file to write.
    """
    figures.check_output(output)
    zeros = zeros_by_matrix(resolve_model(model))
    if not zeros:
        raise InputError(model, "has no matrices in layers", "give a model of layers")
    num_zeros, num_weights = sum(found.num_zeros for found in zeros), sum(found.num_weights for found in zeros)
    title = f"{one_line(Path(model).name, 40)}: {num_zeros / num_weights:.2%} of its layers' weights are zero"
    subtitle = f"{num_weights:,} weights in {len(zeros)} matrices; embeddings, norms and biases are not counted."
    figures.draw_zeros(zeros, title, subtitle, output)
    names = list(dict.fromkeys(found.name for found in zeros))
    rows: list[list[object]] = [["layer", "all", *names]]
    for layer, share in layer_shares(zeros).items():
        shares = {found.name: f"{found.fraction:.1%}" for found in zeros if found.layer == layer}
        rows.append([layer, f"{share:.1%}", *(shares.get(name, "") for name in names)])
    print(f"{title}\n{subtitle}\n\n{format_table(rows, '>')}\n\nwrote {output}")


def contextual_shift(
    model: str,
    corpus: Path | list[Path],
    output: Path = Path("contextual-shift.png"),
    num_documents: int = 8,
    num_contexts: int = 10,
    context_size: int | None = None,
    seed: int = 0,
) -> None:
    """Draw how the vectors of some documents move as a contextual model reads them in one context after another.

    Printed as a table too: how alike a document's vectors stay, and how near the nearest other document is.

    Args:
        model: The directory of a contextual model.
        corpus: A corpus file or encoded folder, or several as `[A,B]`: documents of the first, contexts of each.
        output: The PNG file to write.
        num_documents: How many documents, 2 to 20.
        num_contexts: How many contexts of each corpus, drawn one by one; 2 or more in all.
        context_size: How many documents a context holds; as many as the model takes if left out.
        seed: Seed of the draws.
    """
    corpora = [corpus] if isinstance(corpus, Path) else corpus
    if not 1 <= len(corpora) <= MAX_CORPORA:
        rule = f"must name from 1 to {MAX_CORPORA} corpora"
        raise OptionError("corpus", list(map(str, corpora)), rule, "give one, or several as [A,B]")
    if not 2 <= num_documents <= MAX_DOCUMENTS:
        rule = f"must be from 2 to {MAX_DOCUMENTS}: more colours cannot be told apart"
        raise OptionError("num_documents", num_documents, rule, "8 is usual")
    if num_contexts * len(corpora) < 2:
        raise OptionError("num_contexts", num_contexts, "must give two contexts or more", "10 is usual")
    figures.check_output(output)
    encoder = Encoder.from_pretrained(model, precision="float32")
    size = require_context_size(encoder, context_size)
    # A small corpus gives some documents twice.
    found = {document.text: document for document in draw_documents(corpora[0], num_documents, seed)}
    documents = [document for text, document in found.items() if text.strip()]
    if len(documents) < 2:
        raise OptionError("corpus", str(corpora[0]), "must hold two documents that differ", "give a larger one")
    contexts = [
        choose_context(encoder, path, size, seed + 1 + draw) for path in corpora for draw in range(num_contexts)
    ]
    shift = measure_shift(encoder, [document.text for document in documents], contexts)
    names = [name for name in run_names(corpora) for _ in range(num_contexts)]
    title = f"{one_line(Path(model).name, 40)}: {len(documents)} documents in {len(contexts)} contexts"
    subtitle = (
        f"A colour is a document of {names[0]}, a dot its vector behind {size} documents of a corpus. Of these vectors "
        f"{shift.stays_nearest:.1%} are nearest, over all other contexts, to one of their own document."
    )
    figures.draw_contextual_shift(shift, [document.text for document in documents], names, title, subtitle, output)
    print(f"{title}\n{subtitle}\n\n{_shift_table(shift, documents)}\n\nwrote {output}")


def _shift_table(shift: ContextualShift, documents: Sequence[Document]) -> str:
    rows = [["between contexts", "the least", "with no context", "nearest other", "document"]]
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
    projection: Literal["pca", "tsne"] = "pca",
    perplexity: float | None = None,
) -> None:
    """Draw rows of some clusters in two dimensions, and print how tight each cluster is.

    Args:
        clusters: The folder that `cluster` wrote.
        vectors: The vectors of the same source; `CLUSTERS.vectors` if left out. Clusters by words (`--features bm25`)
            have none of their own, but may be shown by a model's.
        output: The PNG file to write.
        num_clusters: How many clusters are drawn at random, at most 20.
        rows_per_cluster: Most rows of one.
        seed: Seed of the draw, which is all that is left to chance.
        projection: `pca`, the plane in which rows differ most, or `tsne`, a map of neighbours, of 5,000 rows at most.
        perplexity: About how many neighbours of a row t-SNE goes by, below a third of the rows; 30 if left out.
    """
    if num_clusters > MAX_CLUSTERS:
        rule = f"must be at most {MAX_CLUSTERS}: more colours cannot be told apart"
        raise OptionError("num_clusters", num_clusters, rule, "10 is usual")
    if perplexity is not None and projection != "tsne":
        raise OptionError("perplexity", perplexity, "has no effect without --projection tsne", "leave it out")
    figures.check_output(output)
    found = ClusterFolder(clusters)
    folder = vectors or clusters.absolute().with_name(f"{clusters.absolute().name}.vectors")
    if not folder.is_dir():
        fix = "name the vectors of the same source, which `cluster --model` writes"
        raise InputError(f"--vectors {vectors or folder.name}", "no such folder", fix)
    kept = SurrogateVectors(folder, found.source_key, check_vectors=False)
    points = draw_cluster_points(found, kept, num_clusters, rows_per_cluster, seed)
    title = f"{one_line(clusters.absolute().name, 40)}: {len(points.clusters)} of {found.num_clusters:,} clusters"
    subtitle = (
        f"{len(points.vector_ND):,} of {found.num_rows:,} rows, at most {rows_per_cluster} of a cluster; a row is its "
        "query's vector beside its document's. Numbers: the clusters, amid their rows."
    )
    map_N2 = None
    if projection == "tsne":
        perplexity = PERPLEXITY if perplexity is None else perplexity
        subtitle += f" Perplexity {perplexity:g}."
        map_N2 = neighbour_map(points.vector_ND, perplexity)
    figures.draw_clusters(points, title, subtitle, output, map_N2)
    columns = ["cluster", "rows", "drawn", "cosine with its mean", "nearest other", "cosine of means"]
    rows: list[list[object]] = [[*columns, "nearest its own mean"]]
    for each in points.facts():
        cosines = f"{each.cosine:.3f}", each.nearest, f"{each.nearest_cosine:.3f}", f"{each.at_home:.1%}"
        rows.append([each.cluster, f"{each.num_rows:,}", each.num_drawn, *cosines])
    print(f"{title}\n{subtitle}\n\n{format_table(rows, '>')}\n\nwrote {output}")


def report(run: Path, output: Path | None = None) -> None:
    """Write a page about a run for people who were not there: one HTML file with its pictures inside.

    Args:
        run: The run's folder, such as `checkpoints/runs/NAME/version_0`, with the `config.yaml` that `fit` wrote.
        output: The HTML file to write; `report.html` in the run's folder where none is given.
    """
    if not run.is_dir():
        raise InputError(str(run), "is no folder", "give that of a run of fit, such as checkpoints/runs/NAME/version_0")
    path = output or run / "report.html"
    figures.check_output(path, "an HTML file")
    figures.write_report(run, path)
    print(f"wrote {path}")
