"""Speed of a Tinker server with 8 tenants at once, against the same tenants one after the
other.

    python benchmarks/tinker_tenants.py [--model FOLDER] [--tenants N] [--rounds R] [--write]

Each tenant is a client of package tinker with its own adapter of rank 8. A round draws 4
answers of 32 tokens, computes the gradient of their policy loss, and takes a step. Tokens
are sampled and trained ones. Clients, server, trainer and engine share the machine's cores.

The last line is the ratio of the tokens per second: together against one after the other.
The goal is 2.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import tinker
from common import ASYNCRL, plain_options, reported
from tinker import types

ROOT = Path(__file__).parents[1]
PROMPT = [*range(5, 21)]
NUM_ANSWERS, NUM_NEW = 4, 32
KEY = "tml-benchmark"


def datum(tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    ids, before = PROMPT + tokens, [0.0] * (len(PROMPT) - 1)
    inputs = {
        "target_tokens": types.TensorData(data=ids[1:], dtype="int64"),
        "logprobs": types.TensorData(data=before + logprobs, dtype="float32"),
        "advantages": types.TensorData(
            data=before + [advantage] * len(tokens), dtype="float32"
        ),
    }
    model_input = types.ModelInput.from_ints(ids[:-1])
    return types.Datum(model_input=model_input, loss_fn_inputs=inputs)


async def rounds(training: tinker.TrainingClient, number: int) -> int:
    """Train a tenant's model; return the number of tokens."""
    num_tokens = 0
    params = types.SamplingParams(max_tokens=NUM_NEW, stop=[], seed=1)
    for _ in range(number):
        sampler = await training.save_weights_and_get_sampling_client()
        answer = await sampler.sample(
            prompt=types.ModelInput.from_ints(PROMPT),
            num_samples=NUM_ANSWERS,
            sampling_params=params,
        )
        data = [
            datum([*one.tokens], [*one.logprobs], place - 1.5)
            for place, one in enumerate(answer.sequences)
        ]
        gradient = training.forward_backward(data, "importance_sampling")
        step = training.optim_step(types.AdamParams(learning_rate=1e-4))
        await gradient
        await step
        num_tokens += 2 * NUM_ANSWERS * NUM_NEW
    return num_tokens


async def speeds(url: str, model: str, tenants: int, number: int) -> tuple[float, ...]:
    """Return tokens per second one after the other, and together."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    trained = [
        await client.create_lora_training_client(model, rank=8, seed=index)
        for index in range(tenants)
    ]
    await asyncio.gather(*(rounds(one, 1) for one in trained))  # all is loaded
    found = list[float]()
    for is_together in (False, True):
        began_s = time.perf_counter()
        if is_together:
            counts = await asyncio.gather(*(rounds(one, number) for one in trained))
        else:
            counts = [await rounds(one, number) for one in trained]
        found.append(sum(counts) / (time.perf_counter() - began_s))
    return tuple(found)


def serve(model: Path, folder: Path) -> tuple[subprocess.Popen[str], str]:
    config = ROOT / "configs/tinker.yaml"
    command: list[Any] = [*ASYNCRL[:-1], "serve", "tinker", config]
    settings = ["model.scratch=none", f"model.path={model}", "tinker.names=[served]"]
    settings += ["rollout.max_prompt_tokens=64", "rollout.max_tokens=64"]
    options = ["--key", f"bench={KEY}", "--run-dir", folder / "run"]
    process = subprocess.Popen(
        [*command, *settings, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "TINKER_BASE_URL=" in line:
            return process, line.rpartition("=")[2].strip()
    sys.exit(f"the server ended: read {folder / 'run/logs'}")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = plain_options(__doc__)
    parser.add_argument(
        "--model", type=Path, default=ROOT / "models/smollm2-135m-instruct"
    )
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        reported("tinker_tenants", is_kept=given.write),
    ):
        process, url = serve(given.model, Path(folder))
        try:
            work = speeds(url, "served", given.tenants, given.rounds)
            apart, together = asyncio.run(work)
        finally:
            process.terminate()
            process.wait(60)
        print(f"one after the other: {apart:.1f} tokens/s")
        print(f"{given.tenants} together: {together:.1f} tokens/s")
        print(f"ratio: {together / apart:.2f}")


if __name__ == "__main__":
    main()
