"""A run that needs more connections than this machine gives is refused before it starts, with the numbers and what to write."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.placement import connections
from asyncrl.placement.connections import refuse_too_many_connections

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, int], None]:
    """Set the hard limit of descriptors and the number of ports."""

    def set_limits(descriptors: int, ports: int) -> None:
        (tmp_path / "range").write_text(f"1024\t{1023 + ports}\n")
        monkeypatch.setattr(connections, "PORT_RANGE", tmp_path / "range")
        monkeypatch.setattr(resource, "getrlimit", lambda _: (64, descriptors))

    return set_limits


def load(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def test_descriptors_are_counted_against_the_hard_limit(machine: Callable[[int, int], None]) -> None:
    config = load("quickstart", "rollout.slots=300", "rollout.num_engines=2")
    machine(856, 28232)
    refuse_too_many_connections(config)
    machine(855, 28232)
    with pytest.raises(ConfigError, match=r"may have 856 descriptors open \(600 for rollouts in flight, 256 for") as caught:
        refuse_too_many_connections(config)
    assert "this process may have 855" in caught.value.what
    assert caught.value.way_out.endswith("or write rollout.slots=299.")
    machine(855, 28232)
    refuse_too_many_connections(load("quickstart", "rollout.slots=299", "rollout.num_engines=2"))
    machine(100, 28232)
    with pytest.raises(ConfigError) as caught:
        refuse_too_many_connections(config)
    assert "or write" not in caught.value.way_out


def test_the_connections_of_a_gateway_are_lowered_before_the_rollouts(machine: Callable[[int, int], None]) -> None:
    machine(4096, 28232)
    with pytest.raises(ConfigError, match=r"gateway\.max_connections=8192") as caught:
        refuse_too_many_connections(load("agent"))
    written = caught.value.way_out.rpartition("write ")[2].rstrip(".")
    assert written.startswith("gateway.max_connections=")
    refuse_too_many_connections(load("agent", written))


def test_ports_are_counted_for_each_address(machine: Callable[[int, int], None]) -> None:
    machine(resource.RLIM_INFINITY, 28232)
    refuse_too_many_connections(load("quickstart", "rollout.slots=28232", "rollout.num_engines=2"))
    with pytest.raises(
        ConfigError, match="57000 rollouts in flight need 28500 connections to each engine, and this machine has 28232"
    ) as caught:
        refuse_too_many_connections(load("quickstart", "rollout.slots=28500", "rollout.num_engines=2"))
    assert caught.value.way_out.endswith("or write rollout.slots=28232.")
    with pytest.raises(ConfigError, match="30000 connections to the gateway") as caught:
        refuse_too_many_connections(load("agent", "generator.concurrency=30000"))
    assert caught.value.way_out.endswith("or write generator.concurrency=28232.")


def test_check_says_so(machine: Callable[[int, int], None]) -> None:
    machine(300, 28232)
    result = CliRunner().invoke(app, ["check", str(CONFIGS / "quickstart.yaml")])
    assert isinstance(result.exception, ConfigError)
    assert "descriptors open" in result.exception.what
