"""What the parent tells a simulated engine server at its start."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SimulatedSpec(BaseModel):
    """The spec file of `python -m asyncrl_servers.simulated`: one JSON object, unknown keys refused.

    With n running requests a decode step takes decode_step_s + n * per_row_s, and each of them gets one token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name of this server in logs and errors, like engine-0."""
    slots: int = Field(ge=1)
    """Requests that run at once."""
    max_length: int = Field(ge=2)
    """Most tokens of prompt and completion together."""
    vocab_size: int = Field(default=1000, ge=1)
    """Token ids are drawn from 0..vocab_size-1, each as likely as the other."""
    decode_step_s: float = Field(default=0.002, gt=0)
    """Seconds of a decode step, however many requests run."""
    per_row_s: float = Field(default=0.0001, ge=0)
    """Seconds that each running request adds to a decode step."""
    prefill_s_per_token: float = Field(default=0.00002, ge=0)
    """Seconds for each prompt token of an admitted request; decoding stands still meanwhile."""
    swap_s: float = Field(default=0.001, ge=0)
    """Seconds that a weight swap stops decoding."""
    mean_tokens: float = Field(default=64.0, ge=1)
    """Mean length of a completion, lognormal and drawn from the request's seed; max_tokens cuts it."""
    sigma: float = Field(default=1.0, ge=0)
    """Sigma of the lognormal length (0 = all completions have mean_tokens)."""
    weights_bytes: int = Field(default=2**20, ge=0)
    """Bytes that it says the weights take, when they sleep and wake."""
    kv_bytes: int = Field(default=2**20, ge=0)
    """Bytes that it says the KV cache takes."""
    start_version: int = Field(default=0, ge=0)
    """policy_version at the start."""
    max_queued: int = Field(default=1_000_000, ge=1)
    """Requests that may wait for a slot; one more is refused with 503."""
