"""Float32 master weights under a model that computes in bfloat16, in one process. Knows parameters alone.

The forward pass runs entirely in bfloat16, like the engine's; each micro-batch's bfloat16 gradients are added up in float32,
the optimizer works on the float32 masters, and the model gets them rounded. In float32 the parameters are their own masters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class MasterWeights:
    """Named float32 weights that an optimizer steps on. Life: made once; after each optimizer step write_back().

    Invariant: outside of a step the model's weights are the masters, rounded to its dtype.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """`model` holds float32 weights; with bfloat16 it is converted. Only parameters that require a gradient have a master."""
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if dtype == torch.float32:
            self.named: dict[str, Tensor] = dict(named)
            self._working: dict[str, nn.Parameter] = {}
            return
        self.named = {name: parameter.detach().clone() for name, parameter in named.items()}
        for parameter in model.parameters():  # buffers stay: a rotary embedding's frequencies must not be rounded
            parameter.data = parameter.data.to(dtype)
        self._working = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, parameter in self._working.items():
            parameter.register_post_accumulate_grad_hook(self._collector(self.named[name]))  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return f"<MasterWeights {len(self.named)} tensors, {'rounded to the model' if self._working else 'the model itself'}>"

    @staticmethod
    def _collector(master: Tensor) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            """Move the gradient of one backward pass into the master's sum."""
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return collect

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the model the masters as they are now."""
        for name, parameter in self._working.items():
            parameter.copy_(self.named[name])
