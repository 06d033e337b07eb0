"""vLLM's HTTP routes and the parts of their answers that we read (vLLM 0.32)."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from asyncrl.base.http import Answer, CallGarbled, CallRefused
from asyncrl.base.message import ErrorBody
from asyncrl.engines.engine import CallScope

Finish = Literal["stop", "length", "abort"]
GENERATE = "/inference/v1/generate"
_WIRE_ID = "generate-tokens-{}"
"""vLLM's id for our request_id, required by /abort_requests, which accepts any id."""
_COUNTS = {
    "num_running": ("num_requests_running",),
    "num_queued": ("num_requests_waiting",),
    "tokens_generated": ("generation_tokens_total",),
    "decode_s": ("request_prefill_time_seconds_sum", "inter_token_latency_seconds_sum"),
    "tokens_prompted": ("prompt_tokens_total",),
    "tokens_cached": ("prompt_tokens_cached_total",),
}


JsonBody = RootModel[dict[str, Any]]


class Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Text(Read):
    text: str = ""

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **_: Any) -> Self:
        return cls(text=json_data if isinstance(json_data, str) else json_data.decode(errors="replace"))


class LabelSpan(Read):
    """Output tokens [start, end) of this weight label."""

    version: str
    start: int
    end: int


class TopLogprob(Read):
    """`rank` 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprob(Read):
    """`top_logprobs`: the sampled token, then the likeliest."""

    logprob: float
    top_logprobs: list[TopLogprob] = []


class Logprobs(Read):
    content: list[TokenLogprob] | None = None


class Choice(Read):
    """An answer, or tokens of a stream. `weight_versions` comes with the finish_reason."""

    token_ids: list[int] | None = None
    finish_reason: Finish | None = None
    weight_versions: list[LabelSpan] | None = None
    logprobs: Logprobs | None = None
    routed_experts: str | None = None
    """With the finish_reason: .npy file in base64, uint8 or uint16 [T, layers, k], without the last token."""


class Usage(Read):
    """`prompt_tokens_details`: cached_tokens came from the prefix cache."""

    prompt_tokens_details: dict[str, Any] | None = None


class Generated(Read):
    """Answer of GENERATE, or a line of its stream."""

    choices: list[Choice] = Field(max_length=1)
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None


class RpcResults(Read):
    """POST /collective_rpc: one answer per worker."""

    results: list[dict[str, Any]]


class LabelInfo(Read):
    """GET /weight_info."""

    weight_version: str


class ServerInfo(Read):
    """GET /server_info?config_format=json: all settings."""

    vllm_config: dict[str, Any]
    vllm_env: dict[str, Any] = {}


def vllm_request(
    token_ids: list[int], request_id: str, label: str, model: str | None, **sampling: Any
) -> dict[str, Any]:
    """Return the body of GENERATE. The salt contains the label, so cached prefixes never outlive their
    weights.
    """
    return {
        "token_ids": token_ids,
        "request_id": request_id,
        "cache_salt": f"v{label}",
        "model": model,
        "sampling_params": {"logprobs": 0, "ignore_eos": True, "detokenize": False} | sampling,
    }


class Routes(CallScope):
    """Calls to one vLLM process. Raise CallRefused with vLLM's error, or CallLost. `timeout_s` None: no
    limit.
    """

    async def get(self, path: str, answer: type[Answer], timeout_s: float | None = None) -> Answer:
        with _vllm_errors():
            return await self.caller.get(path, answer, timeout_s=timeout_s)

    async def post(
        self, path: str, body: dict[str, Any] | None, answer: type[Answer], timeout_s: float | None = None
    ) -> Answer:
        sent = None if body is None else JsonBody(body)
        with _vllm_errors():
            return await self.caller.post(path, sent, answer, timeout_s=timeout_s)

    async def tell(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> None:
        await self.post(path, body, Text, timeout_s)

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Generated, None]:
        """Yield parts of GENERATE. Closing it ends the request."""
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        with _vllm_errors():
            async with contextlib.aclosing(self.caller.lines(GENERATE, JsonBody(streamed))) as lines:
                async for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data and data != b"[DONE]":
                        try:
                            part = Generated.model_validate_json(data)
                        except ValidationError:
                            why = f"no {Generated.__name__}: {data[:200].decode(errors='replace')}"
                            raise CallGarbled(self.name, GENERATE, why, status=500, text=data) from None
                        yield part

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.tell("/abort_requests", {"request_ids": [_WIRE_ID.format(name) for name in request_ids]})

    async def rpc(self, method: str, argument: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Call our extension in each worker. Raises CallRefused."""
        args = [] if argument is None else [json.dumps(argument)]
        answer = await self.post("/collective_rpc", {"method": method, "args": args}, RpcResults)
        for result in answer.results:
            if "error" in result:
                body = ErrorBody.model_validate(result)
                raise CallRefused(self.name, f"/collective_rpc {method}", 409, body)
        return answer.results

    async def set_label(self, label: str) -> None:
        await self.tell("/update_weight_version", {"new_version": label})

    async def counts(self, *, timeout_s: float | None) -> dict[str, float]:
        """Return counts from its metrics; tokens_prompted includes tokens_cached."""
        text = (await self.get("/metrics", Text, timeout_s)).text
        return {ours: sum(_metric(text, theirs) for theirs in names) for ours, names in _COUNTS.items()}


@contextlib.contextmanager
def _vllm_errors() -> Iterator[None]:
    """Turn vLLM's error bodies into CallRefused: {"error": {"message": ..}}, {"error": "..."} or
    {"detail": ..}.
    """
    try:
        yield
    except CallGarbled as garbled:
        answer: Any = {}
        with contextlib.suppress(ValueError):
            answer = json.loads(garbled.text)
        error = answer.get("error") or answer.get("detail") if isinstance(answer, dict) else None
        error = error if isinstance(error, dict) else {"message": error}
        message = error.get("message")
        code = error.get("code")
        if garbled.status < 400 or (not message and garbled.status < 500):
            raise
        status = code if isinstance(code, int) and code >= 400 else garbled.status
        body = ErrorBody(error=str(message or garbled.why))
        raise CallRefused(garbled.server, garbled.path, status, body) from garbled


def _metric(text: str, name: str) -> float:
    return sum(
        float(value) for value in re.findall(rf"^vllm:{name}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE)
    )
