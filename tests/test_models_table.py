"""docs/models.csv says how each type of model is trained, served and adapted; each cell
is measured here.
"""

from __future__ import annotations

import pytest
import torch
from model_table import VLLM, measure, read_table, vllm_names, with_vllm
from model_zoo import TYPES
from transformers import CONFIG_MAPPING

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
