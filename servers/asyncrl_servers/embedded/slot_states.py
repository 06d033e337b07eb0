"""States of layers that mix tokens by a recurrence or a convolution: one for each slot.

The model's own modules compute them, with transformers' cache. A call's rows are cut by
slot, and each slot's rows go through the module with the state of that slot. Decoded
slots go through it together.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from asyncrl.models.attention_kinds import UnknownAttentionError
from asyncrl.models.rows import RowCall, by_row, joined
from asyncrl_servers.embedded.row_adapters import Adapter, InUse, in_call

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""Names that transformers gives a module's cache, the newest first."""
ALL: Any = slice(None)
Span = tuple[int, int, int, bool]
"""(first slot, end, tokens of each, whether they start a text)."""


class Running(threading.local):
    """The model call of this thread."""

    pass_: Any = None
    max_length = 0
    place = 0
    """Number of the next attention call."""
    mixer = ""
    """The module with a state that is being computed."""


running = Running()


class Cut(NamedTuple):
    """Rows `places` int64 [S, L] of a call, and the cache of these S texts."""

    places: Tensor
    cache: DynamicCache | None
    is_first: bool
    """The texts start here."""
    adapter: InUse | None = None
    """These texts have a common adapter."""


def states_of(cache: DynamicCache | None) -> list[tuple[dict[int, Tensor], int]]:
    """Return where a cache holds states, as (dictionary, key)."""
    layers = [
        layer
        for layer in getattr(cache, "layers", ())
        if hasattr(layer, "recurrent_states")
    ]
    held = [
        states
        for layer in layers
        for states in (layer.conv_states, layer.recurrent_states)
    ]
    return [
        (states, key)
        for states in held
        for key, state in states.items()
        if state is not None
    ]


class SlotStates:
    """Tensors [slots, ..] of all states, and caches that are views of them.

    Example: decoding slots 0..5 changes tensors[0][0:6] in place.
    """

    def __init__(self, example: DynamicCache | None, slots: int) -> None:
        """`example`: the cache of one text, or None."""
        self._example = example
        self._originals = [states[key] for states, key in states_of(example)]
        self.tensors = [
            one.new_zeros((slots, *one.shape[1:])) for one in self._originals
        ]
        self._views = dict[tuple[int, int], DynamicCache]()

    def cut(self, spans: Sequence[Span], adapters: Sequence[Adapter] = ()) -> list[Cut]:
        """Return the rows and caches of spans, which follow each other in a call.
        `adapters`: of each slot.
        """
        cuts, row = list[Cut](), 0
        for start, end, tokens, is_first in spans if self.tensors else ():
            last = row + (end - start) * tokens
            place_SL = torch.arange(row, last, device=self.tensors[0].device).view(
                -1, tokens
            )
            view = self._view(start, end, is_first)
            of_cut = InUse(adapters[start].low_ranks) if adapters else None
            cuts.append(Cut(place_SL, view, is_first, of_cut))
            row = last
        return cuts

    def _view(self, start: int, end: int, is_first: bool) -> DynamicCache:
        if (start, end) not in self._views:
            # The memo of deepcopy: for these tensors it takes the views as copies that
            # exist already. So the modules write into the slots in place, and nothing
            # is gathered for a step.
            parts = {
                id(old): new[start:end]
                for old, new in zip(self._originals, self.tensors, strict=True)
            }
            self._views[start, end] = copy.deepcopy(self._example, parts)
        cache = self._views[start, end]
        # Otherwise a text would continue from the state of the last text in its slot.
        if is_first:
            cache.reset()
        return cache

    def copy(self, sources: list[int], targets: list[int]) -> None:
        for one in self.tensors:
            one[targets] = one[sources]


class Mixer:
    """A module with a state, whose forward runs over the slots of this thread's pass."""

    def __init__(self, name: str, module: nn.Module) -> None:
        """Replace the module's forward by this object. Raises UnknownAttentionError."""
        self._name, self._forward = name, module.forward
        self._signature = inspect.signature(module.forward)
        names = [one for one in CACHE_NAMES if one in self._signature.parameters]
        if not names:
            raise UnknownAttentionError(
                f"{name} mixes tokens, and its state is not in transformers' cache"
            )
        self._cache_name = names[0]
        self.is_continuing = True
        """Whether it reads several tokens after others at once; if not, it takes them
        one by one.
        """
        for part in module.modules():
            if hasattr(part, "time_step_limit"):
                limit_time_steps(part)
        module.forward = self

    def __call__(self, *args: object, **options: object) -> object:
        bound = self._signature.bind(*args, **options)
        calls = list[RowCall]()
        outputs = list[object]()
        running.mixer, of_call = self._name, in_call.of_layers
        try:
            for place_SL, cache, is_first, of_cut in running.pass_.cuts:
                in_call.of_layers = of_cut
                # Some modules ignore their state when they read several tokens. Those
                # get the tokens of a continued text one by one.
                size = place_SL.shape[1] if is_first or self.is_continuing else 1
                for part_SL in place_SL.split(size, dim=1):
                    calls.append(RowCall(part_SL, ALL, ALL))
                    outputs.append(self._read(bound, part_SL, cache))
                if running.pass_.known is not None:
                    self._probe(bound, place_SL, cache)
        finally:
            running.mixer, in_call.of_layers = "", of_call
        return joined(outputs, calls, ALL)

    def _read(
        self,
        bound: inspect.BoundArguments,
        place_SL: Tensor,
        cache: DynamicCache | None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute rows of a call, and change their states."""
        num_rows = next(
            one.shape[1] for one in bound.arguments.values() if isinstance(one, Tensor)
        )
        arguments = by_row(dict(bound.arguments), RowCall(place_SL, ALL, ALL), num_rows)
        call = inspect.BoundArguments(
            self._signature, arguments | {self._cache_name: cache}
        )
        output: Tensor | tuple[Tensor, ...] = self._forward(*call.args, **call.kwargs)
        return output

    def _probe(
        self,
        bound: inspect.BoundArguments,
        place_SL: Tensor,
        cache: DynamicCache | None,
    ) -> None:
        """Look whether later tokens depend on each state of a first text. NaN in a
        state reaches the output however small weights are. Raises
        UnknownAttentionError.
        """
        own = [
            (states, key)
            for states, key in states_of(cache)
            if id(states) not in running.pass_.known
        ]
        if not own:
            raise UnknownAttentionError(
                f"{self._name} mixes tokens, and has no state in transformers' cache"
            )
        for states, key in own:
            running.pass_.known.add(id(states))
            poison = torch.full_like(states[key], torch.nan)
            # One token must continue from the state, or decoding is impossible. Several
            # need not: then is_continuing is false.
            for rows_SL in (place_SL[:, :1], place_SL):
                output = self._read(
                    bound,
                    rows_SL,
                    copy.deepcopy(cache, {id(states[key]): poison.clone()}),
                )
                is_read = bool(
                    (output[0] if isinstance(output, tuple) else output).isnan().any()
                )
                if not is_read and rows_SL.shape[1] == 1:
                    raise UnknownAttentionError(
                        f"{self._name} does not continue from its state"
                    )
                self.is_continuing &= is_read


def limit_time_steps(module: Any) -> None:
    """Apply a Mamba 2 module's limits of time steps to decoded tokens too: transformers
    applies them to several tokens only. A step is softplus(projected + bias) of the
    last columns of in_proj.
    """
    low, high = module.time_step_limit
    if (low, high) == (0.0, float("inf")):
        return

    def limited(in_proj: nn.Module, inputs: object, projected: Tensor) -> Tensor:
        bias_H = module.dt_bias.float()
        # The inverse of softplus.
        limits = [
            bias_H.new_tensor(limit, dtype=torch.float64).expm1().log()
            for limit in (low, high)
        ]
        rest = projected.shape[-1] - len(bias_H)
        steps = projected[..., rest:].clamp(
            *((limit - bias_H).to(projected.dtype) for limit in limits)
        )
        return torch.cat((projected[..., :rest], steps), dim=-1)

    module.in_proj.register_forward_hook(limited)
