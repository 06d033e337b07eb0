"""Structured output and likeliest tokens of a real vLLM: the same grammar, with the logprobs of what was
allowed, interrupted or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from vllm_house import House, vllm_house

from asyncrl.engines.vllm_server import VllmServer
from asyncrl.errors import RequestRefused
from asyncrl.messages.token_grammars import TokenGrammars

pytestmark = pytest.mark.vllm
SCHEMA = {"type": "integer", "minimum": 10**9, "maximum": 10**14}
GRAMMAR = "start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with vllm_house(tmp_path_factory.mktemp("grammars")) as house:
        yield house


def test_a_grammar_is_followed_with_the_logprobs_of_what_it_allows(house: House) -> None:
    """Also from the middle on, behind what was sampled before an interruption."""
    end = house.tokenizer.eos_token_id

    async def story(server: VllmServer) -> None:
        for seed in range(4):
            request = house.request(grammar=GRAMMAR, max_tokens=60, top_logprobs=20, seed=seed)
            answer = await server.generate_segment(request)
            assert (answer.finish_reason, answer.token_ids[-1]) == ("stop", end)
            found = json.loads(house.decode(answer.token_ids))
            assert 10**9 <= found <= 10**14
            matcher = TokenGrammars(house.tokenizer, server._process.vocab_size).begin(GRAMMAR)
            logprobs_TV = house.logprobs(house.base, [*request.prompt_ids, *answer.token_ids])
            for at, token in enumerate(answer.token_ids):
                allowed = torch.from_numpy(matcher.allowed())
                matcher.take(token)
                logprobs_V = logprobs_TV[len(request.prompt_ids) + at - 1].masked_fill(~allowed, -torch.inf)
                logprobs_V = logprobs_V.log_softmax(-1)
                assert abs(float(logprobs_V[token]) - answer.logprobs[at]) < 1e-4
                values, ids = logprobs_V.topk(min(20, int(allowed.sum())))
                told = answer.top_logprobs[at]
                assert {one for one, _ in told} == set(ids.tolist())
                assert [value for _, value in told] == pytest.approx(values.tolist(), abs=1e-4)
            begun = [*request.prompt_ids, *answer.token_ids[:7]]
            rest = replace(request, request_id=f"rest {seed}", prompt_ids=begun, num_resumed=7, max_tokens=53)
            resumed = await server.generate_segment(rest)
            whole = json.loads(house.decode([*answer.token_ids[:7], *resumed.token_ids]))
            assert 10**9 <= whole <= 10**14, "what stands before it counts"

    house.run(story, facts={"end_ids": (end,)})


def test_a_grammar_that_is_none_is_refused_and_the_server_goes_on(house: House) -> None:
    async def story(server: VllmServer) -> None:
        for wrong in ("start: %json {", 'start: %json {"$ref": "http://example.com/x"}'):
            with pytest.raises(RequestRefused, match="(?i)grammar"):
                await server.generate_segment(house.request(grammar=wrong))
        assert (await server.generate_segment(house.request(max_tokens=3, top_logprobs=2))).top_logprobs

    house.run(story)
