"""The names lead to functions, the recipes are those of docs/algorithms.md, and combinations that count twice
are refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from algorithm_cases import SETTINGS, function, numbered, tokens
from trl_trainers import Sampled, trl_loss

from asyncrl.algorithms.aggregate import token_weights
from asyncrl.algorithms.registry import BUILT_IN_ADVANTAGES, BUILT_IN_CORRECTIONS, RECIPES, Recipe, resolve
from asyncrl.config import AlgorithmConfig, RunConfig
from asyncrl.errors import ConfigError

PAGE = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
FUNCTIONS: dict[str, Any] = {}
exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)), FUNCTIONS)
PPO = "asyncrl.algorithms.losses:ppo_clip"


def test_every_built_in_name_leads_to_a_function_and_stands_in_the_config() -> None:
    surrogates = [recipe.surrogate for recipe in RECIPES.values()]
    named = (f"asyncrl.algorithms.corrections:{name}" for name in BUILT_IN_CORRECTIONS)
    for name in (*BUILT_IN_ADVANTAGES.values(), *named, *surrogates):
        assert callable(function(name))
    fields = AlgorithmConfig.model_fields
    for key, known in (("advantage", BUILT_IN_ADVANTAGES), ("loss", RECIPES)):
        assert f"({', '.join(known)})" in (fields[key].description or "")
    assert set(BUILT_IN_CORRECTIONS) | {"auto", "none"} == set(fields["correction"].annotation.__args__)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        ({"ratio": "proximal", "correction": "mis_sequence"}, Recipe(PPO, "proximal", "mis_sequence")),
        ({"loss": "decoupled_ppo", "ratio": "behaviour", "correction": "none"}, RECIPES["ppo_clip"]),
        ({"correction": "m2po"}, Recipe(PPO, "behaviour", "m2po")),
        ({"loss": "my.losses:mine", "correction": "tis"}, Recipe("my.losses:mine", correction="tis")),
        ({"advantage": "my.losses:mine"}, Recipe(PPO, advantage="my.losses:mine")),
    ],
)
def test_the_config_overrides_the_recipe_one_key_at_a_time(config: dict[str, Any], recipe: Recipe) -> None:
    assert resolve(AlgorithmConfig(**config)) == recipe


TWICE = "loss={loss} with ratio=behaviour and correction={correction} corrects twice"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({"loss": loss, "correction": correction}, TWICE.format(loss=loss, correction=correction))
            for loss, correction in (("ppo_clip", "tis"), ("cispo", "mis"), ("gspo", "icepop"))
        ),
        ({"loss": "m2po", "proximal": "interpolate"}, "proximal=interpolate beside correction=m2po"),
        (
            {"loss": "icepop", "importance_floor": 3.0},
            "importance_floor=3.0 is above algorithm.importance_cap",
        ),
        ({"loss": "ppo"}, "algorithm.loss=ppo is not known"),
        ({"advantage": ":function"}, "algorithm.advantage=:function is not known"),
    ],
)
def test_settings_that_contradict_each_other_and_unknown_names_are_refused(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(AlgorithmConfig(**config))


@pytest.mark.parametrize("block", BLOCKS)
def test_every_recipe_on_the_page_is_a_config(block: str) -> None:
    config = RunConfig.model_validate(
        {"model": {"path": "x"}, "task": {"reasoning_gym": "basic_arithmetic"}, **yaml.safe_load(block)}
    )
    resolve(config.algorithm)


def test_every_loss_has_a_recipe_on_the_page_and_its_row_says_what_it_is() -> None:
    shown = {yaml.safe_load(block)["algorithm"].get("loss") for block in BLOCKS}
    assert set(RECIPES) - {"reinforce"} <= shown
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    of_losses = {row[0]: row for row in rows if row[0] in RECIPES}
    assert list(of_losses) == list(RECIPES)
    for name, (_, _, ratio, correction, aggregate, _) in of_losses.items():
        recipe = RECIPES[name]
        assert (correction, aggregate) == (recipe.correction, recipe.aggregate)
        assert ratio == ("none" if recipe.surrogate.endswith(":reinforce") else recipe.ratio)


def test_the_loss_of_ones_own_on_the_page_is_sapo_as_trl_has_it() -> None:
    torch.manual_seed(0)
    lengths, count = [3, 5, 1, 8, 2, 6], 25
    proximal_M = -3 * torch.rand(count)
    current_M = (proximal_M + 0.3 * torch.randn(count)).requires_grad_()
    sampled = Sampled(lengths, torch.rand(6), current_M, proximal_M, proximal_M, proximal_M)
    args = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    theirs, _, advantage_B = trl_loss(sampled, loss_type="sapo", more_args=args)
    sequence_M = numbered(*lengths)
    loss_M, stats = FUNCTIONS["sapo"](
        current_M, proximal_M, proximal_M, advantage_B[sequence_M], sequence_M, SETTINGS
    )
    ours = (loss_M * token_weights("sequence", torch.tensor(lengths), 6, count, 8)[sequence_M]).sum()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert stats["ratio"].item() == pytest.approx((current_M - proximal_M).exp().sum().item())


def test_the_advantage_of_ones_own_on_the_page_favours_the_best_of_each_group() -> None:
    found = FUNCTIONS["best_of_group"](tokens(1, 3, 2, 0, 0), numbered(3, 2)).tolist()
    assert found == [-0.5, 0.5, -0.5, 0.5, 0.5]
