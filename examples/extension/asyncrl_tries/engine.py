"""The engine kind `fixed`: start arguments and client of its servers."""

from __future__ import annotations

from asyncrl.engines.kinds import ServerMaker, ServerOrder, our_client
from asyncrl_tries.settings import LENGTH


def _spec(order: ServerOrder) -> dict[str, object]:
    return {
        "name": order.name,
        "slots": order.role.slots,
        "max_length": order.role.max_length,
        "vocab_size": 1 + max(order.tokenizer.vocabulary.values()),
        "num_tokens": LENGTH.of(order.config.rollout),
    }


MAKER = ServerMaker("asyncrl_tries.server", _spec, our_client)
