"""Kinds of engines: of the core and of extensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from asyncrl.base.extensions import discover, extensions, load_place
from asyncrl.config.engine_facts import EngineCapabilities

ENGINES: dict[str, EngineCapabilities] = {
    "embedded": EngineCapabilities(
        settings=("fused_decode",),
        receives_transfers=True,
        keeps_asleep=True,
        keeps_turns=True,
        scores_texts=True,
        returns_routing=True,
        reports_supports=True,
        exact_on="cpu",
        kv_block=16,
        forward_tokens=1024,
        logit_copies=7,
    ),
}


def _add_engines() -> None:
    for name, extension in extensions().items():
        for kind, engine in extension.engines.items():
            if kind in ENGINES:
                discover().broken[name] = f"its engine {kind} has the name of another"
            else:
                ENGINES[kind] = load_place(engine.facts)


_add_engines()

if TYPE_CHECKING:
    EngineKind = str
else:
    EngineKind = Literal[tuple(ENGINES)]
    """Values of a setting. The type checker does not know the kinds of extensions."""


def engines_with(fact: str) -> str:
    """Return the kinds with a fact for a text, as `embedded or vllm`."""
    return " or ".join(name for name in ENGINES if getattr(ENGINES[name], fact))
