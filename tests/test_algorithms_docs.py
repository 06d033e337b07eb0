"""What docs/algorithms.md shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from algorithm_cases import SETTINGS, numbered, tokens
from trl_trainers import Sampled, trl_loss

from asyncrl.algorithms.aggregate import token_weights
from asyncrl.algorithms.registry import RECIPES, resolve
from asyncrl.config import RunConfig

PAGE = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
FUNCTIONS: dict[str, Any] = {}
exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)), FUNCTIONS)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_recipe_on_the_page_is_a_config(block: str) -> None:
    config = RunConfig.model_validate(
        {"model": {"path": "x"}, "task": {"reasoning_gym": "basic_arithmetic"}, **yaml.safe_load(block)}
    )
    resolve(config.algorithm)


def test_every_loss_has_a_recipe_on_the_page_and_its_row_says_what_it_is() -> None:
    shown = {yaml.safe_load(block)["algorithm"].get("loss") for block in BLOCKS}
    assert set(RECIPES) - {"reinforce"} <= shown
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]]
        for line in PAGE.splitlines()
        if line.startswith("| `")
    ]
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
    assert FUNCTIONS["best_of_group"](tokens(1, 3, 2, 0, 0), numbered(3, 2)).tolist() == [
        -0.5,
        0.5,
        -0.5,
        0.5,
        0.5,
    ]
