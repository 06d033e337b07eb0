"""Handovers under faults and cancellation at any call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Literal, get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from asyncrl.base.errors import ComponentError
from asyncrl.launch.lease import Call, Lease, Side
from asyncrl.messages.engine_api import EnginePart, TransferStats
from asyncrl.testing.virtual_time import run_virtual

TIMEOUT_S = 30.0
Fault = Literal["refuse", "half", "hang", "cancel", "cancel_after", "bug"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class World:
    """A device, who holds what on it, and the faults of single calls by their number.
    Every call takes a second.
    """

    def __init__(
        self,
        num_engines: int = 2,
        trainer: Sequence[str] = (),
        *,
        stays: bool = False,
        has_server: bool = False,
    ) -> None:
        self.stays, self.resting = stays, {"weights", "optimizer"} if stays else set()
        self.trainer, self.trained = {*trainer, *self.resting}, 0
        self.engines = [
            FakeEngine(self, f"engine-{index}") for index in range(num_engines)
        ]
        # A server that scores rollouts is awake or not as a whole.
        self.server = {"model"} if has_server else set[str]()
        self.of_server = {*self.server}
        without = {"trainer": stays, "servers": not has_server}
        self.lease = Lease(
            calls=self.calls,
            timeout_s=TIMEOUT_S,
            on_change=lambda: None,
            without=[name for name, is_left_out in without.items() if is_left_out],
        )

    def calls(self, call: Call) -> dict[str, Awaitable[TransferStats]]:
        if call.of == "publisher":
            return {"publisher": self.push()}
        if call.of == "trainer":
            change = (
                self.trainer.discard if call.verb == "offload" else self.trainer.add
            )
            return {"trainer": self.call(call.parts, change)}
        if call.of == "servers":
            is_asleep = call.verb == "sleep"
            change = self.server.discard if is_asleep else self.server.add
            return {"reward": self.call(("model",), change)}
        if call.verb == "sleep":
            return {engine.name: engine.sleep(call.parts) for engine in self.engines}
        return {engine.name: engine.wake(call.parts) for engine in self.engines}

    async def call(self, parts: Sequence[str], change: Any) -> TransferStats:
        """One call: `change(part)` for each part, unless a fault says otherwise."""
        fault = self.faults.get(self._calls)
        self._calls += 1
        if fault is not None:
            (self.hit_in_undo if self.hit else self.hit).append(fault)
        await asyncio.sleep(1.0)
        if fault in ("refuse", "bug"):
            raise (
                ComponentError("it", "no memory")
                if fault == "refuse"
                else KeyError("a bug")
            )
        if fault == "hang":
            await asyncio.sleep(10 * TIMEOUT_S)
        if fault == "cancel":
            await self.cancel()
        for part in parts[: 1 if fault == "half" else None]:
            change(part)
            self.check()
        if fault == "half":
            raise ComponentError("it", "the answer is lost")
        if fault == "cancel_after":
            await self.cancel()
        return TransferStats(num_bytes=10 * len(parts), seconds=1.0)

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.sleep(1.0)  # raises here, unless an undo is not to be cut short

    def check(self) -> None:
        """Two sets of weights are the most that both sides may hold together."""
        engine_parts = set().union(*(engine.awake for engine in self.engines))
        if self.stays:
            assert self.trainer >= self.resting, "nobody asked the trainer to move"
        elif self.lease.state != "idle" and self.lease.owner is not None:
            shared = f"{self.trainer} beside {engine_parts} ({self.lease})"
            assert not (self.trainer and "kv" in engine_parts), shared
            assert not (self.trainer and self.server), shared
            assert not (self.trainer - {"weights"} and engine_parts), shared

    async def push(self) -> TransferStats:
        def bring(_part: str) -> None:
            assert "weights" in self.trainer, "there is nothing to push"
            for engine in self.engines:
                assert "weights" in engine.awake, "there is no room for it"
                if engine.version is not None:
                    raise ComponentError(
                        engine.name,
                        "a chunk would be written over weights that are served",
                    )
            for engine in self.engines:
                engine.version = engine.committed = self.trained

        return await self.call(("weights",), bring)

    def run(
        self, to: Side, faults: dict[int, Fault] | None = None
    ) -> BaseException | None:
        """One handover; the error that it raised."""
        self.faults, self._calls, self.hit, self.hit_in_undo = faults or {}, 0, [], []

        async def story() -> BaseException | None:
            self.task = asyncio.create_task(self.lease.hand_to(to), name="handover")
            (outcome,) = await asyncio.gather(self.task, return_exceptions=True)
            assert len(asyncio.all_tasks()) == 1, "something is still under way"
            return outcome if isinstance(outcome, BaseException) else None

        return run_virtual(story())

    def assert_rests(self, side: Side) -> None:
        """The owner has all that it needs, the other one nothing."""
        assert self.lease.owner == side
        assert self.server == (self.of_server if side == "engines" else set())
        if side == "engines":
            assert (self.lease.state, self.trainer) == ("generating", self.resting)
            for engine in self.engines:
                assert engine.awake == {"weights", "kv"}, (
                    f"{engine.name} was left paused: {engine.awake}"
                )
                assert engine.version is not None, (
                    f"{engine.name} has memory without content"
                )
        else:
            assert (self.lease.state, self.trainer) == (
                "training",
                {"weights", "optimizer"},
            )
            assert not any(engine.awake for engine in self.engines)


class FakeEngine:
    """Weights and a KV cache that can be given away; weights that wake have no version."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self._world = name, world
        self.awake: set[str] = {"weights", "kv"}
        self.version: int | None = 0
        self.committed = 0

    async def sleep(self, parts: Sequence[EnginePart]) -> TransferStats:
        def change(part: str) -> None:
            self.awake.discard(part)
            self.version = None if part == "weights" else self.version

        return await self._world.call(parts, change)

    async def wake(self, parts: Sequence[EnginePart]) -> TransferStats:
        return await self._world.call(parts, self.awake.add)


class Handovers(RuleBasedStateMachine):
    """Handovers with faults at any call, also of the undo; a broken lease is the end."""

    @initialize(
        num_engines=st.integers(1, 3),
        first=st.sampled_from(["engines", "trainer"]),
        stays=st.booleans(),
        has_server=st.booleans(),
        faults=st.dictionaries(st.integers(0, 8), st.sampled_from(FAULTS), max_size=1),
    )
    def begin(
        self,
        num_engines: int,
        first: Side,
        stays: bool,
        has_server: bool,
        faults: dict[int, Fault],
    ) -> None:
        """A start that fails is undone, and can be repeated."""
        self.world = World(
            num_engines,
            trainer=("weights", "optimizer"),
            stays=stays,
            has_server=has_server and not stays,
        )
        failed = self.world.run(first, faults) is not None
        assert failed == bool(self.world.hit)
        if failed:
            assert (self.world.lease.state, self.world.lease.owner) == ("idle", None)
            assert self.world.run("engines") is None
        self.world.assert_rests("engines" if failed else first)

    @rule(
        faults=st.dictionaries(st.integers(0, 18), st.sampled_from(FAULTS), max_size=3)
    )
    @precondition(lambda self: self.world.lease.state != "broken")
    def hand_over(self, faults: dict[int, Fault]) -> None:
        world, lease = self.world, self.world.lease
        before, to = lease.owner, "trainer" if lease.owner == "engines" else "engines"
        error = world.run(to, faults)
        if lease.state == "broken":
            assert set(world.hit_in_undo) - {"cancel", "cancel_after"}, (
                "it broke without a fault in an undo"
            )
            assert "and so did" in lease.broken
        elif error is None:
            assert not world.hit, f"{world.hit} had no effect"
            world.assert_rests(to)
        else:
            assert world.hit
            world.assert_rests(before)
        if {"cancel", "cancel_after"} & {*world.hit, *world.hit_in_undo}:
            assert isinstance(error, asyncio.CancelledError)
        elif error is not None:
            assert isinstance(error, ComponentError | KeyError)

    @rule()
    @precondition(lambda self: self.world.lease.owner == "trainer")
    def train(self) -> None:
        self.world.trained += 1
        self.world.trainer.add("gradients")
        self.world.check()
        self.world.trainer.discard("gradients")

    @rule()
    @precondition(lambda self: self.world.lease.state == "broken")
    def nothing_comes_after_a_broken_lease(self) -> None:
        error = self.world.run("trainer")
        assert isinstance(error, ComponentError)
        assert self.world.lease.broken in str(error)

    @invariant()
    def there_is_one_owner_and_engines_serve_what_was_pushed(self) -> None:
        assert (self.world.lease.owner is None) == (self.world.lease.state == "broken")
        self.world.check()
        if self.world.lease.owner == "engines":
            assert all(
                engine.version == engine.committed for engine in self.world.engines
            )


TestHandovers = Handovers.TestCase
TestHandovers.settings = settings(
    max_examples=50, stateful_step_count=12, deadline=None
)


def test_error_names_phase_cause_and_owner() -> None:
    world = World()
    assert world.run("engines") is None
    error = world.run("trainer", {2: "refuse"})
    undone = "undone, the devices belong to the engines as before"
    assert (
        f"while 'trainer: onload weights and optimizer': it: no memory; {undone}"
        in str(error)
    )
    error = world.run("trainer", {2: "refuse", 3: "hang"})
    assert (
        "and so did 'trainer: offload gradients and optimizer' (trainer: offload was"
        in str(error)
    )
