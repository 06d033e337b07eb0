"""Column vllm of docs/models.csv: vLLM's CPU build serves each type as its cell says."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
from model_served import forking, measure_vllm
from model_table import VLLM, read_table, with_vllm

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]

TABLE = read_table()
SERVED = [name for name, row in TABLE.items() if row[VLLM] != "no"]
PER_RUN = 3
"""Cells of vLLM that a run of CI measures, besides a start of a minute."""


def chosen() -> list[str]:
    """Return the models that this run serves: in CI a few, by the commit."""
    number = os.environ.get("ASYNCRL_ROTATION", "")
    step = -(-len(SERVED) // PER_RUN)
    return SERVED[int(number) % step :: step] if number else SERVED


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
