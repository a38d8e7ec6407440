"""A tiny world built in code: random backbones of the real architectures, and one tokenizer of each family."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
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

TEXTS = [
    "how do I pad sequences to one length",
    "Instruct: Given a question, retrieve passages that answer the question\nQuery: ",
    "the quick brown fox jumps over the lazy dog",
    "return the sum of two numbers 0 1 2 3 4 5 6 7 8 9",
    "search_query: search_document: a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "naïve café – 東京 привет",
]
VOCAB_SIZE = 384


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """BERT's kind: [CLS] text [SEP], `##` continuations, lower-cased."""
    words = sorted({word for text in TEXTS for word in text.lower().replace(":", " ").split()})
    letters = sorted({letter for word in words for letter in word} | set("0123456789:.,-_()"))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    vocabulary += [word for word in words if word not in letters and len(word) > 1]
    assert len(vocabulary) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.WordPiece({token: row for row, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=512,
    )


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level BPE of Qwen and Llama 3: no marker before the first word, a space belongs to the next word."""
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


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """The sentencepiece BPE of Mistral: `<s>` first, a space becomes `▁`, which a trailing space leaves on its own."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    marked = [tokenizer.normalizer.normalize_str(text) for text in TEXTS]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    splitter = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE + 128, special_tokens=special, show_progress=False)
    tokenizer.pre_tokenizer = splitter
    tokenizer.train_from_iterator(marked, trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        model_max_length=512,
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
    """A two-layer random T5 encoder in float32, with its decoder on request, in evaluation mode."""
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
