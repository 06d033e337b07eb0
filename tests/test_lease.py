"""The lease alone: whose turn it is, what a handover does, and what undoes it."""

from __future__ import annotations

import pytest

from asyncrl.errors import RoomError
from asyncrl.placement.lease import (
    TO_ENGINES,
    TO_TRAINER,
    Call,
    EngineCall,
    Lease,
    PushCall,
    Side,
    TrainerCall,
)


def hand(lease: Lease, to: Side, *, now_s: float = 0.0, phase_s: float = 1.0) -> list[str]:
    """A whole handover; names of its phases."""
    names = []
    lease.begin_nowait(to, now_s)
    while (phase := lease.begin_phase_nowait(now_s)) is not None:
        names.append(phase.name)
        now_s += phase_s
        lease.finish_phase_nowait(now_s, num_bytes=10)
    lease.finish_nowait(now_s)
    return names


def test_a_turn_goes_from_the_engines_to_the_trainer_and_back() -> None:
    lease = Lease()
    assert (lease.state, lease.owner) == ("idle", None)
    hand(lease, "engines")
    assert (lease.state, lease.owner) == ("generating", "engines")
    assert hand(lease, "trainer") == ["engines sleep", "trainer onloads"]
    assert (lease.state, lease.owner) == ("training", "trainer")
    assert hand(lease, "engines") == [
        "trainer offloads gradients and optimizer",
        "engines wake weights",
        "push weights",
        "trainer offloads weights",
        "engines wake kv",
    ]
    assert (lease.state, lease.owner) == ("generating", "engines")


def test_a_run_that_is_resumed_may_begin_with_the_trainer() -> None:
    lease = Lease()
    assert hand(lease, "trainer") == ["engines sleep", "trainer onloads"]
    assert lease.owner == "trainer"


def test_the_owner_stays_until_the_handover_is_over() -> None:
    lease = Lease()
    hand(lease, "engines")
    lease.begin_nowait("trainer", 0.0)
    while lease.begin_phase_nowait(0.0) is not None:
        assert lease.owner == "engines"
        lease.finish_phase_nowait(0.0)
    assert lease.owner == "engines"
    lease.finish_nowait(0.0)
    assert lease.owner == "trainer"


def test_every_phase_and_the_whole_are_timed() -> None:
    lease = Lease()
    lease.begin_nowait("trainer", 100.0)
    lease.begin_phase_nowait(100.0)
    assert lease.phase == "engines sleep"
    assert lease.finish_phase_nowait(102.5, num_bytes=7).seconds == 2.5
    assert lease.phase == ""
    lease.begin_phase_nowait(102.5)
    lease.finish_phase_nowait(103.0, num_bytes=8)
    report = lease.finish_nowait(103.5)
    assert [(time.name, time.seconds, time.num_bytes) for time in report.phases] == [
        ("engines sleep", 2.5, 7),
        ("trainer onloads", 0.5, 8),
    ]
    assert report.seconds == 3.5
    assert lease.stats().handover_s == 3.5
    assert lease.stats().num_handovers == 1


@pytest.mark.parametrize("num_done", range(5))
def test_a_phase_that_fails_undoes_itself_and_those_before_it_in_reverse(num_done: int) -> None:
    lease = Lease()
    hand(lease, "trainer")
    lease.begin_nowait("engines", 0.0)
    for _ in range(num_done):
        lease.begin_phase_nowait(0.0)
        lease.finish_phase_nowait(0.0)
    lease.begin_phase_nowait(0.0)
    undos = lease.fail_nowait("out of memory")
    calls: list[tuple[str, Call]] = [
        ("trainer offloads gradients and optimizer", TrainerCall("onload", ("optimizer",))),
        ("engines wake weights", EngineCall("sleep", ("weights",))),
        ("trainer offloads weights", TrainerCall("onload", ("weights",))),
        ("engines wake kv", EngineCall("sleep", ("kv",))),
    ]
    begun = [phase.name for phase in TO_ENGINES[: num_done + 1]]
    assert [(undo.phase, undo.call) for undo in undos] == [
        call for call in reversed(calls) if call[0] in begun
    ]
    report = lease.undone_nowait(2.0)
    assert report.failed == begun[-1]
    assert (lease.state, lease.owner) == ("training", "trainer")
    assert lease.stats().num_failed == 1
    hand(lease, "engines")  # and it can be tried again


def test_engines_that_slept_get_the_version_that_they_served_pushed_once_more() -> None:
    lease = Lease()
    hand(lease, "engines")
    lease.begin_nowait("trainer", 0.0)
    lease.begin_phase_nowait(0.0)
    assert [undo.call for undo in lease.fail_nowait("hangs")] == [
        EngineCall("sleep", ("kv", "weights")),
        TrainerCall("onload", ("weights",)),
        EngineCall("wake", ("weights",)),
        PushCall(),
        TrainerCall("offload", ("weights",)),
        EngineCall("wake", ("kv",)),
    ]


def test_an_undo_that_fails_breaks_the_lease_and_both_are_named() -> None:
    lease = Lease()
    hand(lease, "engines")
    lease.begin_nowait("trainer", 0.0)
    lease.begin_phase_nowait(0.0)
    lease.finish_phase_nowait(0.0)
    lease.begin_phase_nowait(0.0)
    undo, *_ = lease.fail_nowait("no memory")
    told = lease.undo_failed_nowait(undo, "no answer")
    assert told == "'trainer onloads' failed (no memory), and so did undoing 'trainer onloads' (no answer)"
    assert (lease.state, lease.owner) == ("broken", None)
    for side in ("engines", "trainer"):
        with pytest.raises(RoomError, match="cannot begin.*no memory"):
            lease.begin_nowait(side, 0.0)  # type: ignore[arg-type]


def test_nobody_gets_a_turn_twice_or_while_another_handover_is_under_way() -> None:
    lease = Lease()
    hand(lease, "engines")
    with pytest.raises(
        RoomError,
        match="a handover to the engines cannot begin .*generating.*one side at a time has the device",
    ):
        lease.begin_nowait("engines", 0.0)
    lease.begin_nowait("trainer", 0.0)
    with pytest.raises(RoomError, match="a handover to the trainer cannot begin"):
        lease.begin_nowait("trainer", 0.0)


def test_a_handover_cannot_skip_a_phase() -> None:
    lease = Lease()
    lease.begin_nowait("trainer", 0.0)
    with pytest.raises(RoomError, match="cannot be over before engines sleep"):
        lease.finish_nowait(0.0)
    with pytest.raises(RoomError, match="not its time"):
        lease.finish_phase_nowait(0.0)
    lease.begin_phase_nowait(0.0)
    with pytest.raises(RoomError, match="not its time"):
        lease.begin_phase_nowait(0.0)
    with pytest.raises(RoomError, match="nothing is being undone"):
        lease.undone_nowait(0.0)
    lease.fail_nowait("no")
    with pytest.raises(RoomError, match="not its time"):
        lease.finish_phase_nowait(0.0)


def test_nothing_of_the_other_side_is_on_the_device_when_the_last_phase_begins() -> None:
    slept = {
        part for phase in TO_TRAINER[:-1] if isinstance(phase.call, EngineCall) for part in phase.call.parts
    }
    assert slept == {"weights", "kv"}
    moved = {
        part for phase in TO_ENGINES[:-1] if isinstance(phase.call, TrainerCall) for part in phase.call.parts
    }
    assert moved == {"weights", "gradients", "optimizer"}
