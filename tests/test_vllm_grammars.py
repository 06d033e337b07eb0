"""Structured output and likeliest tokens of a real vLLM: the same grammar, with the
logprobs of allowed tokens, interrupted or not.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import check_allowed
from gateway_cases import gateway_world
from served_gateway import check_gateway
from vllm_house import MAX_LENGTH, World

from asyncrl.engines.pool import EnginePool
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.rollouts.tokenizer import HFChatTokenizer

pytestmark = pytest.mark.vllm
SCHEMA = {"type": "integer", "minimum": 10**9, "maximum": 10**14}
GRAMMAR = "start: %json " + json.dumps(
    SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
)


def test_logprobs_belong_to_the_tokens_a_grammar_allows(world: World) -> None:
    """Also from the middle on, behind the tokens before an interruption."""
    end = world.tokenizer.eos_token_id

    async def story(server: VllmServer) -> None:
        weights = world.pushed[server.policy_version]
        for seed in range(4):
            request = world.request(
                grammar=GRAMMAR, max_tokens=60, top_logprobs=20, seed=seed
            )
            answer = await server.generate_segment(request)
            assert (answer.finish_reason, answer.token_ids[-1]) == ("stop", end)
            found = json.loads(world.decode(answer.token_ids))
            assert 10**9 <= found <= 10**14
            logprobs_TV = world.logprobs(
                weights, [*request.prompt_ids, *answer.token_ids]
            )
            check_allowed(
                request, answer, logprobs_TV, world.tokenizer, len(world.tokenizer)
            )
            begun = [*request.prompt_ids, *answer.token_ids[:7]]
            rest = replace(
                request,
                request_id=f"rest {seed}",
                prompt_ids=begun,
                num_resumed=7,
                max_tokens=53,
            )
            resumed = await server.generate_segment(rest)
            whole = json.loads(
                world.decode([*answer.token_ids[:7], *resumed.token_ids])
            )
            assert 10**9 <= whole <= 10**14, "the text before it counts"

    world.run(story, facts={"end_ids": (end,)})


def test_stop_string_of_vllm_counts_only_after_the_thought(world: World) -> None:
    """Also if the thought, or its closing mark, was sampled before an interruption."""

    async def story(server: VllmServer) -> None:
        request = world.request(max_tokens=60, seed=3)
        whole = (await server.generate_segment(request)).token_ids
        closing = world.tokenizer.decode(whole[9:11])

        def num_before(token_ids: list[int]) -> int:
            num = 0
            while num < len(token_ids) and closing not in world.tokenizer.decode(
                token_ids[:num]
            ):
                num += 1
            return num

        num_thought = num_before(whole)
        text = world.decode(whole[num_thought:])
        stop = next(
            letter for letter in text if letter in world.decode(whole[:num_thought])
        )
        for cut in (0, 4, num_thought):
            begun = whole[:cut]
            prompt = [*request.prompt_ids, *begun]
            asked = replace(
                request,
                request_id=f"cut {cut}",
                prompt_ids=prompt,
                num_resumed=cut,
                stop=(stop,),
            )
            answer = await server.generate_segment(
                replace(asked, thinking=("", closing))
            )
            sampled = [*begun, *answer.token_ids]
            found = world.decode(sampled[num_before(sampled) :])
            assert found.find(stop) == (
                len(found) - 1 if answer.finish_reason == "stop" else -1
            )
            if not begun:  # vLLM's random stream begins with each request
                assert (answer.finish_reason, found) == (
                    "stop",
                    text[: text.index(stop) + 1],
                )

    world.run(story)


TEMPLATE = """{% if tools %}{{ tools | tojson }}<tool_call>
{% endif %}{% for message in messages %}<|user|>{{ message.content or '' }}\
{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Short: each character is a token."""


def test_gateway_over_vllm_is_conformant(world: World, tmp_path: Path) -> None:
    (tmp_path / "tools.jinja").write_text(TEMPLATE)
    tokenizer = HFChatTokenizer(
        world.model_path, chat_template=tmp_path / "tools.jinja"
    )

    async def story(server: VllmServer) -> None:
        sizes = {
            "max_tokens": 150,
            "max_prompt_tokens": 600,
            "max_length": MAX_LENGTH,
            "vocab_size": 100,
        }
        rules = {
            "on_sampling_override": "honour",
            "tool_format": "auto",
            "template": TEMPLATE,
        }
        pool = EnginePool([server], slots=8)
        async with gateway_world(pool, tokenizer=tokenizer, **sizes, **rules) as world:
            await asyncio.to_thread(check_gateway, world.url, world.session.key)

    world.run(story, facts={"end_ids": (world.tokenizer.eos_token_id,)})
