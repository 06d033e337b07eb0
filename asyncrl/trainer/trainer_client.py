"""The controller's half of the trainer: the spec of a worker, batches out, versions and metrics back. Knows
no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.config.fields import Device, DType, FrozenConfig
from asyncrl.errors import CheckpointError, TrainerError, TrainerLost
from asyncrl.http import Caller, CallLost, CallRefused
from asyncrl.messages.base import (
    NO_EXPERT,
    BroadcastRequest,
    BroadcastResponse,
    Moved,
    TrainerPart,
    TransportName,
)
from asyncrl.messages.calls import (
    BatchArrays,
    BatchHeader,
    ExportChunkRequest,
    ExportChunkResponse,
    ExportResponse,
    OffloadRequest,
    SaveRequest,
    StateRequest,
    TrainerHealth,
    TrainResponse,
    TrajectoryHeader,
    pack_batch,
)
from asyncrl.messages.records import Batch, Trajectory
from asyncrl.waits import computed, waiting

Answer = TypeVar("Answer", bound=BaseModel)

RECOVERED_TIMEOUT_S = 60.0
"""For the answer to /health right after the last batch was trained on again."""
LOST_STATUS = 503
"""Rank 0's answer when it has lost the others: new ranks can go on."""
RENDEZVOUS = "rendezvous"
_STORE = r"^(([0-9.]+|<address of node [0-9]+>):[0-9]+)?$"
"""File in the staging folder through which the ranks of a trainer find each other. New ranks need a new
file.
"""


class TrainerSpec(FrozenConfig):
    """Everything one rank of the worker needs: written here, read at its start."""

    model_path: str
    """Hugging Face folder or hub id."""
    dtype: DType = "auto"
    """Type of the exported weights and of the forward pass; master weights are always float32."""
    device: Device = "auto"
    """auto = CUDA where there is a device, else CPU."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of its CUDA device's memory that torch may take (none = all that is free)."""
    seed: int = Field(default=0, ge=0)
    """Seed of whatever a model or a loss of the user's own draws, and of new adapters; the rest draws
    nothing.
    """
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank. Results on the CPU are bit-identical for the same number."""
    rank: int = Field(default=0, ge=0)
    """Number of this worker among trainer.world_size."""
    local_rank: int | None = Field(default=None, ge=0)
    """Its number among the ranks of its node, and of its CUDA device there (none = rank)."""
    address: str = "127.0.0.1"
    """IPv4 address of its node, at which the other ranks reach it; until the process is started, what stands
    for it (placement/nodes.py)."""
    store: str = Field(default="", pattern=_STORE)
    """Where the ranks find each other: ADDRESS:PORT of rank 0's node, '' = a file in the staging folder,
    which all of them see.
    """
    meet_s: float = Field(default=240.0, gt=0)
    """How long a rank waits for the others to be there; less than its process is given to answer, so that the
    rank says what it lacks.
    """
    trainer: TrainerConfig = TrainerConfig()
    """The section of the config."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The section of the config: what a step minimises."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature: logprobs are those of logits / temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """rollout.max_tokens: the longest completion."""
    transport: TransportName = "shm"
    """What /export writes: all weights, or the adapters alone (lora). nccl: it holds a copy for /broadcast
    instead.
    """
    is_file_wanted: bool = False
    """With transport=nccl: write the file too, for the eval engine."""
    weights_store: str = Field(default="", pattern=_STORE)
    """With transport=nccl on several nodes: ADDRESS:PORT at which rank 0 opens the store in which it meets
    the engines, '' = each group meets in a file."""
    chunk_bytes: int = Field(default=2**28, ge=1)
    """weight_sync.chunk_bytes: what /export_chunk writes at once."""
    chunks: Literal["file", "memory", "memories"] = "file"
    """Where /export_chunk puts a chunk: a safetensors file, or memory that the engines open too
    (asyncrl/weights/ipc.py), on the device of rank 0 or on that of each rank: embedded engines do, and vLLM
    with transport=ipc."""
    canary_tokens: int = Field(default=0, ge=0)
    """Tokens of the text whose logprobs go with each export, 2 or more (0 = none); the engines need space for
    one more.
    """
    measures_gap: bool = True
    """Compare the engines' logprobs of fresh tokens with the trainer's; false where the engines have no
    model.
    """
    staging_dir: Path
    """Folder of the exports, in shared memory of rank 0's node; made with mode 0700, and removed by rank 0
    when its parent is gone.
    """
    record_path: Path
    """trained.jsonl: one line a batch, see asyncrl/trainer/step_report.py."""
    failed_dir: Path
    """Where a batch that gives NaN is saved for inspection. Beside it each rank on the CPU offloads to."""
    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's own template in saved folders."""

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that one batch is good for."""
        return self.trainer.mini_batches * self.trainer.epochs


class TrainerClient:
    """Calls one trainer worker, and knows its policy_version.

    Life: open until aclose(). `policy_version` follows the answers to train().
    Waits: calls wait for the worker, `timeout_s` at most (None: until it answers or its connection breaks;
        the watch over health() ends the worker). wait_version_above sleeps until train() sets the event.
    Invariant: policy_version never goes back.
    Raises: every call TrainerLost if the worker is gone, TrainerError if it refuses or breaks.
    """

    def __init__(self, caller: Caller, *, policy_version: int = 0, timeout_s: float | None = None) -> None:
        self._caller, self._timeout_s = caller, timeout_s
        self.policy_version = policy_version
        self._changed = asyncio.Event()

    async def train(self, batch: Batch) -> TrainResponse:
        """One optimizer step."""
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
        """Return policy_version once it is greater than `version`."""
        while self.policy_version <= version:
            await self._changed.wait()
        return self.policy_version

    async def begin_export(self) -> int:
        """Have the newest weights read, to be written into staging beside the next step; returns their
        version. export() waits for it.
        """
        with waiting(f"the export of policy_version {self.policy_version}", on=self._caller.name):
            return (await self._post("/begin_export", b"", TrainerHealth)).policy_version

    async def export(self) -> ExportResponse:
        """Have the newest weights written into staging, or wait for what was begun."""
        with waiting(f"the export of policy_version {self.policy_version}", on=self._caller.name):
            return await self._post("/export", b"", ExportResponse)

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        """Have the weights that are held sent to the whole group, while training goes on."""
        return await self._post("/broadcast", request, BroadcastResponse)

    async def offload(self, parts: Sequence[TrainerPart]) -> Moved:
        """Have these parts moved off the trainer's device; what is away already stays. An error leaves all
        where it was.
        """
        return await self._post("/offload", OffloadRequest(parts=list(parts)), Moved)

    async def onload(self, parts: Sequence[TrainerPart]) -> Moved:
        """Have these parts moved back; what is there already stays. An error leaves all where it was."""
        return await self._post("/onload", OffloadRequest(parts=list(parts)), Moved)

    async def export_chunk(self, version: int, index: int) -> ExportChunkResponse:
        """Have chunk `index` of the newest weights written over the one before."""
        request = ExportChunkRequest(version=version, index=index)
        with waiting(f"chunk {index} of policy_version {version}", on=self._caller.name, who="publisher"):
            return await self._post("/export_chunk", request, ExportChunkResponse)

    async def save(self, path: Path, *, merged: bool = True) -> None:
        """Have the newest weights and the tokenizer written as a Hugging Face folder; not `merged`: the
        adapters alone, as a peft folder.
        """
        with waiting(f"the saved weights of policy_version {self.policy_version}", on=self._caller.name):
            await self._post("/save", SaveRequest(path=str(path), merged=merged), TrainerHealth)

    async def begin_save_state(self, path: Path) -> int:
        """Have a copy of the state begun, to be written to the new folder `path`; returns the version that it
        is of. Raises CheckpointError if it cannot be written: training is not touched by that.
        """
        with waiting(f"the copy of the state of policy_version {self.policy_version}", on=self._caller.name):
            saved = await self._post_state("/begin_save_state", StateRequest(path=str(path)))
        return saved.policy_version

    async def wait_save_state(self) -> None:
        """Return when what was begun is complete. Raises CheckpointError if it could not be written."""
        with waiting("the state of the trainer on disk", on=self._caller.name):
            await self._post_state("/wait_save_state", b"")

    async def recover(
        self,
        state: Path | None,
        batches: AsyncIterator[Batch],
        on_step: Callable[[Batch, TrainResponse], None],
    ) -> None:
        """Go on from the state of a whole checkpoint (None: from the start), and train on these batches
        again; on_step is called for each. policy_version follows only where it is above what it was: a
        version that was announced stays announced.
        """
        with waiting("the journaled batches to be trained on again", on=self._caller.name, who="catching up"):
            if state is not None:
                await self._post("/load_state", StateRequest(path=str(state)), TrainerHealth)
            async for batch in batches:
                on_step(batch, await self._train(batch))
            health = await self.health(timeout_s=RECOVERED_TIMEOUT_S)
        self._reached(max(health.policy_version, self.policy_version))

    async def health(self, timeout_s: float) -> TrainerHealth:
        """Ask whether the worker lives; it answers during a step too."""
        with _trainer_errors():
            return await self._caller.get("/health", TrainerHealth, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Close the connections; idempotent."""
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
    """The batch as it crosses to the worker: header and packed arrays, trajectories in the order of groups,
    samples and branches.
    """
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
    """Of all, where it is known of one."""
    width = next((one.routing.shape[1] for one in trajectories if one.routing is not None), None)
    if width is None:
        return None
    unknown = (np.full((len(one.token_ids), width), NO_EXPERT, np.uint16) for one in trajectories)
    pairs = zip(trajectories, unknown, strict=True)
    return np.concatenate([other if one.routing is None else one.routing for one, other in pairs])


def _taught(trajectory: Trajectory) -> npt.NDArray[np.float32]:
    """The teacher's logprobs; where a grammar left only some tokens, those of the behaviour: the teacher, who
    was asked about all tokens, has no say there.
    """
    assert trajectory.teacher_logprobs is not None
    logprobs = trajectory.teacher_logprobs.copy()
    for span in trajectory.grammars:
        logprobs[span.start : span.end] = trajectory.behaviour_logprobs[span.start : span.end]
    return logprobs


def sampled_by(
    trajectories: Sequence[Trajectory], loss_mask: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]:
    """Of all tokens of these, one after the other, -1 where one was not sampled: the version it was sampled
    under, int32 [T], and the number of the engine server, int16 [T], -1 if it is not known. `loss_mask` bool
    [T]. Raises TrainerError.
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
        if not is_its or trajectory.num_sampled != num_masked:  # half a record
            what = f"sample {trajectory.sample_index}: version_spans {trajectory.version_spans} do not cover "
            raise TrainerError(
                "trainer",
                f"{what}its {num_masked} sampled tokens",
                rule="version_spans cover exactly the tokens of loss_mask, each once",
                way_out="please report it: the generator or the engine client is wrong.",
            )
    return versions, engines
