"""Import transformers without torch._dynamo: 2,000 files that a run on CPUs never uses.

The fork server of such a run imports this module first. transformers only decorates kernels of its own with
dynamo's marks, and opens one of its contexts; torch.compile still loads dynamo when it is called.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

CONTEXTS = "torch._dynamo._trace_wrapped_higher_order_op"
USERS = ("transformers.modeling_layers", "transformers.masking_utils")
"""Modules of transformers that import all others with dynamo's marks."""


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """Stand in for dynamo's decorators."""
    return function or _unmarked


def _context() -> Any:
    return importlib.import_module(CONTEXTS).TransformGetItemToIndex()


def import_transformers() -> None:
    dynamo: Any = ModuleType("torch._dynamo")
    dynamo.allow_in_graph = dynamo.assume_constant_result = dynamo.disable = _unmarked
    contexts: Any = ModuleType(CONTEXTS)
    contexts.TransformGetItemToIndex = _context
    sys.modules.update({"torch._dynamo": dynamo, CONTEXTS: contexts})
    vars(torch)["_dynamo"] = dynamo
    try:
        for name in USERS:
            importlib.import_module(name)
    finally:
        del sys.modules["torch._dynamo"], sys.modules[CONTEXTS], vars(torch)["_dynamo"]


if not torch.cuda.is_available():
    import_transformers()
