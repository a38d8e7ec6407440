"""Tiny random replacements of real models: the same architecture with small sizes, and a tokenizer built in code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast

from embeddings.common import InputError
from embeddings.common.own_folder import replaced_folder
from embeddings.common.process import quiet_transformers
from embeddings.models.backbone import read_config, text_class
from embeddings.models.gguf import DECODER_NAME
from embeddings.models.language_model import AUTO_CLASSES, VOCABULARY_STEP, HeadKind
from embeddings.models.model_files import PACKAGED_NAME

# The texts from which the tokenizers' vocabularies are built.
TEXTS = [
    "how do I pad sequences to one length",
    "Instruct: Given a question, retrieve passages that answer the question\nQuery: ",
    "the quick brown fox jumps over the lazy dog",
    "return the sum of two numbers 0 1 2 3 4 5 6 7 8 9",
    "search_query: search_document: a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "naïve café – 東京 привет",
]
VOCAB_SIZE = 384
# Maximum sizes of a tiny model; the last line has T5's names.
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY |= {"intermediate_size": 128, "embedding_size": 64}
TINY |= {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128}

_MISTRAL = {"model_type": "mistral", "max_position_embeddings": 32_768}
_NOMIC = {"model_type": "nomic_bert", "max_position_embeddings": 2048}
# XLM-R base after `convert`: rotary positions, vocabulary padded to a multiple of 64.
_ROTARY: dict[str, Any] = {"model_type": "jina_embeddings_v3", "vocab_size": 250_048, "max_position_embeddings": 2048}
_ROTARY |= {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_SPARSE = {**_ROTARY, "model_type": "rotary_moe", "num_experts": 8, "experts_per_token": 2, "expert_bias": True}
_SPARSE |= {"renormalize_experts": True, "moe_layers": [1, 3, 5, 7, 9, 11]}
_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_BERT = {"model_type": "bert", "vocab_size": 30_522, "max_position_embeddings": 512, **_MINILM}
_SMALL_DECODER = {"model_type": "mistral", "vocab_size": 30_528, "hidden_size": 256, "intermediate_size": 768}
_SMALL_DECODER |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None}
_SMALL_DECODER |= {"max_position_embeddings": 512, "tie_word_embeddings": True}
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "num_hidden_layers": 30, "head_dim": 64}
_SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
_SMOLLM2 |= {"max_position_embeddings": 8192, "tie_word_embeddings": True}
_QWEN = {"model_type": "qwen3", "vocab_size": 151_669, "hidden_size": 1024, "num_hidden_layers": 28, "head_dim": 128}
_QWEN |= {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "tie_word_embeddings": True}
_MODERNBERT_LARGE = {"model_type": "modernbert", "hidden_size": 1024, "num_hidden_layers": 28}
_MODERNBERT_LARGE |= {"num_attention_heads": 16, "intermediate_size": 2624}
# Config fields that differ from transformers' defaults, by the models' names in `lightning_configs`: Hub ids, and
# directories in `checkpoints` that recipes write.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-v0.1": {**_MISTRAL, "sliding_window": 4096},
    "mistralai/Mistral-7B-Instruct-v0.2": {**_MISTRAL, "sliding_window": None},
    "Qwen/Qwen3-Embedding-0.6B": _QWEN,
    "answerdotai/ModernBERT-base": {"model_type": "modernbert"},
    "answerdotai/ModernBERT-large": _MODERNBERT_LARGE,
    DECODER_NAME: _SMOLLM2,
    PACKAGED_NAME: _BERT,
    f"sentence-transformers/{PACKAGED_NAME}": _BERT,
    "checkpoints/nv_embed_stage1": {**_MISTRAL, "sliding_window": None},
    "checkpoints/nv_embed_stage1_synthetic": {**_MISTRAL, "sliding_window": None},
    "checkpoints/mntp": {**_MISTRAL, "sliding_window": None},
    "checkpoints/nomic-bert-2048": _NOMIC,
    "checkpoints/cde_small": {**_NOMIC, "num_hidden_layers": 6},
    "checkpoints/cde_unsupervised": _NOMIC,
    "checkpoints/xlm_roberta_rotary": _ROTARY,
    "checkpoints/mlm_adapt": _ROTARY,
    "checkpoints/moe_dense_pretrain": _ROTARY,
    "checkpoints/moe_pretrain": _SPARSE,
    "checkpoints/minilm_rotary": {**_MINILM, "model_type": "jina_embeddings_v3", "vocab_size": 30_528},
    "checkpoints/small_decoder": _SMALL_DECODER,
    "checkpoints/small_decoder_mntp": _SMALL_DECODER,
    "checkpoints/mntp_smollm2": _SMOLLM2,
    "checkpoints/nv_embed_smollm2_stage1": _SMOLLM2,
}


def architecture(name: str) -> PretrainedConfig:
    """The config of a model by its name, offline: from a directory, the Hub cache or `ARCHITECTURES`."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return read_config(folder)
    cached = try_to_load_from_cache(name, "config.json") if name.count("/") == 1 else None
    if isinstance(cached, str):
        return read_config(Path(cached).parent)
    if name not in ARCHITECTURES:
        fix = "download it first, or give its config.json to plan by --model-config"
        raise InputError(name, "is not on this machine, and its architecture is unknown", fix)
    return AutoConfig.for_model(**ARCHITECTURES[name])


def tiny_architecture(config: PretrainedConfig) -> PretrainedConfig:
    """The same architecture with two layers of width 64, for the tokenizer of `stand_in_tokenizer`."""
    fields = config.to_dict()
    model_type, num_layers = fields.pop("model_type"), config.num_hidden_layers
    for name in ("architectures", "transformers_version", "dtype", "_name_or_path", "quantization_config"):
        fields.pop(name, None)
    listed = [name for name, value in fields.items() if isinstance(value, list) and len(value) == num_layers]
    fields = {name: value for name, value in fields.items() if name not in listed}
    fields |= {name: min(size, fields[name]) for name, size in TINY.items() if isinstance(fields.get(name), int)}
    if config.model_type == "rotary_moe":
        fields["moe_layers"] = [1]
    tokenizer = stand_in_tokenizer(config)
    fields["vocab_size"] = -(-len(tokenizer) // VOCABULARY_STEP) * VOCABULARY_STEP
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        if name in fields:
            fields[name] = getattr(tokenizer, name)
    return AutoConfig.for_model(model_type, **fields)


def write_stand_in(folder: Path, config: PretrainedConfig, head: HeadKind | None = None) -> None:
    """Write a directory with random weights from a fixed seed and a tokenizer, atomically; replaces an older one."""
    auto_class, options = text_class(config) if head is None else (AUTO_CLASSES[head], {})
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        model = auto_class.from_config(config, dtype=torch.float32, **options)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replaced_folder(folder) as new, quiet_transformers():
        model.save_pretrained(new)
        stand_in_tokenizer(config).save_pretrained(new)


def stand_in_scratch(settings: Mapping[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """The tokenizer, written to a folder, and the settings of a tiny model that is made from its settings."""
    write_stand_in(folder / "tokenizer", tiny_architecture(architecture(PACKAGED_NAME)))
    small = {name: min(value, TINY[name]) for name, value in settings.items() if name in TINY}
    return str(folder / "tokenizer"), {**settings, **small}


def write_structure(folder: Path, config: PretrainedConfig) -> None:
    """Write a directory with a config and a tokenizer but no weights, for a model on the meta device."""
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    stand_in_tokenizer(config).save_pretrained(folder)


def stand_in_tokenizer(config: PretrainedConfig) -> PreTrainedTokenizerFast:
    """A tokenizer with a few hundred tokens: BERT's type for an encoder, Mistral's for a decoder."""
    is_decoder = isinstance(getattr(config, "num_key_value_heads", None), int)
    return sentencepiece_tokenizer() if is_decoder else wordpiece_tokenizer()


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece as in BERT: [CLS] text [SEP], `##` continuations, lower-cased."""
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
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=512,
    )


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """The sentencepiece BPE of Mistral: starts with `<s>`; a space becomes `▁`, a trailing one a separate token."""
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
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        model_max_length=512,
    )
