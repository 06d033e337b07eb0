"""The memory of tensors that operators make, counted without the allocator."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`most`: bytes of all storages that operators in the block have returned and that
    live at the same time. A tensor that an operator changes in place counts too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        operator: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = operator(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, key)
            self.most = max(self.most, sum(self._sizes.values()))
