"""Engine servers of each kind for the contract tests, their clients and their
differences.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from engine_processes import SECRET, EngineProcess, engine_process
from safetensors.numpy import load_file

from asyncrl.base.http import Caller
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.messages.sampling import SamplingRequest

if TYPE_CHECKING:
    from vllm_house import World

SLOTS, VOCAB_SIZE = 4, 102
LONG = 2500
"""Tokens that take any server more than a second: time for a story to interrupt them.
"""
ENDLESS = 100_000
"""Tokens of a server whose speed is that of the clock, not of the machine: a hundred
seconds.
"""
WEIGHTS = {"w": np.ones((3, 2), dtype=np.float32), "b": np.zeros(5, dtype=np.float32)}
OURS = ["simulated", "embedded"]
"""Kinds that speak our own protocol."""
KINDS = [*OURS, pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm])]


@dataclass(frozen=True)
class Traits:
    """Natural differences between kinds of servers. Everything else is the same for
    all.
    """

    waited: int = 600
    """Tokens that take it longer than a story takes to begin a commit that waits for
    them.
    """
    kept: int = LONG
    """Tokens that outlast the beginning of any commit, and are sampled to their end
    after it.
    """
    long: int = LONG
    """Tokens that are not over before a story has interrupted them; a sequence may have
    a few more.
    """
    aborts_queued: bool = False
    """A vLLM commit with interrupt=abort also ends queued requests; ours keep them for
    the new weights.
    """
    keeps_streams: bool = True
    """vLLM reports versions at the end of an answer. A commit with keep or keep_kv ends
    the stream, and the pool sends the rest again.
    """
    keeps_queue: bool = True
    """Queued requests run after a wake. vLLM's sleep aborts its queue, and the pool
    sends it again.
    """
    frees_memory: bool = True
    """vLLM's sleep mode is for CUDA: on CPU it pauses, and frees nothing."""
    has_weights: bool = True

    @property
    def max_length(self) -> int:
        return self.long + 100


TRAITS = {
    "simulated": Traits(waited=3000, long=ENDLESS, has_weights=False),
    "embedded": Traits(waited=LONG),
    "vllm": Traits(
        kept=1000,  # some seconds
        aborts_queued=True,
        keeps_streams=False,
        keeps_queue=False,
        frees_memory=False,
    ),
}


@dataclass
class Server:
    """A server under test; versions and request ids go up from story to story."""

    kind: str
    process: EngineProcess
    weights: dict[str, np.ndarray]
    folder: Path
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    """The test loop of the stories."""
    client: EngineClient | None = None
    """The one client of all stories, of a server that leaves it to its client to know
    which weights it holds.
    """
    world: World | None = None
    num_requests: int = 0

    @property
    def traits(self) -> Traits:
        return TRAITS[self.kind]

    def request(self, **fields: Any) -> SamplingRequest:
        self.num_requests += 1
        given = {
            "request_id": f"request {self.num_requests}",
            "prompt_ids": [1, 2, 3],
            "max_tokens": 20,
        }
        return SamplingRequest(**{**given, "seed": 5, **fields})


@contextmanager
def contract_server(kind: str, folder: Path) -> Iterator[Server]:
    """Yield a server that many stories share."""
    with engine_process(kind, spec_of(kind, folder), folder / "server") as child:
        server = server_of(kind, child, folder)
        with server.runner:
            yield server


def server_of(kind: str, child: EngineProcess, folder: Path) -> Server:
    weights = (
        dict(WEIGHTS)
        if kind == "simulated"
        else load_file(folder / "model" / "model.safetensors")
    )
    return Server(kind, child, weights, folder)


@contextmanager
def contract_vllm(world: World, folder: Path) -> Iterator[Server]:
    """Yield the vLLM of all tests."""
    weights = {name: one.numpy() for name, one in world.base.items()}
    server = Server("vllm", world.process, weights, folder, world=world)
    world.is_foreign = True
    with server.runner as runner:
        caller = caller_of(server)
        server.client = VllmServer(caller, world.facts(), policy_version=world.version)
        try:
            runner.run(server.client.ready(180.0))
            yield server
        finally:
            runner.run(caller.aclose())


def spec_of(kind: str, folder: Path) -> dict[str, Any]:
    """A server whose requests do not end before max_tokens."""
    spec: dict[str, Any] = {
        "name": f"{kind}-0",
        "slots": SLOTS,
        "max_length": TRAITS[kind].max_length,
    }
    if kind == "simulated":
        constant = {"mean_tokens": 1e9, "sigma": 0.0, "decode_step_s": 0.001}
        return {"vocab_size": VOCAB_SIZE, **constant, **spec}
    from engine_in_process import make_qwen3

    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 1, "head_dim": 8}
    return {"model_path": str(make_qwen3(folder / "model", **sizes)), **spec}


def caller_of(server: Server) -> Caller:
    """Open new connections to the server."""
    return Caller(f"{server.kind}-0", server.process.url, SECRET)


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[EngineClient]:
    """A client for one story."""
    if server.client is not None:
        yield server.client
        return
    async with aclosing(caller_of(server)) as caller:
        version = (await EngineServer(caller).health(timeout_s=60)).policy_version
        yield EngineServer(
            caller,
            policy_version=version,
            has_supports=server.kind != "simulated",
        )


@asynccontextmanager
async def another_client(
    server: Server, engine: EngineClient
) -> AsyncIterator[EngineClient]:
    """Yield a client with separate connections."""
    async with aclosing(caller_of(server)) as caller:
        version = engine.policy_version
        if server.world is None:
            yield EngineServer(
                caller,
                policy_version=version,
                has_supports=server.kind != "simulated",
            )
        else:
            yield VllmServer(caller, server.world.facts(), policy_version=version)
