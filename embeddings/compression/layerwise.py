"""A model processed layer by layer: weights are read, inputs collected, new weights written, next inputs computed."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
    revert_weight_conversion,
)

from embeddings.common import InputError, OptionError, PaddedTokens, TokenBatch
from embeddings.common.io import atomic_path, file_lock
from embeddings.common.jobs import ShardedJob
from embeddings.common.progress import ProgressBar, progress_bar
from embeddings.common.types import plan_mini_batches
from embeddings.models.backbone import model_without_weights
from embeddings.models.bidirectional import layers
from embeddings.models.directory import is_contextual
from embeddings.models.model_files import SCALE, dequantised, quantization_of, read_tensors, weight_files
from embeddings.models.moe.experts import Experts
from embeddings.models.pooling import without_cache

# The same on every machine, because it affects the rounding of sums.
MINI_BATCH_TOKENS = 4096
OUTSIDE_FILE = "outside.safetensors"
_PLAIN_LAYERS = "use a model whose layers return only their states"
_COMPLETE_COPY = "use a complete copy of the model"
_EXPERTS = re.compile(r"Experts$|MoE|Moe(Block|Mlp|MLP|Layer)|SparseMoe")


# The compression of one matrix: from its weight in float32, the Gram matrix of its inputs x (the sum of x xᵀ over the
# tokens; None without texts) and the dtype of the weight in its file, to the tensors that replace it, by the end of
# their names.
Treatment = Callable[[Tensor, Tensor | None, torch.dtype], dict[str, Tensor]]


class _ReachedError(Exception):
    """Ends a forward pass at the layer of interest."""

    def __init__(self, states: Any) -> None:
        self.states = states


class LayerwiseModel:
    """The backbone of a model directory; one layer at a time has weights, and the others are on the meta device.

    The forward pass of the model computes masks, positions and all other inputs of a layer: earlier layers return their
    inputs, and the pass ends at the layer.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        if quantization_of(folder) is not None:
            raise InputError(str(folder), "is already quantised", "use the model before its quantisation")
        if is_contextual(folder):
            what = "is a contextual model, which cannot be compressed"
            raise InputError(str(folder), what, "use a model that reads each text alone")
        self.folder, self.device = folder, device
        self.model = model_without_weights(folder)
        names = {module: name for name, module in self.model.named_modules()}
        self.layers = [(names[layer], layer) for layer in layers(self.model)]
        self._check_layers()
        self._structure = self.model.state_dict()
        conversions = get_model_conversion_mapping(self.model)
        self._renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        self._converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        self._keys = self._keys_by_layer()
        # Set when the first layer runs: 0 if a layer returns only its states, else the length of its tuple.
        self.num_outputs: int | None = None
        self._is_open = False

    def _check_layers(self) -> None:
        for _, layer in self.layers:
            for module in layer.modules():
                if isinstance(module, Experts) or _EXPERTS.search(type(module).__name__):
                    raise InputError(str(self.folder), "has experts, which cannot be compressed", _PLAIN_LAYERS)
        if type(self.model).__name__.endswith("EncoderModel"):
            kind = self.model.config.model_type
            what = f"is the encoder of an encoder-decoder ({kind}), whose layers return more than their states"
            raise InputError(str(self.folder), what, _PLAIN_LAYERS)
        num_layers = getattr(self.model.config, "num_hidden_layers", None)
        if num_layers != len(self.layers) or not all(linear_layers(layer) for _, layer in self.layers):
            what = f"has {len(self.layers)} layers with linear modules, but its config.json has {num_layers}"
            raise InputError(str(self.folder), what, _PLAIN_LAYERS)

    def _renamed(self, key: str) -> tuple[str, str | None]:
        """The name in the model of a tensor in a file, and the pattern of the conversion that produces it, if any."""
        prefix = self.model.base_model_prefix
        return rename_source_key(key, self._renamings, self._converters, prefix, self._structure)

    def _keys_by_layer(self) -> dict[int | None, dict[Path, frozenset[str]]]:
        """The tensors that the model uses, by layer (None: outside the layers) and by file."""
        keys_by_layer: dict[int | None, dict[Path, frozenset[str]]] = {}
        for file in weight_files(self.folder):
            try:
                with safe_open(file, framework="pt") as opened:
                    keys = list(opened.keys())
            except (OSError, SafetensorError) as error:
                raise InputError(str(file), "is missing or damaged", _COMPLETE_COPY) from error
            for key in keys:
                name, _ = self._renamed(key)
                owners = [index for index, (layer, _) in enumerate(self.layers) if name.startswith(f"{layer}.")]
                if name in self._structure:
                    files = keys_by_layer.setdefault(owners[0] if owners else None, {})
                    files[file] = files.get(file, frozenset()) | {key}
        return keys_by_layer

    def read(self, index: int | None, file: Path | None = None) -> dict[str, Tensor]:
        """The tensors of a layer (None: those outside), by their names in the model, dequantised."""
        files = self._keys.get(index, {}) if file is None else {file: None}
        stored: dict[str, Tensor] = {}
        for path, keys in files.items():
            # Copies, because the file is closed afterwards.
            wanted = bool if keys is None else keys.__contains__
            stored |= {key: tensor.clone() for key, tensor in read_tensors(path, wanted)}
        tensors: dict[str, Tensor] = {}
        conversions: dict[str, WeightTransform] = {}
        for key, tensor in dequantised(stored).items():
            name, pattern = self._renamed(key)
            if pattern is None:
                tensors[name] = tensor
                continue
            if name not in conversions:
                (converter,) = (one for one in self._converters if pattern in one.source_patterns)
                conversions[name] = deepcopy(converter)
            conversions[name].add_tensor(name, key, pattern, tensor)  # type: ignore[arg-type]
        for first, conversion in conversions.items():
            for name, value in conversion.convert(first, model=self.model, config=self.model.config).items():  # type: ignore[attr-defined]
                tensors[name] = value[0] if isinstance(value, list) else value
        return tensors

    def write(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        stored = dict(tensors)
        # Transformers does not split a quantised matrix that it has merged.
        if not any(name.endswith(f".weight{SCALE}") for name in tensors):
            stored = revert_weight_conversion(self.model, stored)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path, metadata={"format": "pt"})

    @contextmanager
    def loaded(self, index: int, file: Path | None = None) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
        """A layer with weights in float32, and its tensors as stored; afterwards it is on the meta device again."""
        name, layer = self.layers[index]
        tensors = self.read(index, file)
        weights = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}
        self._load_weights(layer, weights, list(layer.modules()))
        try:
            yield layer, tensors
        finally:
            layer.to("meta")

    def _load_outside(self) -> None:
        if not self._is_open:
            inside = {module for _, layer in self.layers for module in layer.modules()}
            outside = [module for module in self.model.modules() if module not in inside]
            self._load_weights(self.model, self.read(None), outside)
            self._is_open = True

    def _load_weights(self, parent: nn.Module, tensors: Mapping[str, Tensor], modules: Sequence[nn.Module]) -> None:
        """Load weights into a module, and compute buffers of `modules` that no file has, as transformers does."""
        state = {
            key: tensor.to(self.device, torch.float32 if tensor.is_floating_point() else None)
            for key, tensor in tensors.items()
        }
        parent.load_state_dict(state, strict=False, assign=True)
        for module in modules:
            for name, weight in module.named_parameters(recurse=False):
                if weight.is_meta:
                    what = f"{name} of {type(module).__name__} is missing from its files"
                    raise InputError(str(self.folder), what, _COMPLETE_COPY)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self.device)
                else:
                    buffer._is_hf_initialized = True  # type: ignore[attr-defined]
            for weight in module.parameters(recurse=False):
                weight._is_hf_initialized = True  # type: ignore[attr-defined]
        # Some modules initialise their children: all weights must be marked as initialised before.
        with torch.no_grad():
            for module in modules:
                self.model._init_weights(module)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _up_to(self, index: int, tokens: PaddedTokens, action: Callable[..., Any]) -> Any:
        """Run the model up to a layer, call `action` with the arguments of that layer, and return its result."""
        self._load_outside()

        def reached(*args: Any, **kwargs: Any) -> Any:
            raise _ReachedError(action(*args, **kwargs))

        def pass_through(*args: Any, **kwargs: Any) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            return (states, *[None] * (self.num_outputs - 1)) if self.num_outputs else states

        for position, (_, layer) in enumerate(self.layers):
            layer.forward = reached if position == index else pass_through
        try:
            inputs = {"input_ids": tokens.input_ids_NL, "attention_mask": tokens.attention_mask_NL.long()}
            self.model(**inputs, **without_cache(self.model))
        except _ReachedError as end:
            return end.states
        finally:
            for _, layer in self.layers:
                del layer.forward
        raise AssertionError("the model ran past its layers")

    def first_states(self, tokens: PaddedTokens) -> Tensor:
        """The states of a mini-batch at the input of the first layer, (n, L, H) float32."""
        states: Tensor = self._up_to(0, tokens, lambda *args, **kwargs: args[0] if args else kwargs["hidden_states"])
        return states

    def run(self, index: int, tokens: PaddedTokens, state_NLH: Tensor) -> Tensor:
        """The output states of a loaded layer, given its input states, (n, L, H) float32."""
        forward = self.layers[index][1].forward

        def forward_states(*args: Any, **kwargs: Any) -> Any:
            if args:
                return forward(state_NLH, *args[1:], **kwargs)
            return forward(**{**kwargs, "hidden_states": state_NLH})

        output = self._up_to(index, tokens, forward_states)
        if isinstance(output, Tensor):
            self.num_outputs = 0
            return output
        if any(other is not None for other in output[1:]):
            what = f"has layers ({type(self.layers[index][1]).__name__}) that return more than their states"
            raise InputError(str(self.folder), what, _PLAIN_LAYERS)
        self.num_outputs = len(output)
        states: Tensor = output[0]
        return states


def linear_layers(layer: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


@contextmanager
def inputs_added(sums: dict[str, Tensor], linear: Mapping[str, nn.Linear], attention_NL: Tensor) -> Iterator[None]:
    """Within the context, add Gram matrices of the inputs of linear modules to `sums`, without padding tokens."""
    is_token_R = attention_NL.flatten()

    def add(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        input_RI = inputs[0].reshape(-1, inputs[0].shape[-1])
        assert len(input_RI) == len(is_token_R), "the inputs of a layer are not the tokens of the texts"
        input_TI = input_RI[is_token_R]
        added = input_TI.T @ input_TI
        if name in sums:
            sums[name] += added
        else:
            sums[name] = added

    handles = [module.register_forward_pre_hook(partial(add, name)) for name, module in linear.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class LayerwiseJob:
    """A resumable job over the layers of a model, which writes each layer to a separate file.

    After a kill it runs the texts through the written layers again. In memory are the embeddings, one layer and its
    sums, and the states of all texts at one layer.
    """

    def __init__(
        self,
        model: LayerwiseModel,
        folder: Path,
        fields: Mapping[str, Any],
        treatment: Treatment,
        tokens: TokenBatch | None = None,
        pad_token_id: int = 0,
    ) -> None:
        self._model, self._treatment, self._tokens, self._pad = model, treatment, tokens, pad_token_id
        self._plan = [] if tokens is None else plan_mini_batches(tokens.lengths_N, MINI_BATCH_TOKENS)
        self._job = ShardedJob(folder, fields, len(model.layers), stem="layer", suffix=".safetensors")
        self._states: list[Tensor] = []
        self._state_layer = 0

    @property
    def files(self) -> list[Path]:
        return [*map(self._job.path, range(len(self._model.layers))), self._job.folder / OUTSIDE_FILE]

    def run(self) -> None:
        """Write the missing files; an `OptionError` if another process is writing in the folder."""
        with file_lock(self._job.folder / ".running.lock", wait=False, optional=True) as is_held:
            if not is_held:
                rule = "is being written by another process"
                raise OptionError("output", self._job.folder.name, rule, "wait for it, or name another output")
            self._job.run(self._make)
            self._job.finish(self._finish)
            self._states = []

    def _make(self, index: int, path: Path) -> None:
        sums: dict[str, Tensor] = {}
        name = self._model.layers[index][0]
        # The texts pass through each layer before this one that they have not passed yet, and then through this one.
        num_passes = len(self._plan) * (index - self._state_layer + 1)
        with progress_bar(2 * max(1, num_passes), name, "pass") as bar:
            if self._plan:
                self._advance(index, bar)
            with self._model.loaded(index) as (layer, tensors):
                linear = linear_layers(layer)
                for rows, state_NLH in zip(self._plan, self._states, strict=True):
                    tokens = self._padded(rows)
                    with bar.item(), inputs_added(sums, linear, tokens.attention_mask_NL):
                        self._model.run(index, tokens, state_NLH.to(self._model.device))
                for module_name, module in linear.items():
                    key, gram_II = f"{name}.{module_name}.", sums.pop(module_name, None)
                    with bar.item(max(1, num_passes) / len(linear)):
                        treated = self._treatment(module.weight.detach(), gram_II, tensors[f"{key}weight"].dtype)
                    tensors |= {f"{key}{suffix}": tensor.cpu() for suffix, tensor in treated.items()}
            self._model.write(tensors, path)

    def _advance(self, index: int, bar: ProgressBar) -> None:
        """Compute the states of the texts at the input of a layer, with the written layers before it."""
        if not self._states:
            self._states = [self._model.first_states(self._padded(rows)).cpu() for rows in self._plan]
        for layer in range(self._state_layer, index):
            with self._model.loaded(layer, self._job.path(layer)):
                for batch, rows in enumerate(self._plan):
                    state_NLH = self._states[batch].to(self._model.device)
                    with bar.item():
                        self._states[batch] = self._model.run(layer, self._padded(rows), state_NLH).cpu()
        self._state_layer = index

    def _padded(self, rows: Tensor) -> PaddedTokens:
        assert self._tokens is not None
        padded = self._tokens.padded(rows, self._pad)
        return PaddedTokens(*(tensor.to(self._model.device) for tensor in padded))

    def _finish(self) -> dict[str, Any]:
        with atomic_path(self._job.folder / OUTSIDE_FILE) as temporary:
            self._model.write(self._model.read(None), temporary)
        return {}
