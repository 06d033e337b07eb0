"""vLLM's own HTTP routes as calls (vLLM 0.32). The only place that knows their paths; knows no version of ours and no commit."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, ValidationError

from asyncrl.calling import Answer, Caller, CallGarbled, CallLost, CallRefused
from asyncrl.engines.vllm.messages import (
    AbortBody,
    AdapterBody,
    FinishBody,
    Generate,
    Generated,
    JoinBody,
    LabelBody,
    LabelInfo,
    RpcBody,
    RpcResults,
    Said,
    ServerInfo,
    StreamOptions,
    UpdateBody,
    VllmError,
)
from asyncrl.wire import ErrorBody

GENERATE = "/inference/v1/generate"
PauseMode = Literal["abort", "keep", "wait"]
_WIRE_ID = "generate-tokens-{}"
"""What vLLM makes of a request_id; /abort_requests knows no other, and answers "aborted" to any."""
_COUNTS = {"num_running": "num_requests_running", "num_queued": "num_requests_waiting", "tokens_generated": "generation_tokens_total"}
_DECODE_S = ("request_prefill_time_seconds_sum", "inter_token_latency_seconds_sum")


class Routes:
    """Calls to one vLLM server. All raise CallRefused, with what vLLM says, or CallLost. `timeout_s` None: as long as it takes."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def __repr__(self) -> str:
        return f"<Routes {self.caller.url}>"

    async def generate(self, body: Generate) -> Generated:
        """A whole answer."""
        return await self._post(GENERATE, body, Generated)

    async def stream(self, body: Generate) -> AsyncGenerator[Generated, None]:
        """The same in parts, as they come. Close it to break the connection; vLLM then drops the request."""
        streamed = body.model_copy(update={"stream": True, "stream_options": StreamOptions()})
        try:
            async with contextlib.aclosing(self.caller.lines(GENERATE, streamed)) as lines:
                async for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data and data != b"[DONE]":
                        yield self._part(data)
        except CallGarbled as garbled:
            raise _refusal(garbled) from garbled

    async def abort(self, request_ids: Sequence[str], *, timeout_s: float | None = None) -> None:
        """End those of these that vLLM knows; it does not say which."""
        await self._post("/abort_requests", AbortBody(request_ids=[_WIRE_ID.format(name) for name in request_ids]), Said, timeout_s)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Schedule nothing any more. Requests that come now wait in vLLM. With "wait" it returns once what ran has finished."""
        await self._post(f"/pause?{urlencode({'mode': mode, 'clear_cache': str(clear_cache).lower()})}", None, Said)

    async def resume(self, *, timeout_s: float | None = None) -> None:
        """Schedule again."""
        await self._post("/resume", None, Said, timeout_s)

    async def rpc(self, method: str, argument: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """What this method of our worker extension answers, in each worker. Raises CallRefused if one answers an error."""
        args = [] if argument is None else [json.dumps(argument)]
        answer = await self._post("/collective_rpc", RpcBody(method=method, args=args), RpcResults)
        for result in answer.results:
            if error := result.get("error"):
                body = ErrorBody(error=str(error), rule=str(result.get("rule") or ""), way_out=str(result.get("way_out") or ""))
                raise CallRefused(self.caller.name, f"/collective_rpc {method}", 409, body)
        return answer.results

    async def set_label(self, label: str) -> None:
        """Tokens from here on carry this label."""
        await self._post("/update_weight_version", LabelBody(new_version=label), Said)

    async def label(self, *, timeout_s: float | None = None) -> str:
        """The label of the weights."""
        return (await self._get("/weight_info", LabelInfo, timeout_s)).weight_version

    async def load_adapter(self, name: str, folder: str) -> None:
        """Serve the adapter of this peft folder as model `name`, instead of the one before."""
        await self._post("/v1/load_lora_adapter", AdapterBody(lora_name=name, lora_path=folder), Said)

    async def join_group(self, seat: dict[str, Any]) -> None:
        """Have every worker take its seat in the group through which weights are sent; returns when all of the group have."""
        await self._post("/init_weight_transfer_engine", JoinBody(init_info=seat), Said)

    async def start_update(self) -> None:
        """Open an update of the weights."""
        await self._post("/start_weight_update", None, Said)

    async def update_weights(self, info: dict[str, Any]) -> None:
        """Have every worker receive and load what is sent."""
        await self._post("/update_weights", UpdateBody(update_info=info), Said)

    async def finish_update(self) -> None:
        """Close the update. Raises CallRefused if a parameter got nothing."""
        await self._post("/finish_weight_update", FinishBody(), Said)

    async def sleep(self) -> None:
        """Abort what runs, copy the weights to the host, free them and the KV cache."""
        await self._post("/sleep?level=1&mode=abort", None, Said)

    async def wake(self, tags: Sequence[str]) -> None:
        """Take memory for these tags again (weights, kv_cache); the weights are copied back."""
        await self._post(f"/wake_up?{urlencode([('tags', tag) for tag in tags])}", None, Said)

    async def is_well(self, *, timeout_s: float | None) -> None:
        """Returns if the engine process behind the server lives."""
        await self._get("/health", Said, timeout_s)

    async def server_info(self, *, timeout_s: float | None) -> ServerInfo:
        """All settings."""
        return await self._get("/server_info?config_format=json", ServerInfo, timeout_s)

    async def counts(self, *, timeout_s: float | None) -> dict[str, float]:
        """num_running, num_queued, tokens_generated and decode_s, from its metrics; decode_s adds up over requests."""
        text = (await self._get("/metrics", Said, timeout_s)).text
        counts = {ours: _metric(text, theirs) for ours, theirs in _COUNTS.items()}
        return {**counts, "decode_s": sum(_metric(text, name) for name in _DECODE_S)}

    async def _get(self, path: str, answer: type[Answer], timeout_s: float | None) -> Answer:
        try:
            return await self.caller.get(path, answer, timeout_s=timeout_s)
        except CallGarbled as garbled:
            raise _refusal(garbled) from garbled

    async def _post(self, path: str, body: BaseModel | None, answer: type[Answer], timeout_s: float | None = None) -> Answer:
        try:
            return await self.caller.post(path, body, answer, timeout_s=timeout_s)
        except CallGarbled as garbled:
            raise _refusal(garbled) from garbled

    def _part(self, data: bytes) -> Generated:
        try:
            return Generated.model_validate_json(data)
        except ValidationError:
            why = f"a line of the stream is no {Generated.__name__}: {data[:200].decode(errors='replace')}"
            raise CallGarbled(self.caller.name, GENERATE, why, status=500, text=data) from None


def _refusal(garbled: CallGarbled) -> CallRefused | CallLost:
    """An error status with vLLM's own body is a refusal like ours."""
    try:
        said = VllmError.model_validate_json(garbled.text)
    except ValidationError:
        said = VllmError()
    if garbled.status < 400 or (not said.words and garbled.status < 500):
        return garbled
    return CallRefused(garbled.server, garbled.path, _code(said) or garbled.status, ErrorBody(error=said.words or garbled.why))


def _code(said: VllmError) -> int | None:
    """In a stream the status has long been 200: the error says what it would have been."""
    code = None if said.error is None or isinstance(said.error, str) else said.error.code
    return code if isinstance(code, int) and code >= 400 else None


def _metric(text: str, name: str) -> float:
    """Sum of a metric over its labels."""
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE))
