"""Examples to a contrastive batch: the open choices are made, the texts become tokens."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from embeddings.common.errors import OptionError
from embeddings.common.fileio import text_hash
from embeddings.common.randomness import derive_seed
from embeddings.common.text import in_context_prompt
from embeddings.common.types import ContrastiveBatch
from embeddings.data.examples import Example
from embeddings.data.tokenize import TextTokenizer


class ContrastiveCollator:
    """Makes a `ContrastiveBatch` of examples.

    Of an example's positives one is drawn by its draw key; of its negatives the first, hardest ones are taken, fewer
    where it has fewer. An example without a prompt of its own gets the text settings' prompt of that role.

    With in-context examples, other pairs of the batch stand solved before a query, as part of its prompt: pairs of the
    same source, as many as its draw key says, from none to `num_in_context_examples`, and fewer where they would fill
    more than half of the query's length.

    Determinism: a batch is a pure function of its examples; neither rank nor worker enters.

    Args:
        tokenizer: Joins prompts and tokenises.
        num_negatives: Most hard negatives of a query, >= 0. NV-Embed uses 7.
        surrogate_width: Width of the surrogate's vectors that examples may carry, None where none does. It decides for
            every batch of a run alike, so that ranks agree on what they gather.
        num_in_context_examples: Most solved examples before a query, >= 0; bge-en-icl uses 5.

    Raises:
        OptionError: If a number is negative.
    Source: in-context examples: Li et al. 2024 (bge-en-icl), arXiv:2409.15700, which draws them from the batch. MGH's
        Table 2 has such a variant and does not describe it.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        num_negatives: int,
        surrogate_width: int | None = None,
        num_in_context_examples: int = 0,
    ) -> None:
        if num_negatives < 0:
            raise OptionError("data.num_negatives", num_negatives, "must be >= 0", "0 trains on pairs alone")
        if num_in_context_examples < 0:
            rule = "must be >= 0"
            raise OptionError("data.num_in_context_examples", num_in_context_examples, rule, "bge-en-icl uses 5")
        self.num_in_context_examples = num_in_context_examples
        self.tokenizer, self.num_negatives, self.surrogate_width = tokenizer, num_negatives, surrogate_width

    def __call__(self, examples: Sequence[Example]) -> ContrastiveBatch:
        """The batch of B examples; see `ContrastiveBatch` for what each field holds."""
        owners, labels = list(range(len(examples))), [e.label for e in examples]
        chosen = [derive_seed(e.draw, "positive") % len(e.positives) for e in examples]
        candidates = [e.positives[choice] for e, choice in zip(examples, chosen, strict=True)]
        for owner, example in enumerate(examples):
            negatives = example.negatives[: self.num_negatives]
            candidates.extend(negative.text for negative in negatives)
            owners.extend([owner] * len(negatives))
            labels.extend(example.negative_labels[: len(negatives)] or [-1] * len(negatives))
        prompts = self.tokenizer.settings.prompts
        query_prompts = [e.query_prompt or prompts.get("query", "") for e in examples]
        if self.num_in_context_examples:
            query_prompts = self._with_examples(examples, query_prompts, candidates)
        document_prompts = [examples[owner].document_prompt or prompts.get("document", "") for owner in owners]
        surrogate_query_BS, surrogate_candidate_CS = self._surrogates(examples, chosen, len(candidates))
        return ContrastiveBatch(
            query=self.tokenizer([e.query for e in examples], "query", query_prompts),
            candidate=self.tokenizer(candidates, "document", document_prompts),
            positive_index_B=torch.arange(len(examples)),
            owner_C=torch.tensor(owners),
            query_hash_B=torch.tensor([text_hash(e.query) for e in examples]),
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
        )

    def _with_examples(
        self, examples: Sequence[Example], prompts: Sequence[str], positives: Sequence[str]
    ) -> list[str]:
        """Each query's prompt behind solved examples of its source."""
        limit, found = self.tokenizer.settings.max_length("query") // 2, []
        for place, example in enumerate(examples):
            others = [i for i, e in enumerate(examples) if e.source == example.source and e.query != example.query]
            others.sort(key=lambda other: derive_seed(example.draw, "in_context", other))
            count = derive_seed(example.draw, "num_in_context") % (self.num_in_context_examples + 1)
            solved = [(prompts[other], examples[other].query, positives[other]) for other in others[:count]]
            while solved and self.tokenizer.num_tokens(in_context_prompt(prompts[place], solved)) > limit:
                solved.pop()
            found.append(in_context_prompt(prompts[place], solved))
        return found

    def _surrogates(
        self, examples: Sequence[Example], chosen: Sequence[int], num_candidates: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """The surrogate's vectors of queries and candidates, NaN for texts without one."""
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


def _filled(rows: list[list[int]]) -> torch.Tensor:
    """Rows of different lengths as one (B, P) tensor, the first entry of each repeated to fill."""
    width = max(map(len, rows))
    return torch.tensor([row + row[:1] * (width - len(row)) for row in rows])
