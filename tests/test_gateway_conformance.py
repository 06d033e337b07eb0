"""The conformance command: a gateway passes, and a broken server fails with reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway_cases import ScriptedEngine, gateway_world, in_loop
from gateway_conformance import CHECKS, check_server, table

from asyncrl.messages.records import Completion, SamplingRequest


class Obedient(ScriptedEngine):
    """Calls the forced tool, writes JSON for a grammar, and returns the likeliest tokens."""

    def __init__(self) -> None:
        super().__init__(self._answer)

    def _answer(self, request: SamplingRequest) -> str:
        if self.tokenizer.decode(list(request.prompt_ids)).endswith('{"name": "'):
            return 'weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        return '{"city": "Rome"}' if request.grammar else "Hello there."

    async def generate(self, request: SamplingRequest, **more: Any) -> Completion:
        completion = await super().generate(request, **more)
        tops = tuple((token, -1.0 - token) for token in range(request.top_logprobs))
        return replace(completion, top_logprobs=(tops,) * len(completion.token_ids) if tops else ())


@in_loop
async def test_gateway_passes_every_check() -> None:
    async with gateway_world(Obedient()) as world:
        results = await check_server(world.url + "/v1", world.session.key)
        assert [name for name, how, _ in results if how == "ok"] == list(CHECKS), table(results)
        assert world.session.num_calls < 40
