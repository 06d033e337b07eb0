"""Column vllm of docs/models.csv: vLLM's CPU build serves each type as its cell says."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
from model_served import forking, measure_push, measure_vllm
from model_table import VLLM, read_table, with_vllm

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]

TABLE = read_table()
SERVED = [name for name, row in TABLE.items() if row[VLLM] != "no"]
PER_RUN = 3
"""Cells of vLLM that a run of CI measures, besides a start of a minute."""
HYBRID = "granitemoehybrid"
"""Its Mamba2 layers read memory of a parameter that vLLM packs elsewhere."""


def chosen() -> list[str]:
    """Return the models that this run serves: in CI a few, by the commit."""
    number = os.environ.get("ASYNCRL_ROTATION", "")
    step = -(-len(SERVED) // PER_RUN)
    return SERVED[int(number) % step :: step] if number else SERVED


def computed() -> list[str]:
    """Return the chosen models that vLLM serves."""
    return [name for name in chosen() if TABLE[name][VLLM] in ("exact", "deviates")]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[socket.socket]:
    with forking(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.mark.parametrize("name", chosen())
def test_vllm_serves_and_takes_weights_as_the_table_says(
    name: str, forks: socket.socket
) -> None:
    torch.set_num_threads(1)
    expected = TABLE[name]
    assert with_vllm(expected, *measure_vllm(name, forks)) == expected, (
        f"python scripts/models.py {name!r} writes the row again"
    )


@pytest.mark.parametrize("name", sorted({HYBRID, *computed()}))
def test_push_in_bfloat16_has_the_effect_of_a_start(
    name: str, forks: socket.socket
) -> None:
    torch.set_num_threads(1)
    pushed, started = measure_push(name, forks)
    assert pushed == started
