"""A pytest plugin of the contract tests of engine servers: one server of each kind for
all their modules.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract_servers import KINDS, Server, contract_server, contract_vllm


@pytest.fixture(scope="session", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Shared: a start takes seconds. pytest runs all stories of one kind, from all
    modules, one after the other.
    """
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    if kind != "vllm":
        with contract_server(kind, folder) as server:
            yield server
        return
    with contract_vllm(request.getfixturevalue("world"), folder) as server:
        yield server
