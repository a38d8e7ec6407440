"""A language model without pre-training: an architecture in a few numbers, and the tokenizer of another model."""

import difflib
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from embeddings.common import OptionError
from embeddings.common.text import one_line
from embeddings.models.backbone import check_attention, check_flex, highest_id, read_tokenizer
from embeddings.models.bidirectional import make_bidirectional_config, require_bidirectional
from embeddings.models.hub import resolve_model

# The embedding matrix has a multiple of this many rows.
VOCABULARY_STEP = 64


@dataclass(frozen=True)
class FromScratch:
    """A model with random weights.

    Args:
        tokenizer: A directory, a Hub id, or `all-MiniLM-L6-v2`: whose tokenizer the model reads with.
        model_type: Architecture as transformers names it: `mistral`, `llama`, `bert`, ….
        settings: Fields of its config that differ from transformers' defaults, such as `hidden_size`.
            Vocabulary size and the ids of special tokens follow from the tokenizer.
        bidirectional: Turn a decoder's causal mask off.
        attn_implementation: "eager", "sdpa", …; None is transformers' choice.

    Raises:
        OptionError: If there is no such architecture or field.
    """

    tokenizer: str
    model_type: str = "mistral"
    settings: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    bidirectional: bool = False
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        check_attention(self.attn_implementation, "model.from_scratch")
        try:
            known = AutoConfig.for_model(self.model_type)
        except ValueError as error:
            rule = "is no architecture that transformers knows"
            raise OptionError("model.from_scratch.model_type", self.model_type, rule, "try mistral") from error
        for name in self.settings:
            if not hasattr(known, name) or name == "vocab_size":
                near = difflib.get_close_matches(name, vars(known), n=1)
                fix = f"did you mean {near[0]}?" if near else "leave it out"
                raise OptionError("model.from_scratch.settings", name, f"is no setting of {self.model_type}", fix)


def new_model(scratch: FromScratch, auto_class: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with random weights in float32, in evaluation mode, and its tokenizer.

    Determinism: the weights follow from torch's random state.

    Args:
        scratch: What to make.
        auto_class: What chooses the model's class, such as `AutoModelForCausalLM`.

    Raises:
        OptionError: If the settings make no model, or its attention cannot be made bidirectional.
    """
    tokenizer = read_tokenizer(resolve_model(scratch.tokenizer))
    options = {} if scratch.attn_implementation is None else {"attn_implementation": scratch.attn_implementation}
    try:
        config = AutoConfig.for_model(scratch.model_type, **(dict(scratch.settings) | _of_tokenizer(tokenizer)))
        if scratch.bidirectional:
            make_bidirectional_config(config)
        model = auto_class.from_config(config, **options)
    except (StrictDataclassError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        reason = one_line(str(error), 200)
        raise OptionError("model.from_scratch.settings", scratch.settings, "make no model", reason) from error
    assert isinstance(model, PreTrainedModel)
    check_flex(model.config, scratch.attn_implementation)
    if scratch.bidirectional:
        backbone: Any = model.base_model
        require_bidirectional(backbone)
    model.train(False)
    return model, tokenizer


def _of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """What the tokenizer decides of a config."""
    bos = _first(tokenizer.bos_token_id, tokenizer.cls_token_id)
    eos = _first(tokenizer.eos_token_id, tokenizer.sep_token_id)
    pad = tokenizer.pad_token_id
    rows = -(-(highest_id(tokenizer) + 1) // VOCABULARY_STEP) * VOCABULARY_STEP
    # The vector of a config's pad token is never trained, so a separator must not be named as one.
    return {"vocab_size": rows, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None if pad == eos else pad}


def _first(*ids: Any) -> int | None:
    return next((token for token in ids if isinstance(token, int)), None)
