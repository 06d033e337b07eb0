"""The setting `rollout.simulated`, and the facts of the engine kind."""

from __future__ import annotations

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from asyncrl.base.errors import Message
from asyncrl.base.extensions import AddedField
from asyncrl.config.engine_facts import EngineCapabilities


class LatencyModel(Message):
    """rollout.engine=simulated."""

    # `asyncrl keys` prints them
    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    decode_step_s: PositiveFloat = 0.002
    """Seconds of a decode step, regardless of the number of sequences."""
    mean_tokens: float = Field(default=64.0, ge=1)
    """Mean length of a completion, lognormal; rollout.max_tokens cuts it."""
    kv_tokens: PositiveInt | None = None
    """Tokens that the KV cache holds; when it is full, the newest sequence leaves and is
    sampled again from its start (none = no limit).
    """
    sigma: NonNegativeFloat = 1.0
    """Sigma of the lognormal length (0 = all completions have mean_tokens)."""


LATENCIES = AddedField[LatencyModel](
    "simulated",
    LatencyModel,
    "Latencies and completion lengths of the simulated engine.",
    LatencyModel(),
)
FIELDS = (LATENCIES,)
FACTS = EngineCapabilities(settings=("simulated",), has_model=False)
