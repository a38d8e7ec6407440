"""Whether answers are a model's vectors, and if not, which change of the model explains them.

Each hypothesis is a change of one setting, with the vectors that our encoder computes under it. A hypothesis that
reproduces the answers is the cause. Others are recognised by the texts that differ, by the width and length of the
vectors, or by answers to single texts.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from embeddings.common import TokenBatch, UserError
from embeddings.common.errors import shown
from embeddings.common.text import TextRole, TextSettings
from embeddings.common.types import PaddedTokens
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference.encoder import Encoder, Vectors, unit_rows
from embeddings.interop.answers import Ask, RefusedError
from embeddings.interop.golden import AT_LIMIT, BEYOND_LIMIT, ROLES, Golden, settings_of
from embeddings.models.bidirectional import is_causal, make_bidirectional
from embeddings.models.embedder import Embedder
from embeddings.models.model_files import folder_checksum
from embeddings.models.pooling import plain_backbone
from embeddings.models.poolings import POOLINGS, pooling_name

MIN_COSINE = 0.9999
_LONG = {AT_LIMIT, BEYOND_LIMIT}
# A hypothesis with this cosine ends the search.
_EXACT = 1 - 1e-5
# A hypothesis that does not reach `MIN_COSINE` explains answers in lower precision if it is this close, and the
# remaining error is at most this fraction of that without it.
_CLOSE, _REMAINING = 0.99, 0.2
# Errors of int8 are below this one; those of half precision are at most this multiple of our own.
_MAX_ROUNDING, _SAME_ROUNDING = 0.03, 4.0
# Float32 and the float16 of golden.json cause smaller errors.
_NO_ERROR = 3e-8
# Tolerated relative difference of the lengths of vectors.
_LENGTH_TOLERANCE = 0.01
# Changes of the model that are combined with every other one.
_LIKELIEST = 3
_PLAIN_POOLINGS = ("mean", "cls", "last_token", "weighted_mean")
_COMMON_PROMPTS = ("query: ", "passage: ", "search_query: ", "search_document: ")
_LIMITS = (8, 16, 32, 64, 100, 126, 127, 128, 254, 255, 256, 384, 510, 511, 512, 514, 768)
Cosines = npt.NDArray[np.float64]
Compute = Callable[[Sequence[str]], Vectors]


@dataclass(frozen=True)
class Verdict:
    """Whether answers are the model's vectors, the least cosine, and the finding in words."""

    is_same: bool
    min_cosine: float
    finding: str

    def __str__(self) -> str:
        return self.finding


def verify_answers(
    golden: Golden, ask: Ask, folder: Path, load: Callable[[], Encoder], min_cosine: float = MIN_COSINE
) -> Verdict:
    """Compare answers to the golden texts with the golden vectors; `load` is called only if they differ."""
    answers, refused = dict[TextRole, Vectors](), set[str]()
    for role in ROLES:
        answers[role], kinds = _asked(ask, golden, role)
        refused |= kinds
    least = min(float(_cosines(answers[role], golden.vectors[role]).min()) for role in ROLES)
    number = len(golden.texts)
    # Rounded down, so that it does not reach the limit.
    compared = (
        f"least cosine {np.floor(least * 1e5) / 1e5:.5f} over {number - len(refused)} texts as queries and documents"
    )
    if refused:
        compared += f"; the server refuses the text {' and the text '.join(sorted(refused))}"
    has_width = answers["query"].shape[1] == answers["document"].shape[1] == golden.width
    if has_width and least >= min_cosine:
        lengths, is_same = _lengths(answers, golden)
        if is_same:
            return Verdict(True, least, f"the same model{lengths}, {compared}")
        return Verdict(False, least, f"different: {lengths}; {compared}")
    causes = _Search(golden, ask, answers, folder, load(), min_cosine).causes()
    return Verdict(False, least, f"different: {causes}; {compared}")


def _asked(ask: Ask, golden: Golden, role: TextRole) -> tuple[Vectors, set[str]]:
    """The answers to all texts; the model's own vectors stand for the long texts that the server refuses."""
    kinds = list(golden.texts)
    for refused in (set[str](), {BEYOND_LIMIT}, _LONG):
        kept = [place for place, kind in enumerate(kinds) if kind not in refused]
        try:
            kept_nD = ask([golden.texts[kinds[place]] for place in kept], role)
        except RefusedError:
            if refused == _LONG:
                raise
            continue
        answer_ND = np.zeros((len(kinds), kept_nD.shape[1]), np.float32)
        width = min(kept_nD.shape[1], golden.width)
        answer_ND[:, :width] = golden.vectors[role][:, :width]
        answer_ND[kept] = kept_nD
        return answer_ND, set(refused)
    raise AssertionError


def _cosines(first_ND: Vectors, second_ND: Vectors) -> Cosines:
    """The cosine of each pair of rows over their common leading dimensions; 0 with a zero vector."""
    width = min(first_ND.shape[1], second_ND.shape[1])
    units = [unit_rows(each_ND[:, :width]).astype(np.float64) for each_ND in (first_ND, second_ND)]
    cosine_N: Cosines = (units[0] * units[1]).sum(axis=1)
    return cosine_N


def _lengths(answers: dict[TextRole, Vectors], golden: Golden) -> tuple[str, bool]:
    """What the lengths of vectors with the right directions say, and whether they are tolerable."""
    found_N, expected_N = (
        np.concatenate([np.linalg.norm(vectors[role], axis=1) for role in ROLES])
        for vectors in (answers, golden.vectors)
    )
    if np.allclose(found_N, expected_N, rtol=_LENGTH_TOLERANCE):
        return "", True
    if np.allclose(found_N, 1.0, rtol=_LENGTH_TOLERANCE):
        line = "normalisation: the vectors have unit length, those of the model have lengths that its scores depend on"
        is_same = golden.settings.get("similarity") != "dot"
        return (", scaled to unit length" if is_same else line), is_same
    found, expected = (f"{length_N.min():.3g} to {length_N.max():.3g}" for length_N in (found_N, expected_N))
    expected = "have length 1" if golden.settings["normalize"] else expected
    return f"normalisation: the vectors have lengths {found}, those of the model {expected}", False


@dataclass
class _Search:
    """The search for the cause of a difference."""

    golden: Golden
    ask: Ask
    answers: dict[TextRole, Vectors]
    folder: Path
    encoder: Encoder
    min_cosine: float

    def __post_init__(self) -> None:
        self.kinds, self.texts = list(self.golden.texts), list(self.golden.texts.values())

    def causes(self) -> str:
        """The causes in words, one for both roles if it is the same."""
        changed = self._changed()
        if changed is not None:
            return changed
        width = self.answers["query"].shape[1]
        # `_cosines` compares the leading dimensions.
        if width < self.golden.width and not any(self._failing(role) for role in ROLES):
            return f"another width: the first {width} of the model's {self.golden.width} dimensions"
        found = {role: self._cause(role) for role in ROLES if self._failing(role)}
        if width != self.golden.width and all(cause is None for cause in found.values()):
            return f"another model: vectors of {width} numbers instead of {self.golden.width}"
        named = {role: cause or self._unexplained(role) for role, cause in found.items()}
        if len(set(named.values())) == 1:
            scope = "" if len(named) == len(ROLES) else f", for {_plural(next(iter(named)))} only"
            return f"{next(iter(named.values()))}{scope}"
        return "; ".join(f"{_plural(role)}: {cause}" for role, cause in named.items())

    def _changed(self) -> str | None:
        """What has changed in the directory or in the libraries since the golden vectors were computed."""
        now, before = settings_of(self.encoder, self.folder), self.golden.settings
        for name in {**now, **before}:
            # The similarity changes scores, not vectors.
            if name != "similarity" and now.get(name) != before.get(name):
                return f"{name} was {shown(before.get(name))} in golden.json and is {shown(now.get(name))}"
        if folder_checksum(self.folder) != self.golden.weights:
            return "another model: the directory's weights are not those of golden.json"
        for role in ROLES:
            own_ND = self.encoder.encode(self.texts, role=role)
            if _cosines(own_ND, self.golden.vectors[role]).min() < self.min_cosine:
                return "another model: weights after the backbone, or the libraries, are not those of golden.json"
        return None

    def _cosines_of(self, role: TextRole) -> Cosines:
        return _cosines(self.answers[role], self.golden.vectors[role])

    def _failing(self, role: TextRole) -> list[int]:
        return [int(place) for place in np.flatnonzero(self._cosines_of(role) < self.min_cosine)]

    def _cause(self, role: TextRole) -> str | None:
        """The likeliest cause of the differences in one role, from the exact to the vague; None for none."""
        failing = self._failing(role)
        length_N = self._tokenizer(self.encoder.embedder)(self.texts, role).lengths_N.numpy()
        others = [place for place in range(len(self.texts)) if place not in failing]
        is_by_length = bool(others) and length_N[failing].min() >= length_N[others].max()
        if self._is_right_alone(role, failing):
            found = self._best(role, failing, self._paddings(role))
            return found or "padding: texts are right alone and wrong in a batch; check the attention mask"
        if is_by_length:
            found = self._best(role, failing, self._truncations(role))
            if found is not None:
                return found
        short = [place for place in failing if self.kinds[place] not in _LONG]
        if not short:
            limit = self.encoder.embedder.text.max_length(role)
            return f"truncation: only the texts at or beyond the limit of {limit} tokens differ"
        every = [place for place, kind in enumerate(self.kinds) if kind not in _LONG]
        found = self._best(role, every, self._hypotheses(role)) or self._rounding(role, every)
        return found or self._best(role, every, self._pairs(role, every))

    def _is_right_alone(self, role: TextRole, failing: list[int]) -> bool:
        """Whether the shortest text that differs is right in a request of its own."""
        place = min(failing, key=lambda each: len(self.texts[each]))
        alone_1D = self.ask([self.texts[place]], role)
        is_alike = alone_1D.shape[1] == self.answers[role].shape[1]
        alone = float(_cosines(alone_1D, self.golden.vectors[role][[place]])[0])
        # Not only by rounding that differs from batch to batch.
        return bool(is_alike and alone >= self.min_cosine and 1 - alone <= 0.1 * (1 - self._cosines_of(role)[place]))

    def _best(self, role: TextRole, places: list[int], hypotheses: Iterator[tuple[str, Compute]]) -> str | None:
        """The hypothesis that reproduces the answers to some texts, or comes much closer than the model does."""
        answer_nD, before_n = self.answers[role][places], self._cosines_of(role)[places]
        best, best_cause = -1.0, ""
        # Most hypotheses are refuted by three texts that differ.
        probes = np.argsort(before_n, kind="stable")[:3]
        for cause, compute in hypotheses:
            # A prompt can be too long for the model.
            with suppress(UserError):
                least = self._least(compute, places, probes, answer_nD)
                if least >= _CLOSE:
                    least = self._least(compute, places, np.arange(len(places)), answer_nD)
                if least > best:
                    best, best_cause = least, cause
                if best >= _EXACT:
                    break
        if best >= self.min_cosine:
            return best_cause
        if best >= _CLOSE and 1 - best <= _REMAINING * (1 - float(before_n.min())):
            return f"{best_cause} (and lower precision)"
        return None

    def _least(self, compute: Compute, places: list[int], chosen: npt.NDArray[Any], answer_nD: Vectors) -> float:
        vector_nD = compute([self.texts[places[index]] for index in chosen])
        # Vectors of another width are cut only where the server cuts them.
        if vector_nD.shape[1] < answer_nD.shape[1]:
            return -1.0
        return float(_cosines(vector_nD, answer_nD[chosen]).min())

    def _rounding(self, role: TextRole, places: list[int]) -> str | None:
        """Whether all answers differ a little, as in a lower precision."""
        error_n = 1 - self._cosines_of(role)[places]
        # Texts with the exact vector show that the precision is right.
        if error_n.max() > _MAX_ROUNDING or (error_n < _NO_ERROR).sum() > len(places) // 4:
            return None
        half = Encoder(self.encoder.embedder, precision="bfloat16")
        own_n = 1 - _cosines(half.encode(self.texts, role=role), self.golden.vectors[role])[places]
        is_half = np.median(error_n) <= _SAME_ROUNDING * np.median(own_n)
        return "half precision: bfloat16 has such errors" if is_half else "low precision: int8 or another quantisation"

    def _unexplained(self, role: TextRole) -> str:
        """The cause that the texts suggest which differ."""
        failing = self._failing(role)
        names = [self.kinds[place] for place in failing if self.kinds[place] not in _LONG]
        right = [kind for kind in self.kinds if kind not in _LONG and kind not in names]
        # One text alone may be right by chance, but not special tokens alone.
        if len(right) > 1 or (right == ["a space"] and not self.golden.prompt(role)):
            listed = ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
            return f"another tokenizer, since some texts are right: wrong are {listed}"
        return "another model: no single setting explains the vectors"

    # The hypotheses: what is different, and a function that computes vectors under it.

    def _variant(self, **changes: Any) -> Encoder:
        embedder = self.encoder.embedder
        names = ("norm", "head", "normalize", "text", "trained_widths", "similarity")
        parts = {name: getattr(embedder, name) for name in ("backbone", "tokenizer", "pooling", *names)} | changes
        return Encoder(Embedder(**parts), precision="float32")

    @staticmethod
    def _tokenizer(embedder: Embedder) -> TextTokenizer:
        return TextTokenizer(embedder.tokenizer, embedder.text)

    @cached_property
    def _has_variants(self) -> bool:
        # A capture of attention belongs to one embedder.
        return not self.encoder.num_context and self.encoder.embedder.capture is None

    def _hypotheses(self, role: TextRole) -> Iterator[tuple[str, Compute]]:
        yield from self._prompts(role)
        if not self.encoder.num_context:
            yield from self._ends(role)
        if self._has_variants:
            yield from self._poolings(role)
            yield from self._layers(role)
        yield from self._cleaned_texts(role)
        if self._has_variants:
            yield from self._masks(role)

    def _pairs(self, role: TextRole, places: list[int]) -> Iterator[tuple[str, Compute]]:
        """Two changes at once: each of the likeliest changes of the model, with any other."""
        chosen = places[:: max(1, len(places) // 3)]
        texts, answer_nD = [self.texts[place] for place in chosen], self.answers[role][chosen]
        likely = list[tuple[float, str, _Variant]]()
        for cause, compute in self._hypotheses(role):
            if isinstance(compute, _Variant):
                likely.append((float(_cosines(compute(texts), answer_nD).mean()), cause, compute))
        for _, cause, compute in sorted(likely, key=lambda each: -each[0])[:_LIKELIEST]:
            for second, both in replace(self, encoder=compute.encoder())._hypotheses(role):
                yield f"{cause}; and {second}", both

    def _prompts(self, role: TextRole) -> Iterator[tuple[str, Compute]]:
        encode, text = partial(self.encoder.encode, role=role), self.encoder.embedder.text
        own = text.prompt(None, role)
        if own:
            line = f"missing prompt: texts do not start with {own!r}"
            bare_text = replace(text, prompts={**text.prompts, role: ""})
            yield line, self._encode(role, text=bare_text) if self._has_variants else partial(encode, prompt="")

            def doubled(texts: Sequence[str], first: str, prompt: str) -> Vectors:
                return encode([first + each for each in texts], prompt=prompt)

            # Either, both or none may be left out of the pooling.
            for first, prompt in ((own, own), ("", 2 * own), (2 * own, "")):
                line = f"doubled prompt: texts start with {own!r} twice"
                yield line, partial(doubled, first=first, prompt=prompt)
            if own != own.rstrip():
                bare = own.rstrip()
                yield f"prompt: texts start with {bare!r}, without the space at its end", partial(encode, prompt=bare)
        for name, other in text.prompts.items():
            if other and other != own:
                line = f"prompt: texts start with the {name} prompt {other!r}"
                yield line, partial(encode, prompt=other)
        for other in _COMMON_PROMPTS:
            if other not in text.prompts.values():
                line = f"prompt: texts start with {other!r}, which is not a prompt of the model"
                yield line, partial(encode, prompt=other)

    def _ends(self, role: TextRole) -> Iterator[tuple[str, Compute]]:
        """Missing and doubled special tokens at the ends of texts."""
        tokenizer = self.encoder.embedder.tokenizer
        known = {*tokenizer.all_special_ids}
        probe = self._tokenizer(self.encoder.embedder)(["a"], role, "").input_ids_T.tolist()
        end = probe[-1] if len(probe) > 1 and probe[-1] in known else tokenizer.eos_token_id
        has_end, has_start = probe[-1] == end and len(probe) > 1, probe[0] in known and len(probe) > 1
        name = shown(tokenizer.convert_ids_to_tokens(end)) if end is not None else ""

        def changed(texts: Sequence[str], change: Callable[[list[Any], Any, Any], list[Any]]) -> Vectors:
            tokens = self._tokenizer(self.encoder.embedder)(texts, role)
            ids = [change(row, end, probe[0]) for row, _ in _rows(tokens)]
            masks = [change(mask, True, mask[0]) for _, mask in _rows(tokens)]
            # As for texts without any token of their own, the last token is pooled.
            masks = [mask if any(mask) else [*mask[:-1], True] for mask in masks]
            return self.encoder.encode(texts, role=role, tokenised=[TokenBatch.from_lists(ids, masks)])

        if has_end:
            line = f"missing EOS: texts do not end with {name}"
            yield line, partial(changed, change=lambda row, *_: row[:-1] or row)
            line = f"doubled EOS: texts end with {name} twice"
            yield line, partial(changed, change=lambda row, last, _: [*row, last])
        elif end is not None:
            line = f"added EOS: texts end with {name}, which the model does not expect"
            yield line, partial(changed, change=lambda row, last, _: [*row, last])
        if has_start:
            line = "missing start token: texts do not start with the tokenizer's start token"
            yield line, partial(changed, change=lambda row, *_: row[1:] or row)
            line = "doubled start token: texts start with it twice"
            yield line, partial(changed, change=lambda row, _, first: [first, *row])
        if has_start and has_end:
            line = "missing EOS and start token: texts have no special tokens"
            yield line, partial(changed, change=lambda row, *_: row[1:-1] or row)

    def _poolings(self, role: TextRole) -> Iterator[tuple[str, Compute]]:
        embedder = self.encoder.embedder
        own, text = pooling_name(embedder.pooling), embedder.text
        settings = [text]
        if text.prompt(None, role):
            settings.append(replace(text, pool_prompt=not text.pool_prompt, pooling_rule=None))
            does, others = ("left out", "pools") if text.pool_prompt else ("pooled", "leaves out")
            yield (
                f"pooling: the prompt's tokens are {does}, which the model {others}",
                self._encode(role, text=settings[1]),
            )
        for name in _PLAIN_POOLINGS:
            for each in settings if name != own else []:
                pooling = POOLINGS[name](embedder.hidden_size).to(embedder.device)
                yield f"pooling: {name} instead of {own}", self._encode(role, pooling=pooling, text=each)

    def _layers(self, role: TextRole) -> Iterator[tuple[str, Compute]]:
        embedder = self.encoder.embedder
        if embedder.head is not None:
            yield "the linear head after the pooling is left out", self._encode(role, head=None)
        if embedder.norm is not None:
            yield "the layer norm after the pooling is left out", self._encode(role, norm=None)
            if embedder.head is not None:
                yield "layer norm and linear head are left out", self._encode(role, norm=None, head=None)

    def _cleaned_texts(self, role: TextRole) -> Iterator[tuple[str, Compute]]:
        changes: dict[str, Callable[[str], str]] = {
            "newlines are replaced by spaces": lambda text: text.replace("\n", " "),
            "outer spaces are removed": str.strip,
            "texts are lower-cased": str.lower,
        }
        for line, change in changes.items():

            def compute(texts: Sequence[str], change: Callable[[str], str] = change) -> Vectors:
                return self.encoder.encode([change(text) for text in texts], role=role)

            yield f"another tokenizer or other cleaning: {line}", compute

    def _masks(self, role: TextRole) -> Iterator[tuple[str, Compute]]:
        """The decoder with a causal mask instead of none, or the reverse."""
        backbone = plain_backbone(self.encoder.embedder.backbone)
        causal = is_causal(backbone)
        if not causal and getattr(backbone.config, "is_causal", None) is not False:
            return
        changed = copy.deepcopy(backbone)
        if causal:
            make_bidirectional(changed)
        else:
            changed.config.is_causal = True
            for part in changed.modules():
                if getattr(part, "is_causal", None) is False:
                    part.is_causal = True  # type: ignore[assignment]
        if is_causal(changed) != causal:
            has = "tokens see later ones" if causal else "tokens do not see later ones"
            yield f"causal mask: {has}, unlike in the model", self._encode(role, backbone=changed)

    def _truncations(self, role: TextRole) -> Iterator[tuple[str, Compute]]:
        """Other limits, the other side, and a limit that includes the end token."""
        if not self._has_variants:
            return
        embedder, text = self.encoder.embedder, self.encoder.embedder.text
        own, most = text.max_length(role), embedder.longest_text

        def limited(limit: int) -> TextSettings:
            return replace(text, query_max_length=limit, document_max_length=limit)

        tokens = self._tokenizer(embedder)
        longest = tokens.num_tokens(text.prompt(None, role) + self.golden.texts[BEYOND_LIMIT])
        limits = {*_LIMITS, own - 2, own - 1, own + 1, own + 2, *(text.max_length(each) for each in ROLES)} - {own}
        for limit in sorted((each for each in limits if 4 <= each < longest), reverse=True):
            if most is None or limit <= most:
                line = f"truncation: texts are cut to {limit} tokens instead of {own}"
                yield line, self._encode(role, text=limited(limit))
        if longest > own and (most is None or longest <= most):
            line = f"truncation: texts are not cut to {own} tokens"
            yield line, self._encode(role, text=limited(longest))
        other = copy.deepcopy(embedder.tokenizer)
        other.truncation_side = "left" if other.truncation_side == "right" else "right"
        yield f"truncation: texts lose their {other.truncation_side} end", self._encode(role, tokenizer=other)

        def without_end(texts: Sequence[str]) -> Vectors:
            batch = self._tokenizer(self._variant(text=limited(2 * max(own, longest))).embedder)(texts, role)
            cut = TokenBatch.from_lists(*zip(*((ids[:own], mask[:own]) for ids, mask in _rows(batch)), strict=True))
            return self.encoder.encode(texts, role=role, tokenised=[cut])

        yield "truncation: long texts lose their end token", without_end

    def _paddings(self, role: TextRole) -> Iterator[tuple[str, Compute]]:
        """Padding of a request's texts on the left, and pooling of the last position, which may be padding."""
        if not self._has_variants:
            return
        embedder = self.encoder.embedder
        rows_of = {text: next(_rows(self._tokenizer(embedder)([text], role))) for text in self.texts}
        longest = max(len(ids) for ids, _ in rows_of.values())

        def padded(texts: Sequence[str], on_left: bool) -> Vectors:
            rows = []
            for ids, mask in map(rows_of.__getitem__, texts):
                num_pads, ones = longest - len(ids), [True] * len(ids)
                pads, gaps = [embedder.pad_token_id] * num_pads, [False] * num_pads
                last = [False] * (longest - 1) + [True]
                rows.append((pads + ids, gaps + ones, gaps + mask) if on_left else (ids + pads, ones + gaps, last))
            tensors = (torch.tensor(column, device=embedder.device) for column in zip(*rows, strict=True))
            with torch.no_grad():
                vector_ND: Vectors = embedder(PaddedTokens(*tensors)).float().cpu().numpy()
            return vector_ND

        yield "padding side: texts are padded on the left, which shifts their positions", partial(padded, on_left=True)
        if pooling_name(embedder.pooling) == "last_token":
            line = "padding side: the last position is pooled, which is padding on the right of shorter texts"
            yield line, partial(padded, on_left=False)

    def _encode(self, role: TextRole, **changes: Any) -> "_Variant":
        return _Variant(partial(self._variant, **changes), role)


@dataclass(frozen=True)
class _Variant:
    """Computes vectors by the model with other parts."""

    encoder: Callable[[], Encoder]
    role: TextRole

    def __call__(self, texts: Sequence[str]) -> Vectors:
        return self.encoder().encode(texts, role=self.role)


def _rows(tokens: TokenBatch) -> Iterator[tuple[list[int], list[bool]]]:
    ids, mask, start = tokens.input_ids_T.tolist(), tokens.pooling_mask_T.tolist(), 0
    for length in tokens.lengths_N.tolist():
        yield ids[start : start + length], mask[start : start + length]
        start += length


def _plural(role: TextRole) -> str:
    return "queries" if role == "query" else "documents"
