"""One push of one set of weights to all engines, in two phases. Knows no trainer and no other push."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.errors import PublishError, RoomError
from asyncrl.types import CommitReport, Interrupt, WeightManifest, WeightTarget

Result = TypeVar("Result")
_RESTART = "read the log of the engine that is named, then start the run again; if it repeats, report it with both logs."


@dataclass(frozen=True, slots=True)
class PushReport:
    """Seconds of both phases; `pause_s` of the engine that paused longest; interrupted requests of all engines."""

    prepare_s: float
    commit_s: float
    pause_s: float
    num_interrupted: int


class Push:
    """Prepare on every engine, check every digest, commit on every engine, check again.

    Life:       made, with the version that all engines serve -> run() once.
    Waits:      for all engines at once, at most timeout_s a phase.
    Invariant:  run returns only if every engine serves manifest.version with manifest.digest. No engine swaps before
                every engine has the right bytes in staging, so what fails in prepare leaves all on the old version.
    """

    def __init__(
        self, manifest: WeightManifest, targets: Sequence[WeightTarget], *, served: int, interrupt: Interrupt, timeout_s: float
    ) -> None:
        self.manifest, self._targets = manifest, targets
        self._interrupt: Interrupt = interrupt
        self._timeout_s = timeout_s
        self._serving: dict[str, str] = {target.name: str(served) for target in targets}

    def __repr__(self) -> str:
        return f"<Push v{self.manifest.version} {self.manifest.digest} to {len(self._targets)} engines>"

    async def run(self) -> PushReport:
        """Both phases. Raises PublishError with the versions that each engine has now."""
        clock = asyncio.get_running_loop().time
        start = clock()
        digests = await self._on_all("prepare", lambda target: target.prepare(self.manifest))
        for target, digest in zip(self._targets, digests, strict=True):
            self._check_digest(target, "loaded", digest)
        prepared = clock()
        reports = await self._on_all("commit", self._commit)
        for target, report in zip(self._targets, reports, strict=True):
            self._check_digest(target, "serves", report.digest)
            if report.version != self.manifest.version:
                raise self._error(
                    f"{target.name} says that it serves policy_version {report.version}, where {self.manifest.version} was committed",
                    "a version is announced only when every engine serves it",
                )
        return PushReport(
            prepare_s=prepared - start,
            commit_s=clock() - prepared,
            pause_s=max(report.pause_s for report in reports),
            num_interrupted=sum(report.num_interrupted for report in reports),
        )

    async def _commit(self, target: WeightTarget) -> CommitReport:
        before = self._serving[target.name]
        self._serving[target.name] = f"{before} or {self.manifest.version}, it gave no answer"
        report = await target.commit(self.manifest.version, self.manifest.digest, self._interrupt)
        self._serving[target.name] = str(report.version)
        return report

    async def _on_all(self, phase: str, call: Callable[[WeightTarget], Awaitable[Result]]) -> list[Result]:
        """The phase on all targets at once; waits for all of them, so that the error can say what each one has."""
        answered: set[str] = set()

        async def one(target: WeightTarget) -> Result:
            result = await call(target)
            answered.add(target.name)
            return result

        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                outcomes = await asyncio.gather(*(one(target) for target in self._targets), return_exceptions=True)
        except TimeoutError:
            if not limit.expired():
                raise
            silent = ", ".join(target.name for target in self._targets if target.name not in answered)
            raise self._error(
                f"{silent} did not {phase} policy_version {self.manifest.version} within {self._timeout_s} s",
                f"publisher.timeout_s={self._timeout_s} is the limit of each phase",
                "raise publisher.timeout_s if the machine is slow, else " + _RESTART,
            ) from None
        results: list[Result] = []
        for target, outcome in zip(self._targets, outcomes, strict=True):
            if isinstance(outcome, RoomError):
                raise self._error(
                    f"{target.name} failed in {phase} of policy_version {self.manifest.version}: {outcome.what}",
                    outcome.rule or "a version is announced only when every engine serves it",
                    outcome.way_out or _RESTART,
                ) from outcome
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return results

    def _check_digest(self, target: WeightTarget, verb: str, digest: str) -> None:
        if digest != self.manifest.digest:
            raise self._error(
                f"{target.name} {verb} policy_version {self.manifest.version} with digest {digest}, the trainer sent "
                f"{self.manifest.digest} ({self.manifest.num_tensors} tensors, {self.manifest.num_bytes} bytes)",
                f"a version is announced only when every digest matches, so {self.manifest.version} was not announced",
            )

    def _error(self, what: str, rule: str, way_out: str = _RESTART) -> PublishError:
        serving = ", ".join(f"{name}: {version}" for name, version in self._serving.items())
        return PublishError("publisher", f"{what} (policy_version served: {serving})", rule=rule, way_out=way_out)
