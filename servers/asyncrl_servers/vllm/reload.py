"""One set of weights on its way into a model of vLLM, by vLLM's layerwise reload; and a twin of the model,
into which it can be loaded beside generation.

Plain `model.load_weights` is wrong after the start: layers have their weights packed for the kernels by then
(on CPU every linear layer is, and its parameter is empty). vLLM's layerwise reload gives the layers their
first form back, buffers what is loaded, and packs a layer as soon as it is complete.
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

    Life: made -> begin() -> add(), any number of times -> finish(): from begin() until then the model cannot
        compute.
    """

    def __init__(self, worker: Any, model: nn.Module) -> None:
        self._worker, self._model = worker, model
        # A tied parameter is listed once, for its first layer. Layers without parameters have buffers that
        # they compute themselves.
        self._owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
        methods: set[Any] = {getattr(layer, "quant_method", None) for layer in model.modules()}
        kernels = {method: getattr(method, "moe_kernel", None) for method in methods}
        self._cpu_experts = {
            method: kernel for method, kernel in kernels.items() if kernel and current_platform.is_cpu()
        }

    def begin(self) -> None:
        """Give the layers the form in which they are loaded."""
        with self._loading():
            initialize_layerwise_reload(self._model)
        # vLLM packs experts for the CPU only where they have no kernel yet, at the first load.
        for method in self._cpu_experts:
            method.moe_kernel = None

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors."""
        with self._loading():
            self._model.load_weights(iter(tensors))  # type: ignore[operator]  # every model of vLLM has it

    def incomplete(self) -> list[str]:
        """Names of the layers that have not got all their elements."""
        missing = []
        for name, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            if name not in self._owners or not info.can_load() or is_deferred_attention_layer(layer):
                continue  # nothing to load, or complete (then it is packed already)
            # A vocabulary is padded with rows that no file has.
            is_padded = hasattr(layer, "num_embeddings_padded")
            if info.load_numel == 0 or not is_padded:
                missing.append(f"{name} ({info.load_numel} of {info.load_numel_total} elements)")
        return missing

    def finish(self) -> None:
        """Give the layers the form in which they compute, whatever they have got."""
        with self._loading():
            finalize_layerwise_reload(self._model, self._worker.model_runner.model_config)
            for method, kernel in self._cpu_experts.items():  # which layers that got nothing need, too
                method.moe_kernel = kernel
            self.repack_tied()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    def repack_tied(self) -> None:
        """Pack the output layer anew where it shares its weight with the embedding: it loads nothing itself,
        so its packed copy is old.
        """
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
        """The context that vLLM's own worker loads in."""
        worker = self._worker
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
            yield


class Twin:
    """A model beside the serving one, with layers and weights of its own, which never computes. It is
    reloaded while the other generates; then the two change weights.

    That is one more set of weights in memory. Only for models that can_have_twin: what their layers hold
    besides parameters and buffers are attributes of the layers, like the packed copy of a linear layer on the
    CPU. Attention layers have no weights there, and are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[nn.Module, tuple[nn.Module, dict[str, Any]]] = {}
        self._parameters: dict[int, Tensor] = {}
        self.model = self._copied(model)

    def swap_in(self) -> None:
        """Give the serving model what was loaded."""
        for layer, (twin, before) in self._layers.items():
            layer._parameters.update(twin._parameters)
            for name, value in vars(twin).items():
                if before.get(name, self) is not value:
                    setattr(layer, name, value)

    def end_loading(self) -> None:
        """Have vLLM forget how it was loaded: what it records of a layer refers to the layer after a reload,
        so that no twin, and no weights that served once, would ever be freed.
        """
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
        """Memory of its own; one for a parameter that several layers share."""
        if parameter is None:
            return None
        if id(parameter) not in self._parameters:
            self._parameters[id(parameter)] = materialize_meta_tensor(to_meta_tensor(parameter))
        return self._parameters[id(parameter)]


def _first_form(recorded: Tensor, layer: nn.Module) -> Tensor:
    """What vLLM recorded of a tensor of this layer, for another layer, without the wrapper of a reload."""
    own = to_meta_tensor(recorded)
    if hasattr(own, "weight_loader"):
        own.weight_loader = _get_original_loader(own)
    free: Tensor = sanitize_layer_refs(own, layer)
    return free


def can_have_twin(model: nn.Module) -> bool:
    """Whether all weights are parameters of plain linear layers, embeddings and norms, on the CPU."""
    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
    return current_platform.is_cpu() and all(
        type(layer) is Attention
        if is_deferred_attention_layer(layer)
        else isinstance(getattr(layer, "quant_method", None), methods)
        and layer._buffers.keys() <= layer._non_persistent_buffers_set
        for layer in model.modules()
    )
