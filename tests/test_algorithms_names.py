"""The names lead to functions, the recipes are those of the papers, and combinations that count twice are
refused.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from algorithm_cases import function

from asyncrl.algorithms.registry import (
    BUILT_IN_ADVANTAGES,
    BUILT_IN_CORRECTIONS,
    RECIPES,
    WHOLE_BATCH,
    Recipe,
    resolve,
)
from asyncrl.config import AlgorithmConfig
from asyncrl.errors import ConfigError

SURROGATES = "asyncrl.algorithms.losses"


def test_every_built_in_name_leads_to_a_function() -> None:
    surrogates = [recipe.surrogate for recipe in RECIPES.values()]
    named = (f"asyncrl.algorithms.corrections:{name}" for name in BUILT_IN_CORRECTIONS)
    for name in (*BUILT_IN_ADVANTAGES.values(), *named, *surrogates):
        assert callable(function(name))
    assert set(BUILT_IN_CORRECTIONS) >= WHOLE_BATCH


def test_the_names_of_the_config_are_the_names_here() -> None:
    fields = AlgorithmConfig.model_fields
    for key, known in (("advantage", BUILT_IN_ADVANTAGES), ("loss", RECIPES)):
        assert f"({', '.join(known)})" in (fields[key].description or "")
    assert set(BUILT_IN_CORRECTIONS) | {"auto", "none"} == set(fields["correction"].annotation.__args__)  # type: ignore[union-attr]


def test_the_config_overrides_the_recipe_one_key_at_a_time() -> None:
    assert resolve(AlgorithmConfig(loss="gspo", aggregate="token")) == Recipe(f"{SURROGATES}:gspo")
    assert resolve(AlgorithmConfig(ratio="proximal", correction="mis_sequence")) == Recipe(
        f"{SURROGATES}:ppo_clip", "proximal", "mis_sequence"
    )
    assert (
        resolve(AlgorithmConfig(loss="decoupled_ppo", ratio="behaviour", correction="none"))
        == RECIPES["ppo_clip"]
    )


@pytest.mark.parametrize("loss", ["ppo_clip", "dapo", "cispo", "gspo", "m2po"])
@pytest.mark.parametrize("correction", ["tis", "tis_sequence", "mis", "mis_sequence", "icepop"])
def test_a_weight_beside_a_ratio_to_the_behaviour_policy_counts_twice_and_is_refused(
    loss: str, correction: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"loss={loss} with ratio=behaviour and correction={correction} corrects twice"
    ):
        resolve(AlgorithmConfig(loss=loss, correction=correction))
    assert (
        resolve(AlgorithmConfig(loss=loss, correction=correction, ratio="proximal")).correction == correction
    )


def test_a_mask_of_the_whole_step_beside_interpolated_logprobs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"proximal=interpolate beside correction=m2po"):
        resolve(AlgorithmConfig(loss="m2po", proximal="interpolate"))
    assert (
        resolve(AlgorithmConfig(loss="m2po", correction="none", proximal="interpolate")).correction == "none"
    )


def test_bounds_between_which_icepop_would_keep_no_weight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"importance_floor=3.0 is above algorithm.importance_cap=2.0"):
        resolve(AlgorithmConfig(loss="icepop", importance_floor=3.0))
    assert resolve(AlgorithmConfig(loss="tis", importance_floor=3.0)).correction == "tis"


def test_a_mask_beside_any_ratio_and_a_weight_beside_no_ratio_count_once() -> None:
    assert resolve(AlgorithmConfig(loss="ppo_clip", correction="m2po")).correction == "m2po"
    assert resolve(AlgorithmConfig(loss="reinforce", correction="icepop")).correction == "icepop"


def test_a_loss_of_ones_own_is_taken_as_it_is_named() -> None:
    assert resolve(AlgorithmConfig(loss="my.losses:mine")) == Recipe(
        "my.losses:mine", "behaviour", "none", "token"
    )
    assert resolve(AlgorithmConfig(loss="my.losses:mine", correction="tis")).correction == "tis"
    assert resolve(AlgorithmConfig(advantage="my.losses:mine")).advantage == "my.losses:mine"


@pytest.mark.parametrize("name", ["ppo", "a.module:", ":function"])
def test_a_name_that_is_not_known_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm.loss={name} is not known") as refused:
        resolve(AlgorithmConfig(loss=name))
    assert "Name one of ppo_clip, dapo, " in refused.value.way_out
    with pytest.raises(ConfigError, match=rf"algorithm.advantage={name} is not known"):
        resolve(AlgorithmConfig(advantage=name))


def test_the_names_are_there_without_torch() -> None:
    code = (
        "import sys, asyncrl.algorithms.registry; assert 'torch' not in sys.modules, 'names.py imports torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
