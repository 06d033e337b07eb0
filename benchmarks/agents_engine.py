"""How much of an agent's history an engine computes again: 64 agents of 250 turns on real servers.

    python benchmarks/agents_engine.py [--agents 64] [--turns 250] [--seconds 300] [--write]

Each turn of an agent sends all that was said before: its prompt, and for each turn the 16 tokens that were
sampled and 144 of a tool's result. Eight agents start from the same 640 tokens (system prompt and tools), as
the samples of a group do. They go on one by one as they are answered, through the same EnginePool, first
against the embedded server, which keeps ended turns in its KV cache as in a run of agents, and then against
vLLM with its prefix cache, where it is installed (`make setup-vllm`), which begins no row after --seconds. A
model of 0.1M parameters, float32.

prefilled    Prompt tokens that the model computed, by the server's own count (/health), for each that no
             earlier prompt or answer of this agent held. Of the turns since the row before.
tokens/s     Sampled tokens, over the same turns.

Target: prefilled <= 1.3. Last line: `ratio: X` = 1.3 over the embedded server's, over all of its turns.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
from engine_servers import engine_server, has_vllm
from random_model import random_qwen3
from report import options, reported

from asyncrl.engines.pool import EnginePool
from asyncrl.messages.records import SamplingRequest, VersionSpan

TARGET = 1.3
VOCAB, START, ANSWER, RESULT, GROUP = 256, 640, 16, 144, 8
ROWS = (1, 10, 50, 100, 150, 200, 250)


class Agents:
    """All of them, and what they sent for the first time."""

    def __init__(self, pool: EnginePool, num_agents: int) -> None:
        self._pool, self._num_agents = pool, num_agents
        starts = np.random.default_rng(0).integers(1, VOCAB, (num_agents // GROUP + 1, START), dtype=np.int32)
        self._prompts = [starts[number // GROUP] for number in range(num_agents)]
        self._spans: list[VersionSpan | None] = [None] * num_agents
        self.num_new = self.num_sampled = 0

    async def play(self, first: int, last: int) -> None:
        """The turns `first` to `last` of each agent."""
        await asyncio.gather(*(self._agent(number, first, last) for number in range(self._num_agents)))

    async def _agent(self, number: int, first: int, last: int) -> None:
        tools = np.random.default_rng((number, first))
        for turn in range(first, last):
            prompt = self._prompts[number]
            # the start is new to the first agent of a group alone
            self.num_new += RESULT if turn else START * (number % GROUP == 0)
            request = SamplingRequest(
                f"g{number // GROUP}/r{number}/t{turn}",
                prompt,
                ANSWER,
                1.0,
                seed=1000 * number + turn,
                route_key=f"g{number // GROUP}",
                after=self._spans[number],
            )
            answer = await self._pool.generate(request)
            self.num_sampled += len(answer.token_ids)
            self._spans[number] = answer.version_spans[-1]
            said = np.asarray(answer.token_ids, np.int32)
            result = tools.integers(1, VOCAB, RESULT, dtype=np.int32)
            self._prompts[number] = np.concatenate([prompt, said, result])


def make_model(folder: Path, max_length: int) -> None:
    """One layer: the KV cache has 256 bytes a token."""
    random_qwen3(
        folder,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_length,
    )


async def measure(kind: str, model: Path, folder: Path, arguments: argparse.Namespace) -> float:
    """Play all turns on a server of this kind, a row at a time; prefilled over all of them."""
    num_agents, num_turns = arguments.agents, arguments.turns
    length = START + num_turns * (ANSWER + RESULT)
    server = engine_server(kind, model, folder, slots=num_agents, max_length=length, keeps_turns=True)
    async with server as (client, _):
        agents = Agents(EnginePool([client], slots=num_agents), num_agents)
        done, before = 0, (await client.health()).tokens_prefilled
        at_start, begun_s = before, time.perf_counter()
        for row in sorted({min(row, num_turns) for row in (*ROWS, num_turns)}):
            num_new, num_sampled, started_s = agents.num_new, agents.num_sampled, time.perf_counter()
            if kind != "embedded" and started_s - begun_s > arguments.seconds:
                break
            await agents.play(done, row)
            rate = (agents.num_sampled - num_sampled) / (time.perf_counter() - started_s)
            prefilled = (await client.health()).tokens_prefilled
            share = (prefilled - before) / (agents.num_new - num_new)
            tokens = START + row * (ANSWER + RESULT)
            print(f"{kind:<10}{row:>6}{tokens:>9}{share:>12.3f}{rate:>11.0f}", flush=True)
            done, before = row, prefilled
    return (before - at_start) / agents.num_new


def main() -> None:
    """Both servers, one after the other."""
    parser = options(__doc__, seconds=300.0)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--turns", type=int, default=250)
    arguments = parser.parse_args()
    kinds = ["embedded", *(["vllm"] if has_vllm() else [])]
    with (
        reported("agents_engine", is_kept=arguments.write),
        tempfile.TemporaryDirectory(prefix="asyncrl-agents-") as folder,
    ):
        model = Path(folder) / "model"
        make_model(model, START + arguments.turns * (ANSWER + RESULT))
        print(f"{arguments.agents} agents, {arguments.turns} turns, starts shared by {GROUP}")
        print(f"{'server':<10}{'turns':>6}{'tokens':>9}{'prefilled':>12}{'tokens/s':>11}")
        found = {kind: asyncio.run(measure(kind, model, Path(folder) / kind, arguments)) for kind in kinds}
        print("prefilled over these turns: " + ", ".join(f"{kind} {x:.3f}" for kind, x in found.items()))
        print(f"ratio: {TARGET / found['embedded']:.2f}")


if __name__ == "__main__":
    main()
