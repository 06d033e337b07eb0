"""Parts 1 and 4: weight pushes by ipc to an embedded engine on the trainer's device."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from asyncrl.base.files import clear_stale_staging, new_staging_dir, remove_staging_dir
from asyncrl.config import ModelConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.launch.model_sizes import model_shape
from asyncrl.weights.export import LazyWeights, chunks_of, entries_of, named_weights
from asyncrl.weights.ipc import Chunks, SharedChunk
from gpu.models import make_folder
from gpu.rows import Bench

PEER = {"0.6B": "a peer: 0.18 s"}
REPETITIONS = 4
"""Pushes; the first one warms up."""
SLOTS = 16
MAX_LENGTH = 512
CHUNK_BYTES = 2**28
COPY_BYTES = 2**29

Times = dict[str, float]


def by_chunks(bench: Bench, shape: str) -> None:
    """Push chunks in shared device memory (transport=ipc) to an engine that sleeps."""
    asyncio.run(_measure(bench, shape))


async def _measure(bench: Bench, shape: str) -> None:
    from common import engine_server

    clear_stale_staging()
    folder = make_folder(bench, shape)
    device = torch.device(bench.device)
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    first = named_weights(model)
    sets = [
        LazyWeights(first),
        LazyWeights({name: tensor * 1.01 for name, tensor in first.items()}),
    ]
    num_bytes = sum(tensor.nbytes for tensor in first.values())
    given = {"device": bench.device, "dtype": str(dtype).removeprefix("torch.")}
    staging = new_staging_dir()
    times: list[Times] = []
    try:
        cut = make_chunks(sets[0], staging, device, dtype)
        serving = engine_server(
            "embedded",
            folder,
            bench.folder,
            slots=SLOTS,
            max_length=MAX_LENGTH,
            **given,
        )
        async with serving as (server, _):
            for version in range(1, 1 + (2 if bench.is_tiny else REPETITIONS)):
                times.append(await push_chunks(server, sets[version % 2], cut, version))
    finally:
        remove_staging_dir(staging)
    if bench.device == "cuda":
        # Both sets. Torch does not count the chunk, and _tell() allocates more.
        planned = (
            2
            * dtype.itemsize
            * model_shape(ModelConfig(path=str(folder))).num_parameters
        )
        bench.memory(planned, torch.cuda.max_memory_allocated(), is_limit=False)
    _tell(bench, times[1:], num_bytes, PEER.get(shape, ""))


def make_chunks(
    weights: LazyWeights, staging: Path, device: torch.device, dtype: torch.dtype
) -> Chunks:
    """Return chunks as a colocated trainer makes them."""
    chunks = chunks_of(weights, dtype, CHUNK_BYTES)
    entries = [entries_of(chunk, dtype) for chunk in chunks]
    return Chunks(SharedChunk(staging, entries, device), chunks, dtype)


async def push_chunks(
    server: EngineClient, weights: LazyWeights, cut: Chunks, version: int
) -> Times:
    """Return the seconds of one push; the engine samples nothing from its sleep to its
    wake.
    """
    begun = time.perf_counter()
    await server.sleep()
    await server.wake(["weights"])
    awake = time.perf_counter()
    writing_s = 0.0
    is_last = False
    index = 0
    while not is_last:
        started = time.perf_counter()
        chunk = await asyncio.to_thread(cut.write, weights, version, index)
        assert chunk is not None
        writing_s += time.perf_counter() - started
        assert await server.load_chunk(chunk) == chunk.digest
        is_last = chunk.is_last
        index += 1
    report = await server.commit(version, chunk.whole_digest, "abort")
    pushed = time.perf_counter()
    await server.wake(["kv"])
    ended = time.perf_counter()
    assert report.digest == chunk.whole_digest, (report.digest, chunk.whole_digest)
    return {
        "push, in all": pushed - awake,
        "without a token": ended - begun,
        "  trainer writes": writing_s,
        "  engine sleeps, wakes": awake - begun + ended - pushed,
    }


def _tell(bench: Bench, times: list[Times], num_bytes: int, peer: str) -> None:
    from common import copy_costs

    size = min(num_bytes, COPY_BYTES)
    (copy_s, _), _ = copy_costs(size, torch.device(bench.device))
    copy_s *= num_bytes / size
    bench.tell(
        "weights, GB",
        f"{num_bytes / 1e9:.3g}",
        against=f"memory copy to pinned memory: {copy_s:.3f} s",
    )
    for what in times[0]:
        seconds = median(one[what] for one in times)
        against = f"{seconds / copy_s:.2f} of the copy" + (
            f"; {peer}" if peer and what[0] != " " else ""
        )
        bench.tell(f"{what}, seconds", f"{seconds:.4f}", against=against)
