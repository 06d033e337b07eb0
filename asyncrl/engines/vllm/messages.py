"""Bodies of vLLM's routes, as far as we send and read them (vLLM 0.32). Knows shapes; knows no route and no version of ours."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field


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
        return cls(text=json_data if isinstance(json_data, str) else bytes(json_data).decode(errors="replace"))


class Sampling(Sent):
    """vLLM's sampling parameters. `logprobs` 0: of the sampled token alone; `prompt_logprobs` 0: of the prompt's own tokens."""

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


class StreamOptions(Sent):
    """`include_usage`: a last line with the counts."""

    include_usage: bool = True


class Generate(Sent):
    """POST /inference/v1/generate: token ids in, token ids out. `model` None is the base model."""

    token_ids: list[int]
    request_id: str
    cache_salt: str
    sampling_params: Sampling
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


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
    """The answer, or in a stream some tokens of it. `weight_versions` comes with the finish_reason, and covers the whole output."""

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
    """Answer of /inference/v1/generate, or one line of a streamed one. `prompt_logprobs`: by token id, none for the first token."""

    choices: list[Choice] = Field(max_length=1)
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class AbortBody(Sent):
    """POST /abort_requests: ids as vLLM made them of ours."""

    request_ids: list[str]


class RpcBody(Sent):
    """POST /collective_rpc: a method of the workers, and one JSON string for it."""

    method: str
    args: list[str] = []


class RpcResults(Read):
    """One answer a worker."""

    results: list[dict[str, Any]]


class LabelBody(Sent):
    """POST /update_weight_version."""

    new_version: str


class LabelInfo(Read):
    """GET /weight_info."""

    weight_version: str


class AdapterBody(Sent):
    """POST /v1/load_lora_adapter; `load_inplace` replaces the one of the same name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = True


class JoinBody(Sent):
    """POST /init_weight_transfer_engine."""

    init_info: dict[str, Any]


class UpdateBody(Sent):
    """POST /update_weights."""

    update_info: dict[str, Any]


class FinishBody(Sent):
    """POST /finish_weight_update, whose body may say a label; ours is set by a route of its own, in every way of loading."""


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
