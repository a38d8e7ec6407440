"""Tokenisation of texts with their prompts, and collation of examples into contrastive batches."""

import copy
import math
from collections.abc import Callable, Sequence
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embeddings.common.errors import OptionError
from embeddings.common.io import text_hash
from embeddings.common.random import derive_seed
from embeddings.common.text import TextRole, TextSettings, canonical, in_context_prompt
from embeddings.common.types import ContrastiveBatch, TokenBatch
from embeddings.data.records import Example

# Limit of the cache of checked prompts: with in-context examples, every query has a different prompt.
MAX_CHECKED_PROMPTS = 10_000


class TokenSpan(NamedTuple):
    """A token and its character range in prompt + text; the range of an added token is empty."""

    token: str
    start: int
    end: int
    is_special: bool


class TextTokenizer:
    """Tokenises prompt and text as one string and marks the tokens that enter the pooling.

    A token belongs to the prompt if its characters end at or before the end of the prompt, so a word token with the
    space before it (`▁how`, `Ġhow`) is text. With a prompt, pooling excludes its tokens and the special tokens before
    them (`[CLS]`, `<s>`), as NV-Embed does; without one, or with `pool_prompt`, every token is pooled. Special tokens
    after the text (`[SEP]`, `</s>`) and the suffix survive truncation and are pooled. If truncation leaves no token of
    the text, they are pooled, or else the last token. Other rules: see `TextSettings.pooling_rule`.

    Args:
        tokenizer: A fast tokenizer, which is copied. A text that is too long loses its end, or its start, with the
            prompt, if the tokenizer's `truncation_side` is `left`.
        settings: Lengths, prompts and special tokens.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, §4 (Eq. 2); the released `modeling_nvembed.py`. Differs: the
        release tokenises the instruction separately to count its tokens, and appends EOS before truncation, which can
        remove it. The rule `instruction_count` does the same.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: TextSettings) -> None:
        self.settings = settings
        self._backend = copied_backend(tokenizer)
        probe = self._backend.encode("a")
        self._num_trailing = sum(takewhile(bool, reversed(probe.special_tokens_mask)))
        eos = tokenizer.eos_token_id
        if settings.append_eos and eos is None:
            raise OptionError("data.text.append_eos", True, "needs a tokenizer with an eos_token", "set it to false")
        self._appended = suffix_ids(self._backend, settings.suffix)
        if settings.append_eos and probe.ids[-1:] != [eos]:
            self._appended += [eos]
        # Under this rule the appended tokens are part of the text, so truncation may remove them.
        self._num_reserved = 0 if settings.pooling_rule == "instruction_count" else len(self._appended)
        special = (eos, tokenizer.sep_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        self._empty_text_ids = [token for token in special if token is not None][:1]
        self._special_ids = set(tokenizer.all_special_ids)
        self._truncation_side = tokenizer.truncation_side
        self._colon = self._backend.token_to_id(":")
        if settings.pooling_rule == "after_colon" and self._colon is None:
            raise OptionError("data.text.pooling_rule", "after_colon", "needs a tokenizer with a token ':'", "drop it")
        self._checked_prompts: set[tuple[str, int]] = set()
        self._prompt_lengths: dict[str, int] = {}

    def __call__(self, texts: Sequence[str], role: TextRole, prompts: str | Sequence[str] | None = None) -> TokenBatch:
        """Tokenise N texts; a text without any token becomes one end-of-sequence token.

        Args:
            texts: Texts without their prompts.
            role: Determines the length limit and the default prompt.
            prompts: One prompt for all texts, or one for each text; None for the prompt of this role in the settings.
        """
        text_prompts = self._prompts(len(texts), role, prompts)
        joined = [prompt + text for prompt, text in zip(text_prompts, texts, strict=True)]
        needs_offsets = self.settings.pooling_rule in (None, "exact") and not self.settings.pool_prompt
        if needs_offsets and (any(text_prompts) or not self.settings.pool_start):
            encodings = self._backend.encode_batch(joined)
        else:
            # The same tokens without offsets, a quarter faster.
            encodings = self._backend.encode_batch_fast(joined)
        firsts = [self._first_pooled(*pair) for pair in zip(encodings, text_prompts, strict=True)]
        limit = self.settings.max_length(role)
        return _token_batch([(one.ids + self._appended)[:limit] or self._empty_text_ids for one in encodings], firsts)

    def spans(
        self, texts: Sequence[str], role: TextRole, prompts: str | Sequence[str] | None = None
    ) -> list[list[TokenSpan]]:
        """The tokens of each text with their character ranges; arguments and tokens as in `__call__`."""
        text_prompts = self._prompts(len(texts), role, prompts)
        joined = [prompt + text for prompt, text in zip(text_prompts, texts, strict=True)]
        encodings = self._backend.encode_batch(joined)
        return [self._spans_of(encoding)[: self.settings.max_length(role)] for encoding in encodings]

    def _prompts(self, num_texts: int, role: TextRole, prompts: str | Sequence[str] | None) -> list[str]:
        """The checked prompt of each text; also sets the truncation length of the role."""
        if prompts is None:
            prompts = self.settings.prompts.get(role, "")
        text_prompts = [prompts] * num_texts if isinstance(prompts, str) else list(prompts)
        if len(self._checked_prompts) > MAX_CHECKED_PROMPTS:
            self._checked_prompts.clear()
            self._prompt_lengths.clear()
        for prompt in set(text_prompts):
            self.check_prompt(prompt, role)
        limit = self.settings.max_length(role) - self._num_reserved
        self._backend.enable_truncation(limit, direction=self._truncation_side)
        return text_prompts

    def _spans_of(self, encoding: Encoding) -> list[TokenSpan]:
        rows = zip(encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True)
        spans = [TokenSpan(token, start, end, bool(special)) for token, (start, end), special in rows]
        added = self._appended if encoding.ids or self._appended else self._empty_text_ids
        return spans + [TokenSpan(str(self._backend.id_to_token(token)), 0, 0, True) for token in added]

    def _first_pooled(self, encoding: Encoding, prompt: str) -> int:
        """Index of the first pooled token; all later tokens are pooled."""
        if self.settings.pool_prompt:
            return 0
        if self.settings.pooling_rule == "after_colon":
            return encoding.ids.index(self._colon) + 1 if self._colon in encoding.ids else 0
        if self.settings.pooling_rule in ("prompt_length", "instruction_count"):
            return self._prompt_lengths[prompt] if prompt else 0
        if not prompt and self.settings.pool_start:
            return 0
        end_of_text = len(encoding) - self._num_trailing
        spans, prompt_end = encoding.offsets, len(prompt)
        # Special tokens before the text cover no characters: their spans end at 0.
        return next((index for index in range(end_of_text) if spans[index][1] > prompt_end), end_of_text)

    def check_prompt(self, prompt: str, role: TextRole) -> None:
        """Check that a prompt leaves room for at least one token of the text."""
        limit = self.settings.max_length(role)
        if not prompt or (prompt, limit) in self._checked_prompts:
            return
        self._backend.no_truncation()
        if self.settings.pooling_rule == "prompt_length":
            ids = self._backend.encode(prompt).ids + self._appended
            self._prompt_lengths[prompt] = len(ids) - (ids[-1] in self._special_ids)
        else:
            self._prompt_lengths[prompt] = len(self._backend.encode(prompt, add_special_tokens=False))
        num_tokens = self.num_tokens(prompt)
        if num_tokens >= limit:
            rule = f"must exceed the {num_tokens} tokens of the prompt {prompt[:40]!r} and its special tokens"
            raise OptionError(f"data.text.{role}_max_length", limit, rule, "raise it or shorten the prompt")
        self._checked_prompts.add((prompt, limit))

    def num_tokens(self, text: str) -> int:
        """Number of tokens of a text without truncation, special tokens included."""
        self._backend.no_truncation()
        return len(self._backend.encode(text)) + self._num_reserved


def copied_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the backend of a fast tokenizer, without padding and truncation."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        rule = "must be a fast tokenizer"
        raise OptionError("tokenizer", type(tokenizer).__name__, rule, "save it with a tokenizer.json first")
    copied: Tokenizer = copy.deepcopy(backend)
    copied.no_padding()
    copied.no_truncation()
    return copied


def suffix_ids(backend: Tokenizer, suffix: str) -> list[int]:
    """Tokens that a suffix adds to a text; it must not change the tokenisation of the text before it."""
    if not suffix:
        return []
    alone, closed = (backend.encode(text).ids for text in ("a", f"a{suffix}"))
    if closed[: len(alone)] != alone:
        rule = "must start with a separate token, and the tokenizer must not add a special token after it"
        raise OptionError("data.text.suffix", suffix, rule, "start it with a space or a special token")
    return closed[len(alone) :]


def _token_batch(ids: list[list[int]], firsts: list[int]) -> TokenBatch:
    """The ragged batch of `ids`; each text is pooled from index `firsts`, and at least at its last token."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    flat = np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum()))
    starts = np.cumsum(lengths) - lengths
    first = starts + np.minimum(np.array(firsts, dtype=np.int64), lengths - 1)
    mask = np.arange(len(flat)) >= np.repeat(first, lengths)
    return TokenBatch(torch.from_numpy(flat), torch.from_numpy(mask), torch.from_numpy(lengths))


class ContrastiveCollator:
    """Makes a `ContrastiveBatch` from examples; the batch depends on the examples only, not on rank or worker.

    One positive of each example is drawn by its draw key; of its negatives the first (hardest) are used. In-context
    examples are pairs of the batch from the same source with another query and another positive, put into the query's
    prompt. The draw key determines their number; they fill at most half of the query's maximum length.

    Args:
        tokenizer: Joins prompts and texts and tokenises them.
        num_negatives: Maximum number of hard negatives per query, >= 0. NV-Embed uses 7.
        surrogate_width: Width of the surrogate vectors of the examples, None if no source has any.
        num_in_context_examples: Maximum number of in-context examples per query, >= 0; bge-en-icl uses 5.
        has_scores: Whether examples may have teacher scores.
        teacher_tokens: Tokenises texts with prompts for an online teacher; None without a teacher.

    Source: in-context examples: Li et al. 2024 (bge-en-icl), arXiv:2409.15700, which draws them from the batch. MGH's
        Table 2 lists such a variant without describing it.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        num_negatives: int,
        surrogate_width: int | None = None,
        num_in_context_examples: int = 0,
        has_scores: bool = False,
        teacher_tokens: Callable[[Sequence[str], TextRole], TokenBatch] | None = None,
    ) -> None:
        self.num_in_context_examples, self.has_scores = num_in_context_examples, has_scores
        self.tokenizer, self.num_negatives, self.surrogate_width = tokenizer, num_negatives, surrogate_width
        self.teacher_tokens = teacher_tokens

    def __call__(self, examples: Sequence[Example]) -> ContrastiveBatch:
        """The batch of B examples; `ContrastiveBatch` describes its fields."""
        owners, labels = list(range(len(examples))), [e.label for e in examples]
        chosen = [derive_seed(e.draw, "positive") % len(e.positives) for e in examples]
        candidates = [e.positives[choice] for e, choice in zip(examples, chosen, strict=True)]
        for owner, example in enumerate(examples):
            negatives = example.negatives[: self.num_negatives]
            candidates.extend(negative.text for negative in negatives)
            owners.extend([owner] * len(negatives))
            labels.extend(example.negative_labels[: len(negatives)] or [-1] * len(negatives))
        text = self.tokenizer.settings
        query_prompts = [text.prompt_or_default(e.query_prompt, "query") for e in examples]
        if self.num_in_context_examples:
            query_prompts = self._with_examples(examples, query_prompts, candidates)
        document_prompts = [text.prompt_or_default(examples[owner].document_prompt, "document") for owner in owners]
        surrogate_query_BS, surrogate_candidate_CS = self._surrogates(examples, chosen, len(candidates))
        queries, teacher_tokens = [e.query for e in examples], self.teacher_tokens
        return ContrastiveBatch(
            query=self.tokenizer(queries, "query", query_prompts),
            candidate=self.tokenizer(candidates, "document", document_prompts),
            positive_index_B=torch.arange(len(examples)),
            owner_C=torch.tensor(owners),
            query_hash_B=torch.tensor([text_hash(text) for text in queries]),
            candidate_hash_C=torch.tensor([text_hash(text) for text in candidates]),
            known_positive_hash_BP=_filled([[text_hash(text) for text in e.positives] for e in examples]),
            source_B=torch.tensor([e.source for e in examples]),
            query_label_B=torch.tensor([e.label for e in examples]),
            candidate_label_C=torch.tensor(labels),
            in_batch_B=torch.tensor([e.in_batch_negatives for e in examples]),
            row_B=torch.tensor([e.row for e in examples]),
            surrogate_query_BS=surrogate_query_BS,
            surrogate_candidate_CS=surrogate_candidate_CS,
            negative_level=examples[0].level,
            teacher_score_C=self._teacher_scores(examples, chosen),
            teacher_query=None if teacher_tokens is None else teacher_tokens(queries, "query"),
            teacher_candidate=None if teacher_tokens is None else teacher_tokens(candidates, "document"),
        )

    def _with_examples(
        self, examples: Sequence[Example], prompts: Sequence[str], positives: Sequence[str]
    ) -> list[str]:
        """The prompt of each query with its in-context examples."""
        limit, extended = self.tokenizer.settings.max_length("query") // 2, []
        keys = [(example.source, canonical(example.query)) for example in examples]
        shown = list(map(canonical, positives[: len(examples)]))
        for example, prompt, (source, query) in zip(examples, prompts, keys, strict=True):
            answers = set(map(canonical, example.positives))
            others = [
                i for i, key in enumerate(keys) if key[0] == source and key[1] != query and shown[i] not in answers
            ]
            others.sort(key=lambda other: derive_seed(example.draw, "in_context", other))
            count = derive_seed(example.draw, "num_in_context") % (self.num_in_context_examples + 1)
            solved = [(prompts[other], examples[other].query, positives[other]) for other in others[:count]]
            while solved and self.tokenizer.num_tokens(in_context_prompt(prompt, solved)) > limit:
                solved.pop()
            extended.append(in_context_prompt(prompt, solved))
        return extended

    def _surrogates(
        self, examples: Sequence[Example], chosen: Sequence[int], num_candidates: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Surrogate vectors of queries and candidates; NaN for texts without one."""
        if self.surrogate_width is None:
            return None, None
        query_BS = torch.full((len(examples), self.surrogate_width), math.nan)
        candidate_CS = torch.full((num_candidates, self.surrogate_width), math.nan)
        first = len(examples)
        for row, (example, choice) in enumerate(zip(examples, chosen, strict=True)):
            last = first + min(len(example.negatives), self.num_negatives)
            if example.surrogate_query is not None and example.surrogate_positives is not None:
                query_BS[row] = torch.tensor(example.surrogate_query)
                candidate_CS[row] = torch.tensor(example.surrogate_positives[choice])
            if example.surrogate_negatives is not None:
                candidate_CS[first:last] = torch.tensor(example.surrogate_negatives(last - first))
            first = last
        return query_BS, candidate_CS

    def _teacher_scores(self, examples: Sequence[Example], chosen: Sequence[int]) -> Tensor | None:
        """The teacher score of each candidate; NaN without one."""
        if not self.has_scores:
            return None
        pairs = list(zip(examples, chosen, strict=True))
        scores = [example.scores[choice] if example.scores else math.nan for example, choice in pairs]
        for example in examples:
            first, count = len(example.positives), min(len(example.negatives), self.num_negatives)
            scores.extend(example.scores[first : first + count] or [math.nan] * count)
        return torch.tensor(scores, dtype=torch.float32)


def _filled(rows: list[list[int]]) -> torch.Tensor:
    """Rows of different lengths as one (B, P) tensor, padded with the first entry of each row."""
    width = max(map(len, rows))
    return torch.tensor([row + row[:1] * (width - len(row)) for row in rows])
