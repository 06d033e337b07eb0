"""Built-in functions as `module:function`, and recipes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.base.errors import ConfigError
from asyncrl.config import AlgorithmConfig

_ADVANTAGES, _LOSSES = "asyncrl.algorithms.advantages:", "asyncrl.algorithms.losses:"

BUILT_IN_ADVANTAGES = {
    name: _ADVANTAGES + name
    for name in "grpo grpo_sample lite_ppo dr_grpo rloo reinforce_pp reinforce_pp_baseline".split()
} | {"leave_one_out": _ADVANTAGES + "rloo"}


@dataclass(frozen=True)
class Recipe:
    """Parts of a loss. `surrogate` and `advantage` are module:function."""

    surrogate: str
    ratio: Literal["behaviour", "proximal"] = "behaviour"
    correction: str = "none"
    aggregate: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
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
    "luspo": Recipe(_LOSSES + "gspo", aggregate="sequence_sum"),
}


def resolve(config: AlgorithmConfig) -> Recipe:
    """Return the recipe of algorithm.loss with the config's overrides; module:function starts from
    defaults. Raises ConfigError for unknown names, and a correction of a loss that has one.
    """
    recipe = RECIPES.get(config.loss) or Recipe(_own(config.loss, "algorithm.loss", RECIPES))
    advantage = BUILT_IN_ADVANTAGES.get(config.advantage)
    advantage = advantage or _own(config.advantage, "algorithm.advantage", BUILT_IN_ADVANTAGES)
    chosen = {"ratio": config.ratio, "correction": config.correction, "aggregate": config.aggregate}
    chosen = {name: value for name, value in chosen.items() if value != "auto"}
    recipe = replace(recipe, advantage=advantage, **chosen)  # type: ignore[arg-type]
    has_ratio = config.loss in RECIPES and recipe.surrogate != _LOSSES + "reinforce"
    if has_ratio and recipe.ratio == "behaviour" and recipe.correction != "none":
        what = f"algorithm.loss={config.loss} with ratio=behaviour and correction={recipe.correction}"
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
