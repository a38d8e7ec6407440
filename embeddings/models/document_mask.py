"""Attention within each document of a packed row and nowhere else."""

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from embeddings.common import OptionError
from embeddings.common.types import positions_in_document
from embeddings.models.position_free import first_position, learned_positions

# The others take no mask that says which token sees which.
_ATTENTIONS = ("eager", "sdpa")


def document_inputs(model: PreTrainedModel, document_NL: Tensor, causal: bool) -> dict[str, Tensor]:
    """The mask and the positions with which a model reads each document of a row as if it were alone.

    Args:
        model: An encoder, or a decoder with or without its causal mask.
        document_NL: Which document of its row a token is of, -1 for padding, (N, L) int64. Padding sees padding, so
            that no row of the mask is empty.
        causal: Whether a token sees only those before it.

    Returns:
        `attention_mask`, (N, 1, L, L), bool for sdpa and 0 or the lowest number of the model's dtype for eager;
        `position_ids`, (N, L) int64, counted from each document's start.

    Memory: L values a token. Source: none of the papers separates packed documents; here it is a choice.
    """
    sees_NLL = document_NL[:, :, None] == document_NL[:, None, :]
    if causal:
        sees_NLL = sees_NLL.tril()
    table = learned_positions(model)
    position_NL = positions_in_document(document_NL) + (0 if table is None else first_position(table))
    mask_N1LL = sees_NLL[:, None]
    if model.config._attn_implementation == "eager":
        lowest = torch.finfo(model.dtype).min
        mask_N1LL = torch.zeros_like(mask_N1LL, dtype=model.dtype).masked_fill(~mask_N1LL, lowest)
    return {"attention_mask": mask_N1LL, "position_ids": position_NL}


def window(config: PretrainedConfig) -> int | None:
    """The shortest reach of a layer's attention in tokens, or None where every layer sees all."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    found = getattr(config, "sliding_window", None)
    return None if found is None else int(found)


@torch.no_grad()
def check_separation(model: PreTrainedModel, causal: bool) -> None:
    """Check that each document of a packed row has the states that it has alone.

    Runs three tiny forward passes.

    Raises:
        OptionError: If it has not, or the model takes neither such a mask nor positions.
    """
    name = f"{type(model).__name__} with {model.config._attn_implementation} attention"
    option, fix = "model.separate_documents", "set it to false, or use sdpa or eager attention"
    if model.config._attn_implementation not in _ATTENTIONS:
        raise OptionError(option, name, "cannot take effect", fix)
    ids_NL = ((torch.arange(12) * 5) % (int(model.config.vocab_size) - 4) + 3)[None].to(model.device)
    document_NL = torch.tensor([[0] * 5 + [1] * 7], device=model.device)
    was_training = model.training
    model.train(False)
    try:
        packed_LH = model(input_ids=ids_NL, **document_inputs(model, document_NL, causal)).last_hidden_state[0].float()
        alone = [model(input_ids=part).last_hidden_state[0].float() for part in (ids_NL[:, :5], ids_NL[:, 5:])]
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(option, name, "cannot take effect", fix) from error
    finally:
        model.train(was_training)
    alone_LH = torch.cat(alone)
    spread = float((packed_LH - alone_LH).abs().max() / alone_LH.abs().max().clamp(min=1e-6))
    if spread > (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1):
        raise OptionError(option, name, f"does not keep documents apart (states differ by {spread:.1e})", fix)
