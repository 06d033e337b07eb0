"""Load weights into a vLLM model by layerwise reload: it restores a layer, buffers its tensors, and packs
it when complete. Plain `model.load_weights` fails after packing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


class Reload:
    """Life: made -> begin() -> add(), repeatedly -> finish(). The model cannot compute in between."""

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
        """Restore the computing form, complete or not."""
        with self._loading():
            finalize_layerwise_reload(self._model, self._worker.model_runner.model_config)
            for method, kernel in self._cpu_experts.items():
                method.moe_kernel = kernel
            self.repack_tied()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    def repack_tied(self) -> None:
        """Repack an output layer that shares the embedding's weight."""
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
        worker = self._worker
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
            yield
