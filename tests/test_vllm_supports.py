"""Supports of a real vLLM: the tokens that top_p, top_k and min_p leave, as transformers'
logits say, and logprobs over them, of logits with a bias and penalties too; alone, in
mixed batches, streamed and resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from logit_oracle import ADJUSTED, adjusted_logits
from torch import Tensor
from vllm_house import World, vllm_house

from asyncrl.base.errors import ConfigError
from asyncrl.engines.pool import EnginePool
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.messages.sampling import ADJUSTMENTS, SamplingRequest
from asyncrl.messages.tokens import SUPPORT, SegmentPart, Tokens

pytestmark = pytest.mark.vllm
CUTS: list[dict[str, Any]] = [
    {"top_p": 0.7},
    {"top_k": 5},
    {"min_p": 0.3},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "temperature": 1.7},
    {"top_k": 1},
    {"top_k": 10**6, "top_p": 0.5},
    {"top_p": 0.95, "temperature": 0.6},
]
CUTS += ADJUSTED
CUTS += [ADJUSTED[-1] | CUTS[3]]
SUPPORTED = {"returns_supports": True}
BORDER = 1e-5
"""Probability by which a token may miss the border: both sides round in float32."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("supports")
    with vllm_house(folder, returns_supports=True) as made:
        yield made


def borders(request: SamplingRequest, logits_V: Tensor) -> tuple[set[int], set[int]]:
    """Return the ids that surely are in the support, and those that may be: min_p, then
    top_k, then top_p, each over what the one before has left.
    """
    sides = []
    for slack in (-BORDER, BORDER):
        probability_V = torch.softmax(logits_V.double() / request.temperature, -1)
        if request.min_p:
            least = request.min_p * probability_V.max() - slack
            probability_V = probability_V * (probability_V >= least)
        order = probability_V.argsort(descending=True).tolist()
        if request.top_k:
            order = order[: request.top_k]
        left = probability_V[order]
        left = left / left.sum()
        if request.top_p < 1:
            before = left.cumsum(0) - left
            order = [
                token
                for token, mass in zip(order, before.tolist(), strict=True)
                if mass < request.top_p + slack
            ]
        sides.append({token for token in order if probability_V[token] > 0})
    return sides[0], sides[1]


def check(world: World, request: SamplingRequest, tokens: Tokens, weights: Any) -> None:
    prompt = [int(one) for one in request.prompt_ids]
    ids = tokens.ids.tolist()
    model = world.model
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + ids])).logits[0].float()
    supports = tokens.column(SUPPORT).lists()  # type: ignore[union-attr]
    assert len(supports) == len(ids)
    given = {name: getattr(request, name) for name in ADJUSTMENTS}
    for at, (token, support) in enumerate(zip(ids, supports, strict=True)):
        logits_V = adjusted_logits(
            logits_TV[len(prompt) - 1 + at], prompt + ids[:at], len(prompt), **given
        )
        if request.is_cut:
            surely, maybe = borders(request, logits_V)
            assert surely <= set(support) <= maybe, (at, request.parameters)
            assert support == sorted(set(support))
        else:
            assert not support
            support = [*range(len(logits_V))]
        scaled_E = logits_V[support] / request.temperature
        expected = (logits_V[token] / request.temperature) - scaled_E.logsumexp(0)
        found = tokens.behaviour_logprobs[at]
        assert found == pytest.approx(float(expected), abs=2e-4)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_supports_and_logprobs_are_those_of_the_logits(
    world: World, is_streamed: bool
) -> None:
    """All cuts at once, beside calls without one."""

    async def story(server: VllmServer) -> None:
        weights = world.pushed[server.policy_version]
        given = [*CUTS, {}, {"temperature": 0.0}]
        requests = [world.request(**each, seed=at) for at, each in enumerate(given)]
        told: dict[str, list[SegmentPart]] = {one.request_id: [] for one in requests}

        async def ask(request: SamplingRequest) -> Tokens:
            parts = told[request.request_id]
            on_chunk = parts.append if is_streamed else None
            parts.append(await server.generate_segment(request, on_chunk=on_chunk))
            return Tokens.join([part.tokens for part in parts])

        found = await asyncio.gather(*map(ask, requests))
        for request, tokens in zip(requests, found, strict=True):
            assert len(tokens.ids) == 20
            if request.is_cut or request.adjustment is not None:
                check(world, request, tokens, weights)
            else:
                assert not tokens.column(SUPPORT).sizes.any()  # type: ignore[union-attr]

    world.run(story, facts=SUPPORTED)


@pytest.mark.parametrize("given", [{}, *ADJUSTED])
def test_resumed_segments_keep_their_supports_and_penalties(
    world: World, given: dict[str, Any]
) -> None:
    async def story(server: VllmServer) -> None:
        weights = world.pushed[server.policy_version]
        # Long enough to be running at the push on a machine of any speed.
        request = world.request(top_p=0.8, max_tokens=500, **given)
        pool = EnginePool([server], slots=4)
        manifest = world.stage(server.policy_version + 1, world.base)
        digest = await server.prepare(manifest)
        num_tokens, is_amid = 0, asyncio.Event()

        def count(ids: Sequence[int]) -> None:
            nonlocal num_tokens
            num_tokens += len(ids)
            if num_tokens >= 10:
                is_amid.set()

        asking = asyncio.ensure_future(pool.generate(request, on_tokens=count))
        await is_amid.wait()
        await server.commit(manifest.version, digest, "abort")
        answer = await asking
        assert answer.num_interruptions == 1
        check(world, request, answer.sampled, weights)

    world.run(story, facts=SUPPORTED)


def test_support_of_a_grammar_is_cut_from_its_tokens(world: World) -> None:
    digits = "start: /[0-9]{8}/"

    async def story(server: VllmServer) -> None:
        request = world.request(grammar=digits, top_k=3, max_tokens=8)
        tokens = (await server.generate_segment(request)).tokens
        for support in tokens.column(SUPPORT).lists():  # type: ignore[union-attr]
            assert 1 <= len(support) <= 3
            assert all(one.isdigit() for one in map(world.tokenizer.decode, support))

    world.run(story, facts=SUPPORTED)


def test_server_without_the_setting_is_refused(tmp_path: Path, world: World) -> None:
    with (
        vllm_house(tmp_path) as plain,
        pytest.raises(ConfigError, match="sampling_mask"),
    ):
        plain.run(lambda server: asyncio.sleep(0), facts=SUPPORTED)
