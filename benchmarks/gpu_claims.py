"""Measurements of G1 to G16, in groups that share a model; `benchmarks.gpu` runs them.

Our side is the library's own code: embedder, poolings, GradCache, losses, experts, search, k-means and checkpoints.
Where a peer should compute the same, equal results are asserted before anything is timed. G3, G4 and G11 have compiled
layers, as `compile: auto` gives them to long runs, and rows with eager layers beside.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, MistralConfig, MistralModel, PreTrainedModel
from transformers.models.nomic_bert import NomicBertConfig, NomicBertModel

from benchmarks.gpu import CLAIMS, GIB, Bench, offers
from benchmarks.gpu_whole import fit, peers
from benchmarks.workloads import MeanPoolingStep, synthetic_batch
from embeddings.callbacks import DurableCheckpointIO
from embeddings.common import ContrastiveBatch, LossOutput, PaddedTokens, Representations, TokenBatch
from embeddings.common.io import atomic_path
from embeddings.common.jobs import save_array
from embeddings.inference import Encoder
from embeddings.inference.vector_folder import VectorShards
from embeddings.losses import InfoNCE, tiled_cross_entropies
from embeddings.mining import ExactSearch
from embeddings.mining.kmeans import GpuLibrary, kmeans_run
from embeddings.models import AnchorTokenPooling, Embedder, LatentAttentionPooling, LoraSettings, MeanPooling
from embeddings.models.bidirectional import make_bidirectional
from embeddings.models.compilation import compilation_line, compile_if_possible, is_compiled
from embeddings.models.lora import add_lora
from embeddings.models.moe.experts import Experts, Router
from embeddings.models.moe.rotary_moe import MoeMlp, RotaryMoeConfig, RotaryMoeModel
from embeddings.models.stand_in import sentencepiece_tokenizer, wordpiece_tokenizer
from embeddings.training import GradCache
from embeddings.training.plan import counted


class Group(NamedTuple):
    """Claims that are measured in one process.

    Attributes:
        claims: Names of the claims.
        seconds: Time limit.
        run: Measures the claims.
    """

    claims: tuple[str, ...]
    seconds: float
    run: Callable[[Bench], None]


class EmbedderStep(nn.Module):
    """The training step of a bi-encoder: the library's embedder and InfoNCE."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder, self.loss = embedder, InfoNCE(temperature=0.05)

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """The vectors of texts."""
        return Representations(self.embedder(tokens.padded()))

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        """InfoNCE of the vectors."""
        output: LossOutput = self.loss(query.vector_ND, candidate.vector_ND, batch)
        return output


def random_tokens(bench: Bench, num_texts: int, length: int, vocabulary: int = 500) -> PaddedTokens:
    """Random texts of one length, without padding."""
    ids_NL = torch.randint(5, vocabulary, (num_texts, length), generator=torch.Generator().manual_seed(0))
    all_NL = torch.ones(num_texts, length, dtype=torch.bool, device=bench.device)
    return PaddedTokens(ids_NL.to(bench.device), all_NL, all_NL)


def built(bench: Bench, kind: Any, config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A backbone with random weights on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with bench.device:
            model: PreTrainedModel = kind(config)
    finally:
        torch.set_default_dtype(before)
    return model.to(bench.device)


def both_passes(model: nn.Module, tokens: PaddedTokens) -> Callable[[], None]:
    """A forward and a backward pass over texts under bfloat16 autocast; the gradients are deleted."""

    def run() -> None:
        with torch.autocast(tokens.input_ids_NL.device.type, torch.bfloat16):
            vector_ND = model(tokens)
        vector_ND.sum().backward()
        model.zero_grad()

    return run


def compile_with(run: Callable[[], object], backbone: nn.Module) -> str:
    """Compile a backbone's layers as `compile: auto` does, by a run; returns what they are now, for a row's name."""
    compile_if_possible(backbone)
    run()
    print(compilation_line(backbone) or "the layers are not compiled", flush=True)
    # A compiler that fails leaves them eager.
    return "compiled" if is_compiled(backbone) else "eager"


def operations(action: Callable[[], object]) -> float:
    """Floating-point operations of an action's matrix products and attention."""
    with counted() as counter:
        action()
    return float(counter.get_total_flops())


class Backbone(nn.Module):
    """The peer: a backbone alone, with the mean of its last states."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, tokens: PaddedTokens) -> Tensor:
        """The mean state of each text, normalised; the texts must have no padding."""
        output = self.backbone(input_ids=tokens.input_ids_NL, attention_mask=tokens.attention_mask_NL.long())
        return F.normalize(output.last_hidden_state.float().mean(dim=1), dim=-1)


def assert_same_vectors(ours: nn.Module, peer: nn.Module, tokens: PaddedTokens) -> None:
    """Refuse to time two models whose vectors differ."""
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), peer.eval()(tokens), rtol=1e-3, atol=1e-3)
    ours.train()
    peer.train()


def decoder(bench: Bench) -> None:
    """G1, G2, G7, G8: a bidirectional decoder of Mistral's size in bfloat16."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 256}
    config = MistralConfig(**bench.pick(sizes, {}))
    backbone = built(bench, MistralModel, config, bench.pick(torch.float32, torch.bfloat16)).requires_grad_(False)
    make_bidirectional(backbone)
    tokenizer, hidden = sentencepiece_tokenizer(), config.hidden_size
    with bench.device:
        latent = LatentAttentionPooling(hidden, **bench.pick({"num_latents": 16, "num_heads": 2, "head_dim": 8}, {}))
        mean, anchor = MeanPooling(hidden), AnchorTokenPooling(hidden)
    embedders = {name: Embedder(backbone, tokenizer, each) for name, each in
                  (("mean", mean), ("latent", latent), ("anchor", anchor))}  # fmt: skip
    assert_same_vectors(embedders["mean"], Backbone(backbone), random_tokens(bench, 2, 12))
    _pooled_forwards(bench, {name: each.eval() for name, each in embedders.items()})
    capture = embedders.pop("anchor").capture
    assert capture is not None
    capture.detach()
    adapted = add_lora(backbone, LoraSettings(dropout=0.0)).to(bench.device)
    _lora_training(bench, Embedder(adapted, tokenizer, latent))


def _pooled_forwards(bench: Bench, embedders: dict[str, Embedder]) -> None:
    """G7 and G8: forwards with each pooling, in bfloat16."""

    def forward(name: str, tokens: PaddedTokens) -> Tensor:
        with torch.inference_mode(), torch.autocast(bench.device.type, torch.bfloat16):
            vector: Tensor = embedders[name](tokens)
            return vector

    for length, count in bench.pick([(24, 2)], [(512, 32), (4096, 4)]):
        tokens = random_tokens(bench, count, length)
        if torch.equal(forward("anchor", tokens), forward("mean", tokens)):
            raise RuntimeError("both poolings return the same vectors: nothing to compare")
        ratio = bench.over(partial(forward, "anchor", tokens), partial(forward, "mean", tokens))
        num_operations = operations(partial(forward, "mean", tokens))
        extra = 2.0 * count * length**2 * embedders["anchor"].hidden_size
        target = "<=1.015" if length > 512 else None
        bench.claim("G7", f"{length} tokens", ratio, 1 + extra / num_operations, target=target)
        if length <= 512:
            with_latent, without = (operations(partial(forward, name, tokens)) for name in ("latent", "mean"))
            share = bench.over(partial(forward, "latent", tokens), partial(forward, "mean", tokens))
            limit = 1 - without / with_latent
            bench.claim("G8", f"{length} tokens", 1 - 1 / share.median, limit, share)


def _lora_training(bench: Bench, embedder: Embedder) -> None:
    """G1 and G2: a mini-batch of about 16,384 tokens, and GradCache over four such mini-batches."""
    length, peer = bench.pick(16, 512), Backbone(embedder.backbone)
    embedder.train()
    texts = bench.largest(
        bench.pick([4], [32, 16, 8]), lambda n: both_passes(embedder, random_tokens(bench, n, length))()
    )
    tokens = random_tokens(bench, texts, length)
    one, sizes = both_passes(embedder, tokens), f"{texts} texts of {length} tokens"
    seconds, num_operations = bench.seconds(one), operations(one)
    ratio = bench.over(one, both_passes(peer, tokens))
    bench.claim("G1", sizes, texts * length / seconds, texts * length * bench.bf16_rate / num_operations, ratio)
    bench.row(f"G1 peak memory beside the weights, {sizes}", bench.peak_bytes(one) / GIB, "GiB", "<=120")
    step, batch = EmbedderStep(embedder), synthetic_batch(2 * texts, length, 500).to(bench.device)
    engine = GradCache(mini_batch_tokens=texts * length)
    _assert_gradcache(bench, step, engine, synthetic_batch(4, 12, 500).to(bench.device))

    def cached() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            engine.step(step, batch)
        step.zero_grad()

    def each_once() -> None:
        for _ in range(4):
            one()

    ratio = bench.over(cached, each_once)
    # The last of four mini-batches keeps its graph; with frozen weights a backward costs as much as a forward.
    bench.claim("G2", f"4 mini-batches of {sizes}", ratio, 1 + 0.5 * 3 / 4)


def _assert_gradcache(bench: Bench, step: EmbedderStep, engine: GradCache, batch: ContrastiveBatch) -> None:
    """Refuse to time GradCache if its gradient differs from the plain step's."""
    gradients = []
    for run in (lambda: engine.step(step, batch), lambda: GradCache(10**9, kept_fraction=1.0).step(step, batch)):
        run()
        gradients.append(torch.cat([p.grad.flatten().float() for p in step.parameters() if p.grad is not None]))
        step.zero_grad()
    error = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    if not error <= bench.pick(1e-4, 3e-2):
        raise RuntimeError(f"gradients differ by {error:.1e}: nothing to compare")


def experts(bench: Bench) -> None:
    """G3: XLM-R base with experts in every second layer; one such layer against a dense MLP of equal operations."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    full = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    sizes = bench.pick(sizes | {"vocab_size": 640}, full | {"vocab_size": 250_048})
    config = RotaryMoeConfig(**sizes, moe_layers=list(range(1, sizes["num_hidden_layers"], 2)), pad_token_id=1)
    backbone = built(bench, RotaryMoeModel, config)
    embedder = Embedder(backbone, wordpiece_tokenizer(), MeanPooling(config.hidden_size))
    tokens = random_tokens(bench, bench.pick(4, 512), bench.pick(16, 128))
    one, count = both_passes(embedder, tokens), tokens.input_ids_NL.numel()
    limit = count * bench.bf16_rate / operations(one)
    bench.row(f"G3 tokens/s of eager layers, {count} tokens", count / bench.seconds(one), "tokens/s")
    bench.row(f"G3 time of an eager layer over that of {CLAIMS['G3'].peer}, {count} tokens",
              _layer_ratio(bench, config, count, compiles=False), "ratio")  # fmt: skip
    name = f"{count} tokens, {compile_with(one, backbone)}"
    ratio = _layer_ratio(bench, config, count, compiles=is_compiled(backbone))
    bench.claim("G3", name, count / bench.seconds(one), limit, ratio)


def _layer_ratio(bench: Bench, config: RotaryMoeConfig, count: int, compiles: bool) -> Any:
    """Time of one sparse layer over a dense MLP as wide inside as a token's two experts together, in bfloat16.

    The states are in bfloat16, as after the library's layer norms, and each run makes new gradients.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    with bench.device:
        layer = MoeMlp(Router(hidden, 8, 2), Experts(hidden, inner, 8))
        dense = nn.Sequential(nn.Linear(hidden, 2 * inner), nn.GELU(), nn.Linear(2 * inner, hidden))
        state_NLH = torch.randn(1, count, hidden, dtype=torch.bfloat16, requires_grad=True)
    if compiles:
        layer.compile(dynamic=True)
        dense.compile(dynamic=True)

    def run(module: nn.Module) -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            output = module(state_NLH)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(torch.ones_like(output))
        module.zero_grad()
        state_NLH.grad = None

    # The first runs compile, and must not count in choosing the number of repetitions.
    for module in (layer, dense):
        run(module)
    return bench.over(partial(run, layer), partial(run, dense))


def encoder(bench: Bench) -> None:
    """G4, G6 and G11: encoders of NomicBERT's and BERT's size."""
    _encoder_training(bench)
    _memory(bench)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**bench.pick(sizes | {"vocab_size": 640}, {}), attn_implementation="sdpa")
    build = partial(built, bench, partial(BertModel, add_pooling_layer=False), config)
    model = Embedder(build(), wordpiece_tokenizer(), MeanPooling(config.hidden_size))
    length, count = bench.pick(16, 128), bench.pick(32, 16_384)
    tokens = synthetic_batch(count, length, 500).candidate
    pieces = [tokens_of(tokens, start, min(8192, count)) for start in range(0, count, 8192)]
    texts = [str(row) for row in range(count)]
    ours, peer = Encoder(model, device=bench.device, precision="bfloat16"), Backbone(build())
    run = partial(ours.encode, texts, tokenised=pieces)
    batch = random_tokens(bench, min(count, max(1, ours.mini_batch_tokens // length)), length)
    assert_same_vectors(model, peer, random_tokens(bench, 2, 12))
    model.eval()
    peer.eval()

    def alone() -> None:
        with torch.inference_mode(), torch.autocast(bench.device.type, torch.bfloat16):
            for _ in range(count // len(batch.input_ids_NL)):
                peer(batch)

    limit = count * length * bench.bf16_rate / operations(alone)
    bench.row(f"G11 tokens/s of eager layers, {count} texts", count * length / bench.seconds(run), "tokens/s")
    name = f"{count} texts, {compile_with(run, model.backbone)}"
    bench.claim("G11", name, count * length / bench.seconds(run), limit, bench.over(run, alone))


def tokens_of(tokens: TokenBatch, start: int, count: int) -> TokenBatch:
    """Consecutive texts of a batch in which all texts have one length."""
    length = int(tokens.lengths_N[0])
    part = slice(start * length, (start + count) * length)
    return TokenBatch(tokens.input_ids_T[part], tokens.pooling_mask_T[part], tokens.lengths_N[start : start + count])


def _encoder_training(bench: Bench) -> None:
    """G4: a mini-batch without GradCache, then a whole step of 16,384 pairs with it."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = NomicBertConfig(**bench.pick(sizes | {"vocab_size": 640}, {}))
    build = partial(built, bench, partial(NomicBertModel, add_pooling_layer=False), config)
    embedder, peer = Embedder(build(), wordpiece_tokenizer(), MeanPooling(config.hidden_size)), Backbone(build())
    length = bench.pick(16, 128)
    assert_same_vectors(embedder, peer, random_tokens(bench, 2, 12))
    text_counts = bench.pick([8], [512, 256])
    texts = bench.largest(text_counts, lambda n: both_passes(embedder, random_tokens(bench, n, length))())
    tokens = random_tokens(bench, texts, length)
    one, count = both_passes(embedder, tokens), texts * length
    limit = count * bench.bf16_rate / operations(one)
    pairs, step = bench.pick(16, 16_384), EmbedderStep(embedder)
    batch, engine = synthetic_batch(pairs, length, 500).to(bench.device), GradCache(mini_batch_tokens=count)
    _assert_gradcache(bench, step, engine, synthetic_batch(4, 12, 500).to(bench.device))
    bench.row(f"G4 tokens/s of eager layers, {count} tokens", count / bench.seconds(one), "tokens/s")

    def with_and_without_gradients() -> None:
        one()
        with torch.no_grad(), torch.autocast(bench.device.type, torch.bfloat16):
            embedder(tokens)

    name = f"{count} tokens, {compile_with(with_and_without_gradients, embedder.backbone)}"
    bench.claim("G4", name, count / bench.seconds(one), limit, bench.over(one, both_passes(peer, tokens)))

    def cached() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            engine.step(step, batch)
        step.zero_grad()

    bench.row(f"G4 pairs a second under GradCache, batch of {pairs}, {name}", pairs / bench.once(cached), "pairs/s")


def _memory(bench: Bench) -> None:
    """G6: peak memory of a GradCache step at two batch sizes, and of a plain step at two smaller ones."""
    length, width = bench.pick(4, 32), 384
    few, many = bench.pick((8, 16), (2048, 65_536))
    sizes = {"vocab_size": 1000, "hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": 12}
    model = built(bench, partial(BertModel, add_pooling_layer=False), BertConfig(**sizes, intermediate_size=4 * width))
    step, engine = MeanPoolingStep(model.eval()), GradCache(mini_batch_tokens=bench.pick(64, 16_384))
    engine.step(step, synthetic_batch(8, length).to(bench.device))
    peaks = [bench.peak_bytes(partial(engine.step, step, synthetic_batch(n, length).without_texts_to(bench.device)))
             for n in (few, many)]  # fmt: skip
    # The vectors of queries and documents, and their gradients.
    vector_bytes = 4 * (many - few) * width * 4
    plain = [bench.peak_bytes(partial(step.plain_step, synthetic_batch(n, length).to(bench.device)))
             for n in (few // 2, few)]  # fmt: skip
    ours_a_pair, peer_a_pair = (peaks[1] - peaks[0]) / (many - few), (plain[1] - plain[0]) / (few - few // 2)
    name, unknown = f"{few} to {many} pairs, beside their vectors and gradients", float("nan")
    bench.claim("G6", name, (peaks[1] - vector_bytes) / peaks[0] if peaks[0] else unknown, 1.0)
    bench.row(f"G6 memory of a pair over that of {CLAIMS['G6'].peer}, {few} to {many} pairs",
              ours_a_pair / peer_a_pair if peer_a_pair else unknown, "ratio")  # fmt: skip


def loss(bench: Bench) -> None:
    """G5: the library's tiled loss against the dense matrix; in bfloat16, in TF32 and in float32."""
    num_rows, width = bench.pick(128, 65_536), bench.pick(32, 768)
    target_R, scale = torch.arange(num_rows, device=bench.device), torch.tensor(20.0, device=bench.device)
    drawn = torch.randn(2, num_rows, width, generator=torch.Generator().manual_seed(0)).to(bench.device)
    row_RD, column_CD = (F.normalize(each, dim=-1).requires_grad_() for each in drawn)

    def tiled(count: int, rounds: bool) -> tuple[Tensor, ...]:
        rows, columns = [row_RD[:count]], [column_CD[:count]]
        value = tiled_cross_entropies(rows, columns, scale, target_R[:count], rounds=rounds).loss_W[0]
        return torch.autograd.grad(value, [row_RD, column_CD])

    def dense(count: int, rounds: bool) -> tuple[Tensor, ...]:
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=rounds):
            score_RC = row_RD[:count] @ column_CD[:count].T
        value = F.cross_entropy(score_RC.float() * scale, target_R[:count])
        return torch.autograd.grad(value, [row_RD, column_CD])

    def measure(name: str, rounds: bool, rate: float, limit: float, target: str | None) -> None:
        few = min(num_rows, 4096)
        for ours, expected in zip(tiled(few, rounds), dense(few, False), strict=True):
            error = float((ours - expected).norm() / expected.norm())
            if not error <= limit:
                raise RuntimeError(f"gradients differ by {error:.1e}: nothing to compare")
        count = bench.largest([num_rows // part for part in (1, 2, 4)], partial(dense, rounds=rounds))
        ratio = bench.over(partial(tiled, count, rounds), partial(dense, count, rounds))
        sizes, run = f"{num_rows} rows, {name}", partial(tiled, num_rows, rounds)
        bench.claim("G5", sizes, 1e3 * bench.seconds(run), 1e3 * 6.0 * num_rows**2 * width / rate, target=target)
        bench.row(f"G5 time over that of the dense matrix, {count} rows, {name}", ratio, "ratio")
        gradient_bytes = 2 * num_rows * width * 4
        memory = max(0, bench.peak_bytes(run) - gradient_bytes) / GIB
        bench.row(f"G5 memory beside the gradients, {sizes}", memory, "GiB", "<=0.7")

    measure("bfloat16 products", True, bench.bf16_rate, bench.pick(1e-2, 1e-3), None)
    before = torch.get_float32_matmul_precision()
    for precision in bench.pick(["highest"], ["high", "highest"]):
        torch.set_float32_matmul_precision(precision)
        try:
            is_full = precision == "highest"
            limit, target = (1e-4, "none") if is_full else (5e-3, "<=120")
            measure(f"{precision} precision", False, bench.product_rate(torch.float32), limit, target)
        finally:
            torch.set_float32_matmul_precision(before)


def search(bench: Bench) -> None:
    """G10: exact search over float16 vectors on disk, against products and top k of equal tiles in memory."""
    documents, queries, width, top_k = bench.pick((300, 20, 16, 10), (10_000_000, 131_072, 768, 200))
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        stored = write_vectors(bench, Path(folder), documents, width)
        query_QD = unit_rows(bench, queries, width, seed=1).float()
        query_QD = F.normalize(query_QD, dim=-1).cpu().numpy()
        few = VectorShards(stored.folder, min(documents, stored.shard_size), width, stored.shard_size, "float16")
        ours, expected = (ExactSearch(few, device).search(query_QD[:16], top_k) for device in (bench.device, "cpu"))
        if not np.array_equal(ours.index_QK, expected.index_QK):
            raise RuntimeError("the searches find different documents: nothing to compare")
        memory = 1 if bench.tiny else 0.7 * torch.cuda.mem_get_info()[0] / GIB
        search = ExactSearch(stored, bench.device, memory)
        # The first search reads the documents, which stay in memory.
        search.search(query_QD[:64], top_k)
        seconds = bench.seconds(lambda: search.search(query_QD, top_k), 1)
        pairs = float(documents) * queries
        limit = 1e6 / queries * 2 * pairs * width / bench.product_rate(torch.float16)
        name = f"{queries} queries, {documents} documents"
        sizes = search.sizes(queries, top_k)
        tile_DT = unit_rows(bench, sizes.tile_rows, width).T
        rounded_QD = torch.from_numpy(query_QD[: sizes.product_queries]).to(bench.device, torch.float16)
        alone = bench.seconds(lambda: (rounded_QD @ tile_DT).float().topk(top_k, dim=1))
        peer = alone * pairs / (len(rounded_QD) * tile_DT.shape[1])
        bench.claim("G10", name, 1e6 / queries * seconds, limit, seconds / peer)


def unit_rows(bench: Bench, count: int, width: int, seed: int = 0) -> Tensor:
    """Random unit vectors in float16."""
    generator = torch.Generator(bench.device).manual_seed(seed)
    drawn = torch.randn(count, width, device=bench.device, generator=generator)
    return F.normalize(drawn, dim=-1).half()


def write_vectors(bench: Bench, folder: Path, count: int, width: int) -> VectorShards:
    """Write the vectors of random documents to disk."""
    shards = VectorShards(folder, count, width, bench.pick(100, 1_000_000), "float16")
    for shard in range(shards.num_shards):
        save_array(shards.path(shard), unit_rows(bench, len(shards.rows(shard)), width, seed=2 + shard).cpu().numpy())
    return shards


def kmeans(bench: Bench) -> None:
    """G9: the library's k-means, on the GPU in torch; the peer is faiss, on a tenth of rows and clusters."""
    import faiss

    count, clusters, width, rounds = bench.pick((400, 8, 16, 2), (10_000_000, 40_000, 768, 10))
    vector_ND = np.empty((count, width), np.float32)
    for start in range(0, count, 1_000_000):
        part = vector_ND[start : start + 1_000_000]
        part[:] = F.normalize(unit_rows(bench, len(part), width, seed=start).float(), dim=-1).cpu().numpy()

    def ours(rows: int, k: int) -> None:
        gpu: GpuLibrary | None = None if bench.tiny else "torch"
        kmeans_run(vector_ND[:rows], k, num_iterations=rounds, seed=1, gpu=gpu)

    def peer(rows: int, k: int) -> None:
        options = {"seed": 1, "spherical": True, "max_points_per_centroid": -(-rows // k), "min_points_per_centroid": 1}
        faiss.Kmeans(width, k, niter=rounds, nredo=1, gpu=not bench.tiny, **options).train(vector_ND[:rows])

    few, ratio = (count // 10, clusters // 10) if not bench.tiny else (count, clusters), None
    if bench.tiny or offers()["faiss for GPUs"]:
        ratio = bench.over(partial(ours, *few), partial(peer, *few))
    else:
        bench.skip("the peer of G9", "faiss has no GPU support here")
    seconds = bench.once(partial(ours, count, clusters))
    limit = 2.0 * count * clusters * width * rounds / bench.product_rate(bench.pick(torch.float32, torch.float16))
    bench.claim("G9", f"{count} x {width}, {clusters} clusters, {rounds} iterations", seconds, limit, ratio)


def checkpoint(bench: Bench) -> None:
    """G12: how long an asynchronous checkpoint of 14.5 GB stops training, against a blocking torch.save."""
    num_bytes = bench.pick(2**16, 14_500_000_000)
    with bench.device:
        state = {f"{layer}.weight": torch.randn(num_bytes // 32 // 2, dtype=torch.bfloat16) for layer in range(32)}
    content, writes = {"global_step": 1, "state_dict": state}, DurableCheckpointIO(asynchronous=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.ckpt")
        # The first save allocates the host memory.
        writes.save_checkpoint(content, path)
        writes.wait()
        restored = writes.load_checkpoint(path)["state_dict"]
        if not all(torch.equal(restored[name], value.cpu()) for name, value in state.items()):
            raise RuntimeError("the restored state differs from the saved one: nothing to compare")
        stall = bench.once(lambda: writes.save_checkpoint(content, path))
        writes.wait()

        def peer() -> None:
            with atomic_path(Path(folder, "peer")) as temporary, open(temporary, "wb") as file:
                torch.save(content, file)

        peer_seconds = bench.once(peer)
        writes.teardown()
    host_copy = torch.empty(num_bytes // 32 // 2, dtype=torch.bfloat16, pin_memory=not bench.tiny)
    copy_seconds = 32 * bench.seconds(lambda: host_copy.copy_(state["0.weight"]))
    bench.claim("G12", f"{num_bytes / 1e9:.3g} GB", stall, copy_seconds, stall / peer_seconds)


def zero(bench: Bench) -> None:
    """G13: one update by ZeRO-2 with GradCache on one rank, against a plain update."""
    if not importlib.util.find_spec("deepspeed"):
        bench.skip("G13", "deepspeed is not installed")
        return
    from benchmarks.gpu_zero import relative_error

    with tempfile.TemporaryDirectory() as folder:
        error = relative_error(Path(folder), bench.device, 8 if bench.tiny else 64)
    bench.claim("G13", "one update", 1e6 * error, 0.1)


GROUPS = {
    "loss": Group(("G5",), 45, loss),
    "experts": Group(("G3",), 80, experts),
    "encoder": Group(("G4", "G6", "G11"), 105, encoder),
    "fit": Group(("G14",), 140, fit),
    "peers": Group(("G15", "G16"), 100, peers),
    "decoder": Group(("G1", "G2", "G7", "G8"), 110, decoder),
    "kmeans": Group(("G9",), 80, kmeans),
    "search": Group(("G10",), 80, search),
    "checkpoint": Group(("G12",), 60, checkpoint),
    "zero": Group(("G13",), 35, zero),
}
