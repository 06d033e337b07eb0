"""A call to an engine server that failed, as an error of ours. Knows no message and no server."""

from __future__ import annotations

from asyncrl.calling import Caller, CallGarbled, CallLost, CallRefused
from asyncrl.errors import EngineError, EngineLost


def engine_error(caller: Caller, failure: CallLost | CallRefused, *, is_told: bool = False) -> EngineError:
    """EngineLost for no answer at all, EngineError for one that says no or nonsense. `is_told` as in EngineLost."""
    where = f"({caller.url})"
    if isinstance(failure, CallGarbled):
        return EngineError(
            caller.name,
            f"{where} answered {failure.path} with what is no answer: {failure.why}",
            way_out=f"read {caller.name}'s log; if the program there is ours, please report it.",
        )
    if isinstance(failure, CallLost):
        return EngineLost(
            caller.name,
            f"{where} gave no answer to {failure.path}: {failure.why}",
            rule="a run needs its engine servers",
            way_out=f"read {caller.name}'s log for why it died or hangs, then start the run again.",
            is_told=is_told,
        )
    return EngineError(
        caller.name,
        f"{where} answered {failure.status} to {failure.path}: {failure.body.error}",
        rule=failure.body.rule,
        way_out=failure.body.way_out or f"read {caller.name}'s log.",
    )


def given_up(name: str, path: str) -> EngineLost:
    """Of a call that cut_nowait ended."""
    return EngineLost(name, f"was given up before it answered {path}", is_told=True)
