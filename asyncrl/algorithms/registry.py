"""The built-in functions as `module:function`, and the recipes made of them. Knows no torch: they are
imported where they run.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.config import AlgorithmConfig

_HERE = "asyncrl.algorithms"

BUILT_IN_ADVANTAGES = {
    "grpo": f"{_HERE}.advantages:grpo",
    "dr_grpo": f"{_HERE}.advantages:dr_grpo",
    "rloo": f"{_HERE}.advantages:rloo",
    "leave_one_out": f"{_HERE}.advantages:rloo",
    "reinforce_pp": f"{_HERE}.advantages:reinforce_pp",
    "reinforce_pp_baseline": f"{_HERE}.advantages:reinforce_pp_baseline",
}
"""algorithm.advantage by name."""

BUILT_IN_CORRECTIONS = {
    name: f"{_HERE}.corrections:{name}"
    for name in ("tis", "tis_sequence", "mis", "mis_sequence", "icepop", "m2po")
}
"""algorithm.correction by name."""

WHOLE_BATCH = frozenset({"m2po"})
"""Corrections that must see all tokens of an optimizer step at once."""

FUNCTIONS = {
    "token_weights": f"{_HERE}.aggregate:token_weights",
    "kl": f"{_HERE}.losses:kl",
    "kl_penalty": f"{_HERE}.losses:kl_reward_penalty",
    "interpolate": f"{_HERE}.losses:interpolate",
    "overlong_penalty": f"{_HERE}.advantages:overlong_penalty",
}
"""What every loss is used with."""


@dataclass(frozen=True)
class Recipe:
    """What a loss is made of. `surrogate` is module:function, `correction` a name of BUILT_IN_CORRECTIONS or
    none.
    """

    surrogate: str
    ratio: Literal["behaviour", "proximal"] = "behaviour"
    correction: str = "none"
    aggregate: Literal["token", "sequence", "constant"] = "token"


_PPO_CLIP = f"{_HERE}.losses:ppo_clip"
_REINFORCE = f"{_HERE}.losses:reinforce"

RECIPES = {
    "ppo_clip": Recipe(_PPO_CLIP),
    "dapo": Recipe(_PPO_CLIP),
    "decoupled_ppo": Recipe(_PPO_CLIP, "proximal", "tis"),
    "reinforce": Recipe(_REINFORCE),
    "tis": Recipe(_REINFORCE, "proximal", "tis"),
    "mis": Recipe(_REINFORCE, "proximal", "mis"),
    "icepop": Recipe(_PPO_CLIP, "proximal", "icepop"),
    "cispo": Recipe(f"{_HERE}.losses:cispo"),
    "gspo": Recipe(f"{_HERE}.losses:gspo", aggregate="sequence"),
    "m2po": Recipe(f"{_HERE}.losses:importance_ratio", "behaviour", "m2po"),
}
"""algorithm.loss by name."""

_MASKS = frozenset({"none", "m2po"})
"""Corrections that weigh no token by its probabilities."""


def resolve(config: AlgorithmConfig) -> Recipe:
    """The recipe of algorithm.loss with what the config says otherwise. A module:function has the defaults of
    Recipe.

    Raises ValueError for a loss that is not known, for settings that contradict each other, and for a
    correction beside a built-in loss whose ratio already covers the way from the behaviour to the current
    policy: that way would be weighed twice.
    """
    recipe = RECIPES.get(config.loss)
    if recipe is None:
        recipe = Recipe(_own(config.loss, "algorithm.loss", RECIPES))
    if config.ratio != "auto":
        recipe = replace(recipe, ratio=config.ratio)
    if config.correction != "auto":
        recipe = replace(recipe, correction=config.correction)
    if config.aggregate != "auto":
        recipe = replace(recipe, aggregate=config.aggregate)
    if recipe.correction in WHOLE_BATCH and config.proximal == "interpolate":
        raise ValueError(
            f"algorithm.proximal=interpolate beside correction={recipe.correction}: it is made of all tokens "
            f"before the first step, "
            "so their proximal logprobs have to be computed; set algorithm.proximal=recompute"
        )
    if recipe.correction == "icepop" and config.importance_floor > config.importance_cap:
        raise ValueError(
            f"algorithm.importance_floor={config.importance_floor} is above "
            f"algorithm.importance_cap={config.importance_cap}, so icepop "
            "would mask every token; set algorithm.importance_floor below it"
        )
    has_ratio = config.loss in RECIPES and recipe.surrogate != _REINFORCE
    if has_ratio and recipe.ratio == "behaviour" and recipe.correction not in _MASKS:
        raise ValueError(
            f"algorithm.loss={config.loss} with ratio=behaviour and correction={recipe.correction} corrects "
            f"twice for stale data: "
            "its ratio is already taken to the behaviour policy; set algorithm.ratio=proximal, or "
            "algorithm.correction=none"
        )
    return recipe


def resolve_advantage(name: str) -> str:
    """algorithm.advantage as module:function. Raises ValueError for a name that is not known."""
    return BUILT_IN_ADVANTAGES.get(name) or _own(name, "algorithm.advantage", BUILT_IN_ADVANTAGES)


def _own(name: str, key: str, known: Mapping[str, object]) -> str:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        close = difflib.get_close_matches(name, known, n=1)
        raise ValueError(
            f"{key}={name} is not known"
            + (f", did you mean {close[0]}?" if close else ";")
            + f" name one of {', '.join(known)}, or a function of your own as module:function"
        )
    return name
