"""Controller side of the trainer. Imports no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, Field

from asyncrl.base.errors import CheckpointError, TrainerError, TrainerLost
from asyncrl.base.http import Caller, CallLost, CallRefused
from asyncrl.base.waits import Signal, run_in_thread, waiting
from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.config.critic_config import CriticConfig
from asyncrl.config.fields import Device, DType, FrozenConfig
from asyncrl.messages import trainer_api as api
from asyncrl.messages.engine_api import TrainerPart, TransferStats, TransportName
from asyncrl.messages.records import Batch
from asyncrl.messages.tokens import Tokens

T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)
OnStep = Callable[[Batch, api.TrainResponse], None]

LOST_STATUS = 503
"""Status after other ranks are lost."""
RENDEZVOUS = "rendezvous"
_STORE = r"^(([0-9.]+|<address of node [0-9]+>):[0-9]+)?$"


class TrainerSpec(FrozenConfig):
    model_path: str
    dtype: DType = "auto"
    device: Device = "auto"
    share: float | None = Field(default=None, gt=0, lt=1)
    seed: int = Field(default=0, ge=0)
    threads: int = Field(default=1, ge=1)
    """On CPU the same number gives the same bits."""
    rank: int = Field(default=0, ge=0)
    local_rank: int = Field(default=0, ge=0)
    """Rank within its node, and CUDA device."""
    address: str = "127.0.0.1"
    store: str = Field(default="", pattern=_STORE)
    """ADDRESS:PORT of rank 0's store ('' = a staging file)."""
    meet_s: float = Field(default=240.0, gt=0)
    """Timeout for meeting the other ranks, below the start timeout."""
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    algorithms: dict[str, AlgorithmConfig] = {}
    """Of each task ({} = all have `algorithm`)."""
    weights: dict[str, float] = {}
    """Factor of the advantages of each of these tasks."""
    critic: CriticConfig | None = None
    critic_path: str = ""
    """Folder that the critic begins with ('' = model_path)."""
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=256, ge=1)
    transport: TransportName = "shm"
    """Output of /export: a file, or a copy on the device for /broadcast (nccl) or in
    shared memory (ipc, unless `chunks` are).
    """
    is_file_wanted: bool = False
    """With nccl and ipc: also write the file, for the eval engine."""
    weights_store: str = Field(default="", pattern=_STORE)
    """ADDRESS:PORT of rank 0's store for engines."""
    chunk_bytes: int = Field(default=2**28, ge=1)
    """Bytes per chunk of weights. A larger tensor is one chunk."""
    chunks: Literal["file", "memory", "memories"] = "file"
    """Output of /export_chunk: a safetensors file, or memory shared on rank 0's or
    every rank's device.
    """
    canary_tokens: int = Field(default=0, ge=0)
    """Tokens of the canary, at least 2 (0 = off)."""
    measures_gap: bool = True
    pinned_length: int = Field(default=0, ge=0)
    """Length that decides length-dependent rotary frequencies, as in vLLM (0 = each
    sequence's own).
    """
    staging_dir: Path
    """Folder of exports in shared memory, mode 0700."""
    record_path: Path
    chat_template: Path | None = None


class TrainerClient:
    """Calls the trainer and tracks its policy_version, which never decreases.

    Waits: a call waits at most `timeout_s`; None: until the trainer answers or the
    connection breaks. Errors: TrainerLost if the trainer is gone, TrainerError if it
    refuses.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        policy_version: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        self._caller = caller
        self._timeout_s = timeout_s
        self.policy_version = policy_version
        self._begun_version = policy_version
        """Version that the steps sent so far make."""
        self._version_changed = Signal()

    is_up = True
    num_restarts = 0
    """Restarts of the trainer's processes."""

    async def wait_up(self) -> None:
        """Return once the trainer takes calls."""

    @property
    def is_training(self) -> bool:
        """Whether a step has been sent and not answered."""
        return self._begun_version > self.policy_version

    async def train(self, batch: Batch) -> api.TrainResponse:
        """Train on a batch."""
        return await self.step(batch.version, await self.pack(batch))

    async def step(self, version: int, body: bytes) -> api.TrainResponse:
        """Train on batch `version`, packed as `body`.

        The next step may be sent before this one has ended: the trainer begins it at
        once after this one. Example: step 8 ends 50 ms after step 7, not 65 ms, of
        which 15 ms are the way to the trainer and back.
        """
        num_before = self._begun_version - self.policy_version
        path = "/train_next" if num_before else "/train"
        self._begun_version = version + 1
        self._version_changed.notify()
        # If the process dies after the step and before its answer, the step is lost.
        # The next process catches up to `version`, so a repeated call trains the batch
        # once.
        with waiting(f"optimizer step {version + 1}", on=self._caller.name):
            report = await self._retried(
                lambda: self._train(path, version, body, 1 + num_before)
            )
        self._reached(report.policy_version)
        return report

    async def add_part(self, part: Batch) -> None:
        """Train on a part of the batch that forms. Never repeated: step() trains the parts
        that are missing.
        """
        self._check_up()
        body = await self.pack(part)
        with waiting(f"a part of step {part.version + 1}", on=self._caller.name):
            await self._post("/add_part", body, api.TrainerHealth)

    async def pack(self, batch: Batch) -> bytes:
        # In a thread: packing a large batch would hold up every rollout on the event
        # loop.
        return await run_in_thread(lambda: api.pack_batch(*pack_groups(batch)))

    async def evaluate(self, batch: Batch) -> api.TrainResponse:
        """Measure the loss of a batch of the current version, without training."""
        return await self._call("/evaluate", await self.pack(batch), api.TrainResponse)

    async def wait_version_above(self, version: int) -> int:
        await self._version_changed.wait_for(lambda: self.policy_version > version)
        return self.policy_version

    async def wait_step_above(self, version: int) -> int:
        """Return once a step has been sent that makes a version above this one."""
        await self._version_changed.wait_for(lambda: self._begun_version > version)
        return self._begun_version

    async def begin_export(self, above: int) -> int:
        """Begin to export the newest weights; return their version, which is above
        `above`. Waits for the step that makes it, and goes before the step after it.
        """
        request = api.BeginExportRequest(above=above)
        health = await self._call("/begin_export", request, api.TrainerHealth)
        return health.policy_version

    async def export(self) -> api.ExportResponse:
        return await self._call("/export", b"", api.ExportResponse)

    async def export_chunk(self, version: int, index: int) -> api.ExportChunkResponse:
        request = api.ExportChunkRequest(version=version, index=index)
        return await self._call("/export_chunk", request, api.ExportChunkResponse)

    async def broadcast(self, request: api.BroadcastRequest) -> api.BroadcastResponse:
        """Send the weights to the engines. Never repeated."""
        # A trainer that was lost has lost the held weights too. The push ends, and the
        # next one exports again (docs/decisions/0016).
        self._check_up()
        return await self._post("/broadcast", request, api.BroadcastResponse)

    async def offload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        """Move parts of the trainer's state to host memory. Idempotent. After an error
        nothing has moved.
        """
        request = api.OffloadRequest(parts=list(parts))
        return await self._call("/offload", request, TransferStats)

    async def onload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        request = api.OffloadRequest(parts=list(parts))
        return await self._call("/onload", request, TransferStats)

    async def save(self, path: Path) -> None:
        """Write a Hugging Face folder."""
        await self._call("/save", api.StateRequest(path=path), api.TrainerHealth)

    async def begin_save_state(self, path: Path) -> int:
        """Begin to save the state; return its version. Never repeated. Raises
        CheckpointError, TrainerLost.
        """
        return (
            await self._post_state("/begin_save_state", api.StateRequest(path=path))
        ).policy_version

    async def wait_save_state(self) -> None:
        await self._post_state("/wait_save_state", b"")

    async def recover(
        self,
        state: Path | None,
        batches: Callable[[], AsyncIterator[Batch]],
        on_step: OnStep,
    ) -> None:
        """Load a state (None: keep the start) and train on `batches()`; start over if
        the trainer dies. `on_step` sees each batch once.
        """
        # A trainer that dies here starts over from the checkpoint, and trains batches
        # again that are reported already.
        reported = -1

        def once(batch: Batch, report: api.TrainResponse) -> None:
            nonlocal reported
            if batch.version > reported:
                reported = batch.version
                on_step(batch, report)

        await self._retried(lambda: self.catch_up(state, batches(), once))

    async def catch_up(
        self, state: Path | None, batches: AsyncIterator[Batch], on_step: OnStep
    ) -> None:
        """Load a state and train, without repeating lost calls."""
        version = self.policy_version
        with waiting(
            "the journaled batches to be trained on again",
            on=self._caller.name,
            who="catching up",
        ):
            if state is not None:
                loaded = await self._post(
                    "/load_state", api.StateRequest(path=state), api.TrainerHealth
                )
                version = max(version, loaded.policy_version)
            async for batch in batches:
                body = await self.pack(batch)
                report = await self._train("/train", batch.version, body)
                version = max(version, report.policy_version)
                on_step(batch, report)
        # Once, at the end: the publisher would export each version on the way, although
        # engines have served them before.
        self._reached(version)

    async def aclose(self) -> None:
        await self._caller.aclose()

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        return await call()

    def _check_up(self) -> None:
        """Raise TrainerLost during a restart."""
        if not self.is_up:
            raise TrainerLost(
                "trainer", "is restarting", rule="a checkpoint is of a finished step"
            )

    async def _call(
        self, path: str, body: BaseModel | bytes, answer: type[Answer]
    ) -> Answer:
        with waiting(
            f"{path} at policy_version {self.policy_version}", on=self._caller.name
        ):
            return await self._retried(lambda: self._post(path, body, answer))

    async def _post(
        self,
        path: str,
        body: BaseModel | bytes,
        answer: type[Answer],
        num_steps: int = 1,
    ) -> Answer:
        timeout_s = self._timeout_s and num_steps * self._timeout_s
        try:
            return await self._caller.post(path, body, answer, timeout_s=timeout_s)
        except CallRefused as error:
            # Rank 0 answers, but its peers are gone: for the run that is a lost
            # trainer, which a restart repairs.
            kind = TrainerLost if error.status == LOST_STATUS else TrainerError
            raise kind(
                "trainer",
                f"{error.path} was refused ({error.status}): {error.body.error}",
                rule=error.body.rule,
                way_out=error.body.way_out or "read its log in the run directory.",
            ) from error
        except CallLost as error:
            what = f"no answer to {error.path}: {error.why}"
            way_out = "read its log in the run directory; if it was killed, lower trainer.micro_batch_tokens."
            raise TrainerLost(
                "trainer", what, rule="the run needs its trainer", way_out=way_out
            ) from error

    async def _post_state(
        self, path: str, body: BaseModel | bytes
    ) -> api.TrainerHealth:
        self._check_up()
        try:
            with waiting(
                f"{path} at policy_version {self.policy_version}", on=self._caller.name
            ):
                return await self._post(path, body, api.TrainerHealth)
        except TrainerLost:
            raise
        except TrainerError as error:
            what = f"the trainer cannot save its state: {error.fault}"
            rule = (
                error.rule or "the last whole checkpoint stays, and the run continues"
            )
            raise CheckpointError(what, rule=rule, way_out=error.way_out) from error

    async def _train(
        self, path: str, version: int, body: bytes, num_steps: int = 1
    ) -> api.TrainResponse:
        """`num_steps`: steps that end before the answer, each with its own limit."""
        report = await self._post(path, body, api.TrainResponse, num_steps)
        # Version v + 1 is batch v, trained once. Anything else would break staleness
        # and resume silently.
        assert report.policy_version == version + 1, report
        return report

    def _reached(self, version: int) -> None:
        # Two answers may be read in one iteration of the event loop, in any order.
        self.policy_version = max(self.policy_version, version)
        self._begun_version = max(self._begun_version, version)
        self._version_changed.notify()


def pack_groups(batch: Batch) -> tuple[api.BatchHeader, Tokens]:
    """Return a batch ordered by role, group, sample and branch: its header and all tokens."""
    headers = list[api.TrajectoryHeader]()
    parts = list[Tokens]()
    end = 0
    entries = [
        (group_index, group, trajectory)
        for group_index, group in enumerate(batch.groups)
        for trajectory in group.trajectories
    ]
    # The trainer cuts the batch where the role changes.
    entries.sort(key=lambda entry: entry[-1].role)
    for group_index, group, trajectory in entries:
        start = end
        end += len(trajectory.tokens)
        parts.append(trajectory.tokens)
        headers.append(
            api.TrajectoryHeader(
                group_index=group_index,
                group_id=group.group_id,
                sample_index=trajectory.sample_index,
                prompt_id=group.prompt.prompt_id,
                start=start,
                end=end,
                reward=trajectory.reward,
                branch=trajectory.branch,
                credits=list(trajectory.credits),
                parts=dict(trajectory.parts),
                adapter=trajectory.role,
            )
        )
    header = api.BatchHeader(
        version=batch.version,
        min_version=batch.min_version,
        mask_older=batch.mask_older,
        trajectories=headers,
        part_groups=batch.part_groups,
    )
    return header, Tokens.join(parts)
