"""Tokens per second of the embedded engine against Hugging Face `generate`, and against
vLLM on the CPU.

    python benchmarks/engine.py [--seconds S] [--concurrency C] [--device cpu] [--write]

The first part alternates both sides in one process. They sample the same prompts for
the same numbers of tokens (no end token) with the same model, float32 (bfloat16 on
CUDA), one thread, at most C sequences at a time. Our engine runs its own loop thread
(no HTTP) in deterministic mode and returns logprobs. `generate` returns no logprobs,
runs static batches of C in order of arrival, each until its longest sequence ends, with
the faster of eager and sdpa attention. Only requested tokens count. The last line is
the ratio of medians for long-tailed lengths.

If vLLM is installed (`make setup-vllm`), three cases follow over HTTP through an
EnginePool, as in a run: the embedded server, then a vLLM server, float32. vLLM has one
core for its worker and may use the other core for its API server and scheduler; the
embedded server decodes with one thread.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import numpy as np
import torch
from common import engine_server, has_vllm, options, random_qwen3, reported
from engine_replies import ask
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from asyncrl.engines.pool import EnginePool
from asyncrl.messages.sampling import SamplingRequest
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

VOCAB, PROMPT_LENGTH, MAX_NEW = 64, 16, 496


def make_model(folder: Path) -> None:
    """About 1M parameters."""
    random_qwen3(
        folder,
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )


def long_tailed_lengths(count: int, mean: float, sigma: float) -> list[int]:
    """Lognormal lengths with this mean and sigma, within 1..MAX_NEW."""
    draws = np.random.default_rng(0).lognormal(
        math.log(mean) - sigma**2 / 2, sigma, count
    )
    return [int(length) for length in np.clip(np.rint(draws), 1, MAX_NEW)]


def run_ours(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds for all requests; all are queued at once, the slots bound the
    concurrency.
    """
    started = time.perf_counter()
    requests = [
        SamplingRequest(
            request_id=str(index), prompt_ids=prompt, max_tokens=length, seed=index
        )
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    produced = [len(answer.result().token_ids) for answer in ask(engine, requests)]
    seconds = time.perf_counter() - started
    if produced != lengths:
        raise SystemExit("the engine did not produce the lengths that were asked for")
    return seconds


def run_generate(
    model: Qwen3ForCausalLM,
    prompts: list[list[int]],
    lengths: list[int],
    concurrency: int,
) -> float:
    """Seconds for all requests in static batches."""
    started = time.perf_counter()
    for first in range(0, len(prompts), concurrency):
        batch = torch.tensor(prompts[first : first + concurrency], device=model.device)
        longest = max(lengths[first : first + concurrency])
        output = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        if output.shape[1] != PROMPT_LENGTH + longest:
            raise SystemExit("generate did not produce the lengths that were asked for")
    return time.perf_counter() - started


def run_case(
    engine: Engine,
    peers: list[Qwen3ForCausalLM],
    lengths: list[int],
    concurrency: int,
    seconds: float,
) -> tuple[float, float, int]:
    generator = np.random.default_rng(1)
    prompts = [generator.integers(1, VOCAB, PROMPT_LENGTH).tolist() for _ in lengths]
    short = [min(length, 32) for length in lengths[:concurrency]]
    run_ours(engine, prompts[:concurrency], short)
    peer = min(
        peers,
        key=lambda model: min(
            run_generate(model, prompts[:concurrency], short, concurrency)
            for _ in range(2)
        ),
    )
    times: tuple[list[float], list[float]] = ([], [])
    deadline = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < deadline:
        times[0].append(run_ours(engine, prompts, lengths))
        times[1].append(run_generate(peer, prompts, lengths, concurrency))
    return statistics.median(times[0]), statistics.median(times[1]), len(times[0])


async def time_pool(
    pool: EnginePool, lengths: list[int], concurrency: int, seed: int
) -> float:
    """Seconds for all requests through the pool, at most `concurrency` at a time."""
    generator, limit = np.random.default_rng(seed), asyncio.Semaphore(concurrency)

    async def one(index: int, length: int) -> int:
        prompt = tuple(generator.integers(1, VOCAB, PROMPT_LENGTH).tolist())
        async with limit:
            request = SamplingRequest(f"{seed}-{index}", prompt, length, seed=index)
            return len((await pool.generate(request)).token_ids)

    started = time.perf_counter()
    if (
        await asyncio.gather(
            *(one(index, length) for index, length in enumerate(lengths))
        )
        != lengths
    ):
        raise SystemExit("the engine did not produce the lengths that were asked for")
    return time.perf_counter() - started


async def time_server(
    kind: str, folder: Path, cases: dict[str, tuple[int, list[int]]], seconds: float
) -> dict[str, float]:
    """Median seconds of each case on a server of this kind. A case is (sequences at a
    time, lengths).
    """
    slots, times = max(concurrency for concurrency, _ in cases.values()), {}
    async with engine_server(
        kind, folder, folder / kind, slots=slots, max_length=PROMPT_LENGTH + MAX_NEW
    ) as (client, _):
        pool = EnginePool([client], slots=slots)
        for name, (concurrency, lengths) in cases.items():
            found, deadline = list[float](), time.perf_counter() + seconds / len(cases)
            while len(found) < 2 or time.perf_counter() < deadline:
                found.append(await time_pool(pool, lengths, concurrency, len(found)))
            times[name] = statistics.median(found)
    return times


def run_servers(seconds: float, concurrency: int) -> None:
    """Both servers over HTTP, one after the other, `seconds` each."""
    cases = {
        "1 at a time, 128 new tokens": (1, [128] * 4),
        f"{concurrency} at a time, 64 new tokens": (
            concurrency,
            [64] * (4 * concurrency),
        ),
        f"{concurrency} at a time, lognormal, mean 64": (
            concurrency,
            long_tailed_lengths(8 * concurrency, 64.0, 1.0),
        ),
    }
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for kind in ("embedded", "vllm"):
            rows[kind] = asyncio.run(time_server(kind, Path(folder), cases, seconds))
    print(
        "\nembedded server and vLLM on the CPU, over HTTP, same model in float32; tokens/s"
    )
    print(f"{'case':<42}{'embedded':>10}{'vLLM':>10}{'ratio':>8}")
    for name, (_, lengths) in cases.items():
        ours, theirs = (sum(lengths) / times[name] for times in rows.values())
        print(f"{name:<42}{ours:>10.0f}{theirs:>10.0f}{ours / theirs:>8.2f}")


def main() -> None:
    """Run both cases and print the table."""
    parser = options(__doc__, seconds=20.0)
    parser.add_argument(
        "--concurrency", type=int, default=32, help="sequences at a time, on both sides"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where both sides run"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with reported(
        "engine" if arguments.device == "cpu" else "engine-cuda",
        is_kept=arguments.write,
    ):
        ratio = run_cases(arguments.seconds, arguments.concurrency, arguments.device)
        if arguments.device == "cpu" and has_vllm():
            run_servers(arguments.seconds, arguments.concurrency)
        elif arguments.device == "cpu":
            print("vLLM is not installed (make setup-vllm), and was not measured")
        print(f"ratio: {ratio:.2f}")


def run_cases(seconds: float, concurrency: int, device: str) -> float:
    """Measure both cases for `seconds` each and print the table; returns the last
    ratio.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    print(
        f"Qwen3, 1M parameters, {dtype}, 1 thread, {concurrency} sequences at a time, in one process"
    )
    print(
        f"{'lengths':<42}{'tokens':>8}{'ours tok/s':>12}{'generate tok/s':>16}{'ratio':>8}{'runs':>6}"
    )
    cases = {
        "equal, 64 new tokens": [64] * (4 * concurrency),
        "lognormal sigma 1, mean 64, at most 496": long_tailed_lengths(
            8 * concurrency, 64.0, 1.0
        ),
    }
    ratio = math.nan
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        engine = build_engine(
            EmbeddedSpec(
                name="engine",
                model_path=folder,
                device=device,
                slots=concurrency,
                max_length=PROMPT_LENGTH + MAX_NEW,
            )
        )
        peers = [
            AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation=kind, dtype=dtype
            )
            .eval()
            .to(device)
            for kind in ("sdpa", "eager")
        ]
        engine.start()
        for name, lengths in cases.items():
            ours_s, peer_s, runs = run_case(
                engine, peers, lengths, concurrency, seconds
            )
            ratio, total = peer_s / ours_s, sum(lengths)
            print(
                f"{name:<42}{total:>8}{total / ours_s:>12.0f}{total / peer_s:>16.0f}{ratio:>8.2f}{runs:>6}"
            )
        engine.stop()
    return ratio


if __name__ == "__main__":
    main()
