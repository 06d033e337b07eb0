"""Controller side of the trainer: worker spec, batches out, versions and metrics back. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from asyncrl.base.errors import CheckpointError, TrainerError, TrainerLost
from asyncrl.base.http import Caller, CallLost, CallRefused
from asyncrl.base.waits import computed, waiting
from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.config.fields import Device, DType, FrozenConfig
from asyncrl.messages.engine_api import NO_EXPERT, TransferStats, TransportName
from asyncrl.messages.records import Batch, Trajectory
from asyncrl.messages.trainer_api import (
    BatchArrays,
    BatchHeader,
    BroadcastRequest,
    BroadcastResponse,
    ExportChunkRequest,
    ExportChunkResponse,
    ExportResponse,
    OffloadRequest,
    SaveRequest,
    StateRequest,
    TrainerHealth,
    TrainerPart,
    TrainResponse,
    TrajectoryHeader,
    pack_batch,
)

Answer = TypeVar("Answer", bound=BaseModel)

RECOVERED_TIMEOUT_S = 60.0
LOST_STATUS = 503
"""Status of rank 0's answers once other ranks are lost; new ranks can continue."""
RENDEZVOUS = "rendezvous"
_STORE = r"^(([0-9.]+|<address of node [0-9]+>):[0-9]+)?$"
"""RENDEZVOUS: file in the staging folder; new ranks need a new file."""


class TrainerSpec(FrozenConfig):
    """Spec file of one rank of the worker."""

    model_path: str
    dtype: DType = "auto"
    """Type of exported weights and forward pass."""
    device: Device = "auto"
    share: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of CUDA memory for torch (none = all free memory)."""
    seed: int = Field(default=0, ge=0)
    """Seed of random draws by models, user losses and new adapters; nothing else draws."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per rank. On CPU the same number gives the same bits."""
    rank: int = Field(default=0, ge=0)
    local_rank: int | None = Field(default=None, ge=0)
    """Number among its node's ranks and CUDA devices (none = rank)."""
    address: str = "127.0.0.1"
    """IPv4 address of its node; a placeholder until the process starts (placement/nodes.py)."""
    store: str = Field(default="", pattern=_STORE)
    """Meeting place of the ranks: ADDRESS:PORT of rank 0's node, '' = a file in the shared staging folder."""
    meet_s: float = Field(default=240.0, gt=0)
    """Maximum wait for the other ranks; less than the process's start limit, so that the rank can report."""
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature: logprobs are of logits / temperature."""
    max_tokens: int = Field(default=256, ge=1)
    transport: TransportName = "shm"
    """Contents of /export: all weights, or only adapters (lora). nccl: it keeps a copy for /broadcast
    instead.
    """
    is_file_wanted: bool = False
    """With transport=nccl: write the file too, for the eval engine."""
    weights_store: str = Field(default="", pattern=_STORE)
    """With transport=nccl on several nodes: ADDRESS:PORT of rank 0's store for meeting engines, '' = a file
    per group.
    """
    chunk_bytes: int = Field(default=2**28, ge=1)
    chunks: Literal["file", "memory", "memories"] = "file"
    """Destination of /export_chunk: a safetensors file, or memory shared with engines
    (asyncrl/weights/ipc.py) on rank 0's device or on every rank's; for embedded engines and vLLM with
    transport=ipc.
    """
    canary_tokens: int = Field(default=0, ge=0)
    """Tokens of the canary, 2 or more (0 = none); engines need space for one more."""
    measures_gap: bool = True
    """Compare engine and trainer logprobs of fresh tokens; false for engines without a model."""
    staging_dir: Path
    """Folder of exports in shared memory of rank 0's node; mode 0700, removed by rank 0 when its parent is
    gone.
    """
    record_path: Path
    failed_dir: Path
    """Folder for batches that give NaN. CPU ranks offload next to it."""
    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's own template in saved folders."""

    @property
    def steps_per_batch(self) -> int:
        return self.trainer.mini_batches * self.trainer.epochs


class TrainerClient:
    """Calls one trainer worker and tracks its policy_version.

    Life: open until aclose(). `policy_version` follows the answers to train().
    Waits: calls wait for the worker, at most `timeout_s` (None: until it answers or its connection breaks;
        the watch over health() ends the worker). wait_version_above sleeps until train() sets the event.
    Invariant: policy_version never decreases. Raises: TrainerLost if the worker is gone, TrainerError if it
        refuses or breaks.
    """

    def __init__(self, caller: Caller, *, policy_version: int = 0, timeout_s: float | None = None) -> None:
        self._caller, self._timeout_s = caller, timeout_s
        self.policy_version = policy_version
        self._changed = asyncio.Event()

    async def train(self, batch: Batch) -> TrainResponse:
        with waiting(f"optimizer step {batch.version + 1}", on=self._caller.name):
            report = await self._train(batch)
        self._reached(report.policy_version)
        return report

    async def _train(self, batch: Batch) -> TrainResponse:
        body = await computed(lambda: pack_batch(*pack_groups(batch)))
        answer = await self._post("/train", body, TrainResponse)
        assert answer.policy_version == batch.version + 1, answer
        return answer

    def _reached(self, version: int) -> None:
        self.policy_version = version
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_version_above(self, version: int) -> int:
        while self.policy_version <= version:
            await self._changed.wait()
        return self.policy_version

    async def begin_export(self) -> int:
        """Begin to export the newest weights during the next step; return their version. export() waits for
        it.
        """
        with waiting(f"the export of policy_version {self.policy_version}", on=self._caller.name):
            return (await self._post("/begin_export", b"", TrainerHealth)).policy_version

    async def export(self) -> ExportResponse:
        with waiting(f"the export of policy_version {self.policy_version}", on=self._caller.name):
            return await self._post("/export", b"", ExportResponse)

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        return await self._post("/broadcast", request, BroadcastResponse)

    async def offload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        """Move these parts off the trainer's device. Idempotent. An error moves nothing."""
        return await self._post("/offload", OffloadRequest(parts=list(parts)), TransferStats)

    async def onload(self, parts: Sequence[TrainerPart]) -> TransferStats:
        return await self._post("/onload", OffloadRequest(parts=list(parts)), TransferStats)

    async def export_chunk(self, version: int, index: int) -> ExportChunkResponse:
        request = ExportChunkRequest(version=version, index=index)
        with waiting(f"chunk {index} of policy_version {version}", on=self._caller.name, who="publisher"):
            return await self._post("/export_chunk", request, ExportChunkResponse)

    async def save(self, path: Path, *, merged: bool = True) -> None:
        """Write the newest weights and the tokenizer as a Hugging Face folder; not `merged`: only the
        adapters, as a peft folder.
        """
        with waiting(f"the saved weights of policy_version {self.policy_version}", on=self._caller.name):
            await self._post("/save", SaveRequest(path=str(path), merged=merged), TrainerHealth)

    async def begin_save_state(self, path: Path) -> int:
        """Begin to copy the state to the new folder `path`; return its version. Raises CheckpointError, which
        does not affect training.
        """
        with waiting(f"the copy of the state of policy_version {self.policy_version}", on=self._caller.name):
            saved = await self._post_state("/begin_save_state", StateRequest(path=str(path)))
        return saved.policy_version

    async def wait_save_state(self) -> None:
        """Wait until the save is complete. Raises CheckpointError."""
        with waiting("the state of the trainer on disk", on=self._caller.name):
            await self._post_state("/wait_save_state", b"")

    async def recover(
        self,
        state: Path | None,
        batches: AsyncIterator[Batch],
        on_step: Callable[[Batch, TrainResponse], None],
    ) -> None:
        """Restore the state of a whole checkpoint (None: the start) and train these batches again; on_step is
        called for each. policy_version never falls below an announced version.
        """
        with waiting("the journaled batches to be trained on again", on=self._caller.name, who="catching up"):
            if state is not None:
                await self._post("/load_state", StateRequest(path=str(state)), TrainerHealth)
            async for batch in batches:
                on_step(batch, await self._train(batch))
            health = await self.health(timeout_s=RECOVERED_TIMEOUT_S)
        self._reached(max(health.policy_version, self.policy_version))

    async def health(self, timeout_s: float) -> TrainerHealth:
        with _trainer_errors():
            return await self._caller.get("/health", TrainerHealth, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        await self._caller.aclose()

    async def _post(self, path: str, body: BaseModel | bytes, answer: type[Answer]) -> Answer:
        with _trainer_errors():
            return await self._caller.post(path, body, answer, timeout_s=self._timeout_s)

    async def _post_state(self, path: str, body: BaseModel | bytes) -> TrainerHealth:
        try:
            return await self._post(path, body, TrainerHealth)
        except TrainerLost:
            raise
        except TrainerError as error:
            what = f"the trainer cannot save its state: {error.fault}"
            rule = error.rule or "the last whole checkpoint stays, and the run goes on"
            raise CheckpointError(what, rule=rule, way_out=error.way_out) from error


@contextmanager
def _trainer_errors() -> Iterator[None]:
    try:
        yield
    except CallRefused as error:
        kind = TrainerLost if error.status == LOST_STATUS else TrainerError
        raise kind(
            "trainer",
            f"{error.path} was refused ({error.status}): {error.body.error}",
            rule=error.body.rule,
            way_out=error.body.way_out or "read its log in the run directory.",
        ) from error
    except CallLost as error:
        raise TrainerLost(
            "trainer",
            f"no answer to {error.path}: {error.why}",
            rule="the run cannot go on without its trainer",
            way_out="read its log in the run directory; if it was killed, lower trainer.micro_batch_tokens.",
        ) from error


def pack_groups(batch: Batch) -> tuple[BatchHeader, BatchArrays]:
    """Return the batch for the worker: header and packed arrays, ordered by group, sample and branch."""
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    headers, end, grammars = list[TrajectoryHeader](), 0, dict[str, int]()
    for group_index, group in enumerate(batch.groups):
        for trajectory in group.trajectories:
            start, end = end, end + len(trajectory.token_ids)
            headers.append(
                TrajectoryHeader(
                    group_index=group_index,
                    group_id=group.group_id,
                    sample_index=trajectory.sample_index,
                    prompt_id=group.prompt.prompt_id,
                    start=start,
                    end=end,
                    reward=trajectory.reward,
                    branch=trajectory.branch,
                    credits=list(trajectory.credits),
                    grammars=[
                        (span.start, span.end, grammars.setdefault(span.grammar, len(grammars)))
                        for span in trajectory.grammars
                    ],
                )
            )
    loss_mask = np.concatenate([one.loss_mask for one in trajectories])
    versions, engines = sampled_by(trajectories, loss_mask)
    taught = [_taught(one) for one in trajectories if one.teacher_logprobs is not None]
    arrays = BatchArrays(
        token_ids=np.concatenate([one.token_ids for one in trajectories]),
        loss_mask=loss_mask,
        behaviour_logprobs=np.concatenate([one.behaviour_logprobs for one in trajectories]),
        versions=versions,
        engines=engines,
        teacher_logprobs=np.concatenate(taught) if len(taught) == len(trajectories) else None,
        routing=_routing(trajectories),
    )
    bound = {"version": batch.version, "min_version": batch.min_version, "mask_older": batch.mask_older}
    return BatchHeader(**bound, trajectories=headers, grammars=list(grammars)), arrays


def _routing(trajectories: Sequence[Trajectory]) -> npt.NDArray[np.uint16] | None:
    """Return all tokens' experts, or None if all are unknown."""
    width = next((one.routing.shape[1] for one in trajectories if one.routing is not None), None)
    if width is None:
        return None
    unknown = (np.full((len(one.token_ids), width), NO_EXPERT, np.uint16) for one in trajectories)
    pairs = zip(trajectories, unknown, strict=True)
    return np.concatenate([other if one.routing is None else one.routing for one, other in pairs])


def _taught(trajectory: Trajectory) -> npt.NDArray[np.float32]:
    """Return the teacher's logprobs; grammar-constrained tokens get the behaviour's, since the teacher saw no
    grammar.
    """
    assert trajectory.teacher_logprobs is not None
    logprobs = trajectory.teacher_logprobs.copy()
    for span in trajectory.grammars:
        logprobs[span.start : span.end] = trajectory.behaviour_logprobs[span.start : span.end]
    return logprobs


def sampled_by(
    trajectories: Sequence[Trajectory], loss_mask: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]:
    """Return each token's version, int32 [T], and engine number, int16 [T], -1 if not sampled or unknown.
    `loss_mask` bool [T]. Raises TrainerError.
    """
    versions = np.full(len(loss_mask), -1, np.int32)
    engines = np.full(len(loss_mask), -1, np.int16)
    ends = np.cumsum([len(one.token_ids) for one in trajectories])[:-1]
    parts = list(zip(trajectories, np.split(versions, ends), np.split(engines, ends), strict=True))
    for trajectory, its_versions, its_engines in parts:
        for span in trajectory.version_spans:
            its_versions[span.start : span.end] = span.version
            its_engines[span.start : span.end] = span.engine
    is_whole = np.array_equal(versions >= 0, loss_mask)
    for trajectory, its_versions, _ in parts:
        num_masked = np.count_nonzero(trajectory.loss_mask)
        is_its = is_whole or np.array_equal(its_versions >= 0, trajectory.loss_mask)
        if not is_its or trajectory.num_sampled != num_masked:
            what = f"sample {trajectory.sample_index}: version_spans {trajectory.version_spans} do not cover "
            raise TrainerError(
                "trainer",
                f"{what}its {num_masked} sampled tokens",
                rule="version_spans cover exactly the tokens of loss_mask, each once",
                way_out="please report it: the generator or the engine client is wrong.",
            )
    return versions, engines
