"""The engine kind `fixed`: start arguments and client of its servers."""

from __future__ import annotations

from asyncrl.engines.kinds import EngineMaker, ServerOrder, our_client
from asyncrl_tries.settings import LENGTH


def _spec(order: ServerOrder) -> dict[str, object]:
    return {
        "name": order.name,
        "slots": order.slots,
        "max_length": order.max_length,
        "vocab_size": 1 + max(order.tokenizer.vocabulary.values()),
        "num_tokens": LENGTH.of(order.config.rollout),
    }


MAKER = EngineMaker("asyncrl_tries.server", _spec, our_client)
