"""Texts to vectors, in the order given, with next to no padding."""

import inspect
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from tqdm import tqdm

from embeddings.common.errors import NumericError, OptionError
from embeddings.common.mini_batches import plan_mini_batches
from embeddings.common.text import TextRole
from embeddings.common.types import TokenBatch
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference.precision import Precision, resolve_precision

if TYPE_CHECKING:
    from embeddings.models.embedder import Embedder

# Chosen so that a core's share of a mini-batch stays small, and a GPU is filled; neither is a measured optimum.
CPU_MINI_BATCH_TOKENS_PER_THREAD = 512
GPU_MINI_BATCH_TOKENS = 65536
TEXTS_PER_BLOCK = 8192


class Encoder:
    """An embedding model that turns texts into vectors.

    Texts are tokenised in blocks, sorted by length within a block, and run through the model in mini-batches of a
    token budget; vectors return to the order of the texts. A text that occurs twice in a call is computed once. The
    next block is tokenised while the current one is computed.

    Determinism: the same texts give the same bits, whatever was encoded before. Another set of texts puts a text
    beside other neighbours, which changes its vector by rounding only.

    Args:
        embedder: The model; it stays where it is unless `device` says otherwise, and its mode is left as found.
        device: Where to move the model, or None to leave it where it is.
        precision: Format of matrix products; `auto` is bfloat16 where the hardware has it. Vectors are float32.
        mini_batch_tokens: Most padded tokens of a mini-batch, or None for 512 a thread on a processor and 65,536 on
            a GPU.
        show_progress: Whether a bar with the time left is drawn on standard error.

    Raises:
        OptionError: If the precision is unknown or the token budget is not positive.
    """

    def __init__(
        self,
        embedder: "Embedder",
        *,
        device: str | torch.device | None = None,
        precision: Precision = "auto",
        mini_batch_tokens: int | None = None,
        show_progress: bool = False,
    ) -> None:
        if device is not None:
            embedder.to(device)
        self.embedder = embedder
        self.device = embedder.device
        self.dtype = resolve_precision(precision, self.device, {weight.dtype for weight in embedder.parameters()})
        if mini_batch_tokens is None:
            is_processor = self.device.type == "cpu"
            per_thread = CPU_MINI_BATCH_TOKENS_PER_THREAD * torch.get_num_threads()
            mini_batch_tokens = per_thread if is_processor else GPU_MINI_BATCH_TOKENS
        if mini_batch_tokens < 1:
            raise OptionError("mini_batch_tokens", mini_batch_tokens, "must be >= 1", "leave it out for the default")
        self.mini_batch_tokens = mini_batch_tokens
        self.show_progress = show_progress
        self._tokenizer = TextTokenizer(embedder.tokenizer, embedder.text)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        device: str | torch.device | None = None,
        precision: Precision = "auto",
        **options: Any,
    ) -> Self:
        """The encoder of a model directory or Hub id, on the first GPU where there is one.

        Args:
            model: A model directory, or the id of one on the Hub.
            device: Where to run, or None for a GPU if there is one.
            precision: Format of matrix products (see `resolve_precision`).
            options: What else the constructor takes.

        Raises:
            InputError: If the model cannot be had or is damaged.
            OptionError: If an option is impossible.
        """
        from embeddings.models.embedder import Embedder

        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        place = torch.device(device)
        embedder = Embedder.from_pretrained(model, device=place)
        weights = {weight.dtype for weight in embedder.parameters()}
        if resolve_precision(precision, place) == torch.float32 or (place.type == "cpu" and torch.float16 in weights):
            # A checkpoint in half precision that would have to be emulated here.
            embedder.float()
        return cls(embedder, precision=precision, **options)

    @property
    def embedding_dim(self) -> int:
        """Width of the vectors, D."""
        return int(self.embedder.embedding_dim)

    def encode(
        self,
        texts: Sequence[str],
        prompt_name: str | None = None,
        context: Any = None,
        role: TextRole | None = None,
    ) -> npt.NDArray[np.float32]:
        """The vectors of `texts`, in their order.

        Args:
            texts: Any number of texts, empty ones too.
            prompt_name: Which of the model's prompts goes before each text; None for the one named like the role, or
                none where the model has no such prompt.
            context: What a contextual model takes beside the texts; others refuse it.
            role: Whose length limit holds; None for `query` under the prompt of that name, else `document`.

        Returns:
            (N, D) float32; (0, D) for no texts.

        Raises:
            OptionError: If the model has no such prompt, or takes no context.
            NumericError: If a vector is not finite.
        """
        if isinstance(texts, str):
            raise OptionError("texts", texts[:40], "must be a list of texts", "put the text in a list")
        role = role or ("query" if prompt_name == "query" else "document")
        prompt = self._prompt(prompt_name, role)
        extra = self._context_arguments(context)
        row_of_text = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        unique = list(row_of_text)
        vector_ND = np.empty((len(unique), self.embedding_dim), np.float32)
        bar = tqdm(desc=f"encode {role}", unit="token", unit_scale=True, disable=not self.show_progress)
        with self._inference(), bar:
            for start, tokens in self._tokenised_blocks(unique, role, prompt):
                # The tokens still to come are estimated from those seen.
                seen = start + len(tokens)
                bar.total = round((bar.n + tokens.num_tokens) * len(unique) / seen)
                vector_ND[start:seen] = self._encode_block(tokens, extra, bar)
        _check_finite(vector_ND, unique)
        if len(unique) == len(texts):
            return vector_ND
        return vector_ND[np.array([row_of_text[text] for text in texts], dtype=np.int64)]

    def _prompt(self, prompt_name: str | None, role: TextRole) -> str:
        prompts = self.embedder.text.prompts
        if prompt_name is None:
            return prompts.get(role, "")
        if prompt_name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise OptionError("prompt_name", prompt_name, f"must name a prompt of the model ({known})", "leave it out")
        return prompts[prompt_name]

    def _context_arguments(self, context: Any) -> dict[str, Any]:
        if context is None:
            return {}
        if "context" not in inspect.signature(self.embedder.forward).parameters:
            raise OptionError("context", type(context).__name__, "must be left out: this model takes none", "drop it")
        return {"context": context}

    def _tokenised_blocks(self, texts: list[str], role: TextRole, prompt: str) -> Iterator[tuple[int, TokenBatch]]:
        """The first row and the tokens of each block; the next block is made while one is used."""
        starts = range(0, len(texts), TEXTS_PER_BLOCK)

        def tokenise(start: int) -> TokenBatch:
            return self._tokenizer(texts[start : start + TEXTS_PER_BLOCK], role, prompt)

        with ThreadPoolExecutor(max_workers=1) as pool:
            pending = pool.submit(tokenise, 0) if starts else None
            for start in starts:
                assert pending is not None
                tokens = pending.result()
                if start + TEXTS_PER_BLOCK < len(texts):
                    pending = pool.submit(tokenise, start + TEXTS_PER_BLOCK)
                yield start, tokens

    def _encode_block(self, tokens: TokenBatch, extra: dict[str, Any], bar: "tqdm[Any]") -> npt.NDArray[np.float32]:
        plan = plan_mini_batches(tokens.lengths_N, self.mini_batch_tokens)
        on_device = tokens.to(self.device, non_blocking=True)
        vectors: list[Tensor] = []
        for rows_n in plan:
            padded = on_device.padded(rows_n, self.embedder.pad_token_id)
            vectors.append(self.embedder(padded, **extra).float())
            bar.update(int(tokens.lengths_N[rows_n].sum()))
        # One copy a block: a copy a mini-batch would make the GPU wait each time.
        sorted_ND = torch.cat(vectors).cpu()
        vector_ND = torch.empty_like(sorted_ND)
        vector_ND[torch.cat(plan)] = sorted_ND
        return vector_ND.numpy()

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Evaluation mode without gradients, in the chosen precision; every module's mode is restored."""
        modes = [(module, module.training) for module in self.embedder.modules()]
        self.embedder.eval()
        low = self.dtype != torch.float32
        try:
            with torch.inference_mode(), torch.autocast(self.device.type, self.dtype if low else None, enabled=low):
                yield
        finally:
            _restore(modes)


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _check_finite(vector_ND: npt.NDArray[np.float32], texts: list[str]) -> None:
    bad = np.flatnonzero(~np.isfinite(vector_ND.sum(axis=1)))
    if bad.size:
        raise NumericError(
            f"{bad.size} of {len(texts)} vectors are not finite, the first of text {texts[int(bad[0])][:60]!r}; "
            "encode with precision float32, or check the model's weights"
        )
