"""Tiny language models of the real architectures, on disk."""

from transformers import BertConfig, BertForMaskedLM, MistralConfig, MistralForCausalLM
from transformers.trainer_utils import set_seed

from tests.helpers.tiny import VOCAB_SIZE, save_backbone, sentencepiece_tokenizer, wordpiece_tokenizer

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 64, "max_position_embeddings": 128}


def masked_bert(seed=0):
    """A two-layer random BERT with its masked-LM head, tied to the embeddings."""
    set_seed(seed)
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SMALL, vocab_size=VOCAB_SIZE, **dropouts)).eval()


def causal_mistral(seed=0, tied=False, attention="sdpa"):
    """A two-layer random Mistral with its language-model head, causal."""
    set_seed(seed)
    options = {"num_key_value_heads": 2, "sliding_window": None, "tie_word_embeddings": tied}
    config = MistralConfig(**SMALL, vocab_size=VOCAB_SIZE + 128, attn_implementation=attention, **options)
    return MistralForCausalLM(config).eval()


def language_model_folder(folder, kind="mistral", tied=False):
    """A tiny language model with its tokenizer on disk: `bert` or `mistral`."""
    if kind == "bert":
        return save_backbone(str(folder), masked_bert(), wordpiece_tokenizer())
    return save_backbone(str(folder), causal_mistral(tied=tied), sentencepiece_tokenizer())
