"""Calls of one push to all engines at once, and what is said of those that fail. Knows no weights and no
other push.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from asyncrl.errors import ConnectionShortage, EngineLost, PublishError, RoomError
from asyncrl.messages.records import CommitReport, Interrupt
from asyncrl.waits import TimeLimit, waiting

Result = TypeVar("Result")
RESTART = "read the log of the engine that is named, then start the run again; if it repeats, report it with both logs."
OnLost = Callable[[EngineLost], None]


class Commits(Protocol):
    """What every push needs of an engine server."""

    name: str

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitReport:
        """Swap to the weights that were brought, and serve them as `version`."""
        ...


Target = TypeVar("Target", bound=Commits)


class ToAll(Generic[Target]):
    """One version on its way to the engines in `live`; `sent` says in an error what the trainer sent.

    Waits:      for all engines at once, at most timeout_s a phase; in a rolling commit for one after the
    other, timeout_s each. Invariant:  `live` holds the engines that have answered every phase so far. Who was
    lost was told to `on_lost`; without it, that is
                an error like any other.
    """

    def __init__(
        self,
        version: int,
        targets: Sequence[Target],
        *,
        served: int,
        timeout_s: float,
        on_lost: OnLost | None,
    ) -> None:
        self.version, self.live = version, tuple(targets)
        self.sent = ""
        self._timeout_s, self._on_lost = timeout_s, on_lost
        self._serving: dict[str, str] = {target.name: str(served) for target in targets}

    async def on_all(self, phase: str, call: Callable[[Target], Awaitable[Result]]) -> dict[str, Result]:
        """The phase on all engines at once, answers by name; waits for all of them, so that the error can say
        what each one has.
        """
        answers = await self._on(self.live, phase, call)
        self.live = tuple(target for target in self.live if target.name in answers)
        return answers

    async def _on(
        self, targets: Sequence[Target], phase: str, call: Callable[[Target], Awaitable[Result]]
    ) -> dict[str, Result]:
        """Answers of those that answered; the others were lost, and told."""
        answers: dict[str, Result] = {}
        silent: list[str] = []

        async def one(target: Target) -> None:
            limit = TimeLimit(self._timeout_s)
            try:
                what = f"{phase} of policy_version {self.version}"
                with waiting(what, on=target.name, who="publisher"):
                    async with limit:
                        answers[target.name] = await call(target)
            except TimeoutError:
                if not limit.expired():
                    raise
                silent.append(target.name)
                if self._on_lost is not None:
                    self._on_lost(self._silence(target, phase))
            except EngineLost as lost:
                if self._on_lost is None:
                    raise
                self._on_lost(lost)  # right here: what it leads to must not wait for the other engines

        outcomes = await asyncio.gather(*(one(target) for target in targets), return_exceptions=True)
        if silent and self._on_lost is None:
            what, rule = self._too_slow(phase)
            raise self.error(
                f"{', '.join(silent)} {what}",
                rule,
                "raise publisher.timeout_s if the machine is slow, else " + RESTART,
            )
        for target, outcome in zip(targets, outcomes, strict=True):
            if isinstance(outcome, ConnectionShortage):  # of ours: nothing is known of the engine
                raise outcome
            if isinstance(outcome, RoomError):
                raise self.error(
                    f"{target.name} failed in {phase} of policy_version {self.version}: {outcome.what}",
                    outcome.rule or "a version is announced only when every engine serves it",
                    outcome.way_out or RESTART,
                ) from outcome
            if isinstance(outcome, BaseException):
                raise outcome
        return answers

    async def commit_all(
        self,
        digest: str,
        interrupt: Interrupt,
        *,
        is_rolling: bool = False,
        is_down: Callable[[str], bool] = lambda _: False,
    ) -> dict[str, CommitReport]:
        """Have all of them serve the version, and check that they do; `is_rolling`: one after the other, so
        that the rest samples on.

        `is_down` is asked right before an engine's turn: one that went down while others had theirs may be
        another process by then, which has nothing staged, and whoever brings it up pushes to it. Raises
        PublishError.
        """

        async def commit(target: Target) -> CommitReport:
            before = self._serving[target.name]
            self._serving[target.name] = f"{before} or {self.version}, it gave no answer"
            report = await target.commit(self.version, digest, interrupt)
            self._serving[target.name] = str(report.version)
            return report

        reports: dict[str, CommitReport] = {}
        for turn in [(target,) for target in self.live] if is_rolling else [self.live]:
            targets = [target for target in turn if not is_down(target.name)]
            answers = await self._on(targets, "commit", commit)
            for target in targets:
                if target.name in answers:
                    self._check_served(target, answers[target.name], digest)
            reports |= answers
        self.live = tuple(target for target in self.live if target.name in reports)
        return reports

    def _check_served(self, target: Target, report: CommitReport, digest: str) -> None:
        self.check_digest(target, "serves", report.digest, digest)
        if report.version != self.version:
            raise self.error(
                f"{target.name} says that it serves policy_version {report.version}, where {self.version} "
                f"was committed",
                "a version is announced only when every engine serves it",
            )

    def check_digest(self, target: Target, verb: str, digest: str, expected: str) -> None:
        """Raise PublishError if an engine has other bytes than were sent."""
        if digest != expected:
            raise self.error(
                f"{target.name} {verb} policy_version {self.version} with digest {digest}, the trainer sent "
                f"{expected} ({self.sent})",
                f"a version is announced only when every digest matches, so {self.version} was not announced",
            )

    def error(self, what: str, rule: str, way_out: str = RESTART) -> PublishError:
        """With the versions that each engine has now."""
        serving = ", ".join(f"{name}: {version}" for name, version in self._serving.items())
        return PublishError(
            "publisher", f"{what} (policy_version served: {serving})", rule=rule, way_out=way_out
        )

    def _too_slow(self, phase: str) -> tuple[str, str]:
        return (
            f"did not {phase} policy_version {self.version} within {self._timeout_s} s",
            f"publisher.timeout_s={self._timeout_s} is the limit of each phase",
        )

    def _silence(self, target: Target, phase: str) -> EngineLost:
        what, rule = self._too_slow(phase)
        return EngineLost(
            target.name,
            what,
            rule=rule,
            way_out="raise publisher.timeout_s if the machine is slow, else read its log.",
        )
