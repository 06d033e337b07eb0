"""The launcher of this machine keeps the contract of launchers; test_several_hosts.py
has Ray's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launcher_contract
import pytest
from launcher_contract import STORIES, Stage, killed

from asyncrl.base.errors import ConfigError
from asyncrl.launch import fork_server
from asyncrl.launch.launchers import LocalLauncher, opened
from asyncrl.launch.machine import find_misfit, own_versions

pytestmark = pytest.mark.timeout(900)  # all stories, on a machine that is slow


@pytest.fixture(scope="module")
def forking() -> Iterator[fork_server.ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "kit"))
        with contextlib.closing(fork_server.ForkServer(["launched_child"])) as server:
            yield server


@pytest.mark.parametrize("is_forked", [False, True], ids=["started", "forked"])
@pytest.mark.parametrize("story", STORIES)
def test_local_launcher_keeps_the_contract(
    story: str,
    is_forked: bool,
    forking: fork_server.ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "kit"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t0ken")
    monkeypatch.setattr(fork_server, "current", forking if is_forked else None)
    launcher = LocalLauncher()
    (node,) = launcher.nodes
    asyncio.run(STORIES[story](Stage(launcher, node, 0, tmp_path)))  # type: ignore[arg-type]


def test_local_child_ends_with_a_killed_controller(tmp_path: Path) -> None:
    paths = os.pathsep.join(
        filter(None, [str(Path(__file__).parent / "kit"), os.environ.get("PYTHONPATH")])
    )
    command = [sys.executable, launcher_contract.__file__, "local", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": paths}
    killed(
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True), tmp_path
    )


@pytest.mark.extension("ray")
@pytest.mark.extras
def test_missing_ray_or_cluster_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(ConfigError, match="no Ray cluster at 127.0.0.1:1: ") as caught,
        opened("ray:127.0.0.1:1"),
    ):
        pass
    assert "`ray start --head`" in caught.value.way_out


def test_misfit_of_a_node_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.id"
    path.write_bytes(b"t0ken \xff")
    there = {str(path): "t0ken", __file__: ""}
    assert find_misfit("n1", there, own_versions()) is None
    lacking = {str(path): "other", str(tmp_path / "nothing"): "", str(tmp_path): ""}
    assert f"the node n1 does not see {', '.join(lacking)}, or" in str(
        find_misfit("n1", there | lacking, own_versions())
    )
    assert "'torch': '2.0'" in str(
        find_misfit("n1", there, own_versions() | {"torch": "2.0"})
    )
