"""Requests, adapters and answers for tests of the embedded engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_in_process import (
    drawn,
    make_request,
    stage_file,
    weights_of,
)
from engine_replies import ask, top_logprobs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from asyncrl.messages.engine_api import CommitRequest
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.token_grammars import TokenGrammars
from asyncrl.messages.tokens import SegmentPart
from asyncrl_servers.embedded.embedded_engine import Engine
from asyncrl_servers.embedded.runner import DecodeGraphs


class Recorded(DecodeGraphs):
    """Replay each kernel on a CPU, with the same memory and outputs."""

    num_captured = num_replayed = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        calls = list[tuple[Any, Any, Any, Any]]()

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                made = func(*args, **kwargs or {})
                calls.append(
                    (func, *tree_map(at_this_address, (args, kwargs or {})), made)
                )
                return made

        def at_this_address(one: Any) -> Any:
            return one.detach() if isinstance(one, torch.nn.Parameter) else one

        with Recorder():
            function()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            for func, args, kwargs, made in calls:
                for old, new in zip(
                    tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True
                ):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


def answers(
    engine: Engine, halfway: Callable[[], None] = lambda: None
) -> list[SegmentPart]:
    """Of requests that come and go: more than there are slots, short and long ones,
    some of one prompt.
    """
    ends, futures = [40, 9, 25, 60, 33, 12, 50, 21, 44, 30, 18, 27, 36, 55], []
    for seed, end in enumerate(ends):
        prompt = tuple(2 + at % 48 for at in range(3 if seed % 3 else 90))
        futures += ask(
            engine,
            [make_request(f"r{seed}", prompt_ids=prompt, seed=seed, max_tokens=end)],
        )
    for iteration in range(2000):
        if all(future.done() for future in futures):
            return [future.result(timeout=0) for future in futures]
        if iteration == 20:
            halfway()
        engine.iterate()
    raise AssertionError("the requests have not ended in 2000 steps")


def check_same(found: list[SegmentPart], expected: list[SegmentPart]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(drawn(ours)[1], drawn(theirs)[1], atol=1e-4)


def publish_halfway(
    engine: Engine, other: Path | dict[str, Tensor], tmp_path: Path
) -> Callable[[], None]:
    staged = engine.weights.prepare(stage_file(other, 1, tmp_path))
    commit = CommitRequest(version=1, digest=staged.digest, interrupt="keep")
    return lambda: engine.commit(commit) and None


Q_PROJ, DOWN_PROJ = "model.layers.1.self_attn.q_proj", "model.layers.3.mlp.down_proj"


SCALE = 0.5


def adapters(
    folder: Path,
    modules: tuple[str, ...] = (Q_PROJ, DOWN_PROJ),
    *,
    seed: int = 0,
    rank: int = 4,
) -> dict[str, torch.Tensor]:
    """Random ones, large enough to change the tokens."""
    random, base = torch.Generator().manual_seed(seed), weights_of(folder)
    tensors = dict[str, torch.Tensor]()
    for module in modules:
        tied = base["model.embed_tokens.weight"]
        out_features, in_features = base.get(f"{module}.weight", tied).shape
        tensors[f"{module}.lora_A.weight"] = (
            torch.randn(rank, in_features, generator=random) * 0.3
        )
        tensors[f"{module}.lora_B.weight"] = (
            torch.randn(out_features, rank, generator=random) * 0.3
        )
    return tensors


def merged(
    folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    weights = {
        name: weight.detach().to(dtype) for name, weight in weights_of(folder).items()
    }
    for module in {name.rpartition(".lora_")[0] for name in tensors} - {""}:
        low_in = tensors[f"{module}.lora_A.weight"]
        low_out = tensors[f"{module}.lora_B.weight"]
        base = weights[f"{module}.weight"].float()
        weights[f"{module}.weight"] = (base + low_out @ low_in * SCALE).to(dtype)
    return weights


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "head_dim": 8,
}


def iterate_until(engine: Engine, *futures: Any) -> None:
    """Fail instead of hanging."""
    for _ in range(1000):
        if all(future.done() for future in futures):
            return
        engine.iterate()
    raise AssertionError(f"not over after 1000 iterations: {engine.health()}")


COMPACT = {"x-guidance": {"whitespace_flexible": False}}


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def check_allowed(
    request: SamplingRequest,
    answer: SegmentPart,
    logits_TV: torch.Tensor,
    tokenizer: Any,
    vocab: int,
) -> None:
    """Each logprob is of the model's distribution over the tokens that the grammar
    allows.
    """
    matcher = TokenGrammars(tokenizer, vocab).begin(request.grammar or "")
    for at, token in enumerate(answer.token_ids):
        allowed = torch.from_numpy(matcher.allowed())
        matcher.take(token)
        logits_V = logits_TV[len(request.prompt_ids) + at - 1].masked_fill(
            ~allowed, -torch.inf
        )
        logprobs_V = logits_V.log_softmax(-1)
        assert abs(float(logprobs_V[token]) - answer.logprobs[at]) < 1e-4
        values, ids = logprobs_V.topk(min(20, int(allowed.sum())))
        top = top_logprobs(answer)[at]
        assert {one for one, _ in top} == set(ids.tolist())
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)


def segments_of(engine: Engine, *requests: SamplingRequest) -> list[SegmentPart]:
    replies = ask(engine, requests)
    iterate_until(engine, *replies)
    return [reply.result() for reply in replies]
