"""Built-in functions as `module:function`, and recipes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.base.errors import ConfigError
from asyncrl.config import AlgorithmConfig, RunConfig

_ADVANTAGES, _LOSSES = "asyncrl.algorithms.advantages:", "asyncrl.algorithms.losses:"

BUILT_IN_ADVANTAGES = {
    name: _ADVANTAGES + name
    for name in "grpo grpo_sample lite_ppo dr_grpo rloo reinforce_pp reinforce_pp_baseline".split()
} | {
    "leave_one_out": _ADVANTAGES + "rloo",
    "gigpo": _ADVANTAGES + "gigpo",
    "gae": _ADVANTAGES + "gae",
}

WHOLE_BATCH = frozenset({"m2po"})
"""Corrections that need all tokens of an optimizer step."""

ALL_BEFORE = WHOLE_BATCH | {"age_clip"}
"""Corrections by how far a token has moved, for which a part of the way is not enough."""

WITHIN_RATIO = frozenset({_LOSSES + "vespo"})
"""Surrogates whose ratio includes the correction."""

# Only these read clip_delta; elsewhere the setting would silently do nothing.
_CLIPPED = frozenset({_LOSSES + "ppo_clip", _LOSSES + "gspo"})
AGE_AT_NO_PRICE = 2
"""Mean age of tokens, in versions, that costs no steps with a clip around the policy
that sampled them; age 4 costs 1.5 times the steps (docs/results/staleness.md).
"""
_CAP, _CAPS = 2.0, {"icepop": 5.0}
"""importance_cap for auto, by correction."""
ICEPOP_FLOOR = 0.5
"""Smallest importance weight that icepop keeps."""


@dataclass(frozen=True)
class Recipe:
    """Parts of a loss. `surrogate` and `advantage` are module:function."""

    surrogate: str
    ratio: Literal["behaviour", "proximal"] = "behaviour"
    correction: str = "none"
    aggregate: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
    advantage: str = BUILT_IN_ADVANTAGES["grpo"]


ELSEWHERE = {
    "grpo": "algorithm={loss: ppo_clip, advantage: grpo, aggregate: sequence}",
    "dr_grpo": "algorithm={loss: ppo_clip, advantage: dr_grpo, aggregate: constant}",
    "bnpo": "algorithm={loss: ppo_clip, advantage: grpo, aggregate: token}",
    "ppo": "algorithm={loss: ppo_clip, advantage: gae} and critic={}",
}
"""Names of TRL and verl that are several settings here."""
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
    "vespo": Recipe(_LOSSES + "vespo"),
    "age_clip": Recipe(_LOSSES + "ppo_clip", "proximal", "age_clip"),
    "m2po": Recipe(_LOSSES + "importance_ratio", "behaviour", "m2po"),
}


def resolve(config: AlgorithmConfig) -> Recipe:
    """Return the recipe of algorithm.loss with the config's overrides; module:function
    starts from defaults.

    Raises ConfigError for unknown names, contradictory settings, and a correction of a
    loss that has one.
    """
    # A loss of the user's starts from the plain defaults, and is trusted: it may
    # contain a ratio or a correction that nobody here knows.
    recipe = RECIPES.get(config.loss) or Recipe(
        _own(config.loss, "algorithm.loss", RECIPES)
    )
    advantage = BUILT_IN_ADVANTAGES.get(config.advantage)
    advantage = advantage or _own(
        config.advantage, "algorithm.advantage", BUILT_IN_ADVANTAGES
    )
    given = config.given("ratio", "correction", "aggregate")  # not auto
    chosen = {name: getattr(config, name) for name in given}
    recipe = replace(recipe, advantage=advantage, **chosen)
    _check_correction(config, recipe)
    delta = config.clip_delta
    if delta is not None and delta <= 1 + config.clip_high:
        raise _refused(
            f"algorithm.clip_delta={delta} is not above 1 + algorithm.clip_high = {1 + config.clip_high}",
            "the two-sided clip bounds ratios that the first clip allows",
            "raise algorithm.clip_delta, or remove it",
        )
    if (
        delta is not None
        and config.loss in RECIPES
        and recipe.surrogate not in _CLIPPED
    ):
        raise _refused(
            f"algorithm.clip_delta={delta} with loss={config.loss}",
            "this loss has no two-sided clip",
            "remove algorithm.clip_delta, or set algorithm.loss=ppo_clip",
        )
    return recipe


def slow_with_age(config: RunConfig) -> str:
    """Return the first loss that clips around the policy that sampled a token, or "". It
    learns more slowly from tokens older than AGE_AT_NO_PRICE.
    """
    for algorithm in config.all_algorithms:
        recipe = resolve(algorithm)
        if recipe.surrogate in _CLIPPED and recipe.ratio == "behaviour":
            return algorithm.loss
    return ""


def importance_cap(config: AlgorithmConfig, recipe: Recipe) -> float:
    cap = config.importance_cap
    return _CAPS.get(recipe.correction, _CAP) if cap == "auto" else cap


def _check_correction(config: AlgorithmConfig, recipe: Recipe) -> None:
    correction = recipe.correction
    # Interpolated logprobs exist only during the step, micro-batch by micro-batch.
    if correction in ALL_BEFORE and config.proximal == "interpolate":
        raise _refused(
            f"algorithm.proximal=interpolate with correction={correction}",
            "the correction needs the proximal logprobs of all tokens before the first step",
            "set algorithm.proximal=recompute",
        )
    cap = importance_cap(config, recipe)
    if correction == "icepop" and cap < ICEPOP_FLOOR:
        raise _refused(
            f"algorithm.importance_cap={cap} is below icepop's smallest weight, {ICEPOP_FLOOR}",
            "icepop would mask every token",
            "raise algorithm.importance_cap",
        )
    # m2po is allowed with a ratio to the behaviour policy: it only masks, with weights
    # 0 and 1, and counts nothing twice.
    has_ratio = config.loss in RECIPES and recipe.surrogate != _LOSSES + "reinforce"
    if (
        has_ratio
        and recipe.ratio == "behaviour"
        and correction not in {"none", *WHOLE_BATCH}
    ):
        raise _refused(
            f"algorithm.loss={config.loss} with ratio=behaviour and correction={correction}",
            "its ratio is taken to the behaviour policy, so a correction would weigh stale data twice",
            "set algorithm.ratio=proximal, or algorithm.correction=none",
        )
    if recipe.surrogate in WITHIN_RATIO and correction not in {
        "none",
        "tis",
        "mis",
        "icepop",
    }:
        raise _refused(
            f"algorithm.loss={config.loss} with correction={correction}",
            "it multiplies the weights of a sequence's tokens, so each token needs a separate weight",
            "set algorithm.correction to none, tis, mis or icepop",
        )


def _own(name: str, key: str, known: Iterable[str]) -> str:
    module, _, function = name.partition(":")
    if module and function:
        return name
    rule = "it is a built-in name, or a function of your own as module:function"
    way_out = f"name one of {', '.join(known)}"
    if name in ELSEWHERE:
        way_out = f"write {ELSEWHERE[name]}"
    elif name in {*RECIPES, *BUILT_IN_ADVANTAGES}:
        right = "loss" if name in RECIPES else "advantage"
        way_out = f"write algorithm.{right}={name} and remove {key}; {way_out}"
    raise _refused(f"{key}={name} is not known", rule, way_out)


def _refused(what: str, rule: str, way_out: str) -> ConfigError:
    return ConfigError(
        what, rule=rule, way_out=f"{way_out}; docs/algorithms.md has the recipes."
    )
