"""Tiny random backbones of real architectures, and one tokenizer of each family."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertModel,
    MistralConfig,
    MistralModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    T5Model,
)
from transformers.trainer_utils import set_seed

from embeddings.models.stand_in import TEXTS, VOCAB_SIZE
from embeddings.models.stand_in import sentencepiece_tokenizer as sentencepiece_tokenizer
from embeddings.models.stand_in import wordpiece_tokenizer as wordpiece_tokenizer


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE as in Qwen and Llama 3: no prefix space; a space belongs to the next word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=512
    )


def tiny_bert(seed: int = 0, dropout: float = 0.0, hidden_size: int = 32, num_positions: int = 128) -> PreTrainedModel:
    """A two-layer random BERT encoder in float32, in evaluation mode."""
    set_seed(seed)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=num_positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def tiny_mistral(seed: int = 0, hidden_size: int = 32) -> PreTrainedModel:
    """A two-layer random Mistral decoder (grouped-query attention) in float32, causal, in evaluation mode."""
    set_seed(seed)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE + 128,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=128,
        sliding_window=16,
    )
    return MistralModel(config).eval()


def tiny_t5(with_decoder: bool = False) -> PreTrainedModel:
    """A two-layer random T5 encoder in float32, optionally with its decoder, in evaluation mode."""
    set_seed(0)
    config = T5Config(
        vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, is_encoder_decoder=True
    )
    return (T5Model if with_decoder else T5EncoderModel)(config).eval()


def save_backbone(folder: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    """Save a backbone and its tokenizer as one Hugging Face directory; returns the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
