"""docs/models.csv says how each type of model is trained, served and adapted; each cell
is measured here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_table import VLLM, measure, read_table, vllm_names, with_vllm
from model_zoo import TYPES, make_config
from transformers import CONFIG_MAPPING

from asyncrl.config import ModelConfig
from asyncrl.launch.model_sizes import model_shape
from asyncrl.models.structure import find_structure
from asyncrl.models.support import find_support
from asyncrl.trainer.attention.forward_plan import probe_model

TABLE = read_table()


def test_table_has_every_model_of_the_zoo() -> None:
    assert {*TABLE} == {*TYPES}
    assert len({row[0] for row in TABLE.values()}) >= 85
    assert not [name for name, row in TABLE.items() if {"wrong", "crashes"} & {*row}]
    assert {row[VLLM] for row in TABLE.values()} == {
        "exact",
        "deviates",
        "refused",
        "no",
    }


@pytest.mark.slow
def test_check_knows_which_models_the_engine_serves_exactly(tmp_path: Path) -> None:
    """The keys of config.json say what the loaded model has."""
    checked, found = dict[str, bool](), dict[str, bool]()
    for name in TYPES:
        kind = name.partition(" ")[0]
        if all(row["embedded engine"] == "refused" for row in find_support(kind)):
            continue  # by `check` too
        config = make_config(name)
        (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
        model = probe_model(config.get_text_config(), torch.device("cpu"))
        kinds = [type(module).__name__ for module in model.modules()]
        has_experts = any(each.endswith("Experts") for each in kinds)
        found[name] = not has_experts and not find_structure(model).mixers
        checked[name] = not model_shape(ModelConfig(path=str(tmp_path))).inexact
    assert len(found) > 100
    assert checked == found


@pytest.mark.long
@pytest.mark.rotated
@pytest.mark.parametrize("name", [*TYPES])
def test_row_of_the_table_equals_its_measurement(name: str) -> None:
    if name.partition(" ")[0] not in CONFIG_MAPPING:
        pytest.skip("transformers does not know this type")
    torch.set_num_threads(1)
    row, expected = measure(name), TABLE[name]
    if vllm_names():
        assert (row[VLLM] == "no") == (expected[VLLM] == "no")
    without = with_vllm(expected, row[VLLM], "")
    assert row == without, "python scripts/models.py writes the table again"
