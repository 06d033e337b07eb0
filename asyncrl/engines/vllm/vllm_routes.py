"""vLLM's own HTTP routes as calls (vLLM 0.32). The only place that knows their paths; knows no version of
ours and no commit.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Self
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from asyncrl.http import Answer, Caller, CallGarbled, CallLost, CallRefused
from asyncrl.messages.base import ErrorBody

# Bodies of vLLM's routes, as far as we send and read them (vLLM 0.32). Knows shapes; knows no route and no
# version of ours.


class Sent(BaseModel):
    """Base of what we send."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Read(BaseModel):
    """Base of what we read: what vLLM says beyond it is its own affair."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Said(Read):
    """An answer whose body is of no interest, or is text."""

    text: str = ""

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **_: Any) -> Self:
        """Whatever it is."""
        return cls(
            text=json_data if isinstance(json_data, str) else bytes(json_data).decode(errors="replace")
        )


class Sampling(Sent):
    """vLLM's sampling parameters. `logprobs` 0: of the sampled token alone; `prompt_logprobs` 0: of the
    prompt's own tokens.
    """

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    detokenize: bool = False
    ignore_eos: bool = True
    logprobs: int = 0
    prompt_logprobs: int | None = None


class Generate(Sent):
    """POST /inference/v1/generate: token ids in, token ids out. `model` None is the base model."""

    token_ids: list[int]
    request_id: str
    cache_salt: str
    sampling_params: Sampling
    model: str | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None


class LabelSpan(Read):
    """Output tokens [start, end) were sampled while the weights had this label."""

    version: str
    start: int
    end: int


class TokenLogprob(Read):
    """Of one sampled token."""

    token_id: int
    logprob: float


class Logprobs(Read):
    """One entry a sampled token."""

    content: list[TokenLogprob] | None = None


class Choice(Read):
    """The answer, or in a stream some tokens of it. `weight_versions` comes with the finish_reason, and
    covers the whole output.
    """

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    weight_versions: list[LabelSpan] | None = None
    logprobs: Logprobs | None = None


class CachedTokens(Read):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int | None = None


class Usage(Read):
    """Only what is cached is of interest."""

    prompt_tokens_details: CachedTokens | None = None

    @property
    def num_cached(self) -> int:
        """Prompt tokens from the prefix cache; 0 if vLLM does not tell."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class PromptLogprob(Read):
    """Of one prompt token."""

    logprob: float


class Generated(Read):
    """Answer of /inference/v1/generate, or one line of a streamed one. `prompt_logprobs`: by token id, none
    for the first token.
    """

    choices: list[Choice] = Field(max_length=1)
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class RpcResults(Read):
    """One answer a worker."""

    results: list[dict[str, Any]]


class LabelInfo(Read):
    """GET /weight_info."""

    weight_version: str


class ServerInfo(Read):
    """GET /server_info?config_format=json."""

    vllm_config: dict[str, Any]
    vllm_env: dict[str, Any] = {}


class ErrorDetail(Read):
    """What vLLM says of an error."""

    message: str
    code: int | str | None = None


class VllmError(Read):
    """vLLM's own error bodies: {"error": {"message": ..}}, {"error": "..."} or {"detail": ..}."""

    error: ErrorDetail | str | None = None
    detail: Any = None

    @property
    def words(self) -> str:
        """What it says; '' if this is no error."""
        said = self.error.message if isinstance(self.error, ErrorDetail) else self.error or self.detail
        return "" if said is None else str(said)


GENERATE = "/inference/v1/generate"
PauseMode = Literal["abort", "keep", "wait"]
_WIRE_ID = "generate-tokens-{}"
"""What vLLM makes of a request_id; /abort_requests knows no other, and answers "aborted" to any."""
_COUNTS = {
    "num_running": "num_requests_running",
    "num_queued": "num_requests_waiting",
    "tokens_generated": "generation_tokens_total",
}
_DECODE_S = ("request_prefill_time_seconds_sum", "inter_token_latency_seconds_sum")


class Routes:
    """Calls to one vLLM server. All raise CallRefused, with what vLLM says, or CallLost. `timeout_s` None: as
    long as it takes.
    """

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    async def generate(self, body: Generate) -> Generated:
        """A whole answer."""
        return await self._post(GENERATE, body, Generated)

    async def stream(self, body: Generate) -> AsyncGenerator[Generated, None]:
        """The same in parts, as they come. Close it to break the connection; vLLM then drops the request."""
        streamed = body.model_copy(update={"stream": True, "stream_options": {"include_usage": True}})
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
        await self._post(
            "/abort_requests",
            {"request_ids": [_WIRE_ID.format(name) for name in request_ids]},
            Said,
            timeout_s,
        )

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Schedule nothing any more. Requests that come now wait in vLLM. With "wait" it returns once what
        ran has finished.
        """
        await self._post(
            f"/pause?{urlencode({'mode': mode, 'clear_cache': str(clear_cache).lower()})}", None, Said
        )

    async def resume(self, *, timeout_s: float | None = None) -> None:
        """Schedule again."""
        await self._post("/resume", None, Said, timeout_s)

    async def rpc(self, method: str, argument: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """What this method of our worker extension answers, in each worker. Raises CallRefused if one answers
        an error.
        """
        args = [] if argument is None else [json.dumps(argument)]
        answer = await self._post("/collective_rpc", {"method": method, "args": args}, RpcResults)
        for result in answer.results:
            if error := result.get("error"):
                body = ErrorBody(
                    error=str(error),
                    rule=str(result.get("rule") or ""),
                    way_out=str(result.get("way_out") or ""),
                )
                raise CallRefused(self.caller.name, f"/collective_rpc {method}", 409, body)
        return answer.results

    async def set_label(self, label: str) -> None:
        """Tokens from here on carry this label."""
        await self._post("/update_weight_version", {"new_version": label}, Said)

    async def label(self, *, timeout_s: float | None = None) -> str:
        """The label of the weights."""
        return (await self._get("/weight_info", LabelInfo, timeout_s)).weight_version

    async def load_adapter(self, name: str, folder: str) -> None:
        """Serve the adapter of this peft folder as model `name`, instead of the one before."""
        await self._post(
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder, "load_inplace": True}, Said
        )

    async def join_group(self, seat: dict[str, Any]) -> None:
        """Have every worker take its seat in the group through which weights are sent; returns when all of
        the group have.
        """
        await self._post("/init_weight_transfer_engine", {"init_info": seat}, Said)

    async def start_update(self) -> None:
        """Open an update of the weights."""
        await self._post("/start_weight_update", None, Said)

    async def update_weights(self, info: dict[str, Any]) -> None:
        """Have every worker receive and load what is sent."""
        await self._post("/update_weights", {"update_info": info}, Said)

    async def finish_update(self) -> None:
        """Close the update. Raises CallRefused if a parameter got nothing."""
        await self._post("/finish_weight_update", {}, Said)

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
        """num_running, num_queued, tokens_generated and decode_s, from its metrics; decode_s adds up over
        requests.
        """
        text = (await self._get("/metrics", Said, timeout_s)).text
        counts = {ours: _metric(text, theirs) for ours, theirs in _COUNTS.items()}
        return {**counts, "decode_s": sum(_metric(text, name) for name in _DECODE_S)}

    async def _get(self, path: str, answer: type[Answer], timeout_s: float | None) -> Answer:
        try:
            return await self.caller.get(path, answer, timeout_s=timeout_s)
        except CallGarbled as garbled:
            raise _refusal(garbled) from garbled

    async def _post(
        self,
        path: str,
        body: BaseModel | dict[str, Any] | None,
        answer: type[Answer],
        timeout_s: float | None = None,
    ) -> Answer:
        sent = RootModel(body) if isinstance(body, dict) else body
        try:
            return await self.caller.post(path, sent, answer, timeout_s=timeout_s)
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
    return CallRefused(
        garbled.server,
        garbled.path,
        _code(said) or garbled.status,
        ErrorBody(error=said.words or garbled.why),
    )


def _code(said: VllmError) -> int | None:
    """In a stream the status has long been 200: the error says what it would have been."""
    code = None if said.error is None or isinstance(said.error, str) else said.error.code
    return code if isinstance(code, int) and code >= 400 else None


def _metric(text: str, name: str) -> float:
    """Sum of a metric over its labels."""
    return sum(
        float(value) for value in re.findall(rf"^vllm:{name}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE)
    )
