"""Loads a Hugging Face encoder or decoder and its tokenizer as a backbone."""

import inspect
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

from embeddings.common import InputError, OptionError
from embeddings.common.errors import is_panic, require, require_minimum, shown
from embeddings.common.io import check_file, read_json_or_empty
from embeddings.common.process import quiet_transformers
from embeddings.common.text import check_tokenizer_files, load_tokenizer_files, one_line
from embeddings.models.bidirectional import make_bidirectional_config, require_bidirectional
from embeddings.models.model_files import (
    QUANTIZATION,
    UNDAMAGED,
    check_num_layers,
    check_readable,
    dequantised_weights,
    quantization_of,
    read_json,
    resolve_model,
    weight_files,
)
from embeddings.models.moe.rotary_moe import RotaryMoeConfig, RotaryMoeModel
from embeddings.models.pooling import first_position, plain_backbone

DtypeName = Literal["float32", "bfloat16", "auto"]
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken")
DTYPES: dict[str, torch.dtype | str] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}


@dataclass(frozen=True)
class BackboneConfig:
    """A backbone and the options for loading it.

    Args:
        name: A directory, a Hub id, `all-MiniLM-L6-v2`, the model that the `quickstart` extra installs, or
            `SmolLM2-135M`, the decoder of the `decoder` extra.
        revision: Commit, tag or branch of a Hub id.
        bidirectional: Disable a decoder's causal mask (NV-Embed §3.1). Every layer is checked, at start-up or, for an
            attention that runs only on a GPU, in the first step. An encoder does not change.
        dtype: Dtype of the weights; "auto" is the checkpoint's. Use half precision only for weights that LoRA freezes.
        attn_implementation: "eager", "sdpa", "flash_attention_2", …; None is transformers' choice.
        gradient_checkpointing: Recompute each layer in the backward pass: less memory, a third more time.
        dropout: Probability of all dropout in the model, including attention; None is the checkpoint's.
        num_layers: Load only the first layers of the checkpoint, such as six of NomicBERT's twelve (CDE §5); None for
            all. Saved models have the same number.
        compile: Compile each layer with torch.compile, which takes minutes at the start of a run. Layers that a
            pooling reads are not compiled. `auto`: on a CUDA GPU, with one device or DDP, in a run of at least 200,000
            rows per process; if the compiler fails, one line says so and the layers run without it.
        quantization: `nf4` stores the linear layers in 4 bits (QLoRA, arXiv:2305.14314): for weights that LoRA freezes,
            on a CUDA GPU. Needs the extra `qlora` and `dtype: bfloat16`. A model directory has dequantised weights.
        unpadded: Whether the texts of a mini-batch are concatenated without padding, each attending only to itself;
            vectors and gradients are equal up to rounding. `auto`: on a GPU in half precision, if the model supports
            it. `true`: always, on a CPU in a loop over texts; an error if the model does not support it. `false`:
            never. The GPU's kernel has no dropout, so attention dropout is then off; one line says so.
    """

    name: str
    revision: str | None = None
    bidirectional: bool = False
    dtype: DtypeName = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    dropout: float | None = None
    num_layers: int | None = None
    compile: bool | Literal["auto"] = "auto"
    quantization: Literal["nf4"] | None = None
    unpadded: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_attention(self.attn_implementation, "backbone")
        if self.quantization is not None and self.dtype != "bfloat16":
            rule = f"must be bfloat16 beside quantization: {self.quantization}"
            raise OptionError("backbone.dtype", self.dtype, rule, "set it: it is the dtype of unquantised weights")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise OptionError("backbone.dropout", self.dropout, "must be >= 0 and < 1", "0 switches it off")
        require_minimum("backbone.num_layers", self.num_layers, 1, "leave it out for all", optional=True)


def check_attention(name: str | None, owner: str) -> None:
    """Refuse an attention that names a repository, because transformers would download and run its code."""
    if name is not None and not re.fullmatch(r"\w+", name):
        rule = "must be a name, since code of a repository is not run"
        raise OptionError(f"{owner}.attn_implementation", name, rule, "try sdpa or eager")


def check_quantization(config: BackboneConfig, has_lora: bool) -> None:
    if config.quantization is None:
        return
    option, value = "backbone.quantization", config.quantization
    if not has_lora:
        raise OptionError(option, value, "needs LoRA", "add lora, or leave it out")
    if not torch.cuda.is_available():
        raise OptionError(option, value, "needs a CUDA GPU", "leave it out on a CPU")
    require("bitsandbytes", "qlora")


def load_backbone(config: BackboneConfig, has_lora: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a backbone in evaluation mode, without its pooling layer, and its tokenizer, which pads on the right.

    Weights are read only from safetensors, and code of the model's repository does not run. `has_lora`: whether LoRA
    will be added, which 4-bit weights need.
    """
    folder = resolve_model(config.name, config.revision)
    model = load_configured(folder, config, has_lora=has_lora)
    return model, load_tokenizer(folder, model)


def load_configured(
    folder: Path, config: BackboneConfig, auto_class: Any = AutoModel, new_head: bool = False, has_lora: bool = False
) -> PreTrainedModel:
    """Load the model of a local folder with a config's options, and check that bidirectional attention took effect."""
    check_quantization(config, has_lora)
    model = load_model(
        folder,
        DTYPES[config.dtype],
        config.attn_implementation,
        make_bidirectional=config.bidirectional,
        dropout=config.dropout,
        num_layers=config.num_layers,
        auto_class=auto_class,
        new_head=new_head,
        is_4bit=config.quantization is not None,
    )
    if config.bidirectional:
        require_bidirectional(model.base_model)  # type: ignore[arg-type]
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    return model


def enable_checkpointing(model: PreTrainedModel) -> None:
    # transformers 5.23 renamed the method.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def load_model(
    folder: Path,
    dtype: torch.dtype | str = "auto",
    attn_implementation: str | None = None,
    make_bidirectional: bool = False,
    dropout: float | None = None,
    num_layers: int | None = None,
    auto_class: Any = AutoModel,
    new_head: bool = False,
    unused: list[str] | None = None,
    is_4bit: bool = False,
) -> PreTrainedModel:
    """Load the Hugging Face model of a local folder, without a pooling layer; only the encoder of an encoder-decoder.

    Arguments are as in `BackboneConfig`. With `new_head`, weights outside the backbone that the checkpoint lacks are
    random. `unused` collects the names of tensors that the model does not use. Under `torch.device("meta")` weights are
    not read.
    """
    model_config = read_config(folder)
    if make_bidirectional:
        make_bidirectional_config(model_config)
    if dropout is not None:
        _set_dropout(model_config, dropout)
    if num_layers is not None:
        if num_layers > (total := int(model_config.num_hidden_layers)):
            rule = f"must be <= {total}, the model's"
            raise OptionError("backbone.num_layers", num_layers, rule, "leave it out for all")
        _choose_layers(model_config, range(num_layers))
    files = weight_files(folder)
    if torch.get_default_device().type == "meta":
        return model_without_weights(folder, model_config, dtype, attn_implementation, auto_class)
    for file in files:
        check_file(file, UNDAMAGED)
    options: dict[str, Any] = {"config": model_config, "dtype": dtype, "use_safetensors": True}
    # Mismatched sizes are then reported by name and refused below.
    options |= {"trust_remote_code": False, "ignore_mismatched_sizes": True}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if is_4bit:
        options |= four_bit_options()
    if auto_class is AutoModel:
        auto_class, more = text_class(model_config)
        options |= more
    source: Path | None = folder
    if getattr(model_config, QUANTIZATION, None) is not None:
        # Dequantised here: transformers would need another library.
        check_readable(folder, quantization_of(folder) or {})
        delattr(model_config, QUANTIZATION)
        options["state_dict"], source = dequantised_weights(folder), None
        # The automatic classes need a folder, so the model class is looked up here.
        auto_class = auto_class._model_mapping[type(model_config)]
    try:
        with quiet_transformers():
            model, report = auto_class.from_pretrained(source, output_loading_info=True, **options)
    except Exception as error:  # transformers raises any type of exception for a config that fits no model
        if attn_implementation is not None and "attention" in str(error).lower():
            rule, fix = f"is not available: {_first_line(error)}", "set it to sdpa, or install what it needs"
            raise OptionError("backbone.attn_implementation", attn_implementation, rule, fix) from error
        raise InputError(str(folder), f"cannot be loaded: {_first_line(error)}", "take a complete copy") from error
    assert isinstance(model, PreTrainedModel)
    if is_4bit:
        # A directory written from this model contains dequantised weights.
        vars(model).pop("hf_quantizer", None)
        del model.config.quantization_config
    if unused is not None:
        unused.extend(report["unexpected_keys"])
    for name, shape, expected in sorted(report["mismatched_keys"])[:1]:
        what = f"{name} has shape {tuple(shape)}, config.json expects {tuple(expected)}"
        raise InputError(str(folder), what, "take config.json and weights from one model")
    missing = sorted(report["missing_keys"])
    if new_head:
        missing = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if missing:
        # transformers would initialise them at random and continue.
        what = f"{len(missing)} weights of {type(model).__name__} are missing, {missing[0]} first"
        raise InputError(str(folder), what, "give a checkpoint of this architecture")
    return model


def four_bit_options() -> dict[str, Any]:
    """Options of `from_pretrained` for 4-bit weights, on the GPU of the process's local rank."""
    quantization = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    device = f"cuda:{local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return {"quantization_config": quantization, "device_map": {"": device}}


def text_class(config: PretrainedConfig) -> tuple[Any, dict[str, Any]]:
    """The automatic class for a config's text encoder, and options for building it; may change the config."""
    model_class: Any = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), PreTrainedModel)
    if model_class.__name__.endswith("EncoderModel"):  # T5, as in GTR
        config.is_encoder_decoder = False
        return AutoModelForTextEncoding, {}
    return AutoModel, {"add_pooling_layer": False} if has_pooling_layer(config) else {}


def model_without_weights(
    folder: Path,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype | str = torch.float32,
    attention: str | None = None,
    auto_class: Any = AutoModel,
) -> PreTrainedModel:
    """A local folder's model on the meta device, in evaluation mode; arguments as in `load_model`."""
    config = read_config(folder) if config is None else config
    auto_class, options = text_class(config) if auto_class is AutoModel else (auto_class, {})
    options |= {} if attention is None else {"attn_implementation": attention}
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"), quiet_transformers():
            model: PreTrainedModel = auto_class.from_config(config, dtype=dtype, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises any type of exception for a config that fits no model
        what = f"cannot be built: {_first_line(error)}"
        raise InputError(str(folder), what, "take a complete copy") from error
    model.train(False)
    return model


def read_config(folder: Path) -> PretrainedConfig:
    """The config of a local folder's model; a config that needs remote code is refused."""
    if (folder / "adapter_config.json").is_file():
        # transformers would load the adapter's base model from elsewhere.
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        fix = "merge them into it with peft's merge_and_unload, and give the directory of the merged model"
        raise InputError(str(folder), f"contains adapters of another model, {shown(base)}", fix)
    check_num_layers(read_json_or_empty(folder / "config.json"), str(folder / "config.json"))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Each architecture validates its fields with different exceptions.
    except Exception as error:
        raise InputError(str(folder / "config.json"), _first_line(error), "give a Hugging Face model") from error
    for name, value in _implementations(read_json(folder / "config.json")):
        # transformers would download and run the code of that repository.
        if not re.fullmatch(r"\w+", value):
            raise InputError(str(folder / "config.json"), f"{name} needs the code of {shown(value)}", "remove it")
    return config


def _implementations(fields: Any) -> Iterator[tuple[str, str]]:
    """The fields of a config and its nested configs that name an implementation."""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if name.endswith("_implementation") and isinstance(value, str):
            yield name, value
        yield from _implementations(value)


# Names of the tables of absolute positions in transformers.
_POSITION_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")


def num_positions(backbone: nn.Module) -> int | None:
    """The number of learned positions of a backbone, less reserved ones; None for a model without a position table."""
    model = plain_backbone(backbone)
    for name, table in model.named_modules():
        if name.rpartition(".")[2] in _POSITION_TABLES and isinstance(table, nn.Embedding):
            limit = table.num_embeddings - first_position(table)
            # BART, OPT and Nystromformer reserve positions.
            return min(limit, getattr(model.config, "max_position_embeddings", None) or limit)
    return None


def load_tokenizer(folder: Path, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder, padding on the right; refused if the model lacks an embedding for an id."""
    tokenizer = read_tokenizer(folder)
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, torch.Tensor)
    highest, rows = highest_id(tokenizer), embeddings.shape[0]
    if highest >= rows:
        what = f"the tokenizer has id {highest}, the model has {rows} embeddings"
        raise InputError(str(folder), what, "give the tokenizer that belongs to the model")
    return tokenizer


def highest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values(), default=0)


def read_tokenizer(folder: Path, kind: Any = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder, padding on the right; `kind` is its class, by default that of the files."""
    check_tokenizer_files(folder)
    if not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        # transformers would create an empty one and continue.
        raise InputError(str(folder), "does not contain a tokenizer", "save one beside the model")
    try:
        tokenizer = load_tokenizer_files(folder, kind)
        # Some files fail or make the library panic only when it tokenises a text with unknown characters.
        tokenizer("a 1 é")
    # A damaged tokenizer.json is reported by the Rust library as a bare Exception.
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        what = f"tokenizer cannot be read: {_first_line(error)}"
        raise InputError(str(folder), what, "take a complete copy") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(str(folder), "the tokenizer has neither a pad nor an eos token", "set pad_token in it")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def _set_dropout(config: PretrainedConfig, dropout: float) -> None:
    """Set all dropout probabilities of the config (`hidden_dropout_prob`, `attention_dropout`, …)."""
    names = list(_dropouts(config))
    if not names and dropout > 0:
        raise OptionError("backbone.dropout", dropout, f"does not exist in {config.model_type}", "leave it out")
    for name in names:
        setattr(config, name, dropout)


def _choose_layers(config: PretrainedConfig, chosen: Sequence[int]) -> None:
    """Reduce a config to the chosen layers, including its lists with one entry per layer."""
    total = int(config.num_hidden_layers)
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == total:
            setattr(config, name, [value[index] for index in chosen])
    if getattr(config, "moe_layers", None):
        config.moe_layers = [new for new, old in enumerate(chosen) if old in config.moe_layers]
    config.num_hidden_layers = len(chosen)


def spread_layers(number: int, total: int) -> tuple[int, ...]:
    """The indices of `number` layers spread evenly over `total`, from the first to the last; the first for 1.

    The first layer is always kept: ModernBERT's has no norm, unlike its other layers.
    """
    return tuple(round(position * (total - 1) / max(1, number - 1)) for position in range(number))


def keep_layers(model: PreTrainedModel, num_layers: int) -> tuple[int, ...]:
    """Keep some of a model's layers, evenly spread from the first to the last, in place; returns their old indices."""
    config = model.config
    total = int(config.num_hidden_layers)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == total]
    if not 1 <= num_layers <= total:
        raise OptionError("layers", num_layers, f"must be from 1 to {total}, the model's", "leave it out for all")
    patterns = ("global_attn_every_n_layers", "sliding_window_pattern", "layer_types_pattern")
    is_listed = len(getattr(config, "layer_types", None) or ()) == total
    if not lists or (not is_listed and any(getattr(config, name, None) for name in patterns)):
        rule = f"cannot select layers of {config.model_type}, because its config does not list them one by one"
        raise OptionError("layers", num_layers, rule, "leave it out")
    chosen = spread_layers(num_layers, total)
    kept = [lists[0][index] for index in chosen]
    del lists[0][:]
    for new, layer in enumerate(kept):
        lists[0].append(layer)
        for part in layer.modules():
            for name in ("layer_idx", "layer_id", "layer_index"):
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, new)
    _choose_layers(config, chosen)
    return chosen


def _dropouts(config: PretrainedConfig) -> dict[str, float]:
    """The dropout probabilities of a config, by field name."""
    return {
        name: value
        for name, value in vars(config).items()
        if ("dropout" in name or name.endswith("pdrop")) and type(value) in (int, float)
    }


def attention_dropouts(config: PretrainedConfig) -> dict[str, float]:
    return {name: value for name, value in _dropouts(config).items() if name.startswith("att")}


def has_pooling_layer(config: PretrainedConfig) -> bool:
    """Whether the architecture has a pooling layer by default, as BERT does."""
    model_class: Any = MODEL_MAPPING.get(type(config), PreTrainedModel)
    return "add_pooling_layer" in inspect.signature(model_class).parameters


def _first_line(error: BaseException) -> str:
    """The first sentence of an error's message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return one_line(re.split(r"\. (?=[A-Z])", line)[0].rstrip("."), 200)


# Not in rotary_moe.py: its copy in a model directory must not replace this registration.
AutoConfig.register(RotaryMoeConfig.model_type, RotaryMoeConfig)
AutoModel.register(RotaryMoeConfig, RotaryMoeModel)
