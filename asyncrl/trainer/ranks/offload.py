"""Move a trainer's tensors off its device and back.

weights/aside.py copies storages to host memory, of a CPU to a file; tensors stay the
same objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.base.http import Refused
from asyncrl.config.offload_config import ModelPart, Rule
from asyncrl.messages.engine_api import TrainerPart, TransferStats
from asyncrl.trainer.ranks.ranks import Ranks
from asyncrl.weights.aside import (
    Copies,
    content_in,
    copy_back,
    copy_out,
    free_storages,
    give_back,
    memory_beside,
    transfer_stats,
)

T = TypeVar("T")


class Offload:
    """Tracks parts of the trainer's models off their device. Collective.

    A part may leave for two reasons. The engines' time slice takes the device: offload() and
    onload(), which leave parts with the rule "never" on the device. Or another part
    works: use() brings its parts and sends those with the rule "always" away.

    Example: the rule of the critic's weights is "always".
        use(policy weights)       the critic's weights leave
        use(critic weights)       they come back
        offload(["weights"])      all weights leave; use() of any is refused
        onload(["weights"])       the policy's come back, the critic's with its next use()

    Invariant: a part is here or away on all ranks: a move that fails on one rank is
        reverted on the others.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        tensors_of: Callable[[ModelPart], Iterable[Tensor]],
        rules: Mapping[ModelPart, Rule],
        folder: Path,
    ) -> None:
        """`folder`: for files with what leaves a CPU."""
        self._ranks = ranks
        self._device = device
        self._tensors_of = tensors_of
        self._rules = rules
        self._memory = {one: memory_beside(device, folder) for one in rules}
        self._copies: dict[ModelPart, Copies] = {}
        self._taken = frozenset[TrainerPart]()

    @property
    def taken(self) -> frozenset[TrainerPart]:
        """Return the parts whose device others have: offload() since the last onload()."""
        return self._taken

    def offload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Move `parts`. Raises Refused and moves nothing."""
        leaving = frozenset(parts)
        moving = [
            one
            for one, rule in self._rules.items()
            if one.part in leaving and rule != "never"
        ]
        moved = self._move_out(moving)
        self._taken |= leaving
        return moved

    def onload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        """Restore `parts`, bit for bit. Raises Refused and moves nothing."""
        returning = frozenset(parts)
        moving = [
            one
            for one, rule in self._rules.items()
            if one.part in returning and rule != "always"
        ]
        moved = self._move_in(moving)
        self._taken -= returning
        return moved

    def is_settled(self, used: Sequence[ModelPart]) -> bool:
        """Return whether use() has nothing to move."""
        return self._copies.keys().isdisjoint(used) and not self._idle(used)

    def use(self, used: Sequence[ModelPart]) -> None:
        """Bring `used` parts to the device, after sending the unused parts with the rule
        "always" away. Raises Refused.
        """
        self._move_out(self._idle(used))
        self._move_in(used)

    def forget(self, one: ModelPart) -> None:
        """Count a part as here whose tensors were dropped."""
        if self._copies.pop(one, None) is not None and self._device.type == "cpu":
            self._memory[one].free()

    def _idle(self, used: Sequence[ModelPart]) -> list[ModelPart]:
        """Return the parts on the device that use() sends away."""
        return [
            one
            for one, rule in self._rules.items()
            if rule == "always" and one not in used and one not in self._copies
        ]

    def _move_out(self, parts: Iterable[ModelPart]) -> TransferStats:
        started_s = time.perf_counter()
        moving = [one for one in parts if one not in self._copies]

        def copied(moved: ModelPart) -> Copies:
            locals_ = map(local_of, self._tensors_of(moved))
            return copy_out(locals_, self._device, self._memory[moved])

        what = f"offload {_named(moving)}"
        copies = self._together(what, lambda: {one: copied(one) for one in moving})
        num_bytes = sum(free_storages(copied) for copied in copies.values())
        self._copies |= copies
        for one in moving:
            self._memory[one].drop_pages()
        give_back(self._device)
        return transfer_stats(sum(self._ranks.gather(num_bytes)), started_s)

    def _move_in(self, parts: Iterable[ModelPart]) -> TransferStats:
        started_s = time.perf_counter()
        moving = [one for one in parts if one in self._copies]
        copied = [entry for one in moving for entry in self._copies[one]]

        try:
            # A failure on this rank or another gives the memory back everywhere. The
            # host copies are untouched, so the call may be repeated.
            way_out = "free memory of the device (lower the engine's rollout.slots, say) and try again."
            what = f"onload {_named(moving)}"
            self._together(what, lambda: copy_back(copied, self._device), way_out)
        except Refused:
            free_storages(copied)
            give_back(self._device)
            raise
        for one in moving:
            del self._copies[one]
            if self._device.type == "cpu":  # no second copy stays in the same memory
                self._memory[one].free()
        num_bytes = sum(len(data) for _, data in copied)
        return transfer_stats(sum(self._ranks.gather(num_bytes)), started_s)

    def need(self, what: str, *parts: TrainerPart) -> None:
        """Raise Refused if others have the device of some of `parts`."""
        if missing := [part for part in parts if part in self._taken]:
            error = f"cannot {what}: {' and '.join(missing)} offloaded"
            way_out = f"POST /onload with parts {missing} first."
            raise Refused(
                409, error, rule="it needs them on its device", way_out=way_out
            )

    def content_of(self, local: Tensor) -> Tensor:
        """Return `local`, or its content while away, valid until the next offload()."""
        copies = [entry for copied in self._copies.values() for entry in copied]
        return content_in(copies, local)

    def _together(
        self, what: str, move: Callable[[], T], way_out: str = "free host memory."
    ) -> T:
        """Call `move` on all ranks. Raises Refused on all if it fails on one."""

        def moved() -> T:
            try:
                return move()
            except (OSError, MemoryError, RuntimeError) as error:
                reason = f"{type(error).__name__}: {str(error)[:500]}"
                failed = f"cannot {what} on rank {self._ranks.rank}: {reason}"
                rule = "if a part cannot be moved on one rank, it stays where it was on all ranks"
                raise Refused(507, failed, rule=rule, way_out=way_out) from error

        return self._ranks.agree(moved)


def _named(parts: Iterable[ModelPart]) -> str:
    return ", ".join(f"{one.model} {one.part}" for one in parts)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
