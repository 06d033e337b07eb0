"""docs/configuration.md says what the models say, docs/metrics.md what the gauges say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import config_reference
import metrics_reference
import pytest

from asyncrl.config.load import all_keys


@pytest.mark.parametrize("script", [config_reference, metrics_reference], ids=lambda script: script.__name__)
def test_a_generated_page_is_up_to_date(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_differs_is_refused_with_the_command_that_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert config_reference.main(["--check", "--page", str(page)]) == 1
    assert config_reference.main(["--page", str(page)]) == 0
    assert config_reference.main(["--check", "--page", str(page)]) == 0
    page.write_text(page.read_text().replace("staleness", "freshness"))
    assert config_reference.main(["--check", "--page", str(page)]) == 1
    assert "python scripts/config_reference.py" in capsys.readouterr().err


def test_every_key_has_a_row_with_a_meaning() -> None:
    lines = [line.replace("\\|", "/") for line in config_reference.page().splitlines()]
    rows = {line.split("`")[1]: line.split("|") for line in lines if line.startswith("| `")}
    sections = {key for key in all_keys() if "." not in key and key != "seed"}
    assert rows.keys() == set(all_keys()) - sections
    for key, cells in rows.items():
        assert len(cells) == 6, key
        assert cells[4].strip(), f"{key} has no docstring"
    assert rows["rollout.simulated"][2:4] == [" section ", "  "], "it has no default of its own"
