"""Sections `rollout` and `buffer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from asyncrl.config.fields import FrozenConfig
from asyncrl.messages.engine_api import LatencyModel
from asyncrl.messages.sampling import SamplingParameters

OnOverdue = Literal["wait", "mask", "drop"]
EngineKind = Literal["embedded", "vllm", "simulated"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Facts about an engine kind. `settings`: keys of `rollout` that only this kind reads."""

    settings: tuple[str, ...] = ()
    has_model: bool = True
    free_settings: tuple[str, ...] = ()
    package: str | None = None
    """Package in the servers' own Python: rollout.{package}_python."""
    split_key: str | None = None
    """Key of `rollout` with the devices that one engine spans; None: always one."""
    urls_key: str | None = None
    """Key of `rollout` with servers that others have started; None: the run starts all."""
    arguments_key: str | None = None
    """Key of `rollout` with the server's own arguments by name."""
    memory_arguments: tuple[str, ...] = ()
    """Of these arguments, the ones that fix how much memory an engine takes."""
    key_env: str = ""
    """Environment variable with the key of servers that others have started."""
    receives_transfers: bool = False
    """Weights may be sent from device to device."""
    opens_chunks: bool = True
    stages_weights: bool = True
    """On separate devices, it holds two sets of weights."""
    sleeps_on_cpu: bool = True
    """When colocated, it can free its memory on a CPU."""
    pins_length: bool = False
    """Its maximum length decides length-dependent rotary frequencies, not each sequence's."""
    keeps_turns: bool = False
    """A second KV cache for agent conversations is available."""
    returns_routing: bool = False
    exact_on: Literal["cpu", "cuda", "nothing"] = "nothing"
    """Kind of device that supports rollout.deterministic."""
    pages_kv: bool = False
    """On CUDA, sequences wait for a full KV cache."""
    kv_block: int = 1
    forward_tokens: int = 0
    logit_copies: int = 0
    """Float32 arrays of vocabulary size per slot in a step."""

    def kv_length(self, length: int) -> int:
        return -(-length // self.kv_block) * self.kv_block


ENGINES: dict[EngineKind, EngineCapabilities] = {
    "embedded": EngineCapabilities(
        settings=("fused_decode", "cache_tokens"),
        free_settings=("fused_decode", "cache_tokens"),
        receives_transfers=True,
        keeps_turns=True,
        returns_routing=True,
        exact_on="cpu",
        kv_block=32,
        forward_tokens=1024,
        logit_copies=7,
    ),
    "simulated": EngineCapabilities(settings=("simulated",), has_model=False),
    "vllm": EngineCapabilities(
        settings=("vllm", "vllm_python", "urls", "tensor_parallel"),
        free_settings=("vllm_python", "urls", "tensor_parallel"),
        package="vllm",
        split_key="tensor_parallel",
        urls_key="urls",
        arguments_key="vllm",
        memory_arguments=("gpu_memory_utilization", "num_gpu_blocks_override"),
        key_env="ASYNCRL_VLLM_KEY",
        pins_length=True,
        returns_routing=True,
        receives_transfers=True,
        opens_chunks=False,
        stages_weights=False,
        sleeps_on_cpu=False,
        exact_on="cuda",
        pages_kv=True,
        kv_block=128,
        forward_tokens=8192,
        logit_copies=3,
    ),
}


MOST_ENGINES = 10_000


class EngineRange(FrozenConfig):
    """Limits of `asyncrl scale`."""

    min: int = Field(default=1, ge=1)
    """Minimum number of running engines."""
    max: int = Field(ge=1, le=MOST_ENGINES)
    """Maximum number of engines, used to plan devices, memory and threads."""

    @property
    def numbers(self) -> range:
        return range(self.min, self.max + 1)

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}")
        return self


class RolloutConfig(FrozenConfig):
    """Sampling of completions, and the engine servers."""

    free_keys: ClassVar = (
        *("timeout_s", "slots", "max_failed_groups", "max_requeues"),
        *(name for engine in ENGINES.values() for name in engine.free_settings),
    )

    group_size: int = Field(default=8, ge=1)
    """Rollouts of one prompt, scored against each other."""
    num_engines: Annotated[int, Field(ge=1, le=MOST_ENGINES)] | EngineRange = 1
    """Engine servers: a number, or {min: 1, max: 8} to allow `asyncrl scale`."""
    engine: EngineKind = "embedded"
    """embedded: torch, any Hugging Face causal model. vllm: vLLM's server (docs/engines.md). simulated: a
    latency model, for load tests."""
    simulated: LatencyModel = LatencyModel()
    """Latencies and completion lengths of the simulated engine."""
    vllm: dict[str, Any] = {}
    """Arguments of `vllm serve` by name, except those that the run sets itself."""
    vllm_python: str = "auto"
    """Python with vLLM (auto = this one, else .venv-vllm/bin/python of the checkout)."""
    urls: list[Annotated[str, Field(pattern=r"^https?://[^/?#\s]+$")]] | None = None
    """URLs of num_engines vLLM servers, with their key in ASYNCRL_VLLM_KEY (none = the run starts
    its own)."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices per vLLM engine."""
    slots: int = Field(default=64, ge=1)
    """Sequences that one engine decodes at once."""
    max_tokens: int = Field(default=256, ge=1)
    """Maximum sampled tokens of a completion: of a single-turn rollout, or of one call of an agent."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Maximum prompt tokens. A longer prompt fails, and is never cut."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, also of logprobs."""
    timeout_s: float | None = Field(default=600.0, gt=0)
    """Timeout for a rollout with all its retries, in seconds, without an agent's wait for a worker (none =
    off)."""
    retries: int = Field(default=2, ge=0)
    """Retries of a failed rollout, within timeout_s."""
    max_failed_groups: int = Field(default=16, ge=1)
    """End the run after this number of consecutive groups without a usable rollout."""
    max_requeues: int = Field(default=3, ge=0)
    """Times that a failed, overdue or fully masked prompt is sampled again."""
    deterministic: Literal["auto"] | bool = "auto"
    """Make a request's tokens depend only on its prompt, seed and weights (auto = true for embedded on a
    CPU without experts, and for vLLM on CUDA at buffer.max_staleness=0; else false)."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads of each engine server (auto = a quarter of the cores)."""
    fused_decode: bool = False
    """Embedded engine on CUDA: decode with compiled layers, merged weights and a Triton kernel. A step of 64
    rows of a 0.6B model takes 0.7 of the time on an H100, a step of 256 rows the same."""
    cache_tokens: int = Field(default=0, ge=0)
    """Maximum tokens of the KV cache of an embedded engine with fused_decode. A request waits until the cache
    has free pages for all its tokens (0 = slots times the longest request)."""

    @property
    def sampling(self) -> SamplingParameters:
        return SamplingParameters(temperature=self.temperature)

    @property
    def facts(self) -> EngineCapabilities:
        return ENGINES[self.engine]

    @property
    def devices_per_engine(self) -> int:
        return self._of_kind(self.facts.split_key, 1)

    @property
    def external_urls(self) -> list[str] | None:
        """Return the URLs of servers that others have started; None: the run starts its own."""
        return self._of_kind(self.facts.urls_key, None)

    @property
    def memory_keys(self) -> list[str]:
        """Return the written keys that fix how much memory an engine takes."""
        key = self.facts.arguments_key
        names = self._of_kind(key, dict[str, Any]())
        plain = {name: name.lstrip("-").replace("-", "_") for name in names}
        return [f"rollout.{key}.{name}" for name in names if plain[name] in self.facts.memory_arguments]

    def _of_kind(self, key: str | None, default: T) -> T:
        """Read a key that belongs to the engine's kind."""
        value: T = default if key is None else getattr(self, key)
        return value

    @property
    def engine_range(self) -> EngineRange:
        num = self.num_engines
        return num if isinstance(num, EngineRange) else EngineRange(min=num, max=num)

    @property
    def is_scaled(self) -> bool:
        return isinstance(self.num_engines, EngineRange)

    @property
    def max_engines(self) -> int:
        return self.engine_range.max

    @property
    def max_length(self) -> int:
        return self.max_prompt_tokens + self.max_tokens

    @model_validator(mode="after")
    def _settings_fit_the_engine(self) -> Self:
        for engine, facts in ENGINES.items():
            if self.engine != engine and (given := self.given(*facts.settings)):
                raise ValueError(f"{given[0]} is for rollout.engine={engine}, not {self.engine}; remove it")
        if self.cache_tokens and not self.fused_decode:
            raise ValueError(
                f"cache_tokens={self.cache_tokens} limits the cache of fused steps, and "
                "fused_decode is false; set fused_decode: true, or cache_tokens: 0"
            )
        if 0 < self.cache_tokens < self.max_length:
            raise ValueError(
                f"cache_tokens={self.cache_tokens} is below max_prompt_tokens + max_tokens = "
                f"{self.max_length}, so the longest request would never start; raise it, or set it to 0"
            )
        if self.urls is None:
            return self
        num = len(set(self.urls))
        if self.is_scaled or not len(self.urls) == num == self.max_engines:
            raise ValueError(f"urls={self.urls}: name each server once, and set rollout.num_engines={num}")
        if given := self.given("vllm", "tensor_parallel"):
            raise ValueError(f"{given[0]} is for servers that the run starts; remove it or rollout.urls")
        return self


class BufferConfig(FrozenConfig):
    """The staleness bound, and how far generation runs ahead."""

    max_staleness: int = Field(default=1, ge=0)
    """Hard bound, in policy versions, on the age of every token with a loss weight (0 = on-policy)."""
    look_ahead: Literal["auto"] | NonNegativeInt = "auto"
    """Batches that generation may run ahead, at most max_staleness (auto = the fewest that keep the trainer
    busy)."""
    on_overdue: OnOverdue = "mask"
    """Overdue stragglers: train and mask old tokens, wait, or drop and regenerate."""
    filter: Literal["none", "equal_rewards"] = "none"
    """equal_rewards: replace groups whose rewards are all equal (DAPO's dynamic sampling)."""

    @model_validator(mode="after")
    def _look_ahead_fits(self) -> Self:
        if self.look_ahead != "auto" and self.look_ahead > self.max_staleness:
            raise ValueError(
                f"buffer.look_ahead={self.look_ahead} is above buffer.max_staleness={self.max_staleness}; "
                f"set it to auto or 0..{self.max_staleness}"
            )
        return self
