"""docs/configuration.md says what the models say, docs/metrics.md what the gauges say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl.config.load import all_keys, describe_keys

ROOT = Path(__file__).resolve().parent.parent


def script(name: str = "config_reference") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config_reference", "metrics_reference"])
def test_a_generated_page_is_up_to_date(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script(name).main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_differs_is_refused_with_the_command_that_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert script().main(["--check", "--page", str(page)]) == 1
    assert script().main(["--page", str(page)]) == 0
    assert script().main(["--check", "--page", str(page)]) == 0
    page.write_text(page.read_text().replace("staleness", "freshness"))
    assert script().main(["--check", "--page", str(page)]) == 1
    assert "python scripts/config_reference.py" in capsys.readouterr().err


def test_every_key_has_a_row_with_a_meaning() -> None:
    rows = {line.split("`")[1]: line for line in script().page().splitlines() if line.startswith("| `")}
    sections = {
        "model",
        "task",
        "generator",
        "gateway",
        "rollout",
        "buffer",
        "trainer",
        "algorithm",
        "eval",
        "weight_sync",
        "placement",
        "observe",
        "checkpoint",
        "journal",
        "supervision",
    }
    assert rows.keys() == set(all_keys()) - sections
    for key, row in rows.items():
        assert len(row.replace("\\|", "/").split("|")) == 6, row
        assert row.replace("\\|", "/").split("|")[4].strip(), f"{key} has no docstring"


def test_a_section_has_no_default_of_its_own() -> None:
    row = next(line for line in script().page().splitlines() if line.startswith("| `rollout.simulated` |"))
    assert row.startswith("| `rollout.simulated` | section |  | ")
    assert "  rollout.simulated (section)\n" in describe_keys("rollout")
