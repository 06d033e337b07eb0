"""One push of one set of weights to all engines, in two phases. Knows no trainer and no other push."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.publisher.to_all import OnLost, ToAll
from asyncrl.types import Interrupt, WeightManifest, WeightTarget


@dataclass(frozen=True, slots=True)
class PushReport:
    """Seconds of both phases; `pause_s` of the engine that paused longest; interrupted requests of all engines."""

    prepare_s: float
    commit_s: float
    pause_s: float
    num_interrupted: int


class Push(ToAll[WeightTarget]):
    """Prepare on every engine, check every digest, commit on every engine, all at once or one after the other, check again.

    Life:       made, with the version that all engines serve -> run() once. An engine that is lost on the way is told to
                `on_lost` and left behind; `live` holds the others. Without `on_lost` it is an error like any other.
    Waits:      for all engines at once, at most timeout_s a phase; `is_rolling`: in commit for one after the other.
    Invariant:  run returns only if every engine in `live` serves manifest.version with manifest.digest. No engine swaps
                before each of them has the right bytes in staging, so what fails in prepare leaves all on the old version.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        targets: Sequence[WeightTarget],
        *,
        served: int,
        interrupt: Interrupt,
        timeout_s: float,
        on_lost: OnLost | None = None,
        is_rolling: bool = False,
        is_down: Callable[[str], bool] = lambda _: False,
    ) -> None:
        super().__init__(manifest.version, targets, served=served, timeout_s=timeout_s, on_lost=on_lost)
        self.manifest = manifest
        self.sent = f"{manifest.num_tensors} tensors, {manifest.num_bytes} bytes"
        self._interrupt: Interrupt = interrupt
        self._is_rolling, self._is_down = is_rolling, is_down

    def __repr__(self) -> str:
        return f"<Push v{self.manifest.version} {self.manifest.digest} to {len(self.live)} engines>"

    async def run(self) -> PushReport:
        """Both phases. Raises PublishError with the versions that each engine has now."""
        clock = asyncio.get_running_loop().time
        start = clock()
        digests = await self.on_all("prepare", lambda target: target.prepare(self.manifest))
        for target in self.live:
            self.check_digest(target, "loaded", digests[target.name], self.manifest.digest)
        prepared = clock()
        reports = await self.commit_all(self.manifest.digest, self._interrupt, is_rolling=self._is_rolling, is_down=self._is_down)
        return PushReport(
            prepare_s=prepared - start,
            commit_s=clock() - prepared,
            pause_s=max((report.pause_s for report in reports.values()), default=0.0),
            num_interrupted=sum(report.num_interrupted for report in reports.values()),
        )
