"""What both sides of benchmarks/trainer.py train on, and how both are measured. Knows
neither trainer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.model_config import ScratchConfig
from asyncrl.messages.tokens import BEHAVIOUR, Tokens, spans_of
from asyncrl.messages.trainer_api import (
    BatchHeader,
    TrajectoryHeader,
    pack_batch,
    unpack_batch,
)
from asyncrl.trainer.model.random_init import (
    SPECIAL_TOKENS,
    ScratchSpec,
    make_scratch_model,
)

GROUP_SIZE, PROMPT_LENGTH, MAX_COMPLETION = 8, 64, 512
EQUAL_LENGTH = 132
"""About the mean of the long-tailed lengths."""
AGENT_PROMPT, AGENT_THOUGHT, AGENT_ANSWER, AGENT_TOOL = 32, 80, 24, 40
"""Tokens; a rollout has then 2.1 times the tokens of its tree in 8 turns, 4.5 times in
20.
"""
LEARNING_RATE, MAX_GRAD_NORM, CLIP = 1e-6, 1.0, 0.2
ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@dataclass(frozen=True)
class Case:
    model_path: str
    batch_path: str
    dtype: str
    device: str
    threads: int
    seconds: float
    warm_up: int
    """Optimizer steps that are not counted."""
    micro_batch: int = 0
    """Sequences per forward of TRL."""
    is_untangled: bool = False
    """Ours: every sequence by itself, nothing shared."""
    is_alone: bool = False
    """Ours: one sequence per forward."""

    def save(self, path: Path) -> None:
        """Write it for a child."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str) -> Case:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def batch(self) -> tuple[BatchHeader, Tokens]:
        """The one batch, at version 0."""
        return unpack_batch(Path(self.batch_path).read_bytes())


@dataclass
class Meter:
    """CPU seconds (all threads) and wall seconds of the stretches between start() and
    stop(), added up a step; peak memory.
    """

    case: Case
    steps: list[tuple[float, float]] = field(default_factory=list)
    _cpu_s: float = 0.0
    _wall_s: float = 0.0
    _started: tuple[float, float] = (0.0, 0.0)
    _loaded_bytes: int = 0

    def start(self) -> None:
        """Begin a stretch."""
        self._sync()
        self._started = time.process_time(), time.perf_counter()

    def stop(self) -> None:
        """End it."""
        self._sync()
        self._cpu_s += time.process_time() - self._started[0]
        self._wall_s += time.perf_counter() - self._started[1]

    def end_step(self) -> None:
        self.steps.append((self._cpu_s, self._wall_s))
        self._cpu_s = self._wall_s = 0.0

    def is_over(self) -> bool:
        counted = self.steps[self.case.warm_up :]
        return (
            len(counted) > 0
            and sum(wall_s for _, wall_s in counted) >= self.case.seconds
        )

    def mark_loaded(self) -> None:
        """The model is loaded: peak memory counts from here."""
        if self.case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._loaded_bytes = torch.cuda.memory_allocated()
        else:
            # resets the peak
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._loaded_bytes = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        peak = (
            torch.cuda.max_memory_allocated()
            if self.case.device == "cuda"
            else _status_bytes("VmHWM")
        )
        return peak - self._loaded_bytes

    def _sync(self) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def write_result(path: str, meter: Meter, *, loss: float, grad_norm: float) -> None:
    steps = meter.steps[meter.case.warm_up :]
    values = {
        "steps": steps,
        "peak_bytes": meter.peak_bytes(),
        "loss": loss,
        "grad_norm": grad_norm,
        "threads": torch.get_num_threads(),
    }
    Path(path).write_text(json.dumps(values), encoding="utf-8")


def long_tailed_lengths(num_groups: int) -> list[int]:
    """Lognormal completion lengths, median 96, sigma 0.8, at most 512."""
    draws = np.random.default_rng(0).lognormal(
        math.log(96.0), 0.8, num_groups * GROUP_SIZE
    )
    return [int(length) for length in np.clip(np.rint(draws), 1, MAX_COMPLETION)]


FAMILIES = {
    "Qwen3.5": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "Gemma 3": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "query_pre_attn_scalar": 32,
    },
}
"""What a tiny model of a family has of its own."""


def make_tiny(folder: Path, family: dict[str, Any] | None = None) -> Path:
    scratch = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))["model"]["scratch"]
    scratch["architecture"] |= {"max_position_embeddings": 2048, **(family or {})}
    make_scratch_model(
        ScratchSpec(out=folder, seed=0, scratch=ScratchConfig(**scratch))
    )
    return folder


@dataclass(frozen=True)
class Row:
    """A sequence of a batch. `logprobs`: behaviour logprobs of its sampled tokens; those
    of the others do not count.
    """

    group: int
    sample: int
    branch: int
    ids: npt.NDArray[np.int64]
    is_sampled: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.floating[Any]] | float = 0.0
    reward: float = 0.0


def batch_of(rows: Sequence[Row], version: int = 0) -> tuple[BatchHeader, Tokens]:
    """Return a batch that was sampled at `version`."""
    trajectories, logprobs = list[TrajectoryHeader](), list[npt.NDArray[Any]]()
    start = 0
    for row in rows:
        end = start + len(row.ids)
        trajectories.append(
            TrajectoryHeader(
                group_index=row.group,
                group_id=row.group,
                sample_index=row.sample,
                branch=row.branch,
                prompt_id=f"p{row.group}",
                start=start,
                end=end,
                reward=row.reward,
            )
        )
        logprobs.append(np.where(row.is_sampled, row.logprobs, 0.0))
        start = end
    header = BatchHeader(
        version=version,
        min_version=version,
        mask_older=False,
        trajectories=trajectories,
    )
    mask = np.concatenate([row.is_sampled for row in rows])
    return header, Tokens(
        np.concatenate([row.ids for row in rows]).astype(np.int32),
        spans_of(np.where(mask, version, -1)),
        {BEHAVIOUR: np.concatenate(logprobs).astype(np.float32)},
    )


class Pieces:
    def __init__(self, model_path: str, vocab_size: int) -> None:
        self._rng = np.random.default_rng(1)
        is_scratch = vocab_size <= 1000
        random = self._rng.integers(len(SPECIAL_TOKENS), vocab_size, 100_000)
        self._text = random if is_scratch else _text(model_path)

    def __call__(self, length: int) -> npt.NDArray[np.int64]:
        first = self._rng.integers(0, len(self._text) - length)
        return self._text[first : first + length]


def completions(pieces: Pieces, lengths: list[int]) -> list[Row]:
    """Groups of 8 completions of one prompt."""
    rows = []
    for index, length in enumerate(lengths):
        if index % GROUP_SIZE == 0:
            prompt = pieces(PROMPT_LENGTH)
        ids = np.concatenate([prompt, pieces(length)])
        rows.append(
            Row(
                index // GROUP_SIZE,
                index % GROUP_SIZE,
                0,
                ids,
                np.arange(len(ids)) >= PROMPT_LENGTH,
            )
        )
    return rows


def agents(
    pieces: Pieces, num_turns: int, num_groups: int, group_size: int
) -> list[Row]:
    rows = []
    for group in range(num_groups):
        prompt = pieces(AGENT_PROMPT)
        for sample in range(group_size):
            history = prompt
            for turn in range(num_turns):
                thought, answer = pieces(AGENT_THOUGHT), pieces(AGENT_ANSWER)
                ids = np.concatenate([history, thought, answer])
                rows.append(
                    Row(group, sample, turn, ids, np.arange(len(ids)) >= len(history))
                )
                history = np.concatenate([history, answer, pieces(AGENT_TOOL)])
    return rows


def make_batch(model_path: str, rows: Callable[[Pieces], list[Row]]) -> bytes:
    """Return the packed batch. Its behaviour logprobs deviate a little from the model's
    own, so that ratios and clipping matter.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    rng, rewards = np.random.default_rng(2), dict[tuple[int, int], float]()
    made = list[Row]()
    for row in rows(Pieces(model_path, model.config.vocab_size)):
        off = rng.normal(0.0, 0.1, len(row.ids))
        logprobs = np.minimum(_logprobs(model, row.ids) + off, 0.0)
        reward = rewards.setdefault((row.group, row.sample), float(rng.random()))
        made.append(replace(row, logprobs=logprobs, reward=reward))
    return pack_batch(*batch_of(made))


def _text(model_path: str) -> npt.NDArray[np.int64]:
    """The README and the documentation as tokens."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return np.concatenate(
        [
            np.asarray(
                tokenizer(file.read_text(encoding="utf-8"))["input_ids"], np.int64
            )
            for file in files
        ]
    )


@torch.no_grad()
def _logprobs(
    model: torch.nn.Module, ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Logprob of each token, 0 for the first."""
    ids_1T = torch.from_numpy(ids)[None]  # noqa: N806
    logprob_TV = torch.log_softmax(model(input_ids=ids_1T).logits[0, :-1], dim=-1)  # noqa: N806
    chosen = logprob_TV.gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
    return np.concatenate([np.zeros(1, np.float32), chosen.numpy()])
