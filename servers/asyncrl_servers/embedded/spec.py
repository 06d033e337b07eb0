"""What the parent tells an embedded engine server at its start. Knows no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EmbeddedSpec(BaseModel):
    """The spec file of `python -m asyncrl_servers.embedded`: one JSON object, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str
    """Name of this server in logs and errors, like engine-0."""
    model_path: str
    """Hugging Face folder with config, weights and (for stop strings) tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. A run writes that of its trainer; auto (bfloat16 on CUDA, float32 on a CPU) is for a server alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = CUDA where there is a device, else CPU."""
    slots: int = Field(ge=1)
    """Sequences decoded at once."""
    max_length: int = Field(ge=2)
    """Most tokens of prompt and completion together."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of torch."""
    deterministic: bool = True
    """A request's tokens depend on its prompt, seed and weights alone. Checked at start."""
    start_version: int = Field(default=0, ge=0)
    """policy_version of the weights in model_path."""
    has_adapters: bool = False
    """Adapters will be published (publisher.transport=lora): memory for the weights under them is counted at start."""
    spare_path: str | None = None
    """File on disk for weights that came in several chunks, written when they go to sleep: wake with restore reads it again, if a
    handover fails. None = not written (a sleep costs nothing), and such weights must be pushed again."""
    max_queued: int = Field(default=100_000, ge=1)
    """Requests that may wait for a slot; one more is refused with 503."""
