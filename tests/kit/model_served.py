"""Column vllm of docs/models.csv: how vLLM's CPU build serves models of the zoo.

A model starts in our vLLM server and is sampled. Then it takes other weights by our
weight sync, twice, and is sampled each time. The oracle is one plain transformers
forward per text, as for the other columns (model_table.py).

In bfloat16 vLLM packs other weights, and rounds more than some faults change. There the
oracle is a server that starts with the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from engine_processes import SECRET
from model_table import MOST_NATS, TEMPERATURE, brief, make_texts, plain_logprobs
from model_zoo import make_config, random_model, redraw
from vllm_process import packages_for, vllm_python

from asyncrl.base.errors import ConfigError, EngineError, find_fatal
from asyncrl.base.http import SECRET_ENV, Caller
from asyncrl.extensions.vllm.vllm_process import VllmRequirements
from asyncrl.extensions.vllm.vllm_server import CANARY_TOKENS, VllmServer
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.trainer_api import Canary, ExportResponse
from asyncrl.models.loading import load_language_model
from asyncrl.models.rope_lengths import length_border, pin_length
from asyncrl.weights.export import LazyWeights, export_weights, named_weights
from asyncrl.weights.tensor_files import dtype_name, stored_pieces
from asyncrl_servers.vllm.arguments import first_error

MAX_LENGTH = 192
SLOTS = 6
LIMIT_S = 400.0
"""For a start and two pushes, on a busy machine."""
END_LIMIT_S = 20.0
DEVIATIONS = {"apertus": "vLLM keeps the alphas of xIELU in bfloat16"}
"""Models that vLLM computes with less precision, and why."""
MOST_DEVIATING_NATS = 0.01
SURROUNDINGS = re.compile(r"^.*/collective_rpc \w+: |^vLLM cannot start with FOLDER: ")


def measure_vllm(name: str, forks: socket.socket) -> tuple[str, str]:
    """Return the cell of a model that vLLM has, and why it is not exact."""
    model = random_model(make_config(name, "vllm"))
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        model.save_pretrained(folder)
        serving = Serving(Path(folder))
        try:
            asyncio.run(serving.measure(forks))
        except (ConfigError, EngineError) as error:
            reason = SURROUNDINGS.sub("", error.what.replace(folder, "FOLDER"))
            return "refused", brief(f"{serving.step}: {reason}")
    if serving.worst <= MOST_NATS:
        return "exact", ""
    is_known = name in DEVIATIONS and serving.worst <= MOST_DEVIATING_NATS
    if is_known:
        return "deviates", DEVIATIONS[name]
    return "wrong", f"{serving.worst:.2g} nats at most"


def measure_push(name: str, forks: socket.socket) -> tuple[list[float], list[float]]:
    """Return what a bfloat16 server samples that took other weights by a push, and what
    a server samples that starts with them.
    """
    with tempfile.TemporaryDirectory(prefix="pushed-") as scratch:
        folders = [Path(scratch, "first"), Path(scratch, "second")]
        for seed, folder in enumerate(folders):
            model = random_model(make_config(name, "vllm"), seed)
            model.to(torch.bfloat16).save_pretrained(folder)
        first, second = (Serving(folder, torch.bfloat16) for folder in folders)
        second.load_model()
        manifest = second.export(1)

        async def push(server: VllmServer) -> list[float]:
            await sample_alone(server)
            await server.commit(1, await server.prepare(manifest), "abort")
            return await sample_alone(server)

        pushed = asyncio.run(first.serve(forks, push))
        return pushed, asyncio.run(second.serve(forks, sample_alone))


async def sample_alone(server: VllmServer) -> list[float]:
    """Return logprobs of requests that run one by one, so that none depends on another."""
    logprobs = list[float]()
    for ids in chain.from_iterable(make_texts()):
        label = f"{server.policy_version} {len(logprobs)}"
        request = SamplingRequest(label, tuple(ids), 12, temperature=0.0, seed=0)
        answer = await server.generate_segment(request)
        logprobs += answer.logprobs
    return logprobs


# ---- servers


class Fork:
    """A server, forked from a process that has imported vLLM (vllm_forks.py)."""

    def __init__(
        self, forks: socket.socket, spec: dict[str, Any], folder: Path
    ) -> None:
        self._forks = forks
        self.log = folder / "engine.log"
        spec_file = folder / "spec.json"
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        stdin, self._stdin = os.pipe()
        os.write(self._stdin, json.dumps({SECRET_ENV: SECRET}).encode() + b"\n")
        with (
            socket.create_server(("127.0.0.1", 0), backlog=512) as listener,
            self.log.open("wb") as output,
        ):
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            files = [stdin, output.fileno(), listener.fileno()]
            socket.send_fds(forks, [str(spec_file).encode()], files)
        os.close(stdin)
        self._pid = int(forks.recv(64))

    async def wait(self) -> None:
        """Wait until the server has ended."""
        await asyncio.to_thread(self._forks.recv, 64)

    async def end(self, ended: asyncio.Task[None]) -> None:
        os.close(self._stdin)  # as if its parent had died
        try:
            await asyncio.wait_for(asyncio.shield(ended), END_LIMIT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            await ended

    def failure(self) -> str:
        """Return why it ended, or nothing if it serves."""
        log = self.log.read_text(encoding="utf-8", errors="replace")
        body = find_fatal(log)
        dead = first_error(log) if "EngineDeadError" in log else ""
        return dead if body is None else body.error


@contextmanager
def forking(folder: Path) -> Iterator[socket.socket]:
    """Start the process that servers are forked from."""
    here, there = socket.socketpair()
    script = Path(__file__).parent / "vllm_forks.py"
    env = {"PYTHONPATH": str(packages_for(folder)), "OMP_NUM_THREADS": "1"}
    with here, (folder / "forks.log").open("wb") as log:
        with there:
            process = subprocess.Popen(
                [str(vllm_python()), str(script), str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                start_new_session=True,
            )
        try:
            assert here.recv(64), (folder / "forks.log").read_text()
            yield here
        finally:
            here.close()
            process.wait(60)


# ---- a model


class Serving:
    """A model in a server, and the reference model with the same weights."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder = folder
        self.dtype = dtype
        self.step = "load"
        self.worst = 0.0
        """Largest distance of sampled logprobs, in nats."""

    async def measure(self, forks: socket.socket) -> None:
        """Raises ConfigError and EngineError for refusals."""
        self.load_model()
        border = length_border(self.model.config)
        if border is not None and not border.is_stepwise:
            # The trainer says so too: build_model.plan_of.
            raise ConfigError(f"RoPE of type {border.rope_type}")
        pin_length(self.model, MAX_LENGTH)
        self.step = "start"
        await self.serve(forks, self._tell)

    def load_model(self) -> None:
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = load_language_model(self.folder, **options).eval()

    async def serve(
        self, forks: socket.socket, tell: Callable[[VllmServer], Awaitable[Any]]
    ) -> Any:
        """Return what is told with a server of the folder's model."""
        fork = Fork(forks, self._spec(), self.folder)
        ended = asyncio.create_task(fork.wait())
        story = asyncio.create_task(self._connected(fork, tell))
        try:
            async with asyncio.timeout(LIMIT_S):
                await asyncio.wait({ended, story}, return_when="FIRST_COMPLETED")
            if reason := fork.failure():
                raise ConfigError(reason)
            assert story.done(), "the server ended without a word"
            return await story
        finally:
            story.cancel()
            await fork.end(ended)

    def _spec(self) -> dict[str, Any]:
        sizes = {"max_length": MAX_LENGTH, "slots": SLOTS}
        return sizes | {
            "name": "engine-0",
            "model_path": str(self.folder),
            "dtype": dtype_name(self.dtype),
            "device": "cpu",
        }

    async def _connected(
        self, fork: Fork, tell: Callable[[VllmServer], Awaitable[Any]]
    ) -> Any:
        needed = VllmRequirements(
            str(self.folder),
            dtype_name(self.dtype),
            SLOTS,
            MAX_LENGTH,
            (),
        )
        caller = Caller("engine-0", fork.url, SECRET)
        try:
            server = VllmServer(caller, needed)
            await server.ready(LIMIT_S)
            return await tell(server)
        finally:
            await caller.aclose()

    async def _tell(self, server: VllmServer) -> None:
        await self._compare(server)
        for version in (1, 2):
            self.step = f"push {version}"
            with torch.random.fork_rng([]):
                torch.manual_seed(version)
                redraw(self.model)
            canary = self._canary()
            manifest = self.export(version).model_copy(update={"canary": canary})
            digest = await server.prepare(manifest)
            await server.commit(version, digest, "abort")
            await self._compare(server)

    def export(self, version: int) -> ExportResponse:
        """Write the weights as the trainer does."""
        weights = named_weights(self.model)
        pieces = stored_pieces(self.model, weights)
        # Not *.safetensors: a start reads all of them.
        path = self.folder / f"weights-{version}.pushed"
        lazy = LazyWeights(weights, pieces=pieces)
        return export_weights(lazy, path, version, self.dtype)

    @torch.no_grad()
    def _canary(self) -> Canary:
        vocab_size = self.model.get_input_embeddings().num_embeddings
        random = torch.Generator().manual_seed(0)
        ids_T = torch.randint(0, vocab_size, (CANARY_TOKENS,), generator=random)
        logits_TV = self.model(input_ids=ids_T[None], use_cache=False).logits[0]
        logprobs_TV = torch.log_softmax(logits_TV.float(), -1)
        scored_T = logprobs_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]
        return Canary(
            token_ids=ids_T.tolist(),
            logprobs=scored_T.tolist(),
            next_logprob=float(logprobs_TV[-1].max()),
        )

    async def _compare(self, server: VllmServer) -> None:
        """Sample texts of all lengths together, then their second turns."""
        prompts = [ids for texts in make_texts() for ids in texts]
        for turn in range(2):
            requests = [
                SamplingRequest(
                    f"{self.step} {turn} {number}",
                    tuple(ids),
                    12,
                    temperature=TEMPERATURE,
                    seed=turn,
                )
                for number, ids in enumerate(prompts)
            ]
            answers = await asyncio.gather(*map(server.generate_segment, requests))
            for prompt, answer in zip(prompts, answers, strict=True):
                length = len(prompt)
                prompt += answer.token_ids
                with torch.no_grad():
                    plain_T = plain_logprobs(self.model, prompt)[length - 1 :]
                gap = float((plain_T - torch.tensor(answer.logprobs)).abs().max())
                # NaN is larger than all.
                self.worst = max(self.worst, gap) if gap == gap else float("inf")
                prompt += [5, 6, 7]
