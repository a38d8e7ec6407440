"""E7: which tokens anchor-token-aware pooling weights most: the first token, the last one, punctuation, or the rest.

MGH shows one sentence of a 7B decoder, in which the first token, punctuation and the last tokens have the largest
weights ("Negative Matters", §5.2, Fig. 5). This script measures mean shares over documents of the held-out packages,
and the shares of tokens, which are the weights of mean pooling. The models are MiniLM as published and after
`lightning_configs/mgh_docstrings.yaml`, and the small decoder of `small_decoder.yaml` with its causal mask, without it,
and after `small_decoder_mntp.yaml`. The seed selects the documents.
"""

import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.docstring_trials import MODEL, Workspace
from benchmarks.e5_pooling_and_mask import CONFIGS, decoder
from benchmarks.trials import Metrics, Trial, run_recipes, table, trial_options
from embeddings.common import TextSettings
from embeddings.evaluation import read_retrieval_folder
from embeddings.inference.inspection import PLACES, shares_of, token_weights
from embeddings.models import AnchorTokenPooling, BackboneConfig, Embedder, load_backbone

NUM_TEXTS, TINY_TEXTS = 512, 4


@dataclass(frozen=True)
class Case:
    """A model and the documents on which its pooling weights are measured.

    Args:
        model: A model directory, or a name.
        bidirectional: Whether a decoder's causal mask is disabled.
        by_visible_queries: Whether a weight is divided by the number of queries that attend to the token.
        num_texts: Number of documents.
        max_length: Maximum tokens per document.
    """

    model: str
    bidirectional: bool = False
    by_visible_queries: bool = False
    num_texts: int = NUM_TEXTS
    max_length: int = 128


def main() -> None:
    """Measure each model; print the shares of weight and of tokens."""
    chosen = trial_options(__doc__)
    small, adapted = (decoder(chosen.work, chosen.tiny, name) for name in ("small_decoder", "small_decoder_mntp"))
    cases = {
        "MiniLM": Case(MODEL),
        "MiniLM after MGH": Case(trained(chosen)),
        "decoder, causal": Case(small, by_visible_queries=True),
        "decoder, both ways": Case(small, bidirectional=True),
        "decoder, adapted": Case(adapted, bidirectional=True),
    }
    workspace = Workspace(chosen.work, chosen.tiny)
    with workspace.locked():
        workspace.prepare([])
    scores = run_recipes(chosen, "E7", cases, shares)
    print(f"E7, share of the weight\n{table(scores, [f'weight on {place}' for place in PLACES])}")
    print(f"\nshare of the tokens\n{table(scores, [f'tokens, {place}' for place in PLACES])}")


def trained(chosen: Namespace) -> str:
    """The model directory of `mgh_docstrings.yaml`, trained first if it is missing; if tiny, MiniLM."""
    folder = "checkpoints/mgh_docstrings"
    if chosen.tiny:
        return MODEL
    if not Path(folder).is_dir():
        for line in (
            "prepare docstrings --output data/docstrings",
            f"fit --config {CONFIGS / 'mgh_docstrings.yaml'}",
        ):
            subprocess.run([sys.executable, "main.py", *line.split()], cwd=CONFIGS.parent, check=True)
    return folder


def shares(trial: Trial, work: Path, tiny: bool) -> Metrics:
    """Mean shares of weight and of tokens over documents of the held-out packages."""
    case = Case(**trial.settings)  # type: ignore[arg-type]
    documents = read_retrieval_folder(Workspace(work, tiny).evaluation_root / "held_out").documents
    rows = np.random.default_rng(trial.seed).permutation(len(documents))[: TINY_TEXTS if tiny else case.num_texts]
    backbone, tokenizer = load_backbone(BackboneConfig(case.model, bidirectional=case.bidirectional))
    pooling = AnchorTokenPooling(backbone.config.hidden_size, by_visible_queries=case.by_visible_queries)
    text = TextSettings(document_max_length=case.max_length)
    embedder = Embedder(backbone, tokenizer, pooling, text=text)
    result = shares_of(token_weights(embedder, [documents[row] for row in rows]))
    weights = {f"weight on {place}": value for place, value in result.weight.items()}
    return {**weights, **{f"tokens, {place}": value for place, value in result.tokens.items()}}


if __name__ == "__main__":
    main()
