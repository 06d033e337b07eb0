"""The built-in functions as `module:function`, and the recipes made of them. They are imported where they
run, so torch is not imported here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.config import AlgorithmConfig
from asyncrl.errors import ConfigError

_ADVANTAGES, _LOSSES = "asyncrl.algorithms.advantages:", "asyncrl.algorithms.losses:"

BUILT_IN_ADVANTAGES = {
    "grpo": _ADVANTAGES + "grpo",
    "dr_grpo": _ADVANTAGES + "dr_grpo",
    "rloo": _ADVANTAGES + "rloo",
    "leave_one_out": _ADVANTAGES + "rloo",
    "reinforce_pp": _ADVANTAGES + "reinforce_pp",
    "reinforce_pp_baseline": _ADVANTAGES + "reinforce_pp_baseline",
}
"""algorithm.advantage by name."""

BUILT_IN_CORRECTIONS = ("tis", "tis_sequence", "mis", "mis_sequence", "icepop", "m2po")
"""algorithm.correction: functions of asyncrl/algorithms/corrections.py."""

WHOLE_BATCH = frozenset({"m2po"})
"""Corrections that must see all tokens of an optimizer step at once."""


@dataclass(frozen=True)
class Recipe:
    """What a loss is made of. `surrogate` and `advantage` are module:function, `correction` is one of
    BUILT_IN_CORRECTIONS or none.
    """

    surrogate: str
    ratio: Literal["behaviour", "proximal"] = "behaviour"
    correction: str = "none"
    aggregate: Literal["token", "sequence", "constant"] = "token"
    advantage: str = BUILT_IN_ADVANTAGES["grpo"]


RECIPES = {
    "ppo_clip": Recipe(_LOSSES + "ppo_clip"),
    "dapo": Recipe(_LOSSES + "ppo_clip"),
    "decoupled_ppo": Recipe(_LOSSES + "ppo_clip", "proximal", "tis"),
    "reinforce": Recipe(_LOSSES + "reinforce"),
    "tis": Recipe(_LOSSES + "reinforce", "proximal", "tis"),
    "mis": Recipe(_LOSSES + "reinforce", "proximal", "mis"),
    "icepop": Recipe(_LOSSES + "ppo_clip", "proximal", "icepop"),
    "cispo": Recipe(_LOSSES + "cispo"),
    "gspo": Recipe(_LOSSES + "gspo", aggregate="sequence"),
    "m2po": Recipe(_LOSSES + "importance_ratio", "behaviour", "m2po"),
}
"""algorithm.loss by name."""


def resolve(config: AlgorithmConfig) -> Recipe:
    """The recipe of algorithm.loss with what the config says otherwise. A module:function has the defaults of
    Recipe.

    Raises ConfigError for a name that is not known, for settings that contradict each other, and for a
    correction beside a built-in loss whose ratio already covers the way from the behaviour to the current
    policy: that way would be weighed twice.
    """
    recipe = RECIPES.get(config.loss) or Recipe(_own(config.loss, "algorithm.loss", RECIPES))
    chosen = {"ratio": config.ratio, "correction": config.correction, "aggregate": config.aggregate}
    recipe = replace(
        recipe,
        advantage=BUILT_IN_ADVANTAGES.get(config.advantage)
        or _own(config.advantage, "algorithm.advantage", BUILT_IN_ADVANTAGES),
        **{name: value for name, value in chosen.items() if value != "auto"},  # type: ignore[arg-type]
    )
    if recipe.correction in WHOLE_BATCH and config.proximal == "interpolate":
        raise _conflict(
            f"algorithm.proximal=interpolate beside correction={recipe.correction}",
            "it is made of all tokens before the first step, so their proximal logprobs have to be computed",
            "set algorithm.proximal=recompute",
        )
    if recipe.correction == "icepop" and config.importance_floor > config.importance_cap:
        raise _conflict(
            f"algorithm.importance_floor={config.importance_floor} is above "
            f"algorithm.importance_cap={config.importance_cap}",
            "icepop would mask every token",
            "set algorithm.importance_floor below it",
        )
    has_ratio = config.loss in RECIPES and recipe.surrogate != _LOSSES + "reinforce"
    if has_ratio and recipe.ratio == "behaviour" and recipe.correction not in {"none", *WHOLE_BATCH}:
        raise _conflict(
            f"algorithm.loss={config.loss} with ratio=behaviour and correction={recipe.correction} corrects "
            "twice for stale data",
            "its ratio is already taken to the behaviour policy",
            "set algorithm.ratio=proximal, or algorithm.correction=none",
        )
    return recipe


def _own(name: str, key: str, known: Iterable[str]) -> str:
    module, _, function = name.partition(":")
    if module and function:
        return name
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise _conflict(
        f"{key}={name} is not known",
        "it is a built-in name, or a function of your own as module:function",
        f"{hint}Name one of {', '.join(known)}",
    )


def _conflict(what: str, rule: str, way_out: str) -> ConfigError:
    return ConfigError(what, rule=rule, way_out=f"{way_out}; docs/algorithms.md has the recipes.")
