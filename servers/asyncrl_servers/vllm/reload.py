"""Load weights into a vLLM model by layerwise reload, or into a twin during generation.

Plain `model.load_weights` fails after the start, because layers have packed their weights (on CPU every
linear layer does). The layerwise reload restores a layer's initial form, buffers its tensors, and packs it
when complete.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs
from vllm.platforms import current_platform


class Reload:
    """Replaces the weights of one model.

    Life: made -> begin() -> add(), any number of times -> finish(). The model cannot compute in between.
    """

    def __init__(self, worker: Any, model: nn.Module) -> None:
        self._worker, self._model = worker, model
        # A tied parameter is listed once. Layers without parameters compute their buffers.
        self._owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
        methods: set[Any] = {getattr(layer, "quant_method", None) for layer in model.modules()}
        kernels = {method: getattr(method, "moe_kernel", None) for method in methods}
        self._cpu_experts = {
            method: kernel for method, kernel in kernels.items() if kernel and current_platform.is_cpu()
        }

    def begin(self) -> None:
        with self._loading():
            initialize_layerwise_reload(self._model)
        # vLLM packs experts on CPU only at the first load.
        for method in self._cpu_experts:
            method.moe_kernel = None

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with self._loading():
            self._model.load_weights(iter(tensors))  # type: ignore[operator]  # every vLLM model defines it

    def incomplete(self) -> list[str]:
        missing = []
        for name, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            if name not in self._owners or not info.can_load() or is_deferred_attention_layer(layer):
                continue  # nothing to load, or complete (then it is packed already)
            # Vocabulary padding is in no file.
            is_padded = hasattr(layer, "num_embeddings_padded")
            if info.load_numel == 0 or not is_padded:
                missing.append(f"{name} ({info.load_numel} of {info.load_numel_total} elements)")
        return missing

    def finish(self) -> None:
        """Restore the layers' computing form, complete or not."""
        with self._loading():
            finalize_layerwise_reload(self._model, self._worker.model_runner.model_config)
            for method, kernel in self._cpu_experts.items():
                method.moe_kernel = kernel
            self.repack_tied()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    def repack_tied(self) -> None:
        """Repack an output layer that shares the embedding's weight, since it loads nothing itself."""
        if not current_platform.is_cpu():
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for layer in self._model.modules():
            weight = getattr(layer, "weight", None)
            is_matrix = isinstance(weight, Tensor) and weight.numel() > 0 and weight.dim() == 2
            if hasattr(layer, "cpu_linear") and is_matrix:
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Enter the context in which vLLM loads weights."""
        worker = self._worker
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
            yield


class Twin:
    """Second model that never computes: it is reloaded during generation, then swaps weights with the first.

    It needs memory for another set of weights, and a model with can_have_twin, whose layers hold only
    attributes apart from parameters and buffers. Attention layers have no weights and are skipped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[nn.Module, tuple[nn.Module, dict[str, Any]]] = {}
        self._parameters: dict[int, Tensor] = {}
        self.model = self._copied(model)

    def swap_in(self) -> None:
        for layer, (twin, before) in self._layers.items():
            layer._parameters.update(twin._parameters)
            for name, value in vars(twin).items():
                if before.get(name, self) is not value:
                    setattr(layer, name, value)

    def end_loading(self) -> None:
        """Clear vLLM's load records, which would keep every twin and all previous weights in memory."""
        for twin, _ in self._layers.values():
            info = LAYERWISE_INFO.pop(twin)
            info.restore_metadata = {}, {}
            info.reset()

    def _copied(self, layer: nn.Module) -> nn.Module:
        if layer in self._layers:
            return self._layers[layer][0]
        twin = copy.copy(layer)
        twin._parameters = {name: self._own(one) for name, one in layer._parameters.items()}
        twin._buffers = dict(layer._buffers)
        twin._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
        twin._modules = {
            name: child if child is None else self._copied(child)
            for name, child in layer._modules.items()
            if not isinstance(child, Attention)
        }
        info, own = get_layerwise_info(layer), get_layerwise_info(twin)
        parameters, buffers = (
            {name: _first_form(one, layer) for name, one in part.items()} for part in info.restore_metadata
        )
        own.restore_metadata, own.restore_device = (parameters, buffers), info.restore_device
        self._layers[layer] = twin, dict(vars(twin))
        return twin

    def _own(self, parameter: Tensor | None) -> Any:
        """Allocate separate memory, once per shared parameter."""
        if parameter is None:
            return None
        if id(parameter) not in self._parameters:
            self._parameters[id(parameter)] = materialize_meta_tensor(to_meta_tensor(parameter))
        return self._parameters[id(parameter)]


def _first_form(recorded: Tensor, layer: nn.Module) -> Tensor:
    """Return vLLM's record of a layer's tensor without the reload wrapper."""
    own = to_meta_tensor(recorded)
    if hasattr(own, "weight_loader"):
        own.weight_loader = _get_original_loader(own)
    free: Tensor = sanitize_layer_refs(own, layer)
    return free


def can_have_twin(model: nn.Module) -> bool:
    """Return true if all weights are in plain linear layers, embeddings and norms, on CPU."""
    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
    return current_platform.is_cpu() and all(
        type(layer) is Attention
        if is_deferred_attention_layer(layer)
        else isinstance(getattr(layer, "quant_method", None), methods)
        and layer._buffers.keys() <= layer._non_persistent_buffers_set
        for layer in model.modules()
    )
