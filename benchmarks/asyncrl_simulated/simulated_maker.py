"""The engine kind `simulated`: start arguments and client of its servers, and its check."""

from __future__ import annotations

import json
from collections.abc import Iterator

from asyncrl.config import RunConfig
from asyncrl.engines.kinds import ServerMaker, ServerOrder, our_client
from asyncrl_simulated.latency_model import LATENCIES


def _spec(order: ServerOrder) -> dict[str, object]:
    """A latency model that draws tokens from the model's vocabulary."""
    model = json.loads((order.model_path / "config.json").read_text(encoding="utf-8"))
    return {
        "name": order.name,
        "slots": order.role.slots,
        "max_length": order.role.max_length,
        "vocab_size": model.get("vocab_size") or model["text_config"]["vocab_size"],
        **LATENCIES.of(order.config.rollout).model_dump(mode="json"),
    }


MAKER = ServerMaker("asyncrl_simulated.simulated_engine", _spec, our_client)


def check_engine(config: RunConfig, tasks: object) -> Iterator[str]:
    if config.rollout.engine == "simulated":
        yield (
            "rollout.engine=simulated: tokens are drawn at random, rewards and weights mean nothing"
        )
