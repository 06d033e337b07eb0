"""docs/models.csv says how each type of model is trained, served and adapted; each cell
is measured here.
"""

from __future__ import annotations

import pytest
import torch
from model_table import COLUMNS, measure, read_table, vllm_names
from model_zoo import TYPES
from transformers import CONFIG_MAPPING

VLLM = COLUMNS.index("vllm")


def test_table_has_every_model_of_the_zoo() -> None:
    table = read_table()
    assert {*table} == {*TYPES}
    assert len({row[0] for row in table.values()}) >= 85
    assert not [name for name, row in table.items() if {"wrong", "crashes"} & {*row}]


@pytest.mark.long
@pytest.mark.rotated
@pytest.mark.parametrize("name", [*TYPES])
def test_row_of_the_table_equals_its_measurement(name: str) -> None:
    if name.partition(" ")[0] not in CONFIG_MAPPING:
        pytest.skip("transformers does not know this type")
    torch.set_num_threads(1)
    row, expected = measure(name), read_table()[name]
    if not vllm_names():
        row[VLLM] = expected[VLLM]
    assert row == expected, "python scripts/models.py writes the table again"
