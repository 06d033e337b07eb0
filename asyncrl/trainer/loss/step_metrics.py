"""Metrics of a step, and its line of the trained record. Imports no torch.

trained.jsonl has one JSON line per step: `version` (the batch turned it into version +
1), `min_version`, `loss` (null if all steps were skipped), `num_loss_tokens`, and for
each trajectory its ids, reward, `num_tokens`, `num_sampled`, `num_loss_tokens`,
`tokens_sha` (16 hex digits of the sha256 of its int32 token ids) and `spans`: [start,
end, version] of loss tokens.

A line {"restored": v} voids earlier lines of version v and above.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from asyncrl.base.files import cut_at, lines_from_end
from asyncrl.messages.tokens import Tokens, spans_of, split_spans
from asyncrl.messages.trainer_api import BatchHeader

if TYPE_CHECKING:
    from torch._dynamo.utils import CompilationMetrics

    from asyncrl.trainer.ranks.ranks import Ranks

log = logging.getLogger("asyncrl.trainer")

Float32M = npt.NDArray[np.float32]
BoolN = npt.NDArray[np.bool_]
FloatN = npt.NDArray[np.float32] | npt.NDArray[np.float64]

# More than rounding explains: bfloat16 moves logprobs by 0.031 nats in the mean
# (SmolLM2-135M, docs/decisions/0009).
GAP_WARNING = 0.05
MIN_ENGINE_TOKENS = 64
COMPILE_WARNING_S = 1.0
"""Seconds of compilation in a later step that are worth a warning: a graph takes 5 to
30.
"""
GAP_ADVICE = (
    "check that engine and trainer use the same model.dtype, temperature and weights, and read the log of an "
    "engine that deviates; weight_sync.interrupt=keep_kv raises the gap"
)
NOT_FINITE_ADVICE = (
    "if it began in the first step, correct algorithm.loss, algorithm.advantage or the model; if it began "
    "later, lower trainer.learning_rate"
)

Phase = Literal[
    "pack",
    "logprobs",
    "forward",
    "backward",
    "optimizer",
    "blocked",
    "critic",
    "offload",
    "",
]

PEAK_FLOPS: Mapping[str, Mapping[str, float]] = {
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51e12},
    "H100 NVL": {"bfloat16": 835.5e12, "float32": 60e12},
    "H200 NVL": {"bfloat16": 835.5e12, "float32": 60e12},
    "H100": {"bfloat16": 989.5e12, "float32": 67e12},
    "H200": {"bfloat16": 989.5e12, "float32": 67e12},
    "GB200": {"bfloat16": 2500e12, "float32": 80e12},
    "B200": {"bfloat16": 2250e12, "float32": 75e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12},
}
"""Dense FLOP/s by words of the device's name, first match, from NVIDIA's data sheets.
"""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the device's dense FLOP/s in `dtype`, or None if unknown."""
    words = set(device_name.replace("-", " ").split())
    for name, peaks in PEAK_FLOPS.items():
        if words.issuperset(name.split()):
            return peaks.get(dtype)
    return None


class StepMeter:
    """Times a step's phases on this rank, and measures speed and memory of all ranks.

    Life: start() -> enter() and count() -> numbers(), on all ranks. `compilations`: the
    process's latest compilations, oldest first, as
    torch._dynamo.utils.CompilationMetrics; None if nothing is compiled.
    """

    def __init__(
        self,
        ranks: Ranks,
        dtype: str,
        cuda: ModuleType | None = None,
        compilations: Callable[[], list[CompilationMetrics]] | None = None,
    ) -> None:
        self._ranks = ranks
        self._cuda = cuda
        self._compilations = compilations
        self._compiled_until_us = 0
        device_name = "cpu" if cuda is None else cuda.get_device_name()
        self._peak_flops = peak_flops(device_name, dtype)
        if cuda is not None and self._peak_flops is None:
            log.warning(
                "no perf/mfu: the peak FLOP/s of %s in %s are unknown",
                device_name,
                dtype,
            )
        self._ended_s = math.nan
        self._whole_at_s = math.inf
        self.start()

    def start(self) -> None:
        self._work = list[list[float]]()
        """Start and end of the work on each part; the end is infinite until it is known."""
        self.resume()
        self._stamps: list[tuple[Phase, Any]] = []
        self._num_tokens = 0
        self._flops = 0.0
        self.enter("")

    def pause(self) -> None:
        """Mark the end of a part of the batch, after which the rank may wait."""
        self.enter("")
        self._work[-1][1] = time.perf_counter()

    def resume(self) -> None:
        # Without the work on a part that was refused.
        ended = [work for work in self._work if work[1] < math.inf]
        self._work = [*ended, [time.perf_counter(), math.inf]]

    def note_whole(self) -> None:
        """Mark that the batch is whole, from any thread."""
        self._whole_at_s = time.perf_counter()

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase; return the phase that it ends."""
        stamp: Any = time.perf_counter()
        if self._cuda is not None:
            # The host runs ahead of the device, so its clock would time the launches.
            # Events are read once, after the step.
            stamp = self._cuda.Event(enable_timing=True)
            stamp.record()
        self._stamps.append((phase, stamp))
        return self._stamps[-2][0] if len(self._stamps) > 1 else ""

    def count(self, flops: float, num_tokens: int = 0) -> None:
        self._flops += flops
        self._num_tokens += num_tokens

    def numbers(self) -> dict[str, float]:
        self.enter("")
        seconds = {phase: 0.0 for phase in get_args(Phase) if phase}
        entered = {phase for phase, _ in self._stamps}
        for rare in {"critic", "offload"} - entered:
            del seconds[rare]
        peak_bytes = 0
        if self._cuda is not None:
            self._stamps[-1][1].synchronize()
            peak_bytes = self._cuda.max_memory_allocated()
            self._cuda.reset_peak_memory_stats()
        for (phase, start), (_, end) in pairwise(self._stamps):
            if phase:
                seconds[phase] += (
                    end - start if self._cuda is None else start.elapsed_time(end) / 1e3
                )
        own = [self._num_tokens, self._flops, _peak_host_bytes(), peak_bytes]
        parts = self._ranks.gather(own)
        num_tokens, flops, host_bytes, device_bytes = zip(*parts, strict=True)
        now_s = time.perf_counter()
        train_s = self._worked_s(now_s)
        device_s = train_s * self._ranks.size
        metrics = {f"perf/{phase}_s": spent_s for phase, spent_s in seconds.items()}
        if self._compilations is not None:
            metrics["perf/compile_s"] = self._compile_s(self._compilations())
        metrics["perf/train_s"] = train_s
        if len(self._work) > 1:
            metrics["perf/early_s"] = self._worked_s(min(now_s, self._whole_at_s))
        if math.isfinite(self._ended_s):
            metrics["perf/idle_s"] = now_s - self._ended_s - train_s
        metrics["perf/device_tokens_per_s"] = sum(num_tokens) / device_s
        if self._cuda is not None:
            metrics["perf/device_memory_bytes"] = float(max(device_bytes))
        if all(host_bytes):
            metrics["perf/host_memory_bytes"] = float(sum(host_bytes))
        if self._peak_flops is not None:
            metrics["perf/mfu"] = sum(flops) / (device_s * self._peak_flops)
        return metrics

    def _worked_s(self, until_s: float) -> float:
        return sum(
            max(0.0, min(end_s, until_s) - start_s) for start_s, end_s in self._work
        )

    def end(self) -> None:
        """Mark the end of a version, after its record."""
        self._ended_s = time.perf_counter()
        self._whole_at_s = math.inf

    def _compile_s(self, compilations: Sequence[CompilationMetrics]) -> float:
        """Return the seconds of compilations since the previous call; after the first
        call, warn of them.
        """
        is_first_step = self._compiled_until_us == 0
        recent = [
            compilation
            for compilation in compilations
            if (compilation.start_time_us or 0) > self._compiled_until_us
        ]
        self._compiled_until_us = time.time_ns() // 1000
        total_s = sum(compilation.duration_us or 0 for compilation in recent) / 1e6
        if total_s > COMPILE_WARNING_S and not is_first_step:
            causes = dict.fromkeys(map(_cause, recent))
            log.warning(
                "the step includes %.1f s of compilation: %s",
                total_s,
                "; ".join(causes),
            )
        return total_s


def _cause(compilation: CompilationMetrics) -> str:
    """Example: "0/0: tensor 'x' dtype mismatch. expected BFloat16, actual Float". More
    lines are a stack.
    """
    reason = (compilation.recompile_reason or "").partition("\n")[0]
    return reason or f"{compilation.co_name} ran for the first time"


def _peak_host_bytes() -> int:
    """Return peak memory, or 0 if unknown; ru_maxrss would include the parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class Gap(NamedTuple):
    """|current - behaviour| in nats over `num_tokens` fresh tokens of an engine, or all."""

    engine: int | None
    num_tokens: int
    mean: float
    max: float

    def __str__(self) -> str:
        who = "all engines" if self.engine is None else f"engine-{self.engine}"
        return f"{who} by {self.mean:.4g} nats on {self.num_tokens} fresh tokens"


def measure_gaps(
    gap_M: npt.NDArray[np.float64], engine_M: npt.NDArray[np.int16]
) -> list[Gap]:
    """Return the gap of all M fresh tokens, then of each engine."""
    parts: dict[int | None, npt.NDArray[np.float64]] = (
        {None: gap_M} if len(gap_M) else {}
    )
    for engine in np.unique(engine_M[engine_M >= 0]).tolist():
        parts[engine] = gap_M[engine_M == engine]
    return [
        Gap(engine, len(part), float(part.mean()), float(part.max()))
        for engine, part in parts.items()
    ]


def means_of_rollouts(
    header: BatchHeader, is_chosen_N: BoolN, value_N: FloatN
) -> list[tuple[int, int, float]]:
    """Return (group_id, sample_index, mean over the chosen tokens) of each rollout, if
    finite.
    """
    rollouts = dict[tuple[int, int], int]()
    number_T = [
        rollouts.setdefault((entry.group_id, entry.sample_index), len(rollouts))
        for entry in header.trajectories
    ]
    lengths = [entry.end - entry.start for entry in header.trajectories]
    number_M = np.repeat(number_T, lengths)[is_chosen_N]
    # Sums over the whole batch: numpy calls for each rollout took a thirtieth of a small
    # model's step.
    count_R = np.bincount(number_M, minlength=len(rollouts))
    sum_R = np.bincount(number_M, value_N[is_chosen_N], minlength=len(rollouts))
    mean_R = sum_R / np.maximum(count_R, 1)
    found = zip(rollouts, mean_R.tolist(), count_R.tolist(), strict=True)
    means = [(*rollout, mean) for rollout, mean, count in found if count]
    return [entry for entry in means if math.isfinite(entry[2])]


def gap_metrics(gaps: Sequence[Gap]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for gap in gaps:
        suffix = "" if gap.engine is None else f"/engine-{gap.engine}"
        metrics[f"policy/logprob_gap_max{suffix}"] = gap.max
        metrics[f"policy/logprob_gap_mean{suffix}"] = gap.mean
    return metrics


def gap_fault(gaps: Sequence[Gap], limit: float) -> str:
    """Return gaps above `limit`, largest first, as text, or ''."""
    above = [
        gap
        for gap in gaps
        # The mean of a few tokens of one engine says nothing about the engine.
        if gap.mean > limit
        and (gap.engine is None or gap.num_tokens >= MIN_ENGINE_TOKENS)
    ]
    above.sort(key=lambda gap: (-gap.mean, gap.engine is None))
    worst = ", ".join(map(str, above[:4]))
    return f"engines and trainer disagree: {worst}" if above else ""


def policy_metrics(
    current_M: Float32M, behaviour_M: Float32M, entropy_M: Float32M
) -> dict[str, float]:
    """Return entropy, distance and effective sample size of M >= 1 loss tokens before
    the update, in nats.

    kl_behaviour is the mean of w - 1 - log w, w = exp(current - behaviour)
    (http://joschu.net/blog/kl-approx.html). ess is (sum w)^2 / (M sum w^2).
    """
    log_weight_M = current_M.astype(np.float64) - behaviour_M
    weight_M: npt.NDArray[np.float64] = np.exp(log_weight_M)
    return {
        "policy/entropy": float(entropy_M.mean(dtype=np.float64)),
        "policy/kl_behaviour": float((weight_M - 1.0 - log_weight_M).mean()),
        "policy/ess": float(
            weight_M.sum() ** 2 / (len(weight_M) * np.square(weight_M).sum())
        ),
    }


def trained_line(
    header: BatchHeader, arrays: Tokens, has_loss: BoolN, loss: float
) -> dict[str, Any]:
    """Return a step's line, as above. `has_loss` bool [N]: after masks."""
    # Counts of a trajectory from sums over the whole batch: a numpy call for each
    # trajectory would cost a small model more than its optimizer step.
    sampled_before = np.append(0, np.cumsum(arrays.is_sampled)).tolist()
    loss_before = np.append(0, np.cumsum(has_loss)).tolist()
    all_spans = loss_spans(header, has_loss, arrays.versions)
    trajectories = []
    for entry, spans in zip(header.trajectories, all_spans, strict=True):
        ids = arrays.ids[entry.start : entry.end].astype("<i4")
        trajectories.append(
            {
                "group_id": entry.group_id,
                "sample_index": entry.sample_index,
                "prompt_id": entry.prompt_id,
                "reward": entry.reward,
                "branch": entry.branch,
                "num_tokens": entry.end - entry.start,
                "num_sampled": sampled_before[entry.end] - sampled_before[entry.start],
                "num_loss_tokens": loss_before[entry.end] - loss_before[entry.start],
                "tokens_sha": hashlib.sha256(ids.tobytes()).hexdigest()[:16],
                "spans": spans,
            }
        )
    return {
        "version": header.version,
        "min_version": header.min_version,
        "loss": loss if math.isfinite(loss) else None,
        "num_loss_tokens": int(has_loss.sum()),
        "trajectories": trajectories,
    }


def loss_spans(
    header: BatchHeader, has_loss: BoolN, versions: npt.NDArray[np.int32]
) -> list[list[list[int]]]:
    """Return [start, end, version] of each run of loss tokens in each trajectory."""
    spans = spans_of(np.where(has_loss, versions, -1))
    bounds = [(entry.start, entry.end) for entry in header.trajectories]
    return [[list(span[:3]) for span in own] for own in split_spans(spans, bounds)]


def hold_record(path: Path) -> None:
    """Lock the record against a killed run's trainer. Waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    # Never closed: the kernel gives the lock back when this process ends, however it
    # ends.
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


class RecordWriter:
    """Writes trained.jsonl.

    Life: note() -> write(), which a full disk refuses -> the lines wait -> write().
    Invariant: a refused write leaves no part of a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = list[str]()
        self._is_begun = False

    def note(self, line: Mapping[str, Any]) -> None:
        """Note a step. A new process notes first that earlier lines are repeated."""
        if not self._is_begun:
            self.note_restored(line["version"])
        self._add(line)

    def note_restored(self, version: int) -> None:
        """Note that batches from `version` on are trained again. Cuts an incomplete line."""
        self._is_begun = True
        if self._path.is_file() and self._path.stat().st_size:
            # A process that was killed in write() leaves half a line. The batch is
            # trained again, so the half is cut rather than completed.
            start, line = next(lines_from_end(self._path))
            if not line.endswith(b"\n"):
                cut_at(self._path, start)
            self._add({"restored": version})
        elif self._waiting:
            self._add({"restored": version})

    def _add(self, line: Mapping[str, object]) -> None:
        self._waiting.append(json.dumps(line) + "\n")

    def write(self) -> None:
        """Append the noted lines. Raises OSError; then they wait for the next call."""
        if not self._waiting:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        end = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(self._waiting)
        except OSError:
            # Cutting needs no space.
            with contextlib.suppress(OSError):
                os.truncate(self._path, end)
            raise
        self._waiting.clear()
