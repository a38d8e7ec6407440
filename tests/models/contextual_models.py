"""Tiny contextual models with backbones of every type of positions."""

import torch
from transformers import (
    AutoModel,
    ModernBertConfig,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from embeddings.models import ContextualEmbedder, make_bidirectional
from tests.helpers.tiny import VOCAB_SIZE, tiny_bert, tiny_mistral, wordpiece_tokenizer

SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64}
SMALL |= {"num_attention_heads": 4, "num_hidden_layers": 2}


def tiny_xlm_roberta():
    """Learned positions that start one after the padding index."""
    torch.manual_seed(0)
    config = XLMRobertaConfig(**SMALL, max_position_embeddings=130, pad_token_id=1)
    return XLMRobertaModel(config, add_pooling_layer=False).eval()


def tiny_nomic():
    """Rotary positions, bidirectional."""
    torch.manual_seed(0)
    return NomicBertModel(NomicBertConfig(**SMALL, max_position_embeddings=128), add_pooling_layer=False).eval()


def tiny_modernbert(attention="sdpa"):
    """Rotary positions; every other layer has a window of three tokens to each side."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    config = ModernBertConfig(
        **{**SMALL, "num_hidden_layers": 4},
        **special,
        max_position_embeddings=128,
        local_attention=6,
        global_attn_every_n_layers=2,
    )
    model = AutoModel.from_config(config, attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def tiny_decoder():
    """A decoder without its causal mask."""
    model = tiny_mistral()
    make_bidirectional(model)
    return model


BACKBONES = {
    "bert": tiny_bert,
    "xlm_roberta": tiny_xlm_roberta,
    "nomic": tiny_nomic,
    "modernbert": tiny_modernbert,
    "modernbert_eager": lambda: tiny_modernbert("eager"),
    "decoder": tiny_decoder,
}


def tiny_contextual(kind="bert", seed=0, **options):
    """Five context documents, three soft prompts, a residual projection that is not zero; in evaluation mode."""
    torch.manual_seed(seed)
    options = {"num_context": 5, "num_soft_prompts": 3, **options}
    embedder = ContextualEmbedder(tiny_bert(1), BACKBONES[kind](), wordpiece_tokenizer(), **options)
    if embedder.residual is not None:
        for weight in embedder.residual.parameters():
            torch.nn.init.normal_(weight, std=0.2)
    return embedder.eval()
