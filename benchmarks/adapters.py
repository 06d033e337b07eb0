"""Tokens per second of the embedded engine with many adapters, against the same requests
with one.

    python benchmarks/adapters.py [--adapters N] [--rank R] [--seconds S] [--write]

Both sides alternate in one process and one engine, float32, one thread, deterministic
mode: N requests at once, each with 64 new tokens, all with the run's own adapter or
each with its own, on all linear layers of a random Qwen3 of 69 M parameters. The last
line is the ratio of the medians. The goal for 16 adapters of rank 16 is 0.8; 0.33 was
measured.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch
from common import options, qwen3_69m, reported
from engine_replies import ask

from asyncrl.messages.engine_api import (
    AdapterSpec,
    CommitRequest,
    OpenAdapterRequest,
    PrepareRequest,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.weights.export import export_weights
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

PROMPT_LENGTH, NUM_NEW = 16, 64


def push(engine: Engine, name: str, folder: Path) -> None:
    """Push random numbers as version 1 of an adapter."""
    zeros = engine.weights_of(name).adapter.tensors
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
    """Return the seconds for a request with each of these adapters, all at once."""
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
    started_s = time.perf_counter()
    for answer in ask(engine, requests):
        assert len(answer.result().token_ids) == NUM_NEW
    return time.perf_counter() - started_s


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
        sides = {"one adapter": [""] * len(many), f"{len(many)} adapters": many}
        times: dict[str, list[float]] = {side: [] for side in sides}
        deadline_s = time.perf_counter() + arguments.seconds
        while time.perf_counter() < deadline_s or len(times["one adapter"]) < 4:
            for side, names in sides.items():
                times[side].append(run(engine, names))
        engine.stop()
        # The first run of a side is its warm-up.
        medians = {side: statistics.median(found[1:]) for side, found in times.items()}
        print(f"{'side':<16}{'tokens/s':>10}{'runs':>6}")
        for side, median_s in medians.items():
            num_tokens = len(many) * NUM_NEW
            print(f"{side:<16}{num_tokens / median_s:>10.0f}{len(times[side]) - 1:>6}")
        one_s, many_s = medians.values()
        print(f"ratio: {one_s / many_s:.2f}")


if __name__ == "__main__":
    main()
