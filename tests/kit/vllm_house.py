"""Shared by the tests of VllmServer on a real vLLM: a tiny model with letters for
tokens, its versions, and what transformers says.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from contract_servers import SLOTS
from engine_in_process import make_qwen3, stage_file, weights_of
from torch import Tensor
from transformers import AutoTokenizer, Qwen3ForCausalLM
from vllm_process import SECRET, VllmProcess, vllm_process

from asyncrl.base.http import Caller
from asyncrl.extensions.vllm.vllm_process import VllmRequirements
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.trainer_api import Canary, ExportResponse
from asyncrl.trainer.model.random_init import make_character_tokenizer

MAX_LENGTH, CANARY_LIMIT = 2600, 1e-3
STORY_LIMIT_S = 550
"""Ends a story that hangs, before pytest does. A busy CPU took 200 s for one of 111 s."""
LETTERS = string.ascii_letters + string.digits + string.punctuation + " \n"


@dataclass
class World:
    """A vLLM server, the versions that were pushed to it, and the reference model."""

    process: VllmProcess
    model_path: Path
    scratch: Path
    base: dict[str, Tensor]
    tokenizer: Any
    model: Any
    version: int = 0
    is_foreign: bool = False
    """Other clients push other weights."""
    num_requests: int = 0
    pushed: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def facts(self, **changes: Any) -> VllmRequirements:
        return replace(
            VllmRequirements(str(self.model_path), "float32", SLOTS, MAX_LENGTH, ()),
            **changes,
        )

    def run(
        self,
        story: Callable[[VllmServer], Awaitable[None]],
        canary_limit: float = CANARY_LIMIT,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """A story with a new client, on the weights that the story before left, or on
        the first ones after other clients.
        """
        if self.is_foreign:
            self.is_foreign = False
            self._restore()

        async def within() -> None:
            caller = Caller("engine-0", self.process.url, SECRET)
            needed = self.facts(
                canary_limit=canary_limit, decode=self.decode, **(facts or {})
            )
            server = VllmServer(caller, needed, policy_version=self.version)
            try:
                async with asyncio.timeout(STORY_LIMIT_S):
                    await server.ready(100)
                    await story(server)
            finally:
                self.version = max(self.version, server.policy_version)
                await caller.aclose()

        asyncio.run(within())

    def _restore(self) -> None:
        async def story(server: VllmServer) -> None:
            manifest = self.stage(server.policy_version + 1, self.base)
            await server.commit(
                manifest.version, await server.prepare(manifest), "abort"
            )

        self.run(story)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens
            )
        )

    def request(self, **fields: Any) -> SamplingRequest:
        self.num_requests += 1
        given = {
            "request_id": f"request {self.num_requests}",
            "prompt_ids": [10, 11, 12],
            "max_tokens": 20,
        }
        return SamplingRequest(**{**given, "seed": 5, **fields})

    def weights(self, seed: int) -> dict[str, Tensor]:
        """Other weights of the same model, far enough for other tokens."""
        random = torch.Generator().manual_seed(seed)
        return {
            name: one + 0.05 * torch.randn(one.shape, generator=random)
            for name, one in self.base.items()
        }

    def stage(
        self, version: int, weights: dict[str, Tensor], **changes: Any
    ) -> ExportResponse:
        """Write them as the trainer does, with its canary."""
        tensors = {name: one.contiguous() for name, one in weights.items()}
        request = stage_file(tensors, version, self.scratch).model_dump(
            exclude_defaults=True
        )
        self.pushed[version] = weights
        return ExportResponse(**request, canary=self.canary(weights)).model_copy(
            update=changes
        )

    def canary(self, weights: dict[str, Tensor], num_tokens: int = 160) -> Canary:
        """Long enough for a block of the prefix cache, which is 128 tokens on a CPU."""
        ids = torch.randint(
            0,
            len(self.tokenizer),
            (num_tokens,),
            generator=torch.Generator().manual_seed(0),
        ).tolist()
        logprobs = self.logprobs(weights, ids)
        told = [float(logprobs[index, token]) for index, token in enumerate(ids[1:])]
        return Canary(
            token_ids=ids, logprobs=told, next_logprob=float(logprobs[-1].max())
        )

    @torch.no_grad()
    def logprobs(
        self, weights: dict[str, Tensor], ids: Sequence[int], temperature: float = 1.0
    ) -> Tensor:
        """[T, V]: what transformers says comes after each of these ids."""
        self.model.load_state_dict(weights, strict=False)
        return torch.log_softmax(
            self.model(torch.tensor([list(ids)])).logits[0].float() / temperature,
            dim=-1,
        )

    def gap(
        self,
        weights: dict[str, Tensor],
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        temperature: float = 1.0,
        start: int = 0,
        end: int | None = None,
    ) -> float:
        """Largest difference between these logprobs and transformers', over tokens
        [start, end).
        """
        theirs = self.logprobs(weights, [*prompt_ids, *token_ids], temperature)[
            len(prompt_ids) - 1 : -1
        ]
        right = theirs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        return float((right - torch.tensor(logprobs))[start:end].abs().max())


@contextmanager
def vllm_house(folder: Path, **spec: Any) -> Iterator[World]:
    """A server for many stories."""
    torch.set_num_threads(1)
    tokenizer = make_character_tokenizer(LETTERS)
    # Deep for its size: a request of 700 tokens must outlive a client that is slow to
    # read, on a busy machine too.
    model_path = make_qwen3(
        folder / "model", vocab_size=len(tokenizer), num_hidden_layers=12
    )
    tokenizer.save_pretrained(model_path)
    given = {
        "name": "engine-0",
        "model_path": str(model_path),
        "dtype": "float32",
        "device": "cpu",
    }
    given |= {"max_length": MAX_LENGTH, "slots": SLOTS}
    with vllm_process({**given, **spec}, folder / "server") as process:
        process.wait_ready()
        base = {
            name: one.detach().clone() for name, one in weights_of(model_path).items()
        }
        model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        world = World(
            process,
            model_path,
            folder,
            base,
            AutoTokenizer.from_pretrained(model_path),
            model,
        )
        world.pushed[0] = base
        yield world


@contextmanager
def faulty_vllm_house(folder: Path) -> Iterator[World]:
    """A server in which faults can be planted (faulty_vllm_worker.py)."""
    with vllm_house(
        folder, worker_extension="faulty_vllm_worker.FaultyWeightLoader"
    ) as world:
        yield world
