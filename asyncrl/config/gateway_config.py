"""Section `gateway`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from asyncrl.config.fields import Count, FrozenConfig, Port


class GatewayConfig(FrozenConfig):
    """The OpenAI-compatible endpoint for harnesses and `asyncrl serve gateway`."""

    free_keys: ClassVar = ("host", "port", "public_url", "max_calls", "lease_timeout_s")

    host: str = "127.0.0.1"
    """Address to listen on. Any address but 127.0.0.1 admits other machines with keys.
    """
    port: Port | None = None
    """Port to listen on (none = any free one)."""
    public_url: str | None = None
    """URL for harnesses on other machines, e.g. http://trainer-host:8700 (none =
    http://host:port).
    """
    on_sampling_override: Literal["auto", "use_config", "honour"] = "auto"
    """Applies to calls with another temperature, top_p, top_k or min_p than training,
    or with a logit_bias or penalty. use_config: use the configured values, and refuse a
    logit_bias. honour: sample as requested; tokens at another temperature, or with a
    bias or penalty, are not trained (auto = honour under `asyncrl serve gateway`,
    use_config in a run).
    """
    tool_format: str = "auto"
    """Format of tool calls: a format of docs/gateway.md, none, or `module:function`:
    parse(text) -> [(name, arguments), ...] or None (auto = from the chat template)."""
    thoughts: Literal["keep", "as_template"] = "keep"
    """Thoughts that the chat template strips from earlier answers. keep: prompts
    contain them, so a conversation is one branch. as_template: each prompt is the
    template's own, in a new branch if it differs.
    """
    thoughts_field: Literal["content", "reasoning_content"] = "content"
    """Field of a thought in /v1/chat/completions."""
    parse_special_tokens: bool = True
    """Encode the name of a special token in a message or tool as that token, like vLLM.
    false: as text, so that a web page cannot write a turn.
    """
    max_calls: Count = 256
    """Calls per rollout; the next gets 429. A key of `asyncrl
    serve gateway` has no limit.
    """
    max_rollout_tokens: Count | None = 2**18
    """Tokens of a rollout; shared context counts in each branch. The next call gets 429
    (none = no limit)."""
    lease_timeout_s: PositiveFloat = 60.0
    """Timeout without a heartbeat, in seconds, until a worker's rollouts fail."""
