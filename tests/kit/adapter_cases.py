"""Adapters for tests of the embedded engine, and peft as their oracle."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from engine_cases import SCALE, adapters, iterate_until
from engine_in_process import stage_file
from transformers import AutoModelForCausalLM

from asyncrl.messages.engine_api import (
    CommitRequest,
    CommitResponse,
    DropAdapterRequest,
    OpenAdapterRequest,
)
from asyncrl.messages.tokens import SegmentPart
from asyncrl.weights.export import write_peft
from asyncrl_servers.embedded.embedded_engine import Engine

OF_PEFT = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
"""Marks of tests that call assert_of_peft."""
MODULES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(4)]
MODULES += [f"model.layers.{layer}.mlp.down_proj" for layer in range(4)]
MODULES += ["lm_head"]
"""The head is tied to the embedding, which has no adapter."""


def spec(rank: int = 4, *targets: str) -> dict[str, Any]:
    chosen = targets or ("q_proj", "down_proj", "lm_head")
    return {"rank": rank, "scale": SCALE, "targets": [*chosen]}


def tensors_of(folder: Path, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    return adapters(folder, (*MODULES,), seed=seed, rank=rank)


@torch.no_grad()
def assert_of_peft(
    answer: SegmentPart, folder: Path, tensors: dict[str, torch.Tensor], scratch: Path
) -> None:
    """Compare with the logprobs of peft's own layers, to 1e-4 nats."""
    scratch.mkdir()
    write_peft(tensors, SCALE, scratch)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, scratch).eval()
    ids = torch.tensor([[1, 2, 3, *answer.token_ids]])
    logprob_TV = model(ids).logits[0, 2:-1].log_softmax(-1)
    expected_T = logprob_TV.gather(-1, ids[0, 3:, None])[:, 0]
    found_T = torch.tensor(answer.logprobs)
    torch.testing.assert_close(found_T, expected_T, rtol=0, atol=1e-4)


def open_adapter(engine: Engine, name: str, rank: int = 4) -> list[str]:
    """Open an adapter in an engine that is iterated here; return all names."""
    request = OpenAdapterRequest(adapter=name, **spec(rank))
    opened = engine.open_adapter(request)
    iterate_until(engine, opened)
    return opened.result().names


def drop_adapter(engine: Engine, name: str) -> list[str]:
    dropped = engine.drop_adapter(DropAdapterRequest(adapter=name))
    iterate_until(engine, dropped)
    return dropped.result().names


def push(
    engine: Engine,
    name: str,
    tensors: dict[str, torch.Tensor],
    version: int,
    scratch: Path,
    interrupt: Any = "abort",
) -> Future[CommitResponse]:
    """Stage the adapter and begin its commit."""
    dtype = engine.runner.loaded.dtype
    typed = {key: one.to(dtype) for key, one in tensors.items()}
    request = stage_file(typed, version, scratch).model_copy(update={"adapter": name})
    digest = engine.weights_of(name).prepare(request).digest
    return engine.commit(
        CommitRequest(adapter=name, version=version, digest=digest, interrupt=interrupt)
    )
