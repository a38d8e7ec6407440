"""The encoder, which turns texts into vectors in input order with little padding, and the context of a call."""

import hashlib
import json
import platform
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Self, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common.errors import InputError, NumericError, OptionError, require_minimum
from embeddings.common.io import atomic_path, check_manifest, file_sha256, lists_of, load_array
from embeddings.common.jobs import save_array
from embeddings.common.progress import progress_bar
from embeddings.common.text import PromptChoice, TextRole
from embeddings.common.types import TokenBatch, plan_mini_batches, take_texts
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference.precision import HalfProducts, Int8Products, Precision, Products, has_instructions
from embeddings.models.compilation import COMPILED_TEXTS, compile_if_possible, is_compiled
from embeddings.models.contextual import load_embedder
from embeddings.models.embedder import Embedder
from embeddings.models.model_card import PushedModel, push_embedder, push_to_hub
from embeddings.models.moe.experts import shared_casts
from embeddings.models.pooling import evaluating

Vectors = npt.NDArray[np.float32]
CPU_MINI_BATCH_TOKENS_PER_THREAD = 512
GPU_MINI_BATCH_TOKENS = 65536
TEXTS_PER_BLOCK = 8192
CONTEXT_FILE = "context.npy"
_X86 = {"x86_64", "AMD64"}


def resolve_precision(precision: Precision, device: torch.device, weights: Collection[torch.dtype] = ()) -> torch.dtype:
    """The dtype of matrix products: `auto` is bfloat16 where it is native, else float32; all-low weights decide it.

    float16 is not offered: a CPU emulates it, a hundred times slower, and some models overflow in it.
    """
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise OptionError("precision", precision, f"must be one of {known}", "leave it out to let the hardware decide")
    requested: torch.dtype | None = None if precision == "auto" else getattr(torch, precision)
    if requested == torch.int8 and device.type != "cpu":
        raise OptionError("precision", precision, f"runs on a CPU, not on {device.type}", "use bfloat16 there")
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if requested == torch.int8 and not (platform.machine() in _X86 and has_onednn):
        raise OptionError("precision", precision, "needs an x86 CPU and a torch build with oneDNN", "use float32 here")
    if len(set(weights)) == 1 and not {torch.float32, torch.float64} & set(weights):
        (only,) = set(weights)
        name = str(only).removeprefix("torch.")
        if only == torch.float16 and device.type == "cpu":
            raise OptionError("model weights", name, "must not be float16 on a CPU", "load them as float32")
        if requested not in (None, only):
            raise OptionError("precision", precision, f"must match the weights, {name}", "load them as float32")
        return only
    if requested is not None:
        return requested
    return torch.bfloat16 if has_native_bfloat16(device) else torch.float32


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether `device` multiplies bfloat16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and has_instructions("avx512_bf16", "amx_bf16", "bf16")


def unit_rows(vector_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vectors scaled to unit length, so that inner products are cosines; a zero vector stays zero."""
    norm_N1 = np.linalg.norm(vector_ND, axis=1, keepdims=True)
    out_ND = np.zeros_like(vector_ND, subok=False)
    return np.asarray(np.divide(vector_ND, norm_N1, out=out_ND, where=norm_N1 > 0))


def text_blocks(texts: Sequence[str], repeated: Collection[int] | None = None) -> Iterator[list[str]]:
    """The unique texts in the blocks that are tokenised at once; `repeated` as in `_repeated_hashes`."""
    repeated = _repeated_hashes(texts)[0] if repeated is None else repeated
    return lists_of(_unique(texts, repeated), TEXTS_PER_BLOCK)


def _repeated_hashes(texts: Sequence[str]) -> tuple[set[int], int]:
    """The hashes that occur more than once, and the number of different hashes; texts need not be in memory."""
    hash_N = np.fromiter(map(hash, texts), np.int64, len(texts))
    hash_N.sort()
    again_N = hash_N[1:][hash_N[1:] == hash_N[:-1]]
    return set(again_N.tolist()), len(hash_N) - len(again_N)


def _unique(texts: Iterable[str], repeated: Collection[int]) -> Iterator[str]:
    seen = set[str]()
    for text in texts:
        if hash(text) in repeated:
            if text in seen:
                continue
            seen.add(text)
        yield text


@dataclass(frozen=True, eq=False)
class Context:
    """Context documents, encoded by a contextual model's first stage: ids, a hash of ids and texts, vectors (M, H)."""

    document_ids: tuple[str, ...]
    documents_sha256: str
    seed: int
    vector_MH: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.document_ids)

    def summary(self) -> dict[str, Any]:
        """The identity of the context, as plain types."""
        return {"num_documents": len(self), "seed": self.seed, "documents_sha256": self.documents_sha256}

    def manifest_fields(self) -> dict[str, Any]:
        return {"context": self.summary(), "context_document_ids": list(self.document_ids)}

    def write(self, folder: Path) -> Self:
        """Write the vectors to `folder`, or return those that a killed run has written there."""
        if not (folder / CONTEXT_FILE).exists():
            with atomic_path(folder / CONTEXT_FILE) as temporary:
                save_array(temporary, self.vector_MH)
        return replace(self, vector_MH=np.load(folder / CONTEXT_FILE))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The context that a finished folder was encoded with, if any."""
        fields = check_manifest(folder, {})
        if fields.get("context") is None:
            return None
        path = folder / CONTEXT_FILE
        if not path.is_file() or file_sha256(path) != fields["context_vectors_sha256"]:
            raise InputError(str(path), "is not the context of these vectors", "encode again")
        summary = fields["context"]
        ids = tuple(fields["context_document_ids"])
        return cls(ids, summary["documents_sha256"], summary["seed"], load_array(path, "encode again"))


class Encoder:
    """An embedding model that turns texts into vectors.

    Texts are encoded in mini-batches of similar length, a repeated text once. Other texts in the mini-batch, another
    budget or number of threads change a vector only by rounding. Threads may share an encoder; they take turns.

    Args:
        embedder: The model; its training or evaluation mode is restored after each call.
        device: Device to move the model to, or None to leave it on its device.
        precision: Precision of matrix products; `auto` is bfloat16 if the hardware supports it. Vectors are float32.
            int8 does not see later changes of the model's weights, nor does a CPU's bfloat16 after `from_pretrained`.
        mini_batch_tokens: Maximum padded tokens of a mini-batch, or None for 512 per CPU thread or 65,536 on a GPU.
        show_progress: Whether to draw a progress bar on standard error.
        dimensions: Number of leading dimensions of each vector to keep, normalised again if the model returns unit
            vectors; None for all. For models trained for it (see `MatryoshkaInfoNCE`).

    Attributes:
        origin: The model directory or Hub id that the model was read from, or None.
    """

    def __init__(
        self,
        embedder: Embedder,
        *,
        device: str | torch.device | None = None,
        precision: Precision = "auto",
        mini_batch_tokens: int | None = None,
        show_progress: bool = False,
        dimensions: int | None = None,
    ) -> None:
        if dimensions is not None:
            check_widths(embedder, [dimensions])
        if device is not None:
            embedder.to(device)
        self.embedder = embedder
        self.device = embedder.device
        self.dtype = resolve_precision(precision, self.device, {weight.dtype for weight in embedder.parameters()})
        self._products: Products | None = Int8Products(embedder) if self.dtype == torch.int8 else None
        if mini_batch_tokens is None:
            is_cpu = self.device.type == "cpu"
            per_thread = CPU_MINI_BATCH_TOKENS_PER_THREAD * torch.get_num_threads()
            mini_batch_tokens = per_thread if is_cpu else GPU_MINI_BATCH_TOKENS
        require_minimum("mini_batch_tokens", mini_batch_tokens, 1)
        self.mini_batch_tokens = mini_batch_tokens
        self.show_progress = show_progress
        self.dimensions = dimensions
        self._tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)
        # A call sets the tokenizer's length, and modes and products of the model, which threads share.
        self._tokenizing, self._computing = Lock(), RLock()
        self.origin: str | None = None

    def with_mini_batch_tokens(self, mini_batch_tokens: int) -> Self:
        """A copy with another token budget, on the same model; the budget affects rounding."""
        other = copy(self)
        other.mini_batch_tokens = mini_batch_tokens
        return other

    def compile_for(self, num_texts: int) -> None:
        """Compile the model's layers if that pays for a command of this many texts: three million on a CUDA GPU."""
        backbone = self.embedder.backbone
        if self.device.type == "cuda" and num_texts >= COMPILED_TEXTS and not is_compiled(backbone):
            compile_if_possible(backbone)

    @classmethod
    def from_pretrained(
        cls, model: str, *, device: str | torch.device | None = None, precision: Precision = "auto", **options: Any
    ) -> Self:
        """Load the encoder of a model directory or Hub id on `device` (None: the first GPU, else the CPU)."""
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        encoder = cls.from_embedder(load_embedder(model, device=device), precision, **options)
        if device.type == "cpu" and encoder.is_half:
            encoder._products = HalfProducts(encoder.embedder, encoder.dtype)
        encoder.origin = model
        return encoder

    @classmethod
    def from_embedder(cls, embedder: Embedder, precision: Precision = "auto", **options: Any) -> Self:
        """The encoder of a model on its device; its weights become float32 where that is needed or faster."""
        dtypes = {weight.dtype for weight in embedder.parameters()}
        exact = resolve_precision(precision, embedder.device) in (torch.float32, torch.int8)
        if exact or (embedder.device.type == "cpu" and torch.float16 in dtypes):
            # Half precision would be emulated here.
            embedder.float()
        return cls(embedder, precision=precision, **options)

    def push_to_hub(self, name: str, **options: Any) -> PushedModel:
        """Upload the model's directory, or the model with a model card, to the Hub repository `OWNER/NAME`."""
        if self.origin is not None and Path(self.origin).expanduser().is_dir():
            return push_to_hub(self.origin, name, **options)
        return push_embedder(self.embedder, name, **options)

    @property
    def is_half(self) -> bool:
        """Whether matrix products are in half precision."""
        return self.dtype not in (torch.float32, torch.int8)

    @property
    def embedding_dim(self) -> int:
        """Width of the vectors, D."""
        return int(self.embedder.embedding_dim) if self.dimensions is None else self.dimensions

    @property
    def num_context(self) -> int:
        """Maximum number of context documents; 0 for a model that is not contextual."""
        return int(getattr(self.embedder, "num_context", 0))

    def encode(
        self,
        texts: Sequence[str],
        prompt_name: PromptChoice = None,
        context: Context | Sequence[str] | None = None,
        role: TextRole | None = None,
        prompt: str | None = None,
        tokenised: Iterable[TokenBatch] | None = None,
    ) -> npt.NDArray[np.float32]:
        """The vectors of `texts`, in input order, (N, D) float32.

        Args:
            texts: Any number of texts, which may be empty.
            prompt_name: Name of the model's prompt to put before each text, or a literal one (`GivenPrompt`); None for
                the prompt named like the role, if the model has it. Without a role, the model's default prompt precedes
                it.
            context: For a contextual model, the result of `choose_context`, or documents, which each call encodes.
            role: Role whose length limit is used; None for `query` with the prompt of that name, else `document`.
            prompt: A literal prompt instead of one of the model's; the empty text for no prompt.
            tokenised: The tokens of each of the `text_blocks`, prompt included, if they were computed in advance.
        """
        blocks = self.encode_blocks(texts, prompt_name, context=context, role=role, prompt=prompt, tokenised=tokenised)
        return _joined(blocks, len(texts), self.embedding_dim)

    def encode_blocks(
        self,
        texts: Sequence[str],
        prompt_name: PromptChoice = None,
        context: Context | Sequence[str] | None = None,
        role: TextRole | None = None,
        prompt: str | None = None,
        tokenised: Iterable[TokenBatch] | None = None,
    ) -> Iterator[Vectors]:
        """The rows that `encode` returns, in consecutive arrays of at most 8,192, for vectors that need not be kept.

        The arguments are those of `encode`. Only the vectors of repeated texts stay in memory.
        """
        if prompt_name is None and role is None:
            prompt_name, role = self.embedder.text.default_prompt_name, "document"
        role = role or ("query" if prompt_name == "query" else "document")
        prompt = self.embedder.text.prompt(prompt_name, role) if prompt is None else prompt
        require_list("texts", texts)
        self.compile_for(len(texts))
        compute = partial(self._vectors, context_MH=self._context_vectors(context))
        extra = int(getattr(self.embedder, "num_extra_tokens", 0))
        tokens = partial(self._blocks_ahead, texts, role, prompt) if tokenised is None else lambda _: tokenised
        return self._computed(texts, tokens, self.embedding_dim, compute, f"encode {role}", extra)

    def encode_query(self, texts: Sequence[str], context: Context | Sequence[str] | None = None) -> Vectors:
        """Encode queries, with the model's `query` prompt and length limit."""
        return self.encode(texts, context=context, role="query")

    def encode_document(self, texts: Sequence[str], context: Context | Sequence[str] | None = None) -> Vectors:
        """Encode documents, with the model's `document` prompt and length limit."""
        return self.encode(texts, context=context, role="document")

    def similarity(self, query_ND: Vectors, document_MD: Vectors) -> Vectors:
        """The score of each query with each document, (N, M) float32: the cosine, or the model's inner product."""
        return self.comparable(query_ND) @ self.comparable(document_MD).T

    def comparable(self, vector_ND: Vectors) -> Vectors:
        """Vectors whose inner products are the model's scores, (N, D): of unit length (zero stays zero), or as is."""
        return vector_ND if self.embedder.compares_lengths else unit_rows(vector_ND)

    def encode_context(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """The first-stage vectors of context documents, with the model's `document` prompt, (M, H) float32."""
        require_list("context", texts)
        self.require_context()
        model: Any = self.embedder
        tokens = partial(self._blocks_ahead, texts, "document", model.text.prompt(None, "document"))
        blocks = self._computed(texts, tokens, model.context_size, model.embed_context, "encode context")
        return _joined(blocks, len(texts), model.context_size)

    def require_context(self) -> None:
        if self.num_context == 0:
            raise OptionError("context", "a context", "must be left out: the model is not contextual", "drop it")

    def _computed(
        self,
        texts: Sequence[str],
        tokens: Callable[[Collection[int]], Iterable[TokenBatch]],
        width: int,
        compute: Callable[[TokenBatch], Tensor],
        title: str,
        extra_tokens: int = 0,
    ) -> Iterator[Vectors]:
        """Apply `compute` to each unique text; the vectors in input order, (n, `width`) float32 for n texts each.

        `tokens` returns the tokens of the `text_blocks`, given the hashes of repeated texts.
        """
        repeated, num_unique = _repeated_hashes(texts)
        computed = self._computed_once(tokens(repeated), num_unique, compute, title, extra_tokens)
        waiting_nD, kept = np.empty((0, width), np.float32), dict[str, Vectors]()
        with closing(computed):
            for block in lists_of(texts, TEXTS_PER_BLOCK):
                new = [text for text in dict.fromkeys(block) if text not in kept] if repeated else block
                while len(waiting_nD) < len(new):
                    waiting_nD = np.concatenate([waiting_nD, next(computed)])
                vector_nD, waiting_nD = waiting_nD[: len(new)], waiting_nD[len(new) :]
                self._check_finite(vector_nD, new)
                if len(new) == len(block):
                    yield vector_nD
                else:
                    of_new = dict(zip(new, vector_nD, strict=True))
                    yield np.stack([of_new[text] if text in of_new else kept[text] for text in block])
                if repeated:
                    # A copy: a view would keep the whole block.
                    rows = zip(new, vector_nD, strict=True)
                    kept.update((text, vector_D.copy()) for text, vector_D in rows if hash(text) in repeated)

    def _computed_once(
        self,
        blocks: Iterable[TokenBatch],
        num_texts: int,
        compute: Callable[[TokenBatch], Tensor],
        title: str,
        extra_tokens: int,
    ) -> Generator[Vectors, None, None]:
        bar, done = progress_bar(None, title, "token", unit_scale=True, disable=not self.show_progress), 0
        with bar:
            for tokens in blocks:
                done += len(tokens)
                # The remaining tokens are estimated from those seen.
                bar.total = round((bar.n + tokens.num_tokens) * num_texts / done)
                # Not around the loop: the caller's code between two blocks must keep its own modes.
                with self._computing, self._inference():
                    vector_nD = self._encode_block(tokens, compute, bar, extra_tokens)
                yield vector_nD

    def _blocks_ahead(
        self, texts: Sequence[str], role: TextRole, prompt: str, repeated: Collection[int]
    ) -> Iterator[TokenBatch]:
        """The tokens of blocks of texts; a thread tokenises the next block while one is used."""
        if not len(texts):  # an array has no truth value
            return
        blocks = text_blocks(texts, repeated)
        with ThreadPoolExecutor(max_workers=1) as pool:
            pending = pool.submit(self._tokenise, next(blocks), role, prompt)
            for block in blocks:
                tokens = pending.result()
                pending = pool.submit(self._tokenise, block, role, prompt)
                yield tokens
        # Without the thread, since the caller may leave this generator to Python's clean-up, which swallows an exit.
        yield pending.result()

    def _tokenise(self, texts: list[str], role: TextRole, prompt: str) -> TokenBatch:
        with self._tokenizing:
            return self._tokenizer(texts, role, prompt)

    def _vectors(self, tokens: TokenBatch, context_MH: Tensor | None) -> Tensor:
        """The vectors of a mini-batch, (n, D) float32."""
        arguments = {} if context_MH is None else {"context": context_MH}
        vector_nD: Tensor = self.embedder(tokens, **arguments).float()
        if self.dimensions is None:
            return vector_nD
        vector_nD = vector_nD[:, : self.dimensions]
        return F.normalize(vector_nD, dim=-1) if self.embedder.normalize else vector_nD

    def _context_vectors(self, context: Context | Sequence[str] | None) -> Tensor | None:
        if context is None:
            return None
        self.require_context()
        if not 0 < len(context) <= self.num_context:
            rule = f"must have from 1 to the model's {self.num_context} documents"
            raise OptionError("context", f"{len(context)} documents", rule, "leave it out for no context")
        vectors = context.vector_MH if isinstance(context, Context) else self.encode_context(context)
        # A copy: a memory-mapped array is read-only, which torch does not support.
        return torch.from_numpy(np.array(vectors, dtype=np.float32)).to(self.device)

    def _encode_block(
        self, tokens: TokenBatch, compute: Callable[[TokenBatch], Tensor], bar: "tqdm[Any]", extra_tokens: int
    ) -> npt.NDArray[np.float32]:
        plan = plan_mini_batches(tokens.lengths_N + extra_tokens, self.mini_batch_tokens)
        on_device = tokens.moved(self.device)
        vectors: list[Tensor] = []
        for rows_n in plan:
            vectors.append(compute(take_texts(on_device, rows_n)).float())
            bar.update(int(tokens.lengths_N[rows_n].sum()))
        # One copy per block: a copy per mini-batch would synchronise the GPU each time.
        sorted_ND = torch.cat(vectors).cpu()
        vector_ND = torch.empty_like(sorted_ND)
        vector_ND[torch.cat(plan)] = sorted_ND
        return vector_ND.numpy()

    def _check_finite(self, vector_ND: npt.NDArray[np.float32], texts: list[str]) -> None:
        bad = np.flatnonzero(~np.isfinite(vector_ND.sum(axis=1)))
        if not bad.size:
            return
        # In a model read from files, a weight that is not finite is a fault of the files; else training diverged.
        for name, weight in self.embedder.named_parameters() if self.origin is not None else ():
            if not bool(torch.isfinite(weight).all()):
                raise InputError(str(self.origin), f"the weight {name} is not finite", "use another copy of the model")
        raise NumericError(
            f"{bad.size} of {len(texts)} vectors are not finite, the first of text {texts[int(bad[0])][:60]!r}; "
            "encode with precision float32, or check the model's weights"
        )

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Evaluation mode without gradients, in the chosen precision; the mode of every module is restored."""
        low = self.is_half
        products = nullcontext() if self._products is None else self._products.on()
        # In inference mode autocast would cast the weights in each mini-batch, and weights that FSDP2 gathers in it
        # cannot be trained afterwards.
        no_gradients = torch.no_grad() if low or hasattr(self.embedder, "unshard") else torch.inference_mode()
        autocast = torch.autocast(self.device.type, self.dtype if low else None, enabled=low)
        with evaluating(self.embedder), no_gradients, products, autocast, shared_casts():
            yield


def _joined(blocks: Iterable[Vectors], num_rows: int, width: int) -> Vectors:
    vector_ND, start = np.empty((num_rows, width), np.float32), 0
    for block_nD in blocks:
        vector_ND[start : start + len(block_nD)] = block_nD
        start += len(block_nD)
    return vector_ND


def check_widths(model: Encoder | Embedder, widths: Sequence[int]) -> None:
    """Refuse an empty list of widths, and one that the model's vectors cannot be truncated to."""
    if not widths or not all(1 <= width <= model.embedding_dim for width in widths):
        rule = f"must be from 1 to {model.embedding_dim}, the width of the model's vectors"
        raise OptionError("dimensions", widths[0] if len(widths) == 1 else list(widths), rule, "leave it out for all")


def require_list(name: str, texts: object) -> None:
    if isinstance(texts, str):
        raise OptionError(name, texts[:40], "must be a list of texts", "put the text in a list")


# Config fields that do not affect vectors: the origin, and settings that each process chooses.
IRRELEVANT_FIELDS = (
    *("_name_or_path", "_attn_implementation", "_experts_implementation", "architectures", "auto_map"),
    *("dtype", "torch_dtype", "transformers_version", "use_cache"),
)
# Tokenizer state of the last call: the encoder sets it in each call.
_CALL_STATE = ("truncation", "padding")


def model_fields(encoder: Encoder) -> dict[str, str]:
    """What determines a model's vectors, for manifests."""
    return {"model_sha256": embedder_sha256(encoder), "precision": str(encoder.dtype).removeprefix("torch.")}


def embedder_sha256(encoder: Encoder) -> str:
    """A hash of everything that affects a model's vectors, except its dtype."""
    embedder = encoder.embedder
    pooling = {"pooling": embedder.pooling.arguments(), "normalize": embedder.normalize}
    pooling |= {"similarity": "dot"} if embedder.compares_lengths else {}
    return module_sha256(embedder, embedder.tokenizer, {**pooling, "text": embedder.text.to_dict()})


def module_sha256(module: nn.Module, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> str:
    """A hash of a module's structure, configs, weights (not their dtype), tokenizer and `settings`."""
    fields = {**settings, "configs": dict(_configs(module)), "tokenizer": _tokenizer_fields(tokenizer)}
    digest = hashlib.sha256(repr(module).encode())
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        numbers = tensor.detach().cpu()
        if numbers.is_floating_point():
            numbers = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
        digest.update(f"{name} {numbers.dtype} {tuple(numbers.shape)}".encode())
        digest.update(numbers.contiguous().view(-1).view(dtype=torch.uint8).numpy())
    return digest.hexdigest()


def _configs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The configs of all transformers models in a module, and of their adapters, by module name."""
    for name, child in module.named_modules():
        adapters = getattr(child, "peft_config", None)
        if isinstance(adapters, dict):
            yield f"{name} adapters", {key: (config.lora_alpha, config.use_rslora) for key, config in adapters.items()}
        if isinstance(child, PreTrainedModel):
            fields = child.config.to_dict()
            yield name, {key: value for key, value in fields.items() if key not in IRRELEVANT_FIELDS}


def _tokenizer_fields(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    fields: dict[str, Any] = {"vocabulary": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        steps = json.loads(backend.to_str())
        fields["steps"] = {key: value for key, value in steps.items() if key not in _CALL_STATE}
    if tokenizer.truncation_side != "right":
        fields["truncation_side"] = tokenizer.truncation_side
    return fields
