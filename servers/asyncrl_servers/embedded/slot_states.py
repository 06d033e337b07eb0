"""States of layers that mix tokens by a recurrence or a convolution: one state for each slot.

The model's own modules compute them, with transformers' own caches. A call's rows are cut by slot, and each
slot's rows go through the module with the state of that slot. One-token rows of slots 0..n-1 go through it
as one batch.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from asyncrl.models.attention_kinds import UnknownAttentionError
from asyncrl.models.structure import backbone_of

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""Names that transformers gives the cache, the newest first."""
FREE = (0.0, float("inf"))
"""No limits of time steps."""
Place = tuple[Any, Any]
"""(dictionary or list, key) of a tensor."""


class Running(threading.local):
    """The model call of this thread."""

    pass_: Any = None
    max_length = 0
    place = 0
    """Number of the next attention call."""
    mixer = ""
    """The module with a state that is being computed."""


running = Running()


def new_cache(model: Any) -> Any:
    """Return an empty cache of the class that the model's forward asks for."""
    parameters = inspect.signature(backbone_of(model).forward).parameters
    wanted = [kind for name in CACHE_NAMES if name in parameters for kind in get_args(parameters[name].annotation)]
    own = [kind for kind in wanted if issubclass(kind, DynamicCache) and kind is not DynamicCache]
    cache = own[0]() if own else DynamicCache(config=model.config)
    cache.of_modules = {}
    return cache


def places_of(cache: Any) -> Iterator[Place]:
    """Yield the places of all tensors of a cache, in an order that depends on its structure only."""
    held = cache if isinstance(cache, dict | list) else vars(cache)
    for key, value in held.items() if isinstance(held, dict) else enumerate(held):
        is_part = type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__")
        if isinstance(value, Tensor):
            if value.ndim:  # a sliding window's length is a scalar
                yield held, key
        elif isinstance(value, dict | list) or (is_part and not isinstance(value, PretrainedConfig)):
            yield from places_of(value)


class SlotStates:
    """Tensors [slots, ..] of all states, and caches that are views of them.

    Example: decoding slots 0..5 reads and writes tensors[0][0:6]. A text that starts in slot 7 fills a new
    cache, which store() copies to tensors[..][7:8].
    """

    def __init__(self, empty: Any, example: Any, slots: int, device: torch.device) -> None:
        """`example`: the cache of one text, or None."""
        self._empty = empty
        self._example = example
        self._originals = [held[key] for held, key in places_of(example)] if example is not None else []
        self.tensors = [
            torch.zeros((slots, *one.shape[1:]), dtype=one.dtype, device=device) for one in self._originals
        ]
        self._views = dict[tuple[int, int], tuple[Any, list[Place]]]()

    def empty(self) -> Any:
        return copy.deepcopy(self._empty)

    def view(self, start: int, end: int) -> Any:
        """Return the cache of slots [start, end)."""
        if (start, end) not in self._views:
            parts = {id(old): new[start:end] for old, new in zip(self._originals, self.tensors, strict=True)}
            cache = copy.deepcopy(self._example, parts)
            self._views[start, end] = cache, [*places_of(cache)]
        return self._views[start, end][0]

    def store(self, start: int, end: int, cache: Any) -> None:
        """Copy tensors that modules replaced."""
        seen, places = self._views.get((start, end), (None, []))
        is_view = seen is cache
        for (held, key), whole in zip(places if is_view else places_of(cache), self.tensors, strict=True):
            part = whole[start:end]
            if held[key].data_ptr() == part.data_ptr():
                continue
            if held[key].shape != part.shape:
                raise RuntimeError(f"a state has shape {[*held[key].shape]}, not {[*part.shape]}")
            part.copy_(held[key])
            if is_view:
                held[key] = part

    def copy(self, source: int, target: int) -> None:
        for one in self.tensors:
            one[target] = one[source]


class SlotCalls:
    """The cuts of a call's rows, and the cache of each."""

    def __init__(self, states: SlotStates, stretches: Sequence[Any]) -> None:
        """Neighboring slots with one token each are one cut."""
        self._states = states
        self.cuts = list[tuple[int, int, int, bool]]()
        """(first slot, end, tokens of each, whether they start a text) in the order of rows."""
        for one in stretches:
            start = one.start
            if self.cuts and one.tokens == 1 and self.cuts[-1][1:] == (start, 1, False) and not one.is_first:
                start = self.cuts.pop()[0]
            self.cuts.append((start, one.end, one.tokens, one.is_first))
        self.caches = [
            states.empty() if is_first else states.view(start, end) for start, end, _, is_first in self.cuts
        ]

    def store(self) -> None:
        for (start, end, _, _), cache in zip(self.cuts, self.caches, strict=True):
            self._states.store(start, end, cache)


class Mixer:
    """A module with a state, whose forward runs over the slots of this thread's pass."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._forward: Callable[..., Any] = module.forward
        self._signature = inspect.signature(self._forward)
        self._cache_name = next((one for one in CACHE_NAMES if one in self._signature.parameters), None)
        self._attributes = list[tuple[nn.Module, str]]()
        """Where a module without a cache keeps its state (RecurrentGemma)."""
        for part in module.modules() if self._cache_name is None else ():
            self._attributes += [(part, key) for key in vars(part) if key.endswith(("_state", "_states"))]
        self._num_outputs = 0
        """Length of the tuple that it returns; 0: a tensor."""
        self.is_continuing = True
        """Whether it reads several tokens after others at once; if not, it takes them one by one."""
        module.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        hidden = next(one for one in bound.arguments.values() if isinstance(one, Tensor))
        lead, pass_ = hidden.shape[:2], running.pass_
        running.mixer = self._name
        try:
            if pass_.calls is None:
                found = self._probe(bound, lead, pass_.state)
            else:
                found = self._run(bound, lead, pass_.calls)
        finally:
            running.mixer = ""
        output = found.view(*lead, *found.shape[1:])
        return (output, *[None] * (self._num_outputs - 1)) if self._num_outputs else output

    def _run(self, bound: Any, lead: torch.Size, calls: SlotCalls) -> Tensor:
        """Return the output [R, ..] of all cuts."""
        outputs, row = list[Tensor](), 0
        for (start, end, tokens, is_first), cache in zip(calls.cuts, calls.caches, strict=True):
            size = tokens if is_first or self.is_continuing else 1
            for _ in range(tokens // size):
                rows = slice(row, row + (end - start) * size)
                outputs.append(self._read(bound, lead, rows, end - start, cache))
                row = rows.stop
        return torch.cat(outputs)

    def _read(self, bound: Any, lead: torch.Size, rows: slice, batch: int, cache: Any) -> Tensor:
        """Return the output [R, ..] of rows of `batch` texts, whose states are in the cache."""

        def cut(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: cut(one) for key, one in value.items()}
            if isinstance(value, tuple | list):
                return type(value)(cut(one) for one in value)
            is_of_rows = isinstance(value, Tensor) and value.shape[:2] == lead
            return value.flatten(0, 1)[rows].unflatten(0, (batch, -1)) if is_of_rows else value

        arguments = cut(bound.arguments)
        if self._cache_name is not None:
            arguments[self._cache_name] = cache
        if "use_cache" in self._signature.parameters:
            arguments["use_cache"] = True
        call = inspect.BoundArguments(self._signature, arguments)
        keys = [f"{self._name} {number}" for number in range(len(self._attributes))]
        for (part, attribute), key in zip(self._attributes, keys, strict=True):
            setattr(part, attribute, cache.of_modules.get(key))
        output = self._forward(*call.args, **call.kwargs)
        for (part, attribute), key in zip(self._attributes, keys, strict=True):
            cache.of_modules[key] = getattr(part, attribute)
            setattr(part, attribute, None)
        self._num_outputs = len(output) if isinstance(output, tuple) else 0
        return (output[0] if self._num_outputs else output).flatten(0, 1)

    def _probe(self, bound: Any, lead: torch.Size, cache: Any) -> Tensor:
        """Read a first text, and look which of its states later tokens depend on. A state full of NaN reaches
        the output however small weights are. Raises UnknownAttentionError.
        """
        known = {(id(held), key) for held, key in places_of(cache)}
        output = self._read(bound, lead, slice(None), 1, cache)
        own = [(held, key) for held, key in places_of(cache) if (id(held), key) not in known]
        if not own:
            raise UnknownAttentionError(f"{self._name} mixes tokens and keeps no state in a cache")
        for held, key in own:
            state = held[key]
            for rows in (slice(0, 1), slice(None)):
                copied = copy.deepcopy(cache, {id(state): torch.full_like(state, torch.nan)})
                is_read = bool(self._read(bound, lead, rows, 1, copied).isnan().any())
                sizes = [[at[name].shape for at, name in places_of(one)] for one in (cache, copied)]
                if sizes[0] != sizes[1] or len(state) != 1:
                    raise UnknownAttentionError(f"the state of {self._name} grows with the text")
                if not is_read and rows.stop == 1:
                    raise UnknownAttentionError(f"{self._name} does not continue its state")
                self.is_continuing &= is_read
        return output


def use_slots(model: Any, names: Sequence[str]) -> list[Mixer]:
    """Let these modules run over slots. Raises UnknownAttentionError."""
    mixers = list[Mixer]()
    for name in names:
        module = model.get_submodule(name)
        for part in module.modules():
            if tuple(getattr(part, "time_step_limit", None) or FREE) != FREE:
                limit_time_steps(name, part)
        mixers.append(Mixer(name, module))
    return mixers


def limit_time_steps(name: str, module: Any) -> None:
    """Apply a Mamba 2 module's limits of time steps to its decoded tokens too: transformers applies them to
    several tokens only. The limits of softplus(step + bias) are those of the steps, the last columns of
    in_proj.
    """
    if hasattr(module, "mup_vector") or not hasattr(module, "dt_bias"):
        raise UnknownAttentionError(f"{name} has time_step_limit={module.time_step_limit}")

    def limited(in_proj: nn.Module, inputs: Any, projected: Tensor) -> Tensor:
        bias_H = module.dt_bias.float()
        ends = bias_H.new_tensor(module.time_step_limit)
        # The inverse of softplus, which is the identity for large steps.
        low, high = torch.where(ends > 20, ends, ends.expm1().log())
        rest, steps = projected.split((projected.shape[-1] - len(bias_H), len(bias_H)), dim=-1)
        steps = steps.clamp((low - bias_H).to(steps.dtype), (high - bias_H).to(steps.dtype))
        return torch.cat((rest, steps), dim=-1)

    module.in_proj.register_forward_hook(limited)
