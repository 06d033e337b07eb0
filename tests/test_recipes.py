"""scripts/recipe.py: its recipes load, one runs on the CPU, and the code reward
executes tests.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import filter as matching
from pathlib import Path

import pytest
import recipe
from needed_extensions import skip_without

from asyncrl.config import load_config
from examples.code_tests import passes

SCRIPT = Path(recipe.__file__)
TINY = ["trainer.num_steps=2", "trainer.num_groups=2", "generator.workers=1"]


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_a_recipe_loads_and_its_page_names_it(name: str) -> None:
    one = recipe.RECIPES[name]
    skip_without(one.config)
    config = load_config(recipe.ROOT / one.config, one.settings)
    assert config.evals, "it is evaluated on held-out prompts"
    page = (recipe.ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert f"python scripts/recipe.py {name}\n" in page
    assert one.config in page


def test_the_page_of_cards_names_each_config() -> None:
    page = (recipe.ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    table = page.partition("## What ran on which card")[2].partition("\n## ")[0]
    patterns = re.findall(r"`configs/(\S+)`", table)
    names = {path.name for path in (recipe.ROOT / "configs").glob("*.yaml")}
    assert names == {name for one in patterns for name in matching(names, one)}


@pytest.mark.slow
def test_a_recipe_trains_and_writes_its_curve(tmp_path: Path) -> None:
    folders = ["--run-dir", str(tmp_path / "run"), "--out", str(tmp_path / "results")]
    subprocess.run([sys.executable, SCRIPT, "tools", *TINY, *folders], check=True)
    (path,) = (tmp_path / "results").glob("tools-*.json")
    kept = json.loads(path.read_text())
    assert [line["step"] for line in kept["training"]] == [1, 2]
    assert [line["policy_version"] for line in kept["held_out"]] == [0, 2]


@pytest.mark.parametrize(
    ("code", "is_right"),
    [
        ("def double(x): return 2 * x", True),
        ("def double(x): return x", False),
        ("raise SystemExit", False),
        ("import os; os._exit(0)", False),
        ("def double(x): return 2 * x\nbig = bytes(2**31)", False),
    ],
)
def test_only_code_that_passes_its_tests_earns(code: str, is_right: bool) -> None:
    assert (
        passes(code, ["", "assert double(2) == 4", "assert double(0) == 0"]) is is_right
    )
