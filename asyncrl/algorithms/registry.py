"""The built-in functions as `module:function`, and the recipes made of them. They are imported where they
run, so torch is not imported here.
"""

from __future__ import annotations

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
"""algorithm.correction: functions of asyncrl/algorithms/losses.py."""

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
    advantage = BUILT_IN_ADVANTAGES.get(config.advantage)
    advantage = advantage or _own(config.advantage, "algorithm.advantage", BUILT_IN_ADVANTAGES)
    chosen = {"ratio": config.ratio, "correction": config.correction, "aggregate": config.aggregate}
    chosen = {name: value for name, value in chosen.items() if value != "auto"}
    recipe = replace(recipe, advantage=advantage, **chosen)  # type: ignore[arg-type]
    correction = recipe.correction
    if correction in WHOLE_BATCH and config.proximal == "interpolate":
        what = f"algorithm.proximal=interpolate beside correction={correction}"
        rule = (
            "it is made of all tokens before the first step, so their proximal logprobs have to be computed"
        )
        raise _refused(what, rule, "set algorithm.proximal=recompute")
    floor, cap = config.importance_floor, config.importance_cap
    if correction == "icepop" and floor > cap:
        what = f"algorithm.importance_floor={floor} is above algorithm.importance_cap={cap}"
        raise _refused(what, "icepop would mask every token", "lower algorithm.importance_floor")
    has_ratio = config.loss in RECIPES and recipe.surrogate != _LOSSES + "reinforce"
    if has_ratio and recipe.ratio == "behaviour" and correction not in {"none", *WHOLE_BATCH}:
        what = f"algorithm.loss={config.loss} with ratio=behaviour and correction={correction}"
        rule = "its ratio is taken to the behaviour policy, so a correction would weigh stale data twice"
        raise _refused(what, rule, "set algorithm.ratio=proximal, or algorithm.correction=none")
    return recipe


def _own(name: str, key: str, known: Iterable[str]) -> str:
    module, _, function = name.partition(":")
    if module and function:
        return name
    rule = "it is a built-in name, or a function of your own as module:function"
    raise _refused(f"{key}={name} is not known", rule, f"name one of {', '.join(known)}")


def _refused(what: str, rule: str, way_out: str) -> ConfigError:
    return ConfigError(what, rule=rule, way_out=f"{way_out}; docs/algorithms.md has the recipes.")
