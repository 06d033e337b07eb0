"""Speed of many adapters against one, in the embedded engine and in the trainer.

    python benchmarks/adapters.py [--adapters N] [--rank R] [--seconds S] [--write]

Engine: tokens per second of N requests at once, each with 64 new tokens, all with the
run's own adapter or each with its own. Trainer: tokens per second of optimizer steps, all
of one adapter or of 8 in turn, with the same batches. Both sides alternate in one process,
float32, one thread, deterministic mode, with adapters on all linear layers of a random
Qwen3 of 69 M parameters. Seconds are CPU seconds, which are steadier on a busy machine. The
engine gets most of the time.

The last line is the engine's ratio of the medians: 16 adapters of rank 16 have a goal of
0.8. The goal of the trainer is 0.9.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import numpy as np
import torch
from common import options, qwen3_69m, reported, trainer_spec
from engine_replies import ask
from trainer_case import Row, batch_of

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.config.trainer_config import LoraConfig
from asyncrl.messages.engine_api import (
    AdapterSpec,
    CommitRequest,
    OpenAdapterRequest,
    PrepareRequest,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import Tokens
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.rank_process import TrainerService
from asyncrl.weights.export import export_weights
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

PROMPT_LENGTH, NUM_NEW = 16, 64
NUM_TRAINED, NUM_ROWS, ROW_LENGTH = 8, 4, 16
"""Adapters of the trainer, and sequences of each step; half of a sequence is sampled. Few
tokens, so that the costs of an adapter count.
"""
TRAINER_FRACTION = 0.25
"""Part of the seconds."""


def push(engine: Engine, name: str, folder: Path) -> None:
    """Push random numbers as version 1 of an adapter."""
    zeros = engine.weights_of(name).adapters[""].tensors
    tensors = {key: torch.randn_like(one) * 0.01 for key, one in zeros.items()}
    sent = export_weights(tensors, folder / f"{name or 'own'}.safetensors", 1)
    announced = PrepareRequest.model_validate(sent, from_attributes=True)
    announced = announced.model_copy(update={"adapter": name})
    engine.weights_of(name).prepare(announced)
    request = CommitRequest(
        adapter=name, version=1, digest=sent.digest, interrupt="abort"
    )
    engine.commit(request).result()


def run(engine: Engine, names: list[str]) -> float:
    """Return the CPU seconds for a request with each of these adapters, all at once."""
    requests = [
        SamplingRequest(
            request_id=str(index),
            prompt_ids=[
                1 + (7 * index + place) % 1000 for place in range(PROMPT_LENGTH)
            ],
            max_tokens=NUM_NEW,
            seed=index,
            adapter=name,
        )
        for index, name in enumerate(names)
    ]
    started_s = time.process_time()
    for answer in ask(engine, requests):
        assert len(answer.result().token_ids) == NUM_NEW
    return time.process_time() - started_s


def print_sides(times: dict[str, list[float]], num_tokens: int) -> float:
    """Print both sides, and return the ratio of their speeds. `times`: seconds for
    `num_tokens` tokens, the warm-up first.
    """
    medians = {side: statistics.median(found[1:]) for side, found in times.items()}
    for side, median_s in medians.items():
        print(f"{side:<24}{num_tokens / median_s:>10.0f}{len(times[side]) - 1:>6}")
    one_s, many_s = medians.values()
    return one_s / many_s


def train(rank: TrainerRank, names: list[str]) -> float:
    """Return the CPU seconds for an optimizer step of each of these adapters in turn."""
    assert rank.adapters is not None
    batches = list[tuple[BatchHeader, Tokens]]()
    for turn, name in enumerate(names):
        rng = np.random.default_rng(turn)
        is_sampled = np.arange(ROW_LENGTH) >= ROW_LENGTH // 2
        rows = [
            Row(
                group=0,
                sample=number,
                branch=0,
                ids=rng.integers(1, 1000, ROW_LENGTH),
                is_sampled=is_sampled,
                logprobs=-9.0,
                reward=float(number),
            )
            for number in range(NUM_ROWS)
        ]
        header, tokens = batch_of(rows)
        trajectories = [
            entry.model_copy(update={"adapter": name}) for entry in header.trajectories
        ]
        header = header.model_copy(update={"trajectories": trajectories})
        batches.append((header, tokens))
    started_s = time.process_time()
    for name, batch in zip(names, batches, strict=True):
        rank.add_gradients(*batch)
        assert rank.adapters.step(name) > 0
    return time.process_time() - started_s


def measure_trainer(folder: Path, rank: int, seconds: float) -> float:
    """Print both sides of the trainer, and return their ratio."""
    lora = LoraConfig(rank=rank)
    spec = trainer_spec(
        folder,
        folder,
        threads=1,
        trainer=TrainerConfig(learning_rate=1e-5, lora=lora),
        algorithm=AlgorithmConfig(),
    )
    trainer = TrainerService(spec).rank
    assert trainer.adapters is not None
    names = [f"tenant-{number}" for number in range(NUM_TRAINED)]
    for seed, name in enumerate(names):
        trainer.adapters.open(name, lora, seed)
    sides = {
        "trainer, one adapter": names[:1] * len(names),
        f"trainer, {len(names)} adapters": names,
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    deadline_s = time.perf_counter() + seconds
    while time.perf_counter() < deadline_s or len(next(iter(times.values()))) < 4:
        for side, chosen in sides.items():
            times[side].append(train(trainer, chosen))
    return print_sides(times, len(names) * NUM_ROWS * ROW_LENGTH)


def main() -> None:
    """Measure both sides and print the table."""
    parser = options(__doc__, seconds=60.0)
    parser.add_argument("--adapters", type=int, default=16, help="adapters at a time")
    parser.add_argument("--rank", type=int, default=16, help="rank of each adapter")
    arguments = parser.parse_args()
    many = [f"tenant-{number}" for number in range(arguments.adapters)]
    adapter = AdapterSpec(rank=arguments.rank, scale=1.0)
    torch.set_num_threads(1)
    with (
        reported("adapters", is_kept=arguments.write),
        tempfile.TemporaryDirectory() as temporary,
    ):
        folder = Path(temporary)
        qwen3_69m(folder, PROMPT_LENGTH + NUM_NEW)
        spec = EmbeddedSpec(
            name="engine",
            model_path=str(folder),
            device="cpu",
            slots=len(many),
            max_length=PROMPT_LENGTH + NUM_NEW,
            adapters=adapter,
            max_adapters=len(many),
        )
        engine = build_engine(spec)
        engine.start()
        for name in many:
            engine.open_adapter(
                OpenAdapterRequest(adapter=name, **adapter.model_dump())
            ).result()
        for name in ("", *many):
            push(engine, name, folder)
        print(f"{'side':<24}{'tokens/s':>10}{'runs':>6}")
        trainer_s = TRAINER_FRACTION * arguments.seconds
        ratio = measure_trainer(folder, arguments.rank, trainer_s)
        print(f"trainer's ratio: {ratio:.2f}")
        sides = {
            "engine, one adapter": [""] * len(many),
            f"engine, {len(many)} adapters": many,
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        deadline_s = time.perf_counter() + arguments.seconds - trainer_s
        while time.perf_counter() < deadline_s or len(next(iter(times.values()))) < 4:
            for side, names in sides.items():
                times[side].append(run(engine, names))
        engine.stop()
        ratio = print_sides(times, len(many) * NUM_NEW)
        print(f"ratio: {ratio:.2f}")


if __name__ == "__main__":
    main()
