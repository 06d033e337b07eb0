"""Section `rollout`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from asyncrl.config.engine_facts import EngineCapabilities
from asyncrl.config.engine_kinds import ENGINES, EngineKind, engines_with
from asyncrl.config.extended import extended
from asyncrl.config.fields import (
    Count,
    Fraction,
    FrozenConfig,
    PositiveFraction,
    SampledConfig,
)
from asyncrl.messages.sampling import CUTS

T = TypeVar("T")
MOST_ENGINES = 10_000


class EngineRange(FrozenConfig):
    """Limits of `asyncrl scale`."""

    min: Count = 1
    """Minimum number of running engines."""
    max: int = Field(ge=1, le=MOST_ENGINES)
    """Maximum number of engines, used to plan devices, memory and threads."""

    @property
    def numbers(self) -> range:
        return range(self.min, self.max + 1)

    def conflicts(self) -> Iterator[str]:
        if self.min > self.max:
            yield f".min={self.min} is above .max={self.max}; lower .min, or raise .max"


@extended("rollout")
class RolloutConfig(SampledConfig):
    """Sampling of completions, and the engine servers."""

    free_keys: ClassVar = (
        "timeout_s",
        "slots",
        "max_failed_groups",
        "max_requeues",
        "fused_decode",
    )

    group_size: Count = 8
    """Rollouts of one prompt, scored against each other."""
    num_engines: Annotated[int, Field(ge=1, le=MOST_ENGINES)] | EngineRange = 1
    """Engine servers: a number, or {min: 1, max: 8} to allow `asyncrl scale`."""
    engine: EngineKind = "embedded"
    """embedded: torch, any Hugging Face causal model. vllm: vLLM's server
    (docs/engines.md).
    """
    slots: Count | Literal["auto"] = 64
    """Sequences that one engine decodes at once (auto = as many as its KV cache holds without
    many preemptions, at most 64, or 256 for vllm).
    """
    max_tokens: Count = 256
    """Maximum sampled tokens of a completion: of a single-turn rollout, or of one call
    of an agent.
    """
    max_prompt_tokens: Count = 256
    """Maximum prompt tokens. A longer prompt fails, and is never cut."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, also of logprobs."""
    top_p: PositiveFraction = 1.0
    """Sample from the likeliest tokens, up to this total probability (1 = all). The
    trainer renormalises over the same tokens (docs/sampling.md).
    """
    top_k: NonNegativeInt = 0
    """Sample from this number of likeliest tokens (0 = all)."""
    min_p: Fraction = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability
    (0 = all).
    """
    timeout_s: PositiveFloat | None = 600.0
    """Timeout for a rollout with all its retries, in seconds, without an agent's wait for a worker (none =
    off)."""
    retries: NonNegativeInt = 2
    """Retries of a failed rollout, within timeout_s."""
    max_failed_groups: Count = 16
    """End the run after this number of consecutive groups without a usable rollout."""
    max_requeues: NonNegativeInt = 3
    """Times that a failed, overdue or fully masked prompt is sampled again."""
    deterministic: Literal["auto"] | bool = "auto"
    """Make a request's tokens depend only on its prompt, seed and weights (auto = true
    for embedded on a CPU without experts and layers with states, and for vLLM on CUDA
    at buffer.max_staleness=0; else false).
    """
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads of each engine server (auto = a quarter of the cores)."""
    fused_decode: bool = False
    """Embedded engine on CUDA: decode with compiled layers, merged weights and a Triton
    kernel. A step of 64 rows of a 0.6B model takes 0.7 of the time on an H100, a step
    of 256 rows the same. Its graphs include sampling, and outlive sleeps.
    """

    @property
    def facts(self) -> EngineCapabilities:
        return ENGINES[self.engine]

    @property
    def devices_per_engine(self) -> int:
        return self._of_kind(self.facts.split_key, 1)

    @property
    def external_urls(self) -> list[str] | None:
        """Return the URLs of servers that others have started; None: the run starts its
        own.
        """
        return self._of_kind(self.facts.urls_key, None)

    @property
    def memory_keys(self) -> list[str]:
        """Return the written keys that fix how much memory an engine takes."""
        plain = {name: name.lstrip("-").replace("-", "_") for name in self._arguments}
        return [
            f"rollout.{self.facts.arguments_key}.{name}"
            for name in plain
            if plain[name] in self.facts.memory_arguments
        ]

    @property
    def _arguments(self) -> dict[str, object]:
        return self._of_kind(self.facts.arguments_key, {})

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
    def num_slots(self) -> int:
        """Return the sequences that an engine is started for."""
        return self.facts.auto_slots if self.slots == "auto" else self.slots

    @property
    def max_length(self) -> int:
        return self.max_prompt_tokens + self.max_tokens

    def conflicts(self) -> Iterator[str]:
        yield from self._conflicts_with_engine()
        yield from self._conflicts_of_urls()

    def _conflicts_with_engine(self) -> Iterator[str]:
        # A setting of another engine would be ignored, for example a memory limit.
        for engine, facts in ENGINES.items():
            for key in self.given(*facts.settings):
                if self.engine != engine:
                    yield f".{key} is for .engine={engine}, not {self.engine}; remove it"
        for name in filter(self.facts.is_own_argument, self._arguments):
            yield f".{self.facts.arguments_key}.{name} is set by asyncrl itself; remove it"
        # Without the support the ratio would be wrong by all that the cut took away.
        if self.sampling.is_cut and not self.facts.reports_supports:
            cuts = ", ".join(f".{name}={getattr(self, name)}" for name in sorted(CUTS))
            yield (
                f"{cuts}: .engine={self.engine} does not report the tokens that it sampled from; set "
                f".engine={engines_with('reports_supports')}, or .top_p=1, .top_k=0 and .min_p=0"
            )

    def _conflicts_of_urls(self) -> Iterator[str]:
        urls = self.external_urls
        facts = self.facts
        if urls is None:
            return
        # A server named twice would get twice its slots. A range is refused, because
        # the run cannot start or stop servers that are not its own.
        num = len(set(urls))
        if self.is_scaled or not len(urls) == num == self.max_engines:
            yield f".{facts.urls_key}={urls}: name each server once, and set .num_engines={num}"
        for key in self.given(*filter(None, (facts.arguments_key, facts.split_key))):
            yield f".{key} is for servers that the run starts; remove it, or .{facts.urls_key}"
