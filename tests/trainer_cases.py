"""Mini-batches and specs for the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, TrajectoryHeader
from asyncrl.trainer.spec import TrainerSpec


def make_spec(
    model_dir: Path,
    folder: Path,
    *,
    trainer: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    **values: Any,
) -> TrainerSpec:
    return TrainerSpec.model_validate(
        {
            "model_path": str(model_dir),
            "device": "cpu",
            "trainer": TrainerConfig(**{"learning_rate": 1e-2, **(trainer or {})}).model_dump(),
            "algorithm": AlgorithmConfig(**(algorithm or {})).model_dump(),
            "staging_dir": str(folder / "staging"),
            "record_path": str(folder / "trained.jsonl"),
            "failed_dir": str(folder / "failed"),
            **values,
        }
    )


def make_batch(
    *,
    version: int = 0,
    min_version: int | None = None,
    mask_older: bool = False,
    num_groups: int = 2,
    group_size: int = 3,
    seed: int = 0,
) -> tuple[BatchHeader, BatchArrays]:
    """Random tokens of the tiny model, prompts of 5, completions of 1 to 20 tokens, all sampled at
    `version`.
    """
    rng = np.random.default_rng(seed)
    headers, masks, start = [], [], 0
    for index in range(num_groups * group_size):
        length = int(rng.integers(1, 21))
        headers.append(
            TrajectoryHeader(
                group_index=index // group_size,
                group_id=10 + index // group_size,
                sample_index=index % group_size,
                prompt_id=f"p{index // group_size}",
                start=start,
                end=start + 5 + length,
                reward=float(index % group_size) + 0.25 * float(rng.random()),
            )
        )
        masks += [False] * 5 + [True] * length
        start += 5 + length
    mask = np.array(masks)
    return (
        BatchHeader(
            version=version,
            min_version=version if min_version is None else min_version,
            mask_older=mask_older,
            trajectories=headers,
        ),
        BatchArrays(
            token_ids=rng.integers(6, 52, start).astype(np.int32),
            loss_mask=mask,
            behaviour_logprobs=np.where(mask, rng.normal(-4.0, 0.3, start), 0).astype(np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
        ),
    )


def changed(arrays: BatchArrays, **values: Any) -> BatchArrays:
    return BatchArrays(**{**dict(arrays), **values})


def naive_logprobs(model: Any, header: BatchHeader, arrays: BatchArrays, temperature: float) -> np.ndarray:
    """float32 [N]: one plain forward a sequence, log-softmax over the whole vocabulary; 0 for each first
    token.
    """
    logprobs = np.zeros(len(arrays.token_ids), np.float32)
    for entry in header.trajectories:
        ids = torch.from_numpy(arrays.token_ids[entry.start : entry.end].astype(np.int64))
        with torch.no_grad():
            logits = (
                model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None])).logits[0, :-1].double()
                / temperature
            )
        logprobs[entry.start + 1 : entry.end] = (
            torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0].float().numpy()
        )
    return logprobs
