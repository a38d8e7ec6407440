"""A model one layer at a time: weights read, inputs seen, changed weights written, the next layer's inputs made.

In memory are the embeddings, one layer, and the states of the calibration texts at its input.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

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
from embeddings.common.types import plan_mini_batches
from embeddings.models.backbone import model_without_weights
from embeddings.models.bidirectional import layers
from embeddings.models.directory import is_contextual
from embeddings.models.lora import without_cache
from embeddings.models.model_files import SCALE, dequantised, quantization_of, read_tensors, weight_files
from embeddings.models.moe.experts import Experts

# Of the inputs of a matrix: x xᵀ summed over the tokens, its diagonal alone, or nothing.
Statistic = Literal["gram", "squares", "none"]
# The same number on every machine: it decides how sums are rounded.
MINI_BATCH_TOKENS = 4096
OUTSIDE_FILE = "outside.safetensors"
_EXPERTS = re.compile(r"Experts$|MoE|Moe(Block|Mlp|MLP|Layer)|SparseMoe")


class Treatment(Protocol):
    """What becomes of one matrix."""

    @property
    def needs(self) -> Statistic:
        """Which sum over its inputs it reads."""

    def fields(self) -> dict[str, Any]:
        """What decides its bytes, as JSON types."""

    def __call__(self, weight_OI: Tensor, statistic: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """What is stored in place of a weight, (O, I) float32, by the last part of its name (`weight`, `weight_scale`).

        `statistic` is what `needs` asks for, (I, I) or (I) float32, and `dtype` the weight's in its file.
        """
        ...


class _ReachedError(Exception):
    """Ends a forward pass at the layer that it was made for."""

    def __init__(self, states: Any) -> None:
        self.states = states


class LayerwiseModel:
    """The backbone of a model directory, of which one layer at a time has weights; all else is on the meta device.

    The model's own forward pass makes the mask, the positions and all else that a layer is given, so each layer runs
    as it does in the whole model: the layers before it hand on what they are given, and the pass ends with it. An
    `InputError` refuses a damaged directory, and a model that is quantised, contextual, sparse, or uses a layer twice.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        if quantization_of(folder) is not None:
            raise InputError(str(folder), "is quantised already", "give the model before its quantisation")
        if is_contextual(folder):
            what = "is a contextual model, which cannot be compressed"
            raise InputError(str(folder), what, "give a model that reads texts alone")
        self.folder, self.device = folder, device
        self.model = model_without_weights(folder)
        names = {module: name for name, module in self.model.named_modules()}
        self.layers = [(names[layer], layer) for layer in layers(self.model)]
        self._check_layers()
        self._structure = self.model.state_dict()
        conversions = get_model_conversion_mapping(self.model)
        self._renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._keys = self._keys_by_layer()
        # Learnt from the first layer that runs: 0 where a layer returns its states alone, else the length of its tuple.
        self.num_outputs: int | None = None
        self._is_open = False

    def _check_layers(self) -> None:
        hint = "give a model of plain layers"
        for _, layer in self.layers:
            for part in layer.modules():
                if isinstance(part, Experts) or _EXPERTS.search(type(part).__name__):
                    raise InputError(str(self.folder), "has experts, which cannot be compressed", hint)
        if type(self.model).__name__.endswith("EncoderModel"):
            what = (
                f"is the encoder of two ({self.model.config.model_type}), whose layers hand on more than their states"
            )
            raise InputError(str(self.folder), what, hint)
        num_layers = getattr(self.model.config, "num_hidden_layers", None)
        if num_layers != len(self.layers) or not all(linear_layers(layer) for _, layer in self.layers):
            what = f"lists {len(self.layers)} layers with linear parts, its config.json has {num_layers}"
            raise InputError(str(self.folder), what, hint)

    def _renamed(self, key: str) -> tuple[str, str | None]:
        """The name that a tensor of a file has in the model, and the conversion that makes it, if one does."""
        prefix = self.model.base_model_prefix
        return rename_source_key(key, self._renamings, self._converters, prefix, self._structure)

    def _keys_by_layer(self) -> dict[int | None, dict[Path, frozenset[str]]]:
        """The tensors of each layer, and under None of what lies outside the layers, by file; unused ones are left."""
        found: dict[int | None, dict[Path, frozenset[str]]] = {}
        for file in weight_files(self.folder):
            try:
                with safe_open(file, framework="pt") as opened:
                    keys = list(opened.keys())
            except (OSError, SafetensorError) as error:
                raise InputError(str(file), "is missing or damaged", "take a complete copy of the model") from error
            for key in keys:
                name, _ = self._renamed(key)
                owners = [index for index, (layer, _) in enumerate(self.layers) if name.startswith(f"{layer}.")]
                if name in self._structure:
                    files = found.setdefault(owners[0] if owners else None, {})
                    files[file] = files.get(file, frozenset()) | {key}
        return found

    def stored(self, index: int | None, file: Path | None = None) -> dict[str, Tensor]:
        """The tensors of a layer (None: of what lies outside), by their names in the model.

        They are read from a file that `written` made, quantised weights multiplied out, or else from the directory's
        own.
        """
        files = self._keys.get(index, {}) if file is None else {file: None}
        tensors: dict[str, Tensor] = {}
        for path, keys in files.items():
            # Copies: the file is closed once all of it is read.
            wanted = bool if keys is None else keys.__contains__
            tensors |= {name: tensor.clone() for name, tensor in read_tensors(path, wanted)}
        found: dict[str, Tensor] = {}
        converted: dict[str, WeightTransform] = {}
        for key, tensor in dequantised(tensors).items():
            name, pattern = self._renamed(key)
            if pattern is None:
                found[name] = tensor
                continue
            if name not in converted:
                (maker,) = (each for each in self._converters if pattern in each.source_patterns)
                converted[name] = deepcopy(maker)
            converted[name].add_tensor(name, key, pattern, tensor)  # type: ignore[arg-type]
        for first, transform in converted.items():
            for name, value in transform.convert(first, model=self.model, config=self.model.config).items():  # type: ignore[attr-defined]
                found[name] = value[0] if isinstance(value, list) else value
        return found

    def written(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Write tensors, named as in the model, to a safetensors file under the names that its files have.

        Quantised ones keep the model's names: transformers does not split a matrix that several of them were joined to.
        """
        stored = dict(tensors)
        if not any(name.endswith(f".weight{SCALE}") for name in tensors):
            stored = revert_weight_conversion(self.model, stored)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path, metadata={"format": "pt"})

    @contextmanager
    def loaded(self, index: int, file: Path | None = None) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
        """A layer with its weights in float32, and the same tensors as stored; on leaving it has none again."""
        name, layer = self.layers[index]
        tensors = self.stored(index, file)
        self._fill(
            layer, {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}, list(layer.modules())
        )
        try:
            yield layer, tensors
        finally:
            layer.to("meta")

    def open(self) -> None:
        if not self._is_open:
            inner = {part for _, layer in self.layers for part in layer.modules()}
            self._fill(self.model, self.stored(None), [part for part in self.model.modules() if part not in inner])
            self._is_open = True

    def _fill(self, part: nn.Module, tensors: Mapping[str, Tensor], modules: Sequence[nn.Module]) -> None:
        """Give a part its weights, and compute the buffers that no file has, as transformers does on loading."""
        state = {
            key: tensor.to(self.device, torch.float32 if tensor.is_floating_point() else None)
            for key, tensor in tensors.items()
        }
        part.load_state_dict(state, strict=False, assign=True)
        for module in modules:
            for name, weight in module.named_parameters(recurse=False):
                if weight.is_meta:
                    what = f"{name} of {type(module).__name__} is missing from its files"
                    raise InputError(str(self.folder), what, "take a complete copy of the model")
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self.device)
                else:
                    buffer._is_hf_initialized = True  # type: ignore[attr-defined]
            for weight in module.parameters(recurse=False):
                weight._is_hf_initialized = True  # type: ignore[attr-defined]
        # Some modules initialise those within them: all must be known to have their weights by then.
        with torch.no_grad():
            for module in modules:
                self.model._init_weights(module)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _up_to(self, index: int, tokens: PaddedTokens, action: Callable[..., Any]) -> Any:
        """What `action` returns in the place of a layer, given what the model gives that layer."""
        self.open()

        def reached(*args: Any, **kwargs: Any) -> Any:
            raise _ReachedError(action(*args, **kwargs))

        def handed_on(*args: Any, **kwargs: Any) -> Any:
            states = args[0] if args else kwargs["hidden_states"]
            return (states, *[None] * (self.num_outputs - 1)) if self.num_outputs else states

        for place, (_, layer) in enumerate(self.layers):
            layer.forward = reached if place == index else handed_on
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
        """The states that a mini-batch has at the input of the first layer, (n, L, H) float32."""
        states: Tensor = self._up_to(0, tokens, lambda *args, **kwargs: args[0] if args else kwargs["hidden_states"])
        return states

    def run(self, index: int, tokens: PaddedTokens, state_NLH: Tensor) -> Tensor:
        """The states of a mini-batch behind a layer that has its weights, from those at its input, (n, L, H) float32.

        Layers that hand on more than their states are an `InputError`.
        """
        forward = self.layers[index][1].forward

        def of_states(*args: Any, **kwargs: Any) -> Any:
            if args:
                return forward(state_NLH, *args[1:], **kwargs)
            return forward(**{**kwargs, "hidden_states": state_NLH})

        output = self._up_to(index, tokens, of_states)
        if isinstance(output, Tensor):
            self.num_outputs = 0
            return output
        if any(other is not None for other in output[1:]):
            what = f"is of layers ({type(self.layers[index][1]).__name__}) that hand on more than their states"
            raise InputError(str(self.folder), what, "give a model of plain layers")
        self.num_outputs = len(output)
        states: Tensor = output[0]
        return states


def linear_layers(layer: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers within a layer, by name."""
    return {name: part for name, part in layer.named_modules() if isinstance(part, nn.Linear)}


@contextmanager
def inputs_added(
    sums: dict[str, Tensor], linear: Mapping[str, nn.Linear], attention_NL: Tensor, needs: Statistic
) -> Iterator[None]:
    """Add up what linear layers are given inside, by their names; tokens that are padding are left out."""
    is_token_R = attention_NL.flatten()

    def add(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        input_RI = inputs[0].reshape(-1, inputs[0].shape[-1])
        assert len(input_RI) == len(is_token_R), "a layer is given other rows than the texts' tokens"
        input_TI = input_RI[is_token_R]
        added = input_TI.T @ input_TI if needs == "gram" else input_TI.square().sum(dim=0)
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
    """A resumable job over the layers of a model: each is written to a file of its own.

    After a kill the same call resumes at the first layer that is missing and writes the same bytes; the texts pass
    through the layers that are written once more. `tokens` are the calibration texts, None where the treatment needs
    none.

    Memory: embeddings, one layer and its sums, and the states of all texts at one layer.
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
        self._at = 0

    @property
    def files(self) -> list[Path]:
        """The files of the result: the layers', and that of all outside of them."""
        return [*map(self._job.path, range(len(self._model.layers))), self._job.folder / OUTSIDE_FILE]

    def run(self) -> None:
        """Write the files that are not there yet; an `OptionError` where another process is at work in the folder."""
        with file_lock(self._job.folder / ".running.lock", wait=False, optional=True) as is_held:
            if not is_held:
                rule = "is being written by another process"
                raise OptionError("output", self._job.folder.name, rule, "wait for it, or name another output")
            self._job.run(self._make)
            self._job.finish(self._finish)
            self._states = []

    def _make(self, index: int, path: Path) -> None:
        if self._plan:
            self._advance(index)
        sums: dict[str, Tensor] = {}
        name = self._model.layers[index][0]
        with self._model.loaded(index) as (layer, tensors):
            linear = linear_layers(layer)
            for rows, state_NLH in zip(self._plan, self._states, strict=True):
                tokens = self._padded(rows)
                with inputs_added(sums, linear, tokens.attention_mask_NL, self._treatment.needs):
                    self._model.run(index, tokens, state_NLH.to(self._model.device))
            for part, module in linear.items():
                key = f"{name}.{part}."
                made = self._treatment(module.weight.detach(), sums.pop(part, None), tensors[f"{key}weight"].dtype)
                tensors |= {f"{key}{suffix}": tensor.cpu() for suffix, tensor in made.items()}
        self._model.written(tensors, path)

    def _advance(self, index: int) -> None:
        """Have the states of the texts at the input of a layer, behind the layers that are written."""
        if not self._states:
            self._states = [self._model.first_states(self._padded(rows)).cpu() for rows in self._plan]
        for before in range(self._at, index):
            with self._model.loaded(before, self._job.path(before)):
                for place, rows in enumerate(self._plan):
                    state_NLH = self._states[place].to(self._model.device)
                    self._states[place] = self._model.run(before, self._padded(rows), state_NLH).cpu()
        self._at = index

    def _padded(self, rows: Tensor) -> PaddedTokens:
        assert self._tokens is not None
        padded = self._tokens.padded(rows, self._pad)
        return PaddedTokens(*(part.to(self._model.device) for part in padded))

    def _finish(self) -> dict[str, Any]:
        """Write what lies outside the layers, as it is."""
        with atomic_path(self._job.folder / OUTSIDE_FILE) as temporary:
            self._model.written(self._model.stored(None), temporary)
        return {}
